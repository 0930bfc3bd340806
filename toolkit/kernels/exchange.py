# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
"""Collectives of small tensors in one launch: every rank writes its values into the memory of all others, and waits for theirs.

Values travel with a flag, as 8-byte words that are written and read whole: 4 bytes of values, and the number of the exchange.
A rank has the values of another once it finds the number of this exchange in every word, so no barrier is needed.

Each block exchanges with the blocks of the same number on the other ranks, and counts its exchanges itself. It writes into two
places in turn. It may overwrite what it wrote two exchanges ago: since then it has seen the other rank's words of the last
exchange, which that rank wrote after its own launch before that one had ended. A launch therefore sends whole words for the
whole block, also where the tensor has ended, and all ranks launch the same number of blocks.

The launch that follows begins during the exchange, so that the next product loads its matrix while this one waits.

In a decode step, most sums are followed by a norm. `summed_norm` computes both in one launch of a single block, which exchanges
through words of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.base import Config, Launch, Shape, Tensors
from toolkit.kernels.early import INTERPRETED, await_previous, let_next_begin
from toolkit.kernels.norms_rope import RMS_NORM, finish_norm

BLOCK_WORDS = 256  # that a block sends to each rank
WORD_BYTES = 4  # of values per word
MOST_BYTES = 1 << 19  # of a tensor. All blocks of a launch must be resident at once, since they wait for those of other ranks
MOST_BLOCKS = MOST_BYTES // WORD_BYTES // BLOCK_WORDS
ROW_WORDS = 8192  # that `summed_norm` sends to each rank at most
PLACES = 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POLLS = tl.constexpr(1 << 30)  # then the launch fails: after ten minutes or more


@dataclass(frozen=True, eq=False)
class Inbox:
    """The memory by which the ranks of a group exchange small tensors.

    Attributes:
        rank: This rank.
        words: int64 [PLACES, ranks, MOST_BLOCKS * BLOCK_WORDS], which the other ranks write to; zeros at first.
        addresses: int64 [ranks], the addresses of the `words` of all ranks in this process.
        counts: int32 [MOST_BLOCKS], how many exchanges each block has made; zeros at first.
        rows: int64 [PLACES, ranks, ROW_WORDS], as `words`, for `summed_norm`.
        row_addresses: int64 [ranks], the addresses of the `rows` of all ranks.
        row_count: int32 [1], as `counts`.
    """

    rank: int
    words: Tensor
    addresses: Tensor
    counts: Tensor
    rows: Tensor
    row_addresses: Tensor
    row_count: Tensor

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.addresses)


def all_reduce(inbox: Inbox, x: Tensor, out: Tensor) -> Launch:
    """Return the launch that writes the sum of the ranks' tensors `x` to `out`, both contiguous and of one of DTYPES.

    It sums in fp32, in the order of the ranks, so all ranks get the same bits.
    """
    arguments = {"x_ptr": x, "out_ptr": out, "n": x.numel(), **_inbox_arguments(inbox)}
    return _launch(one_shot_all_reduce, arguments, inbox, x, x.numel())


def all_gather(inbox: Inbox, x: Tensor, sizes: Sequence[int], out: Tensor) -> Launch:
    """Return the launch that writes the ranks' tensors `x` [N, sizes[rank]] side by side to `out` [N, sum(sizes)].

    Both are contiguous and of one of DTYPES.
    """
    rows = x.numel() // sizes[inbox.rank]
    bounds = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))  # in a row of the result
    arguments = {"x_ptr": x, "out_ptr": out, "n": x.numel(), "rows": rows, **_inbox_arguments(inbox)}
    return _launch(one_shot_all_gather, arguments, inbox, x, rows * max(sizes), BOUNDS=bounds)


def summed_norm(inbox: Inbox, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Launch:
    """Return the launch of `RMS_NORM` for one row, in which "x" is the sum of the ranks' tensors "x", as of `all_reduce`."""
    (norm,) = RMS_NORM.launches(shape, config, inputs, outputs)
    own = {"words_ptr": inbox.rows, "addresses_ptr": inbox.row_addresses, "count_ptr": inbox.row_count, "rank": inbox.rank}
    constants = {
        **norm.constants,
        "RANKS": inbox.ranks,
        "PER_WORD": WORD_BYTES // inputs["x"].element_size(),
        "ROOM": ROW_WORDS,
    }
    return Launch(one_shot_norm, (1,), {**norm.arguments, **own}, constants, norm.warps, norm.stages, early=True)


