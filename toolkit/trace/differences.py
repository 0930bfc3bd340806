"""What a decode step does, and how the steps of two recordings differ, as numbers and as one sentence.

The timeline opens on the step that `typical_step` chooses, under the sentence of `difference` or `description`, or that of
`difference_of_ranks` or `description_of_ranks`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toolkit.core.units import bytes_text, seconds_text
from toolkit.trace.columns import COPY_KINDS, KINDS
from toolkit.trace.copies import host_waits_ns
from toolkit.trace.events import Trace
from toolkit.trace.waits import collective_steps, collectives_of, ranks_of

_COPIES = (*COPY_KINDS, "p2p")
_NUMBER = re.compile(r"\d+")
_CLEAR = 0.02  # durations that differ by less than this fraction count as equal
TOGETHER_NS = 500  # ranks that waited for less in all are not told apart


@dataclass(frozen=True)
class StepTable:
    """The steps of a trace in order of start: `table` [n, 3] has number, start and end in ns, `names` a text for each."""

    table: NDArray[np.int64]
    names: list[str]

    def numbers(self) -> set[int]:
        """Return the numbers of the steps with the most common name: the decode steps, without prefill and drain."""
        kind_of = {name: _NUMBER.sub("#", name) for name in set(self.names)}
        alike = [kind_of[name] for name in self.names]
        others = [name for name in alike if name not in ("prefill", "drain")]
        common = Counter(others or alike).most_common(1)
        return {n for n, name in zip(self.table[:, 0].tolist(), alike, strict=True) if name == common[0][0]}

    def elapsed_ns(self, number: int) -> int:
        """Return the duration of the first step with this number, 0 without such a step.

        Steps that overlap, because the host is already in the next one, take the time until the next one begins.
        """
        found = self.table[self.table[:, 0] == number]
        start, end = found[0, 1:].tolist() if len(found) else (0, 0)
        following = self.table[self.table[:, 1] > start, 1]
        return min(end, int(following.min(initial=end))) - start


def steps_of(trace: Trace) -> StepTable:
    """Return the steps of a trace, from the marks of steps or else from the events' step numbers."""
    mark = trace.is_kind("mark") & (trace["step"] >= 0)
    if mark.any():
        rows = np.flatnonzero(mark)
        table = np.stack([trace["step"][rows], trace["start_ns"][rows], trace["start_ns"][rows] + trace["dur_ns"][rows]], 1)
        order = np.argsort(table[:, 1], kind="stable")
        names = [trace.strings[code] if code >= 0 else "" for code in trace["name"][rows[order]].tolist()]
        steps = StepTable(table[order].astype(np.int64), names)
        return steps if len(ranks_of(trace)) < 2 else _of_all_ranks(steps, trace["rank"][rows[order]].tolist())
    inside = np.flatnonzero(trace["step"] >= 0)
    if not len(inside):
        return StepTable(np.zeros((0, 3), np.int64), [])
    numbers, inverse = np.unique(trace["step"][inside], return_inverse=True)
    first = np.full(len(numbers), np.iinfo(np.int64).max)
    last = np.zeros(len(numbers), np.int64)
    np.minimum.at(first, inverse, trace["start_ns"][inside])
    np.maximum.at(last, inverse, trace["start_ns"][inside] + trace["dur_ns"][inside])
    table = np.stack([numbers, first, last], 1).astype(np.int64)
    return StepTable(table[np.argsort(first, kind="stable")], ["" for _ in numbers])


def _of_all_ranks(steps: StepTable, ranks: list[int]) -> StepTable:
    """Return one step for the steps of all ranks with the same number, from the first start to the last end.

    A number that comes several times on each rank, as with two runs in one recording, comes as often in the result.
    """
    seen: Counter[tuple[int, int]] = Counter()
    first: dict[tuple[int, int], int] = {}
    table = steps.table.copy()
    for i, (number, rank) in enumerate(zip(table[:, 0].tolist(), ranks, strict=True)):
        at = first.setdefault((number, seen[number, rank]), i)
        seen[number, rank] += 1
        table[at, 2] = max(table[at, 2], table[i, 2])
    rows = sorted(first.values())
    return StepTable(table[rows], [steps.names[i] for i in rows])


