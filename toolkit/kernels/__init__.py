"""Triton kernels, one file per operation, each with its reference in plain PyTorch."""
