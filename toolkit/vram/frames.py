"""Read the local variables of functions: from frames, and from the tracebacks of errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from toolkit.core.errors import with_causes

# Frames that hold the same values as the user's frames.
_MACHINERY = ("/IPython/", "/toolkit/gpu/", "/toolkit/vram/", "/toolkit/ui/")
_PYTEST = ("/_pytest/", "/execnet/")  # execnet runs the processes of pytest-xdist


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame, without keeping them alive.

    Before Python 3.13 a function's frame caches the dictionary that `f_locals` creates. The cache would keep values alive even
    after `del`, so it is cleared here, unless the user's code holds it (`d = locals()`) or added names to it (`exec`). Clearing
    it does not change the variables themselves.
    """
    names, code = frame.f_locals, frame.f_code
    found = dict(names)
    if code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        if sys.getrefcount(names) <= 3 and own.issuperset(found):  # held by the frame, by this function, and by getrefcount
            names.clear()
    return found


def of_frame(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the local variables of a user's function as ("x in f()", value)."""
    file = frame.f_code.co_filename.replace("\\", "/")
    if frame.f_code.co_name != "<module>" and not any(folder in file for folder in _MACHINERY):
        for name, value in locals_of(frame).items():
            yield f"{name} in {frame.f_code.co_name}()", value


def is_of_pytest(frame: FrameType) -> bool:
    """Return whether a frame is of pytest, whose variables lead to all tests that it has found."""
    file = frame.f_code.co_filename.replace("\\", "/")
    return any(folder in file for folder in _PYTEST)


def of_test(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the fixtures of the test that a frame of pytest calls, as variables of the test's function."""
    test: Any = locals_of(frame).get("pyfuncitem")
    for name, value in list(getattr(test, "funcargs", {}).items()):
        if name != "request":  # leads to all tests
            yield f"{name} in {test.originalname}()", value


def of_ended(held: FrameType | TracebackType) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's functions that have ended, of a frame or of all frames of a traceback."""
    running = {id(frame) for top in sys._current_frames().values() for frame in _callers(top)}
    for frame in (held,) if isinstance(held, FrameType) else _frames(held):
        if id(frame) not in running:
            yield from of_frame(frame)


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def of_traceback(error: BaseException | None) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's functions in the tracebacks of an error, its causes and groups, with names."""
    for one in with_causes(error):
        for frame in _frames(one.__traceback__):
            for name, value in of_frame(frame):
                yield f"{name} (the traceback of {type(one).__name__})", value
