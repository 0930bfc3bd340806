"""Find the collectives of a recording: what the toolkit's operations announced, in the order of their launches.

An announcement says what a launch of a collective is. It comes just before or after that launch. In a capture, it belongs to a
node of the graph, and to that node in every launch of the graph. Kernels of collectives that nobody announced keep what their
names, and PyTorch's record of the call, say.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.gpu.cuda.session import Announced, Session
from toolkit.trace.nccl import PEER, Communication, of_arguments, of_kernel

Found = dict[int, tuple[Communication, int]]  # by row: the columns of the collective, and its bytes


def collectives(
    names: Sequence[str | None], details: Sequence[str], launched_ns: NDArray[np.int64], graphs: Mapping[int, int],
    launches: Sequence[Sequence[int]], session: Session, group: str,
) -> Found:  # fmt: skip
    """Return the rows that are collectives, with their columns.

    Args:
        names: the names of the rows.
        details: the metadata of the rows, JSON without braces.
        launched_ns: when the host launched each row.
        graphs: the number of the graph of each row that is a node.
        launches: the rows of each launch of a graph, or of each iteration of a loop, in order of start.
        session: the announcements, and when graphs were captured.
        group: the name of the group of announced collectives.
    """
    found: Found = {i: (named, 0) for i, name in enumerate(names) if name and (named := of_kernel(name))}
    for i, (named, _) in found.items():
        found[i] = _recorded(details[i], named)
    own, captured = _by_graph(session)
    free = sorted((i for i in found if i not in graphs), key=lambda i: launched_ns[i])
    pairs = [(free, own)] + [([i for i in rows if i in found], captured[graphs[rows[0]]]) for rows in launches if rows]
    for rows, announced in pairs:
        if len(rows) == len(announced):
            for i, one in zip(rows, announced, strict=True):
                found[i] = _told(one, found[i][0], group), one.bytes
    return found


def _by_graph(session: Session) -> tuple[list[Announced], dict[int, list[Announced]]]:
    """Return the announcements of launches, and those of each captured graph, in order."""
    own: list[Announced] = []
    captured: dict[int, list[Announced]] = defaultdict(list)
    for one in session.announced:
        number = next((n for n, c in session.captures.items() if c.began_ns <= one.at_ns <= c.ended_ns), None)
        (own if number is None else captured[number]).append(one)
    return own, captured


def _told(one: Announced, named: Communication, group: str) -> Communication:
    algorithm = f"{one.algorithm}, {named.algorithm}" if one.algorithm == "NCCL" and named.algorithm else one.algorithm
    return Communication(one.operation, algorithm, group, one.ranks)


def _recorded(detail: str, named: Communication) -> tuple[Communication, int]:
    """Return what PyTorch recorded of a call of a process group; otherwise what the kernel's name says."""
    if "Collective name" not in detail:
        return named, 0
    try:
        args: Any = json.loads("{" + detail.strip().removeprefix("{").removesuffix("}") + "}")
        return of_arguments(args, named)
    except (ValueError, TypeError):
        return named, 0


def numbered(found: Found, start_ns: NDArray[np.int64]) -> Found:
    """Return the collectives with numbers: those without one are counted in their group, in order of start.

    Those whose group isn't known, such as NCCL's kernels under the model of another library, are counted together. Sends and
    receives are not: ranks may have different numbers of them.
    """
    counts: dict[str | None, int] = defaultdict(int)
    result = dict(found)
    for i in sorted(found, key=lambda i: start_ns[i]):
        one, size = found[i]
        if one.seq < 0 and (one.group is not None or one.operation not in PEER):
            result[i] = one._replace(seq=counts[one.group]), size
            counts[one.group] += 1
    return result
