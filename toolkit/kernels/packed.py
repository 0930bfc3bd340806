# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005, SIM108  # what Triton compiles knows no (*a, b)
"""What kernels on packed matrices share: activations as integers, and rows multiplied four weights an instruction.

A thread holds a block of 32 weights of a row, 16 bytes of 4-bit codes. Tiles are [rows, blocks, 4]: of each eight weights
the words of weights 0 to 3 and of weights 4 to 7, as `PackedMatrix` lays them out.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.quant import Scheme

BLOCK = 32  # activations that share a scale


@triton.jit
def dp4a(a, b, c, SIGNED: tl.constexpr, PTX: tl.constexpr):
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
def round_low(x, inverse, PTX: tl.constexpr):
    """The integers nearest to x * inverse in the low bits of floats' mantissas: adding 1.5 * 2^23 leaves them there."""
    if PTX:  # rounded on its own, as PyTorch does: fused with the sum, ties would fall otherwise
        steps = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, inverse], tl.float32, True, 1)
    else:
        steps = x * inverse
    return steps + 12582912.0


@triton.jit
def load_blocks(x_ptr, first, BLOCKS: tl.constexpr, BG: tl.constexpr):
    """A token's BG blocks of 32 in fp32, [BG, 4, 8], from block `first`; zeros beyond BLOCKS."""
    g = first + tl.arange(0, BG)
    at = g[:, None, None] * 32 + tl.arange(0, 4)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    return tl.load(x_ptr + at, mask=(g < BLOCKS)[:, None, None], other=0.0).to(tl.float32)


@triton.jit
def to_integers(x, BG: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr):
    """Blocks [BG, 4, 8] as integers in the low bits of floats' mantissas, their scales [BG, 1] and sums [BG, 4]."""
    top = tl.max(tl.max(tl.abs(x), 2), 1)
    inverse = tl.where(top > 1e-30, tl.div_rn(LIMIT * 1.0, tl.maximum(top, 1e-30)), 0.0)
    rounded = round_low(x, tl.broadcast_to(inverse[:, None, None], (BG, 4, 8)), PTX)
    sums = tl.sum(rounded - 12582912.0, 2)
    scale = top / LIMIT + tl.sum(sums, 1) * 0.0  # not a number where an activation isn't one
    return rounded.to(tl.int32, bitcast=True), scale[:, None], sums


@triton.jit
def to_words(integers, BG: tl.constexpr):
    """The low bytes of [BG, 4, 8] integers, four a word: of weights 0 to 3 and 4 to 7 of each eight, [1, BG, 4] each."""
    shifts = tl.arange(0, 4) * 8
    words = tl.sum((tl.reshape(integers, (BG, 4, 2, 4)) & 255) << shifts[None, None, None, :], 3)
    low, high = tl.split(words)
    return low[None], high[None]


