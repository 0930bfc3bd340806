"""The copies table of a trace, `Trace.copies`, and the time for which the host waited."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from toolkit.trace.columns import COPY_KINDS, HOST_KINDS, KINDS
from toolkit.trace.waits import ranks_of

if TYPE_CHECKING:
    import pandas as pd

    from toolkit.trace.events import Trace


def copies_per_step(trace: Trace) -> pd.DataFrame:
    """Return the number and size of the copies of each step: the table of `Trace.copies`, which describes the columns."""
    import pandas as pd

    several = of_several_ranks(trace)
    peers = several or trace.is_kind("p2p").any()
    copied = (*COPY_KINDS, *(["p2p"] if peers else []), *(["collective"] if several else []))
    busy = trace.is_kind(*copied, "kernel", "collective", *HOST_KINDS)
    steps, row = np.unique(trace["step"][busy], return_inverse=True)
    if several:
        ranks, rank = np.unique(trace["rank"][busy], return_inverse=True)
        keys, row = np.unique(row * max(len(ranks), 1) + rank, return_inverse=True)
        steps, of_row = steps[keys // max(len(ranks), 1)], ranks[keys % max(len(ranks), 1)]
    kind, size = trace["kind"][busy], trace["bytes"][busy]

    def total(name: str, weights: NDArray[Any] | None = None) -> NDArray[Any]:
        mask = kind == KINDS.index(name)
        return np.bincount(row[mask], weights=None if weights is None else weights[mask], minlength=len(steps))

    table: dict[str, Any] = {"step": steps}
    if several:
        table["rank"] = of_row
    for name in copied:
        table[f"{name}_count"] = total(name)
        table[f"{name}_bytes"] = total(name, size).astype(np.int64)
    table["kernels"] = total("kernel") + total("collective")
    table["launches"] = total("launch") if trace.is_kind("launch").any() else np.full(len(steps), -1)
    table["host_wait_us"] = np.bincount(row, host_waits_ns(trace)[busy], len(steps)) / 1e3
    modelled = np.bincount(row, weights=trace["clock"][busy], minlength=len(steps)) > 0
    table["clock"] = np.where(modelled, "modelled", "measured")
    frame = pd.DataFrame(table)
    outside = (frame["step"] == -1) & (frame[[f"{name}_count" for name in copied]].sum(axis=1) == 0)
    return frame[~outside | outside.all()].reset_index(drop=True)


def host_waits_ns(trace: Trace) -> NDArray[np.int64]:
    """Return for how long the host waited in each event, in ns: in a wait, and in a call that copied to pageable memory.

    Such a call returns only when the copy has ended (CUDA Driver API, "API synchronization behavior"), so the wait that follows
    it in PyTorch is short.
    """
    start, took, rank, stream = (trace[name] for name in ("start_ns", "dur_ns", "rank", "stream"))
    waited = np.where(trace.is_kind("sync"), took, 0)
    copies = np.flatnonzero(trace.is_kind("d2h") & (trace["pinned"] == 0))
    calls = np.flatnonzero(trace.is_kind("launch"))
    for r, s in np.unique(np.stack([rank[copies], stream[copies]]), axis=1).T.tolist():
        mine, ours = (rows[(rank[rows] == r) & (stream[rows] == s)] for rows in (copies, calls))
        ours, middle = ours[np.argsort(start[ours], kind="stable")], start[mine] + took[mine] // 2
        before = np.searchsorted(start[ours], middle, "right")
        last = ours[before[before > 0] - 1]
        blocked = last[start[last] + took[last] >= middle[before > 0]]
        waited[blocked] = took[blocked]
    return waited


def of_several_ranks(trace: Trace) -> bool:
    """Return whether a trace is of several ranks, or of one rank of a job of several."""
    return int(trace.meta.get("world_size", 1)) > 1 or len(ranks_of(trace)) > 1
