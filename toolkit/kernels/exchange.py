# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
"""Collectives of small tensors in one launch: every rank writes its values into the memory of all others, and waits for theirs.

Values travel with a flag, as 8-byte words that are written and read whole: 4 bytes of values, and the number of the exchange.
A rank has the values of another once it finds the number of this exchange in every word, so no barrier is needed.

Each block exchanges with the blocks of the same number on the other ranks, and counts its exchanges itself. It writes into two
places in turn. It may overwrite what it wrote two exchanges ago: since then it has seen the other rank's words of the last
exchange, which that rank wrote after its own launch before that one had ended. A launch therefore sends whole words for the
whole block, also where the tensor has ended, and all ranks launch the same number of blocks.

The launch that follows begins during the exchange, so that the next product loads its matrix while this one waits. It begins
only when the launch in front of the exchange has ended. When it began earlier, Qwen3.5-35B-A3B decoded 1 % slower on two H100s.

Products of decode steps send their results themselves (`targets_of`, `send`), to all ranks including their own, into another
part of the memory. The launch that needs the sum receives the results, and adds them up: a norm, the start of a mixture of
experts, or, where neither follows, a launch for the sum alone (`sum_of_sent`). In this part of the memory, 0 means that a value
has not arrived. A value is sent with its sign bit flipped, and -0.0 as 0.0, so that no value is 0. What was read is emptied,
which means set to 0 again. A product may write to a place again: this rank has received the last result of every other rank,
which had emptied the place before it sent that result. `docs/guides/ranks.md` has measurements.

Every value of a result must belong to one thread of a block that receives it. Otherwise two threads could read it at different
times, of which one finds it missing. So such a block has no more threads than values (`most_warps`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Launch
from toolkit.kernels.early import INTERPRETED, take_turn

BLOCK_WORDS = 256  # that a block sends to each rank
WORD_BYTES = 4  # of values per word
MOST_BYTES = 1 << 19  # of a tensor. All blocks of a launch must be resident at once, since they wait for those of other ranks
MOST_BLOCKS = MOST_BYTES // WORD_BYTES // BLOCK_WORDS
PLACES = 2
SENT_BYTES = tl.constexpr(1 << 17)  # of a tensor that a product sends, at most
SENT_BLOCK = tl.constexpr(1 << 10)  # bytes of it that a block of `sum_of_sent` adds up
SENT_COUNTS = tl.constexpr(SENT_BYTES.value // SENT_BLOCK.value)
OF_SENT = "one_shot_all_reduce_of_sent"  # the names of launches that receive begin with it
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
POLLS = tl.constexpr(1 << 30)  # then the launch fails: after ten minutes or more


@dataclass(frozen=True, eq=False)
class Sent:
    """The memory by which products send their results to all ranks of a group.

    Attributes:
        words: int64 [PLACES, ranks, SENT_BYTES / 8], which all ranks write to; zeros at first.
        targets: int64 [ranks], addresses in the `words` of each rank, where this rank writes.
        counts: int32 [SENT_COUNTS], how many results were received; zeros at first. All are equal, except during a launch of
            `sum_of_sent`, of which each block has a count of its own.
    """

    words: Tensor
    targets: Tensor
    counts: Tensor


@dataclass(frozen=True, eq=False)
class Inbox:
    """The memory by which the ranks of a group exchange small tensors.

    Attributes:
        rank: This rank.
        words: int64 [PLACES, ranks, MOST_BLOCKS * BLOCK_WORDS], which the other ranks write to; zeros at first.
        addresses: int64 [ranks], the addresses of the `words` of all ranks in this process.
        counts: int32 [MOST_BLOCKS], how many exchanges each block has made; zeros at first.
        sent: For what products send.
    """

    rank: int
    words: Tensor
    addresses: Tensor
    counts: Tensor
    sent: Sent

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.addresses)


def memory_words(ranks: int) -> int:
    """Return how many int64 words of memory each rank needs for its `Inbox`."""
    return sum(_sizes(ranks))


def _sizes(ranks: int) -> tuple[int, ...]:
    """Return the sizes of the parts of that memory in int64 words: words and counts of the `Inbox`, those of its `Sent`."""
    words, sent = PLACES * ranks * MOST_BLOCKS * BLOCK_WORDS, PLACES * ranks * SENT_BYTES.value // 8
    return words, MOST_BLOCKS // 2, sent, SENT_COUNTS.value // 2


def in_memory(rank: int, memory: Tensor, addresses: Tensor) -> Inbox:
    """Return the inbox of a rank in its memory: int64 [`memory_words`], zeros.

    `addresses` int64 [ranks], on the same device, are those of the memory of all ranks in this process.
    """
    ranks = len(addresses)
    words, counts, sent, sent_counts = memory.split(_sizes(ranks))
    order = (rank + torch.arange(1, ranks + 1, device=addresses.device)) % ranks  # each rank begins with another
    targets = addresses[order] + 8 * (words.numel() + counts.numel()) + rank * SENT_BYTES.value
    found = Sent(sent.view(PLACES, ranks, -1), targets, sent_counts.view(torch.int32))
    return Inbox(rank, words.view(PLACES, ranks, -1), addresses, counts.view(torch.int32), found)


def all_reduce(inbox: Inbox, x: Tensor, out: Tensor) -> Launch:
    """Return the launch that writes the sum of the ranks' tensors `x` to `out`, both contiguous and of one of DTYPES.

    It sums in fp32, in the order of the ranks, so all ranks get the same bits.
    """
    arguments = {"x_ptr": x, "out_ptr": out, "n": x.numel(), **_inbox_arguments(inbox)}
    return _launch(one_shot_all_reduce, arguments, inbox, x, x.numel())


def all_gather(inbox: Inbox, x: Tensor, sizes: Sequence[int], out: Tensor) -> Launch:
    """Return the launch that writes the ranks' tensors `x` [N, sizes[rank]] side by side to `out` [N, sum(sizes)].

    Both are contiguous and of one of DTYPES, and `out` may have another one than the tensors.
    """
    rows = out.numel() // sum(sizes)
    bounds = tuple(sum(sizes[:i]) for i in range(len(sizes) + 1))  # in a row of the result
    arguments = {"x_ptr": x, "out_ptr": out, "n": x.numel(), "rows": rows, **_inbox_arguments(inbox)}
    return _launch(one_shot_all_gather, arguments, inbox, x, rows * max(sizes), BOUNDS=bounds)


def sum_of_sent(inbox: Inbox, out: Tensor) -> Launch:
    """Return the launch that writes to `out`, contiguous, the sum of the results that products of all ranks have sent.

    Those have the shape and the dtype of `out`. The bits are those of `all_reduce`.
    """
    arguments = {"out_ptr": out, "n": out.numel(), "words_ptr": inbox.sent.words, "counts_ptr": inbox.sent.counts}
    constants = {"RANKS": inbox.ranks, "BLOCK": SENT_BLOCK.value // out.itemsize}
    grid = (-(-out.nbytes // SENT_BLOCK.value),)
    return Launch(one_shot_all_reduce_of_sent, grid, arguments, constants, min(4, most_warps(constants["BLOCK"])), early=True)


def sending(inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments and the constants of a launch that sends its result if its kernel has the inputs for that.

    Those are "targets" and "counts" of a `Sent`.
    """
    if "targets" not in inputs:
        return {}, {"targets_ptr": None, "counts_ptr": None, "RANKS": 1}
    return {f"{name}_ptr": inputs[name] for name in ("targets", "counts")}, {"RANKS": len(inputs["targets"])}


