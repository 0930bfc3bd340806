"""Assign the nodes of a graph launch to the lines that captured them, and those of a loop to its steps.

The profiler reports one call for all nodes of a launch. It also reports the calls that were captured, in the order of the
nodes: the k-th node of a launch comes from the k-th captured call. In a loop, `publish_token` ends each step. Some versions of
CUPTI report only the first iteration; the times of the others are known from `publish_token` all the same. Others report all of
them, but without the call that launched the loop.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from toolkit.gpu.cuda.session import Captured, Event, HostClock, LoopRun, Range, Row, Session

T = TypeVar("T")
PUBLISH = "publish_token"
ON_DEVICE = ("kernel", "h2d", "d2h", "d2d", "p2p", "memset")
_NODE_CALL = re.compile(r"Launch(Cooperative)?Kernel|Memcpy|Memset")
_GRAPH_CALL = "GraphLaunch"
_SLACK_NS = 20_000  # by how much the clocks of host and profiler may disagree


class Nodes(NamedTuple):
    """What is known of the rows that are nodes of graphs, and the steps of loops as ranges on the host's clock."""

    rows: NDArray[np.int64]  # indices
    line_ns: NDArray[np.int64]  # the host's time at which the line ran that captured the node
    steps: NDArray[np.int32]  # the step of the node in a loop, -1 outside of loops
    ranges: list[Range]
    graphs: dict[int, int]  # by row: the number of the graph
    launches: list[list[int]]  # the rows of each launch, or of each iteration of a loop, in order of start


def graph_nodes(rows: Sequence[Row], calls: Mapping[int, Event], clock: HostClock, session: Session) -> Nodes:
    """Return the `Nodes` of the graphs that were launched during the recording; empty if there were none."""
    graph_calls = sorted((e for e in calls.values() if _GRAPH_CALL in e.name), key=lambda e: e.start_ns)
    numbers = _by_link(graph_calls, dict(session.launches), clock)
    runs = _by_link(graph_calls, {run.launched_ns: run for run in session.loops}, clock)
    groups: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.link in numbers:
            groups.setdefault(row.link, []).append(i)
    for i, link in _repeated(rows, calls, runs):
        groups.setdefault(link, []).append(i)
    launched = {row.link for row in rows}
    captured_ns = {
        number: _captured_calls(calls.values(), launched, clock, session.captures.get(number))
        for number in set(numbers.values())
    }
    line_ns: dict[int, int] = {}
    steps: dict[int, int] = {}
    ranges: list[Range] = []
    graphs: dict[int, int] = {}
    launches: list[list[int]] = []
    for link, members in groups.items():
        members.sort(key=lambda i: rows[i].start_ns)
        here = clock.to_host(np.array([calls[link].start_ns], np.int64))[0]
        line_ns |= dict.fromkeys(members, int(here))
        iterations = [members]
        ends = [i for i in members if PUBLISH in (rows[i].name or "")] if link in runs else []
        if ends:
            starts = np.array([rows[i].start_ns for i in ends], np.int64)
            before = {i: int(np.searchsorted(starts, rows[i].start_ns)) for i in members}  # publications
            steps |= {i: runs[link].first + n - 1 if n else -1 for i, n in before.items()}
            body = [i for i in members if PUBLISH not in (rows[i].name or "")]
            iterations = [list(nodes) for _, nodes in groupby(body, steps.__getitem__)]
            ranges += _step_ranges(rows[ends[0]], runs[link], clock)
        graphs |= dict.fromkeys(members, numbers[link])
        launches += iterations
        for nodes in iterations:
            causes = captured_ns[numbers[link]]
            if len(nodes) == len(causes):
                line_ns |= dict(zip(nodes, causes, strict=True))
    found = sorted(line_ns)
    return Nodes(
        np.array(found, np.int64), np.array([line_ns[i] for i in found], np.int64),
        np.array([steps.get(i, -1) for i in found], np.int32), ranges, graphs, launches,
    )  # fmt: skip


def _repeated(rows: Sequence[Row], calls: Mapping[int, Event], runs: Mapping[int, LoopRun]) -> Iterator[tuple[int, int]]:
    """Yield (row, correlation of the loop's launch) for each row whose launch is not known: the last loop launched before."""
    loops = sorted((calls[link].start_ns, link) for link in runs)
    for i, row in enumerate(rows) if loops else ():
        if row.kind in ON_DEVICE and row.link not in calls:
            before = bisect(loops, (row.start_ns, 0))
            if before:
                yield i, loops[before - 1][1]


def _by_link(graph_calls: Sequence[Event], noted: Mapping[int, T], clock: HostClock) -> dict[int, T]:
    """Return the value that was noted right before each graph launch, by the correlation of its call."""
    times = clock.to_host(np.array([e.start_ns for e in graph_calls], np.int64))
    found = {}
    for at_ns, value in noted.items():
        i = int(np.searchsorted(times, at_ns - _SLACK_NS))
        if i < len(graph_calls):
            found[graph_calls[i].correlation] = value
    return found


def _captured_calls(calls: Iterable[Event], launched: set[int], clock: HostClock, captured: Captured | None) -> list[int]:
    """Return the times of the calls that a capture recorded, in order: those that launched nothing on the device."""
    if captured is None:
        return []
    some = sorted(e.start_ns for e in calls if _NODE_CALL.search(e.name) and e.correlation not in launched)
    times = clock.to_host(np.array(some, np.int64))
    return times[(captured.began_ns <= times) & (times <= captured.ended_ns)].tolist()  # type: ignore[no-any-return]


def _step_ranges(first: Row, run: LoopRun, clock: HostClock) -> list[Range]:
    """Return the steps of a loop. The first publication, which the profiler reports, relates the GPU's own clock to its."""
    ends = run.token_ns - run.token_ns[0] + first.start_ns + first.dur_ns
    ends_ns = clock.to_host(ends).tolist()
    return [Range(start, end, step, "decode") for step, (start, end) in enumerate(pairwise(ends_ns), run.first)]
