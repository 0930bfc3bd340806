"""Replay the golden programs on the virtual H200, and compare its trace with what CUPTI reported on a real one.

    python -m tests.golden.replay            a table with one row per program
    python -m tests.golden.replay sort_1d    one program in detail

Copies are compared by direction, bytes and count (but not by whether host memory is pinned: the first 25 programs pin only on
"cuda"), waits by count, and the peak of allocated bytes exactly. Kernel counts are shown, and expected to be close. The detail
view lists a program's allocations on the H200 in order: the bytes requested, negative for a free.
"""

from __future__ import annotations

import collections
import gc
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import toolkit as tk

HERE = Path(__file__).parent
DIRECTIONS = {"HtoD": "h2d", "DtoH": "d2h", "DtoD": "d2d"}
MOST_EVENTS = 400  # allocation events recorded per program
Copies = dict[str, dict[int, int]]  # direction -> bytes -> count


@dataclass(frozen=True)
class Seen:
    """The copies (by direction and size), kernels, stream waits, peak of allocated bytes, and value of a program."""

    copies: Copies
    kernels: int
    waits: int
    peak_bytes: int
    value: Any = None


@lru_cache
def measured(file: str) -> dict[str, Seen]:
    """Return the measurements in `h200.json` or `h200_more.json`, by program."""
    with open(HERE / file) as f:
        programs = json.load(f)["programs"]
    seen = {}
    for name, r in programs.items():
        copies: Copies = {kind: {} for kind in DIRECTIONS.values()}
        for row in r["copies"]:
            kind, size, count = DIRECTIONS[row[0]], row[1], row[-1]
            copies[kind][size] = copies[kind].get(size, 0) + count
        seen[name] = Seen(copies, r["kernels"], r["syncs"].get("cudaStreamSynchronize", 0), r["peak_allocated"], r["value"])
    return seen


@lru_cache
def allocations() -> dict[str, dict[str, Any]]:
    """Return the allocations of each program on an H200 after a warm-up, by program.

    "events" are the requested bytes in order, negative for a free; "peak" is the allocator's own; "cut" is True if only the
    first MOST_EVENTS events were recorded.
    """
    with open(HERE / "h200_allocs.json") as f:
        programs = json.load(f)["programs"]
    return {name: {**seen, "cut": len(seen["events"]) == MOST_EVENTS} for name, seen in programs.items()}


def peak_of(events: list[int]) -> int:
    """Return the peak of the allocated bytes, each block rounded up to 512 bytes."""
    held = most = 0
    for n_bytes in events:
        held += -(-n_bytes // 512) * 512 if n_bytes > 0 else n_bytes // 512 * 512
        most = max(most, held)
    return most


def replayed(program: Callable[[str], Any]) -> Seen:
    """Run a program on the virtual H200, once to warm up and once recorded, as it was measured."""
    gpu = tk.device("virtual:h200")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program("vgpu")
        gc.collect()
        base = gpu.memory().allocated_bytes
        gpu.reset_peak()
        with tk.record(gpu, lines=False) as trace:
            result = program("vgpu")
        peak = gpu.memory().peak_bytes - base
    copies: Copies = {}
    for kind in DIRECTIONS.values():
        sizes = trace["bytes"][trace.is_kind(kind)].tolist()
        copies[kind] = dict(collections.Counter(sizes))
    kernels = int(trace.is_kind("kernel").sum())
    waits = sum(name == "cudaStreamSynchronize" for name in trace.select(trace.is_kind("sync")).text("name"))
    value = result if isinstance(result, bool | int | float | list) else None
    return Seen(copies, kernels, waits, peak, value)


@lru_cache
def programs() -> dict[str, tuple[str, Callable[[str], Any]]]:
    """Return every golden program by name: (file of its measurement, program)."""
    from tests.golden import programs as first
    from tests.golden import programs_more as more

    gc.freeze()  # what is imported by now stays; collecting around each program needn't look at it
    found = {name: ("h200.json", program) for name, program in first.P.items()}
    return found | {name: ("h200_more.json", program) for name, program in more.PROGRAMS.items()}


def compare(name: str) -> tuple[Seen, Seen]:
    """Return (measured, replayed) of one program."""
    file, program = programs()[name]
    return measured(file)[name], replayed(program)


def differences(want: Seen, got: Seen) -> tuple[str, ...]:
    """Return which of h2d, d2h, d2d and waits differ in count or bytes."""
    differing = [kind for kind in DIRECTIONS.values() if want.copies[kind] != got.copies[kind]]
    return (*differing, "waits") if want.waits != got.waits else tuple(differing)


def _totals(copies: dict[int, int]) -> str:
    return f"{sum(copies.values())} ({sum(size * n for size, n in copies.items()):,} B)" if copies else "0"


def main(names: list[str]) -> None:
    """Print the table, or the named programs in detail."""
    table = []
    for name in names or programs():
        want = measured(programs()[name][0])[name]
        try:
            got = replayed(programs()[name][1])
        except Exception as error:
            print(f"{name:28} fails: {type(error).__name__}: {str(error)[:160]}")
            continue
        wrong = differences(want, got)
        table.append((name, want, got, wrong))
        peak = want.peak_bytes == got.peak_bytes
        verdict = "differs in " + ", ".join(wrong) if wrong else "equal"
        verdict += "" if peak else f", peak {got.peak_bytes:,}/{want.peak_bytes:,}"
        counts = "  ".join(f"{kind} {_totals(got.copies[kind])}" for kind in DIRECTIONS.values())
        print(f"{name:28} {counts}  kernels {got.kernels}/{want.kernels}  {verdict}")
        if names:
            print("   allocated there:", *allocations()[name]["events"])
        if names and (wrong or not peak):
            print(f"   measured {want}\n   replayed {got}")
    for file in ("h200.json", "h200_more.json"):
        rows = [row for row in table if programs()[row[0]][0] == file]
        exact = {kind: sum(kind not in wrong for *_, wrong in rows) for kind in (*DIRECTIONS.values(), "waits")}
        near = sorted(got.kernels / want.kernels for _, want, got, _ in rows if want.kernels)
        share = sum(0.8 <= x <= 1.25 for x in near) / max(len(near), 1)
        peaks = sum(want.peak_bytes == got.peak_bytes for _, want, got, _ in rows)
        print(f"{file}: {len(rows)} programs; exact: {exact}; kernels within 25 %: {share:.0%}; peak memory equal: {peaks}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
