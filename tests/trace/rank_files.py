"""Traces of several ranks, made by hand in the form of PyTorch's profiler: events, and the files of whole jobs.

The fields are those of `torch/csrc/profiler/util.h` and of Kineto. No GPU was involved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

NAME = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def job(rank: int, world_size: int) -> dict[str, Any]:
    """Return the header of one rank's file."""
    groups = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world_size, "ranks": list(range(world_size))}]
    info = {"backend": "nccl", "rank": rank, "world_size": world_size, "pg_count": 1, "pg_config": groups}
    return {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H200"}], "distributedInfo": info}


def collective(ts: float, dur: float, seq: int | None = 0, name: str = NAME, stream: int = 7, **args: Any) -> dict[str, Any]:
    """Return an NCCL kernel with the arguments that PyTorch adds to it. Times in µs."""
    given: dict[str, Any] = {
        "device": 0, "stream": stream, "Collective name": "allreduce", "In msg nelems": 5376, "Out msg nelems": 5376,
        "Group size": 2, "dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "[0, 1]",
    }  # fmt: skip
    given |= {"Seq": seq} if seq is not None else {}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": ts, "dur": dur, "args": given | args}


def plain(ts: float, dur: float, name: str = "gemm") -> dict[str, Any]:
    """Return a kernel that does not communicate."""
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": ts,
        "dur": dur,
        "args": {"device": 0, "stream": 7},
    }


def write_rank(
    path: Path, rank: int, world_size: int, events: list[dict[str, Any]], head: dict[str, Any] | None = None
) -> Path:
    """Write one rank's file; `head` replaces its header."""
    path.write_text(json.dumps((job(rank, world_size) if head is None else head) | {"traceEvents": events}))
    return path


def write_job(
    folder: Path, late: dict[int, int] | None = None, ranks: int = 2, collectives: int = 200,
    offsets_us: tuple[float, ...] = (0, 0), drifts_ppm: tuple[float, ...] = (0, 0), delay_us: float = 200.0,
    gap_us: float = 0.0,
) -> list[Path]:  # fmt: skip
    """Write the files of a job in which each rank computes for 50 µs or so, and then all of them reduce for 20 µs.

    `late` maps collectives to the rank that begins `delay_us` late; `gap_us` is the time between two collectives. The clock of
    each rank has an offset and a drift, and jitter of about a µs on every time.
    """
    rng = np.random.default_rng(0)
    files, now = [], 1000.0
    events: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    for number in range(collectives):
        begin = now + 50.0 + rng.uniform(0, 3, ranks)  # true times at which each rank arrives
        if late and number in late:
            begin[late[number]] += delay_us
        end = begin.max() + 20.0
        for rank in range(ranks):
            clock = [t + offsets_us[rank] + t * drifts_ppm[rank] * 1e-6 + rng.normal(0, 0.5) for t in (now, begin[rank], end)]
            events[rank].append(plain(clock[0], clock[1] - clock[0] - 1))
            events[rank].append(collective(clock[1], clock[2] - clock[1], 100 + number, **{"Group size": ranks}))
        now = float(end) + gap_us
    for rank in range(ranks):
        files.append(write_rank(folder / f"rank{rank}.json", rank, ranks, events[rank]))
    return files
