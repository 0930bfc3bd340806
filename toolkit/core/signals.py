"""Keep signals out of code that must not stop halfway: `with signals_deferred: ...`.

Python runs signal handlers between any two bytecodes of the main thread. A KeyboardInterrupt can therefore leave a data
structure half changed, and one that is raised inside a destructor or a weakref callback is printed and lost. Inside the block,
signals are only noted; their handlers run at its end.

C functions may also run handlers, and some C++ code ends the process if a handler raises there. Python drops what a handler
raises in a destructor or in a callback of a weak reference, such as those of Python's and PyTorch's dictionaries, or of the
garbage collector (`gc.callbacks`). After `signals_deferred.wait_for(running, codes)`, handlers also wait while the list
`running` is not empty, while a function with one of these codes runs, and while a callback of the garbage collector runs. If
Python drops what a handler raised elsewhere, the signal is raised again (`sys.unraisablehook`). `signal.getsignal` and
`signal.signal` return the handlers themselves.
"""

from __future__ import annotations

import _signal  # the functions that `signal` wraps: without its conversion to enums, a block costs 1 µs instead of 15 µs
import functools
import gc
import signal
import sys
import threading
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import Any

# An interrupt, a request to end, and an alarm: the signals whose handlers may raise.
_SIGNALS = tuple(int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name))
_RAISED_BY = "_toolkit_signal"  # an error's attribute: the signal whose handler raised it


def _raise(number: int) -> None:
    """Raise a signal in the main thread, and end what the thread waits for, as the signal itself would."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, number)
    else:
        interrupt_main(number)  # type: ignore[arg-type]


class _Waiting:
    """A handler that waits while native code runs that must not see an error: until then, the signal is raised again."""

    def __init__(
        self, handler: Callable[[int, FrameType | None], object], running: list[Any], codes: Collection[CodeType]
    ) -> None:
        self.handler, self.running, self.codes = handler, running, codes

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.running or self._runs_one(frame):
            # Raised here, the signal would be handled in this frame. A thread can't raise it before native code has returned.
            start_new_thread(_raise, (number,))
            return
        try:
            self.handler(number, frame)
        except BaseException as error:
            vars(error)[_RAISED_BY] = number
            raise

    def _runs_one(self, frame: FrameType | None) -> bool:
        codes = {*self.codes, *(getattr(callback, "__code__", None) for callback in gc.callbacks)}
        while frame is not None:
            if frame.f_code in codes:
                return True
            frame = frame.f_back
        return False


def was_raised_again(dropped: sys.UnraisableHookArgs) -> bool:
    """Raise a signal again if Python has dropped what its handler raised, and return whether it has."""
    number = getattr(dropped.exc_value, _RAISED_BY, None)
    if number is not None:
        start_new_thread(_raise, (number,))
    return number is not None


def callbacks_of(*kinds: type) -> list[CodeType]:
    """Return the codes of the functions that the constructors of these classes define, such as callbacks of weak references."""
    constants = [each for kind in kinds for each in kind.__init__.__code__.co_consts]  # type: ignore[misc]
    return [each for each in constants if isinstance(each, CodeType)]


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, which returns a handler, so that it returns the handlers that users have installed."""

    @functools.wraps(function)
    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        handler = function(*args, **kwargs)
        if handler == signals_deferred._note:  # inside a block, such as in a hook of a backward pass
            handler = dict(signals_deferred._replaced).get(args[0] if args else kwargs["signalnum"])
        return handler.handler if type(handler) is _Waiting else handler

    return unwrapped


class SignalDeferral:
    """The type of `signals_deferred`, a context manager that may be entered inside itself.

    It does nothing on other threads than the main one, because signal handlers never run there, and leaves signals alone that
    no Python code handles.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._replaced: list[tuple[int, Any]] = []  # signals and their handlers, in the order of _SIGNALS
        self._noted: list[int] = []
        self._running: tuple[list[Any], Collection[CodeType]] | None = None

    def wait_for(self, running: list[Any], codes: Collection[CodeType]) -> None:
        """Let handlers wait while `running` is not empty, or one of `codes` runs, from the end of this block or the next.

        A handler that is installed later waits from the end of the next block.
        """
        if self._running is None:
            signal.getsignal, signal.signal = _unwrapped(signal.getsignal), _unwrapped(signal.signal)
            report = sys.unraisablehook
            sys.unraisablehook = lambda dropped: None if was_raised_again(dropped) else report(dropped)
        self._running = running, codes

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if not self._depth:
            try:
                for number in _SIGNALS:
                    handler = _signal.getsignal(number)
                    if callable(handler):
                        if self._running is not None and type(handler) is not _Waiting:
                            handler = _Waiting(handler, *self._running)
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
            try:
                self._restore()
            finally:
                self._handle()

    def handle(self, depth: int) -> None:
        """Run the handlers of the signals that have been noted, if `depth` blocks have been entered, before they end."""
        if self._noted and self._depth == depth and threading.get_ident() == threading.main_thread().ident:
            self._handle()

    def _note(self, number: int, _: object) -> None:
        self._noted.append(number)

    def _handle(self) -> None:
        """Run the handlers of noted signals, each once; one that raises keeps none of the others from running."""
        noted, self._noted = list(dict.fromkeys(self._noted)), []  # a handler may enter a block, which notes its own
        replaced = dict(self._replaced)
        handlers = []
        for number in noted:
            handler = _signal.getsignal(number)
            handlers.append((number, replaced.get(number) if handler == self._note else handler))
        self._run(handlers)

    def _run(self, handlers: list[tuple[int, Any]]) -> None:
        if handlers:
            number, handler = handlers[0]
            try:
                if callable(handler):
                    handler(number, sys._getframe())
            finally:
                self._run(handlers[1:])

    def _restore(self) -> None:
        """Restore the handlers, SIGINT's last. A handler that is back may raise between any two of these calls."""
        try:
            while self._replaced:
                number, handler = self._replaced[-1]
                if _signal.getsignal(number) == self._note:  # otherwise a handler that ran inside the block installed another
                    _signal.signal(number, handler)
                self._replaced.pop()
        finally:
            if self._replaced:
                self._restore()


signals_deferred = SignalDeferral()
