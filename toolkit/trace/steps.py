"""Assign a step number to each event, from named ranges (marks, ProfilerStep, NVTX) or from a repeating pattern.

All readers and recorders share these functions of numpy arrays.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

_REGULAR = 0.25  # a gap is regular when it is within this fraction of the median gap
_ENOUGH = 0.8  # the fraction of gaps that must be regular
_SHARED = 0.7  # the fraction of events that one step must share with the next
_REPEATS = 3  # minimum number of repeats of a pattern
_TRIED = 64  # possible patterns that are compared with all events

_OWN = re.compile(r"toolkit\.step (-?\d+) (.*)", re.DOTALL)
_PROFILER = re.compile(r"ProfilerStep ?#(\d+)$")
_NUMBER = re.compile(r"\d+")
_PYTORCH = re.compile(  # ranges that PyTorch and NCCL write
    r"::|, seq = "  # for every operation, under emit_nvtx and elsewhere
    r"|^(nccl|gloo|mpi|ucc|xccl):|^nccl[A-Z]"  # for a collective
    r"|^(Data|DistributedData|FullyShardedData)Parallel\."  # for parts of a training step
    r"|^Optimizer\.(step|zero_grad)#|^enumerate\(DataLoader\)"
)
_STEPLIKE = re.compile(r"step|iter|decode|token|forward|generat", re.IGNORECASE)


class Range(NamedTuple):
    """A named range of host time, in ns."""

    start_ns: int
    end_ns: int
    name: str


def steps_among(ranges: Sequence[Range]) -> tuple[str | None, list[int]]:
    """Return the source of the steps ("marks", "ProfilerStep", "ranges" or None) and each range's step (-1: not a step).

    Without marks of the toolkit or ProfilerStep ranges, the steps are the ranges of one name (ignoring numbers) that occur at
    least three times, do not overlap and cover the most time; names with words such as "step" or "token" take precedence.
    Ranges that PyTorch and NCCL write for an operation, a collective or a part of a training step are not counted.
    """
    for source, pattern in (("marks", _OWN), ("ProfilerStep", _PROFILER)):
        found = [pattern.match(r.name) for r in ranges]
        if any(found):
            return source, [int(match[1]) if match else -1 for match in found]
    groups: dict[str, list[int]] = {}
    for i, r in enumerate(ranges):
        if not _PYTORCH.search(r.name):
            groups.setdefault(_NUMBER.sub("#", r.name), []).append(i)
    best: tuple[bool, int] = (False, 0)
    chosen: list[tuple[int, int]] = []  # range and its number
    for name, members in groups.items():
        members.sort(key=lambda i: ranges[i].start_ns)
        score = bool(_STEPLIKE.search(name)), sum(ranges[i].end_ns - ranges[i].start_ns for i in members)
        numbers = _numbers([ranges[i] for i in members])
        if numbers is not None and score > best:
            best, chosen = score, list(zip(members, numbers, strict=True))
    steps = [-1] * len(ranges)
    for i, number in chosen:
        steps[i] = number
    return ("ranges" if best[1] else None), steps


def _numbers(ranges: list[Range]) -> list[int] | None:
    """Return the step numbers of ranges of one name: those in the names, or 0, 1, ...; None if they can't be steps."""
    if len(ranges) < _REPEATS or any(a.end_ns > b.start_ns for a, b in pairwise(ranges)):
        return None
    written = [_NUMBER.findall(r.name) for r in ranges]
    if not written[0]:
        return list(range(len(ranges)))
    numbers = [int(found[-1]) for found in written]
    return numbers if len(set(numbers)) == len(numbers) and max(numbers) < 2**31 else None


def shown_name(name: str) -> str:
    """Return the name of a range's mark: the toolkit's own ranges lose their prefix and step number."""
    match = _OWN.match(name)
    return match[2] if match else name


def innermost(times: ArrayLike, starts: ArrayLike, ends: ArrayLike) -> NDArray[np.int64]:
    """Return the index of the innermost range [start, end) that contains each time, or -1 if there is none.

    Ranges may nest or overlap; of overlapping ranges, the one with the latest start is the innermost.
    """
    begin, until = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    if not len(begin):
        return np.full(np.shape(times), -1, np.int64)
    bounds: list[int] = [int(begin.min()) - 1]  # `inside[i]` is the innermost range from bounds[i] to bounds[i + 1]
    inside: list[int] = [-1]
    stack: list[int] = []
    first, last = begin.tolist(), until.tolist()

    def close(now: int | None) -> None:
        while stack and (now is None or last[stack[-1]] <= now):
            ended = last[stack.pop()]
            while stack and last[stack[-1]] <= ended:
                stack.pop()
            bounds.append(ended)
            inside.append(stack[-1] if stack else -1)

    for i in np.lexsort((-until, begin)).tolist():
        close(first[i])
        stack.append(i)
        bounds.append(first[i])
        inside.append(i)
    close(None)
    at = np.searchsorted(np.array(bounds), np.asarray(times, np.int64), side="right") - 1
    return np.array(inside, np.int64)[np.maximum(at, 0)]


