"""Record which line of Python and which layer of a model runs when, so that a recorder can tell what caused a launch.

A `LineLog` records the time of every line outside of library code (as `core.callers` defines it), and of every return to such
a line. A launch belongs to the last line that its thread ran before it. This also covers operators (`x + y`, `x[3] = 7`,
`if x:`), which a profiler of function calls misses.

Python 3.12 and later: `sys.monitoring`, on all threads, switched off for library code after its first line. Python 3.11:
`sys.settrace`, on the thread that starts the log and on threads started later.
"""

from __future__ import annotations

import sys
import threading
from array import array
from collections.abc import Callable
from time import perf_counter_ns
from types import CodeType, FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.callers import is_library, short_path
from toolkit.core.current_layer import NO_LAYER, current_layer, listen, unlisten

_known_threads: dict[int, int] = {}  # native id -> CUPTI's id, of every thread that ever recorded
_LIMIT = 1 << 23  # lines kept per thread (128 MiB), so that a long Python loop does not exhaust the host's memory
_LINE_BITS = 24
_NOTHING = -1 << _LINE_BITS  # library code runs, below no other, or nothing was noted


class _Thread:
    """The log of one thread: times in ns (perf_counter), and the line that starts at each, packed as code << 24 | line.

    Layers have times of their own.
    """

    __slots__ = ("cupti_id", "layer_times", "layers", "times", "what")

    def __init__(self) -> None:
        self.cupti_id = know_thread()
        self.times, self.what = array("q"), array("q")
        self.layer_times, self.layers = array("q"), array("q")


def know_thread() -> int:
    """Return the calling thread's id as CUPTI reports it: the low half of its pthread id, signed.

    PyTorch's profiler replaces it by the native id of the first thread that had the same pthread id, which may have ended
    (pthread ids are reused). All pairs are therefore kept: they map such a native id back to the pthread id.
    """
    low = threading.get_ident() & 0xFFFFFFFF
    return _known_threads.setdefault(threading.get_native_id(), low - (1 << 32) if low >> 31 else low)


