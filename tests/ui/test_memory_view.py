"""Tests of memory views: peaks are kept at every zoom level, bands add up, and a moment lists the live blocks."""

from __future__ import annotations

import itertools
import time
from functools import partial

import numpy as np
import pytest
from memory_events import GIB, many_events, recording, small

from tests.speed import quickest, within
from toolkit.core.errors import UnknownNameError
from toolkit.trace.ledger import BY, Ledger
from toolkit.ui.memory.view import AXES, BEFORE, REST, MemoryView

RANGES = ((0.0, 1.0), (0.13, 0.9), (0.4, 0.41), (0.4, 0.40002), (-0.3, 0.2), (0.8, 1.5))


@pytest.fixture(scope="module")
def many() -> MemoryView:
    return MemoryView(Ledger(many_events(40_000)))


def slow_columns(view: MemoryView, x0: float, x1: float, width: int, axis: str) -> list[int]:
    """Compute the peak bytes in each pixel with a simple loop."""
    begins = np.arange(len(view.held)) if axis == "events" else view.times
    edges, found = np.linspace(x0, x1, width + 1), []
    for low, high in itertools.pairwise(edges):
        inside = [int(view.held[max(int(np.sum(begins <= low)) - 1, 0)])]
        inside += view.held[(begins >= low) & (begins < high)].tolist()
        found.append(max(inside))
    return found


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("by", BY)
def test_bands_add_up_and_the_tallest_column_is_the_peak(many: MemoryView, axis: str, by: str) -> None:
    view = many.regrouped(by)
    low, high = view.bounds(axis)
    for a, b in RANGES:
        columns = view.columns(low + a * (high - low), low + b * (high - low), 777, axis)
        assert (columns.bands.sum(0) == columns.total).all()
        assert (columns.bands >= 0).all()
        if a <= 0 and b >= 1:
            assert columns.total.max() == view.ledger.peak_bytes
            assert columns.position[columns.total.argmax()] == view.ledger.peak


@pytest.mark.parametrize("width", [1, 2, 3, 17, 500, 4000])
@pytest.mark.parametrize("axis", AXES)
def test_every_width_keeps_the_peak(many: MemoryView, axis: str, width: int) -> None:
    assert many.columns(*many.bounds(axis), width, axis).total.max() == many.ledger.peak_bytes


@pytest.mark.parametrize("axis", AXES)
def test_columns_are_the_highest_moments_of_their_pixels(axis: str) -> None:
    view = MemoryView(Ledger(many_events(600)))
    low, high = view.bounds(axis)
    for a, b in RANGES:
        x0, x1 = low + a * (high - low), low + b * (high - low)
        assert view.columns(x0, x1, 90, axis).total.tolist() == slow_columns(view, x0, x1, 90, axis)


