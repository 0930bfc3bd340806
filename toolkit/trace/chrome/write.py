"""Write a trace as Chrome JSON for ui.perfetto.dev and chrome://tracing.

The tracks are the lanes of the timeline. The host is a process with a track of launches and waits, one of steps and marks, and
one of allocations. Each GPU is a process with a track for each stream and kind, such as "H2D stream 0". `args` contains every
column, so that `read_chrome` returns the same trace. Process titles say whether times are modelled.
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

from toolkit.core.errors import TraceError
from toolkit.core.files import replacing
from toolkit.trace.columns import CLOCKS, HOST_KINDS, KINDS, LANES, MEMORY_KINDS

if TYPE_CHECKING:
    from toolkit.trace.events import Trace

_CATEGORIES = {
    "kernel": "kernel", "h2d": "gpu_memcpy", "d2h": "gpu_memcpy", "d2d": "gpu_memcpy", "p2p": "gpu_memcpy",
    "memset": "gpu_memset", "sync": "cuda_runtime", "launch": "cuda_runtime",
    "mark": "user_annotation", **dict.fromkeys(MEMORY_KINDS, "memory"),
}  # fmt: skip
_HOST, _CALLS, _MARKS, _MEMORY = 1_000_000, 1, 2, 3  # process number of the host, above all GPUs, and its tracks
_ON_DEVICE = tuple(kind for kind in LANES if kind not in HOST_KINDS)
_OPTIONAL = {"bytes": 0, "device": 0, "rank": 0, "step": -1, "cell": -1, "pinned": -1, "address": -1, "requested": -1}


def write_chrome(trace: Trace, path: str | os.PathLike[str]) -> Path:
    """Write `trace` to `path` atomically, compressed if the path ends in .gz. Return the path."""
    with replacing(path, TraceError) as file:
        if Path(path).suffix == ".gz":
            with gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as packed:
                _write(trace, io.TextIOWrapper(packed, "utf-8"))
        else:
            _write(trace, io.TextIOWrapper(file, "utf-8"))
    return Path(path)


def _write(trace: Trace, out: io.TextIOWrapper) -> None:
    own = json.dumps({"version": 1, "meta": trace.meta})
    out.write(f'{{"displayTimeUnit": "ns",\n"toolkit": {own},\n"traceEvents": [\n')
    between = ""
    for event in chain(map(json.dumps, _titles(trace)), map(json.dumps, _counters(trace)), _events(trace)):
        out.write(between + event)
        between = ",\n"
    out.write("\n]}\n")
    out.flush()
    out.detach()


def _events(trace: Trace) -> Iterator[str]:
    """Iterate over the events as JSON. Each text is encoded only once, so that a million events take seconds."""
    quoted = [json.dumps(text) for text in trace.strings]
    columns = (trace[name].tolist() for name in ("kind", "start_ns", "dur_ns", "stream", "name", "clock", "where", "owner"))
    optional = [(f', "{name}": ', default, trace[name].tolist()) for name, default in _OPTIONAL.items()]
    devices = trace["device"].tolist()
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
        pid, tid = _track(kind, devices[i], stream)
        phase = '"ph": "i", "s": "t"' if kind in MEMORY_KINDS else '"ph": "X"'
        title = quoted[name] if name >= 0 else f'"{kind}"'
        yield (
            f'{{{phase}, "cat": "{_CATEGORIES[kind]}", "name": {title}, "pid": {pid}, "tid": {tid}, "ts": {start / 1000!r}, '
            f'"dur": {dur / 1000!r}, "args": {{{"".join(args)}}}}}'
        )


def _track(kind: str, device: int, stream: int) -> tuple[int, int]:
    """Return the process and thread of an event. Threads start at 1: Perfetto uses thread 0 for the process."""
    if kind in HOST_KINDS or kind in MEMORY_KINDS:
        return _HOST, {"launch": _CALLS, "sync": _CALLS, "mark": _MARKS}.get(kind, _MEMORY)
    return device, (stream + 1) * len(_ON_DEVICE) + _ON_DEVICE.index(kind) + 1


def _titles(trace: Trace) -> Iterator[dict[str, Any]]:
    """Iterate over the events that name the processes and tracks in the viewer."""
    modelled = "modelled" if trace["clock"].any() else "measured"
    device_name = trace.meta.get("gpu") or trace.meta.get("device") or "unknown"
    yield _title("process_name", _HOST, 0, f"Host ({modelled})")
    for tid, title in ((_CALLS, "launches and waits"), (_MARKS, "steps and marks"), (_MEMORY, "allocations")):
        yield from _thread(_HOST, tid, title)
    on_device = trace.select(trace.is_kind(*_ON_DEVICE))
    columns = (on_device[name].tolist() for name in ("device", "stream", "kind"))
    lanes = sorted({(device, stream, _ON_DEVICE.index(KINDS[kind])) for device, stream, kind in zip(*columns, strict=True)})
    for device in sorted({device for device, _, _ in lanes}):
        yield _title("process_name", device, 0, f"GPU {device}: {device_name} ({modelled})")
    for device, stream, position in lanes:
        kind, place = _ON_DEVICE[position], f"stream {stream}" if stream >= 0 else "no stream"
        yield from _thread(device, _track(kind, device, stream)[1], f"{LANES[kind]} {place}")


def _thread(pid: int, tid: int, title: str) -> Iterator[dict[str, Any]]:
    yield _title("thread_name", pid, tid, title)
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _title(what: str, pid: int, tid: int, title: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": title}}


def _counters(trace: Trace) -> Iterator[dict[str, Any]]:
    """Iterate over the events of the counters of allocated bytes, one counter per device."""
    held: dict[int, int] = {}
    changes = trace.select(trace.is_kind("alloc", "free"))
    sign = changes.is_kind("alloc").tolist()
    for start, n_bytes, device, more in zip(
        changes["start_ns"].tolist(), changes["bytes"].tolist(), changes["device"].tolist(), sign, strict=True
    ):
        held[device] = held.get(device, 0) + (n_bytes if more else -n_bytes)
        counter = {"bytes since the recording began": held[device]}
        yield {"ph": "C", "name": f"allocated on GPU {device}", "pid": _HOST, "ts": start / 1000, "args": counter}
