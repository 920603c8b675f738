"""Training Keras models on TensorFlow."""
