"""Tests of the caching allocator: segments, splitting, merging, streams, and releasing."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from toolkit.core.errors import ToolkitError
from toolkit.gpu.virtual.allocator.blocks import Block, Blocks, Settings, rounded, segment_bytes

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("n_bytes", "size", "segment"),
    [
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
    ],
)
def test_sizes_and_segments(n_bytes, size, segment):
    assert (rounded(n_bytes), segment_bytes(rounded(n_bytes))) == (size, segment)


def test_small_blocks_are_cut_exactly_and_large_ones_keep_what_is_left_up_to_a_mebibyte():
    blocks = Blocks(1 << 30)
    assert blocks.take(100, 0).size == 512
    own = blocks.take(11 * MIB, 0)  # a segment of 12 MiB: one MiB is left, and not cut off
    assert (own.size, own.requested) == (12 * MIB, 11 * MIB)
    assert blocks.take(3 * MIB, 0).size == 3 * MIB  # of 20 MiB
    assert blocks.take(16 * MIB, 0).size == 17 * MIB  # all that is left there
    assert blocks.reserved_bytes == (2 + 12 + 20) * MIB


def test_the_smallest_block_that_is_large_enough_is_taken_and_neighbors_join():
    blocks = Blocks(1 << 30)
    a, b, c, _last = (blocks.take(n * MIB, 0) for n in (4, 3, 4, 5))
    where = b.address
    blocks.give(b)
    blocks.give(c)  # joins b and what is after it: nothing, the last is held
    assert blocks.take(7 * MIB, 0).address == where
    blocks.give(a)
    assert blocks.take(4 * MIB, 0).address == a.address
    assert blocks.reserved_bytes == 20 * MIB


def test_streams_and_small_and_large_do_not_share():
    blocks = Blocks(1 << 30)
    blocks.give(blocks.take(2 * MIB, 0))
    assert blocks.take(2 * MIB, 1) is not None
    assert blocks.take(KIB, 0) is not None
    assert blocks.reserved_bytes == (20 + 20 + 2) * MIB


def test_a_full_card_gives_up_what_is_cached_before_it_refuses():
    blocks = Blocks(40 * MIB)
    first = blocks.take(30 * MIB, 0)
    assert not blocks.fits(20 * MIB)
    assert blocks.take(20 * MIB, 0) is None
    blocks.give(first)
    assert blocks.fits(40 * MIB)
    assert not blocks.fits(40 * MIB + 1)
    assert blocks.take(36 * MIB, 1).size == 36 * MIB
    assert blocks.reserved_bytes == 36 * MIB


SETTINGS = [
    "", "expandable_segments:True", "max_split_size_mb:21", "roundup_power2_divisions:4", "garbage_collection_threshold:0.5",
    "expandable_segments:True,max_split_size_mb:32,roundup_power2_divisions:8",
]  # fmt: skip


def check(blocks: Blocks, held: list[Block]) -> None:
    """Check the invariants of `blocks`, of which `held` are allocated."""
    pieces = [block for segment in blocks.segments() for block in segment]
    free = [block for block in pieces if block.free]
    assert {id(block) for block in pieces if not block.free} == {id(block) for block in held}
    assert sum(block.size for block in pieces) == blocks.reserved_bytes
    for segment in blocks.segments():
        for low, high in pairwise(segment):
            assert low.address + low.size == high.address
            assert (low.after, high.before) == (high, low)
            assert not (low.free and high.free), "free neighbors are joined"
    spans = sorted((block.address, block.address + block.size) for block in pieces)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    figures = blocks.counters.figures()
    for name, value in (
        ("allocated_bytes", sum(b.size for b in held)), ("requested_bytes", sum(b.requested for b in held)),
        ("allocation", len(held)), ("active", len(held)), ("reserved_bytes", blocks.reserved_bytes),
        ("inactive_split", sum(not (b.whole or b.expandable) for b in free)),
        ("inactive_split_bytes", sum(b.size for b in free if not (b.whole or b.expandable))),
    ):  # fmt: skip
        assert figures[f"{name}.all.current"] == value
        assert figures[f"{name}.all.peak"] >= value
        for kind in ("current", "allocated", "freed"):
            parts = [figures[f"{name}.{pool}_pool.{kind}"] for pool in ("small", "large")]
            assert figures[f"{name}.all.{kind}"] == sum(parts)
        assert figures[f"{name}.all.allocated"] - figures[f"{name}.all.freed"] == value


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: s or "default")
@pytest.mark.parametrize("seed", range(3))
def test_however_it_is_used_blocks_tile_segments_and_sums_are_the_counters(settings, seed):
    rng, held = random.Random(seed), []
    blocks = Blocks(1 << 33, Settings.parse(settings))
    blocks.limit_bytes = (1 << 28, None, 1 << 27)[seed]
    taken = 0

    def told(kind: str, n_bytes: int, address: int) -> None:
        nonlocal taken
        taken += n_bytes if kind == "segment_alloc" else -n_bytes

    blocks.tell = told
    for step in range(1500):
        if held and rng.random() < 0.48:
            blocks.give(held.pop(rng.randrange(len(held))))
        elif (block := blocks.take(int(2 ** rng.uniform(0, 25)), rng.randrange(3))) is not None:
            held.append(block)
        if step % 50 == 0:
            check(blocks, held)
        if step % 400 == 399:
            blocks.release()
            check(blocks, held)
    for block in held:
        blocks.give(block)
    check(blocks, [])
    blocks.release()
    assert blocks.reserved_bytes == taken == 0
    assert not list(blocks.segments())


def test_rounding_to_steps_between_powers_of_two():
    steps = Settings.parse("roundup_power2_divisions:4").steps()
    assert [rounded(n, steps) for n in (1200, 2048, 5000, 1200 * KIB)] == [1536, 2048, 5120, 1280 * KIB]
    by_size = Settings.parse("roundup_power2_divisions:[256:1,512:2,>:8]").steps()
    assert rounded(100 * MIB + 1, by_size) == 100 * MIB + 512
    assert rounded(520 * MIB, by_size) == 768 * MIB
    assert rounded(1100 * MIB, by_size) == 1152 * MIB


def test_blocks_that_are_not_cut_serve_only_what_is_nearly_as_large():
    blocks = Blocks(1 << 30, Settings.parse("max_split_size_mb:32"))
    blocks.give(blocks.take(100 * MIB, 0))
    assert blocks.take(5 * MIB, 0).size == 5 * MIB  # not from it
    assert blocks.take(60 * MIB, 0).size == 60 * MIB  # nor this: 40 MiB would lie idle
    assert blocks.take(90 * MIB, 0).size == 100 * MIB
    assert blocks.reserved_bytes == (100 + 20 + 60) * MIB
    blocks = Blocks(
        1 << 30, Settings.parse("max_split_size_mb:32,max_non_split_rounding_mb:64,per_process_memory_fraction:0.125")
    )
    blocks.give(blocks.take(100 * MIB, 0))
    assert blocks.take(60 * MIB, 0).size == 100 * MIB
    assert blocks.take(30 * MIB, 0) is None  # 128 MiB are the limit


def test_expandable_segments_grow_in_place_and_give_back_what_is_whole():
    blocks, told = Blocks(1 << 30, Settings(expandable_segments=True)), []
    blocks.tell = lambda *event: told.append(event)
    a = blocks.take(30 * MIB, 0)
    b = blocks.take(30 * MIB, 0)
    assert (b.address - a.address, blocks.reserved_bytes) == (30 * MIB, 60 * MIB)
    blocks.give(a)
    blocks.release()
    assert blocks.reserved_bytes == 40 * MIB
    assert told == [
        ("segment_alloc", 40 * MIB, a.address), ("segment_alloc", 20 * MIB, a.address + 40 * MIB),
        ("segment_free", 20 * MIB, a.address),
    ]  # fmt: skip
    assert [[block.size for block in run] for run in blocks.segments()] == [[10 * MIB, 30 * MIB]]


def test_a_limit_is_kept_and_what_is_cached_is_given_up_for_it():
    blocks = Blocks(1 << 30)
    blocks.limit_bytes = 30 * MIB
    first = blocks.take(20 * MIB, 0)
    assert blocks.take(12 * MIB, 0) is None
    blocks.give(first)
    assert blocks.take(12 * MIB, 1).size == 12 * MIB  # on another stream, for which what is free is of no use
    figures = blocks.counters.figures()
    assert (figures["num_ooms"], figures["num_alloc_retries"], figures["num_device_free"]) == (1, 2, 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("max_split_size_mb:20", "too small"),
        ("max_split_size_mb:many", "not a whole number"),
        ("garbage_collection_threshold:1.5", "not a fraction"),
        ("roundup_power2_divisions:3", "not a power of two"),
        ("expandable_segments:yes", "neither True nor False"),
        ("backend:cudaMallocAsync", "only backend:native"),
        ("max_split_size:64", "max_split_size_mb"),
        ("per_process_memory_fraction:2", "a fraction of the GPU's memory"),
    ],
)
def test_settings_that_can_not_be(text, found):
    with pytest.raises(ToolkitError, match=found):
        Settings.parse(text)


def test_settings_read_and_write_themselves():
    text = "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4],garbage_collection_threshold:0.8"
    text += ",max_non_split_rounding_mb:64,per_process_memory_fraction:0.5"
    assert str(Settings.parse(text)) == text
    assert Settings.parse("backend:native, pinned_use_background_threads:True,pinned_free_catch_all:True") == Settings()
    assert str(Settings()) == "default"
