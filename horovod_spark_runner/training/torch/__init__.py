"""Training PyTorch modules."""
