"""PyTorch's memory snapshots in: the pickles of `torch.cuda.memory._dump_snapshot`, which hold what CUDA's allocator did.

A snapshot has the segments and blocks at its end and the history that led there, as far as it was kept. Entries become
numbers as they are read (a file of gigabytes has millions), and the numbers a Trace. The same code takes the dicts of
`torch.cuda.memory._snapshot` in process: `from_entries`. Nothing in a file is executed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import TraceError
from toolkit.trace.assemble import Strings, from_columns
from toolkit.trace.events import Trace
from toolkit.trace.snapshot.block_sizes import ACTION, Rules
from toolkit.trace.snapshot.frames import chain
from toolkit.trace.snapshot.pickle_rows import Layouts
from toolkit.trace.snapshot.pickle_stream import Groups, PickleStream, Records, Shared
from toolkit.trace.snapshot.rows import History, Table, device_rows, joined

ACTIVE, PENDING, INACTIVE = range(3)  # states of a block: allocated, freed but still used by a stream, free
_STATES = {"active_allocated": ACTIVE, "active_pending_free": PENDING, "active_awaiting_free": PENDING}
_MAKE_AGAIN = "Make it again: torch.cuda.memory._dump_snapshot(path)"


class Entries:
    """The history's entries, as columns of numbers. `shorten` makes a file's name one to show (see `frames.chain`).

    Entries go in one by one (`record`) or as a file has them (`skim`); `strings` has the texts that `where` refers to.
    """

    key = "device_traces"

    def __init__(self, shorten: Callable[[str], str] | None = None) -> None:
        self.strings, self._shorten = Strings(), shorten
        self.columns = {name: array("q") for name in ("action", "address", "size", "stream", "time_us", "where")}
        self.device = array("h")
        self.layouts = Layouts(self._code, self.where, self._take)

    def record(self, group: int, record: Mapping[Any, Any]) -> None:
        """Take an entry of the device `group`. Raises what a dict of another make leads to: TypeError, KeyError..."""
        get = record.get
        address = get("addr", get("device_free", 0))
        numbers = (self._code(record["action"]), address, record["size"], get("stream", 0), get("time_us", 0))
        if type(address) is not int or min(numbers) < 0:
            raise ValueError("an entry without numbers")
        for column, number in zip(self.columns.values(), (*numbers, self.where(get("frames", ()))), strict=True):
            column.append(number)
        self.device.append(group)

    def skim(self, stream: PickleStream, group: int, data: bytes, at: int) -> int:
        """Take entries of the device `group` as they lie in a pickle."""
        before = len(self.columns["action"])
        end = self.layouts.skim(stream, data, at)
        self.device.extend(array("h", [group]) * (len(self.columns["action"]) - before))
        return end

    def learn(self, stream: PickleStream, record: dict[Any, Any]) -> None:
        """See how entries look in this file."""
        self.layouts.learn(stream, record)

    def where(self, frames: Any) -> int:
        """The code of a stack's `where`; -1 for none."""
        if type(frames) is Shared:
            if frames.note is None:
                frames.note = self.where(frames.items)
            return int(frames.note)
        text = chain(_listed(frames), self._shorten)
        return -1 if text is None else self.strings.code(text)

    def history(self, device: int) -> History:
        """The entries of a device, in order."""
        rows = np.flatnonzero(np.frombuffer(self.device, np.int16) == device) if self.device else np.empty(0, np.int64)
        columns = {n: np.frombuffer(c, np.int64)[rows] if c else np.empty(0, np.int64) for n, c in self.columns.items()}
        return History(**columns)

    def _code(self, action: Any) -> int:
        return ACTION.get(action, 0)

    def _take(self, *columns: Any) -> None:
        for mine, more in zip(self.columns.values(), columns, strict=True):
            mine.frombytes(np.asarray(more, np.int64).tobytes())


def read_snapshot(path: Path) -> Trace:
    """The memory events in a snapshot's file. Raises TraceError where it is damaged, another pickle, or would run code."""
    asked = f"opening the trace {str(path)!r}"
    entries = Entries()
    with path.open("rb") as file:
        stream = PickleStream(file, path.stat().st_size, asked, entries)
        found = stream.load()
    if not isinstance(found, dict) or "segments" not in found:
        what = f"a pickle of {_what(found)}"
        raise TraceError(asked, what, "Of pickles, only those of torch.cuda.memory._dump_snapshot are read")
    try:
        for group, listed in enumerate(_listed(found.get("device_traces", ()))):
            if type(listed) is not Records:  # those went to `entries` as they were read
                for entry in _listed(listed):
                    entries.record(group, entry)
        trace = _trace(entries, _listed(found.get("segments", ())), found.get("allocator_settings"), found.get("toolkit"))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise TraceError(asked, f"a snapshot with unexpected fields ({error!r})"[:400], _MAKE_AGAIN) from error
    return trace