def receiving(inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments and the constants of a launch that receives an input if its kernel has the inputs for that.

    Those are "words" and "counts" of a `Sent`. Only the shape and the dtype of its input "x" count then. Raises ModelError if
    a result like "x" can't be sent.
    """
    if "words" not in inputs:
        return {}, {"words_ptr": None, "counts_ptr": None, "RANKS": 1}
    if inputs["x"].nbytes > SENT_BYTES.value:
        found = f"{inputs['x'].nbytes:,} bytes, and {SENT_BYTES.value:,} is the most"
        raise ModelError("receiving what products have sent", found, "Sum it by `all_reduce`")
    return {f"{name}_ptr": inputs[name] for name in ("words", "counts")}, {"RANKS": inputs["words"].shape[1]}


def most_warps(values: int) -> int:
    """Return how many warps a block may have that receives so many values, a power of two."""
    return max(1, values // 32)


def named(name: str) -> Callable[[Any], str]:
    """Return what names the compiled code of a kernel: `name`; for launches that receive, the name says that, too."""
    return lambda given: f"{OF_SENT}_{name.strip('_')}" if given.constants["RANKS"] > 1 else name


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
    take_turn()
    block = tl.program_id(0)
    number = tl.load(counts_ptr + block) + 1
    i = block * BLOCK + tl.arange(0, BLOCK)
    own = _packed(x_ptr, i, n, PER_WORD)
    place = (number & 1) * RANKS
    _send(_numbered(own, number), (place + rank) * ROOM + i, addresses_ptr, rank, RANKS)
    low, high = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for sender in tl.static_range(RANKS):
        values = own
        if sender != rank:
            values = _received(words_ptr + (place + sender) * ROOM + i, number)
        low += _value(values, 0, out_ptr.dtype.element_ty, PER_WORD)
        if PER_WORD == 2:
            high += _value(values, 1, out_ptr.dtype.element_ty, PER_WORD)
    tl.store(out_ptr + i * PER_WORD, low, mask=i * PER_WORD < n)
    if PER_WORD == 2:
        tl.store(out_ptr + i * 2 + 1, high, mask=i * 2 + 1 < n)
    tl.store(counts_ptr + block, number)


@triton.jit
def one_shot_all_gather(
    x_ptr, out_ptr, n, rows, words_ptr, addresses_ptr, counts_ptr, rank,
    BOUNDS: tl.constexpr, RANKS: tl.constexpr, PER_WORD: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    take_turn()
    block = tl.program_id(0)
    number = tl.load(counts_ptr + block) + 1
    i = block * BLOCK + tl.arange(0, BLOCK)
    own = _packed(x_ptr, i, n, PER_WORD)
    place = (number & 1) * RANKS
    _send(_numbered(own, number), (place + rank) * ROOM + i, addresses_ptr, rank, RANKS)
    for sender in tl.static_range(RANKS):
        values = own
        if sender != rank:
            values = _received(words_ptr + (place + sender) * ROOM + i, number)
        if BOUNDS[sender] < BOUNDS[sender + 1]:
            _place(
                values, i, out_ptr, rows, x_ptr.dtype.element_ty,
                BOUNDS[sender], BOUNDS[sender + 1] - BOUNDS[sender], BOUNDS[RANKS], PER_WORD,
            )  # fmt: skip
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
def _place(
    values, i, out_ptr, rows, dtype: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    PER_WORD: tl.constexpr,
):  # fmt: skip
    """Write the values of words `i`, which are those of a tensor [rows, SIZE], from column START on to `out` [rows, WIDTH].

    The words hold values of `dtype`; `out` may have another one.
    """
    for half in tl.static_range(PER_WORD):
        at = i * PER_WORD + half
        value = _value(values, half, dtype, PER_WORD)
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
def _send(words, place, addresses_ptr, rank, RANKS: tl.constexpr):
    """Write `words` to the same place in the memory of all other ranks, each rank beginning with another."""
    for step in tl.static_range(1, RANKS):
        address = tl.load(addresses_ptr + (rank + step) % RANKS)
        tl.store(address.to(tl.pointer_type(tl.int64)) + place, words, cache_modifier=".wt")


@triton.jit
def _received(pointers, number):
    """Wait until all words at `pointers` have this number, and return their values, uint32."""
    words = tl.load(pointers, volatile=True)
    missing = tl.max(((words >> 32) != number).to(tl.int32))
    polls = 0
    while (missing != 0) & (polls < POLLS):
        words = tl.load(pointers, volatile=True)
        missing = tl.max(((words >> 32) != number).to(tl.int32))
        polls += 1
    if not INTERPRETED:
        _fail_if(missing)
    return (words & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _fail_if(missing):
    """End the launch with an error if `missing` is not 0."""
    if missing != 0:
        tl.inline_asm_elementwise("trap; mov.b32 $0, $1;", "=r,r", [missing], tl.int32, is_pure=False, pack=1)


@triton.jit
def targets_of(targets_ptr, counts_ptr, at, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Return the pointers by which a product sends the values `at` of its result to all ranks, a tuple.

    Call it after the launch's turn, and long before `send`, so that nothing waits for what it loads.
    """
    offset = (tl.load(counts_ptr) & 1) * (RANKS * _room(dtype)) + at
    found = ()
    for i in tl.static_range(RANKS):
        found = found + (tl.load(targets_ptr + i).to(tl.pointer_type(_bits_of(dtype))) + offset,)  # noqa: RUF005
    return found


@triton.jit
def send(value, targets, inside):
    """Write values, in the dtype of the result, to all ranks."""
    bits = value.to(_bits_of(value.dtype), bitcast=True)
    sign: tl.constexpr = -(1 << (value.dtype.primitive_bitwidth - 1))
    sent = tl.where(bits == sign, 0, bits) ^ sign
    for i in tl.static_range(len(targets)):
        tl.store(targets[i], sent.to(bits.dtype), mask=inside, cache_modifier=".wt")


@triton.constexpr_function
def _bits_of(dtype):
    return tl.int16 if dtype.primitive_bitwidth == 16 else tl.int32


@triton.jit
def one_shot_all_reduce_of_sent(out_ptr, n, words_ptr, counts_ptr, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    take_turn()
    block = tl.program_id(0)
    number = tl.load(counts_ptr + block)
    i = block * BLOCK + tl.arange(0, BLOCK)
    place = place_of(words_ptr, number, i, out_ptr.dtype.element_ty, RANKS)
    tl.store(out_ptr + i, received(place, i < n, out_ptr.dtype.element_ty, RANKS), mask=i < n)
    empty(place, i < n, RANKS)
    end = tl.where(block == tl.num_programs(0) - 1, SENT_COUNTS, block + 1)  # the last block counts for those that don't run
    count = tl.arange(0, SENT_COUNTS)
    tl.store(counts_ptr + count, tl.zeros_like(count) + number + 1, mask=(count >= block) & (count < end))


@triton.jit
def place_of(words_ptr, number, at, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Return pointers to where the values `at` of result `number` arrive from rank 0."""
    return words_ptr.to(tl.pointer_type(_bits_of(dtype))) + (number & 1) * (RANKS * _room(dtype)) + at


@triton.jit
def received(place, inside, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Wait until the values at `place` have arrived from all ranks, and return their sum, fp32.

    It is computed in the order of the ranks. Call it after the launch's turn.
    """
    bits = _loaded(place, inside, RANKS)
    missing = _missing(bits)
    polls = 0
    while (missing != 0) & (polls < POLLS):
        bits = _loaded(place, inside, RANKS)
        missing = _missing(bits)
        polls += 1
    if not INTERPRETED:
        _fail_if(missing)
    return _sum(bits, inside, dtype)


@triton.jit
def received_row(place, inside, residual, dtype: tl.constexpr, ADD: tl.constexpr, RANKS: tl.constexpr):
    """Return the sum that `received` returns, rounded to `dtype`, and the sum of its squares. If ADD, the residual is added.

    The sum of squares tells whether all values have arrived: a missing one makes it infinite. So no other sum is needed to find
    that out. The sum is also a barrier: all threads have read their values then.
    """
    x = _rounded(arrived(place, inside, dtype, RANKS), residual, dtype, ADD)
    squares = tl.sum(x * x)
    if not squares < float("inf"):
        x = _rounded(received(place, inside, dtype, RANKS), residual, dtype, ADD)
        squares = tl.sum(x * x)
    return x, squares


@triton.jit
def arrived(place, inside, dtype: tl.constexpr, RANKS: tl.constexpr):
    """Return the sum of the values at `place`, fp32, infinity where one hasn't arrived. Call it after the launch's turn."""
    bits = _loaded(place, inside, RANKS)
    total = _sum(bits, inside, dtype)
    for sender in tl.static_range(RANKS):
        total = tl.where(bits[sender] == 0, float("inf"), total)
    return total


@triton.jit
def _rounded(x, residual, dtype: tl.constexpr, ADD: tl.constexpr):
    x = x.to(dtype).to(tl.float32)
    return (x + residual).to(dtype).to(tl.float32) if ADD else x


@triton.jit
def _sum(bits, inside, dtype: tl.constexpr):
    """Return the sum of the values over the ranks, fp32; 0 where not `inside`."""
    sign: tl.constexpr = -(1 << (dtype.primitive_bitwidth - 1))
    total = tl.zeros(bits[0].shape, tl.float32)
    for sender in tl.static_range(len(bits)):
        total += (bits[sender] ^ sign).to(_bits_of(dtype)).to(dtype, bitcast=True).to(tl.float32)
    return tl.where(inside, total, 0.0)


@triton.jit
def _loaded(place, inside, RANKS: tl.constexpr):
    """Return what is at `place` from each rank, a tuple; 1 where not `inside`.

    Triton 3.6 fills 16-bit lanes outside with wrong numbers if `other` is negative.
    """
    found = ()
    for sender in tl.static_range(RANKS):
        found = found + (tl.load(place + sender * _room(place.dtype.element_ty), mask=inside, other=1, volatile=True),)  # noqa: RUF005
    return found


@triton.jit
def _missing(bits):
    found = (bits[0] == 0).to(tl.int32)
    for sender in tl.static_range(1, len(bits)):
        found |= (bits[sender] == 0).to(tl.int32)
    return tl.max(found)


@triton.jit
def empty(place, inside, RANKS: tl.constexpr):
    """Make room at `place` for the next results but one. Call it when all programs have received the values."""
    for sender in tl.static_range(RANKS):
        words = place + sender * _room(place.dtype.element_ty)
        tl.store(words, tl.zeros(words.shape, words.dtype.element_ty), mask=inside)


@triton.jit
def count_received(counts_ptr, number):
    """Count a result after `number` others. Call it when all threads that read `number` have done so."""
    count = tl.arange(0, SENT_COUNTS)
    tl.store(counts_ptr + count, tl.zeros_like(count) + number + 1)


@triton.constexpr_function
def _room(dtype):
    """Return for how many values there is room from each rank."""
    return SENT_BYTES.value * 8 // dtype.primitive_bitwidth
