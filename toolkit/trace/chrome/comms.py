"""The communication between ranks in traces of PyTorch's profiler: the job, collectives, sends, receives and peer copies."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.trace.assemble import KIND, Rows, Strings
from toolkit.trace.nccl import PEER, Communication, of_arguments, operation_of

_MOST = 1 << 15  # ranks: the column `rank` has 16 bits


def distributed_job(head: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time at 0 of a trace, its rank, the number of ranks and the ranks of each process group, as far as its header
    has them. PyTorch's profiler writes absolute times if it writes no base.
    """
    info, base = head.get("distributedInfo"), head.get("baseTimeNanoseconds", 0 if "schemaVersion" in head else None)
    found: dict[str, Any] = {"origin_ns": base} if type(base) is int and 0 <= base < 1 << 61 else {}
    if not isinstance(info, dict):
        return found
    for name in ("rank", "world_size"):
        if type(info.get(name)) is int and 0 <= info[name] < _MOST:
            found[name] = info[name]
    groups = info.get("pg_config")
    for group in groups if isinstance(groups, list) else []:
        title, ranks = (group.get("pg_name"), group.get("ranks")) if isinstance(group, dict) else (None, None)
        if isinstance(title, str) and isinstance(ranks, list) and all(type(rank) is int for rank in ranks):
            found.setdefault("groups", {})[title] = ranks
    return found


class Comms:
    """Collects what the rows of a reader communicate. `complete` adds what was recorded apart from the kernels."""

    def __init__(self, rows: Rows, strings: Strings) -> None:
        self.rows, self.strings = rows, strings
        self._recorded: dict[Any, dict[str, Any]] = {}  # arguments of record_param_comms by external id
        self._waiting: list[tuple[int, int, Any, Communication]] = []  # row, communication, external id, found in the name

    def record(self, args: dict[str, Any]) -> None:
        """Keep the arguments of a `record_param_comms` for the kernels that it launched.

        Raises TypeError, ValueError or OverflowError, and keeps nothing, if an argument has another type.
        """
        if "Collective name" in args and type(args.get("External id")) is int:
            found, _ = of_arguments(args, Communication())
            array("q", found[3:])
            self._recorded[args["External id"]] = args

    def of_kernel(self, found: Communication, args: dict[str, Any]) -> tuple[str, int, int, int]:
        """Return kind, bytes, `pinned` and communication of a kernel, given what its name says."""
        size = 0
        if "Collective name" in args:
            found, size = of_arguments(args, found)
        index = self.rows.communication(found, self.strings)
        if "Collective name" not in args and type(args.get("External id")) is int:
            self._waiting.append((len(self.rows), index, args["External id"], found))
        return _kind(found), size, -1, index

    def of_copy(self, args: dict[str, Any]) -> int:
        """Return the communication of a peer copy: the GPU at its other end."""
        others = [
            end for end in (args.get("fromDevice"), args.get("toDevice")) if end != args.get("inDevice", args.get("device"))
        ]
        return (
            self.rows.communication(Communication(peer=int(others[0])), self.strings) if others and others[0] is not None else 0
        )

    def of_gloo(self, name: str) -> tuple[str, int]:
        """Return the kind and the communication of a range that gloo runs, such as "gloo:all_reduce"."""
        found = Communication(operation_of(name.partition(":")[2]), "gloo")
        return _kind(found), self.rows.communication(found, self.strings)

    def complete(self, rows: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Return `rows` with what `record_param_comms` says about kernels without arguments of their own (older PyTorch)."""
        waiting = [entry for entry in self._waiting if entry[2] in self._recorded]
        if not waiting:
            return rows
        rows = {name: column.copy() for name, column in rows.items()}
        for row, index, external, kernel in waiting:
            found, rows["bytes"][row] = of_arguments(self._recorded[external], kernel)
            rows["kind"][row] = KIND[_kind(found)]
            last = self.rows.communication(found, self.strings)
            self.rows.communications[index] = self.rows.communications[last]
        return rows


def _kind(found: Communication) -> str:
    return "p2p" if found.operation in PEER else "collective"
