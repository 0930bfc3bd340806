"""Lesson 10, "Pinned memory and streams by hand": its questions, and tables of copies and the kernels that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from toolkit.core.errors import ToolkitError
from toolkit.gpu.device import Device
from toolkit.trace.events import Trace
from toolkit.ui.lessons.lesson import Lesson, Question
from toolkit.ui.timeline.widget import Timeline

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
WAITS, RETURNS = "waits", "returns at once"

QUESTIONS = {
    "three lines": Question(
        hint="Two of the three lines wait. Which argument allows the host to go on before the data has arrived?",
        why="Without `non_blocking`, `.to` always waits, from pinned memory too: pinned memory is only faster. With "
        "`non_blocking=True`, the host goes on. From pageable memory, `non_blocking` is no promise: PyTorch doesn't wait, "
        "but the driver of a real GPU first has to copy the data to pinned memory of its own.",
        answer=f'{{"pageable": "{WAITS}", "pinned": "{WAITS}", "pinned, non_blocking": "{RETURNS}"}}',
        choices=(WAITS, RETURNS),
    ),
    "second wait": Question(
        hint="A stream is a queue. What was queued before the second copy, and hasn't ended when the copy is queued?",
        why="The copy itself, and before it the kernel of the first batch: a stream runs one after the other. So the host "
        "waits for everything that it queued before, as with `.item()` in lesson 1.",
        answer='{"wait, µs": copy_us + kernel_us}',
        within=0.1,
    ),
    "no waits": Question(
        hint="Two changes: each tensor has a method `pin_memory()`, and `.to` takes `non_blocking=True`.",
        why="The host queues everything and is free for other work. But copies and kernels still take turns, because they "
        "are in one queue.",
        answer="""\
memory = [batch.pin_memory() for batch in batches]


def no_waits(memory):
    results = []
    for batch in memory:
        x = batch.to(gpu.torch, non_blocking=True)
        results.append(x @ weight)
    return results""",
    ),
    "two streams": Question(
        hint="In one stream, a batch takes its copy and then its kernel. If both run at the same time, the slower one sets "
        "the pace.",
        why="One stream: copy plus kernel. Two streams: the longer of the two. The rest are the gaps between kernels.",
        answer='{"one stream, µs": copy_us + kernel_us, "two streams, µs": max(copy_us, kernel_us)}',
        within=0.1,
    ),
    "too early": Question(
        hint="Compare the columns `copy ends` and `kernel begins`, row by row.",
        why="Nothing tells the kernel's stream to wait for the copy's stream. The later kernels are right by luck: the "
        "kernels take longer than the copies, so the copies get ahead. On a faster GPU or with larger batches, they "
        "may be wrong.",
        answer='{"kernels": int((order["kernel begins"] < order["copy ends"]).sum())}',
    ),
    "ready": Question(
        hint="After a copy, `ready = copies.record_event()` marks its end. `cuda.current_stream()` has a method that waits "
        "for an event. Which line must come after it? (Inside of `with cuda.stream(copies):`, the current stream is `copies`, "
        "which needn't wait for itself.)",
        why="`wait_event` makes one stream wait for another one. The host doesn't wait: it only queues the order to wait.",
        answer="""\
def ordered(memory):
    copies, results = cuda.Stream(), []
    for batch, buffer in zip(memory, buffers, strict=True):
        with cuda.stream(copies):
            buffer.copy_(batch, non_blocking=True)
            ready = copies.record_event()
        cuda.current_stream().wait_event(ready)
        results.append(buffer @ weight)
    return results""",
    ),
    "two buffers": Question(
        hint="Keep the event that the kernel of each batch records when it ends, as `done`. Before the copy of batch n, the "
        "stream `copies` must wait for the event of batch n - 2. (That of batch n - 1 comes too late: its kernel reads the "
        "other buffer, and should run during the copy.)",
        why="Each buffer needs two events: the kernel waits until the buffer is full, and the next copy until it is free. "
        "That is double buffering, and it works in the same way for every queue of reused memory.",
        answer="""\
