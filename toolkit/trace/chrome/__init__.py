"""Chrome JSON traces: reads those of PyTorch's profiler and other tools; writes and reads the toolkit's own export."""
