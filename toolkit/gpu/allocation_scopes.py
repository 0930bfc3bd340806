"""Memory scopes: the trace of every allocation between two points of a program.

`begin` opens a scope and `end` returns its trace. On the virtual GPU the events come from the allocation log, on CUDA from the
history that the allocator keeps, which is fetched when a scope begins and when it ends. Scopes may nest and overlap: each is a
range of the same log, so no scope takes events from another one and no peak counter is reset.
"""

from __future__ import annotations

from typing import Any

import torch

from toolkit.core.callers import running
from toolkit.core.collector import no_collection
from toolkit.core.errors import DeviceError
from toolkit.core.signals import signals_deferred
from toolkit.gpu.allocation_log import OpenScope, Row, log
from toolkit.gpu.cuda.allocation_history import CudaHistory, the_history
from toolkit.gpu.cuda.device import open_cuda
from toolkit.gpu.device import Device
from toolkit.gpu.virtual.device import VirtualGpu, open_card
from toolkit.gpu.virtual.lifetimes import settle
from toolkit.gpu.virtual.tensor import held
from toolkit.trace.events import Trace, TraceBuilder


def begin(device: Device | None = None, *, lines: bool = True, asked: bool = False) -> OpenScope:
    """Begin a scope on `device`, or on the device in use, which may also be opened later.

    The device in use is the open virtual GPU, or else every CUDA GPU. `lines=False` records no Python lines, the most
    expensive part of an event. `asked` is for `asked_for`. Raises DeviceError if `device` is a virtual GPU that is closed.
    """
    settle()
    with signals_deferred, log.lock:
        virtual = _open_virtual(device)
        if device is not None and device.torch.type == "vgpu" and virtual is None:
            raise DeviceError(f"the memory of {device.name}", "it is closed", f'Open it again: tk.device("{device.name}")')
        if log.builder is None:
            log.builder = TraceBuilder()
        begun = OpenScope(device, log.builder, lines, running(), asked=asked)
        _set_lines(begun)
        try:
            if virtual is not None:
                with signals_deferred, virtual.machine.lock:
                    begun.before = _allocated_rows(virtual, begun.builder)  # frees memory of tensors that are gone
                    begun.start_ns, begun.since = virtual.now_ns(), len(begun.builder)
            elif device is None or device.torch.type == "cuda":
                history = _cuda_history(anew=not log.scopes)
                begun.cuda = history.begin(begun.within) if history is not None else None
        except BaseException:
            if not log.scopes:
                _last_scope_ended()
            _set_lines()
            raise
        log.scopes.append(begun)
        return begun


def end(begun: OpenScope) -> Trace:
    """End a scope and return its trace: the blocks allocated when it began (`meta["opening"]` rows), then every event since.

    Raises DeviceError if the scope has already ended.
    """
    settle()
    with log.lock:
        if begun not in log.scopes:
            raise DeviceError("ending a memory scope", "it has already ended", "Begin another one")
        log.scopes.remove(begun)
        _set_lines()
        try:
            return _trace_of(begun)
        finally:
            if not log.scopes:
                _last_scope_ended()


def drop(begun: OpenScope) -> None:
    """End a scope without a trace. Does nothing if it has already ended."""
    with signals_deferred, log.lock:
        if begun in log.scopes:
            log.scopes.remove(begun)
            _set_lines()
            if not log.scopes:
                _last_scope_ended()


def _trace_of(begun: OpenScope) -> Trace:
    device = begun.device or in_use()
    meta: dict[str, Any] = {"device": "none", "clock": "measured", "sizes_only": False, "steps_from": "marks"}
    if device is not None:
        meta |= {"device": device.name, "clock": device.clock, "gpu": device.spec.name if device.spec else device.name}
        meta |= {"lines": begun.lines, "total_bytes": device.memory().total_bytes, "limit_bytes": device.limit_bytes}
    index = getattr(begun.device, "index", None)
    meta |= {} if index is None else {"device_index": index}
    with no_collection():  # building a hundred thousand rows triggers garbage collections that take longer than the building
        if device is not None and device.torch.type == "cpu":
            return TraceBuilder().build({**meta, "opening": 0})
        if begun.cuda is not None and device is not None and device.torch.type == "cuda":
            return the_history.end(begun.cuda, meta)
        return begun.builder.build({**meta, "opening": len(begun.before)}, begun.since, begun.before, begun.start_ns)


def measuring() -> bool:
    """Return whether a scope is open."""
    return bool(log.scopes)


def asked_for() -> bool:
    """Return whether a scope is open that the user wrote around some work. Those of `%memory on` and the Lab are none."""
    return any(begun.asked for begun in list(log.scopes))


def in_use() -> Device | None:
    """Return the open virtual GPU, or else the first CUDA GPU; None if there is neither."""
    return open_card() or (open_cuda(0) if torch.cuda.is_available() else None)


def keep() -> None:
    """Record lines outside of scopes too, until `release`, so that blocks allocated before a scope begins have lines."""
    with log.lock:
        log.keepers += 1
        _set_lines()
        if open_card() is None:
            _cuda_history(anew=not log.scopes, events=bool(log.scopes))


def release() -> None:
    """Undo one `keep`."""
    with log.lock:
        log.keepers = max(log.keepers - 1, 0)
        _set_lines()
        if not log.scopes:
            _last_scope_ended()


def _set_lines(*more: OpenScope) -> None:
    scopes = (*log.scopes, *more)
    log.lines = bool(log.keepers) or any(begun.lines for begun in scopes)
    log.within = {frame: code for begun in scopes for frame, code in begun.within.items()}


def _last_scope_ended() -> None:
    """Stop recording events. CUDA's allocator goes on recording lines while there is a keeper."""
    log.builder = None
    if not the_history.on:
        return
    if log.keepers:
        the_history.start(anew=True, lines=True, events=False)
    else:
        the_history.stop()


def _open_virtual(device: Device | None) -> VirtualGpu | None:
    """Return the open virtual GPU if `device` is None or is that GPU; None otherwise."""
    current = open_card()
    return current if device is None or device is current else None


def _allocated_rows(virtual: VirtualGpu, builder: TraceBuilder) -> list[Row]:
    """Return the segments, then the allocated blocks by address, of the virtual GPU as rows of `builder`."""
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


def _cuda_history(*, anew: bool, events: bool = True) -> CudaHistory | None:
    """Start the history of CUDA's allocator and return it; None without CUDA. `anew` discards its entries."""
    if not torch.cuda.is_available():
        return None
    the_history.start(anew=anew, lines=log.lines, events=events)
    return the_history
