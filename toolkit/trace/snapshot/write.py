"""Write a Trace as a memory snapshot in the format of `torch.cuda.memory._dump_snapshot`, for pytorch.org/memory_viz.

The pickle (protocol 4) is written entry by entry, so that millions of rows need little memory. Information that the format
does not have is stored under the key "toolkit", which other readers ignore.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from toolkit.core.errors import TraceError
from toolkit.core.files import at_home, replacing, shown
from toolkit.trace.columns import KINDS, MEMORY_KINDS
from toolkit.trace.events import Trace
from toolkit.trace.snapshot.rows import Ints, covered

_BATCH = 1000  # rows that a reader holds in memory at once
_KEYS = (
    "action", "addr", "device_free", "size", "stream", "time_us", "compile_context", "N/A", "user_metadata", "frames", "name",
    "filename", "line", "", "device", "address", "total_size", "requested_size", "state", "active_allocated", "inactive",
)  # fmt: skip
_LINE = re.compile(r"(.+):(\d+)$")
_ACTIONS = {
    "alloc": ("alloc",), "free": ("free_requested", "free_completed"), "segment_alloc": ("segment_alloc",),
    "segment_free": ("segment_free",), "oom": ("oom",),
}  # fmt: skip


def write_snapshot(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write the memory events of `trace` to `path` atomically. Raises TraceError if there are none or they lack addresses.

    Viewers need a segment for each block: a block outside all segments of the trace gets its own.
    """
    asked = f"writing the snapshot {shown(path)}"
    memory = trace.select(np.flatnonzero(trace.is_kind(*MEMORY_KINDS)))
    if not len(memory):
        raise TraceError(asked, "the trace has no memory events", "Record with tk.memory() or tk.record")
    if (memory["address"][~memory.is_kind("oom")] < 0).any():
        raise TraceError(asked, "its allocations have no addresses", "Record with tk.memory(), or open a memory snapshot")
    opening = trace.is_kind(*MEMORY_KINDS)[: int(trace.meta.get("opening", 0))].sum()
    with replacing(path, TraceError) as file:
        _write(file, memory, int(opening))
    return at_home(path)


class _Memo:
    """The texts and stacks of a trace, written once at the beginning of the pickle and referenced afterwards."""

    def __init__(self, trace: Trace) -> None:
        self.strings, self._n = trace.strings, 0
        self._texts: dict[str, bytes] = {}
        self._stacks: dict[int, bytes] = {-1: pickle.EMPTY_LIST}
        self.names = np.unique(trace["name"]).tolist()
        self.wheres = np.unique(trace["where"]).tolist()

    def begin(self) -> bytes:
        """Return the instructions for two lists, the texts and the stacks."""
        known = {text for actions in _ACTIONS.values() for text in actions}
        words = [*_KEYS, *sorted(known), *(self.strings[code] for code in self.names if code >= 0)]
        texts = [_text(text) + self._memoized(self._texts, text) for text in dict.fromkeys(words)]
        stacks = []
        for code in self.wheres:
            if code >= 0:
                frames = [{"name": "", "filename": file, "line": line} for file, line in _frames(self.strings[code])]
                stacks.append(pickle.EMPTY_LIST + self._memoized(self._stacks, code) + self._items(frames))
        lists = (b"](" + b"".join(parts) + b"e" for parts in (texts, stacks))
        return b"".join(lists)

    def encode(self, value: Any) -> bytes:
        """Return the pickle instructions of a value. A `_Stack` becomes a reference."""
        if isinstance(value, _Stack):
            return self._stacks[value.code]
        if isinstance(value, str):
            return self._texts.get(value) or _text(value)
        if isinstance(value, dict):
            items = b"".join(self.encode(key) + self.encode(item) for key, item in value.items())
            return b"}(" + items + b"u"
        if isinstance(value, list):
            return pickle.EMPTY_LIST + self._items(value)
        if isinstance(value, tuple):
            return b"(" + b"".join(map(self.encode, value)) + b"t"
        return pickle.dumps(value, 2)[2:-1]  # without the protocol and stop instructions

    def _items(self, items: list[Any]) -> bytes:
        return b"(" + b"".join(map(self.encode, items)) + b"e" if items else b""

    def _memoized(self, kept: dict[Any, bytes], key: Any) -> bytes:
        kept[key] = b"h%c" % self._n if self._n < 256 else b"j" + struct.pack("<I", self._n)
        self._n += 1
        return pickle.MEMOIZE


@dataclass(frozen=True)
class _Stack:
    """A stack, given by the string index of its `where`."""

    code: int


def _text(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    return b"\x8c" + bytes((len(raw),)) + raw if len(raw) < 256 else b"X" + struct.pack("<I", len(raw)) + raw


def _number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value) if value < 1 << 31 else b"\x8a\x08" + struct.pack("<q", value)


def _frames(where: str) -> list[tuple[str, int]]:
    """Return the frames of "OUTER > INNER", innermost first as in PyTorch. A place without a line number gets line 1."""
    matches = [(_LINE.match(part), part) for part in reversed(where.split(" > "))]
    return [(match[1], int(match[2])) if match else (part, 1) for match, part in matches]


