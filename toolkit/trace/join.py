"""Open the traces of several ranks as one: number the ranks, align their clocks, and say what does not fit together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.callers import warn
from toolkit.core.errors import TraceError
from toolkit.core.units import plural
from toolkit.trace.assemble import Strings, from_columns
from toolkit.trace.clocks import Clock, align
from toolkit.trace.columns import COLUMNS, TEXT_COLUMNS
from toolkit.trace.events import Trace
from toolkit.trace.nccl import SAME_BYTES, TOGETHER
from toolkit.trace.waits import Collectives, collectives_of

_IN_NAME = re.compile(r"rank[-_ .]?(\d{1,4})(?!\d)", re.IGNORECASE)
_MOST = 16  # ranks that a sentence lists
_MOST_RANKS = 1 << 15  # the column `rank` has 16 bits


def join(
    traces: Sequence[Trace], names: Sequence[str], asked: str = "joining the traces of several ranks", one_clock: bool = False
) -> Trace:
    """Return the traces of several ranks as one, with the clocks of all ranks aligned on the ends of collectives.

    With `one_clock`, `meta["origin_ns"]` of all traces is of the same clock, which is left as it is.

    The rank of a trace is the one that it states, or the number in its name ("rank3.json"), or the lowest one that is left.
    `meta["ranks"]` has the `meta` of each rank, `meta["clocks"]` the correction and the error of each clock, `meta["notes"]`
    what a reader should know. Warns of missing ranks and of collectives that don't match. Raises TraceError if two traces are
    of the same rank or the ranks are of jobs of different sizes; errors begin with `asked`.
    """
    ranks, notes = _ranks(traces, names, asked)
    world_size = _world_size(traces, names, asked)
    order = sorted(range(len(traces)), key=lambda i: ranks[i])
    traces, ranks = [traces[i] for i in order], [ranks[i] for i in order]
    joined = _side_by_side(traces, ranks)
    found = collectives_of(joined)
    counted = any(trace.meta.get("collectives_counted") for trace in traces)
    declared: dict[str, set[int]] = {}
    for trace in traces:
        for group, within in (trace.meta.get("groups") or {}).items():  # of two groups with one name, the ranks of both
            declared[group] = declared.get(group, set(ranks)) & set(within)
    problems = _missing(ranks, world_size) + _mismatches(joined, found, counted, declared)
    for text in problems:
        warn(text)
    clocks, method = _clocks(joined, found, traces, ranks) if not one_clock else (_same(traces), [])
    columns = dict(joined.columns)
    columns["start_ns"] = columns["start_ns"].copy()
    for rank, clock in zip(ranks, clocks, strict=True):
        mine = joined["rank"] == rank
        columns["start_ns"][mine] = clock.corrected(columns["start_ns"][mine])
    columns["start_ns"] -= columns["start_ns"].min(initial=0)
    meta = _meta(traces, ranks) | {"clocks": _described(clocks, traces, ranks), "notes": [*method, *notes, *problems]}
    meta |= {"world_size": world_size} if world_size else {}
    return from_columns(list(joined.strings), meta, **columns)


def _rank_of(trace: Trace) -> int | None:
    """Return the rank that a trace states, or None."""
    rank = trace.meta.get("rank")
    own = np.unique(trace["rank"])
    return rank if rank is not None else int(own[0]) if len(own) == 1 and own[0] > 0 else None


def _ranks(traces: Sequence[Trace], names: Sequence[str], asked: str) -> tuple[list[int], list[str]]:
    """Return the rank of each trace, and notes on where it comes from."""
    notes = []
    for trace, name in zip(traces, names, strict=True):
        if len(np.unique(trace["rank"])) > 1:
            raise TraceError(asked, f"{name} has several ranks already", "Open it alone, or give one file per rank")
    stated = [_rank_of(trace) for trace in traces]
    in_name = [_IN_NAME.findall(name) if rank is None else [] for rank, name in zip(stated, names, strict=True)]
    known = [int(found[-1]) if found else rank for rank, found in zip(stated, in_name, strict=True)]
    left = (rank for rank in count() if rank not in known)
    ranks = [next(left) if rank is None else rank for rank in known]
    from_names = "are those in the names of the files: the traces don't state theirs."
    from_order = "are numbered in the order of the files: neither they nor their names state them."
    for how, mine in ((from_names, [*map(bool, in_name)]), (from_order, [rank is None for rank in known])):
        some = [name for name, its in zip(names, mine, strict=True) if its]
        if some:
            notes.append(f"{'Ranks' if all(mine) else f'The ranks of {_listed(some)}'} {how}")
    for rank, same in groupby(sorted(range(len(ranks)), key=lambda i: ranks[i]), key=lambda i: ranks[i]):
        files = [names[i] for i in same]
        if len(files) > 1:
            found = f"{' and '.join(files)} are both of rank {rank}"
            raise TraceError(asked, found, "Give one trace per rank, all of the same run")
    return ranks, notes


def _world_size(traces: Sequence[Trace], names: Sequence[str], asked: str) -> int | None:
    """Return the number of ranks of the job, if it is stated."""
    sizes = [(name, trace.meta["world_size"]) for trace, name in zip(traces, names, strict=True) if "world_size" in trace.meta]
    if len({size for _, size in sizes}) > 1:
        found = ", ".join(f"{name} is of a job of {size} ranks" for name, size in sizes)
        raise TraceError(asked, found, "Give traces of one job")
    return sizes[0][1] if sizes else None


def _side_by_side(traces: Sequence[Trace], ranks: Sequence[int]) -> Trace:
    """Return all events with the rank of their trace, on the clocks that recorded them."""
    strings = Strings()
    parts: dict[str, list[NDArray[Any]]] = {name: [] for name in COLUMNS}
    members: dict[str, list[list[int]]] = {}
    for trace in traces:
        for group, within in (trace.meta.get("groups") or {}).items():
            if within not in members.setdefault(group, []):
                members[group].append(within)
    for trace, rank in zip(traces, ranks, strict=True):
        own = trace.meta.get("groups") or {}
        new = {name: f"{name} (ranks {_listed(own[name])})" for name in own if len(members[name]) > 1}  # one name, two groups
        codes = np.array([strings.code(text) for text in trace.strings] + [-1])
        groups = np.array([strings.code(new.get(text, text)) for text in trace.strings] + [-1]) if new else codes
        for name, column in trace.columns.items():
            if name in TEXT_COLUMNS:
                parts[name].append((groups if name == "group" else codes)[column])
            else:
                parts[name].append(np.full(len(trace), rank) if name == "rank" else column)
    return from_columns(list(strings.codes), {}, **{name: np.concatenate(columns) for name, columns in parts.items()})


def _clocks(joined: Trace, found: Collectives, traces: Sequence[Trace], ranks: Sequence[int]) -> tuple[list[Clock], list[str]]:
    """Return the clock of each rank, and how it was found."""
    origins = [trace.meta.get("origin_ns") for trace in traces]
    stated = [origin for origin in origins if origin is not None]
    fallback = [float(stated[0] - origin) for origin in stated] if len(stated) == len(traces) else [0.0] * len(traces)
    starts, ends = (np.zeros((len(found.row), len(ranks)), np.int64) for _ in range(2))
    present = np.zeros((len(found.row), len(ranks)), bool)
    for i, rank in enumerate(found.ranks):
        at = ranks.index(rank)
        starts[:, at], ends[:, at], present[:, at] = found.start[:, i], found.end[:, i], found.present[:, i]
    together = np.isin(joined["operation"][found.first_row], [joined.strings.index(o) for o in TOGETHER if o in joined.strings])
    same = found.matched & _before_disagreements(joined, found)
    use = next((use for use in (same & together & ~found.sent, same & together) if use.any()), same)
    rows = use | (same & together & found.sent)
    clocks, used = align(starts[rows], ends[rows], present[rows], use[rows], fallback)
    notes, apart = [], [rank for rank, clock in zip(ranks, clocks, strict=True) if clock.first]
    if use.any():
        errors = np.abs(np.concatenate([clock.errors_ns for i, clock in enumerate(clocks) if clock.first != i]))
        ends_of = f"The clocks of the ranks are aligned on the ends of {plural(int(used.sum()), 'collective')}"
        known = (
            f"which then differ by {np.median(errors) / 1e3:,.1f} µs (median) and {np.quantile(errors, 0.95) / 1e3:,.1f} µs "
            "(95 % of them)"
        )
        notes.append(f"{ends_of}, {known if used.sum() > 1 else 'so their error is not known'}.")
    if apart:
        how = "the clocks of their hosts are used" if len(stated) == len(traces) else "their recordings begin at the same time"
        who = f"rank{'s' if len(apart) > 1 else ''} {_listed(apart)} to rank {ranks[0]}"
        notes.append(f"No collective links {who}: {how}, so times of different ranks may not be comparable.")
    return clocks, notes


def _same(traces: Sequence[Trace]) -> list[Clock]:
    """Return the clock of each rank if all were recorded by one clock."""
    origins = [trace.meta["origin_ns"] for trace in traces]
    return [Clock(float(origins[0] - origin), 0.0, np.empty(0)) for origin in origins]


def _missing(ranks: Sequence[int], world_size: int | None) -> list[str]:
    """Return a warning of ranks whose traces are missing."""
    gone = sorted(set(range(min(world_size or 0, _MOST_RANKS))) - set(ranks))
    if not gone:
        return []
    who, verb, them = ("ranks", "are", "them") if len(gone) > 1 else ("rank", "is", "it")
    seen = f"waits for {them} look like waits for the last of the others"
    return [f"Of {world_size} ranks, {who} {_listed(gone)} {verb} missing: {seen}."]


def _disagreement(joined: Trace, found: Collectives, mine: NDArray[np.int64]) -> int | None:
    """Return the first number that the ranks of a group have as different collectives; None without one.

    `mine` are the collectives of the group. Different are operations, and sizes that must be the same on all ranks.
    """
    seq, operation = (joined[name][found.first_row[mine]] for name in ("seq", "operation"))
    known, count = np.unique(seq, return_counts=True)
    same = np.isin(operation, [joined.strings.index(name) for name in SAME_BYTES if name in joined.strings])
    different = np.concatenate([known[count > 1], seq[same & found.differ[mine]]])
    return int(different.min()) if len(different) else None


def _before_disagreements(joined: Trace, found: Collectives) -> NDArray[np.bool_]:
    """Return [n] whether the ranks agree on all collectives of the group up to this one."""
    agreed = np.ones(len(found.row), np.bool_)
    group, seq = (joined[name][found.first_row] for name in ("group", "seq"))
    for code in np.unique(group).tolist():
        mine = group == code
        number = _disagreement(joined, found, np.flatnonzero(mine))
        if number is not None:
            agreed &= ~mine | (seq < number)
    return agreed


def _mismatches(joined: Trace, found: Collectives, counted: bool, declared: Mapping[str, set[int]]) -> list[str]:
    """Return warnings of collectives that some ranks of a group don't have, or have with another operation or size.

    `counted` says that some numbers are not those of the process group, but count what each rank recorded. `declared` has the
    ranks of groups as far as they have traces and the headers name them.
    """
    doubt = " Collectives are numbered in the order in which they ran: if it began later, wrong ones are matched."
    texts = []
    group, seq, operation = (joined[name][found.first_row] for name in ("group", "seq", "operation"))
    for code in np.unique(group).tolist():
        mine = np.flatnonzero(group == code)
        title = f"group {joined.strings[code]!r}" if code >= 0 else "the collectives without a group"
        number = _disagreement(joined, found, mine)
        if number is not None:
            at = mine[seq[mine] == number]
            different = [joined.strings[code] or "" if code >= 0 else "an unknown operation" for code in operation[at].tolist()]
            if len(at) == 1:  # one operation
                sizes = dict.fromkeys(size for size in found.bytes[at[0]].tolist() if size > 0)
                different = [f"{different[0]} of {_listed([f'{size:,}' for size in sizes])} bytes"]
            texts.append(
                f"The ranks disagree on collective {number} of {title}: {' and '.join(different)}. From there on, collectives "
                "may be matched wrongly: they don't align the clocks, and their waits may be wrong."
            )
            continue
        present = {rank: found.present[mine, i] for i, rank in enumerate(found.ranks) if found.present[mine, i].any()}
        members = declared.get(joined.strings[code] if code >= 0 else "", set()) | present.keys()
        for rank in sorted(members) if len(members) > 1 else []:
            lacks = mine[~present[rank]] if rank in present else mine
            if len(lacks):
                some = (
                    f"{len(lacks):,} of the {len(mine):,} collectives of {title}, the first of them number {seq[lacks].min()}"
                )
                why = f"its recording began later or ended earlier.{doubt if counted and not seq[mine].min() else ''}"
                texts.append(f"Rank {rank} has no event of {some}: {why}")
    return texts


def _meta(traces: Sequence[Trace], ranks: Sequence[int]) -> dict[str, Any]:
    """Return what the traces have in common, and the `meta` of each rank."""
    devices = [str(trace.meta.get("device", "unknown device")) for trace in traces]
    same: dict[str, Any] = {
        name: value for name, value in traces[0].meta.items()
        if name not in ("rank", "source", "origin_ns", "opening") and all(trace.meta.get(name) == value for trace in traces)
    }  # fmt: skip
    counted = [
        f"{devices.count(device)} x {device}" if devices.count(device) > 1 else device for device in dict.fromkeys(devices)
    ]
    source: dict[str, str] = {}
    for trace in traces:
        source |= trace.meta.get("source") or {}
    metas = {str(rank): trace.meta for rank, trace in zip(ranks, traces, strict=True)}
    return same | {"device": ", ".join(counted), "ranks": metas} | ({"source": source} if source else {})


def _described(clocks: Sequence[Clock], traces: Sequence[Trace], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the clocks for `meta["clocks"]`. Offsets are those between the clocks of the hosts, if the traces state them."""
    origins = [trace.meta.get("origin_ns") for trace in traces]
    made = []
    for rank, clock, origin in zip(ranks, clocks, origins, strict=True):
        errors = np.abs(clock.errors_ns)
        between = 0 if origin is None or origins[0] is None else origin - origins[0]
        made.append({
            "rank": rank, "offset_us": (clock.offset_ns + between) / 1e3, "drift_ppm": clock.drift * 1e6,
            "collectives": len(errors), "error_us": float(np.median(errors)) / 1e3 if len(errors) > 1 else None,
            "error_95_us": float(np.quantile(errors, 0.95)) / 1e3 if len(errors) > 1 else None,
        })  # fmt: skip
    return made


def _listed(numbers: Sequence[int | str]) -> str:
    return ", ".join(map(str, numbers[:_MOST])) + (f" and {len(numbers) - _MOST} more" if len(numbers) > _MOST else "")
