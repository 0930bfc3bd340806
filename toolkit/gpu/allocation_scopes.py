"""Memory scopes: the trace of every allocation between two points of a program.

`begin` opens a scope and `end` returns its trace. On the virtual GPU the events come from the allocation log. On CUDA they come
from the allocator's own history, which is fetched when a scope begins or ends. Scopes may nest and overlap: each is a range of
the same log, so that no scope takes events from another one and no peak counter is reset.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from toolkit.core.errors import DeviceError
from toolkit.gpu.allocation_log import OpenScope, Row, log
from toolkit.gpu.cuda.allocation_history import CudaHistory, the_history
from toolkit.gpu.cuda.device import open_cuda
from toolkit.gpu.device import Device
from toolkit.gpu.virtual.device import VirtualGpu, open_card
from toolkit.gpu.virtual.tensor import held
from toolkit.trace.events import Trace, TraceBuilder

_kept = 0  # callers that want lines recorded between scopes, too: sessions of notebooks


def begin(device: Device | None = None, *, lines: bool = True) -> OpenScope:
    """Begin a scope on `device`; without one, on the device in use, also where that is first opened later.

    The device in use is the open virtual GPU, else every CUDA GPU. `lines=False` asks for no lines, which cost the most.
    Raises DeviceError where the device is a virtual one that is closed.
    """
    with log.lock:
        _refuse_other_virtual(device)
        if not log.scopes:
            log.builder = TraceBuilder()
        begun = OpenScope(device, _builder(), lines)
        _note_lines(begun)
        virtual = _virtual(device)
        try:
            if virtual is not None:
                with virtual.machine._in_order():
                    begun.start_ns, begun.since = virtual.now_ns(), len(begun.builder)
                    begun.before = _rows_held(virtual, begun.builder)
            elif device is None or device.torch.type == "cuda":
                cuda = _cuda(anew=not log.scopes)
                begun.cuda = cuda.begin() if cuda is not None else None
        except BaseException:
            if not log.scopes:
                _rest()
            _note_lines()
            raise
        log.scopes.append(begun)
        return begun


def end(begun: OpenScope) -> Trace:
    """End a scope. The trace has what was alive when it began (`meta["opening"]` rows), then every memory event since."""
    with log.lock:
        if begun not in log.scopes:
            raise DeviceError("ending a memory scope", "it has ended", "Begin another one")
        log.scopes.remove(begun)
        _note_lines()
        try:
            return _trace_of(begun)
        finally:
            if not log.scopes:
                _rest()


def _trace_of(begun: OpenScope) -> Trace:
    device = begun.device or in_use()
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


def _rows_of(begun: OpenScope, device: Device | None, meta: dict[str, Any]) -> Trace:
    index = getattr(begun.device, "index", None)
    meta |= {} if index is None else {"device_index": index}
    if device is not None and device.torch.type == "cpu":
        return TraceBuilder().build({**meta, "opening": 0})
    if begun.cuda is not None and device is not None and device.torch.type == "cuda":
        return the_history.end(begun.cuda, meta)
    return begun.builder.build({**meta, "opening": len(begun.before)}, begun.since, begun.before, begun.start_ns)


def measuring() -> bool:
    """Has a scope begun that hasn't ended?"""
    return bool(log.scopes)


def in_use() -> Device | None:
    """The open virtual GPU, else the first CUDA GPU; None where there is neither."""
    return _virtual(None) or (open_cuda(0) if torch.cuda.is_available() else None)


def keep() -> None:
    """Note lines between scopes, too, until `release`: what is alive when a scope begins then says where it is from."""
    global _kept
    with log.lock:
        _kept += 1
        _note_lines()
        if _virtual(None) is None:
            _cuda(anew=not log.scopes, events=bool(log.scopes))


def release() -> None:
    """End what `keep` began."""
    global _kept
    with log.lock:
        _kept = max(_kept - 1, 0)
        _note_lines()
        if not log.scopes:
            _rest()


def _note_lines(*more: OpenScope) -> None:
    log.lines = bool(_kept) or any(begun.lines for begun in (*log.scopes, *more))


def _builder() -> TraceBuilder:
    if log.builder is None:
        log.builder = TraceBuilder()
    return log.builder


def _rest() -> None:
    """No scope is open: nothing is noted, but lines where somebody wants to know them of what is alive later."""
    log.builder = None
    if not the_history.on:
        return
    if _kept:
        the_history.start(anew=True, lines=True, events=False)
    else:
        the_history.stop()


def _virtual(device: Device | None) -> VirtualGpu | None:
    """The virtual GPU that is meant: `device`, or the open one where none is named."""
    current = open_card()
    if device is not None and device is not current:
        return None
    return current


def _refuse_other_virtual(device: Device | None) -> None:
    if device is not None and device.torch.type == "vgpu" and _virtual(device) is None:
        raise DeviceError(f"the memory of {device.name}", "it is closed", f'Open it again: tk.device("{device.name}")')


def _rows_held(virtual: VirtualGpu, builder: TraceBuilder) -> list[Row]:
    """What is alive on the virtual GPU, as rows: segments, then blocks by address."""
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
    if not torch.cuda.is_available():
        return None
    the_history.start(anew=anew, lines=log.lines, events=events)
    return the_history
