# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of one new token on a cache quantized to 8 or 4 bits (`kv_codes`): split-KV decode that reads codes.

Converting codes to numbers limits the kernel more than reading them. Keys become bytes, and a query becomes two digits of 8
bits, whose products are exact integers. Values become fp16 numbers, two per instruction, and scales are multiplied into scores
and weights. Slots are the rows of all products and query heads their columns, so eight heads waste no row. For rotated keys or
values, the query and the result are rotated instead, once per split.

The compiler loads codes ahead, but not scales of two bytes, so the loop itself loads those of the next tile. A multiprocessor
prefers its oldest block, so its blocks end one after the other although they have the same work.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels import kv_codes
from toolkit.kernels.attention import (
    AttentionDecode,
    AttentionShape,
    DecodeShape,
    attend,
    check_cached,
    check_query,
    dot,
    seen_slots,
    split_launches,
    split_length,
    splits_for,
)
from toolkit.kernels.base import Config, Cost, Launch, Shape, Tensors
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import INTERPRETED, await_previous, let_next_begin
from toolkit.kernels.kv_codes import UNIT, CodeScheme, decode, encode, find_kv_scheme, levels, random_signs

# Slots per block, warps, registers per thread, blocks per launch: one to four for each multiprocessor. 96 registers leave room
# for blocks of the next launch. The fastest configs of twelve problems on an H200 are among these; for each problem, the two to
# five were timed that were promising.
Tile = tuple[int, int, int, int]
TILES: tuple[Tile, ...] = (
    (64, 4, 128, 528), (64, 4, 168, 396), (64, 4, 168, 264),
    (128, 4, 96, 528), (128, 4, 128, 528), (128, 8, 96, 264), (128, 8, 128, 264),
)  # fmt: skip
# Up to this many bytes per slot, the default: a tile and its stages. It fits every GPU of the catalogue, and took at most 20 %
# longer than the fastest config of each problem for which it was timed.
DEFAULTS: tuple[tuple[float, Tile, int], ...] = (
    (260, (64, 4, 128, 528), 3), (516, (128, 8, 128, 264), 2), (772, (64, 4, 168, 396), 2), (math.inf, (64, 4, 168, 264), 2),
)  # fmt: skip


