"""The columns of the event table, and the values of those that are categories.

Columns, one entry an event:

    start_ns, dur_ns   int64   nanoseconds since the recording began; for a device event, when it ran on the device
    kind               uint8   index into KINDS
    bytes              int64   bytes moved (copies), set (memset), allocated and freed (as the allocator counts them), of a
                               segment, or asked for in vain (oom); 0 for the rest
    stream             int32   the stream it ran on (0: the default stream); for a sync, the stream waited for; -1: none
    device             int16   which GPU; -1: the host
    rank               int16   process rank, 0 alone
    step               int32   decode step whose host code caused it; -1: outside of every step
    cell               int32   notebook cell (execution count) whose code caused it; -1: not in a notebook
    pinned             int8    copies between host and device: 1 page-locked host memory, 0 pageable, -1 not known or none
    clock              uint8   index into CLOCKS: was the time measured, or modelled?
    name, where, owner int32   index into `strings`; -1: none. `where` is "file:line" of the Python that caused it
    address            int64   where in the device's memory an alloc, free or segment lies; -1: not known or none
    requested          int64   bytes that an alloc asked for, before the allocator rounded them; -1: not known or none

Memory events are those of CUDA's caching allocator: it takes a segment from the driver (segment_alloc), cuts blocks from it
(alloc, free) and may give it back (segment_free). `name` of an alloc is what kind of tensor it was for ("weights", "kv", ...),
and `owner` the variable or module that held it, where they are known; its `where` has the frame that began and the one that
asked: "cell 7:3 > model.py:41".
"""

from __future__ import annotations

import numpy as np

KINDS = (
    "kernel", "h2d", "d2h", "d2d", "p2p", "memset", "sync", "alloc", "free", "mark", "segment_alloc", "segment_free", "oom",
)  # fmt: skip
CLOCKS = ("measured", "modelled")
COPY_KINDS = ("h2d", "d2h", "d2d")
MEMORY_KINDS = ("alloc", "free", "segment_alloc", "segment_free", "oom")
COLUMNS: dict[str, type] = {
    "start_ns": np.int64, "dur_ns": np.int64, "kind": np.uint8, "bytes": np.int64, "stream": np.int32,
    "device": np.int16, "rank": np.int16, "step": np.int32, "cell": np.int32, "pinned": np.int8, "clock": np.uint8,
    "name": np.int32, "where": np.int32, "owner": np.int32, "address": np.int64, "requested": np.int64,
}  # fmt: skip
NOT_KNOWN = dict.fromkeys(("stream", "step", "cell", "pinned", "name", "where", "owner", "address", "requested"), -1)
TEXT_COLUMNS = ("name", "where", "owner")
