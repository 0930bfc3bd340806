"""Tests of the views of a trace: they agree with the trace, stay small, and are computed quickly."""

from __future__ import annotations

import json
import struct
from functools import partial

import numpy as np
import pytest
from synthetic import decode_loop, many_events

from tests.speed import is_quick
from toolkit.core.errors import RecorderError, ToolkitError
from toolkit.trace.columns import KINDS
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.ui.timeline.overview import copies_sheet, facts
from toolkit.ui.timeline.track import Track, named
from toolkit.ui.timeline.view import MODELLED, NO_TEXT, SEGMENT, Scene


def parse(blob: bytes) -> dict:
    """Decode a view like timeline.js does."""
    (size,) = struct.unpack_from("<I", blob)
    view, at = json.loads(blob[4 : 4 + size]), 4 + size
    n = sum(count for track in view["counts"] for count in track)
    for name, dtype in SEGMENT:
        view[name] = np.frombuffer(blob, dtype, n, at)
        at += n * np.dtype(dtype).itemsize
    assert at == len(blob)
    return view


@pytest.fixture(scope="module")
def million() -> Scene:
    return Scene([Track(many_events(), "big")])


def test_single_events_are_where_the_trace_says() -> None:
    trace = decode_loop()
    scene = Scene([Track(trace, "a")])
    low, high = scene.bounds()
    view = parse(scene.view(low, high, 1000, seq=7, vid="x"))
    assert (view["seq"], view["vid"], low, high) == (7, "x", 0, int((trace["start_ns"] + trace["dur_ns"]).max()))
    rows = view["row"]
    assert sorted(rows) == sorted(np.flatnonzero(trace["step"] * 0 + ~trace.is_kind("mark")))
    assert (view["count"] == 1).all()
    assert (view["kind"] == trace["kind"][rows] + MODELLED).all()
    assert view["bytes"].tolist() == trace["bytes"][rows].tolist()
    assert np.abs(view["x0"] / 16 - (trace["start_ns"][rows] / high * 1000)).max() <= 1 / 16
    assert np.abs(view["x1"] / 16 - ((trace["start_ns"] + trace["dur_ns"])[rows] / high * 1000)).max() <= 1 / 16
    assert [view["texts"][code][0] for code in view["text"]] == [trace.text("name")[row] for row in rows]
    assert [step[0] for step in view["steps"][0]] == list(range(6))
    assert view["steps"][0][0][3] == "prefill"


@pytest.mark.parametrize("share", [1.0, 0.37, 0.011, 0.0007])
def test_bins_conserve_counts_bytes_and_busy_time(million: Scene, share: float) -> None:
    trace = million.tracks[0].trace
    _, high = million.bounds()
    t0, t1 = high * 0.21, high * (0.21 + 0.7 * share)
    view = parse(million.view(t0, t1, 1117))
    start = trace["start_ns"] - million.tracks[0].start_ns  # the axis begins with the first event
    inside = (start >= t0) & (start < t1) & ~trace.is_kind("mark")
    for code in np.unique(view["kind"]):
        segment, mine = view["kind"] == code, inside & (trace["kind"] == code - MODELLED)
        single = (view["count"] == 1) & (start[view["row"]] < t0)  # began before the window
        assert view["count"][segment & ~single].sum() == mine.sum()
        dense = segment & (view["count"] > 1)
        if dense.sum() > 100:
            width = (view["x1"][segment] - view["x0"][segment].astype(float)) / 16 / 1117 * (t1 - t0)
            shown = (width * view["level"][segment] / 255).sum()
            real = trace["dur_ns"][mine].sum()
            assert real * 0.999 <= shown <= real * 1.001 + width.sum() / 255  # a level is rounded up by less than one


