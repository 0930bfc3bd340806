"""The table of where the time of a decode step goes, from the breakdowns of `python -m toolkit.bench.decode`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LEAST_SHARE = 0.01  # kernels that take less of every step are summed up
REST, WHOLE = "other kernels", "the whole step"


def kernel_table(record: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of the table, with three columns per context; no rows if the record has no breakdown.

    A kernel's time includes the gaps right before it, so the times add up to the step. The second column is the time that its
    bytes take at the read bandwidth, and the third one the difference. "-" stands for what the record doesn't have.
    """
    steps = {row["context"]: row["breakdown"] for row in record["rows"] if "kernels" in row.get("breakdown", {})}
    head = ["kernel", "launches"]
    for context in steps:
        head += [f"{context:,} tokens: µs", "at the bandwidth", "difference"]
    names = dict.fromkeys(kernel["name"] for step in steps.values() for kernel in step["kernels"])
    large = [name for name in names if any(_time_of([name], step) >= LEAST_SHARE * step["step_us"] for step in steps.values())]
    groups = {name: [name] for name in large} | {REST: [name for name in names if name not in large], WHOLE: list(names)}
    rate = record["read_bytes_per_s"]
    return head, [[name, *_cells(group, list(steps.values()), rate)] for name, group in groups.items() if group]


def _cells(names: Sequence[str], steps: Sequence[Mapping[str, Any]], rate: float | None) -> list[str]:
    counts = {sum(kernel["count"] for kernel in step["kernels"] if kernel["name"] in names) for step in steps}
    cells = [" or ".join(f"{count:,}" for count in sorted(counts))]
    for step in steps:
        time_us, sizes = _time_of(names, step), [one.get("bytes") for one in step["kernels"] if one["name"] in names]
        known = [size for size in sizes if size is not None]
        least_us = 1e6 * sum(known) / rate if known and rate else None
        cells += [f"{time_us:,.1f}", *(("-", "-") if least_us is None else (f"{least_us:,.1f}", f"{time_us - least_us:,.1f}"))]
    return cells


def _time_of(names: Sequence[str], step: Mapping[str, Any]) -> float:
    """Return the time of kernels in a step in µs, with the gaps before them if the record says whose they are."""
    return sum(kernel["us"] + kernel.get("gap_us", 0.0) for kernel in step["kernels"] if kernel["name"] in names)


def step_times(step: Mapping[str, Any]) -> str:
    """Return how long a recorded step took, and how long an unrecorded one takes if that differs."""
    took, alone_us = f"{step['step_us']:,.0f} µs", step.get("unrecorded_us", step["step_us"])
    alone = f"{alone_us:,.0f} µs"
    return f"{took}, of which {step['gap_us']:,.0f} µs without any kernel" + (
        f" ({alone} when nothing is recorded)" if alone != took else ""
    )
