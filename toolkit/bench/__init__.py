"""Benchmarks to run on your own GPU. `results/` has our measurements."""