def from_entries(
    device_traces: Sequence[Iterable[Mapping[str, Any]]], segments: Iterable[Mapping[str, Any]],
    settings: Mapping[str, Any] | None = None, *, shorten: Callable[[str], str] | None = None,
) -> Trace:  # fmt: skip
    """The memory events of a snapshot that is in memory: `torch._C._cuda_memorySnapshot(None)`'s dicts.

    A caller that keeps only some of the history may leave out entries at its beginning: what was allocated before them
    becomes the opening. `meta["start_us"]` is the time on the clock of `time.time` that the trace's times count from.
    """
    entries = Entries(shorten)
    stacks: dict[int, tuple[Any, Shared]] = {}  # PyTorch gives entries of the same stack the same list
    for device, listed in enumerate(device_traces):
        for entry in listed:
            frames = entry.get("frames", ())
            if id(frames) not in stacks:
                stacks[id(frames)] = frames, Shared(tuple(frames))
            entries.record(device, {**entry, "frames": stacks[id(frames)][1]})
    return _trace(entries, list(segments), settings)


def _listed(value: Any) -> Sequence[Any]:
    """A list of a file, which is a `Shared` where it holds references only."""
    if type(value) is Shared:
        return value.items
    if not isinstance(value, list | tuple):
        raise TypeError(f"{_what(value)} in place of a list")
    return value


def _what(value: Any) -> str:
    names = {dict: "a dict", list: "a list", Shared: "a list", Groups: "a list", Records: "a list", str: "a text"}
    if isinstance(value, dict):
        keys = ", ".join(repr(key)[:40] for key in list(value)[:4])
        return f"a dict with {keys or 'nothing in it'}, without 'segments'"
    return names.get(type(value), f"a {type(value).__name__}")


# ---- segments and blocks


def _numbers(rows: Sequence[tuple[int, ...]], names: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    table = np.array(rows, np.int64).reshape(-1, len(names))
    return {name: table[:, i] for i, name in enumerate(names)}


def _segments(listed: Iterable[Mapping[str, Any]]) -> dict[str, NDArray[np.int64]]:
    rows = []
    for segment in listed:
        numbers = segment.get("device", 0), segment["address"], segment["total_size"], segment.get("stream", 0)
        rows.append((*map(_int, numbers), segment.get("is_expandable") is True))
    return _numbers(rows, ("device", "address", "size", "stream", "expandable"))


def _blocks(listed: Iterable[Mapping[str, Any]], where: Callable[[Any], int]) -> dict[str, NDArray[np.int64]]:
    """The blocks in use. Files of PyTorch 2.0 and before have a "history" in place of frames, and leave addresses out."""
    rows = []
    for segment in listed:
        address, device, stream = _int(segment["address"]), _int(segment.get("device", 0)), _int(segment.get("stream", 0))
        for block in _listed(segment.get("blocks", ())):
            address, size = _int(block.get("address", address)), _int(block["size"])
            state = _STATES.get(block.get("state"), INACTIVE)
            if state != INACTIVE:
                past = _listed(block.get("history", ()))
                last = past[0] if past else {}
                requested = _int(block.get("requested_size", last.get("real_size", size)))
                frames = where(block.get("frames", last.get("frames", ())))
                rows.append((device, address, size, requested, stream, frames, state))
            address += size
    return _numbers(rows, ("device", "address", "size", "requested", "stream", "where", "state"))


def _int(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a segment or block without numbers")
    return value


def _plain(settings: Any, depth: int = 2) -> Any:
    """Settings as `meta` may have them: what JSON has no word for, or lies deeper than they do, is left out."""
    if isinstance(settings, dict) and depth:
        kept = {key: _plain(value, depth - 1) for key, value in settings.items() if isinstance(key, str)}
        return {key: value for key, value in kept.items() if value is not None}
    return settings if isinstance(settings, str | int | float | bool) else None


def _trace(entries: Entries, listed: Sequence[Any], settings: Any, own: Any = None) -> Trace:
    """The Trace. `own` is what `write_snapshot` noted: the clock, whether the segments are those of the trace, and how many
    entries of each device are its opening.
    """
    settings, own = _plain(settings) or {}, _plain(own, 1) or {}
    blocks = _blocks(listed, entries.where)
    segments = _segments(listed if own.get("segments") is not False else ())
    devices = {*segments["device"].tolist(), *entries.device}
    opening: list[Table] = []
    rest: list[Table] = []
    unaccounted = 0
    rules = Rules.of(settings)
    for device in sorted(devices):
        history = entries.history(device)
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
