# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="override, assignment, misc"
# ruff: noqa: RUF005, SIM108  # what Triton compiles knows no (*a, b)
"""x times a packed matrix, transposed, for 1 to 8 tokens: the product of decoding.

Bound by the matrix's bytes, so each is loaded once, 16 at a time, and multiplied four weights an instruction (dp4a):
converting each code to float would take all the lane operations that a GPU has for it. For that the activations become
integers, in the kernel's prologue and kept in registers while the program walks over its rows: 8 bits with a scale per
32 ("int8"), or 16 bits as two 8-bit digits ("bf16": weight-only to some 90 dB, finer than a bf16 result). Zeros, minima
and centres are factored out with the group's sum of activations. The idea of integer activations is that of llama.cpp's
mat-vec kernels. A program's warps share a row where they must, so no sum crosses programs: the result is deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from toolkit.errors import ModelError
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors
from toolkit.quant import Scheme, dequantise, find_scheme

BLOCK = 32  # activations that share a scale
LIMITS = {"int8": 127, "bf16": 32512}  # the largest integer an activation becomes: one digit, or 127 * 256
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of results


@dataclass(frozen=True)
class MatmulShape(Shape):
    """x [m, k] times a packed matrix [n, k]; with an `activation`, the matrix holds n / 2 gate rows and then n / 2 up rows."""

    n: int
    k: int
    m: int = 1
    scheme: str = "q4_k"
    activations: str = "int8"  # or "bf16"
    activation: str = "none"  # or "silu", "gelu_tanh": the result is activation(gate) * up
    out: str = "bf16"  # or "fp32"

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.n if self.activation == "none" else self.n // 2


@triton.jit
def _dp4a(a, b, c, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """c plus four products: bytes of a (unsigned unless SIGNED) times signed bytes of b."""
    if PTX:
        if SIGNED:
            c = tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
        else:
            c = tl.inline_asm_elementwise("dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], tl.int32, True, 1)
    else:
        for i in tl.static_range(4):
            byte = ((a << (24 - 8 * i)) >> 24) if SIGNED else ((a >> (8 * i)) & 255)
            c += byte * ((b << (24 - 8 * i)) >> 24)
    return c


@triton.jit
def _nearest(x, inverse, PTX: tl.constexpr):
    """Bits of the float 1.5 * 2^23 + x * inverse: the nearest integer, ties to even, in the lowest. Rounded once."""
    if PTX:
        found = tl.fma(x, inverse, tl.full(x.shape, 12582912.0, tl.float32))
    else:
        found = (x.to(tl.float64) * inverse.to(tl.float64) + 12582912.0).to(tl.float32)
    return found.to(tl.int32, bitcast=True)


@triton.jit
def _bytes(a, b, c, d, BYTE: tl.constexpr, PTX: tl.constexpr):
    """One byte (0 or 1) of each of four words, as a word."""
    if PTX:
        code: tl.constexpr = "prmt.b32 $0, $1, $2, 0x0040;" if BYTE == 0 else "prmt.b32 $0, $1, $2, 0x0051;"
        low = tl.inline_asm_elementwise(code, "=r,r,r", [a, b], tl.int32, True, 1)
        high = tl.inline_asm_elementwise(code, "=r,r,r", [c, d], tl.int32, True, 1)
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x5410;", "=r,r,r", [low, high], tl.int32, True, 1)
    low = ((a >> (8 * BYTE)) & 255) | (((b >> (8 * BYTE)) & 255) << 8)
    return low | (((c >> (8 * BYTE)) & 255) << 16) | (((d >> (8 * BYTE)) & 255) << 24)


@triton.jit
def _load_activations(x_ptr, TILES: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr):
    """A token's activations as words of four, [BN, BG] int64: eight for each of TILES blocks a thread, as its weights'."""
    same = tl.zeros((BN, 1, 1), tl.int32)  # for every row
    found = ()
    for t in tl.static_range(TILES):
        first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)
        g = first + tl.minimum(tl.arange(0, BG), BLOCKS - 1)[None, :, None]
        for j in tl.static_range(4):
            low, high = tl.split(tl.load(x_ptr + g * 8 + 2 * j + tl.arange(0, 2)[None, None, :] + same))
            found = found + (low, high)
    return found


@triton.jit
def _integers(
    words, T: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, SUB: tl.constexpr,
    OFFSET: tl.constexpr, CENTRE: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A block's activations [BN, BG] as integers: scale, two shifts, eight words of (lower) digits, eight of higher ones."""
    x = ()
    for i in tl.static_range(8):
        for half in tl.static_range(2):
            pair = (words[i] >> (32 * half)).to(tl.int32)
            x = x + ((pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True))
    top = tl.abs(x[0])
    for i in tl.static_range(1, 32):
        top = tl.maximum(top, tl.abs(x[i]), propagate_nan=tl.PropagateNan.ALL)
    g = tl.arange(0, BG)[None, :]
    if (T + 1) * BG <= BLOCKS:
        valid = g >= 0
    elif BLOCKS > BG:  # the last tile ends with the row; what the one before has counts once
        valid = g >= (T + 1) * BG - BLOCKS
    else:
        valid = g < BLOCKS
    inverse = tl.where(valid & (top > 1e-30), tl.div_rn(LIMIT * 1.0, tl.maximum(top, 1e-30)), 0.0)
    scale = tl.where(valid, top / LIMIT, 0.0)  # no number where an activation is none, and so are all results
    low, high = (), ()
    first_half = tl.zeros((BN, BG), tl.int32)
    second_half = first_half
    ones = tl.full((BN, BG), 0x01010101, tl.int32)
    for i in tl.static_range(8):
        a, b = _nearest(x[4 * i], inverse, PTX), _nearest(x[4 * i + 1], inverse, PTX)
        c, d = _nearest(x[4 * i + 2], inverse, PTX), _nearest(x[4 * i + 3], inverse, PTX)
        word = _bytes(a, b, c, d, 0, PTX)
        total = _dp4a(ones, word, tl.zeros((BN, BG), tl.int32), False, PTX)
        low = low + (word,)
        if LIMIT > 127:  # the higher digit: what the lower one, which is signed, leaves
            word = _bytes(a + 128, b + 128, c + 128, d + 128, 1, PTX)
            total += _dp4a(ones, word, tl.zeros((BN, BG), tl.int32), False, PTX) << 8
            high = high + (word,)
        if i < 4:
            first_half += total
        else:
            second_half += total
    if SUB == 1:
        first_half += second_half
    if OFFSET == "centre":
        shifts = (first_half * -CENTRE, second_half * -CENTRE)  # where dot products start
    else:
        shifts = (first_half.to(tl.float32) * scale, second_half)
    return (scale,) + shifts + low + high


