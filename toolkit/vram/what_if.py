"""What if: the allocations of a recorded run, on a card of another size or with other settings of CUDA's allocator.

`replay` runs a trace's alloc and free rows through the allocator of the virtual GPU and says whether they fit and what they
take, or which line would have been refused, and why. `what_if` does so for several cards and settings. No GPU and no torch
operation is involved: sizes, addresses and streams are all that an allocator sees. What a program would have done
differently on another card (another kernel, another workspace) is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.core.errors import TraceError, unknown_name
from toolkit.core.units import MiB, bytes_text
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.virtual.allocator.blocks import Block, Blocks, Settings
from toolkit.trace.columns import KINDS
from toolkit.trace.events import Trace, TraceBuilder

if TYPE_CHECKING:
    import pandas as pd

# What a process takes of a card beside PyTorch's segments: the CUDA context and its kernels. Measured on an H200 with PyTorch
# 2.11 and CUDA 13.0 as what an out-of-memory message counted as in use beyond what was reserved.
CONTEXT_BYTES = 588 * MiB
_ASKED = "replaying a trace"
_NEAR = 1 / 256  # how exactly the smallest capacity is looked for, as a share of it; at least 2 MiB
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Failure:
    """The first allocation that was refused: its row in the trace, what was asked for, and what was held then."""

    row: int
    time_ns: int
    where: str | None
    step: int
    cell: int
    asked_bytes: int
    allocated_bytes: int
    reserved_bytes: int

    @property
    def in_pieces_bytes(self) -> int:
        """Reserved and free, and yet of no use: in pieces between held blocks, or in another stream's segments."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def place(self) -> str:
        """The place in words: the line of code, else the cell, the step or the row of the trace."""
        if self.where:
            first = self.where.split(" > ")[0]
            return f"{first.replace(':', ' line ', 1)}" if first.startswith("cell ") else self.where
        return f"cell {self.cell}" if self.cell >= 0 else f"step {self.step}" if self.step >= 0 else f"row {self.row}"


@dataclass(frozen=True, repr=False)
class Replay:
    """How a run went on a card of `capacity_bytes`, of which `context_bytes` were not PyTorch's.

    The peaks are of the whole run, or until it failed. `idle_at_peak_bytes` was reserved and not allocated when most was
    reserved. `remedy` names settings with which a run that failed would have fitted, where expandable segments are that.
    """

    capacity_bytes: int
    context_bytes: int
    settings: Settings
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    idle_at_peak_bytes: int
    failure: Failure | None = None
    remedy: str | None = None

    @property
    def fits(self) -> bool:
        return self.failure is None

    @property
    def fragmentation(self) -> float:
        """The share of what was reserved that was not allocated, when most was reserved."""
        return self.idle_at_peak_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0

    def __repr__(self) -> str:
        failure = self.failure
        if failure is None:
            return (
                f"fits in {bytes_text(self.capacity_bytes)}: at most {bytes_text(self.peak_allocated_bytes)} allocated, "
                f"{bytes_text(self.peak_reserved_bytes)} reserved, {self.fragmentation:.0%} of it idle then"
            )
        text = (
            f"fails at {failure.place}: {bytes_text(failure.asked_bytes)} asked, {bytes_text(failure.allocated_bytes)} "
            f"allocated, {bytes_text(failure.in_pieces_bytes)} reserved but in pieces"
        )
        return f"{text}; {self.remedy} would fit" if self.remedy else text


@dataclass(frozen=True)
class _Events:
    """A trace's allocations and frees as plain lists, which a loop reads fastest, and the rows they come from."""

    takes: list[bool]
    sizes: list[int]
    addresses: list[int]
    streams: list[int]
    rows: Any


