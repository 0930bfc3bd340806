"""Chrome JSON: traces of the PyTorch profiler, of other tools, and our own export."""
