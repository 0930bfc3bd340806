"""Replay the allocations of a recorded run on a card of another size, or with other settings of CUDA's allocator.

`replay` feeds the alloc and free events of a trace to the allocator of the virtual GPU. It reports the peaks if they fit, and
otherwise the first allocation that fails. `what_if` does so for several cards and settings. No GPU and no torch operation is
needed: an allocator sees only sizes, addresses and streams. Kernels or workspaces that differ by card are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.core.errors import TraceError
from toolkit.core.units import MiB, bytes_text
from toolkit.gpu.catalogue import Gpus, find_specs
from toolkit.gpu.virtual.allocator.blocks import Block, Blocks, Settings
from toolkit.trace.columns import KINDS
from toolkit.trace.events import Trace, TraceBuilder

if TYPE_CHECKING:
    import pandas as pd

# Memory of a card that a process uses outside of PyTorch's segments: the CUDA context and its kernels. Measured on an H200 with
# PyTorch 2.11 and CUDA 13.0: the memory in use minus the memory reserved, as an out-of-memory message stated them.
CONTEXT_BYTES = 588 * MiB
_ASKED = "replaying a trace"
_NEAR = 1 / 256  # precision of the search for the smallest capacity, as a share of it; at least 2 MiB
_UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Failure:
    """The first allocation that failed: its row in the trace, the bytes requested, and the state of the allocator."""

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
        """Bytes that are reserved and free but unusable: fragments between blocks in use, or segments of another stream."""
        return self.reserved_bytes - self.allocated_bytes

    @property
    def place(self) -> str:
        """The place as text: the line of code, else the cell, the step or the row of the trace."""
        if self.where:
            first = self.where.split(" > ")[0]
            return f"{first.replace(':', ' line ', 1)}" if first.startswith("cell ") else self.where
        return f"cell {self.cell}" if self.cell >= 0 else f"step {self.step}" if self.step >= 0 else f"row {self.row}"


@dataclass(frozen=True, repr=False)
class Replay:
    """The result of replaying a run on a card of `capacity_bytes`, of which `context_bytes` are not available to PyTorch.

    The peaks cover the whole run, or the part before the failure. `idle_at_peak_bytes` were reserved but not allocated when the
    reserved memory was at its maximum. `remedy` is "expandable_segments" if a failed run fits with that setting.
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
        """The share of the reserved memory that was not allocated, at the maximum of the reserved memory."""
        return self.idle_at_peak_bytes / self.peak_reserved_bytes if self.peak_reserved_bytes else 0.0

    def __repr__(self) -> str:
        failure = self.failure
        if failure is None:
            return (
                f"fits in {bytes_text(self.capacity_bytes)}: at most {bytes_text(self.peak_allocated_bytes)} allocated, "
                f"{bytes_text(self.peak_reserved_bytes)} reserved, {self.fragmentation:.0%} of that idle"
            )
        text = (
            f"fails at {failure.place}: {bytes_text(failure.asked_bytes)} requested, {bytes_text(failure.allocated_bytes)} "
            f"allocated, {bytes_text(failure.in_pieces_bytes)} reserved but fragmented"
        )
        return f"{text}; fits with {self.remedy}" if self.remedy else text


@dataclass(frozen=True)
class _Events:
    """The allocations and frees of a trace, as plain lists (fastest to loop over), and their rows."""

    takes: list[bool]
    sizes: list[int]
    addresses: list[int]
    streams: list[int]
    rows: Any


def replay(
    trace: Trace, *, capacity_bytes: int, settings: Settings | None = None, context_bytes: int = CONTEXT_BYTES, device: int = 0,
) -> Replay:  # fmt: skip
    """Replay the allocations of `trace` on `device`, on a card of `capacity_bytes` with the given allocator `settings`.

    Blocks that were alive when the recording began come first, if the trace has them. Frees of blocks whose allocation was not
    recorded are left out. Raises TraceError if the trace has no allocations, or none with addresses.
    """
    settings = settings or Settings()
    events = _events(trace, device)
    found = _run(trace, events, capacity_bytes, context_bytes, settings)
    if found.fits or settings.expandable_segments:
        return found
    growing = Settings(True, None, settings.roundup_power2_divisions, settings.garbage_collection_threshold)
    if not _run(trace, events, capacity_bytes, context_bytes, growing).fits:
        return found
    return replace(found, remedy="expandable_segments")


