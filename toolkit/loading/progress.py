"""Telling how far a load has come, at most ten times a second, and stopping it between two chunks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from toolkit.core.errors import CancelledError, ToolkitError
from toolkit.core.units import bytes_text

Progress = Callable[[int, int, str], None]
REPORTS_PER_S = 10


def check_cancel(cancel: Any) -> None:
    """ToolkitError for a `cancel` that is neither None nor something to set, like a threading.Event."""
    if cancel is not None and not hasattr(cancel, "is_set"):
        raise ToolkitError("a way to cancel", f"cancel={cancel!r:.80}", "Give a threading.Event, and set it to stop")


class Watch:
    """What a load calls after every chunk: counts bytes, shows them, and raises CancelledError once `cancel` is set.

    `progress`: True (a line on a terminal or under a notebook's cell), False, or a function of (done_bytes, total_bytes,
    tensor name).
    """

    def __init__(self, what: str, progress: bool | Progress, cancel: threading.Event | None) -> None:
        check_cancel(cancel)
        self.what, self.cancel, self.done, self.total = what, cancel, 0, 0
        self.show = progress if callable(progress) else _line(what) if progress and is_watched() else None
        self._last = float("-inf")

    def begin(self, total: int) -> None:
        """`total` bytes are to come."""
        self.total = total
        self.step(0, "")

    def step(self, n_bytes: int, name: str) -> None:
        """`n_bytes` more, of the tensor called `name`, are where they belong. Raises CancelledError."""
        self.done += n_bytes
        now = time.monotonic()
        if self.show is not None and (self.done == self.total or now - self._last >= 1 / REPORTS_PER_S):
            self._last = now
            self.show(self.done, self.total, name)
        if self.cancel is not None and self.cancel.is_set():
            found = f"it was cancelled after {bytes_text(self.done)} of {bytes_text(self.total)}"
            raise CancelledError(f"loading {self.what}", found, "Its memory was given back; load it again at will")


def is_watched() -> bool:
    """Is there a terminal, or a notebook's kernel that shows what is written to stderr?"""
    stream = sys.stderr
    return stream is not None and (stream.isatty() or type(stream).__module__.partition(".")[0] == "ipykernel")


def _line(what: str) -> Progress:
    """A line that is written over."""

    def show(done: int, total: int, name: str) -> None:
        share = 100 * done // total if total else 100
        text = f"Loading {what}: {share:3d} % of {bytes_text(total)}  {name}"
        sys.stderr.write(f"\r{text[:100]:<100}" + ("\n" if done == total else ""))
        sys.stderr.flush()

    return show
