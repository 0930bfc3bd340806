"""Per-thread state of the virtual GPU: the current stream and decode step, and the graph that is captured or replayed.

`install` makes the backward pass run on the thread that calls it, so that its stream, step and line are the caller's.

While a Python error leaves PyTorch's autograd engine, the engine's stream guard, whose destructor may not throw, asks Python
for the type of its device. Nothing in Python can be asked while an error is set. `keep` therefore takes the error over, and
`run_here` raises it. Signals wait for the next operation (`handle_signals`), as other C++ code of the engine that runs handlers
holds the graph for ever if one raises.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import graph

from toolkit.core.signals import signals_deferred
from toolkit.gpu import unheld

if TYPE_CHECKING:
    from toolkit.gpu.virtual.graph_modes import Capture, Replay

DEFAULT_STREAM = 0
_ENGINE = graph._engine_run_backward.__code__  # calls the autograd engine


class State(threading.local):
    """The state of one thread: its current stream, as on CUDA, and the decode step that its code belongs to.

    `graph` is set while the thread runs the work of a graph, to capture or to replay it. `from_tape` is set while it runs work
    that the host would launch from a tape. While a tensor is made like one that has no values (see `sizes_only`), one of
    `absent_from` bytes or more gets none either. `passes` counts the backward passes that run, one in a hook of another, and
    `failed` is the error that left the engine of the innermost one.
    """

    stream = DEFAULT_STREAM
    step = -1
    absent_from = math.inf
    from_tape = False
    passes = 0
    failed: BaseException | None = None
    graph: Capture | Replay | None = None


_here = State()


def here() -> State:
    """Return the state of this thread."""
    return _here


def keep(error: BaseException | None) -> bool:
    """Keep an error that leaves the autograd engine. Return False if no backward pass runs on this thread."""
    state = _here
    if state.passes:
        state.failed = error
    return state.passes > 0


def handle_signals() -> None:
    """Run the handlers of signals that have arrived during the backward pass that this thread runs, if any."""
    if _here.passes:
        signals_deferred.handle(_here.passes)


def finish(error: torch.OutOfMemoryError) -> None:
    """End the traceback of an error with the line that called PyTorch, as on CUDA, and name memory that no variable holds.

    If the error ends a backward pass, that is searched for after the pass, since signals wait until then.
    """
    error.__traceback__ = None
    if not _here.passes:
        unheld.name_in(error)


def called_by_engine() -> bool:
    """Return whether the autograd engine, or a gradient formula of PyTorch's, called the current operation."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_back is not None and frame.f_back.f_code is _ENGINE


def install() -> None:
    """Run every backward pass of this process on the thread that calls it.

    This also avoids an internal assertion: PyTorch starts one autograd thread per device with the first backward pass,
    and `vgpu` gets none if that pass runs before the virtual GPU is opened.
    """
    run = graph._engine_run_backward
    with torch.inference_mode(False), torch.enable_grad():  # the virtual GPU may be opened first in a block without gradients
        leaf = torch.zeros((), requires_grad=True)
        oldest = leaf.clone()

    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        state = _here
        outer, state.failed = state.failed, None
        failed = inside = None
        try:
            with signals_deferred, torch.autograd.set_multithreading_enabled(False):
                state.passes += 1
                try:
                    return run(*args, **kwargs)
                except BaseException as error:
                    # The engine keeps the tasks that are left of a failed pass in a queue that starts with the latest nodes. A
                    # pass over an older node drops them, and with them the graph and all that it holds.
                    run((oldest,), (torch.ones(()),), True, False, (leaf,), allow_unreachable=True)
                    failed = state.failed
                    if failed is None:
                        raise
                    inside = error.__traceback__ and error.__traceback__.tb_next
                finally:
                    state.passes -= 1
                    state.failed = outer
            raise failed
        except torch.OutOfMemoryError as full:
            if failed is not None:
                failed.__traceback__ = inside  # as on CUDA, without this frame and those of `dispatch`
            if not state.passes:
                unheld.name_in(full)
            raise
        finally:
            del failed, inside  # a reference cycle: the traceback has this frame

    graph._engine_run_backward = run_here
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]  # imported by name there
