"""Who waited for whom: the collectives of a trace of several ranks, matched by process group, operation and number.

A collective ends once every rank takes part. The rank that starts its event last therefore makes the others wait: each of them
for the time from its own start until the start of the last one, or until its own end if that comes first. Sums of what earlier
kernels have sent (`SUM_OF_SENT`) can end on a rank before another one starts its own: that rank has not waited for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import TraceError, UnknownNameError, brief
from toolkit.core.numbers import integer
from toolkit.trace.columns import KINDS
from toolkit.trace.nccl import SUM_OF_SENT

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.trace.events import Trace

Ints = NDArray[np.int64]
_RANKS = {
    "rank": "int64", "device": "str", "collectives": "int64", "bytes": "int64", "last_count": "int64",
    "caused_wait_us": "float64", "wait_us": "float64", "clock_error_us": "float64",
}  # fmt: skip
_FEW, _SPARSE = 1 << 20, 32  # entries of a table of collectives and ranks: any number up to _FEW, and this many per event


@dataclass(frozen=True)
class Collectives:
    """The collectives of a trace in order of their first start: arrays [n, R] for n collectives and R ranks.

    `row` is the event of the rank, or -1 if the rank has none: it is not in the group, or was not recorded. `start` and `end`
    are its times in ns; if a rank has several events of one collective, from the first to the last. `bytes` is the size of the
    largest of them, 0 if it is not known. `sent` [n] is whether the collective is a sum of what earlier kernels have sent.
    """

    ranks: list[int]
    row: Ints
    start: Ints
    end: Ints
    bytes: Ints
    sent: NDArray[np.bool_]

    @cached_property
    def present(self) -> NDArray[np.bool_]:
        return self.row >= 0

    @cached_property
    def matched(self) -> NDArray[np.bool_]:
        """[n] whether at least two ranks have an event of the collective."""
        return self.present.sum(1) > 1

    @cached_property
    def differ(self) -> NDArray[np.bool_]:
        """[n] whether ranks have different bytes of the collective, as far as they are known."""
        most = np.iinfo(np.int64).max
        return np.where(self.bytes > 0, self.bytes, most).min(1, initial=most) < self.bytes.max(1, initial=0)

    @cached_property
    def last(self) -> Ints:
        """[n] position in `ranks` of the rank that came last; -1 if only one rank has an event."""
        starts = np.where(self.present, self.start, np.iinfo(np.int64).min)
        return np.where(self.matched, starts.argmax(1) if len(starts) else 0, -1)

    @cached_property
    def wait(self) -> Ints:
        """[n, R] time in ns that each rank waited for the last one; 0 for the last one and where `row` is -1."""
        until = np.take_along_axis(self.start, np.maximum(self.last, 0)[:, None], 1)
        waits = np.minimum(until, self.end) - self.start
        waits[self.sent[:, None] & (self.end <= until)] = 0
        return np.where(self.present & self.matched[:, None], np.maximum(waits, 0), 0)

    @cached_property
    def late(self) -> Ints:
        """[n] position in `ranks` of the rank that came last, if others waited for it; -1 if all came at the same time."""
        return np.where(self.wait.max(1, initial=0) > 0, self.last, -1)

    @cached_property
    def first_row(self) -> Ints:
        """[n] an event of each collective."""
        return self.row.max(1, initial=-1)


def ranks_of(trace: Trace) -> list[int]:
    """Return the ranks that have events, in order."""
    rank = trace["rank"]
    if not len(rank) or rank.min() == rank.max():
        return rank[:1].tolist()
    return np.unique(rank).tolist()  # type: ignore[no-any-return]


def known_rank(trace: Trace, rank: object) -> int:
    """Return `rank`. Raises UnknownNameError unless the trace has events of it, or joins a recording of it."""
    known = {*map(str, ranks_of(trace)), *(trace.meta.get("ranks") or {})} or {"0"}
    found = integer(rank)
    if found is None or str(found) not in known:
        names = sorted(known, key=lambda name: (len(name), name))
        raise UnknownNameError(f"rank {brief(rank)}", "the trace has no such rank", f"Known: {', '.join(names)}", known=names)
    return found


def collectives_of(trace: Trace) -> Collectives:
    """Return the collectives of a trace that have a number.

    Raises TraceError if most ranks have no event of most collectives, so that the table would be much larger than the trace.
    """
    rows = np.flatnonzero((trace["kind"] == KINDS.index("collective")) & (trace["seq"] >= 0))
    ranks, rank = np.unique(trace["rank"][rows], return_inverse=True)
    key = np.stack([trace[name][rows].astype(np.int64) for name in ("group", "operation", "seq")], 1)
    _, number = np.unique(key, axis=0, return_inverse=True) if len(rows) else (None, np.empty(0, np.int64))
    number = number.ravel()
    shape = (int(number.max(initial=-1)) + 1, len(ranks))
    if shape[0] * shape[1] > max(_FEW, _SPARSE * len(rows)):
        found = f"{shape[0]:,} of them on {shape[1]:,} ranks, but only {len(rows):,} events"
        raise TraceError("comparing the collectives of ranks", found, "Open fewer ranks, such as those of one process group")
    row, start, end = np.full(shape, -1), np.full(shape, np.iinfo(np.int64).max), np.full(shape, np.iinfo(np.int64).min)
    starts = trace["start_ns"][rows]
    row[number[::-1], rank[::-1]] = rows[::-1]  # of several events, the first
    np.minimum.at(start, (number, rank), starts)
    np.maximum.at(end, (number, rank), starts + np.maximum(trace["dur_ns"][rows], 0))
    size = np.zeros(shape, np.int64)
    np.maximum.at(size, (number, rank), trace["bytes"][rows])
    order = np.argsort(start.min(1, initial=np.iinfo(np.int64).max), kind="stable")
    row = row[order]
    absent, name = row < 0, trace["name"][row.max(1, initial=-1)]
    sent = np.isin(name, [code for code, text in enumerate(trace.strings) if (text or "").startswith(SUM_OF_SENT)])
    begun, ended = np.where(absent, 0, start[order]), np.where(absent, 0, end[order])
    return Collectives(ranks.tolist(), row, begun, ended, size[order], sent)


def collective_steps(trace: Trace, found: Collectives) -> Ints:
    """Return [n] the step of each collective: that of the first rank whose event is in a step, or -1."""
    steps = np.full(len(found.row), -1)
    for i in reversed(range(len(found.ranks))):
        own = trace["step"][found.row[:, i]]
        steps = np.where(found.present[:, i] & (own >= 0), own, steps)
    return steps


def collectives_table(trace: Trace) -> pd.DataFrame:
    """Return the collectives of a trace: the table of `Trace.collectives`, which describes the columns."""
    import pandas as pd

    found = collectives_of(trace)
    row, high = found.first_row, np.iinfo(np.int64).max
    first = np.where(found.present, found.start, high).min(1, initial=high)
    last = np.where(found.present, found.end, -high).max(1, initial=-high)
    table: dict[str, Any] = {"step": collective_steps(trace, found)}
    for name in ("operation", "algorithm", "group"):
        table[name] = [trace.strings[code] if code >= 0 else None for code in trace[name][row].tolist()]
    table |= {name: trace[name][row] for name in ("group_size", "seq", "bytes")}
    table |= {"start_us": first / 1e3, "dur_us": (last - first) / 1e3}
    table["last_rank"] = np.array([*found.ranks, -1])[found.late]
    for i, rank in enumerate(found.ranks):
        table[f"rank{rank}_wait_us"] = np.where(found.present[:, i], found.wait[:, i] / 1e3, np.nan)
    return pd.DataFrame(table)


def ranks_table(trace: Trace) -> pd.DataFrame:
    """Return one row per rank that has collectives: the table of `Trace.ranks`, which describes the columns."""
    import pandas as pd

    found, clocks = collectives_of(trace), {clock["rank"]: clock for clock in trace.meta.get("clocks") or []}
    metas, caused = trace.meta.get("ranks") or {}, found.wait.sum(1)
    rows = []
    for i, rank in enumerate(found.ranks):
        present, came_last, error = found.present[:, i], found.late == i, clocks.get(rank, {}).get("error_us")
        rows.append({
            "rank": rank, "device": str(metas.get(str(rank), trace.meta).get("device", "unknown device")),
            "collectives": int(present.sum()), "bytes": int(trace["bytes"][found.row[present, i]].sum()),
            "last_count": int(came_last.sum()), "caused_wait_us": float(caused[came_last].sum() / 1e3),
            "wait_us": float(found.wait[:, i].sum() / 1e3), "clock_error_us": np.nan if error is None else error,
        })  # fmt: skip
    return pd.DataFrame(rows, columns=list(_RANKS)).astype(_RANKS)  # the same columns without any row
