"""The event table: the kind, time and size of each event on a device, and the line of Python that caused it.

Recorders of the real and the virtual GPU append rows to a `TraceBuilder`, whose `build` sorts them into an immutable `Trace`;
file readers create the same table. Copies per step, timelines and memory tables are computed from a Trace alone.
`toolkit.trace.columns` describes the columns. This module imports numpy but not torch.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import msgspec
import numpy as np
from numpy.typing import NDArray

from toolkit.core.display import render
from toolkit.core.errors import RecorderError, TraceError, UnknownNameError, brief, unknown_name
from toolkit.core.files import at_home, open_regular, replacing, shown
from toolkit.core.schema import convert, parse_json, without_surrogates
from toolkit.trace.arrays import check_archive, read_arrays
from toolkit.trace.chrome.write import as_json, write_chrome
from toolkit.trace.columns import CLOCKS, COLUMNS, COMMUNICATION, KINDS, NOT_KNOWN, OPTIONAL, TEXT_COLUMNS, as_rows
from toolkit.trace.copies import copies_per_step
from toolkit.trace.waits import collectives_table, known_rank, ranks_table

if TYPE_CHECKING:
    import pandas as pd

FORMAT_VERSION = 4  # version 1 has no columns `address` and `requested`, version 2 no launches, version 3 no collectives

_Number = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_KIND = {kind: i for i, kind in enumerate(KINDS)}
NO_COMMUNICATION = (-1,) * len(COMMUNICATION)


@dataclass(frozen=True)
class Mark:
    """A named range of host time: a decode step, the prefill, a region of the user's code.

    `step` is the step number of the events caused inside the range, or -1 if the range is not a step.
    """

    name: str
    start_ns: int
    dur_ns: int
    step: int = -1


class Trace:
    """An immutable table of events, returned by `TraceBuilder.build`, `tk.record`, `tk.open_trace` and `Trace.load`.

    `len(trace)` is the number of events, `trace["bytes"]` a read-only numpy column, `trace.text("name")` a decoded text
    column. `toolkit.trace.columns` describes the columns. `trace.meta` describes the recording: `device` (its name), `clock`,
    `steps_from` (the source of the step numbers: "marks", "ProfilerStep", "nvtx", "guessed" or None), `sizes_only` and
    versions.

    The trace that `tk.record` yields has no events until its `with` block ends; reading it earlier raises RecorderError.
    """

    def __init__(self, columns: dict[str, NDArray[Any]] | None, strings: Iterable[str], meta: dict[str, Any]) -> None:
        self._columns: dict[str, NDArray[Any]] | None = None
        self.strings: tuple[str, ...] = ()
        self.meta: dict[str, Any] = {}
        if columns is not None:
            self._seal(columns, strings, meta)

    @classmethod
    def pending(cls) -> Trace:
        """Return a trace without events, for `fill` to complete when the recording has ended."""
        return cls(None, (), {})

    def fill(self, other: Trace) -> None:
        """Copy the events of `other` into a pending trace. Raises RecorderError if the trace is not pending."""
        if self._columns is not None:
            raise RecorderError("filling a trace", "it already contains events", "Create another trace with Trace.pending()")
        self._seal(other.columns, other.strings, other.meta)

    def _seal(self, columns: dict[str, NDArray[Any]], strings: Iterable[str], meta: dict[str, Any]) -> None:
        if set(columns) | set(OPTIONAL) != set(COLUMNS) or len({len(c) for c in columns.values()}) > 1:
            found = f"columns are missing, unknown or of unequal length: {', '.join(sorted(columns))}"
            raise TraceError("creating a trace", found, f"Give columns of equal length: {', '.join(COLUMNS)}")
        texts = tuple(text if text.isascii() else text.encode(errors="replace").decode() for text in strings)  # no surrogates
        distinct = {text: i for i, text in enumerate(dict.fromkeys(texts))}
        if len(distinct) < len(texts):  # each text has one code
            code_of = np.array([distinct[text] for text in texts] + [-1])
            present = [name for name in TEXT_COLUMNS if name in columns and not _is_absent(name, columns[name])]
            columns = columns | {name: code_of[columns[name]] for name in present}
        frozen: dict[str, NDArray[Any]] = {}
        for name, dtype in COLUMNS.items():
            if name not in columns or _is_absent(name, columns[name]):
                frozen[name] = np.broadcast_to(np.array(NOT_KNOWN[name], dtype), len(columns["start_ns"]))  # takes no memory
                continue
            column: NDArray[Any] = np.ascontiguousarray(_narrowed(name, columns[name], dtype))
            if column is columns[name] and column.flags.writeable:
                column = column.copy()
            column.flags.writeable = False
            frozen[name] = column
        self._columns, self.strings, self.meta = frozen, tuple(distinct), dict(meta)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the columns that are absent, such as for another process."""
        return Trace, (None if self._columns is None else dict(self._present()), self.strings, self.meta)

    @property
    def columns(self) -> dict[str, NDArray[Any]]:
        """All columns by name. Raises RecorderError if the recording has not ended."""
        if self._columns is None:
            raise RecorderError("reading a trace", "its recording, or one around it, has not ended", "Leave these blocks first")
        return self._columns

    def __len__(self) -> int:
        return len(self.columns["start_ns"])

    def __getitem__(self, column: str) -> NDArray[Any]:
        """Return a column. Raises UnknownNameError if there is none of this name."""
        columns = self.columns
        if not isinstance(column, str):  # also for the first step of `list(trace)`
            do = "Use trace.to_pandas() for a table with one row per event, and trace.select(mask) for some of the events"
            raise UnknownNameError(f"trace[{brief(column)}]", "the index of a trace is the name of a column", do)
        if column not in columns:
            raise unknown_name("column", column, columns)
        return columns[column]

    def __repr__(self) -> str:
        if self._columns is None:
            return "Trace(still recording)"
        counts = np.bincount(self["kind"], minlength=len(KINDS))
        parts = [f"{n} {kind}" for kind, n in zip(KINDS, counts, strict=True) if n]
        guessed = "; steps are guessed" if self.meta.get("steps_from") == "guessed" else ""
        return f"Trace({self.meta.get('device', 'unknown device')}: {', '.join(parts) or 'no events'}{guessed})"

    def text(self, column: str) -> list[str | None]:
        """Return a text column decoded, with None for events that have no text.

        Text columns are `name`, `where`, `owner`, `operation`, `algorithm` and `group`. Raises UnknownNameError for others.
        """
        if column not in TEXT_COLUMNS:
            raise unknown_name("text column", column, TEXT_COLUMNS)
        strings = self.strings
        return [strings[code] if code >= 0 else None for code in self[column].tolist()]

    def is_kind(self, *kinds: str) -> NDArray[np.bool_]:
        """Return a mask of the events whose kind is in `kinds`. Raises UnknownNameError if a kind is not in KINDS."""
        for kind in kinds:
            if kind not in KINDS:
                raise unknown_name("event kind", kind, KINDS)
        return np.isin(self["kind"], [_KIND[kind] for kind in kinds])

    def select(self, mask: NDArray[Any]) -> Trace:
        """Return a trace of the events that `mask` (booleans or indices) selects. Raises TraceError for anything else."""
        rows = as_rows(mask, len(self))
        return Trace({name: column[rows] for name, column in self._present()}, self.strings, self.meta)

    def _present(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Iterate over the columns that are not absent from this trace."""
        return ((name, column) for name, column in self.columns.items() if not _is_absent(name, column))

    def marks(self) -> Iterator[Mark]:
        """Iterate over the marks in order of start time."""
        rows = np.flatnonzero(self.is_kind("mark"))
        for i in rows.tolist():
            code = int(self["name"][i])
            yield Mark(
                self.strings[code] if code >= 0 else "", int(self["start_ns"][i]), int(self["dur_ns"][i]), int(self["step"][i])
            )

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a DataFrame with one row per event. Kinds, clocks and texts become categories."""
        import pandas as pd

        frame = {}
        for name, column in self.columns.items():
            if name == "kind":
                frame[name] = pd.Categorical.from_codes(column.astype(np.int16), list(KINDS))
            elif name == "clock":
                frame[name] = pd.Categorical.from_codes(column.astype(np.int16), list(CLOCKS))
            elif name in TEXT_COLUMNS:
                frame[name] = pd.Categorical.from_codes(column, list(self.strings))
            else:
                frame[name] = column
        return pd.DataFrame(frame)

    def copies(self) -> pd.DataFrame:
        """Return the number and size of the copies of each step, one row per step; of several ranks, one row per step and rank.

        Columns: `step` (0 is the prefill of the toolkit's decode loop; -1 collects events outside all steps, and is left out if
        there are steps but no copies outside), `h2d_count` and `h2d_bytes`, the same for d2h and d2d, `kernels` (their number,
        including collectives), `launches` (the number of calls that launched kernels, copies or graphs; -1 if the trace has no
        launches), `host_wait_us` (the time in µs for which the host waited, including calls that copied to pageable memory) and
        `clock` (whether that time was measured or modelled). Traces with copies between GPUs also have `p2p_count` and
        `p2p_bytes`; those of several ranks have these, `rank`, `collective_count` and `collective_bytes`.
        """
        return copies_per_step(self)

    def collectives(self) -> pd.DataFrame:
        """Return the collectives, one row each in order of start, with the rank that came last and the waits for it.

        Columns: `step` (of the first rank that has it in a step), `operation`, `algorithm`, `group`, `group_size`, `seq`,
        `bytes` (of one rank, 0 if not known), `start_us` (of the first rank), `dur_us` (from the first start to the last end),
        `last_rank` (the rank that came last; -1 if only one rank has the collective, or if all came at the same time), and for
        each rank `rank<N>_wait_us`, the time for which it waited for the last one (NaN if it has no event).
        """
        return collectives_table(self)

    def ranks(self) -> pd.DataFrame:
        """Return one row per rank that has collectives.

        Columns: `rank`, `device`, `collectives`, `bytes`, `last_count` (how often the rank came last and others waited for it),
        `caused_wait_us` (the time for which they waited), `wait_us` (the time for which it waited for others) and
        `clock_error_us` (the error of its clock after alignment, the median; NaN if fewer than two collectives tell it).
        """
        return ranks_table(self)

    def of_rank(self, rank: int) -> Trace:
        """Return the events of a rank, with the `meta` of its own recording if known. Raises UnknownNameError for others."""
        part = self.select(self["rank"] == known_rank(self, rank))
        return Trace(dict(part._present()), part.strings, (self.meta.get("ranks") or {}).get(str(rank), self.meta))

    def timeline(self, other: Trace | None = None) -> Any:
        """Return the interactive timeline of this trace, next to that of `other` if given. Needs the `lab` extra."""
        return render("timeline", self) if other is None else render("timeline", self, other)

    def to_html(self, path: str | os.PathLike[str], other: Trace | None = None) -> Path:
        """Write a self-contained HTML page with the timeline and the copies table. Needs no front-end package."""
        written: Path = render("page", self, path, other)
        return written

    def to_chrome(self, path: str | os.PathLike[str]) -> Path:
        """Write Chrome JSON for ui.perfetto.dev and `tk.open_trace`, compressed if `path` ends in .gz."""
        return write_chrome(self, path)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the trace, compressed, to `path`. The write is atomic: an existing file is replaced as a whole or kept."""
        header = as_json({"format": "toolkit-trace", "version": FORMAT_VERSION, "strings": self.strings, "meta": self.meta})
        arrays = {"header": np.frombuffer(header.encode(), np.uint8), **dict(self._present())}
        with replacing(path, TraceError) as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # numpy types its keyword `allow_pickle` over ours
        return at_home(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read a trace written by `save`, without executing anything in the file. Raises TraceError for any other file."""
        asked = f"opening the trace {shown(path)}"
        try:
            with open_regular(path, asked, TraceError) as file:
                arrays = read_arrays(file, os.fstat(file.fileno()).st_size, {"header", *COLUMNS})
                check_archive(file, asked)
            header: _Header = parse_json(arrays["header"].tobytes(), _Header)
            if header["format"] != "toolkit-trace":
                raise TraceError(asked, "it is not a trace written by Trace.save", "Use tk.open_trace for other formats")
            if header["version"] > FORMAT_VERSION:
                found = f"it has format version {header['version']}; this toolkit reads versions up to {FORMAT_VERSION}"
                raise TraceError(asked, found, "Upgrade the toolkit")
            meta = check_meta(header["meta"])
            columns = {name: arrays[name] for name in COLUMNS if name in arrays or name not in OPTIONAL}
        except _DAMAGE as error:
            why = f"it has no column {error}" if isinstance(error, KeyError) else error
            do = "Copy the complete file or save the trace again"
            do += "" if Path(path).suffix == ".trace" else ". For other formats, use tk.open_trace"
            raise TraceError(asked, f"it is damaged or not a trace ({why})", do) from error
        problem = _problem(columns, len(header["strings"]))
        if problem:
            raise TraceError(asked, problem, "The file is damaged: save the trace again")
        return cls(columns, header["strings"], meta)


class _Host(TypedDict, total=False):
    peak_bytes: _Number
    tensor_bytes: _Number


class _Clock(TypedDict):
    rank: _Number
    offset_us: float
    drift_ppm: float
    collectives: _Count
    error_us: float | None
    error_95_us: float | None


class Meta(TypedDict, total=False):
    """The types of the fields of `Trace.meta` that the toolkit reads; there may be others."""

    device: str | None
    clock: str | None
    steps_from: str | None
    failed: str | None
    problem: str | None
    title: str | None
    sizes_only: bool
    elapsed_s: float
    opening: _Count
    start_us: _Count
    origin_ns: _Number
    rank: _Number
    world_size: _Number
    groups: dict[str, list[int]]
    ranks: dict[str, Meta]
    clocks: list[_Clock]
    notes: list[str]
    limit_bytes: _Number
    total_bytes: _Number
    unaccounted_bytes: _Number
    unreadable_events: _Number
    device_index: _Number | None
    host: _Host
    source: dict[str, str]
    allocator_settings: dict[str, Any] | None


def check_meta(meta: Any) -> dict[str, Any]:
    """Return the `meta` of a file if its fields have the types of `Meta`. Raises ValueError otherwise."""
    convert(meta, Meta)
    checked: dict[str, Any] = without_surrogates(meta)
    return checked


class _Header(TypedDict):
    """The header of a trace that `Trace.save` wrote."""

    format: str
    version: int
    strings: list[str]
    meta: dict[str, Any]


# raised by numpy and zipfile for files of other formats, and for a header of another type
_DAMAGE = (
    OSError, ValueError, KeyError, TypeError, EOFError, NotImplementedError, RuntimeError, MemoryError, OverflowError,
    SyntaxError, zipfile.BadZipFile, zlib.error, struct.error,
)  # fmt: skip


def _is_absent(name: str, column: NDArray[Any]) -> bool:
    """Return whether a column is one that `Trace` filled in: a single "not known", repeated without memory of its own."""
    return name in OPTIONAL and column.strides == (0,) and bool((column[:1] == NOT_KNOWN[name]).all())


def _narrowed(name: str, column: NDArray[Any], dtype: type) -> NDArray[Any]:
    """Return a column as `dtype`. Raises TraceError if a value does not fit."""
    column, limits = np.asarray(column), np.iinfo(dtype)
    if column.dtype == dtype or not column.size:
        return column.astype(dtype, copy=False)
    for value in (column.min(), column.max()):
        if not limits.min <= value <= limits.max:
            found = f"column {name!r} has the value {value}, which is not in the range of {limits.dtype}"
            raise TraceError("creating a trace", found, "The source of these events is damaged, or it counts something else")
    return column.astype(dtype)


def _problem(columns: dict[str, NDArray[Any]], n_strings: int) -> str | None:
    """Return why the columns are not a valid table, or None if they are."""
    if any(c.ndim != 1 or c.dtype.kind not in "iu" for c in columns.values()) or len({len(c) for c in columns.values()}) > 1:
        return "it has columns of unequal length or with values other than integers"
    bounds = {name: (int(np.iinfo(dtype).min), int(np.iinfo(dtype).max) + 1) for name, dtype in COLUMNS.items()}
    bounds |= dict.fromkeys(TEXT_COLUMNS, (-1, n_strings)) | {"kind": (0, len(KINDS)), "clock": (0, len(CLOCKS))}
    for name, (low, high) in bounds.items():
        if name in columns and columns[name].size and not low <= int(columns[name].min()) <= int(columns[name].max()) < high:
            return f"its column {name!r} has values that are out of range"
    return None


class TraceBuilder:
    """Collects events and builds a Trace. Appending is cheap: rows are tuples in a list, and each string is stored once."""

    def __init__(self) -> None:
        self._rows: list[tuple[int, ...]] = []
        self._codes: dict[str, int] = {}
        self._numbers = itertools.count()  # a lock would not do: the garbage collector may call `intern` inside of it
        self._communications = [NO_COMMUNICATION]  # of the events that have one; the last number of a row is an index
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def intern(self, text: str | None) -> int:
        """Return the index of `text` in the `strings` of the trace, or -1 for None."""
        if text is None:
            return -1
        code = self._codes.get(text)
        return self._codes.setdefault(text, next(self._numbers)) if code is None else code

    def row(
        self, kind: str, start_ns: int, dur_ns: int = 0, *, bytes: int = 0, stream: int = -1, device: int = 0, rank: int = 0,
        step: int = -1, cell: int = -1, pinned: int = -1, clock: str = "measured", name: str | None = None,
        where: str | None = None, owner: str | None = None, address: int = -1, requested: int = -1, layer: int = -1,
        **communication: Any,
    ) -> tuple[int, ...]:  # fmt: skip
        """Return one event for `build` without appending it. `toolkit.trace.columns` describes the columns.

        `communication` are the columns of collectives and peer copies: operation, algorithm, group, group_size, seq, peer.
        """
        intern, more = self.intern, self._communication(**communication) if communication else 0
        return (
            start_ns, dur_ns, _KIND[kind], bytes, stream, device, rank, step, cell, pinned, clock != "measured",
            intern(name), intern(where), intern(owner), address, requested, layer, more,
        )  # fmt: skip

    def _communication(
        self, operation: str | None = None, algorithm: str | None = None, group: str | None = None, group_size: int = -1,
        seq: int = -1, peer: int = -1,
    ) -> int:  # fmt: skip
        """Store the columns of a collective or peer copy and return their index."""
        values = self.intern(operation), self.intern(algorithm), self.intern(group), group_size, seq, peer
        with self._lock:
            self._communications.append(values)
            return len(self._communications) - 1

    def add(self, kind: str, start_ns: int, dur_ns: int = 0, **columns: Any) -> None:
        """Append one event; the arguments are those of `row`."""
        self._rows.append(self.row(kind, start_ns, dur_ns, **columns))

    def build(self, meta: dict[str, Any], since: int = 0, before: Iterable[tuple[int, ...]] = (), origin_ns: int = 0) -> Trace:
        """Return a trace of the rows from index `since` on, sorted by start time. The builder can be used afterwards.

        At equal start times, the rows in `before` come first. `origin_ns` is subtracted from all times.
        """
        rows = [*before, *self._rows[since:]]
        plain = [name for name in COLUMNS if name not in COMMUNICATION]
        table = np.array(rows, dtype=np.int64).reshape(len(rows), len(plain) + 1)
        table[:, 0] -= origin_ns
        table = table[np.argsort(table[:, 0], kind="stable")]
        columns = {name: table[:, i] for i, name in enumerate(plain)}
        return Trace(columns | communication_columns(self._communications, table[:, -1]), self._strings(), meta)

    def _strings(self) -> list[str]:
        """Return the strings in the order of their indices. One that two threads took at the same time leaves a gap."""
        codes = self._codes.copy()
        strings = [""] * (1 + max(codes.values(), default=-1))
        for text, code in codes.items():
            strings[code] = text
        return strings


def communication_columns(table: Sequence[tuple[int, ...]], index: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """Return the columns COMMUNICATION of events, given the row of `table` that each has; {} if all have row 0, none."""
    if not index.any():
        return {}
    values = np.array(table, np.int64)[index]
    return {name: values[:, i] for i, name in enumerate(COMMUNICATION)}