def typical_step(steps: Sequence[StepTable]) -> int | None:
    """Return the number of the decode step, common to all traces, whose duration is closest to the median of its trace.

    Of equally close steps, the one in the middle of the run is returned; None if the traces have no step in common.
    """
    common = set.intersection(*(each.numbers() for each in steps)) if all(len(each.table) for each in steps) else set()
    if not common:
        return None
    numbers = np.array(sorted(common))
    away = np.zeros(len(numbers))
    for each in steps:
        ends = zip(each.table[::-1, 0].tolist(), (each.table[::-1, 2] - each.table[::-1, 1]).tolist(), strict=True)
        durations = dict(ends)  # of a number that comes several times, the first
        mine = np.array([durations[n] for n in numbers.tolist()], float)
        away += np.abs(mine / max(float(np.median(mine)), 1.0) - 1)
    middle = np.abs(np.arange(len(numbers)) - len(numbers) // 2)
    return int(numbers[np.lexsort((middle, away.round(4)))[0]])


@dataclass(frozen=True)
class StepFacts:
    """What one step did. `launches` is None if the trace has no launches."""

    name: str  # of the recording
    elapsed_ns: int
    wait_ns: int
    kernels: Counter[str]
    launches: int | None
    copies: dict[str, int]
    copied_bytes: dict[str, int]


def step_facts(trace: Trace, name: str, step: int, steps: StepTable) -> StepFacts:
    """Return what step number `step` of a trace did. `name` is the name of the recording in sentences.

    If the number comes several times, as with two runs in one recording, the first of these steps counts.
    """
    ranges = steps.table[steps.table[:, 0] == step]
    rows = np.flatnonzero(trace["step"] == step)
    if len(ranges) > 1:
        rows = rows[trace["start_ns"][rows] < ranges[1, 1]]
    kind = trace["kind"][rows]

    def of(*kinds: str) -> NDArray[np.int64]:
        return rows[np.isin(kind, [KINDS.index(k) for k in kinds])]

    codes, counts = np.unique(trace["name"][of("kernel")], return_counts=True)
    kernels = {trace.strings[c] if c >= 0 else "kernel": int(n) for c, n in zip(codes.tolist(), counts.tolist(), strict=True)}
    copies = {k: of(k) for k in _COPIES}
    return StepFacts(
        name, steps.elapsed_ns(step), int(host_waits_ns(trace)[rows].sum()), Counter(kernels),
        len(of("launch")) if trace.is_kind("launch").any() else None,
        {k: len(found) for k, found in copies.items()}, {k: int(trace["bytes"][found].sum()) for k, found in copies.items()},
    )  # fmt: skip


def difference(a: StepFacts, b: StepFacts) -> str:
    """Return one sentence about how a step of `b` differs from the step of `a`. Kernels that differ come first."""
    other = _other_kernels(a, b)
    parts = [other] if other else []
    if _differ(a.elapsed_ns, b.elapsed_ns):
        parts.append(f"takes {brief_time(b.elapsed_ns)} instead of {brief_time(a.elapsed_ns)}")
    if _differ(a.wait_ns, b.wait_ns):
        parts.append(f"waits {brief_time(b.wait_ns)} instead of {brief_time(a.wait_ns)}")
    verb = bool(parts)
    parts += _other_copies(a, b) or ["same copies"]
    if a.launches is not None and b.launches is not None and 2 * min(a.launches, b.launches) < max(a.launches, b.launches):
        parts.append(f"{_count(b.launches, 'launch')} instead of {a.launches:,}")
    parts += [] if other else ["same kernels"]
    return f"{b.name}{'' if verb else ':'} {'; '.join(parts)}"


def description(a: StepFacts) -> str:
    """Return one sentence about what a step did."""
    copies = [f"{_count(a.copies[k], f'{k.upper()} copy')} ({bytes_text(a.copied_bytes[k])})" for k in _COPIES if a.copies[k]]
    launches = f" in {_count(a.launches, 'launch')}" if a.launches else ""  # they may belong to an earlier step
    parts = [
        f"waits {brief_time(a.wait_ns)}",
        f"{_count(a.kernels.total(), 'kernel')}{launches}",
        ", ".join(copies) or "no copies",
    ]
    return f"{a.name} takes {brief_time(a.elapsed_ns)}; {'; '.join(parts)}"


def description_of_ranks(trace: Trace, name: str, step: int | None, steps: StepTable) -> str:
    """Return one sentence about a step (None: all events) of several ranks: who came last, and who waited how long for it."""
    took = ":" if step is None else f" takes {brief_time(steps.elapsed_ns(step))} on {len(ranks_of(trace))} ranks;"
    return f"{name}{took} {_exchange(trace, step)}"


def difference_of_ranks(a: Trace, b: Trace, names: tuple[str, str], step: int) -> str:
    """Return one sentence about how a step of `b` differs from that of `a`, if one of them or both have several ranks.

    Times, kernels and copies are those of the first rank.
    """
    first = [trace.of_rank(ranks_of(trace)[0]) if len(ranks_of(trace)) > 1 else trace for trace in (a, b)]
    facts = [step_facts(trace, name, step, steps_of(trace)) for trace, name in zip(first, names, strict=True)]
    parts = [
        (name, f" on {len(ranks_of(trace))} ranks: {_exchange(trace, step)}")
        for name, trace in zip(names, (a, b), strict=True)
        if len(ranks_of(trace)) > 1
    ]
    if len(parts) == 2 and parts[0][1] == parts[1][1]:
        parts = [("both", parts[0][1])]
    return "; ".join([difference(facts[0], facts[1]), *(name + told for name, told in parts)])


def _exchange(trace: Trace, step: int | None) -> str:
    """Return how many collectives a step (None: the trace) has, which rank came last, and how long others waited for it."""
    found = collectives_of(trace)
    mine = found.matched if step is None else found.matched & (collective_steps(trace, found) == step)
    if not mine.any():
        return "no collective on more than one rank"
    wait, last = found.wait[mine], found.late[mine]
    caused = np.bincount(last[last >= 0], wait.sum(1)[last >= 0], len(found.ranks))
    late = int(caused.argmax())
    times, size = int((last == late).sum()), int(trace["bytes"][found.first_row[mine]].sum())
    count = _count(len(last), "collective") + (f" ({bytes_text(size)})" if size else "")  # 0: not known
    waited = wait[last == late].sum(0)
    if waited.max() < TOGETHER_NS:
        return f"{count}; all ranks arrived together"
    order = np.argsort(-waited, kind="stable").tolist()
    others = [(f"rank {found.ranks[i]}", brief_time(int(waited[i]))) for i in order if waited[i]]
    told = ", ".join(f"{who} waited {time} for it" if not i else f"{who} {time}" for i, (who, time) in enumerate(others[:3]))
    more = f", {len(others) - 3} others less" if len(others) > 3 else ""
    often = f" in {times:,} of them" if len(last) > 1 else ""
    return f"{count}; rank {found.ranks[late]} came last{often}: {told}{more}"


def _other_kernels(a: StepFacts, b: StepFacts) -> str:
    more, fewer = b.kernels - a.kernels, a.kernels - b.kernels
    if not more and not fewer:
        return ""
    count = b.kernels.total() - a.kernels.total()
    if not count:
        return f"runs {_count(more.total(), 'other kernel')} of {b.kernels.total():,} ({_some(more)} instead of {_some(fewer)})"
    named = more if count > 0 else fewer
    also = "" if not (more and fewer) else ", and others"
    return f"runs {_count(abs(count), 'kernel')} {'more' if count > 0 else 'fewer'} ({_some(named)}{also})"


def _other_copies(a: StepFacts, b: StepFacts) -> list[str]:
    parts = []
    for kind in _COPIES:
        more = b.copies[kind] - a.copies[kind]
        if more:
            parts.append(f"{_count(abs(more), f'{kind.upper()} copy')} {'more' if more > 0 else 'fewer'}")
        elif a.copied_bytes[kind] != b.copied_bytes[kind]:
            sizes = bytes_text(b.copied_bytes[kind]), bytes_text(a.copied_bytes[kind])
            parts.append(f"{kind.upper()} of {sizes[0]} instead of {sizes[1]}")
    return parts


def _differ(a: int, b: int) -> bool:
    return abs(a - b) > _CLEAR * max(a, b)


def _some(kernels: Counter[str]) -> str:
    names = [re.split(r"[<(]", name)[0].rpartition(" ")[2].rpartition("::")[2][:40] or name[:40] for name in kernels]
    return ", ".join(dict.fromkeys(names[:2])) + (", ..." if len(names) > 2 else "")


def _count(n: int, thing: str) -> str:
    if n == 1:
        return f"1 {thing}"
    return f"{n:,} {thing[:-1]}ies" if thing.endswith("y") else f"{n:,} {thing}{'es' if thing.endswith('ch') else 's'}"


def brief_time(ns: float) -> str:
    """Return a time with up to three digits, without zeros at the end: "17 µs", "4.5 µs", "0 µs"."""
    number, unit = (seconds_text(ns / 1e9) if ns else "0 µs").split(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"
