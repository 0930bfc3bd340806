"""The virtual GPU as a `Device`: after `tk.device("virtual:rtx-5090")`, `torch.device("vgpu")` is that GPU.

The device type is registered with PyTorch when the first virtual GPU is opened, not at import. A process has one open virtual
GPU at a time, for all threads. `dispatch` runs its operations.
"""

from __future__ import annotations

import difflib
import functools
import os
import platform
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types as of_optimizers
from torch.utils._foreach_utils import _foreach_supported_types as of_gradients
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.weak import WeakIdKeyDictionary

from toolkit.core import distributed
from toolkit.core.distributed import MOST
from toolkit.core.errors import DeviceError, RecorderError, unknown_name
from toolkit.core.signals import callbacks_of, signals_deferred
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.gpu import unheld
from toolkit.gpu.allocation_log import log
from toolkit.gpu.catalogue import CATALOGUE, GpuSpec
from toolkit.gpu.device import Device, Memory, check_token_tensor
from toolkit.gpu.virtual import dispatch, in_place, sizes_only, tensor, threads
from toolkit.gpu.virtual.graphs import PUBLISH, VirtualGraph, VirtualLoop
from toolkit.gpu.virtual.machine import Machine
from toolkit.gpu.virtual.torch_backend import (
    accelerator,
    attention,
    autocast,
    conditions,
    ctc_loss,
    flex_attention,
    linear,
    module,
    moving_modules,
    nested,
    one_hot,
    parallel,
    pinned,
    recurrent,
    rms_norm,
    root_gradients,
    sparse,
    storage,
    subclasses,
)
from toolkit.trace.events import Trace

GENERIC = "h200"  # a GPU that is named by its memory size takes its other figures from this GPU
_SIZE = re.compile(r"[0-9.]+\s*[kmgt]i?b?", re.IGNORECASE)
# "virtual:2xh200", also misspelt: "2xh200", "virtual:2 x h200", "virtual:2x2xh200", "2xvirtual:h200"
_SEVERAL = re.compile(r"(?:virtual:)?\s*(\d{1,9})\s*x\s*(?:(?:virtual:|\d+\s*x)\s*)*(.+)", re.IGNORECASE)
_current: VirtualGpu | None = None
_opening = threading.RLock()
_libraries: list[torch.library.Library] = []  # kept alive: garbage collection of a library removes its kernels


_CALLBACKS = callbacks_of(WeakIdKeyDictionary, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet)
_CALLBACKS += [weakref.finalize.__call__.__code__]
_asked: list[Any] = []  # not empty while PyTorch asks for the type of the device
_ask = functools.partial(_asked.append, torch._C._autograd.DeviceType.PrivateUse1)
_answer = functools.partial(_asked.pop)


class _DeviceGuard(torch._C._acc.DeviceGuard):  # type: ignore[misc, name-defined]
    """Tells PyTorch the type of the device. PyTorch also asks where an error, such as an interrupt, would end the process.

    It looks `type_` up, runs the handlers of signals that have arrived (in `PyObject_Str`), and calls the result. The lookup
    therefore puts the answer into `_asked`, for which handlers wait, as they do for the lookup itself. The call removes it.

    PyTorch also asks while an error leaves the autograd engine. Python then refuses the result of `_ask`, and names that error
    as the cause.
    """

    def _look_up(self) -> Callable[[], Any]:
        try:
            _ask()
        except SystemError as refused:
            if not threads.keep(refused.__cause__):
                raise
        return _answer

    type_ = property(_look_up)


_GUARD = _DeviceGuard()


