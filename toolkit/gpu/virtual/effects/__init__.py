"""The kernels, copies and waits of each operation on a CUDA device."""
