# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
"""Attention of one new token on a cache held in 8 or 4 bits (`kv_codes`): split-KV decode that reads codes.

Bound by making numbers of codes before it is bound by reading them: a 4-bit code costs about four lane operations. Codes
become fp16 numbers two to an instruction, scales are multiplied into scores and weights, and where keys or values are
rotated it is the query and the result that are turned, once for each split.
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

from toolkit.errors import ModelError
from toolkit.kernels.attention import (
    BLOCK_TARGETS,
    INTERPRETED,
    AttentionDecode,
    AttentionShape,
    attend,
    check_cached,
    check_query,
    combine_last,
    dot,
    no_weight,
    seen_slots,
    split_launches,
    split_length,
    splits_for,
)
from toolkit.kernels.base import Config, Cost, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.kv_codes import POLYNOMIAL, CodeScheme, decode, encode, find_kv_scheme, random_signs


@dataclass(frozen=True)
class CodesShape(AttentionShape):
    """`codes`: how the cache is held, by the name of one of `KV_SCHEMES`."""

    codes: str = "int8"

    @property
    def scheme(self) -> CodeScheme:
        return find_kv_scheme(self.codes)

    def cached(self, bits: int) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype of codes of so many bits."""
        width, dtype = (self.head_dim, torch.int8) if bits == 8 else (self.head_dim // 4, torch.int16)
        return (1, self.kv_heads, self.slots, width), dtype


class AttentionCodes(AttentionDecode):
    """As `AttentionDecode`, on codes: "keys" and "values" int8 [1, KV heads, slots, D] or int16 [1, KV heads, slots, D / 4].

    "key_scales" and "value_scales" are fp16 [1, KV heads, slots], "signs" fp32 [D]: what `kv_codes.encode` makes and takes.
    4-bit codes want a head_dim of at least 64. Compared with the reference on the same codes.
    """

    name = "attention_codes"
    shape_type = CodesShape
    known: ClassVar[Mapping[str, AttentionShape]] = {
        f"{name} {codes}": CodesShape(*sizes, scaled=scaled, codes=codes)
        for name, sizes, scaled in (
            ("gemma4-31b full 32k", (32, 4, 512, 32768), False),
            ("qwen3-8b 32k", (32, 8, 128, 32768), True),
            ("qwen3.5-35b-a3b 32k", (16, 2, 256, 32768), True),
        )
        for codes in ("int8", "k4v8", "int4")
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, CodesShape)
        blocks = [n for n in (16, 32, 64, 128) if 4096 <= n * shape.head_dim <= 32768]
        splits = sorted({splits_for(shape, target) for target in BLOCK_TARGETS[1:]})
        default = Config(block_n=blocks[0], splits=splits_for(shape, 132), warps=4, stages=2)
        return config_grid(default, warps=(4, 8), stages=(2, 3), block_n=blocks, splits=splits)

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        """Codes of the values that `AttentionDecode` gets."""
        assert isinstance(shape, CodesShape)
        made, scheme = super().inputs(shape, device, seed), shape.scheme
        signs = torch.empty(shape.head_dim, device=device)
        if not made["query"].is_meta:
            signs = random_signs(shape.head_dim, seed, device)
        for name, bits in (("key", scheme.key_bits), ("value", scheme.value_bits)):
            plain, (size, dtype) = made.pop(f"{name}s"), shape.cached(bits)
            codes = torch.empty(size, dtype=dtype, device=device)
            scales = torch.empty(size[:3], dtype=torch.float16, device=device)
            for head in range(0 if plain.is_meta else shape.kv_heads):  # one at a time: fp32 copies of all needn't fit
                codes[0, head], scales[0, head] = encode(plain[0, head], bits, signs)
            made |= {f"{name}s": codes, f"{name}_scales": scales}
        return {**made, "signs": signs}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, CodesShape)
        keys, values = (decode(inputs[f"{n}s"], inputs[f"{n}_scales"], inputs["signs"]) for n in ("key", "value"))
        return (attend(shape, inputs["query"], keys, values, inputs["positions"]),)

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, CodesShape)
        check_query(shape, inputs, tokens=1)
        scheme, query = shape.scheme, inputs["query"]
        if min(scheme.key_bits, scheme.value_bits) == 4 and shape.head_dim < 64:
            raise ModelError(f"{shape.codes} with head_dim {shape.head_dim}", "4-bit codes want at least 64", "Choose int8")
        strides: dict[str, int] = {}
        for name, bits in (("key", scheme.key_bits), ("value", scheme.value_bits)):
            size, dtype = shape.cached(bits)
            check_cached(f"{name}s", inputs[f"{name}s"], size, dtype, query)
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
    """The PTX constant of two fp16 numbers, both this one."""
    return "0x" + 2 * struct.pack(">e", number).hex()


