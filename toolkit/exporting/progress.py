"""How far an export has come: phases, their seconds and the most memory each took; told as they go, stopped between steps."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from toolkit.core.progress import Reporter
from toolkit.gpu import host_memory as host
from toolkit.gpu.cuda.device import in_use
from toolkit.gpu.device import Device

SAMPLES_PER_S = 20  # of memory
STEP_BYTES = 8 << 20  # by which the host's memory has to change to be noted
POINTS = 200  # of a phase's curve

Progress = Callable[[str, float, str], None]


class Watch(Reporter):
    """Times the phases of an export, measures their memory, and reports (phase, share done, current item).

    `device` is the GPU whose memory is measured in addition to the host's.
    """

    def __init__(
        self, task: str, progress: bool | Progress, cancel: threading.Event | None, device: Device | None = None
    ) -> None:
        super().__init__(task, progress, cancel, "Existing files are unchanged; run it again to resume")
        self.phases: list[dict[str, Any]] = []
        self.pieces: list[dict[str, Any]] = []
        self.device = device
        self._phase = ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Run the block as one phase. Appends its seconds, and the peak of the host's and a CUDA GPU's memory, to `phases`."""
        self._phase, began, scope = name, time.perf_counter(), host.begin()
        sampler = Sampler(self.device)
        try:
            self.step(0.0, "", always=True)
            yield
        finally:
            sampled = sampler.end()
            host.end(scope)
        seconds = round(time.perf_counter() - began, 3)
        # The kernel updates its own peak late, by some pages per thread, so that it can be below a sample.
        peak = max(scope.peak_bytes, *(held for _, held, _ in sampled["curve"]))
        self.phases.append({"phase": name, "seconds": seconds, "host_peak_bytes": peak, **sampled})
        self.step(1.0, "", always=True)

    def step(self, share: float, item: str, always: bool = False) -> None:
        """Report that `share` of the phase is done and that `item` is next. Raises CancelledError."""
        position = f"{self._phase}, {100 * share:.0f} %"
        self.report((self._phase, share, item), position, item, always=always, end=always and share == 1.0)

    def bytes(self, total: int) -> Callable[[int, str], None]:
        """Return a function that adds n bytes to those done of `total`, and reports them."""
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
