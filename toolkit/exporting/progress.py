"""Report the progress of an export: its phases, their seconds and peak memory. Cancelling takes effect at the next report."""

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
STEP_BYTES = 8 << 20  # smaller changes of the host's memory are not recorded
POINTS = 200  # maximum points of a phase's curve

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
        self._raised = 0  # the id of an error: a reference would be a cycle, which keeps the model

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
        """Report that `share` of the phase is done and that `item` is next. Raises CancelledError once `cancel` is set."""
        position = f"{self._phase}, {100 * share:.0f} %"
        ended = always and share == 1.0
        try:
            self.report((self._phase, share, item), share, position, item, phase=self._phase, always=always, end=ended)
        except OSError as error:
            self._raised = id(error)
            raise

    def raised(self, error: OSError) -> bool:
        """Return whether the function `progress` raised this error, and not a file of the export."""
        return id(error) == self._raised

    def count(self, done: int, total: int, name: str) -> None:
        """Report that `done` of `total` are done, as `tk.load` does for a download and then for the load."""
        self.step(done / total if total else 1.0, name)

    def bytes(self, total: int) -> Callable[[int, str], None]:
        """Return a function `step(n, name)` that counts n more of `total` bytes as done and reports the progress."""
        done = 0

        def step(n: int, name: str) -> None:
            nonlocal done
            done += n
            self.count(done, total, name)

        return step


class Sampler:
    """Samples memory in use until `end` is called: host memory of this process and its children, and memory of a CUDA GPU.

    GPU memory is the driver's figure for this process, or else for the whole card, and includes CUDA's own (see `in_use`).
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
        """Return the peaks in bytes, and the curve: [seconds since the start, host bytes, GPU bytes] at each change."""
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
    """Reduce a curve to at most `POINTS` points, and keep its peaks."""
    each = -(-len(curve) // POINTS)
    return [max(curve[i : i + each], key=lambda point: (point[2], point[1])) for i in range(0, len(curve), each)]


def memory_now(device: torch.device | None) -> tuple[int, int]:
    """Return host bytes in use by this process and its children, and bytes in use on a CUDA GPU (0 without one)."""
    held = host.resident_bytes() + host.started_bytes()
    if device is None:
        return held, 0
    return held, in_use(device)[0]
