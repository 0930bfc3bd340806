"""The Lab's running work: one thread, and one bar above the tabs with its share, its time and Cancel.

Widgets don't respond while a cell runs, so work runs in a thread. Only one piece of work runs at a time. Its errors are shown
in the panel that began it. Of several Labs, one at a time loads or generates.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from html import escape
from typing import Any

import ipywidgets as widgets

from toolkit.core.errors import CancelledError, with_causes
from toolkit.ui.comms import use_one_thread
from toolkit.ui.lab.fields import error_html
from toolkit.ui.progress import ProgressBar

UPDATES_PER_S = 8  # front ends drop messages that come much faster
_TICK_S = 0.5  # between two updates of the elapsed time
_device = threading.Lock()  # held by the Lab that loads or generates


class Work(ProgressBar):
    """The bar and its thread. `changed(idle)` is called when work begins and ends; `explain()` returns HTML below an error."""

    def __init__(self, changed: Callable[[bool], None], explain: Callable[[], str]) -> None:
        self.error: BaseException | None = None
        self.cancelled = threading.Event()
        self.stopped = False  # set by work that Cancel has stopped and that keeps a part of its results
        self._changed, self._explain = changed, explain
        self._worker: threading.Thread | None = None
        self._running, self._ended = False, threading.Event()  # set when the work has ended, before its end is shown
        self._after: tuple[Any, ...] | None = None  # arguments of a `run` since then
        self._start, self._next = threading.RLock(), 0.0
        super().__init__(self.cancel)
        use_one_thread(self.cancel_button)
        self.rest()

    @property
    def busy(self) -> bool:
        """Whether work is running."""
        return self._running

    def run(self, title: str, work: Callable[[], None], status: widgets.HTML, alone: bool = False) -> None:
        """Run `work` in a thread, shown as `title`. An error is shown in `status`. Does nothing if other work is running.

        If other work has ended, but its end is still being shown, `work` begins after that. Work that runs `alone` waits for
        that of other Labs: they would mix their times and events on one device.
        """
        with self._start:
            if self._running:
                if self._ended.is_set() and self._after is None:
                    self._after = title, work, status, alone
                return
            self.cancelled.clear()
            self._ended.clear()
            self.error, self.stopped, self._next = None, False, 0.0
            self.begin(title)
            worker = threading.Thread(target=self._guard, args=(work, status, alone), name=f"lab {title}", daemon=True)
            self._running = True
            worker.start()
            self._worker = worker  # `wait` can't join it before it has started
            self._changed(False)

    def cancel(self) -> None:
        """Cancel the running work at its next step, such as a token, a tensor or a compilation."""
        with self._start:
            if self._running and not self._ended.is_set() and not self.cancelled.is_set():
                self.cancelled.set()
                self.draw()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the running work has ended. Returns False if it still runs after `timeout_s` seconds."""
        while (worker := self._worker) is not None:
            worker.join(timeout_s)
            if worker is self._worker:  # else it has begun what was asked for meanwhile
                break
        return not self.busy

    def due(self) -> bool:
        """Return True at most UPDATES_PER_S times per second: whether the work should update its widgets."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + 1 / UPDATES_PER_S
        return True

    def _guard(self, work: Callable[[], None], status: widgets.HTML, alone: bool) -> None:
        """Run `work`. Show its error in `status`, and keep the exception."""
        how, clock = "done", threading.Thread(target=self._tick, args=(self._ended,), name="lab clock", daemon=True)
        clock.start()
        with ExitStack() as turn:  # until the end is shown: another Lab leaves a busy one its model
            try:
                if alone:
                    turn.enter_context(self._turn())
                work()
            except CancelledError as error:
                how, status.value = "cancelled", f"Cancelled. {escape(error.do)}."
            except BaseException as error:  # nothing above this thread would report it
                self.error, how = _without_frames(error), "failed"
                status.value = error_html(error) + self._explain()
            finally:
                with self._start:
                    self._ended.set()
                clock.join()  # it would draw over how the work ended
                self.rest("cancelled" if self.stopped and how == "done" else how)
                try:
                    self._changed(True)
                finally:
                    self._idle()

    def _idle(self) -> None:
        """Say that no work runs any more, and begin what was asked for since the work ended."""
        with self._start:
            self._running = False
            after, self._after = self._after, None
            if after is not None:
                self.run(*after)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait until no other Lab loads or generates."""
        while not _device.acquire(timeout=_TICK_S):
            self.share(0, phase="waiting for another Lab")
            if self.cancelled.is_set():
                raise CancelledError(self._title, "it was cancelled", "It was waiting for another Lab")
        try:
            yield
        finally:
            _device.release()

    def draw(self, note: str = "") -> None:
        """Show the share and the time, or that the work is being cancelled."""
        super().draw(note or ("Cancelling ..." if self.cancelled.is_set() else ""))

    def _tick(self, ended: threading.Event) -> None:
        while not ended.wait(_TICK_S):
            self.draw()


def _without_frames(error: BaseException) -> BaseException:
    """Return `error` without tracebacks, its causes' included. A traceback keeps the tensors of its frames alive."""
    for one in with_causes(error):
        one.__traceback__ = None
    return error