class LineLog:
    """Records lines and layers between `start` and `stop`; `where` and `layers` look them up.

    `problem` says why lines are missing, if any are.
    """

    def __init__(self) -> None:
        self.problem: str | None = None
        self._threads: dict[int, _Thread] = {}
        self._numbers: dict[int, int] = {}  # id of a code object outside of libraries -> its index in _codes
        self._codes: list[CodeType] = []  # keeps them alive, so that ids stay unique
        self._home = threading.get_ident()
        self._tool: int | None = None
        self._traced: list[FrameType] = []

    def start(self) -> None:
        """Start recording. Sets `problem` instead of raising if another tracer is active."""
        self._home = threading.get_ident()
        self._note_layer(current_layer())
        listen(self._note_layer)
        frame = self._innermost(sys._getframe(1))
        if frame is not None:
            self._note(self._numbers[id(frame.f_code)], frame.f_lineno)
        if sys.version_info >= (3, 12):
            self._start_monitoring()
        elif sys.gettrace() is not None:
            self.problem = "a debugger or a coverage tool traces this thread"
        else:
            self._start_tracing()

    def stop(self) -> None:
        """Stop recording. `where` and `layers` still work."""
        unlisten(self._note_layer)
        if self._tool is not None:
            sys.monitoring.set_events(self._tool, 0)  # type: ignore[attr-defined]
            sys.monitoring.free_tool_id(self._tool)  # type: ignore[attr-defined]
            self._tool = None
        if self._traced:
            sys.settrace(None)
            threading.settrace(None)
            for frame in self._traced:
                frame.f_trace = None
            self._traced.clear()

    def where(self, thread_ids: NDArray[np.int64], times_ns: NDArray[np.int64]) -> list[str | None]:
        """Return the "file:line" that ran on each thread at each time (perf_counter, ns), or None if it is not known.

        Threads are given by their native id or by CUPTI's id. A thread that runs library code only (a worker of autograd or of
        a pool) gets the line of the thread that started the log, which is waiting for it.
        """
        packed = self._look_up(thread_ids, times_ns, lambda thread: (thread.times, thread.what))
        kinds, inverse = np.unique(packed, return_inverse=True)
        texts = [self._text(code) for code in kinds.tolist()]
        return [texts[i] for i in inverse.tolist()]

    def layers(self, thread_ids: NDArray[np.int64], times_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the layer that ran on each thread at each time (perf_counter, ns), or `NO_LAYER`. See `where` for threads."""
        found = self._look_up(thread_ids, times_ns, lambda thread: (thread.layer_times, thread.layers))
        return np.maximum(found, NO_LAYER)

    def _look_up(
        self, thread_ids: NDArray[np.int64], times_ns: NDArray[np.int64], noted: Callable[[_Thread], tuple[Any, Any]]
    ) -> NDArray[np.int64]:
        """Return what was `noted`, (times, values), last before each time on each thread, or else on the one that began."""
        home = self._threads.get(self._home)
        by_id = {thread.cupti_id: thread for thread in self._threads.values()}
        found = np.full(len(times_ns), _NOTHING, np.int64)
        for thread_id in np.unique(thread_ids).tolist():
            for thread in (by_id.get(_known_threads.get(thread_id, thread_id)), home):
                rows = np.flatnonzero((thread_ids == thread_id) & (found == _NOTHING))
                began, what = map(np.array, ((), ()) if thread is None else noted(thread))
                if len(began):
                    at = np.searchsorted(began, times_ns[rows], side="right") - 1
                    found[rows] = np.where(at >= 0, what[at], _NOTHING)
        return found

    def _text(self, packed: int) -> str | None:
        if packed < 0:
            return None
        return f"{short_path(self._codes[packed >> _LINE_BITS].co_filename)}:{packed & (1 << _LINE_BITS) - 1}"

    def _number(self, code: CodeType) -> int | None:
        """Return the index of a code object, None for library code."""
        number = self._numbers.get(id(code))
        if number is None and not is_library(code.co_filename):
            number = self._numbers[id(code)] = len(self._codes)
            self._codes.append(code)
        return number

    def _innermost(self, frame: FrameType | None) -> FrameType | None:
        """Return the innermost frame, from `frame` outwards, that is not library code."""
        while frame is not None and self._number(frame.f_code) is None:
            frame = frame.f_back
        return frame

    def _note(self, number: int, line: int) -> None:
        thread = self._thread()
        if len(thread.times) < _LIMIT:
            thread.times.append(perf_counter_ns())
            thread.what.append(number << _LINE_BITS | line)
        else:
            self.problem = f"only the first {_LIMIT} lines were recorded"

    def _note_layer(self, layer: int) -> None:
        thread = self._thread()
        if len(thread.layers) < _LIMIT:
            thread.layer_times.append(perf_counter_ns())
            thread.layers.append(layer)

    def _thread(self) -> _Thread:
        thread = self._threads.get(threading.get_ident())
        if thread is None:
            thread = self._threads[threading.get_ident()] = _Thread()
            thread.layer_times.append(perf_counter_ns())
            thread.layers.append(current_layer())
        return thread

    def _note_return(self, frame: FrameType | None) -> None:
        """Record that a frame returned or yielded, so that its caller's line continues."""
        frame = self._innermost(frame)
        if frame is not None:
            self._note(self._numbers[id(frame.f_code)], frame.f_lineno or 0)
        else:
            self._note(-1, 0)  # library code runs below no other

    def _start_monitoring(self) -> None:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]
        free = [tool for tool in (4, 3, 2, 1) if monitoring.get_tool(tool) is None]
        if not free:
            self.problem = "all of Python's monitoring tool ids are in use"
            return
        self._tool = tool = free[0]
        monitoring.use_tool_id(tool, "toolkit")
        off, number, note, note_return = monitoring.DISABLE, self._number, self._note, self._note_return

        numbers, threads, ident = self._numbers, self._threads, threading.get_ident

        def line(code: CodeType, line_number: int) -> Any:  # runs for every line, so `_note` is inlined
            known, thread = numbers.get(id(code)), threads.get(ident())
            if known is not None and thread is not None and len(thread.times) < _LIMIT:
                thread.times.append(perf_counter_ns())
                thread.what.append(known << _LINE_BITS | line_number)
                return None
            known = number(code)
            if known is None:
                return off
            note(known, line_number)
            return None

        def left(code: CodeType, *_: Any) -> Any:
            if number(code) is None:
                return off
            note_return(sys._getframe(1).f_back)
            return None

        def unwound(code: CodeType, *_: Any) -> None:  # returning DISABLE is an error for this event
            if number(code) is not None:
                note_return(sys._getframe(1).f_back)

        def resumed(code: CodeType, *_: Any) -> Any:
            if number(code) is None:
                return off
            note_return(sys._getframe(1))
            return None

        events = monitoring.events
        callbacks = {
            events.LINE: line, events.PY_RETURN: left, events.PY_YIELD: left, events.PY_UNWIND: unwound,
            events.PY_RESUME: resumed,
        }  # fmt: skip
        for event, callback in callbacks.items():
            monitoring.register_callback(tool, event, callback)
        monitoring.set_events(tool, sum(callbacks))

    def _start_tracing(self) -> None:
        def entered(frame: FrameType, event: str, _: Any) -> Any:
            if self._number(frame.f_code) is None:
                return None
            inside(frame, event, None)
            return inside

        def inside(frame: FrameType, event: str, _: Any) -> Any:
            if event == "return":
                self._note_return(frame.f_back)
            elif event != "exception":
                self._note_return(frame)
            return inside

        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._number(frame.f_code) is not None:
                frame.f_trace = inside
                self._traced.append(frame)
            frame = frame.f_back
        threading.settrace(entered)
        sys.settrace(entered)
