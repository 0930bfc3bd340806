"""Convert the profiler's events into a trace: which host call launched each device event, from which line and in which step.

`read_events` is a pure function of the profiler's events and the session that recorded them, so that tests need no
GPU. Anchors, which are runtime calls that both the profiler and the host timed, map the profiler's clock to the host's.

All nodes of a graph are launched by one call. If the graph was captured during the recording, each node is assigned to the line
and layer that captured it instead (see `graph_nodes.graph_nodes`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.current_layer import NO_LAYER
from toolkit.core.distributed import GROUP
from toolkit.gpu.cuda.announced import Found, collectives, numbered
from toolkit.gpu.cuda.graph_nodes import Nodes, graph_nodes
from toolkit.gpu.cuda.session import ANCHOR_CALL, Event, HostClock, Range, Row, Session
from toolkit.trace.cupti import is_copy_kernel, is_wait, number_streams, parse_memcpy
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.steps import steps_from_ranges

_BYTES = re.compile(r'"bytes": ?"?(\d+)')
_STEP_RANGE = "toolkit.step "
_MEMORY = "[memory]"


def has_calls(events: Iterable[Any]) -> bool:
    """Return whether the profiler saw any runtime call. Without CUPTI it sees none, and reports no error."""
    return any(event.name() == ANCHOR_CALL for event in events)


def read_events(events: Iterable[Any], session: Session, meta: dict[str, Any]) -> Trace:
    """Return the trace of a session from the profiler's events (`kineto_results.events()`).

    Raises RecorderError if the events contain no runtime calls.
    """
    found = [_plain(event) for event in events if not event.name().startswith("aten::")]
    calls = {e.correlation: e for e in found if not e.on_device and '"cbid"' in e.detail}
    rows = _device_rows(found, calls, session.index)
    rows += _launch_rows(rows, calls)
    rows += _wait_rows(found, calls)
    rows += _memory_rows(found, session.index)
    clock = HostClock(found, session.anchors)
    cause = clock.to_host(np.array([row.cause_ns for row in rows], np.int64))
    start = clock.to_host(np.array([row.start_ns for row in rows], np.int64)) - session.began_ns
    inside = (session.began_ns <= cause) & (cause <= session.ended_ns)
    step = _steps(cause, session.ranges)
    nodes = graph_nodes(rows, calls, clock, session)
    found_collectives = _collectives(rows, cause, start, nodes, session)
    step[nodes.rows] = np.where(nodes.steps >= 0, nodes.steps, step[nodes.rows])
    session.ranges = sorted(session.ranges + nodes.ranges)
    where: list[str | None] = [None] * len(rows)
    layer = np.full(len(rows), NO_LAYER)
    if session.log is not None:
        line_ns = cause.copy()
        line_ns[nodes.rows] = nodes.line_ns
        threads = np.array([row.thread for row in rows], np.int64)
        where, layer = session.log.where(threads, line_ns), session.log.layers(threads, line_ns)
    order = np.argsort(start, kind="stable")
    stream = np.empty(len(rows), np.int32)
    stream[order] = number_streams(np.array([row.stream for row in rows], np.int64)[order])
    builder = TraceBuilder()
    for i in order[inside[order]].tolist():
        row = rows[i]
        more, n_bytes = found_collectives.get(i, (None, row.bytes))
        builder.add(
            row.kind if more is None else "collective", int(start[i]), row.dur_ns, bytes=n_bytes, stream=int(stream[i]),
            device=-1 if row.kind == "launch" else session.index,
            step=int(step[i]), cell=session.cell, pinned=row.pinned, name=row.name, where=where[i], rank=session.shard.rank,
            layer=int(layer[i]), **({} if more is None else more._asdict()),
        )  # fmt: skip
    _add_marks(builder, found, clock, session)
    meta = dict(meta, steps_from="marks" if session.ranges else None, lines=session.log is not None)
    if session.log is not None and session.log.problem:
        meta["lines_problem"] = session.log.problem
    return builder.build(meta)


def _collectives(
    rows: list[Row], cause_ns: NDArray[np.int64], start_ns: NDArray[np.int64], nodes: Nodes, session: Session
) -> Found:
    """Return the kernels that are collectives."""
    names = [row.name if row.kind == "kernel" else None for row in rows]
    details = [row.detail for row in rows]
    return numbered(collectives(names, details, cause_ns, nodes.graphs, nodes.launches, session, GROUP), start_ns)


def _steps(times_ns: NDArray[np.int64], ranges: list[Range]) -> NDArray[np.int32]:
    """Return the step whose range contains each time, -1 for none."""
    columns = np.array([(r.start_ns, r.end_ns, r.step) for r in ranges], np.int64).reshape(-1, 3)
    return steps_from_ranges(times_ns, columns[:, 0], columns[:, 1], columns[:, 2])


def _plain(event: Any) -> Event:
    name, detail = event.name(), event.metadata_json()
    return Event(
        name, event.device_type().name == "CUDA", event.device_index(), event.device_resource_id(), event.start_ns(),
        event.duration_ns(), event.correlation_id(), detail, event.nbytes(), event.is_user_annotation(),
    )  # fmt: skip


def _device_rows(found: list[Event], calls: dict[int, Event], index: int) -> list[Row]:
    """Return the kernels, copies and memsets of one GPU with the calls that launched them; a graph's nodes share one call."""
    rows = []
    for e in found:
        if not e.on_device or e.gpu != index or e.annotation or e.name == _MEMORY or "cuda_sync_kind" in e.detail:
            continue
        kind: str | None = "d2d" if is_copy_kernel(e.name) else "kernel"
        n_bytes, pinned = 0, -1
        if e.name.startswith(("Memcpy", "Memset")):
            match = _BYTES.search(e.detail)
            n_bytes = int(match[1]) if match else 0
            kind, pinned = parse_memcpy(e.name) if e.name.startswith("Memcpy") else ("memset", -1)
        if kind is not None:
            call = calls.get(e.correlation)
            thread, cause = (call.resource, call.start_ns) if call else (-1, e.start_ns)
            rows.append(
                Row(kind, e.start_ns, e.dur_ns, n_bytes, e.resource, pinned, e.name, thread, cause, e.correlation, e.detail)
            )
    return rows


