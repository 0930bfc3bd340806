"""Read Chrome traces of PyTorch's profiler (Kineto), of the toolkit's own export, and of other tools such as XLA.

`read_chrome` makes one pass over the events and stores the relevant ones in columns. In PyTorch's profiler, source lines and
layers need `with_stack=True`, and allocations need `profile_memory=True`.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.callers import warn
from toolkit.core.errors import TraceError, brief
from toolkit.core.schema import without_surrogates
from toolkit.core.units import plural
from toolkit.trace.assemble import KIND, Calls, Rows, Strings, assemble, from_columns, ns_of, title_of
from toolkit.trace.chrome.comms import Comms, distributed_job
from toolkit.trace.chrome.foreign import Foreign
from toolkit.trace.chrome.scan import EventScanner
from toolkit.trace.chrome.write import VERSION
from toolkit.trace.columns import CLOCKS, COMMUNICATION, TEXT_COLUMNS
from toolkit.trace.cupti import is_copy_kernel, is_wait, parse_memcpy
from toolkit.trace.events import NO_COMMUNICATION, Trace, check_meta, communication_columns
from toolkit.trace.nccl import of_kernel
from toolkit.trace.steps import Range, innermost

_FUNCTION = re.compile(r"(.+)\((\d+)\): ")  # "file.py(12): name"; built-ins and modules have no file
_MODULE = "nn.Module: "
_LAYER = re.compile(_MODULE + r"\w*(Layer|Block)_\d+")
_LIBRARY = re.compile(r"(^|/)(torch|triton|contextlib\.py)(/|$)|^<(?!ipython)")
_PROFILERS_OWN_WAIT = "cudaDeviceSynchronize"


def read_chrome(path: Path) -> Trace:
    """Return the trace in a Chrome JSON file, plain or gzipped. Raises TraceError if it is damaged or has no events.

    Warns if events are left out because their fields are unexpected, and if the profiler recorded nothing of a GPU.
    """
    scanner = EventScanner(path)
    reader: _Kineto | _Own | None = None
    for event in scanner:
        if reader is None:
            reader = _Own(scanner) if "toolkit" in scanner.head else _Kineto(scanner.head)
        reader.take(event)
    if reader is None:
        raise TraceError(scanner.asked, "it has no events", "Record some work before exporting the trace")
    try:
        trace = reader.trace()
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise scanner.damaged(f"an event has unexpected fields ({error!r})") from error
    if count := trace.meta.get("unreadable_events"):
        found = f"{count:,} event{'s have' if count > 1 else ' has'} unexpected fields"
        if not len(trace):
            raise scanner.damaged(f"{found}, and no other event is of a GPU")
        warn(f"{path.name}: {found} and {'are' if count > 1 else 'is'} left out.")
    if isinstance(reader, _Kineto) and reader.host_operations and trace.is_kind("mark").all():
        found = f"it has {plural(reader.host_operations, 'operation')} of the CPU, and nothing of a GPU"
        do = "Profile on a GPU, with ProfilerActivity.CUDA among the activities"
        if not len(trace):
            raise TraceError(scanner.asked, found, do)
        warn(f"{path.name}: {found}, so only ranges are shown. {do}.")
    if isinstance(reader, _Kineto) and not len(trace):
        found = "it has neither events of a GPU nor ranges"
        raise TraceError(scanner.asked, found, 'Record some work on a GPU. Ranges are complete events ("ph": "X")')
    if isinstance(reader, _Kineto):
        trace.meta["title"] = title_of(path)
    return trace


def _about(head: dict[str, Any]) -> dict[str, Any]:
    """Return the `meta` of a trace, given the fields beside its events."""
    gpus = head.get("deviceProperties")
    first = gpus[0] if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) else {}
    name = first.get("name")
    about = {"device": name if isinstance(name, str) else "unknown device", "format": "chrome", **distributed_job(head)}
    known: dict[str, Any] = without_surrogates(about)
    return known


class _Kineto:
    """Collects the events of PyTorch's profiler."""

    def __init__(self, head: dict[str, Any]) -> None:
        self.head = head  # without the fields after the events until `trace`
        self.meta: dict[str, Any] = {}
        self.strings, self.rows, self.calls, self.foreign = Strings(), Rows(), Calls(), Foreign()
        self.ranges: list[Range] = []
        self.threads: dict[Any, int] = {}
        self.sync_streams: dict[int, int] = {}
        self.functions: dict[int, array[int]] = {}  # per thread: start, end and `where` of each user function
        self.function_codes: dict[str, int] = {}
        self.layers: dict[int, array[int]] = {}  # per thread: start, end and name of each module that may be a layer
        self.last_call = (-1, "")
        self.host_operations = 0
        self.comms = Comms(self.rows, self.strings)
        self._take: dict[str, Callable[[dict[str, Any]], None]] = {
            "kernel": self._kernel, "gpu_memcpy": self._memcpy, "memcpy": self._memcpy, "gpu_memset": self._memset,
            "memset": self._memset, "cuda_runtime": self._call, "cuda_driver": self._call, "runtime": self._call,
            "cuda_sync": self._sync, "user_annotation": self._annotation, "cpu_instant_event": self._memory,
            "python_function": self._function,
        }  # fmt: skip
        known = ("cpu_op", "operator", "ac2g", "fwdbwd", "gpu_user_annotation", "overhead", "trace", "async_cpu_to_gpu")
        self._skip = {*known, "async", "python_gc"}

    def take(self, event: dict[str, Any]) -> None:
        """Collect one event. Events of unknown categories go to the reader of foreign traces."""
        category = event.get("cat")
        if type(category) is not str:
            category = ""
        handler = self._take.get(category)
        if handler is None and category not in self._skip:
            handler = self._take.get(category.lower())  # profilers of 2021 wrote "Kernel", "Memcpy", "Runtime"
        try:
            if handler is not None:
                handler(event)
            elif category not in self._skip:
                self.foreign.take(event)
            elif category in ("cpu_op", "operator"):
                self.host_operations += 1
                if event["name"] == "record_param_comms":
                    self.comms.record(event["args"])
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self.meta["unreadable_events"] = self.meta.get("unreadable_events", 0) + 1

    def _device(self, event: dict[str, Any], kind: str, n_bytes: int, pinned: int, communication: int = 0) -> None:
        args, start = event.get("args") or {}, ns_of(event["ts"])
        stream = args["stream"] if "stream" in args else event["tid"]
        device = args["device"] if "device" in args else event["pid"]
        self.rows.add(
            KIND[kind], start, ns_of(event.get("dur", 0)), n_bytes, int(stream), int(device), pinned,
            self.strings.code(event["name"]), -1, args.get("correlation", -1), communication,
        )  # fmt: skip

    def _kernel(self, event: dict[str, Any]) -> None:
        found = of_kernel(event["name"])
        if found is None:
            self._device(event, "d2d" if is_copy_kernel(event["name"]) else "kernel", 0, -1)
        else:
            self._device(event, *self.comms.of_kernel(found, event.get("args") or {}))

    def _memcpy(self, event: dict[str, Any]) -> None:
        kind, pinned = parse_memcpy(event["name"])
        if kind is not None:
            args = event.get("args") or {}
            self._device(event, kind, int(args.get("bytes", 0)), pinned, self.comms.of_copy(args) if kind == "p2p" else 0)

    def _memset(self, event: dict[str, Any]) -> None:
        self._device(event, "memset", int((event.get("args") or {}).get("bytes", 0)), -1)

    def _thread(self, event: dict[str, Any]) -> int:
        key = (event.get("pid"), event.get("tid"))
        return self.threads.setdefault(key, len(self.threads))

    def _call(self, event: dict[str, Any]) -> None:
        start, thread, name = ns_of(event["ts"]), self._thread(event), event["name"]
        correlation = (event.get("args") or {}).get("correlation", -1)
        self.calls.add(correlation, start, thread, ns_of(event.get("dur", 0)), name)
        if is_wait(name):
            self.rows.add(
                KIND["sync"], start, ns_of(event.get("dur", 0)), 0, -1, 0, -1, self.strings.code(name), thread, correlation
            )
        if start > self.last_call[0]:
            self.last_call = (start, name)

    def _sync(self, event: dict[str, Any]) -> None:
        args = event["args"]
        self.sync_streams[args["correlation"]] = int(args.get("stream", -1))

    def _annotation(self, event: dict[str, Any]) -> None:
        start, name = ns_of(event["ts"]), event["name"]
        if type(name) is not str:
            raise TypeError("the name of a range is not a text")
        if name.startswith("gloo:"):  # the run of a collective on the host; that of other backends is only its launch
            kind, communication = self.comms.of_gloo(name)
            dur, code = ns_of(event.get("dur", 0)), self.strings.code(name)
            self.rows.add(KIND[kind], start, dur, 0, -1, -1, -1, code, self._thread(event), -1, communication)
        else:
            self.ranges.append(Range(start, start + ns_of(event.get("dur", 0)), name))

    def _memory(self, event: dict[str, Any]) -> None:
        args = event.get("args") or {}
        if event["name"] == "[memory]" and args.get("Device Type") == 1 and args["Bytes"]:
            kind = KIND["alloc" if args["Bytes"] > 0 else "free"]
            device = int(args.get("Device Id", 0))
            self.rows.add(kind, ns_of(event["ts"]), 0, abs(args["Bytes"]), -1, device, -1, -1, self._thread(event))

    def _function(self, event: dict[str, Any]) -> None:
        name = event["name"]
        if name not in self.function_codes:
            self.function_codes[name] = self._code(name)
        code = self.function_codes[name]
        if code >= 0:
            start = ns_of(event["ts"])
            row = array("q", (start, start + ns_of(event.get("dur", 0)), code))  # first: it may be out of range
            ran = self.layers if name.startswith(_MODULE) else self.functions
            ran.setdefault(self._thread(event), array("q")).extend(row)

    def _code(self, name: str) -> int:
        """Return the code of the line of a user's function, or of the name of a module that may be a layer; -1: neither."""
        if name.startswith(_MODULE):
            return self.strings.code(name) if _LAYER.fullmatch(name) else -1
        match = _FUNCTION.match(name)
        user = match is not None and not _LIBRARY.search(match[1])
        return self.strings.code(f"{match[1]}:{match[2]}") if match is not None and user else -1

    def trace(self) -> Trace:
        """Return the Trace of the collected events."""
        self.meta = _about(self.head) | self.meta
        rows = self.comms.complete(self.rows.columns())
        if not len(rows["kind"]) and not self.ranges:
            return self.foreign.trace(self.meta)
        rows = self.calls.with_launches(self._with_waits(rows), self.strings)
        cause, thread = self.calls.causes(rows)
        own = np.isin(rows["kind"], [KIND["launch"], KIND["sync"], KIND["alloc"], KIND["free"]])
        cause[own], thread[own] = rows["start_ns"][own], rows["thread"][own]
        where = self._innermost(_table(self.functions), cause, thread)
        layer = self._innermost(_layers(_table(self.layers), self.strings), cause, thread, *self.functions)
        if self.functions:
            self.meta["lines"] = "functions"  # the format has only the first line of each function
        return assemble(
            rows, cause, self.ranges, self.strings, self.meta, where=where, layer=layer, rank=self.meta.get("rank", 0),
            communications=self.rows.communications,
        )  # fmt: skip

    def _with_waits(self, rows: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Return `rows` with the streams of the waits, and without the profiler's own wait (the last call of the trace)."""
        waits = np.flatnonzero(rows["kind"] == KIND["sync"])
        rows = {name: column.copy() for name, column in rows.items()}
        if self.sync_streams and len(waits):
            found = [self.sync_streams.get(c, -1) for c in rows["correlation"][waits].tolist()]
            rows["stream"][waits] = found
        if "schemaVersion" in self.head and self.last_call[1] == _PROFILERS_OWN_WAIT:
            keep = ~((rows["kind"] == KIND["sync"]) & (rows["start_ns"] == self.last_call[0]))
            rows = {name: column[keep] for name, column in rows.items()}
        return rows

    def _innermost(
        self, ran: dict[int, NDArray[np.int64]], cause: NDArray[np.int64], thread: NDArray[np.int64], *more: int
    ) -> NDArray[np.int64]:
        """Return the value of the innermost of the intervals that `ran` on each thread, rows [start, end, value]; -1: none.

        Threads that are neither in `ran` nor among `more`, such as those of autograd, use the thread with the most intervals.
        """
        found = np.full(len(cause), -1, np.int64)
        busiest = max(ran, key=lambda number: len(ran[number]), default=-1)
        thread = np.where(np.isin(thread, [*ran, *more]), thread, busiest)
        order = np.argsort(thread, kind="stable")
        bounds = np.searchsorted(thread[order], np.arange(len(self.threads) + 1))
        for number, table in ran.items():
            on = order[bounds[number] : bounds[number + 1]]
            which = innermost(cause[on], table[:, 0], table[:, 1])
            found[on] = np.where(which >= 0, table[which, 2], -1)
        return found


def _table(ran: dict[int, array[int]]) -> dict[int, NDArray[np.int64]]:
    return {thread: np.frombuffer(rows, np.int64).reshape(-1, 3) for thread, rows in ran.items()}


def _layers(ran: dict[int, NDArray[np.int64]], strings: Strings) -> dict[int, NDArray[np.int64]]:
    """Return the modules that are layers, rows [start, end, number], given those of each thread that may be, with their names.

    Layers are not inside of others, and there are several of one class. They are numbered in the order in which they ran first.
    """
    outer = {}
    for thread, table in ran.items():
        table = table[np.lexsort((-table[:, 1], table[:, 0]))]
        ended = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, table[:-1, 1]))
        outer[thread] = table[table[:, 0] >= ended]
    rows = np.concatenate([*outer.values(), np.zeros((0, 3), np.int64)])
    names = list(dict.fromkeys(rows[np.argsort(rows[:, 0], kind="stable"), 2].tolist()))
    texts = list(strings.codes)
    classes = Counter(texts[name].rpartition("_")[0] for name in names)
    layers = [name for name in names if classes[texts[name].rpartition("_")[0]] > 1]
    numbers = np.full(max(names, default=0) + 1, -1)
    numbers[layers] = np.arange(len(layers))
    return {thread: np.column_stack([table[:, :2], numbers[table[:, 2]]]) for thread, table in outer.items()}