@dataclass(frozen=True)
class CodesShape(DecodeShape):
    """`codes` is the format of the cache: a name in `KV_SCHEMES`."""

    codes: str = "int8"

    @property
    def scheme(self) -> CodeScheme:
        return find_kv_scheme(self.codes)

    def words(self, bits: int) -> tuple[int, ...]:
        """Return the shape of the words that hold codes with this number of bits."""
        return (1, self.kv_heads, self.slots, self.head_dim * bits // 16)


class AttentionCodes(AttentionDecode):
    """As `AttentionDecode`, on the codes that `kv_codes.encode` returns.

    "keys" and "values" are int16 [1, KV heads, slots, D * bits / 16], "key_scales" and "value_scales" fp16 [1, KV heads,
    slots], and "signs" fp32 [D]. head_dim must fill at least 16 words: 64 for 4 bits. The reference uses the same codes.
    """

    name = "attention_codes"
    shape_type = CodesShape
    lengths = ("slots", "quantised")
    known: ClassVar[Mapping[str, AttentionShape]] = {
        f"{name} {codes}": CodesShape(*sizes, scaled=scaled, quantised=quantised, codes=codes)
        for name, sizes, scaled, quantised in (
            ("gemma4-31b full 32k", (32, 4, 512, 32768), False, True),
            ("qwen3-8b 32k", (32, 8, 128, 32768), True, True),
            ("qwen3.5-35b-a3b 32k", (16, 2, 256, 32768), True, False),
        )
        for codes in ("int8", "k4v8", "int4")
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, CodesShape)
        row = shape.scheme.bytes_per_token(shape.head_dim)
        default = next((tile, stages) for most, tile, stages in DEFAULTS if row <= most)
        found = []
        for (block, warps, registers, blocks), stages in (default, *itertools.product(TILES, (2, 3))):
            splits = splits_for(shape, blocks)
            found.append(Config(block_n=block, splits=splits, registers=registers, warps=warps, stages=stages))
        return list(dict.fromkeys(found))

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """As in `AttentionDecode`, with scratch for more splits."""
        assert isinstance(shape, CodesShape)
        found, splits = super().outputs(shape, inputs), splits_for(shape, max(blocks for *_, blocks in TILES))
        for name in ("partial", "weights"):
            size = found[name].shape
            found[name] = found[name].new_empty((size[0], splits, *size[2:]))
        return found

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Return the codes of the values that `AttentionDecode` uses."""
        assert isinstance(shape, CodesShape)
        made, scheme = super().inputs(shape, device, seed), shape.scheme
        signs = torch.empty(shape.head_dim, device=device)
        if not made["query"].is_meta:
            signs = random_signs(shape.head_dim, seed, device)
        for name, bits in (("key", scheme.key_bits), ("value", scheme.value_bits)):
            plain, size = made.pop(f"{name}s"), shape.words(bits)
            codes = torch.empty(size, dtype=torch.int16, device=device)
            scales = torch.empty(size[:3], dtype=torch.float16, device=device)
            for head in range(0 if plain.is_meta else shape.kv_heads):  # one at a time: fp32 copies of all may not fit
                codes[0, head], scales[0, head] = encode(plain[0, head], bits, signs)
            made |= {f"{name}s": codes, f"{name}_scales": scales}
        return {**made, "signs": signs}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, CodesShape)
        scheme, signs = shape.scheme, inputs["signs"]
        keys = decode(inputs["keys"], inputs["key_scales"], scheme.key_bits, signs)
        values = decode(inputs["values"], inputs["value_scales"], scheme.value_bits, signs)
        return (attend(shape, inputs["query"], keys, values, inputs["positions"]),)

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, CodesShape)
        check_query(shape, inputs, tokens=1)
        if shape.key_dim:
            raise ModelError(f"{shape.codes} with key_dim {shape.key_dim}", "codes hold whole keys", "Give a key_dim of 0")
        scheme, query = shape.scheme, inputs["query"]
        least = 256 // min(scheme.key_bits, scheme.value_bits)
        if shape.head_dim < least:
            raise ModelError(f"{shape.codes} with head_dim {shape.head_dim}", f"it wants at least {least}", "Choose bf16")
        strides: dict[str, int] = {}
        for name, bits in (("key", scheme.key_bits), ("value", scheme.value_bits)):
            size = shape.words(bits)
            check_cached(f"{name}s", inputs[f"{name}s"], size, torch.int16, query)
            check_cached(f"{name}_scales", inputs[f"{name}_scales"], size[:3], torch.float16, query)
            strides |= {f"{name}_stride": inputs[f"{name}s"].stride(1)}
            strides |= {f"{name}_scale_stride": inputs[f"{name}_scales"].stride(1)}
        check_tensor("attention", "signs", inputs["signs"], (shape.head_dim,), torch.float32, query)
        rows = max(8, triton.next_power_of_2(shape.group))
        fold = max(1, min(64 // shape.words(scheme.value_bits)[-1], config["block_n"] // 16))
        constants = {"KEY_BITS": scheme.key_bits, "VALUE_BITS": scheme.value_bits, "BLOCK_M": rows, "FOLD": fold}
        constants |= {"SHORT": shape.slots < config["block_n"]}
        first, second = split_launches(shape, config, outputs, _decode_codes, {**inputs, **strides}, constants)
        return [replace(first, registers=config["registers"]), second]

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, CodesShape)
        once = 2 * shape.heads * shape.head_dim * shape.torch_dtype.itemsize
        cached = shape.kv_heads * shape.seen * shape.scheme.bytes_per_token(shape.head_dim)
        return Cost(once + cached, 4.0 * shape.heads * shape.seen * shape.head_dim, "bf16_flops")


ATTENTION_CODES = AttentionCodes()
"""The one instance."""


def _twice(number: float) -> str:
    """Return the PTX constant for two fp16 numbers that both equal `number`."""
    return "0x" + 2 * struct.pack(">e", number).hex()


def _levels_ptx() -> str:
    """Return instructions that convert the eight 4-bit codes of $2 to signed bytes, level - 64: the lower four in $0.

    `prmt` looks up four of eight bytes at once. The highest bit of a code makes it return the sign of the byte instead, which
    is 255 for all of them, so the bytes of two look-ups are combined by `and`. Half of each table must be in a register. The
    assembler would copy a constant there before each look-up, so it isn't told that `zero`, of which they are made, is zero.
    """
    table = [round(level / UNIT) - 64 & 255 for level in levels().tolist()]
    words = [int.from_bytes(bytes(table[n : n + 4]), "little") for n in range(0, 16, 4)]
    lines = [".reg .b32 flipped, next, other, x, y, zero, own, first, third"]
    lines += ["mov.u32 zero, %lanemask_lt", "mov.u32 own, %lanemask_eq", "and.b32 zero, zero, own"]
    lines += [f"xor.b32 first, zero, {words[0]:#x}", f"xor.b32 third, zero, {words[2]:#x}"]
    lines += ["xor.b32 flipped, $2, 0x88888888", "shr.u32 next, $2, 16", "shr.u32 other, flipped, 16"]
    for out, code, flipped in (("$0", "$2", "flipped"), ("$1", "next", "other")):
        lines.append(f"prmt.b32 x, first, {words[1]:#x}, {code}")
        lines.append(f"prmt.b32 y, third, {words[3]:#x}, {flipped}")
        lines.append(f"and.b32 {out}, x, y")
    return "{ " + "; ".join(lines) + "; }"


# Of (v^2 + SQUARE)^2 + FOURTH, which multiplied by v and rounded to a multiple of 2^-24 is a level.
STEP, SQUARE, FOURTH = 9 / 16384, -0.000576019287109375, 4.100799560546875e-05


def _ptx(bits: int, field: int) -> str:
    """Return instructions that convert one field of the two words in $1 to two fp16 numbers in $0.

    4 bits: in bits 4 to 7 of 1024, a code gives 1024 + 16 code, which v = 9 / 16384 (16 code - 120) is computed from. The level
    is a polynomial in v. Its value is so small that fp16 rounds it to a multiple of 2^-24, to exactly the level.
    8 bits: in the last byte of 1024, code + 128 gives 1152 + code.
    """
    low = 4 if bits == 4 else 0  # the bit position that the field needs
    moved = f"shl.b32 v, $1, {low - field * bits}" if field * bits < low else f"shr.u32 v, $1, {field * bits - low}"
    numbers = {"part": STEP, "middle": -1144 * STEP} if bits == 4 else {"part": 1 / 128, "middle": -9.0}
    lines = [".reg .b32 v, part, middle, second, fourth, inner", moved]
    if bits == 4:
        numbers |= {"second": SQUARE, "fourth": FOURTH}
        lines += ["lop3.b32 v, v, 0x00f000f0, 0x64006400, 0xea"]  # (v & mask) | 1024s
    else:
        lines += ["lop3.b32 v, v, 0x00ff00ff, 0x64806480, 0x6a"]  # (v & mask) ^ 1152s
    lines += [f"mov.b32 {name}, {_twice(number)}" for name, number in numbers.items()]
    lines += [f"fma.rn.f16x2 {'v' if bits == 4 else '$0'}, v, part, middle"]
    if bits == 4:
        lines += ["fma.rn.f16x2 inner, v, v, second", "fma.rn.f16x2 inner, inner, inner, fourth", "mul.rn.f16x2 $0, v, inner"]
    return "{ " + "; ".join(lines) + "; }"


LEVELS_PTX = tl.constexpr(_levels_ptx())
PTX_80, PTX_81 = tl.constexpr(_ptx(8, 0)), tl.constexpr(_ptx(8, 1))
PTX_40, PTX_41, PTX_42, PTX_43 = (tl.constexpr(_ptx(4, field)) for field in range(4))
LEVEL_UNIT, FIRST, FIFTH = tl.constexpr(UNIT), tl.constexpr(kv_codes.FIRST), tl.constexpr(kv_codes.FIFTH)
SMALL = tl.constexpr(2.0**-24)


@triton.jit
def numbers_of(words, FIELD: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Return one field of int16 words as fp16 numbers: 2^-24 of the levels of 4-bit codes, 1/128 of 8-bit codes."""
    if PTX:
        low: tl.constexpr = PTX_40 if FIELD == 0 else PTX_41
        high: tl.constexpr = PTX_42 if FIELD == 2 else PTX_43
        byte: tl.constexpr = PTX_80 if FIELD == 0 else PTX_81
        code: tl.constexpr = byte if BITS == 8 else low if FIELD < 2 else high
        return tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    codes = (words.to(tl.int32) >> (FIELD * BITS)) & ((1 << BITS) - 1)
    if BITS == 8:
        return (((codes ^ 128) - 128).to(tl.float32) * 0.0078125).to(tl.float16)
    return (level_of(codes) * SMALL).to(tl.float16)


@triton.jit
def level_of(codes):
    """Return the levels of 4-bit codes, 0 to 15, as fp32 integers."""
    v = codes.to(tl.float32) * 2 - 15
    return nearest(v * (FIRST + FIFTH * (v * v) * (v * v))).to(tl.float32)


@triton.jit
def level_bytes(words, offsets, START: tl.constexpr, BYTES: tl.constexpr, PTX: tl.constexpr):
    """Return two int8 tiles [N, BYTES] of levels - 64, of the codes from byte START on: coordinates of even and of odd words.

    Of four consecutive bytes, that is two words, the four fields of the first word are at the same place in the first result.
    """
    columns = START + tl.arange(0, BYTES)[None, :]
    if PTX:
        codes = tl.load(words.to(tl.pointer_type(tl.int8)) + 2 * offsets + columns)
        return tl.inline_asm_elementwise(LEVELS_PTX, "=r,=r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
    even = tl.load(words + offsets + columns // 4 * 2).to(tl.int32)
    odd = tl.load(words + offsets + columns // 4 * 2 + 1).to(tl.int32)
    even, odd = (even >> (4 * (columns % 4))) & 15, (odd >> (4 * (columns % 4))) & 15
    return (level_of(even) - 64).to(tl.int8), (level_of(odd) - 64).to(tl.int8)


@triton.jit
def nearest(x):
    """Return the integers nearest to x, of less than 2^22: added to 1.5 x 2^23, they are the low bits of an fp32 number."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def halves(x):
    """Return the first half of the columns of x [M, N], and the second one."""
    return tl.split(tl.permute(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))


@triton.jit
def by_fields(x, FIELDS: tl.constexpr):
    """Return x [M, N] with columns (field, word) in the order (word, field)."""
    words = tl.permute(tl.reshape(x, (x.shape[0], FIELDS, x.shape[1] // FIELDS)), (0, 2, 1))
    return tl.reshape(words, (x.shape[0], x.shape[1]))


@triton.jit
def digits_of(numbers):
    """Return integers [M, N] of up to 32,512 as int8 [2 M, N]: number = 256 a + b, first all a, then all b."""
    high = (numbers + 128) >> 8
    both = tl.permute(tl.join(high, numbers - 256 * high), (2, 0, 1))
    return tl.reshape(both, (2 * numbers.shape[0], numbers.shape[1])).to(tl.int8)


@triton.jit
def rotated(x, ROWS: tl.constexpr, SIZE: tl.constexpr, SIGN: tl.constexpr):
    """The orthogonal Hadamard transform of rows [ROWS, SIZE]: first of the low bits of the column, then of the upper four.

    Both matrices are multiplied by SIGN, 1 or -1. If two calls differ in it, the compiler doesn't keep the first one's matrices
    in shared memory for the second.
    """
    LOW: tl.constexpr = SIZE // 16
    INNER: tl.constexpr = max(16, LOW)
    x = times_signs(tl.reshape(x, (ROWS * SIZE // INNER, INNER)), INNER, LOW, SIGN)
    x = tl.permute(tl.reshape(x, (ROWS, 16, LOW)), (0, 2, 1))
    x = times_signs(tl.reshape(x, (ROWS * LOW, 16)), 16, 16, SIGN)
    x = tl.permute(tl.reshape(x, (ROWS, LOW, 16)), (0, 2, 1))
    return tl.reshape(x, (ROWS, SIZE)) * (1 / tl.sqrt(float(SIZE)))


@triton.jit
def times_signs(x, SIZE: tl.constexpr, BLOCK: tl.constexpr, SIGN: tl.constexpr):
    """Return x [M, SIZE] times the Hadamard matrix of +1 and -1 [BLOCK, BLOCK], repeated along the diagonal.

    x is the sum of two bf16 numbers, so that no range is lost and the products have 16 bits.
    """
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    parity = row & column & (BLOCK - 1)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    matrix = tl.where((row ^ column) < BLOCK, SIGN - 2 * SIGN * (parity & 1), 0).to(tl.float32).to(tl.bfloat16)
    high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    low = (x - high).to(tl.bfloat16)
    return dot(high.to(tl.bfloat16), matrix, dot(low, matrix, tl.zeros(x.shape, tl.float32)))


@triton.jit
def own_slots(mean, FOLD: tl.constexpr, WORDS: tl.constexpr, HEADS: tl.constexpr):
    """Return [HEADS, WORDS] of [FOLD WORDS, FOLD HEADS]: the sum of products of values and weights of the same slots."""
    if FOLD > 1:
        parts = tl.reshape(mean, (FOLD, WORDS, FOLD, HEADS))
        same = tl.arange(0, FOLD)[:, None, None, None] == tl.arange(0, FOLD)[None, None, :, None]
        mean = tl.sum(tl.sum(tl.where(same, parts, 0.0), 2), 0)
    return tl.trans(mean)


@triton.jit(do_not_specialize_on_alignment=["positions"])  # a part of a longer tensor: it may begin anywhere
def _decode_codes(
    query, keys, values, key_scales, value_scales, signs, positions, partial, weights,
    key_stride, value_stride, key_scale_stride, value_scale_stride, scale, capacity,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, FOLD: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """One split of one KV head, as in `attention`, with slots as rows and query heads as columns of all products.

    The last tile of the buffer begins earlier instead of reading beyond it. SHORT: the buffer is smaller than a tile.
    """
    let_next_begin()
    head, split = tl.program_id(0), tl.program_id(1)
    await_previous()
    PTX: tl.constexpr = not INTERPRETED
    rows, columns = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM)
    real = (rows < GROUP)[:, None]
    asked = tl.load(query + head * GROUP * HEAD_DIM + rows[:, None] * HEAD_DIM + columns[None, :], mask=real, other=0)
    if KEY_BITS == 4:
        turn = tl.load(signs + columns)
    first, end = seen_slots(positions, capacity, WINDOW)
    each, active = split_length(first, end, SPLITS, BLOCK_N)
    KEY_WORDS: tl.constexpr = HEAD_DIM * KEY_BITS // 16
    VALUE_WORDS: tl.constexpr = HEAD_DIM * VALUE_BITS // 16
    # The unit of the numbers next to the slot's scale: 8-bit codes are returned as 128ths.
    VALUE_UNIT: tl.constexpr = 128 if VALUE_BITS == 8 else 1
    if split < active:
        start = first + split * each
        stop = tl.minimum(start + each, end)
        whole = asked.to(tl.float32)
        if KEY_BITS == 4:
            whole = rotated(whole * turn[None, :], BLOCK_M, HEAD_DIM, 1)
        most = tl.max(tl.abs(whole), 1)
        whole = nearest(whole * (32512 / tl.maximum(most, 1e-30))[:, None])
        digits = digits_of(whole)
        if KEY_BITS == 4:
            # Wide keys in two parts: the bytes of all levels at once take so many registers that few blocks run at a time.
            PARTS: tl.constexpr = 2 if HEAD_DIM == 512 else 1
            BYTES: tl.constexpr = HEAD_DIM // 2 // PARTS
            center = tl.sum(whole, 1).to(tl.float32) * 64  # the bytes of levels are smaller by 64
            even, odd = tl.split(tl.reshape(digits, (2 * BLOCK_M, HEAD_DIM // 2, 2)))
            even, odd = by_fields(even, 4), by_fields(odd, 4)
            if PARTS == 2:
                even, last_even = halves(even)
                odd, last_odd = halves(odd)
                last_even, last_odd = tl.trans(last_even), tl.trans(last_odd)
            even, odd = tl.trans(even), tl.trans(odd)
            unit = most / 32512 * (scale * LEVEL_UNIT)
        else:
            whole = tl.trans(by_fields(digits, 2))
            unit = most / 32512 * scale
        key_rows = keys + head.to(tl.int64) * key_stride
        value_rows = values + head.to(tl.int64) * value_stride
        key_steps = key_scales + head.to(tl.int64) * key_scale_stride
        value_steps = value_scales + head.to(tl.int64) * value_scale_stride
        value_words = tl.arange(0, FOLD * VALUE_WORDS)[:, None]
        lines = tl.arange(0, BLOCK_N // FOLD)[None, :] * FOLD  # the first slot of each
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        last = 0 if SHORT else capacity - BLOCK_N  # where the last tile begins
        tile, folds = tl.arange(0, BLOCK_N), lines + value_words // VALUE_WORDS
        if SHORT:
            tile, folds = tl.minimum(tile, capacity - 1), tl.minimum(folds, capacity - 1)
        slots = tl.minimum(start, last) + tl.arange(0, BLOCK_N)
        next_key = tl.load(key_steps + slots, mask=slots < stop, other=0)
        next_value = tl.load(value_steps + slots, mask=slots < stop, other=0)
        m0 = tl.zeros((FOLD * VALUE_WORDS, FOLD * BLOCK_M), tl.float32)
        m1 = tl.zeros((FOLD * VALUE_WORDS, FOLD * BLOCK_M), tl.float32)
        if VALUE_BITS == 4:
            m2 = tl.zeros((FOLD * VALUE_WORDS, FOLD * BLOCK_M), tl.float32)
            m3 = tl.zeros((FOLD * VALUE_WORDS, FOLD * BLOCK_M), tl.float32)
        for slot in range(start, stop, BLOCK_N):
            base = tl.minimum(slot, last)
            slots = base + tl.arange(0, BLOCK_N)
            there = (slots >= slot) & (slots < stop)  # no mask for codes: scores of other slots are set to -inf
            key_step, value_step = next_key.to(tl.float32), next_value.to(tl.float32) * VALUE_UNIT
            slots = tl.minimum(slot + BLOCK_N, last) + tl.arange(0, BLOCK_N)
            next_key = tl.load(key_steps + slots, mask=slots < stop, other=0)
            next_value = tl.load(value_steps + slots, mask=slots < stop, other=0)
            # One pointer moves, so that the addresses differ by constants.
            key_tile, value_tile = key_rows + base * KEY_WORDS, value_rows + base * VALUE_WORDS
            scores = tl.zeros((BLOCK_N, 2 * BLOCK_M), tl.int32)
            if KEY_BITS == 4:
                a, b = level_bytes(key_tile, tile[:, None] * KEY_WORDS, 0, BYTES, PTX)
                scores = tl.dot(b, odd, tl.dot(a, even, scores, out_dtype=tl.int32), out_dtype=tl.int32)
                if PARTS == 2:
                    a, b = level_bytes(key_tile, tile[:, None] * KEY_WORDS, BYTES, BYTES, PTX)
                    scores = tl.dot(b, last_odd, tl.dot(a, last_even, scores, out_dtype=tl.int32), out_dtype=tl.int32)
            else:
                bytes = key_tile.to(tl.pointer_type(tl.int8)) + tile[:, None] * HEAD_DIM + columns[None, :]
                scores = tl.dot(tl.load(bytes), whole, scores, out_dtype=tl.int32)
            digit = tl.where(tl.arange(0, 2) == 0, 256.0, 1.0)[None, :, None]
            scores = tl.sum(tl.reshape(scores, (BLOCK_N, 2, BLOCK_M)).to(tl.float32) * digit, 1)
            if KEY_BITS == 4:
                scores += center[None, :]
            scores = tl.where(there[:, None], scores * unit[None, :] * key_step[:, None], float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 0))
            shrink, p = tl.exp2(peak - new_peak), tl.exp2(scores - new_peak[None, :])
            sums, peak = sums * shrink[None, :] + p, new_peak
            p = tl.reshape((p * value_step[:, None]).to(tl.float16), (BLOCK_N // FOLD, FOLD * BLOCK_M))
            if FOLD > 1:
                shrink = tl.reshape(tl.broadcast_to(shrink[None, :], (FOLD, BLOCK_M)), (FOLD * BLOCK_M,))
            # Transposed by the addresses: the words are converted in the registers from which they are multiplied.
            words = tl.load(value_tile + (folds * VALUE_WORDS + value_words % VALUE_WORDS))
            m0 = dot(numbers_of(words, 0, VALUE_BITS, PTX), p, m0 * shrink[None, :])
            m1 = dot(numbers_of(words, 1, VALUE_BITS, PTX), p, m1 * shrink[None, :])
            if VALUE_BITS == 4:
                m2 = dot(numbers_of(words, 2, VALUE_BITS, PTX), p, m2 * shrink[None, :])
                m3 = dot(numbers_of(words, 3, VALUE_BITS, PTX), p, m3 * shrink[None, :])
        total = tl.sum(sums, 0)
        total = tl.where(total > 0, total, 1)  # nothing seen: zeros with no weight, since the peak is -inf
        part = (1 / total)[:, None]
        at = (head * SPLITS + split) * GROUP
        mean = tl.join(own_slots(m0, FOLD, VALUE_WORDS, BLOCK_M), own_slots(m1, FOLD, VALUE_WORDS, BLOCK_M))
        if VALUE_BITS == 4:
            upper = tl.join(own_slots(m2, FOLD, VALUE_WORDS, BLOCK_M), own_slots(m3, FOLD, VALUE_WORDS, BLOCK_M))
            mean = tl.permute(tl.join(mean, upper), (0, 3, 2, 1))
        else:
            mean = tl.permute(mean, (0, 2, 1))
        mean = tl.reshape(mean, (BLOCK_M, HEAD_DIM)) * part
        if VALUE_BITS == 4:
            mean = rotated(mean * (LEVEL_UNIT / SMALL), BLOCK_M, HEAD_DIM, -1) * tl.load(signs + columns)[None, :]
        tl.store(partial + at * HEAD_DIM + rows[:, None] * HEAD_DIM + columns[None, :], mean, mask=real)
        tl.store(weights + at + rows, peak + tl.log2(total), mask=rows < GROUP)
