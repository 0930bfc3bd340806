"""The columns of the event table and the values of its categorical columns.

Each column has one entry per event:

    start_ns, dur_ns   int64   start, in nanoseconds since the recording began, and duration; for device events, on the device
    kind               uint8   index into KINDS
    bytes              int64   size of a copy, memset, alloc, free (as counted by the allocator) or segment, of the request that
                               failed (oom), or of the larger one of a collective's input and output; 0 for other kinds
    stream             int32   stream on which the event ran (0: default stream) or, for a sync, the awaited stream; -1: none
    device             int16   GPU index; -1: the host
    rank               int16   process rank; 0 if there is only one process
    step               int32   decode step whose host code caused the event; -1: outside all steps
    cell               int32   notebook cell (execution count) whose code caused the event; -1: not in a notebook
    pinned             int8    host memory of a host-device copy: 1 page-locked, 0 pageable; -1: not known or no such copy
    clock              uint8   index into CLOCKS: whether the times were measured or modelled
    name, where, owner int32   index into `strings`; -1: none. `where` is the "file:line" of the Python code responsible.
    address            int64   device address of an alloc, free or segment; -1: not known or none
    requested          int64   bytes requested by an alloc, before the allocator rounded them; -1: not known or none
    layer              int16   layer of the model, from 0, whose code caused the event; -1: outside of layers, or not known
    operation          int32   operation of a collective, a send or a receive, such as "all_reduce"; index into `strings`
    algorithm          int32   how it was done, such as "ring, LL" or "one-shot"; index into `strings`
    group              int32   name of the process group; index into `strings`
    group_size         int32   number of ranks in the process group; -1: not known or none
    seq                int64   number of the collective in its group; -1: not known or none
    peer               int16   other end of a peer copy: GPU of a memcpy, rank of a send or receive; -1: not known or none

A collective is the event with which one rank takes part in an operation of a process group (torch.distributed). The events of
one collective have the same `group` and `seq` on all ranks. A p2p event is a copy between two GPUs: a memcpy, or the send or
receive of a rank.

A launch is the call with which the host launched a kernel, a copy, a memset or a graph; its stream is the one of that work. On
a virtual GPU, it takes the time of PyTorch's operator, without the interpreter; on CUDA, that of the runtime's call.

Memory events are those of CUDA's caching allocator, which takes a segment from the driver (segment_alloc), cuts blocks from it
(alloc, free) and may return it (segment_free). Where they are known, the `name` of an alloc is the kind of its tensor
("weights", "kv", ...) and its `owner` the variable or module that held it. The `where` of an alloc has the line of
the user's cell or measured block and the line that made the request: "cell 7:3 > model.py:41".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import TraceError, brief
from toolkit.core.units import plural

KINDS = (
    "kernel", "h2d", "d2h", "d2d", "p2p", "memset", "sync", "alloc", "free", "mark", "segment_alloc", "segment_free", "oom",
    "launch", "collective",
)  # fmt: skip
LANES = {  # the lanes of a timeline from top to bottom, and their names
    "launch": "host launches", "sync": "host waits", "mark": "host marks", "kernel": "kernels", "collective": "collectives",
    "h2d": "H2D", "d2h": "D2H", "d2d": "D2D", "p2p": "P2P", "memset": "memset",
}  # fmt: skip
HOST_KINDS = ("launch", "sync", "mark")
CLOCKS = ("measured", "modelled")
COPY_KINDS = ("h2d", "d2h", "d2d")
MEMORY_KINDS = ("alloc", "free", "segment_alloc", "segment_free", "oom")
COLUMNS: dict[str, type] = {
    "start_ns": np.int64, "dur_ns": np.int64, "kind": np.uint8, "bytes": np.int64, "stream": np.int32,
    "device": np.int16, "rank": np.int16, "step": np.int32, "cell": np.int32, "pinned": np.int8, "clock": np.uint8,
    "name": np.int32, "where": np.int32, "owner": np.int32, "address": np.int64, "requested": np.int64,
    "layer": np.int16,
    "operation": np.int32, "algorithm": np.int32, "group": np.int32, "group_size": np.int32, "seq": np.int64, "peer": np.int16,
}  # fmt: skip
COMMUNICATION = ("operation", "algorithm", "group", "group_size", "seq", "peer")
OPTIONAL = ("address", "requested", "layer", *COMMUNICATION)  # a trace without them has their "not known" value in each event
NOT_KNOWN = dict.fromkeys(("stream", "step", "cell", "pinned", "name", "where", "owner", *OPTIONAL), -1)
TEXT_COLUMNS = ("name", "where", "owner", "operation", "algorithm", "group")


def as_rows(mask: Any, count: int) -> NDArray[Any] | slice:
    """Return what selects some of `count` rows: booleans, or the numbers of rows. Raises TraceError for anything else."""
    if isinstance(mask, slice):
        return mask
    found = np.asarray(mask)
    if found.shape == (0,):
        return found.astype(np.int64)
    numbers = found.ndim == 1 and found.dtype.kind in "iu"
    if (numbers and -count <= found.min() <= found.max() < count) or (found.dtype == bool and found.shape == (count,)):
        return found
    what = f"{plural(len(found), 'value')} of type {found.dtype}" if found.ndim == 1 else brief(mask)
    what += f" from {found.min()} to {found.max()}" if numbers else ""
    do = f"Give {count:,} booleans, such as trace.is_kind('h2d'), or the numbers of rows"
    raise TraceError("selecting events of a trace", f"the mask is {what}", do)