def what_if(
    trace: Trace, gpus: Gpus = None,
    settings: Settings | str | Iterable[Settings | str] | None = None, *, context_bytes: int = CONTEXT_BYTES, device: int = 0,
) -> pd.DataFrame:  # fmt: skip
    """Replay `trace` on several cards of the catalogue and with several settings: one row per pair.

    `gpus` are GPUs of the catalogue or their keys, or one of them (default: all). `settings` are Settings, or texts in the
    syntax of PYTORCH_CUDA_ALLOC_CONF, or one of them (default: PyTorch's defaults, and expandable segments). Columns: gpu,
    capacity_bytes, settings, fits, peak_allocated_bytes, peak_reserved_bytes, fragmentation, fails_at, fails_cell, fails_step,
    asked_bytes, and smallest_bytes: the memory of the smallest card on which the run fits with these settings, including the
    CUDA context. Raises UnknownNameError for an unknown card.
    """
    import pandas as pd

    cards = find_specs(gpus)
    given = [settings] if isinstance(settings, str | Settings) else settings
    chosen = [Settings(), Settings(expandable_segments=True)] if given is None else given
    events, table = _events(trace, device), []
    for each in (_settings(each) for each in chosen):
        free = _run(trace, events, _UNLIMITED, 0, each)
        smallest = _smallest(trace, events, each, free) + context_bytes
        for card in cards:
            capacity = card.memory_bytes
            roomy = free.peak_reserved_bytes + context_bytes <= capacity
            table.append(
                _row(card.key, capacity, free if roomy else _run(trace, events, capacity, context_bytes, each), smallest)
            )
    return pd.DataFrame(table)


def _settings(given: Settings | str) -> Settings:
    """Parse settings from the text that a table prints, or from the syntax of PYTORCH_CUDA_ALLOC_CONF."""
    if isinstance(given, Settings):
        return given
    return Settings() if given == str(Settings()) else Settings.parse(given)


def joined(traces: Iterable[Trace]) -> Trace:
    """Join consecutive measurements of one process, such as the cells of a notebook, into one trace to replay.

    Memory may change between two measurements. A block that is missing when the next one begins is freed at that point, and a
    block that is new then is allocated there. Only allocations and frees are kept.
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
    """Return the smallest PyTorch memory that the run fits in, between its peak allocated and its peak reserved bytes."""
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
    """Return the rows to replay, in order. Raises TraceError if their addresses are unknown."""
    rows = np.flatnonzero(trace.is_kind("alloc", "free") & (trace["device"] == device))
    takes = trace.is_kind("alloc")[rows]
    if not takes.any():
        raise TraceError(_ASKED, f"it has no allocations on GPU {device}", "Measure work on a GPU with tk.memory")
    addresses = trace["address"][rows]
    if (addresses < 0).any():
        found = f"{int((addresses < 0).sum()):,} of its allocations and frees have no address"
        raise TraceError(_ASKED, found, "Measure the run again, because files of older versions have no addresses")
    requested = trace["requested"][rows]
    sizes = np.where(requested < 0, trace["bytes"][rows], requested)
    streams = np.maximum(trace["stream"][rows], 0)
    return _Events(takes.tolist(), sizes.tolist(), addresses.tolist(), streams.tolist(), rows)


def _run(trace: Trace, events: _Events, capacity: int, context: int, settings: Settings) -> Replay:
    """Replay until the end, or until the first allocation that fails."""
    blocks = Blocks(max(capacity - context, 0), settings)
    if settings.garbage_collection_threshold or settings.per_process_memory_fraction < 1:
        # PyTorch collects garbage only if the process has a limit
        blocks.limit_bytes = min(int(settings.per_process_memory_fraction * capacity), blocks.total_bytes)
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
    counters.update_allocated_peaks()
    failure = None if refused is None else _failure(trace, int(events.rows[refused]), size, blocks)
    return Replay(capacity, context, settings, counters.peak_bytes, most, max(idle, 0), failure)


def _failure(trace: Trace, row: int, asked: int, blocks: Blocks) -> Failure:
    where = int(trace["where"][row])
    return Failure(
        row, int(trace["start_ns"][row]), trace.strings[where] if where >= 0 else None, int(trace["step"][row]),
        int(trace["cell"][row]), asked, blocks.counters.bytes, blocks.reserved_bytes,
    )  # fmt: skip
