"""CUDA GPUs and the CPU as devices.

A CUDA GPU records through PyTorch's profiler (CUPTI), which reports the device's events and the runtime calls that launched
them, while a `LineLog` records which Python line ran when. `events.read_events` joins both into a trace.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from itertools import count
from time import perf_counter_ns, time_ns
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from toolkit.core import distributed
from toolkit.core.callers import current_cell
from toolkit.core.errors import DeviceError, RecorderError
from toolkit.core.units import plural
from toolkit.gpu.allocation_log import log
from toolkit.gpu.catalogue import CATALOGUE, GpuSpec
from toolkit.gpu.cuda.events import has_calls, read_events
from toolkit.gpu.cuda.graphs import CudaGraph
from toolkit.gpu.cuda.loops import CudaLoop, loop_kernel, polled
from toolkit.gpu.cuda.session import CUPTI_ADVICE, Anchor, Announced, Captured, LoopRun, Range, Session
from toolkit.gpu.device import Device, Memory, check_token_tensor, no_cuda, not_recording
from toolkit.gpu.line_log import LineLog, know_thread
from toolkit.trace.events import Trace, TraceBuilder

_graph_numbers = count()
_busy = threading.Lock()  # CUPTI allows one subscriber per process, so one recording runs at a time


@cache
def open_cuda(index: int) -> CudaGpu:
    """Return the CUDA GPU with the given index. Raises DeviceError if there is none."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        built = "no CUDA GPU is available" if torch.version.cuda else "this PyTorch is built without CUDA"
        raise no_cuda(f"cuda:{index}", built)
    if index >= count:
        raise no_cuda(f"cuda:{index}", f"{plural(count, 'GPU')}, numbered from 0")
    return CudaGpu(index)


@cache
def open_cpu() -> Cpu:
    """Return the CPU as a device."""
    return Cpu()