def test_a_pixel_without_events_has_what_was_held_before_it() -> None:
    view = small().ledger
    columns = MemoryView(view).columns(0.0, 4.0, 8, "events")
    assert (columns.total // GIB).tolist() == [1, 1, 2, 2, 5, 5, 2, 2]
    assert columns.position.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_what_was_held_before_and_by_nobody_is_a_band_of_its_own() -> None:
    view = MemoryView(small(where=None).ledger)
    assert [(band.name, band.role, band.at_peak_bytes // GIB) for band in view.bands] == [
        (BEFORE, "before", 1), ("(no variable)", "group", 4)
    ]  # fmt: skip
    owned = MemoryView(small(owner="model").ledger)
    assert [band.name for band in owned.bands] == ["model"]


def test_the_rest_is_one_band() -> None:
    view = MemoryView(Ledger(many_events(20_000)), "line", most=5)
    assert len(view.bands) == 6
    assert [band.role for band in view.bands].count("rest") == 1
    assert {band.name for band in view.bands} >= {REST}
    assert sum(band.at_peak_bytes for band in view.bands) == view.ledger.peak_bytes


def test_owners_are_cut_to_the_variables_that_hold_them() -> None:
    rows = [("alloc", i, 512) for i in range(40)]
    owners = [f"model.layers.{i}.weight" for i in range(20)] + [f"losses[{i}] (its graph: Mul)" for i in range(19)]
    owners.append("big in boom() (the traceback of ValueError)")
    trace = recording(*rows)
    codes = {name: i + len(trace.strings) for i, name in enumerate(owners)}
    columns = {**trace.columns, "owner": np.array([codes[name] for name in owners], np.int32)}
    view = MemoryView(Ledger(type(trace)(columns, [*trace.strings, *owners], trace.meta)))
    assert {band.name for band in view.bands} == {"model.layers", "losses", "the traceback of ValueError"} or {
        band.name for band in view.bands
    } == {"model", "losses", "the traceback of ValueError"}
    rows_at = view.at(39).rows
    assert sum(row.blocks for row in rows_at) == 40
    assert {row.owner for row in rows_at if row.blocks == 1} == {owners[-1]}  # one block keeps its whole name


def test_a_moment_lists_the_largest_and_sums_the_rest(many: MemoryView) -> None:
    for position in (many.ledger.peak, 0, 12_345, len(many.ledger.rows) - 1, -5, 10**9):
        found = many.at(position)
        assert sum(row.bytes for row in found.rows) + found.rest_bytes == found.total_bytes
        assert found.total_bytes == many.ledger.held[found.position] if found.position >= 0 else True
        assert [row.bytes for row in found.rows] == sorted((row.bytes for row in found.rows), reverse=True)
        assert len(found.rows) <= 20
    source = MemoryView(small().ledger).at(2).rows[0]
    assert (source.code, source.place) == ("x = f()", "cell 1 line 1")
    through = MemoryView(Ledger(recording(("alloc", 1, 512), where="cell 2:3 > cell 1:1"))).at(0).rows[0]
    assert (through.code, through.place) == ("", "cell 2 line 3, through x = f() in cell 1 line 1")


def test_nothing_allocated() -> None:
    for trace in (recording(), recording(("alloc", 1, 512), opening=1), recording(("segment_alloc", 1, 2 << 20))):
        for by in BY:
            view = MemoryView(Ledger(trace), by)
            for axis in AXES:
                columns = view.columns(*view.bounds(axis), 50, axis)
                assert (columns.total == view.ledger.baseline_bytes).all()
                assert (columns.bands.sum(0) == columns.total).all()
            view.at(-1)
            view.moments(100)


def test_frees_of_what_nobody_saw_allocated_stay_in_the_sum() -> None:
    view = MemoryView(Ledger(recording(("alloc", 1, 1024), ("free", 9, 512), ("alloc", 2, 512))))
    columns = view.columns(0, 4, 4, "events")
    assert columns.total.tolist() == [0, 1024, 512, 1024]
    assert columns.bands.sum(0).tolist() == columns.total.tolist()


def test_a_trace_without_addresses() -> None:
    view = MemoryView(small(address=False).ledger)
    assert view.columns(*view.bounds("events"), 40, "events").total.max() == 5 * GIB
    assert view.at(view.ledger.peak).total_bytes == 5 * GIB


def test_the_axis_is_of_events_where_time_is_uneven() -> None:
    rows = [(kind, i, 512) for i in range(300) for kind in ("alloc", "free")]
    even = recording(*rows)
    assert MemoryView(Ledger(even)).axis == "time"
    late = {**even.columns, "start_ns": np.where(np.arange(600) < 300, even["start_ns"], even["start_ns"] + 10**9)}
    assert MemoryView(Ledger(type(even)(late, even.strings, even.meta))).axis == "events"


def test_reserved_memory_is_what_it_was_at_each_moment() -> None:
    rows = [("segment_alloc", 0, 2 << 20), ("alloc", 1, 1 << 20), ("segment_alloc", 9, 20 << 20), ("alloc", 9, 18 << 20)]
    view = MemoryView(Ledger(recording(*rows)))
    assert (view.columns(0, 3, 3, "events").reserved >> 20).tolist() == [0, *(view.ledger.reserved >> 20).tolist()]
    assert view.ledger.reserved[-1] == 22 << 20
    assert view.knows_reserved


def test_failed_allocations_are_marked_where_they_happened() -> None:
    view = MemoryView(Ledger(recording(("alloc", 1, 512), ("oom", -1, 4 * GIB), ("alloc", 2, 512))))
    assert view.shortages == [(0, 4 * GIB)]


def test_steps_and_cells_divide_and_are_thinned(many: MemoryView) -> None:
    what, states, _ = many.divided
    assert (what, len(states)) == ("step", 100)
    marks = many.marks(*many.bounds("events"), "events")
    assert [number for _, number in marks] == list(range(0, 100, 2))
    assert len(many.marks(0, 2000, "events")) == 5


def test_moments_keep_every_peak_of_a_coarser_picture(many: MemoryView) -> None:
    found = many.moments(2000)
    assert len(found.position) <= 2001
    assert (np.diff(found.position) > 0).all()
    assert found.total.max() == many.ledger.peak_bytes
    assert (found.bands.sum(0) == found.total).all()
    few = MemoryView(small().ledger)
    assert few.moments(2000).position.tolist() == [0, 1, 2, 3]


def test_unknown_names_are_refused(many: MemoryView) -> None:
    with pytest.raises(UnknownNameError):
        many.regrouped("color")
    with pytest.raises(UnknownNameError):
        many.bounds("place")


def test_two_million_events_are_quick(capsys: pytest.CaptureFixture[str]) -> None:
    trace = many_events()
    began = time.thread_time()
    view = MemoryView(Ledger(trace))
    made = time.thread_time() - began
    slowest = 0.0
    for axis in AXES:
        low, high = view.bounds(axis)
        for a, b in RANGES:
            zoom = partial(view.columns, low + a * (high - low), low + b * (high - low), 1200, axis)
            columns = zoom()
            slowest = max(slowest, quickest(zoom, 3, 0.15))
            assert (columns.bands.sum(0) == columns.total).all()
    listed = quickest(lambda: view.at(view.ledger.peak), 3, 0.6)
    with capsys.disabled():
        print(f"\n2,000,000 events: {made:.2f} s to begin, slowest zoom {1e3 * slowest:.0f} ms, a moment {1e3 * listed:.0f} ms")
    assert within(made, 5)
    assert within(slowest, 0.15)
    assert within(listed, 0.6)