def _write(file: BinaryIO, trace: Trace, n_opening: int) -> None:
    memo = _Memo(trace)
    devices = range(int(trace["device"].max()) + 1)
    own = {name: trace.meta[name] for name in ("clock", "device") if isinstance(trace.meta.get(name), str)}
    own["segments"] = bool(trace.is_kind("segment_alloc", "segment_free").any())
    own |= {f"opening_{device}": int((trace["device"][:n_opening] == device).sum()) for device in devices}
    file.write(b"\x80\x04}(" + _text("toolkit") + b"}(" + _text("texts and stacks") + memo.begin() + pickle.TUPLE2)
    file.write(b"".join(_text(key) + memo.encode(value) for key, value in own.items()) + b"u" + _text("segments") + b"](")
    for device in devices:
        for segment in _segments(trace, device):
            file.write(memo.encode(segment))
    file.write(b"e" + _text("device_traces") + b"](")
    for device in devices:
        file.write(pickle.EMPTY_LIST)
        _write_entries(file, trace, np.flatnonzero(trace["device"] == device), memo)
    settings = trace.meta.get("allocator_settings")
    rest = {"allocator_settings": settings if isinstance(settings, dict) else {}, "external_annotations": []}
    file.write(b"e" + memo.encode(rest)[2:-1] + b"u.")


def _write_entries(file: BinaryIO, trace: Trace, rows: Ints, memo: _Memo) -> None:
    """Write the history of one device. Times are in whole microseconds, offset by the trace's `meta["start_us"]`."""
    start_us = int(trace.meta.get("start_us") or 1)
    columns = ("kind", "start_ns", "bytes", "requested", "address", "stream", "name", "where")
    word = {text: memo.encode(text) for text in (*_KEYS, *(action for actions in _ACTIONS.values() for action in actions))}
    label = {code: memo.encode(trace.strings[code] if code >= 0 else "") for code in memo.names}
    for at in range(0, len(rows), _BATCH):
        parts = []
        batch = [trace[name][rows[at : at + _BATCH]].tolist() for name in columns]
        for kind, start, size, requested, address, stream, name, where in zip(*batch, strict=True):
            place = word["device_free"] + _number(0) if KINDS[kind] == "oom" else word["addr"] + _number(address)
            asked = size if requested < 0 else requested
            rest = (
                place + word["size"] + _number(asked) + word["stream"] + _number(max(stream, 0)) + word["time_us"]
                + _number(start_us + start // 1000) + word["compile_context"] + word["N/A"] + word["user_metadata"]
                + label[name] + word["frames"] + memo.encode(_Stack(where)) + b"u"
            )  # fmt: skip
            parts += [b"}\x94(" + word["action"] + word[action] + rest for action in _ACTIONS[KINDS[kind]]]
        file.write(b"(" + b"".join(parts) + b"e")


def _segments(trace: Trace, device: int) -> Iterable[dict[str, Any]]:
    """Iterate over the segments at the end of the trace, with their blocks, by address."""
    rows = np.flatnonzero(trace["device"] == device)
    taken = rows[trace.is_kind("segment_alloc", "segment_free")[rows]]
    address, size, whose = covered(trace["address"][taken], trace["bytes"][taken], trace.is_kind("segment_alloc")[taken])
    live = _live(trace, rows)
    blocks = trace["address"][live]
    inside = np.searchsorted(address, blocks, side="right") - 1
    homeless = (inside < 0) | (blocks >= address[inside] + size[inside]) if len(address) else np.ones(len(blocks), np.bool_)
    found = [
        {
            "address": int(a),
            "total_size": int(n),
            "stream": int(trace["stream"][row]),
            "blocks": live[~homeless & (inside == i)],
        }
        for i, (a, n, row) in enumerate(zip(address, size, taken[whose], strict=True))
    ]
    found += [
        {"address": int(trace["address"][i]), "total_size": int(trace["bytes"][i]), "stream": int(trace["stream"][i])}
        | {"blocks": np.array([i])}
        for i in live[homeless].tolist()
    ]
    for segment in sorted(found, key=lambda segment: int(segment["address"])):
        held = int(trace["bytes"][segment["blocks"]].sum())
        asked = sum(_asked(trace, i) for i in segment["blocks"].tolist())
        yield {
            "device": device, "address": segment["address"], "total_size": segment["total_size"], "allocated_size": held,
            "active_size": held, "requested_size": asked, "stream": max(segment["stream"], 0),
            "segment_type": "small" if segment["total_size"] <= 2 << 20 else "large", "segment_pool_id": (0, 0),
            "is_expandable": False, "frames": [], "blocks": list(_blocks(trace, segment)),
        }  # fmt: skip


def _live(trace: Trace, rows: Ints) -> Ints:
    """Return the allocs among `rows` that are never freed, by address."""
    rows = rows[trace.is_kind("alloc", "free")[rows]]
    rows = rows[np.argsort(trace["address"][rows], kind="stable")]
    last = np.append(trace["address"][rows][1:] != trace["address"][rows][:-1], True)[: len(rows)]
    return rows[last & trace.is_kind("alloc")[rows]]


def _asked(trace: Trace, row: int) -> int:
    requested = int(trace["requested"][row])
    return requested if requested >= 0 else int(trace["bytes"][row])


def _blocks(trace: Trace, segment: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Iterate over the blocks of a segment by address: those in use and the free ones between them."""
    at, end = segment["address"], segment["address"] + segment["total_size"]
    for row in [*segment["blocks"].tolist(), None]:
        begins = end if row is None else int(trace["address"][row])
        if begins > at:
            gap = begins - at
            yield {"address": at, "size": gap, "requested_size": 0, "state": "inactive", "frames": []}
        if row is not None:
            size = int(trace["bytes"][row])
            yield {
                "address": begins, "size": size, "requested_size": _asked(trace, row), "state": "active_allocated",
                "frames": _Stack(int(trace["where"][row])),
            }  # fmt: skip
            at = begins + size