def steps_from_ranges(times: ArrayLike, starts: ArrayLike, ends: ArrayLike, numbers: ArrayLike) -> NDArray[np.int32]:
    """Return the number of the step whose range contains each time, or -1 if there is none. Ranges include their end."""
    which = innermost(times, starts, np.asarray(ends, np.int64) + 1)
    steps = np.append(np.asarray(numbers, np.int32), np.int32(-1))
    return steps[which]


def guess_steps(names: ArrayLike, is_readback: ArrayLike) -> NDArray[np.int32] | None:
    """Guess the step of each device event from repeating patterns. Return None if nothing repeats regularly enough.

    `names` [N] are codes of the launched kernels and copies, in launch order; `is_readback` [N] marks copies to the host.
    A decode loop reads a token back at the end of each step, so the copy to the host with the longest regular period ends the
    steps; if there is none, the events with the longest common period begin them. Events before the first period get step 0
    (the prefill), events after the last one -1.
    """
    code, readback = np.asarray(names, np.int64), np.asarray(is_readback, bool)
    n = len(code)
    order = np.argsort(code, kind="stable")
    cuts = np.flatnonzero(np.diff(code[order])) + 1
    candidates: list[tuple[float, NDArray[np.int64], bool]] = []  # period, positions, is_readback
    for positions in np.split(order, cuts) if n else []:
        period = _period(positions, n)
        if period is not None:
            candidates.append((period, positions, bool(readback[positions[0]])))
    if not candidates:
        return None
    at = np.arange(n)
    readbacks = (c[1] for c in sorted(candidates, key=lambda c: (-c[0], -len(c[1]))) if c[2])
    for positions in islice(readbacks, _TRIED):
        if _repeats(code, positions):
            step = np.searchsorted(positions, at, side="left")  # the read-back itself belongs to the step it ends
            return np.where(at > positions[-1], -1, step).astype(np.int32)
    for positions in islice(_common_periods(candidates), _TRIED):
        if _repeats(code, positions):
            step = np.searchsorted(positions, at, side="right")
            tail = at >= positions[-1] + round(float(np.median(np.diff(positions))))
            return np.where(tail, -1, step if positions[0] else step - 1).astype(np.int32)
    return None


def _period(positions: NDArray[np.int64], n: int) -> float | None:
    """Return the median distance between occurrences, or None if they are too few or irregular."""
    if len(positions) < _REPEATS or (len(positions) < 2 * _REPEATS and positions[-1] - positions[0] < n / 2):
        return None
    gaps = np.diff(positions)
    median = float(np.median(gaps))
    regular = np.abs(gaps - median) <= max(2.0, _REGULAR * median)
    return median if median >= 2 and regular.mean() >= _ENOUGH else None


def _repeats(code: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
    """Return whether adjacent periods between positions mostly contain the same events (in the median)."""
    pick = np.unique(np.linspace(0, len(positions) - 3, min(len(positions) - 2, 64)).round().astype(int))
    shared = []
    for i in pick.tolist():
        (one, n_one), (two, n_two) = (np.unique(code[positions[k] : positions[k + 1]], return_counts=True) for k in (i, i + 1))
        _, in_one, in_two = np.intersect1d(one, two, assume_unique=True, return_indices=True)
        shared.append(np.minimum(n_one[in_one], n_two[in_two]).sum() / max(n_one.sum(), n_two.sum()))
    return float(np.median(shared)) >= _SHARED


def _common_periods(candidates: list[tuple[float, NDArray[np.int64], bool]]) -> Iterator[NDArray[np.int64]]:
    """Iterate over the possible start positions of periods: periods shared by several events first, then the longest first.

    Of the events that share a period, the first one begins the step. Periods of a single event come last, since it may be
    an occasional one, such as a kernel that runs every sixteenth step.
    """
    longest = sorted(candidates, key=lambda c: -c[0])
    periods, alone = np.array([c[0] for c in longest]), []
    firsts = np.searchsorted(-periods, -1.1 * periods, side="left")
    ends = np.searchsorted(-periods, -0.9 * periods, side="right")
    for (_, positions, _), first, end in zip(longest, firsts.tolist(), ends.tolist(), strict=True):
        if end - first >= 2:
            yield min((c[1] for c in longest[first:end]), key=lambda positions: int(positions[0]))
        else:
            alone.append(positions)
    yield from alone
