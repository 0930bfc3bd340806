"""Report the progress of long work at most ten times a second and always at its end, and let it be cancelled between two steps.

Public functions pass on their parameters `progress=` (True shows a line on a terminal or a bar in a notebook, False shows
nothing, a function is called with the numbers) and `cancel=` (a `threading.Event`; the work raises CancelledError once it is
set). `Counter` reports (done, total, name); `Reporter` is for work that reports other values.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from toolkit.core.display import render
from toolkit.core.errors import CancelledError, ToolkitError, brief
from toolkit.core.flags import is_flag

REPORTS_PER_S = 10
_WIDTH = 110  # characters of the line on a terminal

Progress = Callable[[int, int, str], None]  # done, total, name of the last step


def check_cancel(cancel: object, error: type[ToolkitError] = ToolkitError) -> None:
    """Raise `error` unless `cancel` is an event, which need not be a threading.Event, or None."""
    if cancel is not None and (isinstance(cancel, type) or not hasattr(cancel, "is_set")):
        raise error(f"cancel={brief(cancel)}", "not a threading.Event", "Pass one, and call its set() to cancel")


class Reporter:
    """Passes reports on to `progress`, and raises CancelledError once `cancel` is set.

    `task` ("loading demo/qwen3") begins the line on a terminal and the message of CancelledError; `after_cancel` is the
    message's last sentence, which says what is left and what to do. Raises ToolkitError if `cancel` is not an event, or
    `progress` neither a bool (or None, which is as False) nor a function.
    """

    def __init__(
        self, task: str, progress: bool | Callable[..., None], cancel: threading.Event | None, after_cancel: str
    ) -> None:
        check_cancel(cancel)
        if progress is not None and not callable(progress) and not is_flag(progress):
            do = "Give True, False, or a function that is called with each report"
            raise ToolkitError(f"progress={brief(progress)}", f"it is of type {type(progress).__name__}", do)
        self.task, self.cancel, self._after_cancel = task, cancel, after_cancel
        self._call = progress if callable(progress) else None
        shows = bool(progress) and self._call is None
        self._bar = _bar(self) if shows and _in_notebook() else None
        self._shows_line = shows and self._bar is None and sys.stderr is not None and sys.stderr.isatty()
        self._last = float("-inf")

    def report(
        self, values: tuple[Any, ...], share: float, position: str, name: str, *, phase: str = "", always: bool = False,
        end: bool = False,
    ) -> None:  # fmt: skip
        """Report `values` to the function, or `position` ("3 of 40") and `name` on the terminal's line.

        A notebook shows a bar with the `share` of the work, or of its present `phase`.

        A report within 0.1 s of the last one is dropped, unless `always` or `end` is set. `end` marks the last report, which
        also ends the line. Raises CancelledError once `cancel` is set.
        """
        now = time.monotonic()
        if always or end or now - self._last >= 1 / REPORTS_PER_S:
            self._last = now
            if self._call is not None:
                self._call(*values)
            elif self._bar is not None:
                self._bar.show(share, phase, end)
            elif self._shows_line:
                text = f"{self.task[0].upper()}{self.task[1:]}: {position}  {name}"
                sys.stderr.write(f"\r{text[:_WIDTH]:<{_WIDTH}}" + ("\n" if end else ""))
                sys.stderr.flush()
        if self.cancel is not None and self.cancel.is_set():
            raise CancelledError(self.task, f"it was cancelled at {position}", self._after_cancel)


class Counter(Reporter):
    """Reports (done, total, name) of things that are counted: bytes, weights, configs. `unit` turns a count into text."""

    def __init__(
        self,
        task: str,
        progress: bool | Progress,
        cancel: threading.Event | None = None,
        after_cancel: str = "",
        unit: Callable[[int], str] = str,
    ) -> None:
        super().__init__(task, progress, cancel, after_cancel)
        self.done, self.total, self._unit = 0, 0, unit

    def begin(self, total: int) -> None:
        """Report that nothing of `total` is done yet."""
        self(0, total, "")

    def step(self, n: int, name: str) -> None:
        """Report that `n` more are done with the step called `name`. Raises CancelledError once `cancel` is set."""
        self(self.done + n, self.total, name)

    def __call__(self, done: int, total: int, name: str) -> None:
        """Report that `done` of `total` are done; `name` is the last step. Raises CancelledError once `cancel` is set."""
        self.done, self.total = done, total
        percent = 100 * done // total if total else 100
        position = f"{percent} %, {self._unit(done)} of {self._unit(total)}"
        self.report((done, total, name), done / total if total else 1.0, position, name, end=done >= total)


def _in_notebook() -> bool:
    """Return whether this is the main thread of a notebook's kernel, whose stderr would be shown below the cell."""
    in_kernel = type(sys.stderr).__module__.partition(".")[0] == "ipykernel"
    return in_kernel and threading.current_thread() is threading.main_thread()


def _bar(reporter: Reporter) -> Any:
    """Return the bar that a notebook shows, or None without ipywidgets."""
    try:
        return render("progress", reporter)
    except (ImportError, ToolkitError):
        return None
