# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Launches that overlap (programmatic dependent launch, Hopper and later): the next begins while one's last blocks run.

For kernels launched with `Launch(early=True)`. Every block calls `await_previous`; before that it writes nothing, and reads
what no kernel here writes: a matrix, say. Whatever else wrote the matrix is done by then: a kernel that doesn't call
`let_next_begin` is finished, and its writes are seen, when the next begins (PTX ISA, griddepcontrol). As every launch
waits for the one before it to be done, it has waited for all of them.

A kernel that calls `let_next_begin` after `await_previous` promises more: when the next begins, what was before *this*
launch is done. `moe` builds on that; a kernel that calls it first, having read and written nothing, doesn't promise it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def await_previous():
    """Until the launch before this one is done, and its writes are seen. At once where launches don't overlap."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin():
    """The launch after this one may begin, once all blocks have said so, if it was made with `early`."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def take_turn():
    """Both, for a kernel that has nothing to do before its turn comes."""
    await_previous()
    let_next_begin()
