"""Limits of processor time that hold on every machine: how slow is this one just now?

A virtual machine may have a third of its usual speed for minutes. It may also stand still for a second, and its clocks go on
meanwhile, also those of processor time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from time import thread_time
from typing import Any

import numpy as np

USUAL_S = 0.018  # that `_fixed_work` takes on the machine for which the limits were chosen


def _fixed_work() -> None:
    counts: dict[int, int] = {}
    for i in range(40_000):
        counts[i % 977] = counts.get(i % 977, 0) + i
    values = np.arange(400_000)[::-1] * 7919 % 100_003
    values.sort()
    np.cumsum(values)


def quickest(work: Callable[[], Any], tries: int, enough_s: float = 0.0) -> float:
    """Return the processor time of the quickest of several calls, or of the first that takes less than `enough_s`."""
    least = math.inf
    for _ in range(tries):
        began = thread_time()
        work()
        least = min(least, thread_time() - began)
        if least < enough_s:
            break
    return least


def within(took_s: float, limit_s: float) -> bool:
    """Return whether `took_s` would be less than `limit_s` at the usual speed. Call it right after the measurement."""
    return took_s < limit_s or took_s < limit_s * quickest(_fixed_work, 3) / USUAL_S


def is_quick(work: Callable[[], Any], limit_s: float) -> bool:
    """Return whether a call of `work` takes less than `limit_s` of processor time, at the usual speed. Tries three times."""
    return within(quickest(work, 3, limit_s), limit_s)
