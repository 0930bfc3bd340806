"""Read traces of Nsight Systems from the SQLite database that `nsys export --type sqlite` writes.

Tables and columns differ between versions, and Nsight leaves out empty tables: missing values become "not known". Source lines
are not read, since Nsight does not record them reliably. Nothing in the file is executed: an authorizer allows only reads of
the stored columns in `_TABLES`, so that SQLite refuses views, virtual tables, generated columns and functions.

If a report has several processes that used a GPU, as of `nsys profile torchrun ...`, they are ranks of one trace.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from toolkit.core.errors import TraceError
from toolkit.core.files import open_regular
from toolkit.trace.assemble import KIND, LONGEST_NS, Calls, Rows, Strings, assemble, title_of
from toolkit.trace.cupti import MEMCPY_KINDS, is_copy_kernel, is_wait, pinned_of
from toolkit.trace.events import Trace
from toolkit.trace.join import join
from toolkit.trace.nccl import PEER, Communication, of_kernel
from toolkit.trace.steps import Range

_PREFIX = "CUPTI_ACTIVITY_KIND_"
# ENUM_CUDA_MEM_KIND of Nsight's schema, which starts at 0; CUPTI's own enum starts at 1
_MEMORY = ("Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown")
_LETTERS = {"h2d": "HtoD", "d2h": "DtoH", "d2d": "DtoD", "p2p": "PtoP"}
_RANGE_TYPES = (59, 60)  # NVTX: push/pop, start/end

_EVENT: dict[str, type] = {"start": int, "end": int}
_ON_GPU = _EVENT | dict.fromkeys(("deviceId", "streamId", "correlationId", "globalPid"), int)
_TABLES: dict[str, dict[str, type]] = {  # the tables and columns that are read; each value has this type or is NULL
    "StringIds": {"id": int, "value": str},
    "TARGET_INFO_GPU": {"name": str},
    "TARGET_INFO_SESSION_START_TIME": {"utcEpochNs": int},
    "NVTX_EVENTS": _EVENT | {"eventType": int, "text": str, "textId": int, "globalTid": int},
    f"{_PREFIX}KERNEL": _ON_GPU | {"demangledName": int, "shortName": int},
    f"{_PREFIX}GRAPH_TRACE": _ON_GPU | {"graphId": int},
    f"{_PREFIX}MEMCPY": _ON_GPU | dict.fromkeys(("bytes", "copyKind", "srcKind", "dstKind", "srcDeviceId", "dstDeviceId"), int),
    f"{_PREFIX}MEMSET": _ON_GPU | {"bytes": int},
    f"{_PREFIX}SYNCHRONIZATION": dict.fromkeys(("correlationId", "globalPid", "streamId"), int),
    f"{_PREFIX}RUNTIME": _EVENT | {"correlationId": int, "globalTid": int, "nameId": int},
}
_ON_GPUS = tuple(f"{_PREFIX}{kind}" for kind in ("KERNEL", "GRAPH_TRACE", "MEMCPY", "MEMSET"))
_MOST_RANKS = 1024  # a report of more processes is read as one rank
_SCHEMA = ("sqlite_master", "sqlite_schema")
_LEAST_ROW_BYTES = 4  # a record's cell pointer, length, key and header: pages that are read more than once exceed it
_PID_BIT, _PROCESS_BIT = 24, 40  # the lowest bit of the process in globalPid and globalTid, and in our correlation ids
_INSTRUCTIONS = 100_000  # of SQLite's virtual machine between two checks of the limit
_RECORD = "Record work on a GPU with nsys profile --trace=cuda,nvtx, then nsys export --type sqlite"


def read_nsys(path: Path) -> Trace:
    """Return the trace in an SQLite export of Nsight Systems. Raises TraceError if it is damaged or has no CUDA events."""
    asked = f"opening the trace {str(path)!r}"
    try:
        size = _check_length(path, asked)
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.set_authorizer(_authorize)
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, max(size, 1 << 16))
            left = [1000 + 20 * size // _INSTRUCTIONS]

            def stop() -> bool:
                left[0] -= 1
                return left[0] < 0

            connection.set_progress_handler(stop, _INSTRUCTIONS)
            trace = _Database(connection, asked, size).trace()
    except (sqlite3.Error, UnicodeDecodeError, OverflowError) as error:
        raise TraceError(asked, f"the database is damaged ({error})", "Export it again: nsys export --type sqlite") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(
            asked, f"a column contains an unexpected value ({error})", "Export it again from the .nsys-rep"
        ) from error
    if not len(trace):
        raise TraceError(asked, "it has no events of a GPU", _RECORD)
    trace.meta["title"] = title_of(path)
    return trace


def _authorize(action: int, first: str | None, second: str | None, _: str | None, inside: str | None) -> int:
    """Allow an action of SQLite's compiler only if it reads the schema or a column of `_TABLES`, outside of any view."""
    reads = first in _SCHEMA or (first in _TABLES and (not second or second in _TABLES[first]))
    allowed = action == sqlite3.SQLITE_SELECT or (action == sqlite3.SQLITE_READ and reads)
    allowed |= action == sqlite3.SQLITE_PRAGMA and first == "table_info" and second in _TABLES
    return sqlite3.SQLITE_OK if allowed and inside is None else sqlite3.SQLITE_DENY


