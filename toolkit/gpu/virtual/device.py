"""The virtual GPU as a Device: `tk.device("virtual:rtx-5090")` makes `torch.device("vgpu")` that card.

The device name is registered with PyTorch when the first card opens, never at import. There is one card at a time, for
the whole process and every thread. This file knows the life of a card; what runs on it is `virtual_dispatch`'s.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from toolkit.core.errors import DeviceError, RecorderError, unknown_name
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.gpu.allocation_log import log
from toolkit.gpu.catalogue import CATALOGUE, GpuSpec
from toolkit.gpu.device import Device, Memory
from toolkit.gpu.virtual import dispatch, sizes_only, tensor, threads
from toolkit.gpu.virtual.machine import Machine
from toolkit.gpu.virtual.torch_backend import attention, autocast, module, moving_modules, pinned, rms_norm, storage
from toolkit.trace.events import Trace

GENERIC = "h200"  # the card whose figures a card known only by its memory has
_SIZE = re.compile(r"[0-9.]+\s*[kmgt]i?b?", re.IGNORECASE)
_current: VirtualGpu | None = None
_libraries: list[torch.library.Library] = []  # kept: a library that is collected takes its kernels with it


class VirtualGpu(Device):
    """A card that isn't there. Get one from `tk.device("virtual:NAME")`."""

    clock = "modelled"
    spec: GpuSpec

    def __init__(self, card: str, spec: GpuSpec) -> None:
        self.card, self.name, self.spec = card, f"virtual:{card}", spec
        self.torch = torch.device("vgpu", 0)
        self.machine = Machine(spec)

    def _in_use(self) -> Machine:
        """The machine. Raises DeviceError where another card has been opened since."""
        if _current is not self:
            found = f"`vgpu` is {_current.name} now" if _current else "it is closed"
            raise DeviceError(f"using {self.name}", found, f'Open it again: tk.device("{self.name}")')
        return self.machine

    def start(self, *, lines: bool) -> None:
        """Begin to record. Raises RecorderError inside another recording, DeviceError where another card is open."""
        machine = self._in_use()
        if machine.recording:
            raise RecorderError(f"recording {self.name}", "a recording runs already", "End that one first")
        machine.start(lines=lines)

    def stop(self) -> Trace:
        """End the recording and return its events."""
        return self.machine.stop(
            {
                "device": self.name, "gpu": self.spec.name, "clock": self.clock, "steps_from": "marks",
                "torch": torch.__version__, "python": platform.python_version(),
            }
        )  # fmt: skip

    def step(self, step: int, name: str) -> AbstractContextManager[None]:
        """A scope on this thread: events inside belong to decode step `step`; leaves a mark called `name`."""
        return self.machine.step(step, name)

    @contextmanager
    def sizes_only(self) -> Iterator[None]:
        """Tensors made or moved to the card inside the block keep no floating-point values, and take no memory here.

        For the whole process, and for what is computed from such tensors afterwards. Shapes, bytes, times and the
        memory of the card are those of the real run; values that were never computed read as zero, and a trace in which one
        took part says so (`trace.meta["sizes_only"]`).
        """
        machine = self._in_use()
        outer, machine.sizes_only, sizes_only.seen = machine.sizes_only, True, True
        try:
            yield
        finally:
            machine.sizes_only = outer

    def sync(self) -> None:
        """Wait, on the modelled clock, until every stream is done."""
        self._in_use().wait_all()

    def now_ns(self) -> int:
        """The modelled host clock."""
        return self.machine.host_ns

    def memory(self) -> Memory:
        """Memory of the card now."""
        memory = self.machine.memory
        return Memory(memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes, memory.total_bytes)

    def _set_limit(self, n_bytes: int | None) -> None:
        self.machine.memory.limit_bytes = n_bytes

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        self.machine.memory.reset_peak()


def open_virtual(card: str) -> VirtualGpu:
    """The virtual card called `card`: a name of the catalogue ("rtx-5090"), or a memory size ("8GiB").

    A size is a generic card with that much memory. Raises UnknownNameError (naming the nearest) for an unknown name, and
    DeviceError where tensors still live on another card.
    """
    global _current
    if _current and _current.card == card:
        return _current
    spec = spec_of(card)
    if _current:
        _refuse_while_held(_current, card)
    _register()
    gpu = VirtualGpu(card, spec)
    dispatch.open_machine(gpu.machine)
    _current = gpu
    log.restart()
    return gpu


def current_virtual() -> VirtualGpu:
    """The card that `torch.device("vgpu")` is now. Raises DeviceError where none was opened."""
    if not _current:
        raise DeviceError("device 'vgpu'", "no virtual GPU is open", 'Open one: tk.device("virtual:h200")')
    return _current


def open_card() -> VirtualGpu | None:
    """Return the card that is open, or None."""
    return _current


def spec_of(card: str) -> GpuSpec:
    """The figures of the card called `card`, as in `open_virtual`, without opening it."""
    if card in CATALOGUE:
        return CATALOGUE[card]
    if _SIZE.fullmatch(card.strip()):
        return CATALOGUE[GENERIC].with_memory(parse_bytes(card))
    raise unknown_name("virtual GPU", card, CATALOGUE)


def _refuse_while_held(gpu: VirtualGpu, card: str) -> None:
    count, size = tensor.live()
    if gpu.machine.recording:
        raise DeviceError(f"opening virtual:{card}", f"{gpu.name} is being recorded", "End that recording first")
    if count:
        raise DeviceError(
            f"opening virtual:{card}", f"{count:,} live tensors ({bytes_text(size)}) are on {gpu.name}, and `vgpu` is one card",
            f"Delete them first (del x; gc.collect()), or stay with {gpu.name}", tensors=count, bytes=size,
        )  # fmt: skip


@lru_cache(maxsize=1)
def _register() -> None:
    """Give PyTorch the device `vgpu`, once a process: its name, `torch.vgpu`, and who runs its operations."""
    _setup_privateuseone_for_python_backend("vgpu", backend_module=sys.modules[module.__name__])
    tensor._device.append(torch.device("vgpu", 0))
    _libraries.extend(dispatch.register())
    _libraries.extend(attention.register())
    _libraries.extend(autocast.register())
    _libraries.extend(rms_norm.register())
    threads.install()
    pinned.install()
    storage.install()
    moving_modules.install()