class CudaGpu(Device):
    """A CUDA GPU. A process runs one recording at a time, from any thread."""

    clock, graphs = "measured", True
    _publishes = True  # as far as known

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"cuda:{index}"
        self.torch = torch.device("cuda", index)
        self.gpu_name = torch.cuda.get_device_name(index)
        self.spec: GpuSpec | None = next((card for card in CATALOGUE.values() if card.name == self.gpu_name), None)
        self._session: Session | None = None
        self._profiler: Any = None

    def __reduce__(self) -> tuple[Callable[[int], CudaGpu], tuple[int]]:
        return open_cuda, (self.index,)

    def start(self, *, lines: bool) -> None:
        """Wait until the GPU is idle, then start recording. `lines=True` also records Python lines and allocations."""
        if not _busy.acquire(blocking=False):
            raise RecorderError(f"recording {self.name}", "another recording is running in this process", "End that one first")
        try:
            _refuse_other_profiler(self.name)
            torch.cuda.synchronize(self.index)
            _check_cupti(self.index)
            know_thread()
            profiler = _profiler(events=lines)
            profiler.__enter__()
            self._profiler = profiler
            self._session = Session(self.index, LineLog() if lines else None, current_cell(), shard=distributed.current())
            self._session.anchors += self._anchors()
            if self._session.log is not None:
                self._session.log.start()
            self._session.began_ns = perf_counter_ns()
        except BaseException:
            try:
                self._end()
            finally:
                self._forget()
            raise

    def stop(self) -> Trace:
        """Wait for the GPU, stop recording, and return the profiler's events as a trace."""
        session, profiler = self._session, self._profiler
        if session is None:
            raise not_recording(f"stopping a recording of {self.name}")
        session.ended_ns = perf_counter_ns()
        try:
            try:
                torch.cuda.synchronize(self.index)  # begins after ended_ns, so it doesn't count as a wait of the user's code
                session.anchors += self._anchors()
            finally:  # also if the wait is interrupted: a profiler that keeps running would block every later recording
                self._end()
        finally:
            self._forget()
        meta = {
            "device": self.name, "gpu": self.gpu_name, "torch": torch.__version__, "cuda": torch.version.cuda,
            "clock": self.clock, "sizes_only": False,
        }  # fmt: skip
        return read_events(profiler.kineto_results.events(), session, meta | distributed.described(session.shard))

    def _mark(self, step: int, name: str) -> AbstractContextManager[None]:
        """Mark a decode step; other profilers see its range as "toolkit.step N name"."""
        return _step(self._session.ranges if self._session else None, step, name)

    def sync(self) -> None:
        """Wait until the GPU has finished all queued work."""
        torch.cuda.synchronize(self.index)

    def now_ns(self) -> int:
        """Return the time of `time.perf_counter_ns`."""
        return perf_counter_ns()

    def memory(self) -> Memory:
        """Return the figures of PyTorch's allocator and the GPU's total memory."""
        total = torch.cuda.get_device_properties(self.index).total_memory
        return Memory(
            torch.cuda.memory_allocated(self.index), torch.cuda.max_memory_allocated(self.index),
            torch.cuda.memory_reserved(self.index), total,
        )  # fmt: skip

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        torch.cuda.reset_peak_memory_stats(self.index)

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        """Return the launches of `work` as a graph, without running them; see `Device.capture`."""
        number, began_ns = next(_graph_numbers), perf_counter_ns()
        graph = CudaGraph(self.torch, work, partial(self._note_launch, number))
        self._note_capture(number, began_ns)
        return graph

    def capture_loop(self, step: Callable[[], None], token: torch.Tensor) -> CudaLoop:
        """Return a loop of `step`, which writes the next token to `token` [1] int64; see `Device.capture_loop`."""
        number, began_ns = next(_graph_numbers), perf_counter_ns()
        loop = CudaLoop(self.torch, step, token, partial(self._note_launch, number), self._note_run)
        self._note_capture(number, began_ns)
        return loop

    def poll(self, token: torch.Tensor) -> int:
        """Return the number in `token` [1] int64, which a kernel writes to mapped memory; see `Device.poll`.

        Where that kernel can't be compiled, no loop can be captured either. The token is then copied.
        """
        check_token_tensor("reading this token", token, self.torch)
        if self._publishes:
            try:
                kernel = loop_kernel(self.index, "publish_once")
            except DeviceError:
                self._publishes = False
        return polled(token, kernel) if self._publishes else int(token.item())

    def note_collective(self, operation: str, n_bytes: int, ranks: int, algorithm: str) -> None:
        """Note a launch of a collective, just before or after it; see `toolkit.trace.columns` for the columns."""
        if self._session is not None:
            self._session.announced.append(Announced(perf_counter_ns(), operation, n_bytes, ranks, algorithm))

    def _note_capture(self, number: int, began_ns: int) -> None:
        if self._session is not None:
            self._session.captures[number] = Captured(began_ns, perf_counter_ns())

    def _note_launch(self, number: int) -> None:
        if self._session is not None:
            self._session.launches.append((perf_counter_ns(), number))

    def _note_run(self, launched_ns: int, token_ns: NDArray[np.int64], first: int) -> None:
        if self._session is not None:
            self._session.loops.append(LoopRun(launched_ns, token_ns, first))

    def _set_limit(self, n_bytes: int | None) -> None:
        total = torch.cuda.get_device_properties(self.index).total_memory
        share = 1.0 if n_bytes is None else min((n_bytes + 0.5) / total, 1.0)  # PyTorch rounds the bytes down
        torch.cuda.set_per_process_memory_fraction(share, self.index)

    def _end(self) -> None:
        """Stop the line log and the profiler."""
        if self._session is not None and self._session.log is not None:
            self._session.log.stop()
        if self._profiler is None:
            return
        try:
            self._profiler.__exit__(None, None, None)
        except RuntimeError as error:
            if "profiler" not in str(error):
                raise
            found = f"another profiler ran inside the block ({error})"
            raise RecorderError(f"recording {self.name}", found, "Use one profiler at a time") from error

    def _forget(self) -> None:
        self._session = self._profiler = None
        _busy.release()

    def _anchors(self) -> list[Anchor]:
        """Time five runtime calls on the host, to relate the profiler's clock to the host's."""
        anchors = []
        for _ in range(5):
            before = perf_counter_ns()
            torch.cuda.synchronize(self.index)
            anchors.append(Anchor(before, perf_counter_ns()))
        return anchors


