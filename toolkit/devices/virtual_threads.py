"""What the virtual GPU keeps per thread, and which line of Python a thread is at.

Autograd runs the backward pass on a thread of its own, which has no Python frame but ours: what happens there belongs to
the thread that called backward. Knows no card.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType

from toolkit.devices import base

DEFAULT_STREAM = 0


class State:
    """Of one thread: the current stream, as CUDA keeps it, and the decode step whose host code runs."""

    __slots__ = ("__weakref__", "engine", "step", "stream")

    def __init__(self) -> None:
        self.stream, self.step = DEFAULT_STREAM, -1
        self.engine = _line(sys._getframe(1)) is None  # is this one of autograd's own threads?


class _Here(threading.local):
    def __init__(self) -> None:
        self.state = _states[threading.get_ident()] = State()


_states: weakref.WeakValueDictionary[int, State] = weakref.WeakValueDictionary()
_library: dict[str, bool] = {}  # by file: is it torch's or the devices' own?


def here() -> State:
    """The state of this thread; on autograd's, that of the thread that called backward, where only one did."""
    state = _here.state
    if not state.engine:
        return state
    callers = _backward_callers()
    return _states.get(callers[0][0], state) if len(callers) == 1 else state


def caller() -> str | None:
    """ "file:line" of the Python that causes what happens now, as `base.caller`; on autograd's threads, of the backward call.

    Remembers what it learnt about each file: it is asked several times an operation.
    """
    where = _line(sys._getframe(1))
    if where is None and _here.state.engine:
        callers = _backward_callers()
        return _line(callers[0][1]) if len(callers) == 1 else None
    return where


def _backward_callers() -> list[tuple[int, FrameType]]:
    """Threads that wait in backward now, by identifier, and where they are."""
    return [(i, frame) for i, frame in sys._current_frames().items() if frame.f_code.co_name == "_engine_run_backward"]


def _line(frame: FrameType | None) -> str | None:
    while frame is not None:
        filename = frame.f_code.co_filename
        library = _library.get(filename)
        if library is None:
            library = _library[filename] = filename.startswith(base._library_prefixes())
        if not library:
            return f"{base.short_path(filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


_here = _Here()