def _inbox_arguments(inbox: Inbox) -> dict[str, Any]:
    return {"words_ptr": inbox.words, "addresses_ptr": inbox.addresses, "counts_ptr": inbox.counts, "rank": inbox.rank}


def _launch(function: Any, arguments: dict[str, Any], inbox: Inbox, x: Tensor, most: int, **constants: Any) -> Launch:
    """Return the launch of `function`. `most` is the largest number of values that a rank sends to another."""
    per_word = WORD_BYTES // x.element_size()
    blocks = -(-most // (BLOCK_WORDS * per_word))
    constants |= {
        "RANKS": inbox.ranks, "PER_WORD": per_word, "BLOCK": BLOCK_WORDS, "ROOM": inbox.words.shape[-1],
    }  # fmt: skip
    return Launch(function, (blocks,), arguments, constants, warps=BLOCK_WORDS // 64, early=True)


@triton.jit
def one_shot_all_reduce(
    x_ptr, out_ptr, n, words_ptr, addresses_ptr, counts_ptr, rank,
    RANKS: tl.constexpr, PER_WORD: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    let_next_begin()
    await_previous()
    block = tl.program_id(0)
    number = tl.load(counts_ptr + block) + 1
    i = block * BLOCK + tl.arange(0, BLOCK)
    own = _packed(x_ptr, i, n, PER_WORD)
    place = (number & 1) * RANKS
    _send(_numbered(own, number), (place + rank) * ROOM + i, i >= 0, addresses_ptr, rank, RANKS)
    low, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for sender in tl.static_range(RANKS):
        values = own
        if sender != rank:
            values = _received(words_ptr + (place + sender) * ROOM + i, i >= 0, number)
        low += _value(values, 0, out_ptr.dtype.element_ty, PER_WORD)
        if PER_WORD == 2:
            high += _value(values, 1, out_ptr.dtype.element_ty, PER_WORD)
    tl.store(out_ptr + i * PER_WORD, low, mask=i * PER_WORD < n)
    if PER_WORD == 2:
        tl.store(out_ptr + i * 2 + 1, high, mask=i * 2 + 1 < n)
    tl.store(counts_ptr + block, number)


@triton.jit
def one_shot_norm(
    x_ptr, weight_ptr, post_weight_ptr, residual_ptr, scalar_ptr, out_ptr, new_residual_ptr, codes_ptr, scales_ptr, sums_ptr,
    eps, words_ptr, addresses_ptr, count_ptr, rank, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD_FIRST: tl.constexpr,
    NORM_ADD: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr, QUANTISED: tl.constexpr, RANKS: tl.constexpr,
    PER_WORD: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The sum of one row over all ranks, rounded as `one_shot_all_reduce` does, and its norm. The row is in groups of 32."""
    let_next_begin()
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    group = tl.arange(0, BLOCK // 32)[:, None]
    at = group * 32 + tl.arange(0, 32)[None, :]
    inside = at < HIDDEN
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    post_weight = tl.load(post_weight_ptr + at, mask=inside, other=0.0) if NORM_ADD and NORM else weight
    scalar = tl.load(scalar_ptr).to(tl.float32) if SCALED else 1.0
    await_previous()
    number = tl.load(count_ptr) + 1
    i = group * (32 // PER_WORD) + tl.arange(0, 32 // PER_WORD)[None, :]
    own = _packed(x_ptr, i, HIDDEN, PER_WORD)
    sent = i * PER_WORD < HIDDEN
    place = (number & 1) * RANKS
    _send(_numbered(own, number), (place + rank) * ROOM + i, sent, addresses_ptr, rank, RANKS)
    residual = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32) if ADD_FIRST or NORM_ADD else 0.0
    low, high = tl.zeros(i.shape, tl.float32), tl.zeros(i.shape, tl.float32)
    for sender in tl.static_range(RANKS):
        values = own
        if sender != rank:
            values = _received(words_ptr + (place + sender) * ROOM + i, sent, number)
        low += _value(values, 0, DTYPE, PER_WORD)
        if PER_WORD == 2:
            high += _value(values, 1, DTYPE, PER_WORD)
    x = tl.reshape(tl.join(low, high), (BLOCK // 32, 32)) if PER_WORD == 2 else low
    finish_norm(
        x.to(DTYPE).to(tl.float32), residual, weight, post_weight, scalar, out_ptr, new_residual_ptr, codes_ptr, scales_ptr,
        sums_ptr, eps, 0, at, inside, HIDDEN, ADD_FIRST, NORM_ADD, NORM, SCALED, QUANTISED, DTYPE,
    )  # fmt: skip
    tl.store(count_ptr, number)


@triton.jit
def one_shot_all_gather(
    x_ptr, out_ptr, n, rows, words_ptr, addresses_ptr, counts_ptr, rank,
    BOUNDS: tl.constexpr, RANKS: tl.constexpr, PER_WORD: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    let_next_begin()
    await_previous()
    block = tl.program_id(0)
    number = tl.load(counts_ptr + block) + 1
    i = block * BLOCK + tl.arange(0, BLOCK)
    own = _packed(x_ptr, i, n, PER_WORD)
    place = (number & 1) * RANKS
    _send(_numbered(own, number), (place + rank) * ROOM + i, i >= 0, addresses_ptr, rank, RANKS)
    for sender in tl.static_range(RANKS):
        values = own
        if sender != rank:
            values = _received(words_ptr + (place + sender) * ROOM + i, i >= 0, number)
        _place(values, i, out_ptr, rows, BOUNDS[sender], BOUNDS[sender + 1] - BOUNDS[sender], BOUNDS[RANKS], PER_WORD)
    tl.store(counts_ptr + block, number)


@triton.jit
def _packed(x_ptr, i, n, PER_WORD: tl.constexpr):
    """Return the values of word `i` as a uint32, zeros beyond the `n` values."""
    if PER_WORD == 1:
        values = tl.load(x_ptr + i, mask=i < n, other=0).to(tl.uint32, bitcast=True)
    else:
        low = tl.load(x_ptr + i * 2, mask=i * 2 < n, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = tl.load(x_ptr + i * 2 + 1, mask=i * 2 + 1 < n, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
        values = low | (high << 16)
    return values


@triton.jit
def _place(values, i, out_ptr, rows, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PER_WORD: tl.constexpr):
    """Write the values of words `i`, which are those of a tensor [rows, SIZE], from column START on to `out` [rows, WIDTH]."""
    for half in tl.static_range(PER_WORD):
        at = i * PER_WORD + half
        value = _value(values, half, out_ptr.dtype.element_ty, PER_WORD)
        tl.store(out_ptr + at // SIZE * WIDTH + START + at % SIZE, value, mask=at < rows * SIZE)


@triton.jit
def _numbered(values, number):
    return (number.to(tl.int64) << 32) | values.to(tl.int64)


@triton.jit
def _value(values, half: tl.constexpr, dtype: tl.constexpr, PER_WORD: tl.constexpr):
    """Return one of the values in uint32 words, as fp32."""
    if PER_WORD == 1:
        value = values.to(tl.float32, bitcast=True)
    else:
        value = (values >> (16 * half)).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _send(words, place, sent, addresses_ptr, rank, RANKS: tl.constexpr):
    """Write the words that are `sent` to the same place in the memory of all other ranks, each rank beginning with another."""
    for step in tl.static_range(1, RANKS):
        address = tl.load(addresses_ptr + (rank + step) % RANKS)
        tl.store(address.to(tl.pointer_type(tl.int64)) + place, words, mask=sent, cache_modifier=".wt")


@triton.jit
def _received(pointers, sent, number):
    """Wait until all words at `pointers` that are `sent` have this number, and return their values, uint32; 0 elsewhere."""
    words = tl.load(pointers, mask=sent, other=0, volatile=True)
    missing = tl.max((sent & ((words >> 32) != number)).to(tl.int32))
    polls = 0
    while (missing != 0) & (polls < POLLS):
        words = tl.load(pointers, mask=sent, other=0, volatile=True)
        missing = tl.max((sent & ((words >> 32) != number)).to(tl.int32))
        polls += 1
    if not INTERPRETED:
        _fail_if(missing)
    return (words & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _fail_if(missing):
    """End the launch with an error if `missing` is not 0."""
    if missing != 0:
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [missing], tl.int32, is_pure=False, pack=1)