class VirtualGpu(Device):
    """A simulated GPU. Get one from `tk.device("virtual:NAME")`."""

    clock, graphs = "modelled", True
    spec: GpuSpec

    def __init__(self, card: str, spec: GpuSpec) -> None:
        self.card, self.name, self.spec = card, f"virtual:{card}", spec
        self.torch = torch.device("vgpu", 0)
        self.machine = Machine(spec)

    def __reduce__(self) -> tuple[Callable[[str], VirtualGpu], tuple[str]]:
        return open_virtual, (self.card,)

    def _in_use(self) -> Machine:
        """Return the machine. Raises DeviceError if another virtual GPU has been opened since."""
        if _current is not self:
            found = f"{_current.name} was opened since, and only one can be open" if _current else "it is closed"
            raise DeviceError(f"using {self.name}", found, f'Open it again: tk.device("{self.name}")')
        return self.machine

    def start(self, *, lines: bool) -> None:
        """Start recording. Raises RecorderError inside another recording, DeviceError if another virtual GPU is open."""
        machine = self._in_use()
        if machine.recording:
            raise RecorderError(f"recording {self.name}", "a recording is already running", "End that one first")
        machine.start(lines=lines)

    def stop(self) -> Trace:
        """Stop recording, and return the trace."""
        return self.machine.stop(
            {
                "device": self.name, "gpu": self.spec.name, "clock": self.clock, "steps_from": "marks",
                "torch": torch.__version__, "python": platform.python_version(),
            }
        )  # fmt: skip

    def _mark(self, step: int, name: str) -> AbstractContextManager[None]:
        return self.machine.step(step, name)

    @contextmanager
    def sizes_only(self) -> Iterator[None]:
        """Create tensors without floating-point values, and so without memory on this machine, inside the block.

        This applies to tensors created on, or moved to, the virtual GPU by any thread, and to all results computed from them,
        also after the block. What is only made like them, as by `torch.ones_like`, has no values if it is larger than 16 MiB.
        Shapes, bytes, times and the memory of the virtual GPU are those of a real run. Absent values read as zero.
        `trace.meta["sizes_only"]` says whether a trace contains operations on such tensors.
        """
        machine = self._in_use()
        sizes_only.seen = True
        with machine.without_values():
            yield

    def sync(self) -> None:
        """Advance the modelled clock until all streams have finished."""
        self._in_use().wait_all()

    def meet(self) -> None:
        """Advance the modelled clocks of all ranks, each of which calls this, to the time at which the last one is idle."""
        machine = self._in_use()
        machine.poll(distributed.latest(machine.idle_ns()))

    def now_ns(self) -> int:
        """Return the time of the modelled host clock, in ns."""
        return self.machine.host_ns

    def memory(self) -> Memory:
        """Return the memory of the virtual GPU as it is now."""
        memory = self._in_use().memory
        return Memory(memory.allocated_bytes, memory.peak_bytes, memory.reserved_bytes, memory.total_bytes)

    def from_tape(self) -> AbstractContextManager[None]:
        """Model the work inside as launched from a tape, unless it is recorded: PyTorch's profiler sees no tapes."""
        return nullcontext() if self.machine.recording else self.machine.from_tape()

    def capture(self, work: Callable[[], None]) -> VirtualGraph:
        """Return the launches of `work` as a graph, without running them; see `Device.capture`."""
        return VirtualGraph(self._in_use(), work)

    def capture_loop(self, step: Callable[[], None], token: torch.Tensor) -> VirtualLoop:
        """Return a loop of `step`, which writes the next token to `token` [1] int64; see `Device.capture_loop`."""
        return VirtualLoop(self._in_use(), step, token, self.step)

    def poll(self, token: torch.Tensor) -> int:
        """Return the number in `token` [1] int64, which a kernel writes to mapped memory; see `Device.poll`."""
        check_token_tensor("reading this token", token, self.torch)
        card = self._in_use()
        card.execute(PUBLISH)
        card.poll(card.done_ns(threads.here().stream))
        return int(token._host)  # type: ignore[attr-defined]

    def _set_limit(self, n_bytes: int | None) -> None:
        self.machine.memory.limit_bytes = n_bytes

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        self.machine.memory.reset_peak()


def open_virtual(card: str) -> VirtualGpu:
    """Return the virtual GPU called `card`: a name in the catalogue ("rtx-5090"), or a memory size ("8GiB").

    A size stands for an H200 with that much memory. Raises UnknownNameError, which suggests the nearest name, for an unknown
    name, and DeviceError if tensors still exist on another virtual GPU.
    """
    global _current
    with signals_deferred, _opening:
        if _current and _current.card == card:
            return _current
        spec = spec_of(card)
        if _current:
            _refuse_while_held(_current, card)
        _register()
        gpu = VirtualGpu(card, spec)
        signals_deferred.wait_for(_asked, {_DeviceGuard._look_up.__code__, *_CALLBACKS})
        dispatch.open_machine(gpu.machine)
        _current = gpu
        log.restart()
        return gpu


def current_virtual() -> VirtualGpu:
    """Return the virtual GPU that `torch.device("vgpu")` is now. Raises DeviceError if none is open."""
    if not _current:
        raise DeviceError("device 'vgpu'", "no virtual GPU is open", 'Open one: tk.device("virtual:h200")')
    return _current


def open_card() -> VirtualGpu | None:
    """Return the virtual GPU that is open, or None."""
    return _current