class _Own:
    """Collects the events of `write_chrome`, which contain every column of the trace."""

    COLUMNS = (
        "start_ns", "dur_ns", "kind", "bytes", "stream", "device", "rank", "step", "cell", "pinned", "clock", "name", "where",
        "owner", "address", "requested", "layer", "communication",
    )  # fmt: skip

    def __init__(self, scanner: EventScanner) -> None:
        self.scanner, own = scanner, scanner.head["toolkit"]
        version = own.get("version", 1) if isinstance(own, dict) else 1
        if version not in range(1, VERSION + 1):
            found = f"it has format version {brief(version)}; this toolkit reads versions up to {VERSION}"
            raise TraceError(scanner.asked, found, "Upgrade the toolkit")
        try:
            self.meta = check_meta(own.get("meta") if isinstance(own, dict) else None)
        except ValueError as error:
            raise scanner.damaged(f"its header can't be read ({error})") from error
        self.strings, self.table = Strings(), array("q")
        self.communications = [NO_COMMUNICATION]  # of the events that have one

    def take(self, event: dict[str, Any]) -> None:
        """Collect one event. Only events of the trace have a "kind" in `args`; the others are for the viewer."""
        args = event.get("args")
        if type(args) is not dict or "kind" not in args:
            return
        get, code = args.get, self.strings.code
        where, owner = get("where"), get("owner")
        try:
            self.table.extend((
                round(event["ts"] * 1000), round(event.get("dur", 0) * 1000), KIND[args["kind"]], get("bytes", 0),
                get("stream", -1), get("device", 0), get("rank", 0), get("step", -1), get("cell", -1), get("pinned", -1),
                CLOCKS.index(get("clock", "measured")), -1 if "unnamed" in args else code(event["name"]),
                -1 if where is None else code(where), -1 if owner is None else code(owner),
                get("address", -1), get("requested", -1), get("layer", -1), self._communication(args),
            ))  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self.scanner.damaged(f"an event has unexpected fields ({error!r})") from error

    def _communication(self, args: dict[str, Any]) -> int:
        """Store the columns of a collective or peer copy and return their index; 0 for other events."""
        if "communication" not in args:
            return 0
        known, code = args["communication"].items(), self.strings.code
        given = {name: code(value) if name in TEXT_COLUMNS else value for name, value in known}
        values = (given.get(name, -1) for name in COMMUNICATION)
        self.communications.append(tuple(array("q", values)))  # raises an error if a value is not a 64-bit int
        return len(self.communications) - 1

    def trace(self) -> Trace:
        """Return the Trace of the collected events."""
        table = np.array(self.table, np.int64).reshape(-1, len(self.COLUMNS))
        columns = {name: table[:, i] for i, name in enumerate(self.COLUMNS)}
        columns |= communication_columns(self.communications, columns.pop("communication"))
        return from_columns(list(self.strings.codes), self.meta, **columns)
