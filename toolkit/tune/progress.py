"""Telling how far long work has come, at most ten times a second and always at its end, and stopping it between two steps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

from toolkit.core.errors import CancelledError, ToolkitError

Progress = Callable[[int, int, str], None]
REPORTS_PER_S = 10


class Steps:
    """Called after every step with (done, total, what): shows it, and raises CancelledError once `cancel` is set.

    `progress`: True (a line on a terminal or under a notebook's cell), False, or a function of the same three.
    """

    def __init__(self, what: str, progress: bool | Progress, cancel: threading.Event | None) -> None:
        if cancel is not None and not hasattr(cancel, "is_set"):
            raise ToolkitError("a way to cancel", f"cancel={cancel!r:.80}", "Give a threading.Event, and set it to stop")
        self.what, self.cancel = what, cancel
        self.show = progress if callable(progress) else self._line if progress and _is_watched() else None
        self._last = float("-inf")

    def __call__(self, done: int, total: int, what: str) -> None:
        now = time.monotonic()
        if self.show is not None and (done >= total or now - self._last >= 1 / REPORTS_PER_S):
            self._last = now
            self.show(done, total, what)
        if self.cancel is not None and self.cancel.is_set():
            found = f"it was cancelled after {done} of {total}"
            raise CancelledError(self.what, found, "What was found so far is kept; call it again to go on")

    def _line(self, done: int, total: int, what: str) -> None:
        """A line that is written over."""
        text = f"{self.what}: {done} of {total}  {what}"
        sys.stderr.write(f"\r{text[:120]:<120}" + ("\n" if done >= total else ""))
        sys.stderr.flush()


def _is_watched() -> bool:
    """Is there a terminal, or a notebook's kernel that shows what is written to stderr?"""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel")
