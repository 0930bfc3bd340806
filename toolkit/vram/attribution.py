"""Write the owners of memory into the trace of a measurement, and the source of the lines that allocated the most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.core.callers import source_line
from toolkit.trace.events import Trace
from toolkit.trace.ledger import Ledger
from toolkit.vram import owners

# The workspace that cuBLAS allocates at the first matrix product and keeps, on Hopper and newer GPUs, and on older ones.
# Source: aten/src/ATen/cuda/CublasHandlePool.cpp
_CUBLAS_BYTES = (4096 * 8 * 1024, 4096 * 2 * 1024 + 16 * 8 * 1024)
_SOURCES = 400  # places whose source code a measurement stores; those that allocate the most come first


def with_owners(trace: Trace, found: Mapping[owners.Place, owners.Holder], meta: Mapping[str, Any]) -> Trace:
    """Return `trace` with the owner and kind of every allocation that is alive at its end.

    `found` maps places to owners. Allocations without an owner get the kind that follows from their line. `meta` is added to
    the metadata, along with the source text of the lines that allocated the most.
    """
    if not len(trace):
        return Trace(trace.columns, trace.strings, {**trace.meta, **meta})
    ledger = Ledger(trace)
    device_type = "vgpu" if str(trace.meta["device"]).startswith("virtual") else "cuda"
    codes = {text: i for i, text in enumerate(trace.strings)}
    owner, name = trace["owner"].copy(), trace["name"].copy()
    nowhere = owners.kind_by_place(None) if trace.meta.get("lines") else None
    kinds = [*map(owners.kind_by_place, trace.strings), nowhere]  # code -1 means "no line" and indexes the last one
    by_place = np.array([-1 if kind is None else codes.setdefault(kind, len(codes)) for kind in kinds], np.int32)
    allocs = ledger.blocks.row
    name[allocs] = by_place[trace["where"][allocs]]
    # The lines of blocks that are older than the scope may not have been recorded.
    name[allocs[(allocs < trace.meta.get("opening", 0)) & (trace["where"][allocs] < 0)]] = -1
    for row in allocs[ledger.blocks.end == len(ledger.rows)].tolist():
        holder = found.get((device_type, int(trace["address"][row])))
        if holder is None and device_type == "cuda" and int(trace["requested"][row]) in _CUBLAS_BYTES:
            holder = owners.Holder("(cuBLAS workspace)", "workspace", 0)
        if holder is not None:
            owner[row] = codes.setdefault(holder.owner, len(codes))
            if holder.kind != "activations" or name[row] < 0:
                name[row] = codes.setdefault(holder.kind, len(codes))
    columns = {**trace.columns, "owner": owner, "name": name}
    return Trace(columns, list(codes), {**trace.meta, **meta, "source": _sources(ledger)})


def _sources(ledger: Ledger) -> dict[str, str]:
    """Return the source text of the lines that allocated the most, and of those whose allocation failed."""
    codes, names = ledger.group("where")
    total = np.bincount(codes, ledger.blocks.bytes, len(names))
    places = [names[i] for i in np.argsort(-total)[:_SOURCES].tolist()]
    failed = ledger.trace.select(ledger.trace.is_kind("oom")).text("where")
    lines = dict.fromkeys(line for place in (*places, *failed) if place for line in place.split(" > "))
    found = {line: source_line(line) for line in lines}
    return {line: text for line, text in found.items() if text}
