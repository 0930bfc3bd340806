"""The rules of CUDA's caching allocator: segments, cutting, joining, streams, and giving back."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from toolkit.devices.virtual_blocks import Blocks, rounded, segment_bytes

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


def test_the_smallest_block_that_is_large_enough_is_taken_and_neighbours_join():
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


def test_nothing_overlaps_and_nothing_is_lost_however_it_is_used():
    rng, blocks, held = random.Random(0), Blocks(1 << 33), []
    for _ in range(4000):
        if held and rng.random() < 0.48:
            blocks.give(held.pop(rng.randrange(len(held))))
        else:
            held.append(blocks.take(int(2 ** rng.uniform(0, 25)), rng.randrange(2)))
    spans = sorted((block.address, block.address + block.size) for block in held)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(block.requested <= block.size < block.requested + 512 + MIB + 1 for block in held)
    for block in held:
        blocks.give(block)
    blocks.release()
    assert blocks.reserved_bytes == 0
