"""Build a Trace from the raw columns of a reader: assign steps and number streams. All trace readers share this module."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.callers import source_line
from toolkit.core.errors import TraceError
from toolkit.trace.columns import COLUMNS, COPY_KINDS, HOST_KINDS, KINDS, LANES, NOT_KNOWN, OPTIONAL
from toolkit.trace.cupti import number_streams
from toolkit.trace.events import NO_COMMUNICATION, Trace, communication_columns
from toolkit.trace.nccl import Communication
from toolkit.trace.steps import Range, guess_steps, shown_name, steps_among, steps_from_ranges

LONGEST_NS = 1 << 61  # sums and differences of such times fit into 64 bits
KIND = {kind: i for i, kind in enumerate(KINDS)}


def ns_of(us: float) -> int:
    """Return a time in µs as whole ns. Raises OverflowError if it is more than 73 years, TypeError if it is not a number."""
    ns = round(us * 1000)
    if not -LONGEST_NS <= ns <= LONGEST_NS:
        raise OverflowError("a time is more than 73 years")
    return ns


def from_columns(strings: list[str], meta: dict[str, Any], **columns: Any) -> Trace:
    """Return a trace of the given columns, sorted by start time. Missing columns are filled with their "not known" value.

    Raises ValueError for a number that does not fit into its column: readers add the name of the file.
    """
    order = np.argsort(np.asarray(columns["start_ns"], np.int64), kind="stable")
    full: dict[str, NDArray[Any]] = {}
    for name, dtype in COLUMNS.items():
        given = columns.get(name)
        if given is None and name in OPTIONAL:
            continue
        full[name] = np.full(len(order), NOT_KNOWN.get(name, 0), dtype) if given is None else np.asarray(given)[order]
    try:
        return Trace(full, strings, meta)
    except TraceError as error:
        raise ValueError(error.found) from error


def title_of(path: Path) -> str:
    """Return the name of another tool's file: what timelines and comparisons call the trace, as `meta["title"]`."""
    return path.name.encode(errors="replace").decode()  # no surrogates


@dataclass
class Strings:
    """A table that gives each distinct text an integer code."""

    codes: dict[str, int] = field(default_factory=dict)

    def code(self, text: str) -> int:
        """Return the code of `text`, adding it to the table if it is new. Raises TypeError if it is not a str."""
        found = self.codes.get(text)
        if found is None:
            if type(text) is not str:
                raise TypeError(f"{type(text).__name__} instead of a text")
            found = self.codes[text] = len(self.codes)
        return found


class Rows:
    """The events of a reader in one array, 8 bytes per number: 80 MB per million events instead of 1 GB as Python objects."""

    NAMES = (
        "kind", "start_ns", "dur_ns", "bytes", "stream", "device", "pinned", "name", "thread", "correlation", "communication",
    )  # fmt: skip

    def __init__(self) -> None:
        self._data = array("q")
        self.communications = [NO_COMMUNICATION]  # the last number of a row is an index

    def add(
        self, kind: int, start_ns: int, dur_ns: int, bytes: int, stream: int, device: int, pinned: int, name: int,
        thread: int = -1, correlation: int = -1, communication: int = 0,
    ) -> None:  # fmt: skip
        """Append an event. `stream` is the stream number of the tool, `thread` a code of the host thread.

        `communication` is what `communication()` returned for a collective or peer copy.

        A negative duration becomes 0. Raises OverflowError or TypeError if a value is not a 64-bit int, and ValueError if the
        size is negative; nothing is appended then.
        """
        if bytes < 0:
            raise ValueError(f"a size of {bytes} bytes")
        row = kind, start_ns, max(dur_ns, 0), bytes, stream, device, pinned, name, thread, correlation, communication
        self._data.extend(array("q", row))

    def communication(self, found: Communication, strings: Strings) -> int:
        """Store the columns of a collective or peer copy and return their index."""
        operation, algorithm, group = (-1 if text is None else strings.code(text) for text in found[:3])
        self.communications.append(tuple(array("q", (operation, algorithm, group, *found[3:]))))
        return len(self.communications) - 1

    def __len__(self) -> int:
        return len(self._data) // len(self.NAMES)

    def columns(self) -> dict[str, NDArray[np.int64]]:
        """Return the events as columns, in the order in which they were added."""
        table = np.frombuffer(self._data, np.int64) if self._data else np.empty(0, np.int64)
        table = table.reshape(-1, len(self.NAMES))
        return {name: table[:, i] for i, name in enumerate(self.NAMES)}


