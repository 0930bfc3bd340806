"""PyTorch's memory snapshots, read without unpickling them, and written."""
