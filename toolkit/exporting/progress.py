"""How far an export has come: phases, their seconds and the most memory each took; told as they go, stopped between steps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from toolkit.devices import host
from toolkit.errors import CancelledError
from toolkit.loading.progress import REPORTS_PER_S, is_watched

Progress = Callable[[str, float, str], None]


class Watch:
    """Tells how far it has come, at most ten times a second and at each phase's end; times phases; raises once cancelled."""

    def __init__(self, what: str, progress: bool | Progress, cancel: threading.Event | None) -> None:
        self.what, self.cancel = what, cancel
        self.show = progress if callable(progress) else _line(what) if progress and is_watched() else None
        self.phases: list[dict[str, Any]] = []
        self.pieces: list[dict[str, Any]] = []
        self._now, self._last = "", float("-inf")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase: its seconds, and the most of the host's memory while it ran."""
        self._now, began, scope = name, time.perf_counter(), host.begin()
        self.step(0.0, "", always=True)
        try:
            yield
        finally:
            host.end(scope)
        seconds = round(time.perf_counter() - began, 3)
        self.phases.append({"phase": name, "seconds": seconds, "host_peak_bytes": scope.peak_bytes})
        self.step(1.0, "", always=True)

    def step(self, share: float, what: str, always: bool = False) -> None:
        """`share` of the phase is done, `what` comes next."""
        now = time.monotonic()
        if self.show is not None and (always or now - self._last >= 1 / REPORTS_PER_S):
            self._last = now
            self.show(self._now, share, what)
        if self.cancel is not None and self.cancel.is_set():
            found = f"it was cancelled in the phase {self._now!r}"
            raise CancelledError(self.what, found, "What was there before is untouched; exporting again goes on from here")

    def bytes(self, total: int) -> Callable[[int, str], None]:
        """A function to tell of bytes that were done."""
        done = 0

        def step(n: int, name: str) -> None:
            nonlocal done
            done += n
            self.step(done / total if total else 1.0, name)

        return step


def _line(what: str) -> Progress:
    """A line that is written over, one for each phase."""

    def show(phase: str, share: float, step: str) -> None:
        text = f"{what}: {phase} {100 * share:3.0f} %  {step}"
        sys.stderr.write(f"\r{text[:110]:<110}" + ("\n" if share == 1.0 else ""))
        sys.stderr.flush()

    return show
