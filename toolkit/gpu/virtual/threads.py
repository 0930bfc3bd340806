"""Per-thread state of the virtual GPU: the current stream and decode step, and the graph that is captured or replayed.

`install` makes the backward pass run on the thread that calls it, so that its stream, step and line are the caller's.

A Python error must not pass through PyTorch's autograd engine: the engine's stream guard, whose destructor may not throw, asks
Python for the type of its device, and the process ends. `fails` therefore keeps the error of an operation that the engine
called, the engine gets a result that it can't use, and `run_here` raises the error that was kept. The same is done for hooks of
tensors and modules, and for hooks that return saved tensors, such as those of activation checkpointing (`keep_errors`).
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import _autograd
from torch.autograd import graph
from torch.utils.hooks import BackwardHook

from toolkit.core.signals import whole

if TYPE_CHECKING:
    from toolkit.gpu.virtual.graph_modes import Capture, Replay

DEFAULT_STREAM = 0


class State(threading.local):
    """The state of one thread: its current stream, as on CUDA, and the decode step that its code belongs to.

    `graph` is set while the thread runs the work of a graph, to capture or to replay it. `from_tape` is set while it runs work
    that the host would launch from a tape. `copies_absent` is set while it copies a tensor that has no values (see
    `sizes_only`). `backward` is the code that runs the innermost backward pass, and `failed` the first error of an operation
    that this pass called.
    """

    stream = DEFAULT_STREAM
    step = -1
    copies_absent = False
    from_tape = False
    backward: CodeType | None = None
    failed: BaseException | None = None
    graph: Capture | Replay | None = None


_here = State()
UNUSABLE = object()  # not a tensor: where C++ takes the result of an operation, or a saved tensor, it raises an error


def here() -> State:
    """Return the state of this thread."""
    return _here


def fails(error: BaseException) -> bool:
    """Keep an error of an operation; return whether the autograd engine called the operation, and must not see the error."""
    state = _here
    if state.backward is None or _caller_of_dispatch() is not state.backward:
        return False
    state.failed = error
    return True


def keep_errors(hook: Callable[..., Any], instead: Any = None) -> Callable[..., Any]:
    """Return a hook for the autograd engine that calls `hook`. It keeps errors as `fails` does, and returns `instead`."""

    @functools.wraps(hook)
    def called(*args: Any) -> Any:
        try:
            return hook(*args)
        except BaseException as error:
            if _here.backward is None:
                raise
            _here.failed = error
            return instead

    return called


def ends() -> bool:
    """Return whether a backward pass, whose engine called the current operation, has failed or is interrupted."""
    state = _here
    waits = whole.waits or state.failed is not None
    return waits and state.backward is not None and _caller_of_dispatch() is state.backward


def _caller_of_dispatch() -> CodeType | None:
    """Return the code that called PyTorch, which called `dispatch.run`, which called the caller of this function."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name in ("run", "__torch_dispatch__", "from_torch"):
        frame = frame.f_back  # type: ignore[assignment]
    return None if frame is None else frame.f_code


def called_by_engine() -> bool:
    """Return whether the autograd engine, or a gradient formula of PyTorch's, called the current operation."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "__torch_dispatch__":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_back is not None and frame.f_back.f_code is _here.backward


def install() -> None:
    """Run every backward pass of this process on the thread that calls it.

    This also avoids an internal assertion: PyTorch starts one autograd thread per device with the first backward pass,
    and `vgpu` gets none if that pass runs before the virtual GPU is opened.
    """
    run = graph._engine_run_backward
    leaf = torch.zeros((), requires_grad=True)
    oldest = leaf.clone()

    @functools.wraps(run)
    def run_here(*args: Any, **kwargs: Any) -> Any:
        state = _here
        outer = state.backward, state.failed
        try:
            state.backward, state.failed = run.__code__, None
            with whole, torch.autograd.set_multithreading_enabled(False):
                result = run(*args, **kwargs)
            failed, inside = state.failed, None
        except BaseException as error:
            failed, inside = state.failed, error.__traceback__ and error.__traceback__.tb_next
            # The engine keeps the tasks that are left of a failed pass in a queue that starts with the latest nodes. A pass
            # over an older node drops them, and with them the graph and all that it holds.
            run((oldest,), (torch.ones(()),), True, False, (leaf,), allow_unreachable=True)
            if failed is None or not isinstance(error, RuntimeError | TypeError):
                raise
        finally:
            state.backward, state.failed = outer
        if failed is None:
            return result
        try:
            raise failed
        except torch.OutOfMemoryError:
            failed.__traceback__ = inside  # as on CUDA, without this frame and those of `dispatch`
            raise
        finally:
            del failed, inside  # a reference cycle: the traceback has this frame

    init = BackwardHook.__init__

    def init_here(self: BackwardHook, module: torch.nn.Module, after: Any, before: Any) -> None:
        init(self, module, [*map(keep_errors, after)], [*map(keep_errors, before)])

    BackwardHook.__init__ = init_here  # type: ignore[assignment, method-assign]
    push = _autograd._push_saved_tensors_default_hooks

    def push_here(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        push(pack, keep_errors(unpack, UNUSABLE))

    _autograd._push_saved_tensors_default_hooks = push_here  # type: ignore[assignment]
    graph._engine_run_backward = run_here
    torch.autograd._engine_run_backward = run_here  # type: ignore[attr-defined]  # imported by name there
