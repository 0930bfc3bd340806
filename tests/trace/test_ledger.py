"""Compare the ledger with a simple loop over the same events."""

import random

import numpy as np
import pytest

from toolkit.core.errors import UnknownNameError
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.ledger import UNOWNED, Ledger, devices_of, fullest, place_text


def random_trace(seed: int, events: int = 400, opening: int = 20) -> Trace:
    """Random allocations and frees with reused addresses, several owners, lines, steps and cells; some alive from the start."""
    rng, builder = random.Random(seed), TraceBuilder()
    free, alive, fresh = [], {}, 0

    def allocate(time, step, cell):
        nonlocal fresh
        address = free.pop() if free and rng.random() < 0.7 else (fresh := fresh + (1 << 20))
        size = 512 * rng.randrange(1, 5000)
        alive[address] = size
        builder.add(
            "alloc", time, bytes=size, address=address, requested=size - 3, step=step, cell=cell,
            owner=rng.choice([None, "a", "b[0]"]), name=rng.choice([None, "kv", "weights"]),
            where=rng.choice([None, "cell 1:2", "cell 1:2 > m.py:3", "cell 2:5 > m.py:3"]),
        )  # fmt: skip

    for _ in range(opening):
        allocate(0, -1, -1)
    for i in range(events):
        step, cell = i // 40, i // 100
        if alive and rng.random() < 0.5:
            address = rng.choice(sorted(alive))
            builder.add("free", i // 3, bytes=alive.pop(address), address=address, step=step, cell=cell)
            free.append(address)
        else:
            allocate(i // 3, step, cell)
    return builder.build({"opening": opening})


def walk(trace: Trace):
    """Compute [(total, {address: row})] after each event with a simple loop."""
    held, states = {}, []
    for row, kind in enumerate(trace.is_kind("alloc").tolist()):
        address = int(trace["address"][row])
        if kind:
            held[address] = row
        else:
            del held[address]
        states.append((sum(int(trace["bytes"][r]) for r in held.values()), dict(held)))
    return states


@pytest.mark.parametrize("seed", range(8))
def test_totals_peak_and_what_was_alive_are_those_of_a_walk(seed):
    trace = random_trace(seed)
    ledger, states = Ledger(trace), walk(trace)
    totals = [total for total, _ in states]
    assert ledger.held.tolist() == totals
    assert ledger.baseline_bytes == totals[19]
    assert ledger.peak_bytes == max(totals[19:])
    assert ledger.end_bytes == totals[-1]
    assert ledger.kept_bytes == totals[-1] - totals[19]
    old = set(states[19][1].values()) - set(states[-1][1].values())
    assert ledger.freed_bytes == sum(int(trace["bytes"][row]) for row in old)
    for at in (ledger.peak, 25, len(totals) - 1):
        assert set(ledger.blocks.row[ledger.alive(at)].tolist()) == set(states[at][1].values())


@pytest.mark.parametrize("by", ["owner", "kind", "where", "line", "cell", "step"])
def test_each_group_has_its_own_peak(by):
    trace = random_trace(3)
    ledger, states = Ledger(trace), walk(trace)
    names = {"owner": "owner", "kind": "name", "where": "where", "line": "where"}
    if by in names:
        of = [UNOWNED if text is None and by == "owner" else text for text in trace.text(names[by])]
        of = [("activations" if by == "kind" else "(unknown line)") if text is None else text for text in of]
        of = [text.partition(" > ")[0] if by == "line" else text for text in of]
    else:
        of = trace[by].tolist()
    table = ledger.by(by).set_index(by)
    for name in set(of) - ({-1} if by in ("cell", "step") else set()):
        over_time = [sum(int(trace["bytes"][r]) for r in held.values() if of[r] == name) for _, held in states]
        if not max(over_time):
            continue
        assert table.loc[name, "peak_bytes"] == max(over_time)
        assert table.loc[name, "at_peak_bytes"] == over_time[ledger.peak]
        assert table.loc[name, "end_bytes"] == over_time[-1]
    assert table["at_peak_bytes"].sum() == ledger.peak_bytes


@pytest.mark.parametrize("seed", range(4))
def test_blocks_without_addresses_are_as_many_as_are_held(seed):
    """Traces of the profiler are read without addresses, and most sizes come many times."""
    rng, builder, alive = random.Random(seed), TraceBuilder(), []
    for i in range(300):
        if alive and rng.random() < 0.5:
            builder.add("free", i, bytes=alive.pop(rng.randrange(len(alive))), step=i // 40)
        else:
            alive.append(512 * rng.randrange(1, 4))
            builder.add("alloc", i, bytes=alive[-1], step=i // 40)
    ledger = Ledger(builder.build({}))
    assert [int(ledger.blocks.bytes[ledger.alive(at)].sum()) for at in range(300)] == ledger.held.tolist()
    table = ledger.by("kind").set_index("kind").loc["activations"]
    assert (table["peak_bytes"], table["end_bytes"]) == (ledger.peak_bytes, ledger.end_bytes)
    assert ledger.by("step")["end_bytes"].sum() == ledger.end_bytes == sum(alive)


def test_a_free_of_what_was_there_before_the_recording_ends_no_block():
    builder = TraceBuilder()
    for time, kind in enumerate(("free", "free", "alloc", "alloc", "free", "free", "free", "alloc")):
        builder.add(kind, time, bytes=512)
    blocks = Ledger(builder.build({})).blocks
    assert (blocks.begin.tolist(), blocks.end.tolist()) == ([2, 3, 7], [5, 4, 8])


def test_holders_sum_to_the_total_and_name_the_largest_first():
    ledger = Ledger(random_trace(5))
    table = ledger.holders()
    assert table["bytes"].sum() == ledger.peak_bytes
    assert table["bytes"].is_monotonic_decreasing
    assert table["blocks"].sum() == len(ledger.alive())
    assert table["share"].sum() == pytest.approx(1)


def test_peaks_of_steps_are_of_the_total_while_they_ran():
    trace = random_trace(6)
    ledger = Ledger(trace)
    for row in ledger.over("step").itertuples():
        inside = np.flatnonzero(trace["step"][20:] == row.step) + 20
        assert row.peak_bytes == max(ledger.held[inside].max(), ledger.held[inside[0] - 1])
        assert row.kept_bytes == ledger.held[inside[-1]] - ledger.held[inside[0] - 1]


def test_reserved_and_cached_come_from_segments():
    builder = TraceBuilder()
    builder.add("segment_alloc", 0, bytes=2 << 20, address=0)
    builder.add("alloc", 0, bytes=512, address=0)
    builder.add("segment_alloc", 5, bytes=20 << 20, address=1 << 30)
    builder.add("alloc", 5, bytes=4 << 20, address=1 << 30)
    builder.add("free", 6, bytes=4 << 20, address=1 << 30)
    builder.add("segment_free", 7, bytes=20 << 20, address=1 << 30)
    builder.add("alloc", 8, bytes=512, address=512)
    ledger = Ledger(builder.build({"opening": 2}))
    assert ledger.reserved.tolist() == [2 << 20, 22 << 20, 22 << 20, 2 << 20]
    assert ledger.peak_reserved_bytes == 22 << 20
    kinds = ledger.by("kind").set_index("kind")
    cached = [(18 << 20) - 512, (22 << 20) - 512, (2 << 20) - 1024]
    assert kinds.loc["cached", ["at_peak_bytes", "peak_bytes", "end_bytes"]].tolist() == cached
    assert kinds["at_peak_bytes"].sum() == 22 << 20


def test_memory_that_is_cached_only_at_the_end_has_a_row():
    builder = TraceBuilder()
    builder.add("segment_alloc", 0, bytes=2 << 20, address=0)
    builder.add("alloc", 0, bytes=2 << 20, address=0)
    builder.add("free", 1, bytes=2 << 20, address=0)
    cached = Ledger(builder.build({})).by("kind").set_index("kind").loc["cached"]
    assert cached[["at_peak_bytes", "peak_bytes", "end_bytes"]].tolist() == [0, 2 << 20, 2 << 20]


def test_without_segments_nothing_is_cached():
    builder = TraceBuilder()
    builder.add("free", 0, bytes=512)  # was allocated before the recording began
    builder.add("alloc", 1, bytes=512)
    assert Ledger(builder.build({})).by("kind")["kind"].tolist() == ["activations"]


def test_nothing_allocated_is_a_peak_of_the_baseline():
    empty = Ledger(TraceBuilder().build({}))
    assert (empty.peak_bytes, empty.baseline_bytes, empty.kept_bytes, empty.freed_bytes) == (0, 0, 0, 0)
    assert not len(empty.holders())
    assert not len(empty.over("cell"))
    builder = TraceBuilder()
    builder.add("alloc", 0, bytes=512, address=0)
    builder.add("free", 1, bytes=512, address=0)
    only_freed = Ledger(builder.build({"opening": 1}))
    assert (only_freed.peak_bytes, only_freed.baseline_bytes) == (512, 512)
    assert (only_freed.kept_bytes, only_freed.freed_bytes) == (-512, 512)


def test_an_unknown_grouping_names_those_there_are():
    with pytest.raises(UnknownNameError, match="owner"):
        Ledger(random_trace(0)).by("ownr")


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("cell 7:3", "y = x.float() in cell 7 line 3"),
        ("cell 7:3 > model.py:41", "y = x.float() in cell 7 line 3, through model.py line 41"),
        ("cell 8:2 > cell 7:3", "cell 8 line 2, through y = x.float() in cell 7 line 3"),
        ("other.py:9", "other.py line 9"),
        ("(unknown line)", "(unknown line)"),
    ],
)
def test_places_in_words(where, said):
    assert place_text(where, {"cell 7:3": "y = x.float()"}) == said


def test_of_several_devices_it_is_about_the_one_that_was_used():
    builder = TraceBuilder()
    builder.add("alloc", 0, bytes=512, address=0, device=0)
    builder.add("alloc", 1, bytes=1 << 20, address=1 << 30, device=1)
    columns = {"opening": 1}
    assert Ledger(builder.build(columns)).peak_bytes == 1 << 20
    assert Ledger(builder.build({**columns, "device_index": 0})).peak_bytes == 512
    assert Ledger(builder.build(columns), device=0).peak_bytes == 512


def test_the_rank_that_is_shown_used_the_device():
    builder = TraceBuilder()
    for rank in range(3):
        builder.add("alloc", 0, bytes=512 << rank, address=0, device=min(rank, 1), rank=rank)
    trace = builder.build({})
    assert devices_of(trace) == [0, 1]
    assert [Ledger(trace, device).peak_bytes for device in (None, 0, 1)] == [2048, 512, 2048]
    assert fullest(trace) == 1
    assert fullest(trace.of_rank(0)) is None