def _levels_ptx() -> str:
    """Instructions from a word of 2 x 4 codes in $4 to levels in $0 to $3, two in each: what `levels` does one at a time.

    A code in bits 4 to 7 of the fp16 number 1024 makes it 1024 + 16 code, and an eighth of a sixteenth of that, less
    8.9375, is (code - 7.5) / 8, exactly.
    """
    numbers = {"part": 1 / 128, "middle": -8.9375, "first": POLYNOMIAL[0], "third": POLYNOMIAL[1], "fifth": POLYNOMIAL[2]}
    lines = [".reg .b32 v, square, sum", *(f".reg .b32 {name}; mov.b32 {name}, {_twice(x)}" for name, x in numbers.items())]
    for j, moved in enumerate(("shl.b32 v, $4, 4", "mov.b32 v, $4", "shr.u32 v, $4, 4", "shr.u32 v, $4, 8")):
        lines += [moved, "lop3.b32 v, v, 0x00f000f0, 0x64006400, 0xea", "fma.rn.f16x2 v, v, part, middle"]
        lines += ["mul.rn.f16x2 square, v, v", "fma.rn.f16x2 sum, square, fifth, third"]
        lines += ["fma.rn.f16x2 sum, square, sum, first", f"mul.rn.f16x2 ${j}, v, sum"]
    return "{ " + "; ".join(lines) + "; }"


LEVELS_PTX = tl.constexpr(_levels_ptx())
# Four int8 codes in $2 to fp16 numbers in $0 and $1: in the last byte of 1024, code + 128 makes 1152 + code.
BYTES_PTX = tl.constexpr(f"""{{ .reg .b32 v, part, middle; mov.b32 part, {_twice(1 / 128)}; mov.b32 middle, {_twice(-9.0)};
xor.b32 v, $2, 0x80808080; prmt.b32 $0, v, 0x64646464, 0x4140; prmt.b32 $1, v, 0x64646464, 0x4342;
fma.rn.f16x2 $0, $0, part, middle; fma.rn.f16x2 $1, $1, part, middle; }}""")
FIRST, THIRD, FIFTH = (tl.constexpr(number) for number in POLYNOMIAL)


@triton.jit
def bytes_to_fp16(codes, PTX: tl.constexpr):
    """int8 codes to fp16 numbers, a 128th of each."""
    if PTX:
        return tl.inline_asm_elementwise(BYTES_PTX, "=&r,=&r,r", [codes], dtype=tl.float16, is_pure=True, pack=4)
    return (codes.to(tl.float32) * 0.0078125).to(tl.float16)


