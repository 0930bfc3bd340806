"""Synthetic traces for tests of the timeline: a short decode loop, and one with a million events."""

from __future__ import annotations

import numpy as np

from toolkit.trace.columns import COLUMNS, KINDS
from toolkit.trace.events import Trace, TraceBuilder


def decode_loop(
    steps: int = 6, clock: str = "modelled", h2d: int = 2, scale: float = 1.0, kernels: int = 12, **meta: object
) -> Trace:
    """Return a few decode steps: `h2d` H2D copies, kernels, a D2D copy, a D2H copy on stream 7, and the host's wait for it."""
    builder, t = TraceBuilder(), 0
    for step in range(steps):
        start, name = t, "prefill" if step == 0 else "decode"
        common = {"step": step, "clock": clock}
        for _ in range(h2d):
            builder.add("h2d", t, int(1200 * scale), bytes=8, stream=0, pinned=0, name="Memcpy HtoD (Pageable -> Device)",
                        where="decode/loop.py:120", **common)  # fmt: skip
            t += int(2500 * scale)
        for kernel in range(kernels):
            dur = int((5000 + 700 * kernel) * scale)
            builder.add(
                "kernel",
                t,
                dur,
                stream=0,
                name=f"layer_{kernel}_matmul",
                where=f"models/qwen3.py:{40 + kernel}",
                layer=kernel // 3 - 1,
                **common,
            )
            t += dur + 300
        builder.add("d2d", t, 900, bytes=2 * 1024 * 1024, stream=0, name="Memcpy DtoD", where="models/cache.py:31", **common)
        t += 1200
        builder.add(
            "sync",
            t,
            int(4000 * scale),
            device=-1,
            stream=7,
            name="cudaStreamSynchronize",
            where="decode/loop.py:131",
            **common,
        )
        builder.add("d2h", t + 500, int(1500 * scale), bytes=8, stream=7, pinned=1, name="Memcpy DtoH (Device -> Pinned)",
                    where="decode/loop.py:130", **common)  # fmt: skip
        t += int(5000 * scale)
        builder.add("mark", start, t - start, device=-1, step=step, name=name, clock=clock)
    return builder.build(
        {"device": "virtual:h200" if clock == "modelled" else "cuda:0", "clock": clock, "steps_from": "marks", **meta}
    )


def ranks(count: int = 2, steps: int = 4, late: int = 1, delay: int = 200_000, **meta: object) -> Trace:
    """Return steps of several ranks: a launch, a kernel, and an all-reduce to which rank `late` comes 200 µs late in step 2."""
    builder = TraceBuilder()
    for step in range(steps):
        t = 1_000_000 * step
        begin = {rank: t + 50_000 + 1000 * rank + (delay if step == 2 and rank == late else 0) for rank in range(count)}
        for rank in range(count):
            common = {"rank": rank, "step": step}
            builder.add("mark", t, 900_000, device=-1, name="decode", **common)
            builder.add("launch", t + 1000, 5000, device=-1, stream=0, name="cudaLaunchKernel", **common)
            builder.add("kernel", t + 8000, begin[rank] - t - 9000, stream=0, name="gemm", layer=step - 1, **common)
            builder.add(
                "collective", begin[rank], max(begin.values()) + 20_000 - begin[rank], bytes=10752, stream=0,
                name="one_shot_all_reduce_kernel", operation="all_reduce", algorithm="one-shot", group="tp", group_size=count,
                seq=step, **common,
            )  # fmt: skip
            builder.add("p2p", begin[rank] + 30_000, 4000, bytes=64, stream=1, peer=(rank + 1) % count, **common)
    return builder.build({"device": f"{count} x NVIDIA H200", "clock": "measured", "steps_from": "marks", **meta})


def many_events(n: int = 1_000_000, seed: int = 0, clock: str = "modelled") -> Trace:
    """Return `n` events in steps of 200: each step has kernels, a few copies on two streams, a wait and a mark."""
    rng, per_step = np.random.default_rng(seed), 200
    position = np.arange(n) % per_step
    kind, stream, size = np.zeros(n, np.uint8), np.zeros(n, np.int32), np.zeros(n, np.int64)
    special = {0: ("mark", -1, 0), 1: ("h2d", 0, 8), 2: ("h2d", 0, 8), 60: ("d2d", 0, 4096), 120: ("memset", 0, 512),
               198: ("d2h", 7, 8), 199: ("sync", 7, 0)}  # fmt: skip
    for at, (what, on, moved) in special.items():
        chosen = position == at
        kind[chosen], stream[chosen], size[chosen] = KINDS.index(what), on, moved
    dur, gap = rng.integers(1500, 9000, n), rng.integers(0, 1500, n)
    end = np.cumsum(dur + gap)
    start = end - dur
    marks = np.flatnonzero(position == 0)
    dur[marks] = np.append(start[marks[1:]], end[-1]) - start[marks]
    names = [f"kernel_{i}" for i in range(40)] + ["Memcpy", "decode"]
    lines = [f"decode/loop.py:{line}" for line in range(100, 130)]
    name = np.where(kind == 0, rng.integers(0, 40, n), np.where(kind == KINDS.index("mark"), 41, 40))
    columns = {
        "start_ns": start, "dur_ns": dur, "kind": kind, "bytes": size, "stream": stream,
        "device": np.where(np.isin(kind, [KINDS.index("mark"), KINDS.index("sync")]), -1, 0), "rank": np.zeros(n),
        "step": np.arange(n) // per_step, "cell": np.full(n, -1), "pinned": np.full(n, -1),
        "clock": np.full(n, clock == "modelled"), "name": name, "where": rng.integers(42, 72, n), "owner": np.full(n, -1),
        "address": np.full(n, -1), "requested": np.full(n, -1), "layer": position // 50 - 1,
    }  # fmt: skip
    typed = {column: np.asarray(values).astype(COLUMNS[column]) for column, values in columns.items()}
    return Trace(typed, names + lines, {"device": "virtual:h200", "clock": clock, "steps_from": "marks"})
