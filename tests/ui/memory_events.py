"""Synthetic memory recordings for tests of the memory views."""

from __future__ import annotations

from typing import Any

import numpy as np

from toolkit.trace.assemble import from_columns
from toolkit.trace.columns import KINDS
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.vram.measure import MemoryUse

HOSTILE = "<script>alert('x')</script>\"&"


def many_events(events: int = 2_000_000, seed: int = 0) -> Trace:
    """Return allocations of random sizes and lifetimes, from 1,000 lines and 300 owners, in 100 steps and 10 cells."""
    random, n = np.random.default_rng(seed), events // 2
    begin = np.sort(random.random(n))
    time = np.concatenate([begin, begin + random.exponential(0.003, n)])
    order = np.argsort(time, kind="stable")

    def both(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([values, values])[order]

    lines = [f"cell {i}:{j} > m.py:{j}" for i in range(10) for j in range(100)]
    owners = [f"model.layers.{i}.w{j}" for i in range(30) for j in range(10)]
    kinds = ["weights", "activations", "kv", "gradients", "workspace"]
    kind = np.repeat([KINDS.index("alloc"), KINDS.index("free")], n)[order]
    at = np.arange(2 * n)
    return from_columns(
        [*lines, *owners, *kinds], {"clock": "measured", "device": "test"}, start_ns=(time[order] * 1e10).astype(np.int64),
        kind=kind, bytes=both(512 * random.integers(1, 1000, n)), address=both(np.arange(n) << 20),
        where=both(random.integers(0, 1000, n)), name=both(random.integers(1300, 1305, n)),
        owner=both(np.where(random.random(n) < 0.5, random.integers(1000, 1300, n), -1)),
        step=at * 100 // (2 * n), cell=at * 10 // (2 * n),
    )  # fmt: skip


def recording(
    *rows: tuple[str, int, int], opening: int = 0, owner: str | None = None, where: str | None = "cell 1:1",
    address: bool = True, clock: str = "measured", apart_ns: int = 1000, **meta: Any,
) -> Trace:  # fmt: skip
    """Build a trace from (kind, address, bytes) rows, one microsecond apart; the first `opening` were alive at the start."""
    builder = TraceBuilder()
    for i, (kind, place, size) in enumerate(rows):
        start = max(i - opening + 1, 0) * apart_ns
        builder.add(kind, start, bytes=size, address=place if address else -1, owner=owner, where=where, clock=clock)
    known = {"device": "test", "clock": clock, "opening": opening, "source": {"cell 1:1": "x = f()"}}
    return builder.build({**known, **meta})


def use_of(trace: Trace) -> MemoryUse:
    return MemoryUse(trace)


GIB = 1 << 30


def small(**more: Any) -> MemoryUse:
    """Return a trace with 1 GiB alive at the start, a peak of 5 GiB and 2 GiB at the end."""
    rows = (("alloc", 1, GIB), ("alloc", 2, GIB), ("alloc", 3, 3 * GIB), ("free", 3, 3 * GIB))
    return use_of(recording(*rows, **{"opening": 1, **more}))
