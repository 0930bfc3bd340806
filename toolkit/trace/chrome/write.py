"""Write a trace as Chrome JSON for ui.perfetto.dev and chrome://tracing.

The tracks are the lanes of the timeline. The host is a process with a track of launches and waits, one of steps and marks, and
one of allocations. Each GPU is a process with a track for each stream and kind, such as "H2D stream 0". Events of a lane that
overlap, as kernels of a graph do, go to further tracks: Perfetto drops events that neither follow nor contain one another.
Collectives that run on the host (gloo) have a track of the host.
Several ranks have processes of their own, one after the other, and arrows from the rank that came last to those that waited.
`args` contains every column, so that `read_chrome` returns the same trace. Process titles say whether times are modelled.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.core.errors import TraceError
from toolkit.core.files import at_home, replacing
from toolkit.trace.columns import CLOCKS, COMMUNICATION, HOST_KINDS, KINDS, LANES, MEMORY_KINDS, TEXT_COLUMNS
from toolkit.trace.waits import collectives_of, ranks_of

if TYPE_CHECKING:
    from toolkit.trace.events import Trace

VERSION = 1  # of the fields that `read_chrome` needs
_CATEGORIES = {
    "kernel": "kernel", "collective": "kernel", "memset": "gpu_memset",
    "h2d": "gpu_memcpy", "d2h": "gpu_memcpy", "d2d": "gpu_memcpy", "p2p": "gpu_memcpy",
    "sync": "cuda_runtime", "launch": "cuda_runtime",
    "mark": "user_annotation", **dict.fromkeys(MEMORY_KINDS, "memory"),
}  # fmt: skip
_HOST, _CALLS, _MARKS, _MEMORY = 1_000_000, 1, 2, 3  # process number of the host, above all GPUs, and its tracks
_HOST_TITLES = {_CALLS: "launches and waits", _MARKS: "steps and marks", _MEMORY: "allocations"}
_RANK = 1 << 20  # process numbers per rank
_ON_DEVICE = tuple(kind for kind in LANES if kind not in HOST_KINDS)
_PLACES = 16  # tracks of a lane
_OPTIONAL = {"bytes": 0, "device": 0, "rank": 0}
_OPTIONAL |= dict.fromkeys(("step", "layer", "cell", "pinned", "address", "requested"), -1)


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write `trace` to `path` atomically, compressed if the path ends in .gz. Return the path."""
    with replacing(path, TraceError) as file:
        if Path(path).suffix == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
                _write(trace, io.TextIOWrapper(packed, "utf-8"))
        else:
            _write(trace, io.TextIOWrapper(file, "utf-8"))
    return at_home(path)


def as_json(facts: dict[str, Any]) -> str:
    """Return what a file says of a trace, such as its meta, as JSON. Raises TraceError for values that JSON can't hold."""
    try:
        return json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        do = "Keep finite numbers, texts, booleans, lists and dicts in trace.meta"
        raise TraceError("writing a trace", f"its meta doesn't fit into JSON ({error})", do) from error


def _write(trace: Trace, out: io.TextIOWrapper) -> None:
    own = as_json({"version": VERSION, "meta": trace.meta})
    out.write(f'{{"displayTimeUnit": "ns",\n"toolkit": {own},\n"traceEvents": [\n')
    between, places = "", _places(trace)
    extra = chain(_titles(trace, places), _counters(trace), _arrows(trace, places))
    for event in chain(map(json.dumps, extra), _events(trace, places)):
        out.write(between + event)
        between = ",\n"
    out.write("\n]}\n")
    out.flush()
    out.detach()


def _places(trace: Trace) -> list[int]:
    """Return, for each event, the number of its track among those of its lane, so that the events of a track nest."""
    on_host = trace.is_kind(*HOST_KINDS)
    kind = np.where(on_host, trace.is_kind("mark").astype(np.int64) - 2, trace["kind"])  # calls are one lane, marks another
    stream, device = (np.where(on_host, 0, trace[name]).astype(np.int64) for name in ("stream", "device"))
    lane = kind + (stream << 8) + (device << 40)
    if len(ranks_of(trace)) > 1:
        lanes, lane = np.unique(lane, return_inverse=True)
        lane = lane + trace["rank"].astype(np.int64) * len(lanes)
    start = trace["start_ns"]
    end = start + np.maximum(trace["dur_ns"], 0)
    order = np.lexsort((-end, start, lane))
    order = order[~trace.is_kind(*MEMORY_KINDS)[order]]
    places = np.zeros(len(trace), np.int64)
    for rows in np.split(order, np.flatnonzero(np.diff(lane[order])) + 1):
        if (start[rows[1:]] >= np.maximum.accumulate(end[rows])[:-1]).all():
            continue
        tracks: list[list[int]] = []  # for each, the ends of the events around the present one
        for row, begin, stop in zip(rows.tolist(), start[rows].tolist(), end[rows].tolist(), strict=True):
            place = next((i for i, ends in enumerate(tracks) if _has_room(ends, begin, stop)), len(tracks))
            if place == len(tracks) < _PLACES - 1:
                tracks.append([])
            if place < len(tracks):  # the last track takes what fits on none of the others
                tracks[place].append(stop)
            places[row] = place
    return places.tolist()


