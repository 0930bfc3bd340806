"""The history of CUDA's allocator: every allocation, exact, with the lines of Python that asked for it.

PyTorch's allocator keeps it (`torch.cuda.memory._record_memory_history`) and gives it out as a snapshot. A scope takes one
when it begins, for what is alive, and one when it ends; its events are those in between. Where somebody else has switched
the history on, it is read and left as it is. No counters are reset.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.devices import base
from toolkit.devices.cuda_blocks import BlockSizes
from toolkit.trace import Trace, TraceBuilder
from toolkit.traces.frames import chain
from toolkit.traces.steps import steps_from_ranges

Row = tuple[int, ...]
Snapshot = dict[str, Any]
_KINDS = {
    "alloc": "alloc", "free_requested": "free", "segment_alloc": "segment_alloc", "segment_map": "segment_alloc",
    "segment_free": "segment_free", "segment_unmap": "segment_free", "oom": "oom",
}  # fmt: skip


class Range(NamedTuple):
    """A decode step on the wall clock, in ns."""

    start_ns: int
    end_ns: int
    step: int
    name: str


class CudaScope(NamedTuple):
    """What a scope found when it began: the allocator's segments, and how many entries each device had."""

    segments: list[dict[str, Any]]
    entries: tuple[int, ...]
    start_ns: int
    steps: int


class CudaHistory:
    """The allocator's history in this process. Not for several threads at once: `history` has the lock."""

    def __init__(self) -> None:
        self.on = self._foreign = False
        self.steps: list[Range] = []

    def start(self, *, anew: bool) -> None:
        """Let the allocator keep its history. `anew`: nobody needs what it has so far."""
        if not self.on:
            self._foreign = bool(torch._C._cuda_isHistoryEnabled())
        if not self._foreign and (anew or not self.on):
            # a line for each allocation; who frees isn't asked, which halves what a decode step pays
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", clear_history=True)
            self.steps.clear()
        self.on = True

    def stop(self) -> None:
        """Let the allocator forget, unless somebody else wants its history."""
        if self.on and not self._foreign:
            torch.cuda.memory._record_memory_history(None)
        self.on = False

    def begin(self) -> CudaScope:
        """What is alive now, and where in the history we are."""
        found = _snapshot()
        return CudaScope(found["segments"], tuple(map(len, found["device_traces"])), time.time_ns(), len(self.steps))

    def end(self, scope: CudaScope, meta: dict[str, Any]) -> Trace:
        """The events since a scope began, after what was alive then (`meta["opening"]` rows)."""
        found = _snapshot()
        builder, lines = TraceBuilder(), Lines()
        sizes = [BlockSizes() for _ in found["device_traces"]]
        skipped = [*scope.entries, *[0] * len(sizes)]
        entries = [since[skipped[device] :] for device, since in enumerate(found["device_traces"])]
        # the allocator's clock and ours differ by some microseconds: what was there at the beginning comes first
        start_ns = min([scope.start_ns, *(since[0]["time_us"] * 1000 for since in entries if since)])
        before = _opening(scope.segments, start_ns, builder, lines, sizes)
        for device, since in enumerate(entries):
            _add_entries(builder, since, device, lines, sizes[device])
        for r in self.steps[scope.steps :]:
            builder.add("mark", r.start_ns, r.end_ns - r.start_ns, device=-1, step=r.step, name=r.name)
        meta = {**meta, "opening": len(before), "unaccounted_bytes": _unaccounted(found["segments"], sizes)}
        return _with_steps(builder.build(meta, 0, before, start_ns), self.steps[scope.steps :], start_ns)


the_history = CudaHistory()


class Lines:
    """The text of `where` for a stack of frames, worked out once a stack: frames of one snapshot are shared objects."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], str | None] = {}

    def of(self, frames: list[dict[str, Any]]) -> str | None:
        """The `where` of frames, innermost first."""
        key = tuple(map(id, frames))
        if key not in self._known:
            self._known[key] = chain(frames, base.short_path)
        return self._known[key]


def _snapshot() -> Snapshot:
    return torch._C._cuda_memorySnapshot(None)  # type: ignore[no-any-return]


def _opening(
    segments: list[dict[str, Any]], start_ns: int, builder: TraceBuilder, lines: Lines, sizes: list[BlockSizes]
) -> list[Row]:
    """Rows of what was alive when a scope began: segments, and blocks with the lines that they remember."""
    rows = []
    for segment in segments:
        device = segment["device"]
        on: dict[str, Any] = {"device": device, "stream": segment["stream"]}
        size, address = segment["total_size"], segment["address"]
        rows.append(builder.row("segment_alloc", start_ns, bytes=size, address=address, **on))
        sizes[device].open_segment(segment)
        for block in segment["blocks"]:
            address = block.get("address", address)
            if block["state"] == "active_allocated":
                asked, where = block.get("requested_size", -1), lines.of(block.get("frames") or [])
                row = builder.row("alloc", start_ns, bytes=block["size"], address=address, requested=asked, where=where, **on)
                rows.append(row)
            address += block["size"]
    return rows


def _add_entries(builder: TraceBuilder, entries: list[dict[str, Any]], device: int, lines: Lines, sizes: BlockSizes) -> None:
    cell = base.current_cell()
    for entry in entries:
        action, address, size = entry["action"], entry.get("addr", -1), entry["size"]
        n_bytes = sizes.take(action, address, size)
        kind = _KINDS.get(action)
        if kind is None:
            continue
        frames = entry.get("frames")
        builder.add(
            kind, entry["time_us"] * 1000, bytes=n_bytes, device=device, stream=entry["stream"], address=address, cell=cell,
            requested=size if kind == "alloc" else -1, where=lines.of(frames) if frames else None,
        )  # fmt: skip


def _with_steps(trace: Trace, ranges: list[Range], origin_ns: int) -> Trace:
    """`trace` with the step of each event, by time."""
    if not ranges:
        return trace
    columns = np.array([(r.start_ns - origin_ns, r.end_ns - origin_ns, r.step) for r in ranges], np.int64)
    steps = steps_from_ranges(trace["start_ns"], columns[:, 0], columns[:, 1], columns[:, 2])
    steps[: int(trace.meta["opening"])] = -1
    return Trace({**trace.columns, "step": steps}, trace.strings, trace.meta)


def _unaccounted(segments: list[dict[str, Any]], sizes: list[BlockSizes]) -> int:
    """By how much the events' sum misses what the allocator says is allocated: 0, unless a history overflowed."""
    held = sum(block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated")
    return held - sum(device.allocated_bytes for device in sizes)
