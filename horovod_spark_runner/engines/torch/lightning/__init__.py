"""Modules of Lightning, trained without its Trainer; see [PyTorch](../../../../docs/torch.md)."""