def _launch_rows(rows: list[Row], calls: dict[int, Event]) -> list[Row]:
    """Return the calls that launched `rows`. A graph is launched by one call."""
    streams = {row.link: row.stream for row in reversed(rows)}
    launched = [(calls[link], stream) for link, stream in streams.items() if link in calls]
    return [Row("launch", e.start_ns, e.dur_ns, 0, stream, -1, e.name, e.resource, e.start_ns) for e, stream in launched]


def _wait_rows(found: list[Event], calls: dict[int, Event]) -> list[Row]:
    """Return the calls that blocked the host. Their streams come from CUPTI's separate synchronization records."""
    streams = {e.correlation: e.resource for e in found if e.on_device and "cuda_sync_kind" in e.detail}
    return [
        Row("sync", e.start_ns, e.dur_ns, 0, streams.get(e.correlation, -1), -1, e.name, e.resource, e.start_ns)
        for e in calls.values()
        if is_wait(e.name)
    ]


def _memory_rows(found: list[Event], index: int) -> list[Row]:
    rows = []
    for e in found:
        if e.name == _MEMORY and e.on_device and e.gpu == index:
            kind = "alloc" if e.bytes > 0 else "free"
            rows.append(Row(kind, e.start_ns, 0, abs(e.bytes), -1, -1, None, e.resource, e.start_ns))
    return rows


def _add_marks(builder: TraceBuilder, found: list[Event], clock: HostClock, session: Session) -> None:
    """Add a mark for each decode step, and for each `record_function` range of the user."""
    rank = session.shard.rank
    for r in session.ranges:
        start = r.start_ns - session.began_ns
        builder.add("mark", start, r.end_ns - r.start_ns, device=-1, step=r.step, cell=session.cell, name=r.name, rank=rank)
    own = [e for e in found if e.annotation and not e.on_device and not e.name.startswith(_STEP_RANGE)]
    starts = clock.to_host(np.array([e.start_ns for e in own], np.int64)) - session.began_ns
    for e, start in zip(own, starts.tolist(), strict=True):
        if 0 <= start <= session.ended_ns - session.began_ns:
            builder.add("mark", start, e.dur_ns, device=-1, cell=session.cell, name=e.name, rank=rank)
