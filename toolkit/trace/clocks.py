"""Align the clocks of several ranks on the ends of collectives.

All ranks leave an all-reduce at about the same time, whichever of them came last. The differences between the ends that two
ranks recorded are therefore the difference of their clocks, which drifts by some millionths, and an error of some µs. The fit
is a line through the differences that ignores outliers: medians instead of means (Theil and Sen).

Sums of what earlier kernels have sent are an exception: a rank may end one before another rank begins it. If there are other
collectives, the clocks are first aligned on those, and then also on the sums in which all ranks were at the same time. The
others may all be close together, as in a prompt: in a recording on two H200s, they did not show a drift of 5 millionths, which
moved the steps after the prompt by 1 µs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_MOST = 300  # differences that are compared pair by pair
_LEAST = 8  # differences that a drift needs
_MOST_DRIFT = 1e-3
_BETTER = 0.9  # a drift must lower the error to this share, or it is noise


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


def align(ends: NDArray[np.int64], present: NDArray[np.bool_], fallback_ns: Sequence[float]) -> list[Clock]:
    """Return the clock of each rank, given the ends [n, R] of collectives that end together.

    Rank by rank, those that share the most collectives with ranks whose clocks are known come first. The first rank, and one
    that shares none of them, gets `fallback_ns` as offset. Ranks that share collectives with that one are aligned with it.
    """
    clocks: dict[int, Clock] = {}
    known, first = np.full(present.shape, np.nan), 0
    while len(clocks) < present.shape[1]:
        shared = {r: present[:, r] & ~np.isnan(known).all(1) for r in range(present.shape[1]) if r not in clocks}
        rank = max(shared, key=lambda r: int(shared[r].sum()))
        at, mine = shared[rank], present[:, rank]
        if at.any():
            own = ends[at, rank].astype(np.float64)
            clocks[rank] = replace(fit(own, own - np.nanmedian(known[at], axis=1)), first=first)
        else:
            first = rank
            clocks[rank] = Clock(fallback_ns[rank], 0.0, np.zeros(int(mine.sum())), first)
        known[mine, rank] = clocks[rank].corrected(ends[mine, rank])
    return [clocks[r] for r in range(present.shape[1])]


def overlap(
    starts: NDArray[np.int64], ends: NDArray[np.int64], present: NDArray[np.bool_], clocks: Sequence[Clock]
) -> NDArray[np.bool_]:
    """Return [n] whether all ranks were in a collective at some time, by their `clocks`. Its times are [n, R]."""
    begun, ended = (np.stack([clock.corrected(times[:, i]) for i, clock in enumerate(clocks)], 1) for times in (starts, ends))
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    found: NDArray[np.bool_] = np.where(present, begun, least).max(1) < np.where(present, ended, most).min(1)
    return found


def fit(times: Floats, differences: Floats) -> Clock:
    """Return the clock whose `differences` to the reference at its own `times` were seen, in ns."""
    flat = Clock(float(np.median(differences)), 0.0, differences - np.median(differences))
    if len(times) < _LEAST or not np.ptp(times):
        return flat
    pick = np.unique(np.linspace(0, len(times) - 1, min(len(times), _MOST)).round().astype(int))
    order = np.argsort(times, kind="stable")[pick]
    i, j = np.triu_indices(len(order), 1)
    apart = times[order[j]] - times[order[i]]
    far = apart > np.ptp(times) / 4
    drift = float(np.median((differences[order[j]] - differences[order[i]])[far] / apart[far])) if far.any() else 0.0
    offset = float(np.median(differences - drift * times))
    errors = differences - offset - drift * times
    better = np.median(np.abs(errors)) < _BETTER * np.median(np.abs(flat.errors_ns))
    return Clock(offset, drift, errors) if better and abs(drift) < _MOST_DRIFT else flat
