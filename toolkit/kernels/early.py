# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Overlapping launches (programmatic dependent launch, Hopper and later): a launch starts while the one before it finishes.

This is for kernels launched with `Launch(early=True)`. Every block calls `await_previous`; before that it writes nothing and
reads only data that no kernel here writes, such as a matrix. Other writers of that data have finished by then: a kernel that
doesn't call `let_next_begin` is complete, and its writes are visible, when the next one starts (PTX ISA, griddepcontrol). Since
every launch waits for the one before it, it has waited for all of them.

A kernel that calls `let_next_begin` after `await_previous` guarantees more: when the next launch starts, everything before
*this* launch is complete. `int4_matmul` does so, and the kernels after it rely on it: before they wait, `norms_rope`,
`kv_encode` and `attention` read positions, `attention` also the keys and values of earlier tokens, `delta_rule` what earlier
tokens left, and `moe` what its first launch wrote. A kernel that calls it first doesn't guarantee it, but the next launch,
which may wait for several, then loads its matrix during all of them.

Kernels that send their results to other ranks (`exchange`) must guarantee it, too. Before they wait, norms and `routing` read
how many results were received.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def await_previous():
    """Wait until the previous launch is complete and its writes are visible. Returns at once if launches don't overlap."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin():
    """Allow the next launch to start once all blocks have called this, if it was created with `early`."""
    if not INTERPRETED and cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def take_turn():
    """Call both, for a kernel that has nothing to do before its turn."""
    await_previous()
    let_next_begin()


@triton.jit
def after_previous(number):
    """Return `number`, an int32, once the previous launch is complete: as `await_previous`, for the body of a loop.

    The compiler moves the loads of a loop's first iterations ahead of the loop, unless the body calls `await_previous`. Here it
    does, because it sees only a number. So what must be loaded after the wait belongs into a branch that depends on the result.
    """
    if not INTERPRETED and cuda_capability_geq(9, 0):
        wait: tl.constexpr = "griddepcontrol.wait; mov.b32 $0, $1;"
        number = tl.inline_asm_elementwise(wait, "=r,r", [number], tl.int32, is_pure=True, pack=1)
    return number
