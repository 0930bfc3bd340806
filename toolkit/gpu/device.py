"""The interface of a device: it runs PyTorch code, records events into a trace, and reports its memory and its clock.

`toolkit.gpu.opening.open_device` returns a device: a CUDA GPU, a virtual GPU or the CPU. All of them implement `Device`.
"""

from __future__ import annotations

import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from toolkit.core.blocks import block
from toolkit.core.errors import DeviceError, RecorderError, brief
from toolkit.core.flags import flag
from toolkit.core.signals import signals_deferred
from toolkit.trace.events import Trace

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from toolkit.gpu.catalogue import GpuSpec


_LAST_STEP = (1 << 31) - 1
_USE_A_GPU = 'Use "cuda" or "virtual:h200"'


@dataclass(frozen=True)
class Memory:
    """The memory of a device, in bytes. All are 0 for the CPU, whose memory isn't counted.

    Attributes:
        allocated_bytes: Allocated by live tensors.
        peak_bytes: The maximum of `allocated_bytes` since the device was opened or `Device.reset_peak` was called.
        reserved_bytes: Taken from the driver by the caching allocator.
        total_bytes: The memory of the GPU.
    """

    allocated_bytes: int
    peak_bytes: int
    reserved_bytes: int
    total_bytes: int


class Graph(ABC):
    """Work that was captured once and is launched as a whole. Get one from `Device.capture`."""

    nodes: int  # kernels, copies and memsets per launch

    @abstractmethod
    def replay(self) -> None:
        """Launch the work on the current stream, on the tensors that it used when it was captured."""

    @abstractmethod
    def free(self) -> None:
        """Free the memory of the graph. The work that it holds must have finished."""


class Loop(ABC):
    """A captured step that the device repeats, after one launch. Get one from `Device.capture_loop`."""

    nodes: int  # kernels, copies and memsets per iteration

    @abstractmethod
    def run(
        self, limit: int, ends: Collection[int], stop: Callable[[], bool], ahead: int | None = None, first: int = 1
    ) -> Iterator[tuple[int, int]]:
        """Launch the loop and yield (token, time in ns at which the host knew it) while the device goes on.

        The first token is the one in `token` at the launch. Each later one is computed by an iteration, which is marked as
        decode step `first`, `first` + 1, ... Yields at most `limit` tokens, which takes `limit` - 1 iterations. The device
        ends the loop itself after `limit` tokens or after a token of `ends`. The host calls `stop` between tokens and cancels
        the loop once it returns True; the device ends one or two steps later, and the tokens of these steps are not yielded.
        `ahead` limits how many tokens the device computes before the host has read them, at least 1; None means no limit.
        Closing the generator cancels the loop and waits for its end.

        The host reads tokens from mapped memory. That is neither a copy nor a wait for a stream.
        """

    @abstractmethod
    def free(self) -> None:
        """Free the memory of the loop, which must have ended."""