@dataclass
class Calls:
    """Runtime calls: the time, the host thread and the name of each correlation id."""

    _data: array[int] = field(default_factory=lambda: array("q"))
    _names: Strings = field(default_factory=lambda: Strings())

    def add(self, correlation: int, start_ns: int, thread: int, dur_ns: int, name: str) -> None:
        """Append a call. Raises OverflowError or TypeError, and appends nothing, if a value has another type."""
        self._data.extend(array("q", (correlation, start_ns, thread, max(dur_ns, 0), self._names.code(name))))

    def _table(self) -> NDArray[np.int64]:
        return np.frombuffer(self._data, np.int64).reshape(-1, 5) if self._data else np.empty((0, 5), np.int64)

    def with_launches(self, rows: dict[str, NDArray[np.int64]], strings: Strings) -> dict[str, NDArray[np.int64]]:
        """Return `rows` and, as further rows, the calls that launched kernels, copies and memsets among them."""
        on_device = np.isin(rows["kind"], [KIND[kind] for kind in LANES if kind not in HOST_KINDS])
        device = np.flatnonzero(on_device & (rows["correlation"] >= 0))
        launched, first = np.unique(rows["correlation"][device], return_index=True)
        table = self._table()
        table = table[np.isin(table[:, 0], launched)]
        if not len(table):
            return rows
        codes = {code: name for name, code in self._names.codes.items()}
        names = {code: strings.code(codes[code]) for code in np.unique(table[:, 4]).tolist()}
        extra: dict[str, Any] = {
            "kind": KIND["launch"], "start_ns": table[:, 1], "dur_ns": table[:, 3], "bytes": 0, "device": -1, "pinned": -1,
            "stream": rows["stream"][device[first[np.searchsorted(launched, table[:, 0])]]], "thread": table[:, 2],
            "name": [names[code] for code in table[:, 4].tolist()], "correlation": -1, "communication": 0,
        }  # fmt: skip
        return {n: np.concatenate([column, np.broadcast_to(extra[n], len(table))]) for n, column in rows.items()}

    def causes(self, rows: dict[str, NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the launch time and the launching thread of each row. Default: its own start and thread."""
        cause, thread = rows["start_ns"].copy(), rows["thread"].copy()
        if self._data:
            keys, starts, threads, _, _ = self._table().T
            order = np.argsort(keys, kind="stable")
            at = order[np.minimum(np.searchsorted(keys, rows["correlation"], sorter=order), len(keys) - 1)]
            known = (keys[at] == rows["correlation"]) & (rows["correlation"] >= 0)
            cause[known] = starts[at[known]]
            thread[known] = threads[at[known]]
        return cause, thread


def assemble(
    rows: dict[str, NDArray[np.int64]], cause_ns: NDArray[np.int64], ranges: list[Range], strings: Strings,
    meta: dict[str, Any], *, where: NDArray[np.int64] | None = None, layer: NDArray[np.int64] | None = None, rank: int = 0,
    ranges_are: str = "marks",
    communications: Sequence[tuple[int, ...]] = (NO_COMMUNICATION,),
) -> Trace:  # fmt: skip
    """Return the trace of `rows` and `ranges`, with times that start at 0. The ranges become marks, of no less than 0 ns.

    `meta["origin_ns"]`, if it is known, is the time at 0 on the clock of the host, before and after. Collectives that have no
    number are numbered in each group in order of start, and `meta["collectives_counted"]` says so.

    Steps are taken from `ranges` if some of them are steps, and guessed otherwise. `cause_ns` [N] is the time at which the host
    launched each row. `ranges_are` is `meta["steps_from"]` for ranges that neither the toolkit nor the profiler wrote.
    """
    source, numbers = steps_among(ranges)
    marks = np.array([(r.start_ns, max(r.start_ns, r.end_ns)) for r in ranges], np.int64).reshape(-1, 2)
    for times in (rows["start_ns"], rows["dur_ns"], cause_ns, marks):
        if times.size and not -LONGEST_NS <= times.min() <= times.max() <= LONGEST_NS:
            raise ValueError("a time is more than 73 years")  # sums and differences would wrap
    if source is None:
        step = _guess(rows, cause_ns)
        source = None if step is None else "guessed"
    else:
        is_step = np.array(numbers) >= 0
        step = steps_from_ranges(cause_ns, marks[is_step, 0], marks[is_step, 1], np.array(numbers)[is_step])
    order = np.argsort(rows["start_ns"], kind="stable")
    stream = np.empty(len(order), np.int32)
    stream[order] = number_streams(rows["stream"][order])
    columns: dict[str, Any] = {n: rows[n] for n in ("start_ns", "dur_ns", "kind", "bytes", "device", "pinned", "name")}
    columns["stream"] = stream
    columns["step"] = np.full(len(order), -1) if step is None else step
    for name, found in (("where", where), ("layer", layer)):
        columns[name] = np.full(len(order), -1) if found is None else found
    columns |= communication_columns(communications, rows["communication"])
    meta = meta | ({"collectives_counted": True} if _count_collectives(columns) else {})
    extra: dict[str, Any] = NOT_KNOWN | {
        "start_ns": marks[:, 0], "dur_ns": marks[:, 1] - marks[:, 0], "kind": KIND["mark"], "bytes": 0, "device": -1,
        "pinned": -1, "name": [strings.code(shown_name(r.name)) for r in ranges], "stream": -1, "step": numbers, "where": -1,
    }  # fmt: skip
    columns = {n: np.concatenate([c, np.broadcast_to(extra[n], len(ranges))]) for n, c in columns.items()}
    if len(columns["start_ns"]):
        meta = meta | ({"origin_ns": meta["origin_ns"] + int(columns["start_ns"].min())} if "origin_ns" in meta else {})
        columns["start_ns"] = columns["start_ns"] - columns["start_ns"].min()
    source = ranges_are if source == "ranges" else source
    columns["rank"] = np.full(len(columns["start_ns"]), rank)
    return from_columns(list(strings.codes), meta | {"clock": "measured", "steps_from": source, "sizes_only": False}, **columns)


def _count_collectives(columns: dict[str, NDArray[Any]]) -> bool:
    """Number the collectives of groups in which none has a number, and return whether there are such groups."""
    mine, counted = np.flatnonzero(columns["kind"] == KIND["collective"]), False
    for group in np.unique(columns["group"][mine]).tolist() if len(mine) else []:
        members = mine[columns["group"][mine] == group]
        if (columns["seq"][members] < 0).all():
            columns["seq"][members[np.argsort(columns["start_ns"][members], kind="stable")]] = np.arange(len(members))
            counted = True
    return counted


def with_guessed_steps(trace: Trace) -> Trace:
    """Return `trace` with steps guessed from a repeating pattern, or `trace` itself if it has steps or no pattern is found.

    A recording doesn't say what each call launched. Device events are therefore taken in the order in which they ran, a launch
    gets the step of the event that it started, a wait that of the last event that it waited for, and an allocation that of the
    last event that started before it.
    """
    if trace.meta.get("steps_from") is not None or trace["step"].max(initial=-1) >= 0:
        return trace
    rows = {name: trace[name].astype(np.int64) for name in ("start_ns", "kind", "bytes", "name")}
    waits = rows["kind"] == KIND["sync"]
    step = _guess(rows, _ran_ns(trace) + np.where(waits, trace["dur_ns"], 0))
    if step is None:
        return trace
    return Trace({**trace.columns, "step": step}, trace.strings, trace.meta | {"steps_from": "guessed"})


def _ran_ns(trace: Trace) -> NDArray[np.int64]:
    """Return the start of each row; of a launch, that of the first event that it started.

    Events of a stream run in the order of their launches. If the numbers of both differ, as with graphs, the event is taken to
    be the first one after the launch began.
    """
    start, stream = trace["start_ns"], trace["stream"]
    ran_ns = start.astype(np.int64)
    launch, on_device = trace.is_kind("launch"), trace.is_kind(*(kind for kind in LANES if kind not in HOST_KINDS))
    for code in np.unique(stream[launch]).tolist():
        calls, events = (np.flatnonzero(mask & (stream == code)) for mask in (launch, on_device))
        first = np.arange(len(calls)) if len(calls) == len(events) else np.searchsorted(start[events], start[calls])
        known = first < len(events)
        ran_ns[calls[known]] = start[events[first[known]]]
    return ran_ns


def with_sources(trace: Trace) -> Trace:
    """Return `trace` with the source text of the lines that copied or waited, as far as it is found, in `meta["source"]`."""
    codes = np.unique(trace["where"][trace.is_kind("sync", *COPY_KINDS)])
    places = [trace.strings[code] for code in codes.tolist() if code >= 0]
    found = {place: text for place in places if (text := source_line(place))}
    return Trace(trace.columns, trace.strings, trace.meta | {"source": found}) if found else trace


def _guess(rows: dict[str, NDArray[np.int64]], cause_ns: NDArray[np.int64]) -> NDArray[np.int32] | None:
    """Guess the step of each row from the device events in launch order. Return None if no pattern is found."""
    device = np.isin(rows["kind"], [KIND[kind] for kind in LANES if kind not in HOST_KINDS])
    order = np.flatnonzero(device)[np.lexsort((rows["start_ns"][device], cause_ns[device]))]
    # copies are the same event only if their sizes are equal, too
    is_kernel = np.isin(rows["kind"], (KIND["kernel"], KIND["collective"]))
    alike = rows["name"][order] * 1_000_003 + np.where(is_kernel[order], 0, rows["bytes"][order])
    guess = guess_steps(alike, rows["kind"][order] == KIND["d2h"])
    if guess is None:
        return None
    times = cause_ns[order]
    before = np.searchsorted(times, cause_ns, side="right") - 1  # waits and allocations get the step of the launch before them
    step = np.where(before >= 0, guess[np.maximum(before, 0)], -1).astype(np.int32)
    step[order] = guess
    return step
