"""Devices (CUDA, virtual, CPU), the catalogue of GPUs, recording, and the log of allocations."""
