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

_Periodic = tuple[float, NDArray[np.int64]]  # the period and the positions of events


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
    """Return the step numbers of ranges of one name; None if they can't be steps.

    They are the last numbers in the names that differ in all of them ("step 3 of 10"), or 0, 1, ... if all names are equal.
    """
    if len(ranges) < _REPEATS or any(a.end_ns > b.start_ns for a, b in pairwise(ranges)):
        return None
    if len({r.name for r in ranges}) == 1:
        return list(range(len(ranges)))
    columns = [list(map(int, column)) for column in zip(*(_NUMBER.findall(r.name) for r in ranges), strict=True)]
    return next((c for c in reversed(columns) if len(set(c)) == len(c) and max(c) < 2**31), None)


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

    Programs also read back while they set up, or twice in a step, and often as many bytes. The two events before a copy tell
    such copies apart, because they are the same in each step.
    """
    code, readback = np.asarray(names, np.int64), np.asarray(is_readback, bool)
    n = len(code)
    at = np.arange(n)
    follows = _follows(code, np.flatnonzero(readback))
    candidates: list[_Periodic] = []
    ends: list[_Periodic] = []
    for positions in _groups(at, code):
        found = _regular([positions], n)
        candidates += found
        if readback[positions[0]]:
            ends += found or _regular(_groups(positions, follows), n)
    for positions in islice(_longest(ends), _TRIED):
        positions = _without_strays(code, positions, follows[positions])
        if _repeats(code, positions):
            step = np.searchsorted(positions, at, side="left")  # the read-back itself belongs to the step it ends
            return np.where(at > positions[-1], -1, step).astype(np.int32)
    for positions in islice(_common_periods(candidates), _TRIED):
        if _repeats(code, positions):
            step = np.searchsorted(positions, at, side="right")
            tail = at >= positions[-1] + round(float(np.median(np.diff(positions))))
            return np.where(tail, -1, step if positions[0] else step - 1).astype(np.int32)
    return None


def _groups(positions: NDArray[np.int64], label: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split positions into those of equal label, each group in order. `label` [N] has the label of every event."""
    ordered = positions[np.argsort(label[positions], kind="stable")]
    return np.split(ordered, np.flatnonzero(np.diff(label[ordered])) + 1) if len(ordered) else []


def _follows(code: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return labels [N] that are equal for those of `positions` that come after the same two events (0 elsewhere)."""
    padded = np.concatenate([[-1, -1], code])
    one, two = (np.unique(padded[positions + k], return_inverse=True)[1] for k in (0, 1))
    label = np.zeros(len(code), np.int64)
    label[positions] = one * (len(positions) + 1) + two
    return label


def _regular(groups: list[NDArray[np.int64]], n: int) -> list[_Periodic]:
    """Return the period and the positions of each group that has a period."""
    return [(period, positions) for positions in groups if (period := _period(positions, n)) is not None]


def _period(positions: NDArray[np.int64], n: int) -> float | None:
    """Return the median distance between occurrences, or None if they are too few or irregular."""
    if len(positions) < _REPEATS or (len(positions) < 2 * _REPEATS and positions[-1] - positions[0] < n / 2):
        return None
    gaps = np.diff(positions)
    median = float(np.median(gaps))
    regular = np.abs(gaps - median) <= max(2.0, _REGULAR * median)
    return median if median >= 2 and regular.mean() >= _ENOUGH else None


def _longest(found: list[_Periodic]) -> Iterator[NDArray[np.int64]]:
    """Iterate over positions, the longest period first.

    Of nearly equal periods, those that occur about as often as the most frequent one come first, the last to end before others.
    """
    left = sorted(found, key=lambda c: -c[0])
    while left:
        near = [positions for period, positions in left if period >= 0.9 * left[0][0]]
        enough = _ENOUGH * max(map(len, near))
        yield from sorted(near, key=lambda positions: (len(positions) < enough, -int(positions[-1]), -len(positions)))
        left = left[len(near) :]


def _without_strays(code: NDArray[np.int64], positions: NDArray[np.int64], follows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the read-backs without those at both ends that are not of the loop, such as checks during set-up.

    Those follow other events than most read-backs do, and the events since the read-back before them are unlike a step: they
    lack most events of the step next to them. `follows` has the labels of `positions`.
    """
    labels, counts = np.unique(follows, return_counts=True)
    usual = np.flatnonzero(follows == labels[np.argmax(counts)])
    if len(usual) < _REPEATS or 2 * len(usual) <= len(positions):
        return positions
    parts = np.split(code, positions + 1)  # part i ends with the read-back i
    first, last = int(usual[0]), int(usual[-1])
    while first and 2 * _shared(parts[first - 1], parts[first]) >= len(parts[first]):
        first -= 1
    while last + 1 < len(positions) and 2 * _shared(parts[last + 1], parts[last]) >= len(parts[last]):
        last += 1
    return positions[first : last + 1]


def _shared(one: NDArray[np.int64], two: NDArray[np.int64]) -> int:
    """Return how many events two parts have in common, in any order."""
    (in_one, n_one), (in_two, n_two) = (np.unique(part, return_counts=True) for part in (one, two))
    _, i, j = np.intersect1d(in_one, in_two, assume_unique=True, return_indices=True)
    return int(np.minimum(n_one[i], n_two[j]).sum())


def _repeats(code: NDArray[np.int64], positions: NDArray[np.int64]) -> bool:
    """Return whether adjacent periods between positions mostly contain the same events (in the median)."""
    pick = np.unique(np.linspace(0, len(positions) - 3, min(len(positions) - 2, 64)).round().astype(int))
    shared = []
    for i in pick.tolist():
        one, two = (code[positions[k] : positions[k + 1]] for k in (i, i + 1))
        shared.append(_shared(one, two) / max(len(one), len(two)))
    return float(np.median(shared)) >= _SHARED


def _common_periods(candidates: list[_Periodic]) -> Iterator[NDArray[np.int64]]:
    """Iterate over the possible start positions of periods: periods shared by several events first, then the longest first.

    Of the events that share a period, the first one begins the step. Periods of a single event come last, since it may be
    an occasional one, such as a kernel that runs every sixteenth step.
    """
    longest = sorted(candidates, key=lambda c: -c[0])
    periods, alone = np.array([c[0] for c in longest]), []
    firsts = np.searchsorted(-periods, -1.1 * periods, side="left")
    ends = np.searchsorted(-periods, -0.9 * periods, side="right")
    for (_, positions), first, end in zip(longest, firsts.tolist(), ends.tolist(), strict=True):
        if end - first >= 2:
            yield min((c[1] for c in longest[first:end]), key=lambda positions: int(positions[0]))
        else:
            alone.append(positions)
    yield from alone