@triton.jit
def activations(
    x, BG: tl.constexpr, SUB: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr, LIMIT: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Of blocks [BG, 4, 8]: scales [1, BG, 1], what offsets are multiplied by, low and high words of each digit [1, BG, 4]."""
    integers, scale, sums = to_integers(x, BG, LIMIT, PTX)
    if OFFSET == "centre":
        shift = (sums * -CENTRE).to(tl.int32)  # [1, BG, 4]: where dot products start
    else:
        shift = tl.sum(tl.reshape(sums, (BG, SUB, 4 // SUB)), 2) * scale  # [1, BG, SUB]
    found = (scale[None], shift[None]) + to_words(integers, BG)
    if LIMIT > 127:
        found = found + to_words((integers + 128) >> 8, BG)  # the higher digit: what the lower one, which is signed, leaves
    return found


@triton.jit
def load_rows(
    row, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
    K: tl.constexpr, TILES: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    OFFSET: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """What rows [BN, 1, 1] hold: for each tile of BG blocks the words of codes, scales, offsets, as many as the scheme has."""
    j = tl.arange(0, 4)[None, None, :]
    sub = tl.arange(0, SUB)[None, None, :]
    found = ()
    for t in tl.static_range(TILES):
        g = tl.minimum(t * BG + tl.arange(0, BG), K // 32 - 1)[None, :, None]  # beyond the row: again the last, times 0
        group = (g * 32 + sub * (32 // SUB)) // GROUP
        if BITS == 8:
            found = found + (tl.load(codes_ptr + row * (K // 4) + g * 8 + 2 * j),)
            found = found + (tl.load(codes_ptr + row * (K // 4) + g * 8 + 2 * j + 1),)
        else:
            found = found + (tl.load(codes_ptr + row * (K // 8) + g * 4 + j),)
        found = found + (tl.load(scales_ptr + row * (K // GROUP) + group),)
        if BITS == 5:
            found = found + (tl.load(high_ptr + row * (K // 32) + g),)
        if BITS == 6:
            found = found + (tl.load(high_ptr + row * (K // 16) + g * 2 + j // 2),)
        if STEPS:
            found = found + (tl.load(scale_steps_ptr + row * (K // 256) + g // 8),)
        if OFFSET != "centre":
            found = found + (tl.load(offsets_ptr + row * (K // GROUP) + group),)
            if STEPS:
                found = found + (tl.load(offset_steps_ptr + row * (K // 256) + g // 8),)
    return found


@triton.jit
def unpack(held, t: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr):
    """Tile t of `held` (see `load_rows`): low and high words of codes, scales, offsets (where they are a constant: scales)."""
    AT_SCALE: tl.constexpr = 2 if BITS == 8 else 1
    AT_STEP: tl.constexpr = AT_SCALE + 1 + (BITS == 5 or BITS == 6)
    AT_OFFSET: tl.constexpr = AT_STEP + (STEPS > 0)
    COUNT: tl.constexpr = AT_OFFSET + (0 if OFFSET == "centre" else 2 if STEPS else 1)
    FIRST: tl.constexpr = t * COUNT
    j = tl.arange(0, 4)[None, None, :]
    if BITS == 8:
        low, high = held[FIRST], held[FIRST + 1]
    else:
        low, high = held[FIRST] & 0x0F0F0F0F, (held[FIRST] >> 4) & 0x0F0F0F0F
    if BITS == 5:
        bits = held[FIRST + 2] >> (2 * j)
        low |= (bits & 0x01010101) << 4
        high |= ((bits >> 1) & 0x01010101) << 4
    if BITS == 6:
        bits = held[FIRST + 2] >> (4 * (j % 2))
        low |= (bits & 0x03030303) << 4
        high |= ((bits >> 2) & 0x03030303) << 4
    scale = held[FIRST + AT_SCALE].to(tl.float32)
    if STEPS:
        scale *= held[FIRST + AT_STEP].to(tl.float32)
    offset = scale
    if OFFSET != "centre":
        offset = held[FIRST + AT_OFFSET].to(tl.float32)
        if OFFSET == "zero":
            offset *= scale
        elif STEPS:
            offset *= held[FIRST + AT_OFFSET + 1].to(tl.float32)
    return low, high, scale, offset


@triton.jit
def row_sums(
    held, activations, TOKENS: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr,
    STEPS: tl.constexpr, OFFSET: tl.constexpr, SUB: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Products of the rows in `held` (see `load_rows`) with every token: a tuple of [BN]."""
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros((BN, BG, SUB), tl.float32),)
    for t in tl.static_range(TILES):
        low, high, scale, offset = unpack(held, t, BITS, STEPS, OFFSET)
        following = ()
        for m in tl.static_range(TOKENS):
            x = activations[m * TILES + t]
            if OFFSET == "centre" and BITS < 8:
                dot = tl.broadcast_to(x[1], (BN, BG, 4))
            else:
                dot = tl.zeros((BN, BG, 4), tl.int32)
            dot = dp4a(high, x[3], dp4a(low, x[2], dot, BITS == 8, PTX), BITS == 8, PTX)
            if LIMIT > 127:
                coarse = dp4a(low, x[4], tl.zeros((BN, BG, 4), tl.int32), BITS == 8, PTX)
                dot += dp4a(high, x[5], coarse, BITS == 8, PTX) << 8
            if SUB == 1:
                dot = tl.sum(dot, 2)[:, :, None]
            total = sums[m] + (scale * x[0]) * dot.to(tl.float32)
            if OFFSET != "centre":
                total -= offset * x[1]
            following = following + (total,)
        sums = following
    found = ()
    for m in tl.static_range(TOKENS):
        found = found + (tl.sum(tl.sum(sums[m], 2), 1),)
    return found


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up  # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z))


def randomise(part: Tensor, name: str, scheme: Scheme, generator: torch.Generator) -> None:
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


def quantise_activations(x: Tensor, limit: int = 127, group: int = BLOCK) -> Tensor:
    """x [..., k] as the kernels' integers give it back, in fp32: each `group` share a step, their largest / `limit`."""
    blocks = x.float().unflatten(-1, (-1, group))
    top = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(top, limit) / top.clamp_min(1e-30)  # one division: `limit / top` would be two operations
    inverse = inverse.where(top > 1e-30, 0.0)
    return ((blocks * inverse).round() * (top / limit)).flatten(-2)
