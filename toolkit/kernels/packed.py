# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  # Triton does not compile (*a, b)
"""Rows of packed matrices times integer activations, four weights per instruction (dp4a), one block of 32 per lane.

Tiles are [BN, BG] blocks: BN rows at a time, their BG blocks side by side. A lane loads a whole block and multiplies it, so no
value moves between lanes before the sum over the row. Tiles are tuples, so that a lane keeps several of them in separate
variables. `parts` are pointers to a matrix's codes, high bits, scales, offsets, and steps of scales. Where minima have steps,
each lane loads the two int64 that hold all these numbers of eight blocks (`weights.packed.pack_scales`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.base import Tensors
from toolkit.kernels.early import INTERPRETED
from toolkit.weights.packed import pack_scales
from toolkit.weights.schemes import Scheme


def matrix_pointers(scheme: Scheme, parts: Tensors) -> dict[str, Tensor | None]:
    """Return what a launch reads of a packed matrix, in the order of `kernels.packed` and in its types; None if it has no such
    part.
    """
    scales = parts["scales"]
    return {
        "codes": parts["codes"].view(torch.int64),
        "high": parts["high"].view(torch.int64 if scheme.bits == 6 else torch.int32) if "high" in parts else None,
        "scales": scales.view(torch.int64 if scheme.joint else torch.int16 if scheme.group == 16 else scales.dtype),
        "offsets": parts.get("zeros", parts.get("minima")),
        "steps": parts.get("scale_steps"),
    }


def randomize(part: Tensor, name: str, scheme: Scheme, generator: torch.Generator) -> None:
    """Fill with codes over the whole range, or values of about 1 / 100 with either sign."""
    if name == "codes" or name == "high":
        part.view(torch.uint8).random_(0, 256, generator=generator)
    elif scheme.joint:
        rows, eights = part.flatten(0, -2), part.shape[-1] // 8
        scales, minima = torch.randint(1, 64, (2, len(rows), 8 * eights), generator=generator, device=part.device)
        steps = torch.rand(2, len(rows), eights, generator=generator, device=part.device) + 0.5
        rows[:, : 8 * eights] = pack_scales(scales, minima, (steps[0] * 1e-3).half(), (steps[1] * 8e-3).half())
    elif part.dtype == torch.int8:
        part.random_(1, 64, generator=generator)
    else:
        part.uniform_(0.5, 1.5, generator=generator)
        if name == "zeros":
            part.mul_(7.5)
        else:
            part.mul_(1e-3 if not name.startswith("min") else 8e-3)


@triton.jit
def _dp4a(a, b, c, SIGNED: tl.constexpr, PTX: tl.constexpr):
    """Return c plus four products: bytes of a (unsigned unless SIGNED) times signed bytes of b."""
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
def quantise_blocks(
    x_ptr, codes_ptr, scales_ptr, sums_ptr, size, program, BLOCKS: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr
):
    """BLOCKS blocks of x, of `size` altogether: each 32 activations to integers (a higher digit, if any, `size` blocks on)."""
    g = program * BLOCKS + tl.arange(0, BLOCKS)
    at = g[:, None].to(tl.int64) * 32 + tl.arange(0, 32)[None, :]
    there = (g < size)[:, None]
    x = tl.load(x_ptr + at, mask=there, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    inverse = tl.where(top > 1e-30, tl.div_rn(LIMIT * 1.0, tl.maximum(top, 1e-30)), 0.0)
    inverse = tl.broadcast_to(inverse[:, None], (BLOCKS, 32))
    if PTX:  # 1.5 * 2^23 leaves the nearest integer, ties to even, in the low mantissa bits; the sum is rounded once
        nearest = tl.fma(x, inverse, tl.full((BLOCKS, 32), 12582912.0, tl.float32))
    else:
        nearest = (x.to(tl.float64) * inverse.to(tl.float64) + 12582912.0).to(tl.float32)
    total = tl.sum(nearest - 12582912.0, 1)
    scale = tl.div_rn(top, LIMIT * 1.0) + total * 0.0  # NaN if an activation is NaN, so that all results are
    bits = nearest.to(tl.int32, bitcast=True)
    tl.store(codes_ptr + at, bits.to(tl.int8), mask=there)
    if LIMIT > 127:  # the remainder for the lower digit, which is signed
        tl.store(codes_ptr + at + tl.cast(size, tl.int64) * 32, ((bits + 128) >> 8).to(tl.int8), mask=there)
    tl.store(scales_ptr + g, scale, mask=g < size)
    tl.store(sums_ptr + g, total * scale, mask=g < size)


@triton.jit
def to_codes(x, PTX: tl.constexpr):
    """Return x [n, 32] in fp32 as 8-bit integers, scales [n], and sums of the integers [n], as `quantise_blocks` does."""
    top = tl.max(tl.abs(x), 1)
    inverse = tl.where(top > 1e-30, tl.div_rn(127.0, tl.maximum(top, 1e-30)), 0.0)
    inverse = tl.broadcast_to(inverse[:, None], x.shape)
    if PTX:
        nearest = tl.fma(x, inverse, tl.full(x.shape, 12582912.0, tl.float32))
    else:
        nearest = (x.to(tl.float64) * inverse.to(tl.float64) + 12582912.0).to(tl.float32)
    total = tl.sum(nearest - 12582912.0, 1)
    return nearest.to(tl.int32, bitcast=True).to(tl.int8), tl.div_rn(top, 127.0) + total * 0.0, total


@triton.jit
def quantise_groups(x):
    """Return x [n, 32] in fp32 as 8-bit integers, scales [n], and the sums of the integers times their scale [n]."""
    codes, scale, total = to_codes(x, not INTERPRETED)
    return codes, scale, total * scale


@triton.jit
def load_block(
    parts, row, g, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """Load blocks g [1, BG] of rows [BN, 1]: words of codes, two per int64, high bits, scales, and the scheme's other parts,
    [BN, BG] each.

    A lane loads a block, so that no value moves between lanes before the sum over the row. EVICT is Triton's eviction policy.
    """
    PER: tl.constexpr = 1 if GROUP == 16 else GROUP // 32  # blocks that share scales; two groups of 16 are loaded at once
    pair = tl.arange(0, 2)[None, None, :]
    codes = parts[0] + (row * (K // 8 if BITS == 8 else K // 16))[:, :, None] + (g * (4 if BITS == 8 else 2))[:, :, None]
    found = tl.split(tl.load(codes + pair, eviction_policy=EVICT))
    if BITS == 8:
        found = found + tl.split(tl.load(codes + pair + 2, eviction_policy=EVICT))
    if BITS == 5 or BITS == 6:
        found = found + (tl.load(parts[1] + row * (K // 32) + g, eviction_policy=EVICT),)
    if STEPS and OFFSET == "minimum":
        scales = parts[2] + (row * (K // 128))[:, :, None] + (g // 8 * 2)[:, :, None]
        found = found + tl.split(tl.load(scales + pair, eviction_policy=EVICT))
    else:
        found = found + (tl.load(parts[2] + row * (K // 32 // PER) + g // PER, eviction_policy=EVICT),)
        if STEPS:
            found = found + (tl.load(parts[4] + row * (K // 256) + g // 8, eviction_policy=EVICT),)
        if OFFSET != "centre":
            found = found + (tl.load(parts[3] + row * (K // 32 // PER) + g // PER, eviction_policy=EVICT),)
    return found


@triton.jit
def load_tiles(
    parts, base, width, T: tl.constexpr, AHEAD: tl.constexpr, ROWS: tl.constexpr, HALVES: tl.constexpr, BN: tl.constexpr,
    BG: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
    EVICT: tl.constexpr,
):  # fmt: skip
    """`load_block` of tiles T to T + AHEAD - 1, for ROWS rows of each of BN, and HALVES (`width` rows apart)."""
    BLOCKS: tl.constexpr = K // 32
    found = ()
    for t in tl.static_range(T, T + AHEAD):
        if t * BG < BLOCKS:
            first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)
            g = first + tl.minimum(tl.arange(0, BG), BLOCKS - 1)[None, :]
            for u in tl.static_range(ROWS):
                row = base.to(tl.int64) + u * BN + tl.arange(0, BN)[:, None]
                for h in tl.static_range(HALVES):
                    found = found + (load_block(parts, row + h * width, g, K, BITS, GROUP, STEPS, OFFSET, EVICT),)
    return found


@triton.jit
def load_activations(
    codes_ptr, scales_ptr, sums_ptr, first, same, T: tl.constexpr, M: tl.constexpr, K: tl.constexpr, BG: tl.constexpr,
    OFFSET: tl.constexpr, LIMIT: tl.constexpr, EIGHTS: tl.constexpr,
):  # fmt: skip
    """A token's blocks of tile T: scales, scaled sums, four int64 of codes, four of higher digits. [BN, BG] each.

    Scales and sums are of a block, or of each eight activations (EIGHTS): then the other three scales come last.
    """
    BLOCKS: tl.constexpr = K // 32
    lane = tl.arange(0, BG)[None, :] + same
    g = first + tl.minimum(lane, BLOCKS - 1)
    pair = tl.arange(0, 2)[None, None, :]
    others = ()
    if EIGHTS:
        fours = g[:, :, None] * 4 + pair
        scale, second = tl.split(tl.load(scales_ptr + fours))
        others = (second,) + tl.split(tl.load(scales_ptr + fours + 2))
        a, b = tl.split(tl.load(sums_ptr + fours))
        c, d = tl.split(tl.load(sums_ptr + fours + 2))
        total = (a + b) + (c + d)
    else:
        scale = tl.load(scales_ptr + g)
        total = tl.load(sums_ptr + g) if OFFSET != "centre" else scale
    if (T + 1) * BG > BLOCKS:  # the last tile ends with the row: blocks that two tiles share count once
        valid = lane >= (T + 1) * BG - BLOCKS if BLOCKS > BG else lane < BLOCKS
        scale = tl.where(valid, scale, 0.0)
        total = tl.where(valid, total, 0.0)
        if EIGHTS:
            others = (tl.where(valid, others[0], 0.0), tl.where(valid, others[1], 0.0), tl.where(valid, others[2], 0.0))
    at = codes_ptr + g[:, :, None] * 4 + pair
    found = (scale, total) + tl.split(tl.load(at)) + tl.split(tl.load(at + 2))
    if LIMIT > 127:
        found = found + tl.split(tl.load(at + M * (K // 8))) + tl.split(tl.load(at + M * (K // 8) + 2))
    return found + others


@triton.jit
def _weights(held, J: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Weights 8 J to 8 J + 3 of a block and the four after, one a byte; centred ones signed, in the upper bits of theirs."""
    if BITS == 8:
        return held[J].to(tl.int32), (held[J] >> 32).to(tl.int32)
    word = (held[J // 2] >> (32 * (J % 2))).to(tl.int32)
    if OFFSET != "centre":
        low, high = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        if BITS == 5:
            low |= ((held[2] >> (2 * J)) & 0x01010101) << 4
            high |= ((held[2] >> (2 * J + 1)) & 0x01010101) << 4
    elif BITS == 4:
        low, high = (word << 4) & -0x0F0F0F10, word & -0x0F0F0F10
    elif BITS == 5:
        bits = held[2] >> (2 * J)
        low = ((word << 3) & 0x78787878) | ((bits & 0x01010101) << 7)
        high = ((word >> 1) & 0x78787878) | ((bits & 0x02020202) << 6)
    else:
        bits = (held[2] >> (32 * (J // 2))).to(tl.int32) >> (4 * (J % 2))
        low = ((word << 2) & 0x3C3C3C3C) | ((bits & 0x03030303) << 6)
        high = ((word >> 2) & 0x3C3C3C3C) | ((bits & 0x0C0C0C0C) << 4)
    if OFFSET == "centre":
        low, high = low ^ -0x7F7F7F80, high ^ -0x7F7F7F80
    return low, high


@triton.jit
def _dot(
    held, x, S: tl.constexpr, SUB: tl.constexpr, BITS: tl.constexpr, OFFSET: tl.constexpr, AT: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """Products of part S of SUB of a block with the digits of activations that begin at x[AT]."""
    SIGNED: tl.constexpr = BITS == 8 or OFFSET == "centre"
    found = tl.zeros(held[0].shape, tl.int32)
    for j in tl.static_range(S * (4 // SUB), (S + 1) * (4 // SUB)):
        low, high = _weights(held, j, BITS, OFFSET)
        found = _dp4a(low, x[AT + j].to(tl.int32), found, SIGNED, PTX)
        found = _dp4a(high, (x[AT + j] >> 32).to(tl.int32), found, SIGNED, PTX)
    return found


@triton.jit
def unpack_scales(low, high, block):
    """Return (scale, minimum, step of scales, step of minima), given the two int64 that hold those of eight blocks.

    `block` is the number of a block in its row. Scale and minimum are int32, the steps fp32.
    """
    at = block % 8 * 6
    scale = (((low >> 32) & 0xFFFFFFFF) | (high << 32)) >> at
    steps = low.to(tl.int32)
    step = steps.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum_step = (steps >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return scale.to(tl.int32) & 63, (high >> (at + 16)).to(tl.int32) & 63, step, minimum_step


@triton.jit
def block_product(
    held, x, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    EIGHTS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Return the products [BN, BG] of blocks (`held` from `load_block`) with a token's x from `load_activations`."""
    AT: tl.constexpr = (4 if BITS == 8 else 2) + (BITS == 5 or BITS == 6)
    SUB: tl.constexpr = 4 if EIGHTS else 2 if GROUP == 16 else 1
    JOINT: tl.constexpr = STEPS > 0 and OFFSET == "minimum"
    if JOINT:
        block = tl.arange(0, held[0].shape[1])[None, :]  # a tile begins with the first of eight
        scales, offset, step, offset_step = unpack_scales(held[AT], held[AT + 1], block)
    else:
        scales = held[AT]
        step = held[AT + 1].to(tl.float32) if STEPS else 1.0
    value = tl.zeros(held[0].shape, tl.float32)
    for s in tl.static_range(SUB):
        dot = _dot(held, x, s, SUB, BITS, OFFSET, 2, PTX)
        if LIMIT > 127:
            dot += _dot(held, x, s, SUB, BITS, OFFSET, 6, PTX) << 8
        scale = scales
        if GROUP == 16:  # two blocks of 8 bits, loaded as one
            scale = (scale.to(tl.int32) << (24 - 24 * (s * 2 // SUB))) >> (24 - 16 * (s * 2 // SUB))
        if STEPS and LIMIT == 127:  # 8-bit integers whose sums stay below 2^31
            product = (dot * scale.to(tl.int32)).to(tl.float32)
        else:
            product = dot.to(tl.float32) * scale.to(tl.float32)
        value += product * x[0 if s == 0 else 5 + s] if EIGHTS else product
    if STEPS:
        value *= step
    if not EIGHTS:
        value *= x[0]
    if JOINT:
        value -= offset.to(tl.float32) * offset_step * x[1]
    elif OFFSET == "zero":
        value -= scales.to(tl.float32) * held[AT + 1].to(tl.float32) * x[1]
    elif OFFSET == "minimum":
        value -= held[AT + 1].to(tl.float32) * x[1]
    return value


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up  # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z))
