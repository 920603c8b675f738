"""Train models of a framework: Keras and PyTorch behind one interface."""
