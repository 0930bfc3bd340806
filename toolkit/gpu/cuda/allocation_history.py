"""Read the history of CUDA's caching allocator: every allocation with the line of Python that requested it.

PyTorch's allocator keeps the history (`torch.cuda.memory._record_memory_history`) and returns it as a snapshot. A memory scope
takes one snapshot when it begins, to learn which blocks are allocated, and one when it ends; its events are the entries
added in between. A history that other code has switched on is read and left unchanged. No counters are reset.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from toolkit.core.callers import NOTHING_RUNS, Running, current_cell, is_installed, is_library, only_calls, short_path
from toolkit.gpu.allocation_log import StepRange, log
from toolkit.trace.assemble import KIND, Strings, from_columns
from toolkit.trace.events import Trace
from toolkit.trace.snapshot.block_sizes import ACTION, Rules, block_sizes
from toolkit.trace.snapshot.frames import Kinds, chain
from toolkit.trace.steps import steps_from_ranges

Snapshot = dict[str, Any]
_FILES = Kinds(is_installed, is_library)  # of this process
_FEW = 1000  # entries kept while no scope is open
_KINDS = {
    "alloc": KIND["alloc"], "free_requested": KIND["free"], "segment_alloc": KIND["segment_alloc"],
    "segment_map": KIND["segment_alloc"], "segment_free": KIND["segment_free"], "segment_unmap": KIND["segment_free"],
    "oom": KIND["oom"],
}  # fmt: skip


class CudaScope(NamedTuple):
    """The state when a scope began: the allocator's segments, the numbers of entries per device and of decode steps, and the
    functions that ran.
    """

    segments: list[dict[str, Any]]
    entries: tuple[int, ...]
    start_ns: int
    steps: int
    within: Running


class CudaHistory:
    """The allocator's history in this process. Not thread-safe: callers hold the lock of the allocation log."""

    def __init__(self) -> None:
        self.on = self._lines = self._foreign = False

    def start(self, *, anew: bool, lines: bool, events: bool = True) -> None:
        """Make the allocator record its history. `anew` discards the entries recorded so far.

        `lines` records the Python line of each allocation. `events=False` keeps few events, for callers that only want the
        lines of the blocks that stay allocated.
        """
        if not self.on:
            importlib.import_module("torch._inductor.codecache")  # the first snapshot imports it, which takes seconds
            self._foreign = bool(torch._C._cuda_isHistoryEnabled())
            anew = True
        if not self._foreign and (anew or (lines and not self._lines)):
            # No lines for frees, which halves the cost of a decode step.
            context = "alloc" if lines else None
            most = sys.maxsize if events else _FEW
            # No "free_completed" entries: unless another stream uses the block, a free completes at once (see `_sizes`).
            torch.cuda.memory._record_memory_history(
                "all", context=context, stacks="python", max_entries=most, clear_history=anew, skip_actions=["free_completed"]
            )
            self._lines = lines
        if anew or log.steps is None:
            log.steps = []
        self.on = True

    def stop(self) -> None:
        """Stop the history and drop its entries, unless other code switched it on."""
        if self.on and not self._foreign:
            torch.cuda.memory._record_memory_history(None)
        self.on = False
        log.steps = None

    def begin(self, within: Running) -> CudaScope:
        """Return the blocks that are allocated now, and the position in the history. `within` are the functions that run."""
        found = _snapshot()
        entries = tuple(map(len, found["device_traces"]))
        return CudaScope(found["segments"], entries, time.time_ns(), len(log.steps or ()), within)

    def end(self, scope: CudaScope, meta: dict[str, Any]) -> Trace:
        """Return the trace of a scope: the blocks allocated when it began (`meta["opening"]` rows), then the events since."""
        found = _snapshot()
        rules, table = Rules.of(found.get("allocator_settings") or {}), Table(scope.within)
        skipped = [*scope.entries, *[0] * len(found["device_traces"])]
        entries = [since[skipped[device] :] for device, since in enumerate(found["device_traces"])]
        # The allocator's clock and ours differ by some microseconds. The opening rows come first in any case.
        start_us = min([scope.start_ns // 1000, *(since[0]["time_us"] for since in entries if since)])
        for segment in scope.segments:
            table.add_opening(segment, start_us)
        opening = len(table)
        for device, since in enumerate(entries):
            there = [segment for segment in scope.segments if segment["device"] == device]
            table.add_entries(since, _sizes(there, since, rules), device)
        ranges = (log.steps or [])[scope.steps :]
        for r in ranges:
            table.add_mark(r)
        missing = _held(found["segments"]) - table.held_bytes
        return table.trace({**meta, "opening": opening, "unaccounted_bytes": missing}, start_us, opening, ranges)


the_history = CudaHistory()


class Table:
    """The columns of a trace under construction. Columns are faster than rows: ten thousand events take milliseconds."""

    NAMES = ("kind", "time_us", "dur_ns", "bytes", "stream", "device", "address", "requested", "where", "name", "step")

    def __init__(self, within: Running = NOTHING_RUNS) -> None:
        self._within = [*within.values()]
        self.columns: dict[str, list[int]] = {name: [] for name in self.NAMES}
        self.held_bytes = 0
        self._strings = Strings()
        self._known: dict[tuple[int, ...], int] = {}  # by the ids of a stack's frames, which entries share

    def __len__(self) -> int:
        return len(self.columns["kind"])

    def where(self, frames: list[dict[str, Any]] | None) -> int:
        """Return the code of the text of a stack (innermost frame first), computed once per stack; -1 for none."""
        if not frames:
            return -1
        key = tuple(map(id, frames))
        code = self._known.get(key)
        if code is None:
            text = chain(frames, short_path, _FILES, only_calls, self._within)
            code = self._known[key] = -1 if text is None else self._strings.code(text)
        return code

    def add(self, n: int, **columns: Any) -> None:
        """Append `n` rows. A column is a list, or one number for all rows; a missing one is -1, or 0 for durations."""
        for name, column in self.columns.items():
            given = columns.get(name, 0 if name == "dur_ns" else -1)
            column.extend(given if isinstance(given, list) else [given] * n)

    def add_opening(self, segment: dict[str, Any], start_us: int) -> None:
        """Append a segment that existed when the scope began, and its allocated blocks with their lines."""
        on = {"device": segment["device"], "stream": segment["stream"], "time_us": start_us}
        self.add(1, kind=KIND["segment_alloc"], bytes=segment["total_size"], address=segment["address"], **on)
        alive = [(address, block) for address, block in _blocks(segment) if block["state"] == "active_allocated"]
        sizes = [block["size"] for _, block in alive]
        self.held_bytes += sum(sizes)
        self.add(
            len(alive), kind=KIND["alloc"], bytes=sizes, address=[address for address, _ in alive],
            requested=[block.get("requested_size", -1) for _, block in alive],
            where=[self.where(block.get("frames")) for _, block in alive], **on,
        )  # fmt: skip

    def add_entries(self, entries: list[dict[str, Any]], sizes: list[int], device: int) -> None:
        """Append the entries of a device, in order; `sizes` are the bytes that the allocator's counters count."""
        pairs = [pair for pair in zip(entries, sizes, strict=True) if pair[0]["action"] in _KINDS]
        shown, sizes = [entry for entry, _ in pairs], [size for _, size in pairs]
        actions = [entry["action"] for entry in shown]
        self.held_bytes += sum(size for size, action in zip(sizes, actions, strict=True) if action == "alloc")
        self.held_bytes -= sum(size for size, action in zip(sizes, actions, strict=True) if action == "free_requested")
        self.add(
            len(shown), kind=[_KINDS[action] for action in actions], bytes=sizes, device=device,
            time_us=[entry["time_us"] for entry in shown], stream=[entry["stream"] for entry in shown],
            address=[entry.get("addr", -1) for entry in shown],
            requested=[entry["size"] if entry["action"] == "alloc" else -1 for entry in shown],
            where=[self.where(entry.get("frames")) for entry in shown],
        )  # fmt: skip

    def add_mark(self, r: StepRange) -> None:
        """Append a decode step."""
        name, duration = self._strings.code(r.name), r.end_ns - r.start_ns
        self.add(1, kind=KIND["mark"], time_us=r.start_ns // 1000, dur_ns=duration, bytes=0, step=r.step, name=name)

    def trace(self, meta: dict[str, Any], start_us: int, opening: int, ranges: list[StepRange]) -> Trace:
        """Return the trace: times count from `start_us`, and events carry the step in whose range they lie."""
        columns = {name: np.array(column, np.int64) for name, column in self.columns.items()}
        times = columns["start_ns"] = (columns.pop("time_us") - start_us) * 1000
        if ranges:
            spans = np.array([(r.start_ns, r.end_ns, r.step) for r in ranges], np.int64)
            spans[:, :2] -= start_us * 1000
            steps = steps_from_ranges(times, spans[:, 0], spans[:, 1], spans[:, 2])
            mine = columns["kind"] != KIND["mark"]
            mine[:opening] = False
            columns["step"] = np.where(mine, steps, columns["step"])
        columns["cell"] = np.where(np.arange(len(times)) < opening, -1, current_cell())
        return from_columns(list(self._strings.codes), meta, **columns)


def _snapshot() -> Snapshot:
    return torch._C._cuda_memorySnapshot(None)  # type: ignore[no-any-return]


def _blocks(segment: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the blocks of a segment, each with its address."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield address, block
        address += block["size"]


def _held(segments: Iterable[dict[str, Any]]) -> int:
    """Return the allocated bytes of segments."""
    return sum(block["size"] for segment in segments for block in segment["blocks"] if block["state"] == "active_allocated")


def _sizes(segments: list[dict[str, Any]], entries: list[dict[str, Any]], rules: Rules) -> list[int]:
    """Return the bytes that the allocator's counters count for each entry: for an alloc and its free, the size of the block.

    Without "free_completed" entries, a free is taken to complete at once. A block that another stream still uses then counts as
    free too early, and a block allocated right before it may be counted too small, by at most 1 MiB.
    """
    told = any(entry["action"] == "free_completed" for entry in entries)
    busy = ("active_allocated", "active_pending_free") if told else ("active_allocated",)
    used = sorted(((a, b) for s in segments for a, b in _blocks(s) if b["state"] in busy), key=lambda pair: -pair[0])
    there = [("segment_alloc", segment["address"], segment["total_size"]) for segment in segments]
    there += [("alloc", address, block["size"]) for address, block in used]
    happened = [(entry["action"], entry.get("addr", -1), entry["size"]) for entry in entries]
    action, address, size = zip(*there, *happened, strict=True) if there or happened else ((), (), ())
    number = ACTION if told else {**ACTION, "free_requested": ACTION["free"]}
    codes = np.array([number.get(name, 0) for name in action], np.int64)
    given: list[int] = block_sizes(codes, np.array(address, np.int64), np.array(size, np.int64), rules)[len(there) :].tolist()
    held = {address: block["size"] for address, block in used}
    for i, (name, where, _) in enumerate(happened):
        if name == "alloc":
            held[where] = given[i]
        elif name == "free_requested":
            given[i] = held.get(where, given[i])
    return given
