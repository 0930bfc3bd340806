"""Tests of the step that a timeline opens on, and of the sentence above it."""

from __future__ import annotations

import pytest

from toolkit.trace.differences import brief_time, description, difference, step_facts, steps_of, typical_step
from toolkit.trace.events import Trace, TraceBuilder


def loop(kernels=("mm", "norm"), h2d=2, wait=17_000, durations=(90, 60, 50, 50, 52), launches=True, d2h=8) -> Trace:
    """Return a prefill and decode steps of the given durations in µs."""
    builder, now = TraceBuilder(), 0
    for step, took in enumerate(durations):
        for i, name in enumerate(kernels):
            builder.add("kernel", now + i, 1, stream=0, step=step, name=name)
            if launches:
                builder.add("launch", now + i, 1, device=-1, step=step, name="cudaLaunchKernel")
        for _ in range(h2d):
            builder.add("h2d", now, 1, bytes=8, step=step)
        builder.add("d2h", now, 1, bytes=d2h, step=step)
        builder.add("sync", now, wait, step=step)
        builder.add("mark", now, 1000 * took, device=-1, step=step, name="decode" if step else "prefill")
        now += 1000 * took
    return builder.build({})


def facts(trace: Trace, name: str = "b", step: int = 2):
    return step_facts(trace, name, step, steps_of(trace))


def test_the_typical_step_has_the_median_duration_and_is_common_to_all_traces():
    assert typical_step([steps_of(loop())]) == 3
    assert typical_step([steps_of(loop()), steps_of(loop(durations=(9, 50, 50)))]) == 2
    assert typical_step([steps_of(loop()), steps_of(TraceBuilder().build({}))]) is None


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"h2d": 0, "wait": 0}, "b waits 0 µs instead of 17 µs; 2 H2D copies fewer; same kernels"),
        ({"d2h": 3072}, "b: D2H of 3.00 KiB instead of 8 B; same kernels"),
        ({}, "b: same copies; same kernels"),
        ({"kernels": ("mm", "norm", "add_")}, "b runs 1 kernel more (add_); same copies"),
        (
            {"kernels": ("mm", "void at::norm2<float>(int)")},
            "b runs 1 other kernel of 2 (norm2 instead of norm); same copies",
        ),
        ({"durations": (90, 60, 25), "launches": False}, "b takes 25 µs instead of 50 µs; same copies; same kernels"),
    ],
)
def test_one_sentence_says_what_differs_and_names_kernels_first(other, said):
    assert difference(facts(loop(), "a"), facts(loop(**other))) == said


def test_a_step_alone_is_described():
    assert description(facts(loop())) == (
        "b takes 50 µs; waits 17 µs; 2 kernels in 2 launches; 2 H2D copies (16 B), 1 D2H copy (8 B)"
    )


def test_copies_between_two_gpus_are_told():
    one, two = TraceBuilder(), TraceBuilder()
    for builder, kinds in ((one, ("kernel",)), (two, ("kernel", "p2p"))):
        for kind in kinds:
            builder.add(kind, 5, 5, bytes=2048, step=2)
    assert description(facts(two.build({}))) == "b takes 5 ns; waits 0 µs; 1 kernel; 1 P2P copy (2.00 KiB)"
    assert difference(facts(one.build({}), "a"), facts(two.build({}))) == "b: 1 P2P copy more; same kernels"


def test_graphs_are_told_by_their_launches():
    kernels = tuple("abcdefgh")
    graph = loop(kernels)
    one = graph.select(~graph.is_kind("launch") | (graph["start_ns"] % 1000 == 0))
    assert difference(facts(loop(kernels)), facts(one)) == "b: same copies; 1 launch instead of 8; same kernels"


def test_times_have_no_zeros_at_the_end():
    assert [brief_time(ns) for ns in (0, 744, 4500, 17_000, 526_000, 5_000_000)] == [
        "0 µs", "744 ns", "4.5 µs", "17 µs", "526 µs", "5 ms",
    ]  # fmt: skip


def test_of_a_step_number_that_comes_twice_the_first_step_counts():
    """As with two runs in one recording. The timeline shows the first one, too."""
    once, twice, kinds = loop(), TraceBuilder(), ("kernel", "launch", "h2d", "d2h", "sync", "mark")
    for later in (0, 400_000):
        for i in range(len(once)):
            kind = next(kind for kind in kinds if once.is_kind(kind)[i])
            numbers = {name: int(once[name][i]) for name in ("bytes", "stream", "device", "step")}
            twice.add(kind, int(once["start_ns"][i]) + later, int(once["dur_ns"][i]), name=once.text("name")[i], **numbers)
    assert facts(twice.build({})) == facts(once)
    assert typical_step([steps_of(twice.build({}))]) == 3


def test_a_step_that_overlaps_with_the_next_takes_the_time_until_that_begins():
    """The host queues the copy of a batch while the kernel of the batch before is running."""
    builder = TraceBuilder()
    for step in range(4):
        builder.add("h2d", 10_000 * step, 6_000, bytes=8, step=step)
        builder.add("kernel", 10_000 * step + 6_000, 7_000, step=step, name="mm")
    trace = builder.build({})
    assert [facts(trace, step=step).elapsed_ns for step in range(4)] == [10_000, 10_000, 10_000, 13_000]


def test_a_timeline_opens_on_a_decode_step_even_if_there_is_only_one():
    assert typical_step([steps_of(loop(durations=(90, 50)))]) == 1