def _check_length(path: Path, asked: str) -> int:
    """Return the file's size. Raises TraceError if it is truncated; SQLite itself notices only when it reads a missing page."""
    with open_regular(path, asked, TraceError) as file:
        header, found_bytes = file.read(32), os.fstat(file.fileno()).st_size
    page_bytes = int.from_bytes(header[16:18]) or 1
    pages = int.from_bytes(header[28:32])
    promised_bytes = pages * (65536 if page_bytes == 1 else page_bytes)
    if len(header) < 32 or found_bytes < promised_bytes:
        found = f"the database is truncated to {found_bytes} of {promised_bytes} bytes"
        raise TraceError(asked, found, "Copy the complete file again, or export it again")
    return found_bytes


_Row = tuple[Any, ...]


class _Database:
    def __init__(self, connection: sqlite3.Connection, asked: str, size: int) -> None:
        self.connection, self.asked = connection, asked
        self._rows_left, self._text_left = size // _LEAST_ROW_BYTES, 2 * size
        listed = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0")  # 0: virtual
        self.tables = {name for (name,) in listed if name in _TABLES}
        if not any(f"{_PREFIX}{kind}" in self.tables for kind in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME")):
            found = "it has no CUDA events" if "StringIds" in self.tables else "it is a database of another program"
            raise TraceError(asked, found, _RECORD)
        self.texts = {code: text for code, text in self.read("StringIds", "id", "value") if text is not None}
        self.processes: dict[int, int] = {}
        self._events: dict[str, tuple[list[_Row], dict[int | None, list[_Row]]]] = {}  # by table: all, and by process
        self._begin(None, True)

    def _begin(self, process: int | None, first: bool) -> None:
        """Read events from now on of this process only, or of all; events without a process belong to the first one."""
        self.strings, self.rows, self.calls = Strings(), Rows(), Calls()
        self.threads: dict[int, int] = {}
        self._process, self._first = process, first

    def events(self, table: str) -> list[_Row]:
        """Return the events of a table that are read now, with all its columns."""
        every, groups = self._by_process(table)
        return every if self._process is None else groups.get(self._process, []) + self._first * groups.get(None, [])

    def _by_process(self, table: str) -> tuple[list[_Row], dict[int | None, list[_Row]]]:
        if table not in self._events:
            columns = [*_TABLES[table]]
            at = columns.index("globalPid" if "globalPid" in columns else "globalTid")
            groups: defaultdict[int | None, list[_Row]] = defaultdict(list)
            rows = self.read(table, *columns)
            for row in rows:
                groups[None if row[at] is None else row[at] >> _PID_BIT].append(row)
            self._events[table] = rows, groups
        return self._events[table]

    def read(self, table: str, *columns: str) -> list[tuple[Any, ...]]:
        """Return the rows of a table, with None for missing columns. A missing table has no rows.

        Raises ValueError if a value has another type than in `_TABLES`, or if there are more rows or is more text than the
        file has bytes for: its pages are then linked more than once.
        """
        if table not in self.tables:
            return []
        there = {row[1] for row in self.connection.execute(f'PRAGMA table_info("{table}")')}
        asked = ", ".join(f'"{column}"' if column in there else "NULL" for column in columns)
        kinds = [(column, _TABLES[table][column]) for column in columns]
        rows: list[tuple[Any, ...]] = []
        cursor = self.connection.execute(f'SELECT {asked} FROM "{table}"')
        while batch := cursor.fetchmany(10_000):
            for (column, kind), values in zip(kinds, zip(*batch, strict=True), strict=True):
                if not {type(value) for value in values} <= {kind, type(None)}:
                    raise ValueError(f"column {column} of {table} has values that are not {kind.__name__}")
                if kind is str:
                    self._text_left -= sum(len(value) for value in values if value)
            self._rows_left -= len(batch)
            if min(self._rows_left, self._text_left) < 0:
                raise ValueError(f"table {table} has more values than the file has bytes for")
            rows += batch
        return rows

    def trace(self) -> Trace:
        """Return the trace of the database: that of all processes, or, if several used a GPU, with a rank for each."""
        used: dict[int, int] = {}  # by process: its first GPU
        for table in _ON_GPUS:
            device = [*_TABLES[table]].index("deviceId")
            for process, rows in self._by_process(table)[1].items():
                if process is not None and process not in used:
                    used[process] = min(row[device] or 0 for row in rows)
        about = self._about()
        if not 1 < len(used) <= _MOST_RANKS:
            return self._trace(about)
        ranks, traces = sorted(used, key=lambda process: (used[process], process)), []
        for rank, process in enumerate(ranks):
            self._begin(process, not rank)
            traces.append(self._trace({"origin_ns": 0, **about, "rank": rank}))
        joined = join(traces, [f"process {process & 0xFFFFFF}" for process in ranks], self.asked, one_clock=True)
        if "origin_ns" not in about:
            for meta in joined.meta["ranks"].values():
                del meta["origin_ns"]  # counts from the start of the report, which is not known
        note = "The ranks are the processes of the report, in the order of their GPUs. They share a clock."
        joined.meta["notes"].insert(0, note)
        return joined

    def _about(self) -> dict[str, Any]:
        """Return the `meta` of the report."""
        gpus = self.read("TARGET_INFO_GPU", "name")
        meta = {"device": gpus[0][0] if gpus and gpus[0][0] else "unknown device", "format": "nsys"}
        began = self.read("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")
        if began and began[0][0] is not None and 0 <= began[0][0] < LONGEST_NS:
            meta["origin_ns"] = began[0][0]
        return meta

    def _trace(self, meta: dict[str, Any]) -> Trace:
        """Return the trace of the events that are read now."""
        self.read_kernels()
        self.read_copies()
        self.read_calls()
        rows = self.calls.with_launches(self.rows.columns(), self.strings)
        cause, _ = self.calls.causes(rows)
        marks = self.read_ranges()
        if self.events(f"{_PREFIX}GRAPH_TRACE"):
            meta["graphs"] = "whole"  # each launch is one event: the copies and kernels inside are not recorded
        communications = self.rows.communications
        return assemble(rows, cause, marks, self.strings, meta, ranges_are="nvtx", communications=communications)

    def name(self, *codes: int | None) -> int:
        """Return the string code of the first of `codes` that has a text, or -1."""
        for code in codes:
            if code is not None and code in self.texts:
                return self.strings.code(self.texts[code])
        return -1

    def read_kernels(self) -> None:
        for start, end, device, stream, correlation, process, demangled, short in self.events(f"{_PREFIX}KERNEL"):
            name, kind, text = self.name(demangled, short), "kernel", self.texts.get(demangled) or self.texts.get(short, "")
            found = of_kernel(text)
            if found is not None:
                kind = "p2p" if found.operation in PEER else "collective"
            elif is_copy_kernel(self.texts.get(demangled, "")):
                kind = "d2d"
            communication = self.rows.communication(found, self.strings) if found else 0
            correlation = self.correlated(correlation, process)
            self.add(kind, start, end, 0, stream, device, -1, name, correlation, communication=communication)
        for start, end, device, stream, correlation, process, graph in self.events(f"{_PREFIX}GRAPH_TRACE"):
            name, correlation = self.strings.code(f"CUDA graph {graph}"), self.correlated(correlation, process)
            self.add("kernel", start, end, 0, stream, device, -1, name, correlation)

    def read_copies(self) -> None:
        for start, end, device, stream, correlation, process, n_bytes, number, source, target, giver, taker in self.events(
            f"{_PREFIX}MEMCPY"
        ):
            kind = MEMCPY_KINDS.get(number)
            if kind is not None:
                memory = [_MEMORY[k] if k is not None and 0 <= k < len(_MEMORY) else "Unknown" for k in (source, target)]
                name = self.strings.code(f"Memcpy {_LETTERS[kind]} ({memory[0]} -> {memory[1]})")
                pinned = pinned_of(kind, memory[0] if kind == "h2d" else memory[1])
                peer = next((gpu for gpu in (taker, giver) if kind == "p2p" and gpu not in (None, device)), None)
                communication = 0 if peer is None else self.rows.communication(Communication(peer=peer), self.strings)
                correlation = self.correlated(correlation, process)
                self.add(kind, start, end, n_bytes, stream, device, pinned, name, correlation, communication=communication)
        for start, end, device, stream, correlation, process, n_bytes in self.events(f"{_PREFIX}MEMSET"):
            name, correlation = self.strings.code("Memset (Device)"), self.correlated(correlation, process)
            self.add("memset", start, end, n_bytes, stream, device, -1, name, correlation)

    def correlated(self, correlation: int | None, process: int | None) -> int:
        """Return a correlation id that differs between processes, given the globalPid or globalTid; -1 if there is none.

        CUPTI counts in each process. Events without a process (older versions) belong to the first one.
        """
        if correlation is None:
            return -1
        number = 0 if process is None else self.processes.setdefault(process >> _PID_BIT, len(self.processes))
        return correlation + (number << _PROCESS_BIT)

    def add(
        self, kind: str, start: int, end: int, n_bytes: int | None, stream: int | None, device: int | None, pinned: int,
        name: int, correlation: int, thread: int = -1, communication: int = 0,
    ) -> None:  # fmt: skip
        self.rows.add(
            KIND[kind], start, end - start, n_bytes or 0, -1 if stream is None else stream, device or 0, pinned, name, thread,
            correlation, communication,
        )  # fmt: skip

    def read_calls(self) -> None:
        waits = self.events(f"{_PREFIX}SYNCHRONIZATION")
        streams = {self.correlated(correlation, process): stream for correlation, process, stream in waits}
        for start, end, correlation, global_tid, name_id in self.events(f"{_PREFIX}RUNTIME"):
            thread = self.threads.setdefault(global_tid or 0, len(self.threads))
            correlation = self.correlated(correlation, global_tid)
            if correlation >= 0:
                self.calls.add(correlation, start, thread, end - start, self._call_name(name_id))
            if is_wait(self.texts.get(name_id, "")):
                name = self.strings.code(self._call_name(name_id))
                self.add("sync", start, end, 0, streams.get(correlation), 0, -1, name, correlation, thread)

    def _call_name(self, code: int | None) -> str:
        """Return the name of a runtime call without its version: "cudaLaunchKernel_v7000" gives "cudaLaunchKernel"."""
        text = self.texts.get(code, "") if code is not None else ""
        return text.rpartition("_v")[0] or text

    def read_ranges(self) -> list[Range]:
        """Return the push/pop and start/end ranges of NVTX."""
        return [
            Range(start, end, text if text is not None else self.texts.get(text_id, ""))
            for start, end, kind, text, text_id, _ in self.events("NVTX_EVENTS")
            if start is not None and end is not None and (kind is None or kind in _RANGE_TYPES)
        ]
