"""`torch.vgpu`: the names of `torch.cuda` for the virtual GPU. `torch.get_device_module("vgpu")` returns this module.

Streams and events use the modelled clock: `Event.elapsed_time` is modelled time. Random numbers come from PyTorch's
CPU generator, so a seeded program draws the same numbers on the virtual GPU as on the CPU.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from toolkit.gpu.virtual.dispatch import machine
from toolkit.gpu.virtual.forks import in_bad_fork
from toolkit.gpu.virtual.lifetimes import settle
from toolkit.gpu.virtual.threads import DEFAULT_STREAM, here
from toolkit.gpu.virtual.torch_backend.memory import (  # noqa: F401  names of torch.vgpu
    DeviceLike,
    empty_cache,
    get_memory_info,
    get_per_process_memory_fraction,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_snapshot,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from toolkit.gpu.virtual.torch_backend.memory import index_of as _index


class Event:
    """A point in a stream's modelled time, as torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any) -> None:
        self.enable_timing = enable_timing
        self.at_ns: int | None = None
        self.stream_number = DEFAULT_STREAM
        self.device = torch.device("vgpu", 0)

    def record(self, stream: Stream | None = None) -> None:
        """Record the event: it completes when all work queued on `stream` has finished."""
        card = machine()
        self.stream_number = here().stream if stream is None else stream.number
        card.launch_nothing()
        self.at_ns = card.done_ns(self.stream_number)

    def wait(self, stream: Stream | None = None) -> None:
        """Make work queued on `stream` from now on start after the event."""
        if self.at_ns is not None:
            card = machine()
            card.delay(here().stream if stream is None else stream.number, self.at_ns)

    def query(self) -> bool:
        return self.at_ns is None or self.at_ns <= machine().host_ns

    def synchronize(self) -> None:
        """Block the host until the event has completed."""
        if self.at_ns is not None:
            machine().wait_until(self.at_ns, self.stream_number, "cudaEventSynchronize")

    def elapsed_time(self, end: Event) -> float:
        """Return the modelled time from this event to `end`, in milliseconds."""
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self.at_ns is None or end.at_ns is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (end.at_ns - self.at_ns) / 1e6

    @property
    def event_id(self) -> int:
        return id(self)


class Stream:
    """A queue of work, as torch.cuda.Stream. Streams run concurrently on the modelled clock."""

    def __init__(self, device: DeviceLike = None, priority: int = 0, *, number: int | None = None, **_: Any) -> None:
        _index(device)
        self.number = machine().new_stream(priority) if number is None else number
        self.priority, self.device, self.device_index = priority, torch.device("vgpu", 0), 0
        self._outer: list[int] = []

    @property
    def stream_id(self) -> int:
        return self.number

    @property
    def cuda_stream(self) -> int:
        return self.number

    def synchronize(self) -> None:
        machine().wait(self.number, "cudaStreamSynchronize")

    def query(self) -> bool:
        return machine().stream_ends[self.number] <= machine().host_ns

    def is_capturing(self) -> bool:
        """Return whether a graph gets the work that this thread queues on the stream. A replay repeats the capture."""
        return here().graph is not None and here().stream == self.number

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(("vgpu stream", self.number))

    def __repr__(self) -> str:
        return f"<torch.vgpu.Stream device=vgpu:0 number={self.number}>"

    def __enter__(self) -> Stream:
        settle()
        self._outer.append(here().stream)
        here().stream = self.number
        return self

    def __exit__(self, *_: object) -> None:
        settle()
        here().stream = self._outer.pop()


class device:
    """`with torch.vgpu.device(0):`, as torch.cuda.device. It changes nothing, since there is only one device."""

    def __init__(self, device: DeviceLike) -> None:
        self.idx = _index(device)

    def __enter__(self) -> device:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class Properties(types.SimpleNamespace):
    """The properties that torch.cuda.get_device_properties returns, from the GPU's figures in the catalogue."""


@contextmanager
def stream(stream: Stream | None) -> Iterator[Stream | None]:
    """Queue work of this thread inside the block on `stream`."""
    if stream is None:
        yield None
        return
    with stream:
        yield stream


def current_stream(device: DeviceLike = None) -> Stream:
    _index(device)
    return Stream(number=here().stream)


def default_stream(device: DeviceLike = None) -> Stream:
    _index(device)
    return Stream(number=DEFAULT_STREAM)


def set_stream(stream: Stream) -> None:
    settle()
    here().stream = stream.number


def synchronize(device: DeviceLike = None) -> None:
    _index(device)
    machine().wait_all()


def device_count() -> int:
    return 1


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Do nothing: opening the virtual GPU has initialized it."""


_lazy_init = init


_is_in_bad_fork = in_bad_fork


def current_device() -> int:
    return 0


def set_device(device: DeviceLike) -> None:
    _index(device)


def get_device_name(device: DeviceLike = None) -> str:
    _index(device)
    return machine().spec.name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    _index(device)
    return machine().spec.compute_capability


def get_device_properties(device: DeviceLike = None) -> Properties:
    """Return name, memory, multiprocessors, compute capability, L2 and shared memory of the GPU."""
    _index(device)
    spec = machine().spec
    major, minor = spec.compute_capability
    return Properties(
        name=spec.name, major=major, minor=minor, total_memory=spec.memory_bytes, multi_processor_count=spec.sms,
        L2_cache_size=spec.l2_bytes, regs_per_multiprocessor=spec.registers_per_sm, warp_size=32,
        max_threads_per_multi_processor=spec.threads_per_sm, shared_memory_per_block=spec.smem_per_block_bytes,
        shared_memory_per_block_optin=spec.smem_per_block_optin_bytes,
        shared_memory_per_multiprocessor=spec.smem_per_sm_bytes, is_integrated=0, is_multi_gpu_board=0,
    )  # fmt: skip


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


manual_seed_all = manual_seed  # `torch.manual_seed` calls it too
initial_seed = torch.default_generator.initial_seed


def seed() -> None:
    torch.default_generator.seed()


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    _index(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    _index(device)
    torch.default_generator.set_state(new_state)


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return machine().spec.compute_capability >= (8, 0)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16, torch.float32]


OutOfMemoryError = torch.OutOfMemoryError
