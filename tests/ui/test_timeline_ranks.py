"""Tests of a timeline of several ranks: headings, lines between the events of a collective, and the rank that came last."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from synthetic import decode_loop, ranks
from test_view import parse

from toolkit.core.errors import TraceError
from toolkit.trace.columns import COLUMNS, KINDS, NOT_KNOWN
from toolkit.trace.differences import description_of_ranks
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.opening import open_trace
from toolkit.ui.lessons.two_gpus import two_runs
from toolkit.ui.timeline import overview
from toolkit.ui.timeline.lanes import MAX_LANES, places_of
from toolkit.ui.timeline.ranks import MAX_LINKS
from toolkit.ui.timeline.track import Track
from toolkit.ui.timeline.view import Scene

NOTE = "The clocks of the ranks are aligned on the ends of 4 collectives."
CLOCKS = [{"rank": 0, "error_us": 0.0}, {"rank": 1, "error_us": 0.7}]


def scene(**options: object) -> Scene:
    return Scene([Track(ranks(notes=[NOTE], clocks=CLOCKS, **options), "job")])


def test_lanes_come_in_groups_of_one_rank_with_a_heading() -> None:
    meta = scene().meta()["tracks"][0]
    kinds = ["launch", "kernel", "collective", "p2p"]
    assert [(lane["rank"], lane["kind"]) for lane in meta["lanes"]] == [(r, k) for r in (0, 1) for k in kinds]
    assert [lane["within"] for lane in meta["lanes"]] == ["", "stream 0", "stream 0", "stream 1"] * 2
    assert [head["rank"] for head in meta["ranks"]] == [0, 1]
    assert "came last in 0 of 4 collectives · waited 204 µs" in meta["ranks"][0]["text"]
    assert meta["ranks"][1]["text"].endswith("clock error 0.7 µs")
    assert NOTE in meta["notes"]


def test_lanes_name_the_gpu_of_a_rank_only_if_it_has_several() -> None:
    trace = open_trace("2xh200/gemma4-31b/cuda-graph")  # rank 0 on GPU 0, rank 1 on GPU 1
    assert {lane["within"] for lane in Track(trace, "pair").meta["lanes"]} == {"", "stream 0", "stream 1"}
    builder = TraceBuilder()
    for rank, device in ((0, 0), (0, 1), (1, 1)):
        builder.add("kernel", 0, 1, stream=0, rank=rank, device=device, name="add")
    lanes = Track(builder.build({}), "job").meta["lanes"]
    assert [lane["place"] for lane in lanes] == ["rank 0, GPU 0, stream 0", "rank 0, GPU 1, stream 0", "rank 1, stream 0"]


def test_collectives_of_gloo_are_on_the_host() -> None:
    builder = TraceBuilder()
    builder.add("collective", 0, 5, device=-1, operation="all_reduce", algorithm="gloo")
    builder.add("kernel", 0, 5, stream=0)
    lanes = Track(builder.build({}), "job").meta["lanes"]
    assert [(lane["label"], lane["place"]) for lane in lanes] == [("collectives", "host"), ("kernels", "stream 0")]


def test_no_rank_is_the_last_one_where_all_came_at_the_same_time() -> None:
    even, late = two_runs()
    for trace, counts in ((even, (0, 0)), (late, (0, 14))):
        made = Scene([Track(trace, "job")])
        headings = [head["text"] for head in made.meta()["tracks"][0]["ranks"]]
        assert [f"came last in {n} of 64 collectives" in text for n, text in zip(counts, headings, strict=True)] == [True, True]
        assert trace.ranks().last_count.tolist() == list(counts)
        assert [(trace.collectives().last_rank == rank).sum() for rank in (0, 1)] == list(counts)
    (links,) = parse(Scene([Track(even, "job")]).first(None))["links"]
    assert {last for last, *_ in links} == {-1}


def test_a_trace_of_one_rank_has_neither_headings_nor_lines() -> None:
    alone = Scene([Track(decode_loop(), "run")])
    assert alone.meta()["tracks"][0]["ranks"] == []
    assert parse(alone.first(None))["links"] == [[]]


def test_the_sentence_names_the_rank_that_came_last_and_the_waits() -> None:
    assert "rank 1 came last" in scene().opening["sentence"]
    track = scene().tracks[0]
    said = description_of_ranks(track.trace, "job", 2, track.steps_table)
    told = "1 collective (10.5 KiB); rank 1 came last: rank 0 waited 201 µs for it"
    assert said == f"job takes 900 µs on 2 ranks; {told}"
    whole = description_of_ranks(track.trace, "job", None, track.steps_table)
    assert whole == "job: 4 collectives (42.0 KiB); rank 1 came last in 4 of them: rank 0 waited 204 µs for it"
    even = Scene([Track(ranks(late=0, delay=1000), "job")]).tracks[0]
    said = description_of_ranks(even.trace, "job", 2, even.steps_table)
    assert said.endswith("1 collective (10.5 KiB); all ranks arrived together")


def test_the_sentence_counts_only_collectives_for_which_others_waited() -> None:
    builder = TraceBuilder()
    for seq in range(4):
        for rank in range(4):
            begin, group = 100_000 * seq + 10_000 * (rank == 0 and seq == 2), "left" if rank < 2 else "right"
            builder.add("collective", begin, 50_000, stream=0, rank=rank, operation="all_reduce", group=group, seq=seq)
    track = Track(builder.build({}), "job")
    said = description_of_ranks(track.trace, "job", None, track.steps_table)
    assert said == "job: 8 collectives; rank 0 came last in 1 of them: rank 1 waited 10 µs for it"


def test_the_longest_wait_is_named_with_its_step() -> None:
    note = "Longest wait: rank 0 waited 201 µs for rank 1 (all_reduce, in step 2)."
    assert scene().tracks[0].notes()[-1] == note
    assert scene().meta()["tracks"][0]["notes"][-1] == note
    for track in (Track(ranks(late=0, delay=1000), "even"), Track(decode_loop(), "alone")):
        assert not any("Longest wait" in each for each in track.notes())
    trace = scene().tracks[0].trace
    columns = dict(trace.columns) | {"step": np.full_like(trace["step"], -1)}
    assert Track(Trace(columns, trace.strings, trace.meta), "job").notes()[-1].endswith("(all_reduce, outside of steps).")


def test_two_runs_of_several_ranks_are_compared() -> None:
    even, late = two_runs()
    said = Scene([Track(even, "even"), Track(late, "late")]).opening["sentence"]
    assert said.startswith("late takes 216 µs instead of 85.6 µs; waits 202 µs instead of 70.8 µs; same copies; same kernels; ")
    even_ones = "8 collectives (10.0 KiB); all ranks arrived together"
    late_ones = "8 collectives (10.0 KiB); rank 1 came last in 1 of them: rank 0 waited 131 µs for it"
    assert said.endswith(f"; even on 2 ranks: {even_ones}; late on 2 ranks: {late_ones}")
    said = Scene([Track(even, "even"), Track(even, "again")]).opening["sentence"]
    assert said == f"again: same copies; same kernels; both on 2 ranks: {even_ones}"


def test_bytes_that_are_not_known_are_left_out() -> None:
    even, _ = two_runs()
    unknown = Track(Trace({**even.columns, "bytes": np.zeros_like(even["bytes"])}, even.strings, even.meta), "a")
    assert Scene([unknown, unknown]).opening["sentence"].endswith("both on 2 ranks: 8 collectives; all ranks arrived together")


def test_one_gpu_is_compared_with_two() -> None:
    _, late = two_runs()
    said = Scene([Track(late.of_rank(0), "alone"), Track(late, "pair")]).opening["sentence"]
    assert said.startswith("pair: same copies; same kernels; pair on 2 ranks: 8 collectives")
    builder = TraceBuilder()  # too many ranks for a table of their collectives
    for rank in range(2000):
        builder.add("collective", rank, 1, step=4, rank=rank, operation="all_reduce", group="g", seq=rank)
    said = Scene([Track(builder.build({}), "many"), Track(late, "pair")]).opening["sentence"]
    assert said == description_of_ranks(late, "pair", 4, Track(late, "pair").steps_table)


def test_lines_join_the_events_of_each_collective() -> None:
    view = parse(scene().view(0, 3_000_000, 900))
    assert view["links"] == [
        [[1, [2, 50_000], [6, 51_000]], [1, [2, 1_050_000], [6, 1_051_000]], [1, [2, 2_050_000], [6, 2_251_000]]]
    ]
    assert parse(scene().view(2_060_000, 2_100_000, 900))["links"] == [[[1, [2, 2_050_000], [6, 2_251_000]]]]


def test_a_trace_with_thousands_of_ranks_takes_memory_in_proportion() -> None:
    builder = TraceBuilder()
    for rank in range(2000):
        builder.add("collective", rank, 1, rank=rank, operation="all_reduce", group="g", seq=rank)
    trace = builder.build({})
    with pytest.raises(TraceError, match="2,000 of them on 2,000 ranks"):
        trace.collectives()
    assert Track(trace, "job").links is None


def test_too_many_collectives_have_no_lines() -> None:
    many = scene(steps=MAX_LINKS + 1)
    low, high = many.bounds()
    assert parse(many.view(low, high, 900))["links"] == [[]]
    assert len(parse(many.view(low, high / 2, 900))["links"][0]) > 50


@pytest.mark.parametrize(
    ("rank", "waited"), [(0, "201 µs for rank 1, which came last"), (1, "not: it came last, and others waited up to 201 µs")]
)
def test_facts_of_a_collective(rank: int, waited: str) -> None:
    track = scene().tracks[0]
    trace = track.trace
    row = ((trace["kind"] == KINDS.index("collective")) & (trace["step"] == 2) & (trace["rank"] == rank)).nonzero()[0][0]
    facts = dict(overview.facts(track, int(row)))
    assert facts["operation"] == "all_reduce"
    assert (facts["algorithm"], facts["process group"], facts["number"]) == ("one-shot", "tp, 2 ranks", "2")
    assert (facts["rank"], facts["waited"]) == (str(rank), waited)


def test_a_peer_copy_names_its_other_end() -> None:
    track = scene().tracks[0]
    row = int((track.trace["kind"] == KINDS.index("p2p")).nonzero()[0][0])
    assert dict(overview.facts(track, row))["other end"] == "GPU 1"


def test_operations_are_found_and_sums_are_those_of_each_rank() -> None:
    made = scene()
    assert made.find("all_reduce", -1, 1)["count"] == made.find("one_shot", -1, 1)["count"] == 8
    sums = made.sums(0, 4_000_000)[0]
    assert [count for count, _, _ in sums] == [4] * 8
    assert [size for _, _, size in sums] == [0, 0, 43008, 256] * 2


def test_pictures_without_a_canvas_have_the_headings_too() -> None:
    made = scene()
    assert "came last in 4 of 4 collectives" in overview.svg(made)
    assert "collectives rank 1, stream 0: 4 42.0 KiB" in overview.text(made)
    sheet = overview.copies_sheet(made.tracks[0])
    assert sheet["columns"][:2] == ["step", "rank"]
    assert all(len(row) == len(sheet["columns"]) for row in sheet["rows"])


def test_a_trace_of_several_ranks_without_collectives_opens() -> None:
    trace = ranks()
    alone = Scene([Track(trace.select(trace["kind"] != KINDS.index("collective")), "job")])
    assert [head["text"] for head in alone.meta()["tracks"][0]["ranks"]] == ["rank 0", "rank 1"]


@pytest.mark.parametrize(("n_ranks", "devices", "streams"), [(8, 100, 6_000), (6_000, 100, 6_000)])
def test_many_ranks_devices_and_streams_need_memory_in_proportion_to_the_events(n_ranks, devices, streams) -> None:
    n = np.arange(6_000)
    columns = {name: np.full(len(n), NOT_KNOWN.get(name, 0)) for name in COLUMNS}
    trace = Trace(columns | {"rank": n % n_ranks, "device": n % devices, "stream": n % streams}, [], {})
    tracemalloc.start()
    try:
        if n_ranks > 16:
            with pytest.raises(TraceError, match=r"6,000 ranks with 6,000 lanes; it can show 4,096"):
                places_of(trace)
        else:
            assert len(places_of(trace)[0]) == 8 * 100 // 4 + MAX_LANES // 8
        assert tracemalloc.get_traced_memory()[1] < 1000 * len(n)
    finally:
        tracemalloc.stop()
