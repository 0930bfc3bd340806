"""How far an export has come: phases, their seconds and the most memory each took; told as they go, stopped between steps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from toolkit.devices import host
from toolkit.devices.base import Device
from toolkit.errors import CancelledError
from toolkit.loading.progress import REPORTS_PER_S, is_watched

SAMPLES_PER_S = 100  # of a GPU's memory

Progress = Callable[[str, float, str], None]


class Watch:
    """Tells how far it has come, at most ten times a second and at each phase's end; times phases; raises once cancelled."""

    def __init__(self, what: str, progress: bool | Progress, cancel: threading.Event | None) -> None:
        self.what, self.cancel = what, cancel
        self.show = progress if callable(progress) else _line(what) if progress and is_watched() else None
        self.phases: list[dict[str, Any]] = []
        self.pieces: list[dict[str, Any]] = []
        self.device: Device | None = None
        self._now, self._last = "", float("-inf")

    @contextmanager
    def on(self, device: Device) -> Iterator[None]:
        """Inside, phases are watched on this device too."""
        self.device = device
        try:
            yield
        finally:
            self.device = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase: its seconds, and the most of the host's and of a CUDA GPU's memory while it ran."""
        self._now, began, scope = name, time.perf_counter(), host.begin()
        card = None if self.device is None or self.device.torch.type != "cuda" else Card(self.device.torch)
        self.step(0.0, "", always=True)
        try:
            yield
        finally:
            host.end(scope)
            on_card = {} if card is None else card.end()
        seconds = round(time.perf_counter() - began, 3)
        self.phases.append({"phase": name, "seconds": seconds, "host_peak_bytes": scope.peak_bytes, **on_card})
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


class Card:
    """The most of a CUDA GPU's memory from now to `end`: what PyTorch's allocator reserved, and what the card's users had.

    The latter is what the driver says, asked `SAMPLES_PER_S` times a second; it includes CUDA's own and other processes'.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.used = device, 0
        self.curve: list[tuple[float, int]] = []
        torch.cuda.reset_peak_memory_stats(device)
        self._began, self._ended = time.perf_counter(), threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._watch, name="toolkit-export-memory", daemon=True)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        """Both, in bytes, and the curve: [seconds since it began, bytes in use] where that changed."""
        self._ended.set()
        self._thread.join()
        self._sample()
        reserved = torch.cuda.max_memory_reserved(self.device)
        return {"gpu_reserved_bytes": reserved, "gpu_used_bytes": self.used, "curve": self.curve}

    def _watch(self) -> None:
        while not self._ended.wait(1 / SAMPLES_PER_S):
            self._sample()

    def _sample(self) -> None:
        free, total = torch.cuda.mem_get_info(self.device)
        self.used = max(self.used, total - free)
        if not self.curve or self.curve[-1][1] != total - free:
            self.curve.append((round(time.perf_counter() - self._began, 3), total - free))


def _line(what: str) -> Progress:
    """A line that is written over, one for each phase."""

    def show(phase: str, share: float, step: str) -> None:
        text = f"{what}: {phase} {100 * share:3.0f} %  {step}"
        sys.stderr.write(f"\r{text[:110]:<110}" + ("\n" if share == 1.0 else ""))
        sys.stderr.flush()

    return show
