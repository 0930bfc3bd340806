"""How far an export has come: phases, their seconds and the most memory each took; told as they go, stopped between steps."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from toolkit.core.errors import CancelledError
from toolkit.gpu import host_memory as host
from toolkit.gpu.cuda.device import in_use
from toolkit.gpu.device import Device
from toolkit.loading.progress import REPORTS_PER_S, check_cancel, is_watched

SAMPLES_PER_S = 20  # of memory
STEP_BYTES = 8 << 20  # by which the host's memory has to change to be noted
POINTS = 200  # of a phase's curve

Progress = Callable[[str, float, str], None]


class Watch:
    """Tells how far it has come, at most ten times a second and at each phase's end; times phases; raises once cancelled.

    `device` is the one whose memory is watched beside the host's.
    """

    def __init__(
        self, what: str, progress: bool | Progress, cancel: threading.Event | None, device: Device | None = None
    ) -> None:
        check_cancel(cancel)
        self.what, self.cancel = what, cancel
        self.show = progress if callable(progress) else _line(what) if progress and is_watched() else None
        self.phases: list[dict[str, Any]] = []
        self.pieces: list[dict[str, Any]] = []
        self.device = device
        self._now, self._last = "", float("-inf")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One phase: its seconds, and the most of the host's and of a CUDA GPU's memory while it ran."""
        self._now, began, scope = name, time.perf_counter(), host.begin()
        sampler = Sampler(self.device)
        try:
            self.step(0.0, "", always=True)
            yield
        finally:
            sampled = sampler.end()
            host.end(scope)
        seconds = round(time.perf_counter() - began, 3)
        # the kernel's own peak lags behind what it says is resident, by some pages a thread
        most = max(scope.peak_bytes, *(held for _, held, _ in sampled["curve"]))
        self.phases.append({"phase": name, "seconds": seconds, "host_peak_bytes": most, **sampled})
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


class Sampler:
    """Memory in use from now to `end`, asked `SAMPLES_PER_S` times a second: of the host's by this process and
    those it started, and of a CUDA GPU's.

    What a GPU has in use is what its driver says, CUDA's own memory included: this process's, or the whole card's (`in_use`).
    """

    def __init__(self, device: Device | None) -> None:
        self.device = None if device is None or device.torch.type != "cuda" else device.torch
        self.curve: list[tuple[float, int, int]] = []
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
        self._began, self._ended = time.perf_counter(), threading.Event()
        self._sample()
        self._thread = threading.Thread(target=self._watch, name="toolkit-export-memory", daemon=True)
        self._thread.start()

    def end(self) -> dict[str, Any]:
        """The most, in bytes, and the curve: [seconds since it began, host bytes, GPU bytes] where they changed."""
        self._ended.set()
        self._thread.join()
        self._sample()
        found: dict[str, Any] = {"curve": _thinned(self.curve)}
        if self.device is not None:
            found["gpu_used_bytes"] = max(used for _, _, used in self.curve)
            found["gpu_used_by"] = "process" if in_use(self.device)[1] else "card"
            found["gpu_reserved_bytes"] = torch.cuda.max_memory_reserved(self.device)
        return found

    def _watch(self) -> None:
        while not self._ended.wait(1 / SAMPLES_PER_S):
            self._sample()

    def _sample(self) -> None:
        now, last = memory_now(self.device), self.curve[-1][1:] if self.curve else (0, 0)
        if now[1] != last[1] or abs(now[0] - last[0]) >= STEP_BYTES:
            self.curve.append((round(time.perf_counter() - self._began, 3), *now))


def _thinned(curve: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    """At most `POINTS` of a curve: of neighbours the one with the most, so that no peak is lost."""
    each = -(-len(curve) // POINTS)
    return [max(curve[i : i + each], key=lambda point: (point[2], point[1])) for i in range(0, len(curve), each)]


def memory_now(device: torch.device | None) -> tuple[int, int]:
    """Bytes of the host's memory that this process and those it started hold, and of a CUDA GPU's in use (0 without one)."""
    held = host.resident_bytes() + host.started_bytes()
    if device is None:
        return held, 0
    return held, in_use(device)[0]


def _line(what: str) -> Progress:
    """A line that is written over, one for each phase."""

    def show(phase: str, share: float, step: str) -> None:
        text = f"{what}: {phase} {100 * share:3.0f} %  {step}"
        sys.stderr.write(f"\r{text[:110]:<110}" + ("\n" if share == 1.0 else ""))
        sys.stderr.flush()

    return show
