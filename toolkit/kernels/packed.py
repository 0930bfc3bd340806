# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
"""Rows of packed matrices times integer activations, four weights an instruction, with a lane to each block of 32.

Tiles are [S, BN, BG] blocks: BN rows at a time, their BG blocks side by side, a lane each; S is how many such rows a lane
holds. Written as tensors, not as S copies of the same code: Triton's compiler takes time with the square of the code. Of
blocks, what has four words or scales has them in a last dimension of 4; of 8-bit codes their order is 0, 2, 1, 3.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.int4_matmul import _dp4a

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23 leaves the nearest integer, ties to even, in the low mantissa bits


@triton.jit
def _load(pointers):
    """One element a lane. Without being told that neighbours are apart, a lane would load those of others, and pass them on."""
    return tl.load(tl.max_contiguous(pointers, [1, 1, 1]))


@triton.jit
def load_blocks(
    parts, row, g, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr
):  # fmt: skip
    """Blocks g [1, 1, BG] of rows [S, BN, 1]: codes [S, BN, BG, 4], and scales, high bits, offsets, their steps [S, BN, BG].

    `parts`: where a matrix has these. The scales stand for what the scheme hasn't.
    """
    if BITS == 8:
        pair = parts[0] + (row * (K // 8) + g * 4)[:, :, :, None] + tl.arange(0, 2)[None, None, None, :]
        codes = tl.join(tl.load(pair), tl.load(pair + 2))
        codes = tl.reshape(codes, (codes.shape[0], codes.shape[1], codes.shape[2], 4))
    else:
        codes = tl.load(parts[0] + (row * (K // 8) + g * 4)[:, :, :, None] + tl.arange(0, 4)[None, None, None, :])
    PER: tl.constexpr = 1 if GROUP == 16 else GROUP // 32  # blocks that share a scale; of groups of 16 two are loaded as one
    scales = _load(parts[2] + row * (K // 32 // PER) + g // PER)
    high = scales
    if BITS == 5 or BITS == 6:
        high = _load(parts[1] + row * (K // 32) + g)
    offsets = scales
    if OFFSET != "centre":
        offsets = _load(parts[3] + row * (K // 32 // PER) + g // PER)
    scale_steps = scales
    offset_steps = scales
    if STEPS:
        scale_steps = _load(parts[4] + row * (K // STEPS) + g // (STEPS // 32))
        if OFFSET != "centre":
            offset_steps = _load(parts[5] + row * (K // STEPS) + g // (STEPS // 32))
    return codes, scales, high, offsets, scale_steps, offset_steps


@triton.jit
def _weights(held, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Of each eight weights the first four and the others, a byte each; centred ones signed, in the upper bits of theirs."""
    words = held[0]
    j = tl.arange(0, 4)[None, None, None, :]
    bits = words
    if BITS == 5:
        bits = held[2][:, :, :, None] >> (2 * j)
    if BITS == 6:
        bits = (held[2][:, :, :, None] >> (32 * (j // 2) + 4 * (j % 2))).to(tl.int32)
    if BITS == 8:
        low, high = words.to(tl.int32), (words >> 32).to(tl.int32)
    elif OFFSET != "centre":
        low, high = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
        if BITS == 5:
            low |= (bits & 0x01010101) << 4
            high |= ((bits >> 1) & 0x01010101) << 4
    else:
        if BITS == 4:
            low, high = (words << 4) & -0x0F0F0F10, words & -0x0F0F0F10
        elif BITS == 5:
            low = ((words << 3) & 0x78787878) | ((bits & 0x01010101) << 7)
            high = ((words >> 1) & 0x78787878) | ((bits & 0x02020202) << 6)
        else:
            low = ((words << 2) & 0x3C3C3C3C) | ((bits & 0x03030303) << 6)
            high = ((words >> 2) & 0x3C3C3C3C) | ((bits & 0x0C0C0C0C) << 4)
        low, high = low ^ -0x7F7F7F80, high ^ -0x7F7F7F80
    return low, high


@triton.jit
def multiply(
    held, x_low, x_high, x_scale, x_sum, EIGHTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    OFFSET: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Blocks that `load_blocks` gave times activations: [S, BN, BG].

    x_low and x_high [.., 4]: words of four; x_sum: their values' sum; x_scale: of a block, or [.., 4], of each EIGHTS.
    """
    SIGNED: tl.constexpr = BITS == 8 or OFFSET == "centre"
    low, high = _weights(held, BITS, OFFSET)
    value = _dp4a(high, x_high, _dp4a(low, x_low, tl.zeros(low.shape, tl.int32), SIGNED, PTX), SIGNED, PTX)
    if EIGHTS:
        value = value.to(tl.float32) * x_scale
    if GROUP == 16:  # two scales of 8 bits, loaded as one
        value = tl.sum(tl.reshape(value, (low.shape[0], low.shape[1], low.shape[2], 2, 2)), 4).to(tl.float32)
        scales = held[1].to(tl.int32)
        value = tl.sum(value * tl.join((scales << 24) >> 24, scales >> 8).to(tl.float32), 3)
    else:
        value = tl.sum(value, 3).to(tl.float32) * held[1].to(tl.float32)
    if not EIGHTS:
        value *= x_scale
    if STEPS:
        value *= held[4].to(tl.float32)
    if OFFSET == "centre":
        return value * (1.0 / (1 << (8 - BITS)))  # where weights stood in the upper bits of a byte
    offset = held[3].to(tl.float32)
    if OFFSET == "zero":
        offset *= held[1].to(tl.float32)
    if STEPS:
        offset *= held[5].to(tl.float32)
    return value - offset * x_sum


@triton.jit
def round_to(x, inverse, PTX: tl.constexpr):
    """x * inverse, rounded once, as ROUND plus an integer."""
    inverse = tl.broadcast_to(inverse, x.shape)
    if PTX:
        return tl.fma(x, inverse, tl.full(x.shape, ROUND, tl.float32))
    return (x.to(tl.float64) * inverse.to(tl.float64) + ROUND).to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest(x, AXIS: tl.constexpr, PTX: tl.constexpr):
    """The largest |x| along an axis; not a number where one of them is none."""
    if PTX:
        return tl.reduce(tl.abs(x), AXIS, _larger)
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, AXIS).to(tl.float32, bitcast=True)  # in the order of integers


@triton.jit
def inverse_of(top):
    """What activations up to `top` are multiplied by to become integers of 8 bits."""
    return tl.where(top > 1e-30, 127.0 / tl.maximum(top, 1e-30), 0.0)


@triton.jit
def to_blocks(x_ptr, g, valid, BITS: tl.constexpr, PTX: tl.constexpr):
    """Blocks g [BN, BG] of activations as `multiply` wants them: low, high, scale (0 unless `valid`), sum.

    A lane makes integers of its own block, in every row anew: passing them on would cost more.
    """
    j = tl.arange(0, 4)
    if BITS == 8:
        j = j % 2 * 2 + j // 2
    at = g[None, :, :, None] * 32 + j[:, None, None, None] * 8 + tl.arange(0, 8)[None, None, None, :]
    x = tl.load(x_ptr + at).to(tl.float32)
    top = largest(largest(x, 3, PTX), 0, PTX)  # [BN, BG]
    bits = round_to(x, inverse_of(top)[None, :, :, None], PTX).to(tl.int32, bitcast=True)
    even, odd = tl.split(tl.reshape(bits, (4, g.shape[0], g.shape[1], 2, 2, 2)))
    lower, upper = tl.split((even & 255) | ((odd & 255) << 8))
    low, high = tl.split(lower | (upper << 16))
    ones = tl.full(low.shape, 0x01010101, tl.int32)
    total = tl.sum(_dp4a(low, ones, _dp4a(high, ones, tl.zeros(low.shape, tl.int32), True, PTX), True, PTX), 0)
    scale = tl.where(valid, top * (1 / 127), 0.0)  # not a number where an activation is none
    low, high = tl.permute(low, (1, 2, 0)), tl.permute(high, (1, 2, 0))
    return low[None], high[None], scale[None], (total.to(tl.float32) * scale)[None]


def to_integers(x: Tensor, group: int) -> Tensor:
    """x [..., k] as the kernels' integers give it back, in fp32: each `group` share a step, their largest / 127."""
    blocks = x.float().unflatten(-1, (-1, group))
    top = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(top, 127.0) / top.clamp_min(1e-30)  # one division: `127 / top` would be two operations
    inverse = inverse.where(top > 1e-30, 0.0)
    return ((blocks.double() * inverse.double()).round().float() * (top / 127)).flatten(-2)
