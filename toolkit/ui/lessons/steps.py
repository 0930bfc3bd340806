"""Figures, tables and timelines of single decode steps, for the lessons on decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from toolkit.core.errors import ToolkitError
from toolkit.decode.run import Run
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.events import Trace
from toolkit.trace.opening import open_trace
from toolkit.ui.timeline.widget import Timeline

if TYPE_CHECKING:
    import pandas as pd

STEADY = 5  # graphs are captured before step 2; from step 5 on, all steps of a run are alike
STEP = 8
CHANGES = ("shorter", "about as long", "longer")


def counts_of_step(run: Run, step: int = 2) -> dict[str, int]:
    """Return the copies of one decode step of a run by direction, such as {"h2d": 2, "d2h": 1, "d2d": 0}.

    Step 0 is the prefill and step 1 may include warm-up; from step 2 on the loop is in its steady state.
    """
    table = run.copies().set_index("step")
    return {kind: int(table.loc[step, f"{kind}_count"]) for kind in ("h2d", "d2h", "d2d")}


def change(before: float, after: float, names: tuple[str, str, str] = CHANGES) -> str:
    """Return whether `after` is at least 10 % shorter or longer than `before`, in the words of `names`."""
    return names[0] if after < 0.9 * before else names[2] if after > 1.1 * before else names[1]


def step_facts(run: Run, step: int = STEP) -> dict[str, float]:
    """Return figures of one decode step, with times in µs and counts of kernels and copies.

    "step" is the time from its beginning on the host to the beginning of the next step. "GPU works" is the time in which at
    least one kernel of the step runs, and "GPU idle" is the rest of the step. "host waits" is the time in which the host waits
    for the GPU.
    """
    row, begin = run.copies().set_index("step").loc[step], _begins(run)
    kernels = run.trace.select(run.trace.is_kind("kernel") & (run.trace["step"] == step))
    order = np.argsort(kernels["start_ns"], kind="stable")
    start, end = kernels["start_ns"][order], (kernels["start_ns"] + kernels["dur_ns"])[order]
    before = np.maximum.accumulate(np.concatenate([start[:1], end[:-1]]))
    step_us, works_us = (begin[step + 1] - begin[step]) / 1e3, int(np.maximum(end - np.maximum(start, before), 0).sum()) / 1e3
    times = {
        "step, µs": step_us, "GPU works, µs": works_us, "GPU idle, µs": step_us - works_us,
        "host waits, µs": round(float(row["host_wait_us"]), 3),
    }  # fmt: skip
    counts = {kind.upper(): int(row[f"{kind}_count"]) for kind in COPY_KINDS}
    return {**{name: round(us, 1) for name, us in times.items()}, "kernels": int(row["kernels"]), **counts}


def step_table(*runs: Run, step: int = STEP) -> pd.DataFrame:
    """Return the figures of one decode step of each run, one row per run."""
    import pandas as pd

    return pd.DataFrame([step_facts(run, step) for run in runs], index=[run.strategy for run in runs])


def prefill_us(run: Run) -> float:
    """Return the time in µs from the beginning of the run to its first decode step."""
    begin = _begins(run)
    return (begin[1] - begin[0]) / 1e3


def steps_of(run: Run) -> int:
    """Return the number of decode steps that the device computed."""
    return sum(mark.name == "decode" for mark in run.trace.marks())


def timeline_of_step(run: Run | Trace, other: Run | Trace | None = None, first: int = STEP, last: int = STEP) -> Timeline:
    """Return the timeline of one decode step, or of the steps `first` to `last`, of one or two runs or shipped traces.

    Raises ToolkitError if a trace has none of these steps.
    """
    both = [one for one in (run, other) if one is not None]
    titles = [f"{one.meta['strategy']}, {one.meta['gpu']}" if isinstance(one, Trace) else one.strategy for one in both]
    traces = [one if isinstance(one, Trace) else one.trace for one in both]
    parts = [trace.select((trace["step"] >= first) & (trace["step"] <= last)) for trace in traces]
    for title, trace, part in zip(titles, traces, parts, strict=True):
        if not len(part):
            found = f"the trace of {title} has the steps {trace['step'].min()} to {trace['step'].max()}"
            raise ToolkitError(f"a timeline of the steps {first} to {last}", found, "Choose first= and last= among them")
    return Timeline(*parts, titles=tuple(titles))


def measured_table(*runs: Run, gpu: str = "h200", model: str = "qwen3") -> pd.DataFrame:
    """Return the time of a decode step of each run in µs, next to the times of its strategy on a real GPU.

    These come from the traces that ship with the package: "measured" is the mean without recording, and "recorded" the median
    of the steps in the trace.
    """
    import pandas as pd

    rows = []
    for run in runs:
        trace = open_trace(f"{gpu}/{model}/{run.strategy}")
        begins = np.array([mark.start_ns for mark in trace.marks() if mark.name == "decode" and mark.step >= STEADY])
        rows.append({
            "modelled, µs": step_facts(run)["step, µs"], "measured, µs": round(1e6 / trace.meta["tok_per_s"], 1),
            "recorded, µs": round(float(np.median(np.diff(begins))) / 1e3, 1),
        })  # fmt: skip
    return pd.DataFrame(rows, index=[run.strategy for run in runs])


def _begins(run: Run) -> dict[int, int]:
    """Return the time in ns at which each step began on the host, by its number."""
    return {mark.step: mark.start_ns for mark in run.trace.marks()}
