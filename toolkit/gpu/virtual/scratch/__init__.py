"""The temporary memory that CUDA's libraries allocate inside operations."""
