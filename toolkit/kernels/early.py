# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
"""Launches that overlap (programmatic dependent launch, Hopper and later): the next begins while one's last blocks run.

For kernels launched with `Launch(early=True)`. Such a kernel may read before `await_previous` what no kernel here writes, a
matrix say; nothing else, and it writes nothing. Whatever wrote the matrix is done by then: a kernel that doesn't call
`let_next_begin` is finished, and its writes are seen, when the next begins (PTX ISA, griddepcontrol). Those that call it
do so once they have waited themselves or have read and written nothing, so that one launch at most is still to be waited for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def await_previous():
    """Until the launch before this one is done, and its writes are seen. At once where launches don't overlap."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_begin():
    """The launch after this one may begin, once all blocks have said so, if it was made with `early`."""
    if cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def take_turn():
    """Both, for a kernel that has nothing to do before its turn comes."""
    await_previous()
    let_next_begin()