class Cpu(Device):
    """The CPU as a device. Its recordings only contain the marks of decode steps."""

    name, clock, spec = "cpu", "measured", None

    def __init__(self) -> None:
        self.torch = torch.device("cpu")
        self._ranges: list[Range] | None = None
        self._began_ns = 0

    def __reduce__(self) -> tuple[Callable[[], Cpu], tuple[()]]:
        return open_cpu, ()

    def start(self, *, lines: bool) -> None:
        """Start recording marks."""
        self._ranges, self._began_ns = [], perf_counter_ns()

    def stop(self) -> Trace:
        """Stop recording, and return the marks."""
        if self._ranges is None:
            raise not_recording("stopping a recording of cpu")
        ranges, self._ranges = self._ranges, None
        builder, cell, shard = TraceBuilder(), current_cell(), distributed.current()
        for r in ranges:
            start = r.start_ns - self._began_ns
            builder.add("mark", start, r.end_ns - r.start_ns, device=-1, step=r.step, cell=cell, name=r.name, rank=shard.rank)
        meta = {"device": "cpu", "torch": torch.__version__, "clock": self.clock, "sizes_only": False}
        return builder.build({**meta, **distributed.described(shard), "steps_from": "marks" if ranges else None})

    def _mark(self, step: int, name: str) -> AbstractContextManager[None]:
        return _step(self._ranges, step, name)

    def sync(self) -> None:
        """Do nothing: the CPU has no queue."""

    def now_ns(self) -> int:
        """Return the time of `time.perf_counter_ns`."""
        return perf_counter_ns()

    def memory(self) -> Memory:
        """Return zeros: memory of the CPU is not counted."""
        return Memory(0, 0, 0, 0)

    def reset_peak(self) -> None:
        """Do nothing: memory of the CPU is not counted."""


@contextmanager
def _step(ranges: list[Range] | None, step: int, name: str) -> Iterator[None]:
    with torch.profiler.record_function(f"toolkit.step {step} {name}"):
        start, began = perf_counter_ns(), time_ns()
        try:
            yield
        finally:
            log.note_step(step, began, time_ns(), name)
            if ranges is not None:
                ranges.append(Range(start, perf_counter_ns(), step, name))


def _profiler(*, events: bool) -> Any:
    """Return a profiler of the device; with `events`, also of the calling thread's allocations and annotations.

    PyTorch reports allocations to the profiling thread and autograd's threads. With `profile_all_threads` it reports none.
    """
    options = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True, expose_kineto_event_metadata=True)
    return torch.autograd.profiler.profile(
        use_device="cuda", use_cpu=events, use_kineto=True, profile_memory=events, experimental_config=options
    )


def _refuse_other_profiler(name: str) -> None:
    if torch._C._autograd._profiler_enabled() or getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        found = "a PyTorch profiler is active, and CUPTI allows only one"
        raise RecorderError(f"recording {name}", found, "End that profiler first, or open its trace with tk.open_trace")


@cache
def _check_cupti(index: int) -> None:
    """Check once per process that CUPTI reports runtime calls. This also keeps its slow start out of the first recording."""
    profiler = _profiler(events=False)
    with profiler:
        torch.cuda.synchronize(index)
    if not has_calls(profiler.kineto_results.events()):
        raise RecorderError(f"recording cuda:{index}", "CUPTI reports no events", CUPTI_ADVICE)


def in_use(device: torch.device) -> tuple[int, bool]:
    """Return the bytes in use on a CUDA GPU, CUDA's own included, and whether they are this process's alone.

    The bytes come from the driver's list of processes (NVML). If it does not list this process (other process ids in a
    container, Windows, no NVML), they are those of the whole GPU. Creates the CUDA context if there is none.
    """
    free, total = torch.cuda.mem_get_info(device)
    own = _of_this_process(torch.cuda.current_device() if device.index is None else device.index)
    return (total - free, False) if own is None else (own, True)


def _of_this_process(index: int) -> int | None:
    try:
        import pynvml

        listed = pynvml.nvmlDeviceGetComputeRunningProcesses(_nvml_handle(index))
        return next((process.usedGpuMemory for process in listed if process.pid == os.getpid()), None)
    except Exception:  # pynvml raises various errors if its version differs from that of the NVML library
        return None


@cache
def _nvml_handle(index: int) -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
