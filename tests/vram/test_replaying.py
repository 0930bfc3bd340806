"""Tests of replaying recorded allocations on a card of another size or with other allocator settings."""

from __future__ import annotations

import random

import pytest
import torch

import toolkit as tk
from toolkit.core.errors import TraceError, UnknownNameError
from toolkit.core.units import GiB, MiB
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.virtual.allocator.blocks import Settings
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.trace.ledger import Ledger
from toolkit.vram.what_if import CONTEXT_BYTES, joined, replay, what_if


def recorded(*events: tuple[str, int, int], where: str | None = None, stream: int = 0) -> Trace:
    """Build a trace from (kind, bytes, address) rows, one nanosecond apart."""
    builder = TraceBuilder()
    for i, (kind, size, address) in enumerate(events):
        builder.add(
            kind, i, bytes=-(-size // 512) * 512, requested=size if kind == "alloc" else -1, address=address, stream=stream,
            step=i // 10, cell=7, where=where,
        )  # fmt: skip
    return builder.build({"device": "a test"})


def in_pieces(total: int = 8, size: int = 100 * MiB) -> Trace:
    """Fragmentation: allocate blocks, free every other one, then allocate a block of twice the size."""
    took = [("alloc", size, i) for i in range(total)]
    gave = [("free", size, i) for i in range(0, total, 2)]
    return recorded(*took, *gave, ("alloc", 2 * size, total), where="cell 7:3 > model.py:41")


def test_a_run_that_fits_says_what_it_takes():
    trace = recorded(("alloc", 3 * MiB, 1), ("alloc", 4 * MiB, 2), ("free", 3 * MiB, 1), ("alloc", 5 * MiB, 3))
    done = replay(trace, capacity_bytes=GiB)
    assert done.fits
    assert (done.peak_allocated_bytes, done.peak_reserved_bytes) == (9 * MiB, 20 * MiB)
    assert (done.idle_at_peak_bytes, done.context_bytes) == (17 * MiB, CONTEXT_BYTES)
    assert repr(done) == "fits in 1.00 GiB: at most 9.00 MiB allocated, 20.0 MiB reserved, 85% of that idle"


def test_whole_cached_segments_are_given_back_before_anything_is_refused():
    done = replay(in_pieces(), capacity_bytes=800 * MiB, context_bytes=0)
    assert done.fits
    assert done.peak_allocated_bytes == 800 * MiB


def test_a_run_that_does_not_fit_names_the_line_and_what_was_in_the_way():
    events = [("alloc", 6 * MiB, i) for i in range(30)]  # three to a segment of 20 MiB, of which 2 MiB are left
    trace = recorded(*events, ("alloc", 15 * MiB, 30), where="cell 7:3 > model.py:41")
    done = replay(trace, capacity_bytes=205 * MiB, context_bytes=0)
    failure = done.failure
    assert failure is not None
    assert (failure.row, failure.time_ns, failure.cell, failure.step) == (30, 30, 7, 3)
    assert (failure.asked_bytes, failure.allocated_bytes, failure.in_pieces_bytes) == (15 * MiB, 180 * MiB, 20 * MiB)
    want = "fails at cell 7 line 3: 15.0 MiB requested, 180 MiB allocated, 20.0 MiB reserved but fragmented"
    assert repr(done) == f"{want}; fits with expandable_segments"
    assert replay(trace, capacity_bytes=205 * MiB, context_bytes=0, settings=Settings(expandable_segments=True)).fits
    assert "fits with" not in repr(replay(trace, capacity_bytes=190 * MiB, context_bytes=0))


def test_the_context_takes_its_share():
    trace = recorded(("alloc", 500 * MiB, 1))
    assert not replay(trace, capacity_bytes=GiB).fits
    assert replay(trace, capacity_bytes=GiB, context_bytes=0).fits


def test_bytes_stand_in_for_what_was_requested_and_frees_of_unknown_blocks_are_left_out():
    builder = TraceBuilder()
    builder.add("free", 0, bytes=512, address=5)
    builder.add("alloc", 1, bytes=1024, address=6)
    done = replay(builder.build({}), capacity_bytes=GiB)
    assert done.peak_allocated_bytes == 1024


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([("free", 512, 1)], r"no allocations on GPU 0\. Measure work on a GPU with tk\.memory"),
        ([("alloc", 512, -1)], r"1 of its allocations and frees have no address\. Measure the run again"),
    ],
)
def test_what_can_not_be_replayed(events, found):
    with pytest.raises(TraceError, match=found):
        replay(recorded(*events), capacity_bytes=GiB)


