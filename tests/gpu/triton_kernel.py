"""A kernel that Triton launches through the driver, not the runtime."""

import triton
import triton.language as tl


@triton.jit
def add_one(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < n) + 1, mask=i < n)
