"""Weights files: which tensors they hold, and their bytes one tensor at a time. Knows no model and no device."""
