"""Keep signals out of code that must not stop halfway: `with whole: ...`.

Python runs signal handlers between any two bytecodes of the main thread. A KeyboardInterrupt can therefore leave a data
structure half changed, and one that is raised inside a destructor or a weakref callback is printed and lost. Inside the block,
signals are only noted; their handlers run at its end.

C functions may also run handlers, and some C++ code ends the process if a handler raises there. After
`whole.wait_for(running)`, handlers also wait while the list `running` is not empty.
"""

from __future__ import annotations

import _signal  # the functions that `signal` wraps: without its conversion to enums, a block costs 1 µs instead of 15 µs
import signal
import sys
import threading
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable
from types import FrameType
from typing import Any

# An interrupt, a request to end, and an alarm: the signals whose handlers may raise.
_SIGNALS = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))


def _raise(number: int) -> None:
    """Raise a signal in the main thread, and end what the thread waits for, as the signal itself would."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        interrupt_main(number)  # type: ignore[arg-type]


class _Waiting:
    """A handler that waits while native code runs that must not see an error: until then, the signal is raised again."""

    def __init__(self, handler: Callable[[int, FrameType | None], object], running: list[Any]) -> None:
        self.handler, self.running = handler, running

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.running:
            # Raised here, the signal would be handled in this frame. A thread can't raise it before native code has returned.
            start_new_thread(_raise, (number,))
        else:
            self.handler(number, frame)


class Whole:
    """The type of `whole`, a context manager that may be entered inside itself.

    It does nothing on other threads than the main one, because signal handlers never run there, and leaves signals alone that
    no Python code handles.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._replaced: list[tuple[int, Any]] = []  # signals and their handlers, in the order of _SIGNALS
        self._noted: list[int] = []
        self._running: list[Any] | None = None

    def wait_for(self, running: list[Any]) -> None:
        """Let the handlers of signals wait while `running` is not empty, from the end of this block or of the next one.

        A handler that is installed later waits from the end of the next block.
        """
        self._running = running

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not self._depth:
            self._noted = []
            try:
                for number in _SIGNALS:
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        if self._running is not None and type(handler) is not _Waiting:
                            handler = _Waiting(handler, self._running)
                        self._replaced.append((number, handler))
                        _signal.signal(number, self._note)
            except BaseException:  # a signal that has not been replaced yet
                self._restore()
                raise
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        self._depth -= 1
        if not self._depth:
            self._restore()
            if self._noted:
                noted, self._noted = self._noted, []
                _handle(list(dict.fromkeys(noted)))

    @property
    def waits(self) -> bool:
        """Whether a signal has been noted and not handled yet."""
        return bool(self._noted)

    def _note(self, number: int, _: object) -> None:
        self._noted.append(number)

    def _restore(self) -> None:
        """Restore the handlers, SIGINT's last. A handler that is back may raise between any two of these calls."""
        try:
            while self._replaced:
                _signal.signal(*self._replaced[-1])
                self._replaced.pop()
        finally:
            if self._replaced:
                self._restore()


def _handle(numbers: list[int]) -> None:
    """Run the handlers of signals; one that raises keeps none of the others from running."""
    try:
        handler = _signal.getsignal(numbers[0])
        if callable(handler):
            handler(numbers[0], sys._getframe())
    finally:
        if numbers[1:]:
            _handle(numbers[1:])


whole = Whole()
