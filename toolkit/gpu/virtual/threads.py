"""Per-thread state of the virtual GPU: the current stream and decode step, and the graph that is captured or replayed.

`install` makes the backward pass run on the thread that calls it, so that its stream, step and line are the caller's.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph

if TYPE_CHECKING:
    from toolkit.gpu.virtual.graph_modes import Capture, Replay

DEFAULT_STREAM = 0


class State(threading.local):
    """The state of one thread: its current stream, as on CUDA, and the decode step that its code belongs to.

    `graph` is set while the thread runs the work of a graph, to capture or to replay it. `from_tape` is set while it runs work
    that the host would launch from a tape. `copies_absent` is set while it copies
    a tensor that has no values (see `sizes_only`).
    """

    stream = DEFAULT_STREAM
    step = -1
    copies_absent = False
    from_tape = False
    graph: Capture | Replay | None = None


_here = State()


def here() -> State:
    """Return the state of this thread."""
    return _here


def install() -> None:
    """Run every backward pass of this process on the thread that calls it.

    This also avoids an internal assertion: PyTorch starts one autograd thread per device with the first backward pass,
    and `vgpu` gets none if that pass runs before the virtual GPU is opened.
    """
    run = graph._engine_run_backward

    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    graph._engine_run_backward = run_here
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]  # imported by name there
