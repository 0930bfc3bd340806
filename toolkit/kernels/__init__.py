"""Operations with a PyTorch reference and Triton launches, one file each. Nothing here chooses how to launch them."""