def two_buffers(memory):
    copies, results, done = cuda.Stream(), [], []
    for n, batch in enumerate(memory):
        buffer = buffers[n % 2]
        if n >= 2:
            copies.wait_event(done[n - 2])
        with cuda.stream(copies):
            buffer.copy_(batch, non_blocking=True)
            ready = copies.record_event()
        cuda.current_stream().wait_event(ready)
        results.append(buffer @ weight)
        done.append(cuda.current_stream().record_event())
    return results""",
    ),
    "read": Question(
        hint="`gpu.sync()` waits for everything, also for the long work that was queued later. An event has a method "
        "`synchronize()`.",
        why="`copied.synchronize()` waits until the copy has ended, and for nothing that was queued after it. Before that, "
        "the host may read a buffer into which nothing was copied yet.",
        answer="""\
def read(result):
    host = result.to("cpu", non_blocking=True)
    copied = cuda.Event()
    copied.record()
    later = long_work()
    copied.synchronize()
    return host, copied.query(), later.query()""",
    ),
}

lesson = Lesson(
    "copies_by_hand",
    "Pinned memory, streams and non_blocking by hand",
    minutes=45,
    goals=(
        "say what a copy from pageable memory waits for, and what pinned memory changes",
        "run copies and kernels at the same time in two streams",
        "find a race in a timeline, although the results are right",
        "order two streams with events, without making the host wait",
    ),
    questions=QUESTIONS,
)


def run(gpu: Device, work: Callable[..., T], *args: object, **options: object) -> tuple[Trace, T]:
    """Wait until the GPU is idle, record `work(*args, **options)`, and return the trace and the result.

    The trace has no steps. Inferred ones would not be the batches, where kernels and copies overlap.
    """
    gpu.sync()
    with gpu.record() as trace:
        result = work(*args, **options)
    columns = {**trace.columns, "step": np.full_like(trace["step"], -1)}
    return Trace(columns, trace.strings, {**trace.meta, "steps_from": None}), result


def order_of(trace: Trace) -> pd.DataFrame:
    """Return one row per batch with the times in µs of its copy and of the kernel that reads it.

    The n-th H2D copy belongs to the n-th kernel. "arrived" is the percentage of the copy's bytes that are on the GPU when the
    kernel begins, if a copy proceeds at a constant rate. Raises ToolkitError if there are more copies than kernels, or fewer.
    """
    import pandas as pd

    times = {}
    first = trace["start_ns"].min()  # where the timeline begins
    for kind in ("h2d", "kernel"):
        rows = trace.select(trace.is_kind(kind))
        begins = np.sort(rows["start_ns"]) - first
        ends = np.sort(rows["start_ns"] + rows["dur_ns"]) - first
        times[kind] = (begins, ends)
    (copy, copied), (begin, end) = times["h2d"], times["kernel"]
    if len(copy) != len(begin):
        found = f"the trace has {len(copy)} H2D copies and {len(begin)} kernels"
        raise ToolkitError("a copy and a kernel for each batch", found, "Copy each batch once, and multiply it once")
    columns = {"copy begins": copy, "copy ends": copied, "kernel begins": begin, "kernel ends": end}
    table = pd.DataFrame({name: np.round(ns / 1e3, 1) for name, ns in columns.items()})
    table["arrived, %"] = (100 * np.clip((begin - copy) / (copied - copy), 0, 1)).round().astype(int)
    return table.rename_axis("batch")


def typical_us(order: pd.DataFrame) -> tuple[float, float]:
    """Return the median time in µs of a copy and of a kernel."""
    return (
        float((order["copy ends"] - order["copy begins"]).median()),
        float((order["kernel ends"] - order["kernel begins"]).median()),
    )


def side_by_side(one_stream: Trace, two_streams: Trace) -> Timeline:
    """Return the timelines of both traces on one time axis."""
    return Timeline(one_stream, two_streams, titles=("the loop in one stream", "the loop in two streams"))


def early_kernels(order: pd.DataFrame) -> int:
    """Return how many kernels begin before their batch has arrived."""
    return int((order["kernel begins"] < order["copy ends"]).sum())


def early_copies(order: pd.DataFrame, buffers: int = 2) -> int:
    """Return how many copies begin before the kernel that reads their buffer has ended, with `buffers` buffers in turn."""
    return int((order["copy begins"].to_numpy()[buffers:] < order["kernel ends"].to_numpy()[:-buffers]).sum())


def per_batch_us(order: pd.DataFrame) -> float:
    """Return the time in µs from one kernel to the next, the median over the batches."""
    return float(np.median(np.diff(order["kernel begins"])))


def waits_in(trace: Trace) -> int:
    """Return how many times the host waited."""
    return int(trace.is_kind("sync").sum())