@triton.jit
def levels_of(words, PTX: tl.constexpr):
    """The levels of the four codes of each int16 word, fp16: four tensors like `words`, lowest bits first."""
    if PTX:
        return tl.inline_asm_elementwise(
            LEVELS_PTX, "=&r,=&r,=&r,=&r,r", [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    codes = words.to(tl.int32)
    return _level(codes & 15), _level((codes >> 4) & 15), _level((codes >> 8) & 15), _level((codes >> 12) & 15)


@triton.jit
def _level(code):
    """One level, rounded to fp16 where the instructions on pairs round."""
    v = code.to(tl.float32) * 0.125 - 0.9375
    inner = (v * v * FIFTH + THIRD).to(tl.float16).to(tl.float32)
    return (v * (inner * (v * v) + FIRST).to(tl.float16).to(tl.float32)).to(tl.float16)


@triton.jit
def turn(a, b, c, d, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The orthogonal Hadamard transform of rows of 4 SIZE, given and returned in quarters [ROWS, SIZE]; its own inverse."""
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
    query, keys, values, key_scales, value_scales, signs, positions, partial, weights, output, arrivals,
    key_stride, value_stride, key_scale_stride, value_scale_stride, scale,
    SLOTS: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, COLUMNS: tl.constexpr, FUSED: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
):  # fmt: skip
    """One split of one KV head, as in `attention`; what is rotated is held in quarters of a row."""
    head, split = tl.program_id(0), tl.program_id(1)
    first, end = seen_slots(positions, SLOTS, WINDOW)
    each, active = split_length(first, end, SPLITS, BLOCK_N)
    PTX: tl.constexpr = not INTERPRETED
    QUARTER: tl.constexpr = HEAD_DIM // 4
    KEY_WIDTH: tl.constexpr = HEAD_DIM if KEY_BITS == 8 else QUARTER
    VALUE_WIDTH: tl.constexpr = HEAD_DIM if VALUE_BITS == 8 else QUARTER
    if split < active:
        start = first + split * each
        stop = tl.minimum(start + each, end)
        rows, dims, parts = tl.arange(0, BLOCK_M), tl.arange(0, HEAD_DIM), tl.arange(0, QUARTER)
        real = (rows < GROUP)[:, None]
        queries = query + head * GROUP * HEAD_DIM + rows[:, None] * HEAD_DIM
        if KEY_BITS == 8:
            q = tl.load(queries + dims[None, :], mask=real, other=0).to(tl.float16)
        else:
            q0 = tl.load(queries + parts[None, :], mask=real, other=0) * tl.load(signs + parts)[None, :]
            q1 = tl.load(queries + QUARTER + parts[None, :], mask=real, other=0) * tl.load(signs + QUARTER + parts)[None, :]
            q2 = tl.load(queries + 2 * QUARTER + parts[None, :], mask=real, other=0)
            q2 *= tl.load(signs + 2 * QUARTER + parts)[None, :]
            q3 = tl.load(queries + 3 * QUARTER + parts[None, :], mask=real, other=0)
            q3 *= tl.load(signs + 3 * QUARTER + parts)[None, :]
            q0, q1, q2, q3 = turn(q0, q1, q2, q3, BLOCK_M, QUARTER)
            q0, q1, q2, q3 = q0.to(tl.float16), q1.to(tl.float16), q2.to(tl.float16), q3.to(tl.float16)
        key_rows = keys + head.to(tl.int64) * key_stride + tl.arange(0, KEY_WIDTH)[None, :]
        value_rows = values + head.to(tl.int64) * value_stride + tl.arange(0, VALUE_WIDTH)[None, :]
        key_steps = key_scales + head.to(tl.int64) * key_scale_stride
        value_steps = value_scales + head.to(tl.int64) * value_scale_stride
        peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if VALUE_BITS == 8:
            mean = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
        else:
            m0 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
            m1 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
            m2 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
            m3 = tl.zeros((BLOCK_M, QUARTER), tl.float32)
        for slot in range(start, stop, BLOCK_N):
            slots = slot + tl.arange(0, BLOCK_N)
            there = slots < stop
            codes = tl.load(key_rows + slots[:, None] * KEY_WIDTH, mask=there[:, None], other=0)
            steps = tl.load(key_steps + slots, mask=there, other=0).to(tl.float32) * scale
            scores = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            if KEY_BITS == 8:
                scores = dot(q, tl.trans(bytes_to_fp16(codes, PTX)), scores) * (steps * 128)[None, :]
            else:
                k0, k1, k2, k3 = levels_of(codes, PTX)
                scores = dot(q0, tl.trans(k0), scores)
                scores = dot(q1, tl.trans(k1), scores)
                scores = dot(q2, tl.trans(k2), scores)
                scores = dot(q3, tl.trans(k3), scores) * steps[None, :]
            scores = tl.where(there[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            shrink, p = tl.exp2(peak - new_peak), tl.exp2(scores - new_peak[:, None])
            total, peak = total * shrink + tl.sum(p, 1), new_peak
            codes = tl.load(value_rows + slots[:, None] * VALUE_WIDTH, mask=there[:, None], other=0)
            steps = tl.load(value_steps + slots, mask=there, other=0).to(tl.float32)
            if VALUE_BITS == 8:
                p = (p * (steps * 128)[None, :]).to(tl.float16)
                mean = dot(p, bytes_to_fp16(codes, PTX), mean * shrink[:, None])
            else:
                p = (p * steps[None, :]).to(tl.float16)
                v0, v1, v2, v3 = levels_of(codes, PTX)
                m0 = dot(p, v0, m0 * shrink[:, None])
                m1 = dot(p, v1, m1 * shrink[:, None])
                m2 = dot(p, v2, m2 * shrink[:, None])
                m3 = dot(p, v3, m3 * shrink[:, None])
        total = tl.where(total > 0, total, 1)  # nothing seen: zeros, of no weight, as its peak is -inf
        part = 1 / total[:, None]
        at = (head * SPLITS + split) * GROUP
        found = output + head * GROUP * HEAD_DIM if SPLITS == 1 else partial + at * HEAD_DIM
        found += rows[:, None] * HEAD_DIM
        if VALUE_BITS == 8:
            tl.store(found + dims[None, :], (mean * part).to(found.dtype.element_ty), mask=real)
        else:
            m0, m1, m2, m3 = turn(m0 * part, m1 * part, m2 * part, m3 * part, BLOCK_M, QUARTER)
            found += parts[None, :]
            m0, m1 = m0 * tl.load(signs + parts)[None, :], m1 * tl.load(signs + QUARTER + parts)[None, :]
            m2, m3 = m2 * tl.load(signs + 2 * QUARTER + parts)[None, :], m3 * tl.load(signs + 3 * QUARTER + parts)[None, :]
            tl.store(found, m0.to(found.dtype.element_ty), mask=real)
            tl.store(found + QUARTER, m1.to(found.dtype.element_ty), mask=real)
            tl.store(found + 2 * QUARTER, m2.to(found.dtype.element_ty), mask=real)
            tl.store(found + 3 * QUARTER, m3.to(found.dtype.element_ty), mask=real)
        if SPLITS > 1:
            tl.store(weights + at + rows, peak + tl.log2(total), mask=rows < GROUP)
            if FUSED:
                combine_last(partial, weights, output, arrivals, head, active, SPLITS, GROUP, HEAD_DIM, COLUMNS)
    elif not FUSED:
        no_weight(weights, head, split, SPLITS, GROUP, BLOCK_M)
