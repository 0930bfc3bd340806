"""What allocators did: the history of every device in use, from where a scope begins to where it ends.

The virtual GPU writes each allocation into `watch` while there is one; CUDA's allocator keeps a history of its own, which is
fetched when a scope begins or ends (`cuda_history.py`). Scopes nest and overlap: each is a range of one history, so that
an inner one takes nothing from an outer one, and nobody's peak counters are reset.
"""

from __future__ import annotations

import gc
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from toolkit.devices import base
from toolkit.errors import DeviceError
from toolkit.trace import Trace, TraceBuilder

if TYPE_CHECKING:
    from toolkit.devices.cuda_history import CudaHistory, CudaScope
    from toolkit.devices.virtual import VirtualGpu

Row = tuple[int, ...]
watch: TraceBuilder | None = None  # where the virtual GPU notes its allocations; None: nobody wants to know

lines = False  # does anybody want to know which line allocated?

_lock = threading.RLock()
_kept = 0  # how many want lines to be noted even between scopes: a notebook's session
_open: list[Begun] = []


@dataclass(eq=False)
class Begun:
    """A scope that has begun: what was alive then, and from which row of the history it has its events."""

    asked: base.Device | None
    builder: TraceBuilder
    lines: bool = True
    start_ns: int = 0  # on the device's host clock
    since: int = 0
    before: list[Row] = field(default_factory=list)  # blocks and segments of the beginning
    cuda: CudaScope | None = None  # where CUDA's history was, for a scope on CUDA


def begin(device: base.Device | None = None, *, lines: bool = True) -> Begun:
    """Begin a scope on `device`; without one, on the device in use, also where that is first opened later.

    The device in use is the open virtual GPU, else every CUDA GPU. `lines=False` asks for no lines, which cost the most.
    Raises DeviceError where the device is a virtual one that is closed.
    """
    with _lock:
        _refuse_other_virtual(device)
        if not _open:
            _watch(TraceBuilder())
        begun = Begun(device, _builder(), lines)
        _note_lines(begun)
        virtual = _virtual(device)
        try:
            if virtual is not None:
                with virtual.machine._in_order():
                    begun.start_ns, begun.since = virtual.now_ns(), len(begun.builder)
                    begun.before = _rows_held(virtual, begun.builder)
            elif device is None or device.torch.type == "cuda":
                cuda = _cuda(anew=not _open)
                begun.cuda = cuda.begin() if cuda is not None else None
        except BaseException:
            if not _open:
                _rest()
            _note_lines()
            raise
        _open.append(begun)
        return begun


def end(begun: Begun) -> Trace:
    """End a scope. The trace has what was alive when it began (`meta["opening"]` rows), then every memory event since."""
    with _lock:
        if begun not in _open:
            raise DeviceError("ending a memory scope", "it has ended", "Begin another one")
        _open.remove(begun)
        _note_lines()
        try:
            return _trace_of(begun)
        finally:
            if not _open:
                _rest()


def _trace_of(begun: Begun) -> Trace:
    device = begun.asked or in_use()
    meta: dict[str, Any] = {"device": "none", "clock": "measured", "sizes_only": False, "steps_from": "marks"}
    if device is not None:
        meta |= {"device": device.name, "clock": device.clock, "gpu": device.spec.name if device.spec else device.name}
        meta |= {"lines": begun.lines, "total_bytes": device.memory().total_bytes, "limit_bytes": device.limit_bytes}
    collects = gc.isenabled()
    gc.disable()  # a hundred thousand rows are no garbage, and looking for some among them takes longer than all the rest
    try:
        return _rows_of(begun, device, meta)
    finally:
        if collects:
            gc.enable()


def _rows_of(begun: Begun, device: base.Device | None, meta: dict[str, Any]) -> Trace:
    index = getattr(begun.asked, "index", None)
    meta |= {} if index is None else {"device_index": index}
    if device is not None and device.torch.type == "cpu":
        return TraceBuilder().build({**meta, "opening": 0})
    if begun.cuda is not None and device is not None and device.torch.type == "cuda":
        from toolkit.devices.cuda_history import the_history

        return the_history.end(begun.cuda, meta)
    return begun.builder.build({**meta, "opening": len(begun.before)}, begun.since, begun.before, begun.start_ns)


