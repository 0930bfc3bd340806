"""A kernel that Triton can't compile."""

# mypy: allow-untyped-defs
import triton
import triton.language as tl


@triton.jit
def broken():
    tl.static_assert(False)