def _has_room(ends: list[int], begin: int, stop: int) -> bool:
    """Drop the ends of events that are over at `begin`. Return whether the others contain the event that stops at `stop`."""
    while ends and ends[-1] <= begin:
        ends.pop()
    return not ends or stop <= ends[-1]


def _events(trace: Trace, places: list[int]) -> Iterator[str]:
    """Iterate over the events as JSON. Each text is encoded only once, so that a million events take seconds."""
    quoted = [json.dumps(text) for text in trace.strings]
    columns = (trace[name].tolist() for name in ("kind", "start_ns", "dur_ns", "stream", "name", "clock", "where", "owner"))
    optional = [
        (f', "{name}": ', default, trace[name].tolist())
        for name, default in _OPTIONAL.items()
        if (trace[name] != default).any()
    ]
    devices, ranks, communication = trace["device"].tolist(), trace["rank"].tolist(), _communication(trace, quoted)
    for i, (code, start, dur, stream, name, clock, where, owner) in enumerate(zip(*columns, strict=True)):
        kind = KINDS[code]
        args = [f'"kind": "{kind}"', *[f"{key}{column[i]}" for key, default, column in optional if column[i] != default]]
        if stream != -1:
            args.append(f', "stream": {stream}')
        if name < 0:
            args.append(', "unnamed": true')
        if clock:
            args.append(f', "clock": "{CLOCKS[clock]}"')
        if where >= 0:
            args.append(f', "where": {quoted[where]}')
        if owner >= 0:
            args.append(f', "owner": {quoted[owner]}')
        if i in communication:
            args.append(f', "communication": {communication[i]}')
        pid, tid = _track(kind, ranks[i], devices[i], stream, places[i])
        phase = '"ph": "i", "s": "t"' if kind in MEMORY_KINDS else '"ph": "X"'
        title = quoted[name] if name >= 0 else f'"{kind}"'
        yield (
            f'{{{phase}, "cat": "{_CATEGORIES[kind]}", "name": {title}, "pid": {pid}, "tid": {tid}, "ts": {start / 1000!r}, '
            f'"dur": {dur / 1000!r}, "args": {{{"".join(args)}}}}}'
        )


def _communication(trace: Trace, quoted: list[str]) -> dict[int, str]:
    """Return, as JSON, the columns COMMUNICATION of the events that have one."""
    known = np.flatnonzero(np.any([trace[name] != -1 for name in COMMUNICATION], axis=0))
    parts: dict[int, list[str]] = {row: [] for row in known.tolist()}
    for name in COMMUNICATION:
        for row, value in zip(parts, trace[name][known].tolist(), strict=True):
            if value != -1:
                parts[row].append(f'"{name}": {quoted[value] if name in TEXT_COLUMNS else value}')
    return {row: f"{{{', '.join(part)}}}" for row, part in parts.items()}


def _track(kind: str, rank: int, device: int, stream: int, place: int) -> tuple[int, int]:
    """Return the process and thread of an event. Threads start above 0: Perfetto uses thread 0 for the process."""
    if kind in HOST_KINDS or kind in MEMORY_KINDS:
        return _HOST + rank * _RANK, {"launch": _CALLS, "sync": _CALLS, "mark": _MARKS}.get(kind, _MEMORY) * _PLACES + place
    lane = (stream + 1) * len(_ON_DEVICE) + _ON_DEVICE.index(kind) + 1
    if device < 0:  # such as a collective of gloo, which runs on the host
        return _HOST + rank * _RANK, (_MEMORY + lane) * _PLACES + place
    return device + rank * _RANK, lane * _PLACES + place


