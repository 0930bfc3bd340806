"""Read Chrome traces of tools other than PyTorch, with some support for XLA (JAX, TensorFlow).

Complete events on threads of a GPU or TPU process become kernels and copies. If there is no such process, every complete
event becomes a mark, so that a timeline can still be drawn.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from toolkit.core.schema import without_surrogates
from toolkit.trace.assemble import KIND, Rows, Strings, assemble, ns_of
from toolkit.trace.cupti import parse_memcpy, pinned_of
from toolkit.trace.events import Trace
from toolkit.trace.steps import Range

_DEVICE = re.compile(r"(?:/device:)?\b(?:GPU|TPU|CUDA|ROCM)\b[: ]*(\d*)", re.IGNORECASE)
_SIZE = re.compile(r"\bsize:(\d+)|\bnum_bytes:(\d+)")
_NUMBER = re.compile(r"\d+")


class Foreign:
    """Collects the complete events ("ph": "X") and the names of processes and threads."""

    def __init__(self) -> None:
        self.strings, self.rows = Strings(), Rows()
        self.tracks: dict[tuple[Any, Any], int] = {}
        self.process: dict[Any, str] = {}
        self.thread: dict[tuple[Any, Any], str] = {}

    def take(self, event: dict[str, Any]) -> None:
        """Collect one event."""
        phase = event.get("ph")
        if phase == "M":
            name = (event.get("args") or {}).get("name", "")
            if event.get("name") == "process_name":
                self.process[event.get("pid")] = str(name)
            elif event.get("name") == "thread_name":
                self.thread[event.get("pid"), event.get("tid")] = str(name)
        elif phase == "X" and event.get("cat") != "Trace":
            key = (event.get("pid"), event.get("tid"))
            track = self.tracks.setdefault(key, len(self.tracks))
            name = str(event.get("name", ""))
            kind, n_bytes, pinned = _classify(name, event.get("args") or {})
            start, dur = ns_of(event["ts"]), ns_of(event.get("dur", 0))
            self.rows.add(KIND[kind], start, dur, n_bytes, -1, 0, pinned, self.strings.code(name), track)

    def trace(self, meta: dict[str, Any]) -> Trace:
        """Return the Trace of the collected events."""
        rows = {name: column.copy() for name, column in self.rows.columns().items()}
        lanes = self._device_lanes()
        meta = meta | {"format": "chrome"}
        names = [self.process.get(pid, "") for pid, _ in lanes]
        if names:
            meta["device"] = without_surrogates(names[0])
        of_track = np.array([lanes.get(key, (-1, -1)) for key in self.tracks], np.int64).reshape(-1, 2)
        on_track = of_track[rows["thread"]]
        on_device = on_track[:, 0] >= 0
        rows["device"], rows["stream"] = np.where(on_device, on_track[:, 0], 0), on_track[:, 1]
        texts, marks = list(self.strings.codes), []
        for i in [] if lanes else range(len(on_device)):
            start, dur, name = (int(rows[column][i]) for column in ("start_ns", "dur_ns", "name"))
            marks.append(Range(start, start + dur, texts[name]))
        device = {name: column[on_device] for name, column in rows.items()}
        return assemble(device, device["start_ns"], marks, self.strings, meta)

    def _device_lanes(self) -> dict[tuple[Any, Any], tuple[int, int]]:
        """Return (device, stream) by device track. XLA repeats streams as "XLA Ops", "Steps" and others: use only one kind."""
        lanes = {}
        tracks_of: dict[Any, list[tuple[Any, Any]]] = {}
        for key in self.tracks:
            tracks_of.setdefault(key[0], []).append(key)
        for pid, process in self.process.items():
            match = _DEVICE.search(process)
            if match is None:
                continue
            tracks = tracks_of.get(pid, [])
            streams = [key for key in tracks if self.thread.get(key, "").startswith("Stream")]
            ops = [key for key in tracks if self.thread.get(key, "") == "XLA Ops"]
            for i, key in enumerate(streams or ops or tracks):
                number = _NUMBER.search(self.thread.get(key, ""))
                lanes[key] = (int(match[1] or 0), int(number[0]) if number and streams else i)
        return lanes


def _classify(name: str, args: dict[str, Any]) -> tuple[str, int, int]:
    """Return the kind, bytes and `pinned` of an event, given its name and arguments."""
    low = name.lower()
    if low.startswith(("memcpy", "[cuda memcpy")):
        kind, _ = parse_memcpy(name)
        detail = str(args.get("memcpy_details", ""))
        size = _SIZE.search(detail)
        n_bytes = int(size[1] or size[2]) if size else int(args.get("bytes", 0))
        if kind is not None:
            return kind, n_bytes, pinned_of(kind, (detail + name).replace("pinned", "Pinned").replace("pageable", "Pageable"))
    if low.startswith(("memset", "[cuda memset")):
        return "memset", int(args.get("bytes", 0)), -1
    return "kernel", 0, -1