class Device(ABC):
    """A device that holds tensors and runs operations. Get one from `tk.device`.

    Attributes:
        name: The name of the device: "virtual:rtx-5090", "cuda:0", "cpu".
        torch: The `torch.device` to pass to PyTorch, as in `torch.ones(3, device=gpu.torch)` and `module.to(gpu.torch)`.
        spec: The entry of `tk.GPUS`; None for the CPU and for a GPU that is not in the catalogue.
        clock: "measured" or "modelled".
        graphs: Whether `capture` and `capture_loop` work.
    """

    name: str  # as the user wrote it: "virtual:rtx-5090", "cuda:0", "cpu"
    torch: torch.device  # the argument for `.to()`
    spec: GpuSpec | None  # None for the CPU and for a GPU that is not in the catalogue
    clock: str  # "measured" or "modelled"
    graphs = False  # whether `capture` and `capture_loop` work

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    def __copy__(self) -> Device:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Device:
        return self

    @abstractmethod
    def __reduce__(self) -> tuple[Callable[..., Device], tuple[object, ...]]:
        """Return a function that opens the device where it is unpickled, and its arguments."""

    @abstractmethod
    def start(self, *, lines: bool) -> None:
        """Start recording. Raises RecorderError if that is not possible now."""

    @abstractmethod
    def stop(self) -> Trace:
        """Stop recording, and return the events since `start`."""

    def meet(self) -> None:  # noqa: B027  # only modelled clocks do something
        """Level the clocks of all ranks, which have just waited for each other. Real clocks need nothing."""

    def step(self, step: int, name: str) -> AbstractContextManager[None]:
        """Return a context manager: events caused inside belong to decode step `step`, which is marked as `name`.

        On a virtual GPU, only events caused on this thread do. Raises RecorderError unless `step` is a whole number of at
        least 0 and `name` a str.
        """
        try:
            number = operator.index(step)
        except TypeError:
            number = -1
        if not 0 <= number <= _LAST_STEP or not isinstance(name, str):
            asked = f"marking step {brief(step)} with the name {brief(name)}"
            found = "this is no name" if 0 <= number <= _LAST_STEP else f"the number of a step is from 0 to {_LAST_STEP:,}"
            raise RecorderError(asked, found, 'Write device.step(3, "decode")')
        return self._mark(number, name)

    @abstractmethod
    def _mark(self, step: int, name: str) -> AbstractContextManager[None]:
        """Return the context manager of `step`."""

    @abstractmethod
    def sync(self) -> None:
        """Wait until the device has finished all queued work."""

    @abstractmethod
    def now_ns(self) -> int:
        """Return the time of this device's host clock in ns: the wall clock, or the virtual GPU's modelled clock."""

    @abstractmethod
    def memory(self) -> Memory:
        """Return the memory of the device as it is now."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset `memory().peak_bytes` to the bytes that are allocated now."""

    def sizes_only(self) -> AbstractContextManager[None]:
        """Return a context in which a virtual GPU creates tensors without values. Other devices have no such tensors."""
        return nullcontext()

    def from_tape(self) -> AbstractContextManager[None]:
        """Return a context manager for work that a GPU's host would launch from a tape (see `toolkit.ops.tape`).

        It only changes modelled times.
        """
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> Graph:
        """Return the launches of `work` as a graph, without running them.

        `work` must have run before, so that its kernels are compiled. It must only use tensors that live as long as the graph,
        and must write its results to them: every tensor has the same values after the capture as before. It must neither wait
        for the device nor read from it, nor depend on Python values that change from one run to the next. Raises DeviceError if
        the device has no graphs or the capture fails, and torch.OutOfMemoryError if there is no memory for its intermediate
        results, which stays reserved until `Graph.free`.
        """
        raise DeviceError("a captured step", f"{self.name} has no graphs", f"{_USE_A_GPU}, or a strategy without capture")

    def capture_loop(self, step: Callable[[], None], token: Tensor) -> Loop:
        """Return a loop of `step`, which writes the next token to `token` [1] int64; see `capture` and `Loop.run`."""
        raise DeviceError("a captured loop", f"{self.name} has no graphs", f"{_USE_A_GPU}, or a strategy without capture")

    def poll(self, token: Tensor) -> int:
        """Return the number in `token` [1] int64 as soon as the work queued before has computed it.

        On a GPU, a small kernel writes it to mapped memory, which the host polls. That is neither a copy nor a wait for a
        stream. Other devices copy it. Raises DeviceError for another tensor.
        """
        check_token_tensor("reading this token", token, self.torch)
        return int(token.item())

    @property
    def limit_bytes(self) -> int:
        """The bytes that the allocator may reserve: the argument of the last `limit`, or the GPU's total."""
        return self._limit_bytes or self.memory().total_bytes

    def limit(self, n_bytes: int | None) -> None:
        """Limit the allocator to `n_bytes`; None lifts the limit. Raises DeviceError on a device without an allocator."""
        self._set_limit(n_bytes)
        self._limit_bytes = n_bytes

    _limit_bytes: int | None = None

    def _set_limit(self, n_bytes: int | None) -> None:
        found = "this device has no caching allocator to limit"
        raise DeviceError(f"a memory budget on {self.name}", found, _USE_A_GPU)

    @block("with tk.record(device) as trace:")
    def record(self, *, lines: bool = True, exclusive: bool = False) -> Iterator[Trace]:
        """Record everything that runs on this device inside the `with` block. Read the trace after the block.

        `lines=True` also records the Python line that caused each event, which slows down the host code of a real GPU: use
        False to measure times. A recording inside another recording of the same device joins it: both traces then hold
        the events of the outer block. Other threads join it, too, unless it is `exclusive`, as the recording of a run of
        `tk.generate` is. If the block marks no steps, they are inferred from a repeating pattern of events, and
        `meta["steps_from"]` says so.
        Raises RecorderError if another profiler is active, if another thread has an exclusive recording, and if the recording
        that this one joined ended before it.
        """
        from toolkit.trace.assemble import with_guessed_steps, with_sources

        lines, exclusive = flag("lines", lines), flag("exclusive", exclusive)
        began, trace, thread = False, Trace.pending(), threading.get_ident()
        try:
            with signals_deferred, _changing:
                outer, owner = _recording.get(self.name, (None, None))
                others = exclusive and outer is None and any(each != thread for each in _unrecorded.get(self.name, ()))
                if others or owner not in (None, thread):
                    raise self._mixed()
                if outer is None:
                    self.start(lines=lines)
                    _recording[self.name], began = (trace, thread if exclusive else None), True
                    _recorded.add(self.torch.type)
            yield trace if outer is None else outer
            if outer is not None and self.recording is not outer:
                why = "the recording that it joined ended before it, so its last events are missing"
                raise RecorderError(f"recording {self.name}", why, "Wait for this thread inside of that `with` block")
        finally:
            if began:
                try:
                    found = self._end_recording()
                finally:
                    if self.recording is trace:  # an interrupt came first
                        self._end_recording()
                trace.fill(with_sources(with_guessed_steps(found)))

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Run work that has no recording of its own, as `tk.generate` with record=False does.

        Inside an outer recording, its events go to that recording. Raises RecorderError if another thread has an exclusive
        recording, and prevents other threads from starting one.
        """
        began, thread = False, threading.get_ident()
        try:
            with signals_deferred, _changing:
                if _recording.get(self.name, (None, None))[1] not in (None, thread):
                    raise self._mixed()
                _unrecorded.setdefault(self.name, []).append(thread)
                began = True
            yield
        finally:
            if began:
                with signals_deferred, _changing:
                    _unrecorded[self.name].remove(thread)

    def _mixed(self) -> RecorderError:
        found = "one thread records a run of its own while another one generates, and their events could not be told apart"
        do = "Use record=False in all threads, or put one `with tk.record(device)` around them"
        return RecorderError(f"recording {self.name}", found, do)

    def _end_recording(self) -> Trace:
        with signals_deferred, _changing:
            del _recording[self.name]
            return self.stop()

    @property
    def recording(self) -> Trace | None:
        """The trace that is being recorded, or None."""
        trace, _ = _recording.get(self.name, (None, None))
        return trace

    @property
    def recorded(self) -> bool:
        """Whether this process has recorded on a device of this kind, or is recording now."""
        return self.torch.type in _recorded


def check_token_tensor(asked: str, token: Tensor, device: torch.device) -> None:
    """Raise DeviceError unless `token` is a tensor [1] of int64 on `device`."""
    here = token.device.type == device.type and (token.device.index or 0) == (device.index or 0)
    if tuple(token.shape) != (1,) or str(token.dtype) != "torch.int64" or not here:
        found = f"it has shape {tuple(token.shape)} and dtype {token.dtype}, on {token.device}"
        raise DeviceError(asked, found, f"Give a tensor [1] of int64 on {device}")


_recorded: set[str] = set()  # kinds of devices, since CUPTI attaches to the process
_unrecorded: dict[str, list[int]] = {}  # per device name: the threads that generate without recording
# Per device name: the trace of the outermost open `record` block, and the thread that began it if only this thread may join.
_recording: dict[str, tuple[Trace, int | None]] = {}
_changing = threading.RLock()


def recorded_for_all() -> str | None:
    """Return the name of a device with an open recording that all threads join, or None: runs record themselves alone."""
    return next((name for name, (_, owner) in list(_recording.items()) if owner is None), None)


def not_recording(asked: str) -> RecorderError:
    """Return the error of a `stop` without a `start`."""
    return RecorderError(asked, "no recording is running", "Use `with tk.record(device) as trace:`")


def no_cuda(name: str, found: str) -> DeviceError:
    """Return the error of a request for a CUDA device that does not exist."""
    return DeviceError(f"device {name!r}", found, 'Use tk.device("virtual:h200"), which needs no GPU')