def replay(
    trace: Trace, *, capacity_bytes: int, settings: Settings | None = None, context_bytes: int = CONTEXT_BYTES, device: int = 0,
) -> Replay:  # fmt: skip
    """The allocations of `trace` on `device`, on a card of `capacity_bytes` with these `settings` of the allocator.

    Blocks that were alive when the recording began come first, where the trace has them; a block whose allocation was not
    recorded is left out. Raises TraceError where there is nothing to replay: no allocations, or none with addresses.
    """
    settings = settings or Settings()
    events = _events(trace, device)
    found = _run(trace, events, capacity_bytes, context_bytes, settings)
    if found.fits or settings.expandable_segments:
        return found
    growing = Settings(True, None, settings.roundup_power2_divisions, settings.garbage_collection_threshold)
    if not _run(trace, events, capacity_bytes, context_bytes, growing).fits:
        return found
    return Replay(**{**_fields(found), "remedy": "expandable_segments"})


def what_if(
    trace: Trace, gpus: Iterable[str] | None = None, settings: Iterable[Settings | str] | None = None, *,
    context_bytes: int = CONTEXT_BYTES, device: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """The same for several cards of the catalogue (all, unless named) and settings, a row for each pair.

    Settings may be texts as in PYTORCH_CUDA_ALLOC_CONF; unless given, the defaults and expandable segments. Columns: gpu,
    capacity_bytes, settings, fits, peak_allocated_bytes, peak_reserved_bytes, fragmentation, fails_at, fails_cell,
    fails_step, asked_bytes, and smallest_bytes: the smallest card that would do with these settings, context included.
    """
    import pandas as pd

    names = list(CATALOGUE if gpus is None else gpus)
    for name in names:
        if name not in CATALOGUE:
            raise unknown_name("GPU", name, CATALOGUE)
    chosen = [Settings(), Settings(expandable_segments=True)] if settings is None else settings
    events, table = _events(trace, device), []
    for each in (_settings(each) for each in chosen):
        free = _run(trace, events, _UNLIMITED, 0, each)
        smallest = _smallest(trace, events, each, free) + context_bytes
        for name in names:
            capacity = CATALOGUE[name].memory_bytes
            roomy = free.peak_reserved_bytes + context_bytes <= capacity
            table.append(_row(name, capacity, free if roomy else _run(trace, events, capacity, context_bytes, each), smallest))
    return pd.DataFrame(table)


def _settings(given: Settings | str) -> Settings:
    """Settings as a table prints them, or as PYTORCH_CUDA_ALLOC_CONF has them."""
    if isinstance(given, Settings):
        return given
    return Settings() if given == str(Settings()) else Settings.parse(given)


def joined(traces: Iterable[Trace]) -> Trace:
    """Measurements of one process, one after the other, as one trace to replay: a notebook's cells.

    What changed between two of them, where nothing was measured, is what the next one's opening doesn't have or has more: it
    is freed or allocated at its beginning. Only allocations and frees are kept.
    """
    builder, held, shift = TraceBuilder(), dict[int, tuple[int, int]](), 0
    for trace in traces:
        places, kinds = trace.text("where"), trace.is_kind("alloc", "free")
        first = int(trace.meta.get("opening", 0))
        columns = {name: trace[name].tolist() for name in _JOINED}
        there = {columns["address"][i]: i for i in range(first) if kinds[i]}
        for address, (size, device) in list(held.items()):
            if address not in there or columns["bytes"][there[address]] != size:
                builder.add("free", shift, bytes=size, address=address, device=device)
                del held[address]
        for i in [*(i for address, i in there.items() if address not in held), *np.flatnonzero(kinds[first:]) + first]:
            row = {name: column[i] for name, column in columns.items()}
            kind, start = KINDS[row.pop("kind")], shift + row.pop("start_ns")
            builder.add(kind, start, where=places[i], **row)
            if kind == "alloc":
                held[row["address"]] = row["bytes"], row["device"]
            else:
                held.pop(row["address"], None)
        shift += columns["start_ns"][-1] + 1 if columns["start_ns"] else 0
    return builder.build({"opening": 0})


_JOINED = ("kind", "start_ns", "bytes", "address", "requested", "stream", "device", "step", "cell")


def _row(name: str, capacity: int, found: Replay, smallest: int) -> dict[str, object]:
    failure = found.failure
    return {
        "gpu": name, "capacity_bytes": capacity, "settings": str(found.settings), "fits": found.fits,
        "peak_allocated_bytes": found.peak_allocated_bytes, "peak_reserved_bytes": found.peak_reserved_bytes,
        "fragmentation": found.fragmentation, "fails_at": failure.place if failure else None,
        "fails_cell": failure.cell if failure else -1, "fails_step": failure.step if failure else -1,
        "asked_bytes": failure.asked_bytes if failure else 0, "smallest_bytes": smallest,
    }  # fmt: skip


def _smallest(trace: Trace, events: _Events, settings: Settings, free: Replay) -> int:
    """The least memory for PyTorch that the run fits into: between what it held at once and what it reserved unhindered."""
    low, high = free.peak_allocated_bytes, free.peak_reserved_bytes
    if low == high or _run(trace, events, low, 0, settings).fits:
        return low
    near = max(2 * MiB, int(high * _NEAR))
    while high - low > near:
        middle = (low + high) // 2
        if _run(trace, events, middle, 0, settings).fits:
            high = middle
        else:
            low = middle
    return high


def _events(trace: Trace, device: int) -> _Events:
    """The rows to replay, in order. Raises TraceError where their addresses are not known."""
    rows = np.flatnonzero(trace.is_kind("alloc", "free") & (trace["device"] == device))
    takes = trace.is_kind("alloc")[rows]
    if not takes.any():
        raise TraceError(_ASKED, f"it has no allocations on GPU {device}", "Record with memory: tk.record(gpu)")
    addresses = trace["address"][rows]
    if (addresses < 0).any():
        found = f"{int((addresses < 0).sum()):,} of its allocations and frees have no address"
        raise TraceError(_ASKED, found, "Record it again: older recordings don't say where a block lies")
    requested = trace["requested"][rows]
    sizes = np.where(requested < 0, trace["bytes"][rows], requested)
    streams = np.maximum(trace["stream"][rows], 0)
    return _Events(takes.tolist(), sizes.tolist(), addresses.tolist(), streams.tolist(), rows)


def _run(trace: Trace, events: _Events, capacity: int, context: int, settings: Settings) -> Replay:
    """One replay, until the end or the first refusal."""
    blocks = Blocks(max(capacity - context, 0), settings)
    if settings.garbage_collection_threshold:  # which PyTorch heeds only where the process has a limit
        blocks.limit_bytes = blocks.total_bytes
    counters, take, give = blocks.counters, blocks.take, blocks.give
    held: dict[int, Block] = {}
    most = idle = size = 0

    def taken(kind: str, n_bytes: int, address: int) -> None:
        nonlocal most, idle
        if kind == "segment_alloc" and blocks.reserved_bytes > most:
            most, idle = blocks.reserved_bytes, blocks.reserved_bytes - counters.bytes - size

    blocks.tell = taken
    refused = None
    for at, (takes, size, address, stream) in enumerate(
        zip(events.takes, events.sizes, events.addresses, events.streams, strict=True)
    ):
        old = held.pop(address, None)
        if old is not None:
            give(old)
        if takes and size:
            block = take(size, stream)
            if block is None:
                refused = at
                break
            held[address] = block
    counters.note_grown()
    failure = None if refused is None else _failure(trace, int(events.rows[refused]), size, blocks)
    return Replay(capacity, context, settings, counters.peak_bytes, most, max(idle, 0), failure)


def _failure(trace: Trace, row: int, asked: int, blocks: Blocks) -> Failure:
    where = int(trace["where"][row])
    return Failure(
        row, int(trace["start_ns"][row]), trace.strings[where] if where >= 0 else None, int(trace["step"][row]),
        int(trace["cell"][row]), asked, blocks.counters.bytes, blocks.reserved_bytes,
    )  # fmt: skip


def _fields(found: Replay) -> dict[str, Any]:
    return {name: getattr(found, name) for name in Replay.__dataclass_fields__}