@triton.jit
def _addresses(
    row, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
    K: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Where the first BG blocks of rows [BN, 1] begin: codes [BN, BG, 2], then [BN, BG] of whatever the scheme has."""
    PER: tl.constexpr = 1 if GROUP == 16 else GROUP // 32  # blocks that share scales; of groups of 16 two are loaded at once
    g = tl.minimum(tl.arange(0, BG), K // 32 - 1)[None, :]
    codes = row * (K // 8 if BITS == 8 else K // 16) + g * (4 if BITS == 8 else 2)
    found = (codes_ptr + codes[:, :, None] + tl.arange(0, 2)[None, None, :], scales_ptr + row * (K // 32 // PER) + g // PER)
    if BITS == 5 or BITS == 6:
        found = found + (high_ptr + row * (K // 32) + g,)
    if STEPS:
        found = found + (scale_steps_ptr + row * (K // 256) + g // 8,)
    if OFFSET != "centre":
        found = found + (offsets_ptr + row * (K // 32 // PER) + g // PER,)
        if STEPS:
            found = found + (offset_steps_ptr + row * (K // 256) + g // 8,)
    return found


@triton.jit
def _advance(at, by, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr):
    """The same addresses `by` rows further on."""
    HIGH: tl.constexpr = BITS == 5 or BITS == 6
    PER: tl.constexpr = 1 if GROUP == 16 else GROUP // 32
    found = (at[0] + by * (K // 8 if BITS == 8 else K // 16), at[1] + by * (K // 32 // PER))
    if HIGH:
        found = found + (at[2] + by * (K // 32),)
    if STEPS:
        found = found + (at[2 + HIGH] + by * (K // 256),)
    if OFFSET != "centre":
        found = found + (at[2 + HIGH + (STEPS > 0)] + by * (K // 32 // PER),)
        if STEPS:
            found = found + (at[4 + HIGH] + by * (K // 256),)
    return found


@triton.jit
def _load_rows(
    at, K: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Codes, scales and offsets of ROWS rows and TILES blocks a thread. No load has a mask: it would take more instructions."""
    BLOCKS: tl.constexpr = K // 32
    HIGH: tl.constexpr = BITS == 5 or BITS == 6
    PER: tl.constexpr = 1 if GROUP == 16 else GROUP // 32
    found = ()
    for u in tl.static_range(ROWS):
        for t in tl.static_range(TILES):
            first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)
            codes = at[0] + u * BN * (K // 8 if BITS == 8 else K // 16) + first * (4 if BITS == 8 else 2)
            for part in tl.static_range(2 if BITS == 8 else 1):
                found = found + tl.split(tl.load(codes + 2 * part))
            group = u * BN * (BLOCKS // PER) + first // PER
            step = u * BN * (K // 256) + first // 8
            found = found + (tl.load(at[1] + group),)
            if HIGH:
                found = found + (tl.load(at[2] + u * BN * BLOCKS + first),)
            if STEPS:
                found = found + (tl.load(at[2 + HIGH] + step),)
            if OFFSET != "centre":
                found = found + (tl.load(at[2 + HIGH + (STEPS > 0)] + group),)
                if STEPS:
                    found = found + (tl.load(at[4 + HIGH] + step),)
    return found


@triton.jit
def _block_product(
    held, x, BN: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    OFFSET: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Products [BN, BG] of a block of each row with a token's, `x` as of `_integers`."""
    AT: tl.constexpr = 4 if BITS == 8 else 2
    AT_STEP: tl.constexpr = AT + 1 + (BITS == 5 or BITS == 6)
    AT_OFFSET: tl.constexpr = AT_STEP + (STEPS > 0)
    SUB: tl.constexpr = 2 if GROUP == 16 else 1
    parts = ()
    for s in tl.static_range(SUB):
        if OFFSET == "centre" and BITS < 8:
            dot = tl.broadcast_to(x[1 + s], (BN, BG))
        else:
            dot = tl.zeros((BN, BG), tl.int32)
        dot = _dot(held, x, dot, s, SUB, BITS, 0, PTX)
        if LIMIT > 127:
            dot += _dot(held, x, tl.zeros((BN, BG), tl.int32), s, SUB, BITS, 8, PTX) << 8
        if GROUP == 16:
            both = held[AT].to(tl.int32)
            scale = ((both << 24) >> 24 if s == 0 else both >> 8).to(tl.float32)
        else:
            scale = held[AT].to(tl.float32)
        parts = parts + (scale * dot.to(tl.float32),)
    value = parts[0]
    if SUB == 2:
        value += parts[1]
    if STEPS:
        value *= held[AT_STEP].to(tl.float32)
    value *= x[0]
    if OFFSET == "zero":
        value -= held[AT].to(tl.float32) * held[AT_OFFSET].to(tl.float32) * x[1]
    if OFFSET == "minimum":
        offset = held[AT_OFFSET].to(tl.float32)
        if STEPS:
            offset *= held[AT_OFFSET + 1].to(tl.float32)
        value -= offset * x[1]
    return value


@triton.jit
def _dot(held, x, shift, S: tl.constexpr, SUB: tl.constexpr, BITS: tl.constexpr, HIGHER: tl.constexpr, PTX: tl.constexpr):
    """`shift` plus the products of part S of SUB of a block with digits of activations."""
    upper = tl.zeros(shift.shape, tl.int32)  # of high nibbles where they stand: 16 times too large
    for j in tl.static_range(S * (4 // SUB), (S + 1) * (4 // SUB)):
        if BITS == 8:
            low, high = held[j].to(tl.int32), (held[j] >> 32).to(tl.int32)
        else:
            word = (held[j // 2] >> (32 * (j % 2))).to(tl.int32)
            low, high = word & 0x0F0F0F0F, word & -0x0F0F0F10
        if BITS == 5:
            low |= ((held[3] >> (2 * j)) & 0x01010101) << 4
            high = (high >> 4) & 0x0F0F0F0F | ((held[3] >> (2 * j + 1)) & 0x01010101) << 4
        if BITS == 6:
            bits = (held[3] >> (32 * (j // 2))).to(tl.int32) >> (4 * (j % 2))
            low |= (bits & 0x03030303) << 4
            high = (high >> 4) & 0x0F0F0F0F | ((bits >> 2) & 0x03030303) << 4
        shift = _dp4a(low, x[3 + HIGHER + 2 * j], shift, BITS == 8, PTX)
        if BITS == 4:
            upper = _dp4a(high, x[4 + HIGHER + 2 * j], upper, False, PTX)
        else:
            shift = _dp4a(high, x[4 + HIGHER + 2 * j], shift, BITS == 8, PTX)
    if BITS == 4:
        shift += upper >> 4
    return shift


@triton.jit
def _row_product(
    held, ROW: tl.constexpr, x, TOKEN: tl.constexpr, TILES: tl.constexpr, COUNT: tl.constexpr, BN: tl.constexpr,
    BG: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
    LIMIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A thread's share [BN, BG] of the products of row ROW (of its rows) with token TOKEN (of the program's)."""
    for t in tl.static_range(TILES):
        block = ()
        for i in tl.static_range(COUNT):
            block = block + (held[(ROW * TILES + t) * COUNT + i],)
        product = _block_product(block, x[TOKEN * TILES + t], BN, BG, BITS, GROUP, STEPS, OFFSET, LIMIT, PTX)
        if t == 0:
            total = product
        else:
            total += product
    return total


@triton.jit
def _activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up  # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z))


@triton.jit
def _matmul(
    x_ptr, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr, out_ptr, width,
    M: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    LIMIT: tl.constexpr, ACTIVATION: tl.constexpr, LEVELS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Rows [start, end) of one program, ROWS for each thread at a time, for TOKENS tokens."""
    BLOCKS: tl.constexpr = K // 32
    TILES: tl.constexpr = (BLOCKS + BG - 1) // BG
    TOKEN_BLOCKS: tl.constexpr = (M + TOKENS - 1) // TOKENS
    SUB: tl.constexpr = 2 if GROUP == 16 else 1
    COUNT: tl.constexpr = (
        (5 if BITS == 8 else 4 if BITS > 4 else 3) + (STEPS > 0) + (0 if OFFSET == "centre" else 2 if STEPS else 1)
    )
    HALVES: tl.constexpr = 1 if ACTIVATION == "none" else 2
    RESULTS: tl.constexpr = TOKENS * ROWS
    STEP: tl.constexpr = ROWS * BN
    program = (tl.program_id(0) // TOKEN_BLOCKS).to(tl.int64)
    token = (tl.program_id(0) % TOKEN_BLOCKS) * TOKENS
    programs = tl.num_programs(0) // TOKEN_BLOCKS
    start = (program * width // programs).to(tl.int32)
    end = ((program + 1) * width // programs).to(tl.int32)
    words = ()
    for m in tl.static_range(TOKENS):
        words = words + _load_activations(x_ptr + tl.minimum(token + m, M - 1) * (K // 4), TILES, BLOCKS, BN, BG)
    base = tl.maximum(tl.minimum(start, end - STEP), 0)  # the last rows of a program begin where they end with it
    row = base.to(tl.int64) + tl.arange(0, BN)[:, None]
    at = _addresses(
        row, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
        K, BG, BITS, GROUP, STEPS, OFFSET,
    )  # fmt: skip
    held = _load_rows(at, K, ROWS, TILES, BN, BG, BITS, GROUP, STEPS, OFFSET)
    if HALVES == 2:
        at_up = _addresses(
            row + width, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
            K, BG, BITS, GROUP, STEPS, OFFSET,
        )  # fmt: skip
        held_up = _load_rows(at_up, K, ROWS, TILES, BN, BG, BITS, GROUP, STEPS, OFFSET)
    x = ()
    for m in tl.static_range(TOKENS):
        for t in tl.static_range(TILES):
            eight = ()
            for i in tl.static_range(8):
                eight = eight + (words[(m * TILES + t) * 8 + i],)
            x = x + (_integers(eight, t, BLOCKS, BN, BG, SUB, OFFSET, CENTRE, LIMIT, PTX),)
    for first in tl.range(start, end, STEP, num_stages=1):
        current = base
        base = tl.maximum(tl.minimum(first + STEP, end - STEP), 0)
        by = (base - current).to(tl.int64)
        at = _advance(at, by, K, BITS, GROUP, STEPS, OFFSET)  # the next rows are on their way while these are multiplied
        following = _load_rows(at, K, ROWS, TILES, BN, BG, BITS, GROUP, STEPS, OFFSET)
        if HALVES == 2:
            at_up = _advance(at_up, by, K, BITS, GROUP, STEPS, OFFSET)
            following_up = _load_rows(at_up, K, ROWS, TILES, BN, BG, BITS, GROUP, STEPS, OFFSET)
        products = ()
        for m in tl.static_range(TOKENS):
            for u in tl.static_range(ROWS):
                products = products + (
                    _row_product(held, u, x, m, TILES, COUNT, BN, BG, BITS, GROUP, STEPS, OFFSET, LIMIT, PTX),
                )
                if HALVES == 2:
                    products = products + (
                        _row_product(held_up, u, x, m, TILES, COUNT, BN, BG, BITS, GROUP, STEPS, OFFSET, LIMIT, PTX),
                    )
        held = following
        if HALVES == 2:
            held_up = following_up
        for level in tl.static_range(LEVELS):  # all sums over a row as one: [BN, BG, 2, 2, ...]
            joined = ()
            for i in tl.static_range(RESULTS * HALVES >> (level + 1)):
                joined = joined + (tl.join(products[i], products[i + (RESULTS * HALVES >> (level + 1))]),)
            products = joined
        value = tl.sum(products[0], 1)  # gate and up next to each other
        if ACTIVATION == "none":
            value = tl.reshape(value, (BN, RESULTS))
        else:
            gate, up = tl.split(tl.reshape(value, (BN, RESULTS, 2)))
            value = _activate(gate, up, ACTIVATION)
        result = tl.arange(0, RESULTS)[None, :]
        n = current + (result % ROWS) * BN + tl.arange(0, BN)[:, None]
        of = token + result // ROWS
        out = out_ptr + of.to(tl.int64) * width + n
        tl.store(out, value.to(out_ptr.dtype.element_ty), mask=(n >= first) & (n < end) & (of < M))


class Int4Matmul(Kernel):
    """x [m, k] times a packed matrix [n, k], transposed, with an epilogue: see `MatmulShape`.

    Inputs "x" (bf16) and the matrix's parts (see `PackedMatrix`); one result "out" [m, width]. `cost` counts the
    matrix as it is held: q4_k takes 4.625 bits a weight where GGUF's blocks take 4.5 (6-bit scales), the rest the same.
    """

    name = "int4_matmul"
    shape_type = MatmulShape
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b gate+up": MatmulShape(n=43008, k=5376, activation="gelu_tanh"),
        "gemma4-31b down": MatmulShape(n=5376, k=21504),
        "gemma4-31b qkv sliding": MatmulShape(n=16384, k=5376),
        "gemma4-31b o sliding": MatmulShape(n=5376, k=8192),
        "gemma4-31b lm_head": MatmulShape(n=262144, k=5376, scheme="q6_k", out="fp32"),
        "qwen3-8b gate+up": MatmulShape(n=24576, k=4096, activation="silu"),
        "qwen3-8b down": MatmulShape(n=4096, k=12288),
        "qwen3-8b qkv": MatmulShape(n=6144, k=4096),
        "qwen3-8b o": MatmulShape(n=4096, k=4096),
        "qwen3-8b lm_head": MatmulShape(n=151936, k=4096, scheme="q6_k", out="fp32"),
    }

    def space(self, shape: MatmulShape) -> Sequence[Config]:
        return [Config(programs=264, block_k=4096, rows=2, tokens=1, warps=8)]

    def inputs(self, shape: MatmulShape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        scheme = find_scheme(shape.scheme)
        generator = torch.Generator(device if device != "meta" else "cpu").manual_seed(seed)
        x = torch.empty(shape.m, shape.k, dtype=torch.bfloat16, device=device)
        found = {"x": x.normal_(generator=generator) if x.device.type != "meta" else x}
        for name, (dtype, per) in scheme.parts().items():
            part = torch.empty(shape.n, shape.k // per, dtype=dtype, device=device)
            if not part.is_meta:
                _randomise(part, name, scheme, generator)
            found[name] = part
        return found

    def reference(self, shape: MatmulShape, inputs: Tensors) -> tuple[Tensor, ...]:
        scheme = find_scheme(shape.scheme)
        x = inputs["x"].float()
        if shape.activations == "int8":
            x = quantise_activations(x)
        parts = {name: inputs[name] for name in scheme.parts()}
        step = max(1, (1 << 26) // shape.k)
        chunks = [{name: part[i : i + step] for name, part in parts.items()} for i in range(0, shape.n, step)]
        y = torch.cat([(x.double() @ dequantise(scheme, chunk).double().T).float() for chunk in chunks], -1)
        if shape.activation != "none":
            gate, up = y.chunk(2, -1)
            y = (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        return (y.to(DTYPES[shape.out]),)

    def outputs(self, shape: MatmulShape, inputs: Tensors) -> dict[str, Tensor]:
        return {"out": torch.empty(shape.m, shape.width, dtype=DTYPES[shape.out], device=inputs["x"].device)}

    def launches(self, shape: MatmulShape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        scheme = find_scheme(shape.scheme)
        _check(shape, scheme, inputs, outputs)
        blocks = config["block_k"] // BLOCK
        tokens = min(config["tokens"], triton.next_power_of_2(shape.m))
        rows = config["rows"]
        while rows * (32 * config.warps // blocks) > max(1, shape.width):  # rows at a time, no more than there are
            rows, blocks = (rows // 2, blocks) if rows > 1 else (1, 2 * blocks)
        parts: dict[str, Any] = {
            "codes_ptr": inputs["codes"].view(torch.int64),
            "high_ptr": inputs["high"].view(torch.int64 if scheme.bits == 6 else torch.int32) if "high" in inputs else None,
            "scales_ptr": inputs["scales"].view(torch.int16) if scheme.group == 16 else inputs["scales"],
            "offsets_ptr": inputs.get("zeros", inputs.get("minima")),
            "scale_steps_ptr": inputs.get("scale_steps"),
            "offset_steps_ptr": inputs.get("minimum_steps"),
        }
        arguments = {name: part for name, part in parts.items() if part is not None}
        absent = {name: None for name, part in parts.items() if part is None}
        arguments |= {"x_ptr": inputs["x"].view(torch.int64), "out_ptr": outputs["out"], "width": shape.width}
        constants = {
            "M": shape.m, "K": shape.k, "TOKENS": tokens, "ROWS": rows, "BN": 32 * config.warps // blocks, "BG": blocks,
            "BITS": scheme.bits, "GROUP": scheme.group, "STEPS": scheme.steps, "OFFSET": scheme.offset,
            "CENTRE": scheme.centre, "LIMIT": LIMITS[shape.activations], "ACTIVATION": shape.activation,
            "PTX": inputs["x"].device.type != "cpu",
            "LEVELS": (tokens * rows * (shape.n // shape.width)).bit_length() - 1, **absent,
        }  # fmt: skip
        grid = (min(config["programs"], shape.width) * -(-shape.m // tokens),)
        return [Launch(_matmul, grid, arguments, constants, warps=config.warps, stages=config.stages)]

    def cost(self, shape: MatmulShape) -> Cost:
        matrix = shape.n * shape.k * find_scheme(shape.scheme).bits_per_weight / 8
        vectors = shape.m * (2 * shape.k + shape.width * DTYPES[shape.out].itemsize)
        return Cost(int(matrix) + vectors, 2.0 * shape.m * shape.n * shape.k)


def _check(shape: MatmulShape, scheme: Scheme, inputs: Tensors, outputs: Tensors) -> None:
    """Raises ModelError where the tensors aren't what the kernel reads and writes."""
    asked = f"int4_matmul of {shape.key}"
    if not 1 <= shape.m <= 8 or shape.k < 1 or shape.k % scheme.multiple or (shape.activation != "none" and shape.n % 2):
        limits = f"m is 1 to 8, k a multiple of {scheme.multiple}, n of gate and up even"
        raise ModelError(asked, f"m={shape.m}, k={shape.k}, n={shape.n}", f"Of this kernel {limits}")
    wanted: dict[str, tuple[tuple[int, int], torch.dtype]] = {
        name: ((shape.n, shape.k // per), dtype) for name, (dtype, per) in scheme.parts().items()
    }
    wanted["x"] = ((shape.m, shape.k), torch.bfloat16)
    wanted["out"] = ((shape.m, shape.width), DTYPES[shape.out])
    for name, (size, dtype) in wanted.items():
        tensor = outputs[name] if name == "out" else inputs[name]
        found = f"{name} is {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
        if tuple(tensor.shape) != size or tensor.dtype != dtype or tensor.device != inputs["x"].device:
            raise ModelError(asked, found, f"Pass {list(size)} {dtype} on the device of x")
        if not tensor.is_contiguous() or (not tensor.is_meta and tensor.data_ptr() % 16):
            raise ModelError(asked, f"{found}, not contiguous or not at a multiple of 16 bytes", "Pass a contiguous copy")


def _randomise(part: Tensor, name: str, scheme: Scheme, generator: torch.Generator) -> None:
    """Codes over their whole range; values of about 1 / 100 and as many of either sign."""
    if name == "codes" or name == "high":
        part.view(torch.uint8).random_(0, 256, generator=generator)
    elif part.dtype == torch.int8:
        part.random_(1, 64, generator=generator)
    else:
        part.uniform_(0.5, 1.5, generator=generator)
        if name == "zeros":
            part.mul_(7.5)
        else:
            part.mul_(1e-3 if not name.startswith("min") else 8e-3)


def quantise_activations(x: Tensor, limit: int = LIMITS["int8"]) -> Tensor:
    """x [..., k] as the kernel's integers give it back, in fp32: each 32 share a step, their largest / `limit`."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    top = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(top, limit) / top.clamp_min(1e-30)  # one division: `limit / top` would be two operations
    inverse = inverse.where(top > 1e-30, 0.0)
    return ((blocks.double() * inverse.double()).round().float() * (top / limit)).flatten(-2)


INT4_MATMUL = Int4Matmul()