def spec_of(card: str) -> GpuSpec:
    """Return the figures of the virtual GPU called `card`, as in `open_virtual`, without opening it."""
    found = find_spec(card)
    if found is None:
        check_single(f"virtual:{card}")
        raise unknown_name("virtual GPU", card, [*CATALOGUE, "8GiB"])
    return found


def find_spec(card: str) -> GpuSpec | None:
    """Return the figures of the virtual GPU called `card`, or None if there is none."""
    if card not in CATALOGUE and _SIZE.fullmatch(card.strip()):
        return CATALOGUE[GENERIC].with_memory(parse_bytes(card))
    return CATALOGUE.get(card)


def check_single(name: str) -> None:
    """Raise DeviceError if the name asks for several devices: "2xcuda", "virtual:2xh200", or wrongly "2xh200"."""
    if found := meant(name):
        each, number = found
        single = each.removeprefix("virtual:") if each.removeprefix("virtual:") in CATALOGUE else each
        why, start = "several devices need several processes", "Start"
        if number < 2:
            why, start = "such names are for several devices", f'For one, write "{each}". For several, start'
        do = f'{start} a process for each, with tk.cluster("{joint(each, number)}") or torchrun. '
        if "LOCAL_RANK" in os.environ:  # torchrun or tk.cluster has started this process
            why, do = "each rank opens one device", f'Write "{each}" for all ranks. '
        do += f'A plan needs no processes: tk.plan(MODEL, "{single}", tensor_parallel={_possible(number)})'
        raise DeviceError(f"the device {name}", why, do)


def meant(name: str) -> tuple[str, int] | None:
    """Return the device of each rank and the number that a name asks for, also if it is misspelt: "2xh200", "virtual:2 x H200".

    None if the name asks for no number of devices, or for devices whose name resembles none.
    """
    found = _SEVERAL.fullmatch(name.strip())
    if found is None:
        return None
    kind = found[2]
    if not _SIZE.fullmatch(kind):
        near = difflib.get_close_matches(kind.lower(), ["cpu", "cuda", *CATALOGUE], n=1, cutoff=0.7)
        if not near:
            return None
        kind = near[0]
    return kind if kind in ("cpu", "cuda") else f"virtual:{kind}", int(found[1])


def joint(each: str, number: int) -> str:
    """Return the name of a cluster with this device on each rank: "virtual:2xh200". It has 2 ranks if `number` is less."""
    virtual, kind = "virtual:" if each.startswith("virtual:") else "", each.removeprefix("virtual:")
    return f"{virtual}{_possible(number)}x{kind}"


def _possible(number: int) -> int:
    return min(max(number, 2), MOST)


def _refuse_while_held(gpu: VirtualGpu, card: str) -> None:
    count, size = tensor.live()
    if gpu.machine.recording:
        raise DeviceError(f"opening virtual:{card}", f"{gpu.name} is being recorded", "End that recording first")
    if count:
        held = f"1 live tensor ({bytes_text(size)}) is" if count == 1 else f"{count:,} live tensors ({bytes_text(size)}) are"
        do = f"Delete {'it' if count == 1 else 'them'} first (del x; gc.collect()), or stay with {gpu.name}: "
        do += f'device="{gpu.name}"{unheld.sentence()}'
        raise DeviceError(
            f"opening virtual:{card}", f"{held} on {gpu.name}; only one virtual GPU can be open",
            do, tensors=count, bytes=size,
        )  # fmt: skip


@lru_cache(maxsize=1)
def _register() -> None:
    """Register the device type `vgpu` with PyTorch, once per process: its name, `torch.vgpu`, and its kernels."""
    _setup_privateuseone_for_python_backend("vgpu", backend_module=sys.modules[module.__name__], device_guard=_GUARD)
    tensor.register(torch.device("vgpu", 0))
    _libraries.extend(dispatch.register())
    _libraries.extend(attention.register())
    _libraries.extend(autocast.register())
    _libraries.extend(linear.register())
    _libraries.extend(one_hot.register())
    _libraries.extend(rms_norm.register())
    _libraries.extend(ctc_loss.register())
    _libraries.extend(recurrent.register())
    _libraries.extend(sparse.register())
    _libraries.extend(nested.register())
    in_place.count_references()
    threads.install()
    pinned.install()
    accelerator.install()
    storage.install()
    subclasses.install()
    moving_modules.install()
    recurrent.install()
    flex_attention.install()
    parallel.install()
    conditions.install()
    root_gradients.install()
    for types in (of_optimizers, of_gradients):  # optimizers work on lists of tensors, as on CUDA
        types.extend((tensor.VirtualTensor, subclasses.on_device(nn.Parameter)))
