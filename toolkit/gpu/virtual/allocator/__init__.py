"""CUDA's caching allocator, reimplemented: segments, blocks, counters and settings."""
