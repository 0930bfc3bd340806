"""The real GPU: recording through CUPTI, and the history of CUDA's caching allocator."""