def _titles(trace: Trace, places: list[int]) -> Iterator[dict[str, Any]]:
    """Iterate over the events that name the processes and tracks in the viewer."""
    modelled = "modelled" if trace["clock"].any() else "measured"
    ranks = ranks_of(trace) or [0]
    columns = (trace[name].tolist() for name in ("kind", "rank", "device", "stream"))
    found = {(KINDS[code], *rest) for code, *rest in zip(*columns, places, strict=True)}
    hosts = {_HOST + rank * _RANK for rank in ranks}
    names = {(host, tid * _PLACES): title for host in hosts for tid, title in _HOST_TITLES.items()}
    for kind, rank, device, stream, place in found:
        pid, tid = _track(kind, rank, device, stream, place)
        on = f" stream {stream}" if stream >= 0 else " no stream" if device >= 0 else ""
        lane = f"{LANES[kind]}{on}" if kind in _ON_DEVICE else _HOST_TITLES[tid // _PLACES]
        names[pid, tid] = f"{lane}, overlapping" if place else lane
    order = sorted({pid for pid, _ in names}, key=lambda pid: (pid // _RANK, pid not in hosts, pid))
    for position, pid in enumerate(order):
        rank, device = divmod(pid, _RANK)
        prefix = f"Rank {rank}, " if len(ranks) > 1 else ""
        meta = (trace.meta.get("ranks") or {}).get(str(rank), trace.meta)
        gpu = f"GPU {device}: {meta.get('gpu') or meta.get('device') or 'unknown'}"
        yield _title("process_name", pid, 0, f"{prefix}{'Host' if pid in hosts else gpu} ({modelled})")
        if len(ranks) > 1:
            yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": position}}
    for (pid, tid), title in sorted(names.items(), key=lambda item: (item[0][0] not in hosts, item[0])):
        yield from _thread(pid, tid, title)


def _thread(pid: int, tid: int, title: str) -> Iterator[dict[str, Any]]:
    yield _title("thread_name", pid, tid, title)
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _arrows(trace: Trace, places: list[int]) -> Iterator[dict[str, Any]]:
    """Iterate over the arrows from the start of the rank that came last in a collective to the events of those that waited."""
    if len(ranks_of(trace)) < 2:
        return
    found = collectives_of(trace)
    columns = {name: trace[name].tolist() for name in ("rank", "device", "stream", "start_ns")}

    def end(phase: str, arrow: int, row: int, time_ns: int) -> dict[str, Any]:
        rank, device, stream = (columns[name][row] for name in ("rank", "device", "stream"))
        pid, tid = _track("collective", rank, device, stream, places[row])
        event = {
            "ph": phase,
            "id": arrow,
            "cat": "collective",
            "name": "waited for",
            "pid": pid,
            "tid": tid,
            "ts": time_ns / 1000,
        }
        return event | ({"bp": "e"} if phase == "f" else {})

    number, position = found.wait.nonzero()
    waited, last = found.row[number, position].tolist(), found.row[number, found.last[number]].tolist()
    for arrow, (row, late) in enumerate(zip(waited, last, strict=True), 1):
        begin = columns["start_ns"][late]
        yield end("s", arrow, late, begin)
        yield end("f", arrow, row, begin)


def _title(what: str, pid: int, tid: int, title: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": title}}


def _counters(trace: Trace) -> Iterator[dict[str, Any]]:
    """Iterate over the events of the counters of allocated bytes, one counter per rank and device.

    Measurements of memory have an opening: they also count what was allocated when the recording began.
    """
    held: dict[tuple[int, int], int] = {}
    changes = trace.select(trace.is_kind("alloc", "free"))
    metas = {rank: (trace.meta.get("ranks") or {}).get(str(rank), trace.meta) for rank in ranks_of(changes)}
    what = {rank: "bytes" if "opening" in meta else "bytes since the recording began" for rank, meta in metas.items()}
    columns = (changes[name].tolist() for name in ("start_ns", "bytes", "rank", "device"))
    for start, n_bytes, rank, device, more in zip(*columns, changes.is_kind("alloc").tolist(), strict=True):
        held[rank, device] = held.get((rank, device), 0) + (n_bytes if more else -n_bytes)
        counter = {what[rank]: held[rank, device]}
        pid = _HOST + rank * _RANK
        yield {"ph": "C", "name": f"allocated on GPU {device}", "pid": pid, "ts": start / 1000, "args": counter}