@pytest.mark.parametrize("share", [1.0, 0.3, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("width", [320, 1200, 4000, 99999])
def test_a_view_of_a_million_events_is_small_and_quick(million: Scene, share: float, width: int) -> None:
    _, high = million.bounds()
    view = partial(million.view, high * 0.4, high * (0.4 + 0.6 * share), width)
    assert len(view()) < 64_000
    assert is_quick(view, 0.05)  # 30 ms is the aim


def test_copies_stay_visible_among_a_million_kernels(million: Scene) -> None:
    view = parse(million.first(None))
    for kind in ("h2d", "d2h", "d2d"):
        segment = view["kind"] == KINDS.index(kind) + MODELLED
        assert segment.sum() > 250
        assert (view["level"][segment] >= 1).all()


def test_a_long_event_that_began_before_the_window_is_shown() -> None:
    builder = TraceBuilder()
    builder.add("kernel", 0, 1_000_000, stream=0, name="long")
    for i in range(20):
        builder.add("kernel", 10 + i * 100, 50, stream=0, name="short")
    view = parse(Scene([Track(builder.build({}), "a")]).view(500_000, 600_000, 100))
    assert [view["texts"][code][0] for code in view["text"]] == ["long"]
    assert (view["x0"].tolist(), view["x1"].tolist()) == ([0], [1600])


def test_overlapping_events_never_count_twice_as_busy() -> None:
    builder = TraceBuilder()
    for i in range(5000):
        builder.add("kernel", i * 10, 40, stream=0, name="k")
    view = parse(Scene([Track(builder.build({}), "a")]).view(0, 50_000, 500))
    assert view["level"].max() == 255
    assert view["count"].sum() == 5000


def test_lanes_by_device_and_stream_hosts_first() -> None:
    builder = TraceBuilder()
    for device in (1, 0):
        for stream in (7, 0):
            for kind in ("d2h", "kernel", "p2p"):
                builder.add(kind, 5, 1, stream=stream, device=device, bytes=4)
    builder.add("sync", 1, 1, device=-1, stream=7)
    builder.add("sync", 2, 1, device=0, stream=0)
    builder.add("mark", 0, 9, device=-1, name="warm-up")
    builder.add("alloc", 0, 0, bytes=512)
    lanes = Track(builder.build({}), "a").meta["lanes"]
    shown = [f"{lane['label']} {lane['place']}".strip() for lane in lanes]
    assert shown[:3] == ["host waits", "host marks", "kernels GPU 0, stream 0"]
    assert shown[-1] == "P2P GPU 1, stream 7"
    assert len(shown) == 2 + 12
    assert lanes[0]["count"] == 2


def test_hundreds_of_streams_are_gathered() -> None:
    builder = TraceBuilder()
    for stream in range(300):
        builder.add("kernel", stream * 10, 5, stream=stream)
        builder.add("h2d", stream * 10, 5, stream=stream, bytes=8)
    track = Track(builder.build({}), "a")
    assert len(track.lanes) <= 36
    assert sum(len(lane.rows) for lane in track.lanes) == 600
    assert any(lane["place"] == "other streams" for lane in track.meta["lanes"])


def test_unsorted_rows_of_a_foreign_reader_are_sorted() -> None:
    trace = decode_loop()
    shuffled = trace.select(np.random.default_rng(3).permutation(len(trace)))
    a, b = (parse(Scene([Track(t, "a")]).first(None)) for t in (trace, shuffled))
    assert a["x0"].tolist() == b["x0"].tolist()


def test_no_events() -> None:
    scene = Scene([Track(TraceBuilder().build({"device": "virtual:h200"}), "nothing")])
    view = parse(scene.first(None))
    assert view["counts"] == [[]]
    assert "No events" in scene.meta()["tracks"][0]["notes"][0]
    assert scene.find_step(0, 3) is None
    assert facts(scene.tracks[0], 0) == []


@pytest.mark.parametrize(
    ("meta", "note"), [({"sizes_only": True}, "Sizes only"), ({"steps_from": "guessed"}, "inferred"), ({}, "modelled")]
)
def test_notes_say_what_a_reader_must_know(meta: dict, note: str) -> None:
    assert any(note in text for text in Track(decode_loop(**meta), "a").notes())
    assert not Track(decode_loop(clock="measured"), "a").notes()


def test_two_clocks_in_one_trace_are_called_mixed() -> None:
    builder = TraceBuilder()
    builder.add("kernel", 0, 5, stream=0)
    builder.add("kernel", 9, 5, stream=0, clock="modelled")
    track = Track(builder.build({}), "a")
    assert track.clock == "mixed"
    assert parse(Scene([track]).first(None))["kind"].tolist() == [0, MODELLED]


def test_two_tracks_share_one_axis_aligned_at_start_or_at_a_step() -> None:
    slow, fast = decode_loop(), decode_loop(h2d=0, scale=0.5)
    late = Trace({**fast.columns, "start_ns": fast["start_ns"] + 10**12}, fast.strings, fast.meta)
    scene = Scene([Track(slow, "a"), Track(late, "b")])
    assert scene.bounds()[0] == 0
    assert scene.find_step(0, 3)[1] > scene.find_step(1, 3)[1] > 0
    assert [scene.find_step(track, 3, align=3)[1] for track in (0, 1)] == [0, 0]
    assert scene.bounds(3)[0] < 0
    view = parse(scene.view(*scene.bounds(3), 800, 3))
    assert len(view["counts"]) == 2


def test_steps_by_number_and_by_place() -> None:
    scene = Scene([Track(decode_loop(), "a")])
    number, start, end = scene.find_step(0, 2)
    assert number == 2
    assert scene.find_step(0, near=start + 5, move=1)[0] == 3
    assert scene.find_step(0, near=start + 5, move=-1)[0] == 1
    assert scene.find_step(0, near=-99, move=-1)[0] == 0
    assert scene.find_step(0, 999)[0] == 5  # the nearest there is
    assert end > start


def test_moving_by_steps_leaps_over_missing_numbers() -> None:
    trace = decode_loop()
    scene = Scene([Track(trace.select((trace["step"] < 2) | (trace["step"] == 5)), "a")])
    assert [scene.find_step(0, step, move=1)[0] for step in (0, 1, 3, 5)] == [1, 5, 5, 5]
    assert [scene.find_step(0, step, move=-1)[0] for step in (5, 4, 1, 0)] == [1, 1, 0, 0]


def test_search_visits_every_event_that_begins_at_the_same_time() -> None:
    builder = TraceBuilder()
    for stream in range(3):
        builder.add("kernel", 100, 10, stream=stream, name="matmul")
    builder.add("kernel", 500, 10, stream=0, name="matmul")
    scene = Scene([Track(builder.build({}), "a")])
    for move, numbers in ((1, [1, 2, 3, 4, 1]), (-1, [4, 3, 2, 1, 4])):
        hit, rows, seen = None, [], []
        for _ in numbers:
            hit = scene.find("matmul", -1, move, last=hit and hit["number"])
            seen.append(hit["number"])
            rows.append(hit["row"])
        assert seen == numbers
        assert len(set(rows)) == 4


def test_the_kind_of_a_copy_finds_all_copies_of_it() -> None:
    builder = TraceBuilder()
    builder.add("h2d", 100, 10, stream=0, name="a plain copy")
    builder.add("h2d", 200, 10, stream=1)
    builder.add("d2h", 300, 10, stream=0, name="not an h2d")
    builder.add("kernel", 400, 10, stream=0, name="matmul")
    scene = Scene([Track(builder.build({}), "a")])
    assert [scene.find(text, -1, 1)["count"] for text in ("H2D", "d2h")] == [3, 1]
    assert (scene.find("d2d", -1, 1), scene.find("kernel", -1, 1)) == (None, None)


def test_layers_are_found_and_shown() -> None:
    builder = TraceBuilder()
    for i, layer in enumerate((-1, 1, 1, 11, 2)):
        builder.add("kernel", 100 * i, 10, stream=0, name="matmul", layer=layer)
    builder.add("kernel", 900, 10, stream=0, name="the last of Layer 1")
    scene = Scene([Track(builder.build({}), "a")])
    assert [scene.find(text, -1, 1)["count"] for text in ("layer 1", "Layer 11", "layer 2")] == [3, 1, 1]
    assert [scene.find(text, -1, 1) for text in ("layer -1", "layer 12", "layer 999999")] == [None] * 3
    assert [dict(facts(scene.tracks[0], row)).get("layer") for row in range(4)] == [None, "1", "1", "11"]


def test_steps_without_marks_come_from_the_events() -> None:
    trace = decode_loop()
    bare = trace.select(~trace.is_kind("mark"))
    assert Track(bare, "a").steps[:, 0].tolist() == list(range(6))


def test_many_steps_are_thinned_and_say_so(million: Scene) -> None:
    view = parse(million.first(None))
    assert view["every"] == [100]
    assert len(view["steps"][0]) <= 96
    assert all(step[0] % 100 == 0 for step in view["steps"][0])


def test_facts_name_bytes_line_and_clock() -> None:
    trace = decode_loop()
    row = int(np.flatnonzero(trace.is_kind("d2d"))[0])
    found = dict(map(tuple, facts(Track(trace, "a"), row)))
    assert found["bytes"] == "2.00 MiB (2,097,152 B)"
    assert found["caused by"] == "models/cache.py:31"
    assert found["duration"] == "900 ns, modelled"
    assert found["kind"] == "d2d (within the device)"
    d2h = int(np.flatnonzero(trace.is_kind("d2h"))[0])
    assert dict(map(tuple, facts(Track(trace, "a"), d2h)))["host memory"] == "pinned"


def test_facts_say_no_bytes_where_they_are_not_known() -> None:
    builder = TraceBuilder()
    for kind, size in (("collective", 0), ("d2d", 0), ("kernel", 0), ("h2d", 8)):
        builder.add(kind, 0, 5, bytes=size)
    track = Track(builder.build({}), "a")
    assert [dict(map(tuple, facts(track, row))).get("bytes") for row in range(4)] == [None, None, None, "8 B"]


def test_thousands_of_names_do_not_grow_a_view() -> None:
    builder = TraceBuilder()
    for i in range(1500):
        builder.add("kernel", i * 10, 9, stream=0, name=f"kernel_{i}_" + "x" * 300, where=f"file{i}.py:1")
    blob = Scene([Track(builder.build({}), "a")]).view(0, 15_000, 1600)
    assert len(blob) < 64_000
    assert (parse(blob)["text"] == NO_TEXT).any()


def test_copies_sheet_is_text_and_names_the_clock() -> None:
    sheet = copies_sheet(Track(decode_loop(), "a"), limit=3)
    assert sheet["columns"][0] == "step"
    assert sheet["columns"][-1] == "host wait (modelled)"
    assert sheet["rows"][1][:6] == ["1", "12", "not recorded", "2", "16 B", "1"]
    assert sheet["note"] == "the first 3 of 6 steps"


def test_copies_sheet_has_copies_between_two_gpus() -> None:
    builder = TraceBuilder()
    builder.add("p2p", 0, 5, bytes=2048, step=1)
    sheet = copies_sheet(Track(builder.build({}), "a"))
    row = dict(zip(sheet["columns"], sheet["rows"][0], strict=True))
    assert (row["P2P copies"], row["P2P bytes"]) == ("1", "2.00 KiB")


def test_takes_traces_and_runs_alone() -> None:
    class Run:
        trace, title = decode_loop(), "roundtrip"

    assert named(Run())[0] == "roundtrip"
    with pytest.raises(ToolkitError, match="a list"):
        named([1])
    with pytest.raises(RecorderError):
        Track(named(Trace.pending())[1], "a")
