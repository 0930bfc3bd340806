"""Read PyTorch's memory snapshots, which record what CUDA's caching allocator did.

`read_snapshot` reads a pickle of `torch.cuda.memory._dump_snapshot` without executing anything in it, and converts it to a
Trace. A snapshot contains the final segments and blocks, and the part of the history that PyTorch kept.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import TraceError, kind_of
from toolkit.core.files import open_regular
from toolkit.trace.arrays import CHECKPOINT, OPENED
from toolkit.trace.assemble import from_columns
from toolkit.trace.events import Trace
from toolkit.trace.snapshot.block_sizes import Rules
from toolkit.trace.snapshot.entries import Entries, listed
from toolkit.trace.snapshot.pickle_stream import PickleStream, Shared
from toolkit.trace.snapshot.rows import Table, device_rows, joined

ACTIVE, PENDING, INACTIVE = range(3)  # states of a block: allocated, freed but still used by a stream, free
_STATES = {"active_allocated": ACTIVE, "active_pending_free": PENDING, "active_awaiting_free": PENDING}
MOST_DEVICES = 127  # PyTorch's device indices are 8 bits
_OF_TORCH_SAVE = 0x1950A86A20F9469CFC6C  # MAGIC_NUMBER of torch/serialization.py, with which files before PyTorch 1.6 begin
_MAKE_AGAIN = "Write it again with torch.cuda.memory._dump_snapshot(path)"


def read_snapshot(path: Path) -> Trace:
    """Return the memory events of a snapshot file. Raises TraceError if it is damaged, another pickle, or would run code."""
    asked = f"opening the trace {str(path)!r}"
    entries = Entries()
    with open_regular(path, asked, TraceError) as file:
        found = PickleStream(file, os.fstat(file.fileno()).st_size, asked, entries).load()
    if not isinstance(found, dict) or "segments" not in found:
        what = CHECKPOINT if found == _OF_TORCH_SAVE else f"it is a pickle of {_what(found)}"
        raise TraceError(asked, what, OPENED)
    try:
        traces = [_rows(entries, listed(trace)) for trace in listed(found.pop("device_traces", ()))]
        segments = listed(found.get("segments", ()))
        return _trace(entries, traces, segments, found.get("allocator_settings"), found.get("toolkit"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise TraceError(asked, f"the snapshot has unexpected fields ({error!r})"[:400], _MAKE_AGAIN) from error


def _rows(entries: Entries, trace: Sequence[Any]) -> array[int]:
    """Return the row numbers of the entries of one device. The pickle reader leaves entries in a tuple as dicts."""
    return array("q", (entry if type(entry) is int else entries.record(entry) for entry in trace))


def _what(value: Any) -> str:
    """Describe a pickle that is not a snapshot."""
    if isinstance(value, dict):
        keys = ", ".join(repr(key)[:40] for key in list(value)[:4])
        return f"a dict with {keys or 'no keys'}, without 'segments'"
    return "a list" if isinstance(value, Shared) else kind_of(value)


# ---- segments and blocks


def _numbers(rows: Sequence[tuple[int, ...]], names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    table = np.array(rows, np.int64).reshape(-1, len(names))
    return {name: table[:, i] for i, name in enumerate(names)}


def _segments(segments: Iterable[Mapping[str, Any]]) -> dict[str, NDArray[np.int64]]:
    rows = []
    for segment in segments:
        numbers = segment.get("device", 0), segment["address"], segment["total_size"], segment.get("stream", 0)
        rows.append((*map(_int, numbers), segment.get("is_expandable") is True))
    return _numbers(rows, ("device", "address", "size", "stream", "expandable"))


def _blocks(segments: Iterable[Mapping[str, Any]], where: Callable[[Any], int]) -> dict[str, NDArray[np.int64]]:
    """Return the blocks in use. PyTorch 2.0 and earlier write a "history" instead of frames, and no addresses."""
    rows = []
    for segment in segments:
        address, device, stream = _int(segment["address"]), _int(segment.get("device", 0)), _int(segment.get("stream", 0))
        for block in listed(segment.get("blocks", ())):
            address, size = _int(block.get("address", address)), _int(block["size"])
            state = _STATES.get(block.get("state"), INACTIVE)
            if state != INACTIVE:
                past = listed(block.get("history", ()))
                last = past[0] if past else {}
                requested = _int(block.get("requested_size", last.get("real_size", size)))
                frames = where(block.get("frames", last.get("frames", ())))
                rows.append((device, address, size, requested, stream, frames, state))
            address += size
    return _numbers(rows, ("device", "address", "size", "requested", "stream", "where", "state"))


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("an address, size, stream or device is not a non-negative integer")
    return value


def _plain(settings: Any, depth: int = 2) -> Any:
    """Return settings for `meta`, without values that JSON cannot represent or that are nested too deeply."""
    if isinstance(settings, dict) and depth:
        kept = {key: _plain(value, depth - 1) for key, value in settings.items() if isinstance(key, str)}
        return {key: value for key, value in kept.items() if value is not None}
    return settings if isinstance(settings, str | int | float | bool) else None


def _trace(
    entries: Entries, traces: Sequence[Sequence[int]], at_end: Sequence[Any], settings: Any, own: Any = None
) -> Trace:  # fmt: skip
    """Return the Trace of the entries and final segments. `own` has the notes of `write_snapshot`: the clock, whether the
    trace had segments, and the number of opening entries of each device.
    """
    settings, own = _plain(settings) or {}, _plain(own, 1) or {}
    blocks = _blocks(at_end, entries.where)
    segments = _segments(at_end if own.get("segments") is not False else ())
    devices = {*segments["device"].tolist(), *(device for device, rows in enumerate(traces) if rows)}
    if max(devices, default=0) > MOST_DEVICES:
        raise ValueError(f"a device number is above {MOST_DEVICES}")
    opening: list[Table] = []
    rest: list[Table] = []
    unaccounted = 0
    rules = Rules.of(settings)
    for device in sorted(devices):
        history = entries.history(traces[device] if device < len(traces) else ())
        own_segments, own_blocks = (
            {name: column[table["device"] == device] for name, column in table.items()} for table in (segments, blocks)
        )
        said = _int(own.get(f"opening_{device}", 0))
        before, after, missing = device_rows(history, own_segments, own_blocks, rules, said)
        for rows, kept in ((before, opening), (after, rest)):
            rows["device"] = np.full(len(rows["kind"]), device)
            kept.append(rows)
        unaccounted += missing
    columns = joined(opening + rest)
    began = columns.pop("start_us")
    measured = own.get("clock") != "modelled"
    meta = {
        "device": str(own.get("device", "unknown device")), "format": "pytorch-snapshot",
        "clock": "measured" if measured else "modelled", "steps_from": None, "sizes_only": False,
        "opening": sum(len(rows["kind"]) for rows in opening), "unaccounted_bytes": unaccounted,
        "allocator_settings": settings, "start_us": int(began),
    }  # fmt: skip
    columns["clock"] = np.full(len(columns["kind"]), not measured)
    return from_columns(list(entries.strings.codes), meta, **columns)
