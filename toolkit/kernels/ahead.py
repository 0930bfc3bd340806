# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
"""Ask for a part of the next matrix while a launch keeps only one multiprocessor busy.

Two norms in one launch before a product take 3 to 4 µs, in which the memory of the GPU could deliver 10 MB. So the launch gets
more blocks. They wait for the launch before it, as the norms do, and then ask for lines of the matrix to be loaded into the L2
cache (PTX prefetch.global.L2). Nobody waits for these lines, and no result depends on them. `docs/kernel_experiments.md` has
measurements.

Three things matter (measured on an H100, for gate and up in a layer of Gemma 4 31B, which takes 113.6 µs without). Blocks that
ask before the launch in front of the norms has ended may delay its last blocks: with 26 MB, 113.5 instead of 111.3 µs. The
lines are spread over the whole matrix, so that the product reads them from the cache while it reads those between them from
memory: with 12 MB, 112.4 instead of 113.5 µs with lines next to each other. The bulk instruction (cp.async.bulk.prefetch.L2) is
not used: it made the layer 4 µs slower, even for 400 KB, perhaps because a block ends only after the lines have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor
from triton.language.target_info import cuda_capability_geq

from toolkit.core.units import MiB
from toolkit.kernels.early import INTERPRETED, await_previous

LINE = 128  # bytes that an instruction asks for
RUN = 16  # lines next to each other
LINES = 512  # that a block asks for
SHARE = 5  # at most a fifth of the matrix
MOST_BYTES = 24 * MiB  # at most: half of the L2 cache of an H100 or H200


@dataclass(frozen=True)
class Asked:
    """What a launch asks for: of each `stride` runs of lines of a tensor with `lines` lines, one; with `blocks` blocks."""

    lines: int
    stride: int
    blocks: int


def asked_of(tensor: Tensor) -> Asked:
    """Return what to ask for of a contiguous tensor."""
    stride = max(SHARE, -(-tensor.nbytes // MOST_BYTES))
    return Asked(tensor.nbytes // LINE, stride, -(-tensor.nbytes // (stride * LINES * LINE)))


@triton.jit
def lines_of(block, stride, RUN: tl.constexpr, LINES: tl.constexpr):
    """Return the numbers of the lines that a block asks for: of each `stride` runs of RUN lines, those of the first."""
    i = block * LINES + tl.arange(0, LINES)
    return i // RUN * (stride * RUN) + i % RUN


@triton.jit
def ask_ahead(tensor_ptr, lines, stride, block, RUN: tl.constexpr, LINES: tl.constexpr):
    """Ask for the lines of one block. `tensor_ptr` points to `lines` lines of 128 bytes."""
    await_previous()
    line = lines_of(block, stride, RUN, LINES)
    if not INTERPRETED and cuda_capability_geq(9, 0):
        address = tensor_ptr.to(tl.int64) + line.to(tl.int64) * 128
        ask: tl.constexpr = "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
        tl.inline_asm_elementwise(ask, "=r,l,r", [address, (line < lines).to(tl.int32)], tl.int32, is_pure=False, pack=1)
