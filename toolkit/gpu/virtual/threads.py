"""What the virtual GPU keeps per thread.

The backward pass runs on the thread that calls it, so that its stream, step and line are the caller's. Knows no card.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch.autograd import graph

DEFAULT_STREAM = 0


class State(threading.local):
    """Of one thread: the current stream, as CUDA keeps it, and the decode step whose host code runs."""

    stream = DEFAULT_STREAM
    step = -1


_here = State()


def here() -> State:
    """The state of this thread."""
    return _here


def install() -> None:
    """Let the backward pass run on the thread that calls it, in this process, from now on.

    PyTorch starts autograd's threads with the first backward pass, one for each device that there is by then. A process
    whose first one came before the virtual GPU has none for it, and a pass on `vgpu` would fail an internal assertion.
    """
    run = graph._engine_run_backward

    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.set_multithreading_enabled(False):
            return run(*args, **kwargs)

    graph._engine_run_backward = run_here
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]  # imported by name there
