"""Read the local variables of functions: from frames, and from the tracebacks of errors."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

# Frames that hold the same values as the user's frames.
_MACHINERY = ("/IPython/", "/toolkit/gpu/", "/toolkit/vram/", "/toolkit/ui/")


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


def of_traceback(error: BaseException | None) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's functions in the traceback of an error and of its causes, with their names."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            for name, value in of_frame(trace.tb_frame):
                yield f"{name} (the traceback of {type(error).__name__})", value
            trace = trace.tb_next
        error = error.__cause__ or error.__context__