def test_what_if_has_a_row_for_each_card_and_settings():
    frame = what_if(recorded(("alloc", 20 * GiB, 1), ("free", 20 * GiB, 1), ("alloc", 30 * GiB, 2)), gpus=["h200", "rtx-4090"])
    assert frame["gpu"].tolist() == ["h200", "rtx-4090"] * 2
    assert frame["fits"].tolist() == [True, False] * 2
    assert frame["settings"].tolist() == ["default"] * 2 + ["expandable_segments:True"] * 2
    assert frame["smallest_bytes"][0] == 30 * GiB + CONTEXT_BYTES
    assert frame["asked_bytes"][1] == 30 * GiB
    for unknown in ("h20", ["h20"], 5):
        with pytest.raises(UnknownNameError, match="h200"):
            what_if(recorded(("alloc", 1, 1)), gpus=unknown)
    one = what_if(recorded(("alloc", 1, 1)), gpus="l4")
    assert what_if(recorded(("alloc", 1, 1)), gpus=CATALOGUE["l4"]).equals(one)
    assert set(what_if(recorded(("alloc", 1, 1)), settings=["max_split_size_mb:64"])["gpu"]) == set(CATALOGUE)


def test_the_smallest_card_does_and_one_a_little_smaller_does_not():
    rng, live, events = random.Random(3), [], []
    for i in range(600):
        if live and rng.random() < 0.45:
            address, size = live.pop(rng.randrange(len(live)))
            events.append(("free", size, address))
        else:
            size = int(2 ** rng.uniform(16, 26))
            live.append((i, size))
            events.append(("alloc", size, i))
    trace = recorded(*events)
    smallest = int(what_if(trace, gpus=["h200"], settings=[Settings()])["smallest_bytes"][0])
    assert replay(trace, capacity_bytes=smallest).fits
    assert not replay(trace, capacity_bytes=smallest - max(2 * MiB, smallest // 64)).fits


def test_a_run_on_the_virtual_gpu_replays_as_it_went(empty_card):
    """A replay with unchanged settings reproduces the allocator's recorded behavior."""
    gpu = empty_card
    gpu.reset_peak()
    before = gpu.memory()
    with gpu.record(lines=False) as trace:
        kept = [torch.ones(n, device="vgpu").cumsum(0) for n in (10, 70_000, 3_000_000)]
        peak = gpu.memory().peak_bytes
        del kept
    if (trace["address"][trace.is_kind("alloc")] < 0).any():
        pytest.skip("this recording has no addresses")
    done = replay(trace, capacity_bytes=8 * GiB)
    if not trace.meta.get("opening"):
        assert done.peak_allocated_bytes == peak - before.allocated_bytes


def test_cells_are_replayed_as_one_run(empty_card):
    """Changes between two cells weren't recorded; the joined run corrects for them, so each cell ends with its own total."""
    gpu = empty_card
    held, uses = [], []
    for n in (1, 2, 3):
        with tk.memory(gpu) as use:
            held.append(torch.ones(n << 18, device="vgpu"))
            held[-1] * 2
        uses.append(use)
        held.append(torch.ones(1 << 18, device="vgpu"))  # between two cells
        del held[0]
    both = joined(use.trace for use in uses)
    ledger = Ledger(both)
    assert ledger.peak_bytes == max(use.peak_bytes for use in uses)
    assert ledger.end_bytes == uses[-1].end_bytes
    assert replay(both, capacity_bytes=8 << 30).peak_allocated_bytes == ledger.peak_bytes
    failed = replay(both, capacity_bytes=(588 << 20) + (4 << 20))
    assert not failed.fits
