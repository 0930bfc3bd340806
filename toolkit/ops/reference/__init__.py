"""References in plain PyTorch of operations that several models share."""