def measuring() -> bool:
    """Has a scope begun that hasn't ended?"""
    return bool(_open)


def in_use() -> base.Device | None:
    """The open virtual GPU, else the first CUDA GPU; None where there is neither."""
    import torch

    return _virtual(None) or (base.open_device("cuda") if torch.cuda.is_available() else None)


def keep() -> None:
    """Note lines between scopes, too, until `release`: what is alive when a scope begins then says where it is from."""
    global _kept
    with _lock:
        _kept += 1
        _note_lines()
        if _virtual(None) is None:
            _cuda(anew=not _open, events=bool(_open))


def release() -> None:
    """End what `keep` began."""
    global _kept
    with _lock:
        _kept = max(_kept - 1, 0)
        _note_lines()
        if not _open:
            _rest()


def card_opened() -> None:
    """Another virtual GPU takes the place of the one before, which holds nothing: scopes begin anew on it, on its clock."""
    with _lock:
        for begun in _open:
            begun.before, begun.since, begun.start_ns = [], len(begun.builder), 0


def note_step(step: int, start_ns: int, end_ns: int, name: str) -> None:
    """A decode step ran from `start_ns` to `end_ns` of the wall clock (time.time_ns) on a CUDA device."""
    module = sys.modules.get("toolkit.devices.cuda_history")
    if module is not None and module.the_history.on:
        module.the_history.steps.append(module.Range(start_ns, end_ns, step, name))


def _note_lines(*more: Begun) -> None:
    global lines
    lines = bool(_kept) or any(begun.lines for begun in (*_open, *more))


def _builder() -> TraceBuilder:
    if watch is None:
        _watch(TraceBuilder())
    assert watch is not None
    return watch


def _watch(builder: TraceBuilder | None) -> None:
    global watch
    watch = builder


def _rest() -> None:
    """No scope is open: nothing is noted, but lines where somebody wants to know them of what is alive later."""
    _watch(None)
    module = sys.modules.get("toolkit.devices.cuda_history")
    if module is None or not module.the_history.on:
        return
    if _kept:
        module.the_history.start(anew=True, lines=True, events=False)
    else:
        module.the_history.stop()


def _virtual(device: base.Device | None) -> VirtualGpu | None:
    """The virtual GPU that is meant: `device`, or the open one where none is named."""
    module = sys.modules.get("toolkit.devices.virtual")
    current = module._current[0] if module is not None and module._current else None
    if device is not None and device is not current:
        return None
    return current


def _refuse_other_virtual(device: base.Device | None) -> None:
    if device is not None and device.torch.type == "vgpu" and _virtual(device) is None:
        raise DeviceError(f"the memory of {device.name}", "it is closed", f'Open it again: tk.device("{device.name}")')


def _rows_held(virtual: VirtualGpu, builder: TraceBuilder) -> list[Row]:
    """What is alive on the virtual GPU, as rows: segments, then blocks by address."""
    from toolkit.devices.virtual_tensor import held

    now = virtual.now_ns()
    segments = [
        builder.row("segment_alloc", now, bytes=sum(b.size for b in blocks), address=blocks[0].address, clock="modelled")
        for blocks in virtual.machine.memory.segments()
    ]
    blocks = [
        builder.row(
            "alloc", now, bytes=block.size, where=where, clock="modelled", address=block.address, requested=block.requested
        )
        for block, where in sorted(held(), key=lambda taken: taken[0].address)
    ]
    return segments + blocks


def _cuda(*, anew: bool, events: bool = True) -> CudaHistory | None:
    """CUDA's history, which is kept from now on; None without CUDA. `anew`: what it has so far may be forgotten."""
    import torch

    if not torch.cuda.is_available():
        return None
    from toolkit.devices.cuda_history import the_history

    the_history.start(anew=anew, lines=lines, events=events)
    return the_history
