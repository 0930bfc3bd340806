"""The interface of a device: it runs PyTorch code, records events into a trace, and reports its memory and its clock.

`toolkit.gpu.opening.open_device` returns a device: a CUDA GPU, a virtual GPU or the CPU. All of them implement `Device`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.core.errors import DeviceError, RecorderError
from toolkit.trace.events import Trace

if TYPE_CHECKING:
    import torch

    from toolkit.gpu.catalogue import GpuSpec


@dataclass(frozen=True)
class Memory:
    """Device memory in bytes: held by live tensors, the most that was, held by the caching allocator, on the card."""

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int


class Device(ABC):
    """A place where tensors live and run. Get one from `tk.device`."""

    name: str  # as the user asked for it: "virtual:rtx-5090", "cuda:0", "cpu"
    torch: torch.device  # what `.to()` takes
    spec: GpuSpec | None  # None for the CPU and for a card that isn't in the catalogue
    clock: str  # "measured" or "modelled"

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @abstractmethod
    def start(self, *, lines: bool) -> None:
        """Begin to record. Raises RecorderError where it can't."""

    @abstractmethod
    def stop(self) -> Trace:
        """End the recording that `start` began, and return its events."""

    @abstractmethod
    def step(self, step: int, name: str) -> AbstractContextManager[None]:
        """A scope: events that its host code causes belong to decode step `step`; leaves a mark called `name`."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until the device has done all that was queued."""

    @abstractmethod
    def now_ns(self) -> int:
        """This device's host clock in nanoseconds: the wall clock, or the virtual GPU's modelled one."""

    @abstractmethod
    def memory(self) -> Memory:
        """Memory of the device now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Let `memory().peak_bytes` start again from what is allocated now."""

    @property
    def limit_bytes(self) -> int:
        """How much memory the allocator may take: what `limit` set, else the card's."""
        return self._limit_bytes or self.memory().total_bytes

    def limit(self, n_bytes: int | None) -> None:
        """Let the allocator take at most `n_bytes`; None: as much as the card has."""
        self._set_limit(n_bytes)
        self._limit_bytes = n_bytes

    _limit_bytes: int | None = None

    def _set_limit(self, n_bytes: int | None) -> None:
        raise DeviceError(f"a memory budget on {self.name}", "it has no allocator to cap", 'Use "cuda" or "virtual:h200"')

    @contextmanager
    def record(self, *, lines: bool = True) -> Iterator[Trace]:
        """Record everything that runs on this device inside the `with` block; the trace is readable after it.

        `lines=True` also finds the Python line that caused each event, which slows a real GPU's host code; use False
        where the times matter. Inside another recording of the same device this joins the outer one: both traces then
        hold the outer block's events. Where nothing in the block says what a step is, steps are guessed from a pattern
        that repeats, and `meta["steps_from"]` says so. Raises RecorderError where another profiler is already active.
        """
        from toolkit.trace.assemble import with_guessed_steps

        outer = _recording.get(self.name)
        if outer is not None:
            yield outer
            return
        trace = _recording[self.name] = Trace.pending()
        _recorded.add(self.name)
        try:
            self.start(lines=lines)
            try:
                yield trace
            finally:
                trace.fill(with_guessed_steps(self.stop()))
        finally:
            del _recording[self.name]

    @property
    def recording(self) -> Trace | None:
        """The trace being recorded now, or None."""
        return _recording.get(self.name)

    @property
    def recorded(self) -> bool:
        """Was anything recorded on this device in this process, or is it being recorded now?"""
        return self.name in _recorded


_recorded: set[str] = set()
_recording: dict[str, Trace] = {}  # per device name: the trace of the outermost open `record` block


def not_recording(asked: str) -> RecorderError:
    """The error of a `stop` without a `start`."""
    return RecorderError(asked, "no recording runs", "Use `with tk.record(device) as trace:`")


def no_cuda(name: str, found: str) -> DeviceError:
    """The error of asking for a CUDA device that isn't there."""
    return DeviceError(f"device {name!r}", found, 'Use tk.device("virtual:h200"), which needs no GPU')
