# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of one new token on a cache quantized to 8 or 4 bits (`kv_codes`): split-KV decode that reads codes.

Converting codes to numbers limits the kernel more than reading them: a 4-bit code costs about four lane operations. Codes
become fp16 numbers two per instruction, and scales are multiplied into scores and weights. For rotated keys or values, the
query and the result are rotated instead, once per split.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.attention import (
    BLOCK_TARGETS,
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
from toolkit.kernels.base import Config, Cost, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import INTERPRETED, await_previous, let_next_begin
from toolkit.kernels.kv_codes import POLYNOMIAL, CodeScheme, decode, encode, find_kv_scheme, random_signs


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
        blocks = [n for n in (16, 32, 64, 128) if 16384 <= n * shape.head_dim <= 32768] or [128]
        splits = sorted({splits_for(shape, target) for target in BLOCK_TARGETS})
        # Decoding codes takes arithmetic, so many blocks are best: within 8 % of the fastest in all timings on an H200.
        default = Config(block_n=blocks[-1], splits=splits[-1], warps=4, stages=2)
        return config_grid(default, stages=(2, 3), block_n=blocks, splits=splits)

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
        constants = {"KEY_BITS": scheme.key_bits, "VALUE_BITS": scheme.value_bits}
        return split_launches(shape, config, outputs, _decode_codes, {**inputs, **strides}, constants)

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


def _ptx(bits: int, field: int) -> str:
    """Return instructions that convert one field of the two words in $1 to two fp16 numbers in $0.

    4 bits: in bits 4 to 7 of 1024, a code gives 1024 + 16 code; dividing by 128 and subtracting 8.9375 gives exactly v = (code
    - 7.5) / 8, and the level is a polynomial in v. 8 bits: in the last byte of 1024, code + 128 gives 1152 + code.
    """
    low = 4 if bits == 4 else 0  # the bit position that the field needs
    moved = f"shl.b32 v, $1, {low - field * bits}" if field * bits < low else f"shr.u32 v, $1, {field * bits - low}"
    numbers = {"part": 1 / 128, "middle": -8.9375 if bits == 4 else -9.0}
    lines = [".reg .b32 v, square, sum, part, middle, first, third, fifth", moved]
    if bits == 4:
        numbers |= {"first": POLYNOMIAL[0], "third": POLYNOMIAL[1], "fifth": POLYNOMIAL[2]}
        lines += ["lop3.b32 v, v, 0x00f000f0, 0x64006400, 0xea"]  # (v & mask) | 1024s
    else:
        lines += ["lop3.b32 v, v, 0x00ff00ff, 0x64806480, 0x6a"]  # (v & mask) ^ 1152s
    lines += [f"mov.b32 {name}, {_twice(number)}" for name, number in numbers.items()]
    lines += [f"fma.rn.f16x2 {'v' if bits == 4 else '$0'}, v, part, middle"]
    if bits == 4:
        lines += ["mul.rn.f16x2 square, v, v", "fma.rn.f16x2 sum, square, fifth, third"]
        lines += ["fma.rn.f16x2 sum, square, sum, first", "mul.rn.f16x2 $0, v, sum"]
    return "{ " + "; ".join(lines) + "; }"


PTX_80, PTX_81 = tl.constexpr(_ptx(8, 0)), tl.constexpr(_ptx(8, 1))
PTX_40, PTX_41, PTX_42, PTX_43 = (tl.constexpr(_ptx(4, field)) for field in range(4))
FIRST, THIRD, FIFTH = (tl.constexpr(number) for number in POLYNOMIAL)


@triton.jit
def numbers_of(words, FIELD: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """Return one field of int16 words as fp16 numbers: the levels of 4-bit codes, 1/128 of 8-bit codes.

    Without `PTX` it rounds where the paired instructions round, so the bits are the same.
    """
    if PTX:
        low: tl.constexpr = PTX_40 if FIELD == 0 else PTX_41
        high: tl.constexpr = PTX_42 if FIELD == 2 else PTX_43
        byte: tl.constexpr = PTX_80 if FIELD == 0 else PTX_81
        code: tl.constexpr = byte if BITS == 8 else low if FIELD < 2 else high
        return tl.inline_asm_elementwise(code, "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2)
    codes = (words.to(tl.int32) >> (FIELD * BITS)) & ((1 << BITS) - 1)
    if BITS == 8:
        return (((codes ^ 128) - 128).to(tl.float32) * 0.0078125).to(tl.float16)
    return level_of(codes)


@triton.jit
def level_of(codes):
    """Return the levels of 4-bit codes, 0 to 15, in fp16."""
    v = codes.to(tl.float32) * 0.125 - 0.9375
    inner = (v * v * FIFTH + THIRD).to(tl.float16).to(tl.float32)
    return (v * (inner * (v * v) + FIRST).to(tl.float16).to(tl.float32)).to(tl.float16)


@triton.jit
def turn(a, b, c, d, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The orthogonal Hadamard transform of rows of length 4 SIZE, passed and returned as quarters [ROWS, SIZE]."""
    parity = tl.arange(0, SIZE)[:, None] & tl.arange(0, SIZE)[None, :]
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    matrix = (1 - 2 * (parity & 1)).to(tl.float16)
    zero = tl.zeros((ROWS, SIZE), tl.float32)
    a, b = dot(a.to(tl.float16), matrix, zero), dot(b.to(tl.float16), matrix, zero)
    c, d = dot(c.to(tl.float16), matrix, zero), dot(d.to(tl.float16), matrix, zero)
    a, b, c, d = a + b, a - b, c + d, c - d
    unit = 1 / tl.sqrt(4.0 * SIZE)
    return (a + c) * unit, (b + d) * unit, (a - c) * unit, (b - d) * unit


@triton.jit
def _decode_codes(
    query, keys, values, key_scales, value_scales, signs, positions, partial, weights,
    key_stride, value_stride, key_scale_stride, value_scale_stride, scale, capacity,
    WINDOW: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """One split of one KV head, as in `attention`; rows are held in as many parts as a word has fields."""
    let_next_begin()
    head, split = tl.program_id(0), tl.program_id(1)
    await_previous()
    first, end = seen_slots(positions, capacity, WINDOW)
    each, active = split_length(first, end, SPLITS, BLOCK_N)
    PTX: tl.constexpr = not INTERPRETED
    KEY_WORDS: tl.constexpr = HEAD_DIM * KEY_BITS // 16
    VALUE_WORDS: tl.constexpr = HEAD_DIM * VALUE_BITS // 16
    # The unit of the numbers next to the slot's scale: 8-bit codes are returned as 128ths.
    KEY_UNIT: tl.constexpr = 128 if KEY_BITS == 8 else 1
    VALUE_UNIT: tl.constexpr = 128 if VALUE_BITS == 8 else 1
    if split < active:
        start = first + split * each
        stop = tl.minimum(start + each, end)
        rows = tl.arange(0, BLOCK_M)
        real = (rows < GROUP)[:, None]
        key_words, value_words = tl.arange(0, KEY_WORDS), tl.arange(0, VALUE_WORDS)
        queries = query + head * GROUP * HEAD_DIM + rows[:, None] * HEAD_DIM + key_words[None, :]
        q0 = tl.load(queries, mask=real, other=0).to(tl.float32)
        q1 = tl.load(queries + KEY_WORDS, mask=real, other=0).to(tl.float32)
        if KEY_BITS == 4:
            q2 = tl.load(queries + 2 * KEY_WORDS, mask=real, other=0).to(tl.float32)
            q3 = tl.load(queries + 3 * KEY_WORDS, mask=real, other=0).to(tl.float32)
            q0, q1 = q0 * tl.load(signs + key_words), q1 * tl.load(signs + KEY_WORDS + key_words)
            q2 *= tl.load(signs + 2 * KEY_WORDS + key_words)
            q3 *= tl.load(signs + 3 * KEY_WORDS + key_words)
            q0, q1, q2, q3 = turn(q0, q1, q2, q3, BLOCK_M, KEY_WORDS)
            q2, q3 = q2.to(tl.float16), q3.to(tl.float16)
        q0, q1 = q0.to(tl.float16), q1.to(tl.float16)
        key_rows = keys + head.to(tl.int64) * key_stride + key_words[None, :]
        value_rows = values + head.to(tl.int64) * value_stride + value_words[None, :]
        key_steps = key_scales + head.to(tl.int64) * key_scale_stride
        value_steps = value_scales + head.to(tl.int64) * value_scale_stride
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        m0 = tl.zeros((BLOCK_M, VALUE_WORDS), tl.float32)
        m1 = tl.zeros((BLOCK_M, VALUE_WORDS), tl.float32)
        if VALUE_BITS == 4:
            m2 = tl.zeros((BLOCK_M, VALUE_WORDS), tl.float32)
            m3 = tl.zeros((BLOCK_M, VALUE_WORDS), tl.float32)
        for slot in range(start, stop, BLOCK_N):
            slots = slot + tl.arange(0, BLOCK_N)
            there = slots < stop
            # Words are transposed and then converted, in the registers from which they are multiplied.
            words = tl.trans(tl.load(key_rows + slots[:, None] * KEY_WORDS, mask=there[:, None], other=0))
            steps = tl.load(key_steps + slots, mask=there, other=0).to(tl.float32) * (scale * KEY_UNIT)
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            scores = dot(q0, numbers_of(words, 0, KEY_BITS, PTX), scores)
            scores = dot(q1, numbers_of(words, 1, KEY_BITS, PTX), scores)
            if KEY_BITS == 4:
                scores = dot(q2, numbers_of(words, 2, KEY_BITS, PTX), scores)
                scores = dot(q3, numbers_of(words, 3, KEY_BITS, PTX), scores)
            scores = tl.where(there[None, :], scores * steps[None, :], float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shrink, p = tl.exp2(peak - new_peak), tl.exp2(scores - new_peak[:, None])
            total, peak = total * shrink + tl.sum(p, 1), new_peak
            words = tl.load(value_rows + slots[:, None] * VALUE_WORDS, mask=there[:, None], other=0)
            steps = tl.load(value_steps + slots, mask=there, other=0).to(tl.float32) * VALUE_UNIT
            p = (p * steps[None, :]).to(tl.float16)
            m0 = dot(p, numbers_of(words, 0, VALUE_BITS, PTX), m0 * shrink[:, None])
            m1 = dot(p, numbers_of(words, 1, VALUE_BITS, PTX), m1 * shrink[:, None])
            if VALUE_BITS == 4:
                m2 = dot(p, numbers_of(words, 2, VALUE_BITS, PTX), m2 * shrink[:, None])
                m3 = dot(p, numbers_of(words, 3, VALUE_BITS, PTX), m3 * shrink[:, None])
        total = tl.where(total > 0, total, 1)  # nothing seen: zeros with no weight, since the peak is -inf
        part = 1 / total[:, None]
        at = (head * SPLITS + split) * GROUP
        found = partial + at * HEAD_DIM + rows[:, None] * HEAD_DIM + value_words[None, :]
        m0, m1 = m0 * part, m1 * part
        if VALUE_BITS == 4:
            m0, m1, m2, m3 = turn(m0, m1, m2 * part, m3 * part, BLOCK_M, VALUE_WORDS)
            m0, m1 = m0 * tl.load(signs + value_words), m1 * tl.load(signs + VALUE_WORDS + value_words)
            m2 *= tl.load(signs + 2 * VALUE_WORDS + value_words)
            m3 *= tl.load(signs + 3 * VALUE_WORDS + value_words)
            tl.store(found + 2 * VALUE_WORDS, m2, mask=real)
            tl.store(found + 3 * VALUE_WORDS, m3, mask=real)
        tl.store(found, m0, mask=real)
        tl.store(found + VALUE_WORDS, m1, mask=real)
        tl.store(weights + at + rows, peak + tl.log2(total), mask=rows < GROUP)
