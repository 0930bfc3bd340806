# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  # Triton does not compile (*a, b)
"""Routing of one token to experts: the norm before the router, the router's scores, and the choice of the largest.

One launch, `start`, computes the scores. The launches that need the choice make it themselves, each program for itself: this
takes less time than one more launch, or than waiting for the last of the programs that compute the scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from toolkit.kernels.early import await_previous, let_next_begin
from toolkit.kernels.exchange import named, place_of, received_row
from toolkit.kernels.packed import to_codes


@triton.jit
def keys_of(scores, EXPERTS: tl.constexpr, CACHE: tl.constexpr):
    """Return the scores as integers that sort in the same order, 32 per piece; among equal scores the lowest number is largest.

    The score is in the upper bits, the expert's number counted down in the lower ones. Every warp holds all of them. `scores`
    is aligned to 8 bytes and has room for a multiple of four.

    All multiprocessors read the same few lines of the L2 cache at once, which answers them one after the other. So lanes load 8
    bytes at a time, and blocks share what they load through the L1 cache (CACHE ""). A launch that loads before its turn must
    bypass the L1 cache (".cg"), which may hold older scores.
    """
    NARROW: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth == 16
    PER: tl.constexpr = 4 if NARROW else 2  # scores per word
    WORDS: tl.constexpr = (EXPERTS + PER - 1) // PER
    least = -2147483648 if NARROW else -9223372036854775808
    pointer = scores.to(tl.pointer_type(tl.int64))
    keys = ()
    for i in tl.static_range((WORDS + 31) // 32):
        at = i * 32 + tl.arange(0, 32)
        words = tl.load(pointer + (at if (i + 1) * 32 <= WORDS else tl.minimum(at, WORDS - 1)), cache_modifier=CACHE)
        for j in tl.static_range(PER):
            number = at * PER + j
            if NARROW:
                key = (words >> (16 * j)).to(tl.int16).to(tl.int32)
                key = tl.where(key == -32768, 0, key)  # -0 equals 0
                key = ((key ^ ((key >> 31) & 0x7FFF)) << 16) | (0xFFFF - number)
            else:
                key = (words >> (32 * j)).to(tl.int32)
                key = tl.where(key == -2147483648, 0, key)
                key = ((key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFF - number)
            if (i + 1) * 32 * PER > EXPERTS:
                key = tl.where(number < EXPERTS, key, least)
            keys = keys + (key,)
    return keys


@triton.jit
def _largest(keys, BELOW: tl.constexpr, below):
    """Return the largest of `keys`, or of those below `below`."""
    held = keys
    if BELOW:
        held = ()
        for i in tl.static_range(len(keys)):
            least = -2147483648 if keys[i].dtype == tl.int32 else -9223372036854775808
            held = held + (tl.where(keys[i] < below, keys[i], least),)
    for _ in tl.static_range(16):  # in pairs, so that few operations wait for each other
        if len(held) > 1:
            following = ()
            for i in tl.static_range(len(held) // 2):
                following = following + (tl.maximum(held[2 * i], held[2 * i + 1]),)
            if len(held) % 2:
                following = following + (held[len(held) - 1],)
            held = following
    return tl.max(held[0], 0)


@triton.jit
def _number(key):
    """Return the expert of a key."""
    return 0xFFFF - (key & 0xFFFF).to(tl.int32)


@triton.jit
def _score(key, scores):
    """Return the score of a key in fp32; `scores` is the pointer it was loaded from."""
    bits = (key >> (key.dtype.primitive_bitwidth // 2)).to(tl.int32)
    if key.dtype == tl.int32:
        return (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(scores.dtype.element_ty, bitcast=True).to(tl.float32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def nth_expert(keys, n, EXPERTS: tl.constexpr):
    """Return the number of the expert with the n-th largest key, from 0 on."""
    top = _largest(keys, False, 0)
    for _ in range(n):
        top = _largest(keys, True, top)
    return tl.minimum(_number(top), EXPERTS - 1)  # scores that are not numbers may leave none


@triton.jit
def route(keys, scores, EXPERTS: tl.constexpr, TOP_K: tl.constexpr):
    """Return (numbers, weights) of the TOP_K experts with the largest keys, tuples of scalars: weights are their softmax."""
    top = _largest(keys, False, 0)
    first = _score(top, scores)
    numbers = (tl.minimum(_number(top), EXPERTS - 1),)
    parts = (tl.exp(first - first),)
    total = parts[0]
    for _ in tl.static_range(1, TOP_K):
        top = _largest(keys, True, top)
        numbers = numbers + (tl.minimum(_number(top), EXPERTS - 1),)
        part = tl.exp(_score(top, scores) - first)
        parts = parts + (part,)
        total += part
    shares = ()
    for i in tl.static_range(TOP_K):
        shares = shares + (parts[i] / total,)
    return numbers, shares


@triton.jit
def joined(sums):
    """Return a tuple of 1, 2, 4, ... tensors [BN, BG], summed over BG, as one tensor [BN, count]."""
    COUNT: tl.constexpr = len(sums)
    for level in tl.static_range(5):
        if (COUNT >> level) > 1:
            pairs = ()
            for i in tl.static_range(COUNT >> (level + 1)):
                pairs = pairs + (tl.join(sums[i], sums[i + (COUNT >> (level + 1))]),)
            sums = pairs
    return tl.reshape(tl.sum(sums[0], 1), (sums[0].shape[0], COUNT))


@triton.jit(repr=named("start"))
def start(
    x, residual, norm, router, new_residual, scores, x_codes, x_scales, x_sums, eps, words_ptr, counts_ptr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, EACH: tl.constexpr, PTX: tl.constexpr,
    RANKS: tl.constexpr,
):  # fmt: skip
    """Add x to the residual, and normalize the sum. The first program stores both; the others compute EACH of ROWS scores each.

    With several RANKS, x is received (see `toolkit.kernels.exchange`).

    Every program computes the norm, from a few kilobytes in the L2 cache, in the same order. The sum, its norm and the scores
    are rounded to the dtype of x, and the stored norm to 8 bits. The norm's weight and the router, which no kernel writes, are
    loaded before the turn.
    """
    let_next_begin()
    DTYPE: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = at < HIDDEN
    row = tl.maximum(program - 1, 0) * EACH
    held = ()
    for i in tl.static_range(EACH):
        held = held + (tl.load(router + tl.minimum(row + i, ROWS - 1) * HIDDEN + at, mask=inside, other=0.0),)
    weight = tl.load(norm + at, mask=inside, other=0.0)
    place = 0
    if RANKS > 1:
        place = place_of(words_ptr, tl.load(counts_ptr, volatile=True), at, DTYPE, RANKS)
    await_previous()
    if RANKS > 1:
        value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        value, squares = received_row(place, inside, value, DTYPE, True, RANKS)
    else:
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        value = (value + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(DTYPE)
    if program == 0:
        tl.store(new_residual + at, value, mask=inside)
    value = value.to(tl.float32)
    if RANKS == 1:
        squares = tl.sum(value * value)
    value = (value * tl.rsqrt(squares / HIDDEN + eps) * weight).to(DTYPE).to(tl.float32)
    if program == 0:
        codes, scale, total = to_codes(value, PTX)
        group = tl.arange(0, BLOCK // 32)
        tl.store(x_codes + at, codes, mask=inside)
        tl.store(x_scales + group, scale, mask=group < HIDDEN // 32)
        tl.store(x_sums + group, total * scale, mask=group < HIDDEN // 32)
    else:
        products = ()
        for i in tl.static_range(EACH):
            products = products + (value * held[i].to(tl.float32),)
        found = row + tl.arange(0, EACH)
        tl.store(scores + found, tl.sum(joined(products), 0).to(DTYPE), mask=found < ROWS)
