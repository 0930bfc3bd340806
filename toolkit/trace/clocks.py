"""Align the clocks of several ranks on the ends of collectives.

All ranks leave an all-reduce at about the same time, whichever of them came last. The differences between the ends that two
ranks recorded are therefore the difference of their clocks, which drifts by some millionths, and an error of some µs. The fit
is a line through the differences that ignores outliers: medians instead of means (Theil and Sen).

Two things move the ends apart. The rank that comes last leaves first: what the others sent is already there, while they still
have to receive what it sends. In a recording of two H200s, in which the same rank came last throughout the prompt, this was
1 µs. And a rank may end a sum of what earlier kernels have sent before another one begins it. So the clocks are first aligned
without such sums, if there are other collectives. Then the offset is set by the collectives at which all ranks arrived
together, by these clocks, if it changes by more than chance explains. Sums count here: most collectives of a step are sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MOST = 300  # differences that are compared pair by pair
_LEAST = 8  # differences that a drift needs, and collectives of each rank that set its offset
_MOST_DRIFT = 1e-3
_BETTER = 0.9  # a drift must lower the error to this share, or it is noise
_NEAR_NS = 10_000  # ranks that arrive within this time arrive together
_SURE = 6  # an offset must change by this many times the median error / sqrt(n): three standard errors of a median, about


@dataclass(frozen=True)
class Clock:
    """How to correct the clock of a rank: the corrected time is t - (offset_ns + drift * t).

    `errors_ns` are the remaining differences between the ends of collectives; empty if the clock could not be aligned. `first`
    is the position of the rank that the clock is aligned with, directly or through others; without one, that of its own rank.
    """

    offset_ns: float
    drift: float
    errors_ns: Floats
    first: int = 0

    def corrected(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of this clock as times of the first rank's clock."""
        return times - np.rint(self.offset_ns + self.drift * times).astype(np.int64)


def align(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    present: NDArray[np.bool_],
    sure: NDArray[np.bool_],
    fallback_ns: Sequence[float],
) -> tuple[list[Clock], NDArray[np.bool_]]:
    """Return the clock of each rank, and [n] the collectives by which the clocks were aligned.

    `starts` and `ends` [n, R] are the times of collectives, where `present`. All ranks end those that are `sure` [n] together;
    others count if the ranks arrived together. Rank by rank, those that share the most collectives with ranks whose clocks are
    known come first. The first rank, and one that shares none of them, gets `fallback_ns` as offset. Ranks that share
    collectives with that one are aligned with it.
    """
    clocks = _aligned(ends, present & sure[:, None], fallback_ns)
    begun = np.stack([clock.corrected(starts[:, i]) for i, clock in enumerate(clocks)], 1)
    last = np.where(present, begun, np.iinfo(np.int64).min).max(1)
    first = np.where(present, begun, np.iinfo(np.int64).max).min(1)
    near = last - first <= _NEAR_NS
    if (present[near].sum(0) < _LEAST).any():
        return clocks, sure
    used = sure | near
    return _aligned(ends, present & used[:, None], fallback_ns, near, clocks), used


def _aligned(
    ends: NDArray[np.int64],
    present: NDArray[np.bool_],
    fallback_ns: Sequence[float],
    near: NDArray[np.bool_] | None = None,
    before: Sequence[Clock] = (),
) -> list[Clock]:
    """Return the clock of each rank; if given, those `before`, with the offsets of the collectives `near`."""
    clocks: dict[int, Clock] = {}
    known, first = np.full(present.shape, np.nan), 0
    while len(clocks) < present.shape[1]:
        shared = {r: present[:, r] & ~np.isnan(known).all(1) for r in range(present.shape[1]) if r not in clocks}
        rank = max(shared, key=lambda r: int(shared[r].sum()))
        at, mine = shared[rank], present[:, rank]
        if at.any():
            own = ends[at, rank].astype(np.float64)
            differences = own - np.nanmedian(known[at], axis=1)
            clock = fit(own, differences) if near is None else _moved(before[rank], own, differences, near[at])
            clocks[rank] = replace(clock, first=first)
        else:
            first = rank
            clocks[rank] = Clock(fallback_ns[rank], 0.0, np.zeros(int(mine.sum())), first)
        known[mine, rank] = clocks[rank].corrected(ends[mine, rank])
    return [clocks[r] for r in range(present.shape[1])]


def fit(times: Floats, differences: Floats) -> Clock:
    """Return the clock whose `differences` to the reference at its own `times` were seen, in ns."""
    flat = _with_drift(times, differences, 0.0)
    if len(times) < _LEAST or not np.ptp(times):
        return flat
    pick = np.unique(np.linspace(0, len(times) - 1, min(len(times), _MOST)).round().astype(int))
    order = np.argsort(times, kind="stable")[pick]
    i, j = np.triu_indices(len(order), 1)
    apart = times[order[j]] - times[order[i]]
    far = apart > np.ptp(times) / 4
    drift = float(np.median((differences[order[j]] - differences[order[i]])[far] / apart[far])) if far.any() else 0.0
    drifting = _with_drift(times, differences, drift)
    better = np.median(np.abs(drifting.errors_ns)) < _BETTER * np.median(np.abs(flat.errors_ns))
    return drifting if better and abs(drift) < _MOST_DRIFT else flat


def _with_drift(times: Floats, differences: Floats, drift: float) -> Clock:
    """Return the clock with this drift."""
    rest = differences - drift * times
    offset = float(np.median(rest))
    return Clock(offset, drift, rest - offset)


def _moved(clock: Clock, times: Floats, differences: Floats, near: NDArray[np.bool_]) -> Clock:
    """Return the clock with the offset of those differences that are `near`, unless it has changed by chance only."""
    rest, offset = differences - clock.drift * times, clock.offset_ns
    if near.any():
        theirs = float(np.median(rest[near]))
        spread = float(np.median(np.abs(rest[near] - theirs)))
        if abs(theirs - offset) > _SURE * spread / np.sqrt(near.sum()):
            offset = theirs
    return Clock(offset, clock.drift, rest - offset)
