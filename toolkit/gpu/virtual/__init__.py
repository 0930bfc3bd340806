"""The virtual GPU: a PyTorch device that computes on the CPU and reports what a CUDA card would do."""
