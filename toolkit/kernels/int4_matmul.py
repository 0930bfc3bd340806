# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="override, assignment"
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
def _integers(x_ptr, first, BLOCKS: tl.constexpr, BG: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr):
    """Activations of BG blocks as integers in the low bits of floats' mantissas [BG, 4, 8], scales [BG, 1], sums [BG, 4]."""
    MAGIC: tl.constexpr = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the low mantissa bits
    g = first + tl.arange(0, BG)
    at = g[:, None, None] * 32 + tl.arange(0, 4)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    x = tl.load(x_ptr + at, mask=(g < BLOCKS)[:, None, None], other=0.0).to(tl.float32)
    top = tl.max(tl.max(tl.abs(x), 2), 1)
    inverse = tl.where(top > 1e-30, tl.div_rn(LIMIT * 1.0, tl.maximum(top, 1e-30)), 0.0)
    inverse = tl.broadcast_to(inverse[:, None, None], (BG, 4, 8))
    if PTX:  # rounded on its own, as PyTorch does: fused with the sum, ties would fall otherwise
        steps = tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, inverse], tl.float32, True, 1)
    else:
        steps = x * inverse
    rounded = steps + MAGIC
    sums = tl.sum(rounded - MAGIC, 2)
    scale = top / LIMIT + tl.sum(sums, 1) * 0.0  # not a number where an activation isn't one
    return rounded.to(tl.int32, bitcast=True), scale[:, None], sums


@triton.jit
def _words(integers, BG: tl.constexpr):
    """The low bytes of [BG, 4, 8] integers, four a word: of weights 0 to 3 and 4 to 7 of each eight, [1, BG, 4] each."""
    shifts = tl.arange(0, 4) * 8
    words = tl.sum((tl.reshape(integers, (BG, 4, 2, 4)) & 255) << shifts[None, None, None, :], 3)
    low, high = tl.split(words)
    return low[None], high[None]


@triton.jit
def _activations(
    x_ptr, first, BLOCKS: tl.constexpr, BG: tl.constexpr, SUB: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    LIMIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A token's BG blocks: scales [1, BG, 1], what offsets are multiplied by, low and high words of each digit [1, BG, 4]."""
    integers, scale, sums = _integers(x_ptr, first, BLOCKS, BG, LIMIT, PTX)
    if OFFSET == "centre":
        shift = (sums * -CENTRE).to(tl.int32)  # [1, BG, 4]: where dot products start
    else:
        shift = tl.sum(tl.reshape(sums, (BG, SUB, 4 // SUB)), 2) * scale  # [1, BG, SUB]
    found = (scale[None], shift[None]) + _words(integers, BG)
    if LIMIT > 127:
        found = found + _words((integers + 128) >> 8, BG)  # the higher digit: what the lower one, which is signed, leaves
    return found


@triton.jit
def _load_rows(
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
def _row_sums(
    held, activations, TOKENS: tl.constexpr, TILES: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr,
    STEPS: tl.constexpr, OFFSET: tl.constexpr, SUB: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Products of the rows in `held` (see `_load_rows`) with every token: a tuple of [BN]."""
    AT_SCALE: tl.constexpr = 2 if BITS == 8 else 1
    AT_STEP: tl.constexpr = AT_SCALE + 1 + (BITS == 5 or BITS == 6)
    AT_OFFSET: tl.constexpr = AT_STEP + (STEPS > 0)
    COUNT: tl.constexpr = AT_OFFSET + (0 if OFFSET == "centre" else 2 if STEPS else 1)
    j = tl.arange(0, 4)[None, None, :]
    sums = ()
    for _ in tl.static_range(TOKENS):
        sums = sums + (tl.zeros((BN, BG, SUB), tl.float32),)
    for t in tl.static_range(TILES):
        if BITS == 8:
            low, high = held[t * COUNT], held[t * COUNT + 1]
        else:
            low, high = held[t * COUNT] & 0x0F0F0F0F, (held[t * COUNT] >> 4) & 0x0F0F0F0F
        if BITS == 5:
            bits = held[t * COUNT + 2] >> (2 * j)
            low |= (bits & 0x01010101) << 4
            high |= ((bits >> 1) & 0x01010101) << 4
        if BITS == 6:
            bits = held[t * COUNT + 2] >> (4 * (j % 2))
            low |= (bits & 0x03030303) << 4
            high |= ((bits >> 2) & 0x03030303) << 4
        scale = held[t * COUNT + AT_SCALE].to(tl.float32)
        if STEPS:
            scale *= held[t * COUNT + AT_STEP].to(tl.float32)
        if OFFSET != "centre":
            offset = held[t * COUNT + AT_OFFSET].to(tl.float32)
            if OFFSET == "zero":
                offset *= scale
            elif STEPS:
                offset *= held[t * COUNT + AT_OFFSET + 1].to(tl.float32)
        following = ()
        for m in tl.static_range(TOKENS):
            x = activations[m * TILES + t]
            if OFFSET == "centre" and BITS < 8:
                dot = tl.broadcast_to(x[1], (BN, BG, 4))
            else:
                dot = tl.zeros((BN, BG, 4), tl.int32)
            dot = _dp4a(high, x[3], _dp4a(low, x[2], dot, BITS == 8, PTX), BITS == 8, PTX)
            if LIMIT > 127:
                coarse = _dp4a(low, x[4], tl.zeros((BN, BG, 4), tl.int32), BITS == 8, PTX)
                dot += _dp4a(high, x[5], coarse, BITS == 8, PTX) << 8
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
def _activate(gate, up, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner)) * up  # 0.5 (1 + tanh z) = 1 / (1 + exp(-2 z))


@triton.jit
def _matmul(
    x_ptr, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr, out_ptr, width,
    M: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr, LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr, PTX: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows [start, end) of one program, BN at a time, for TOKENS tokens."""
    BLOCKS: tl.constexpr = K // 32
    TILES: tl.constexpr = (BLOCKS + BG - 1) // BG
    TOKEN_BLOCKS: tl.constexpr = (M + TOKENS - 1) // TOKENS
    SUB: tl.constexpr = 4 if GROUP == 16 else 1
    program = (tl.program_id(0) // TOKEN_BLOCKS).to(tl.int64)
    token = (tl.program_id(0) % TOKEN_BLOCKS) * TOKENS
    programs = tl.num_programs(0) // TOKEN_BLOCKS
    start = (program * width // programs).to(tl.int32)
    end = ((program + 1) * width // programs).to(tl.int32)
    if AHEAD:
        row = tl.minimum(start + tl.arange(0, BN), end - 1).to(tl.int64)[:, None, None]
        held = _load_rows(
            row, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
            K, TILES, BG, BITS, GROUP, STEPS, OFFSET, SUB,
        )  # fmt: skip
        if ACTIVATION != "none":
            held_up = _load_rows(
                row + width, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
                K, TILES, BG, BITS, GROUP, STEPS, OFFSET, SUB,
            )  # fmt: skip
    activations = ()
    for m in tl.static_range(TOKENS):
        x_row = x_ptr + tl.minimum(token + m, M - 1) * K
        for t in tl.static_range(TILES):
            activations = activations + (_activations(x_row, t * BG, BLOCKS, BG, SUB, OFFSET, CENTRE, LIMIT, PTX),)
    for first in tl.range(start, end, BN, num_stages=STAGES):
        n = first + tl.arange(0, BN)
        row = tl.minimum(n + (BN if AHEAD else 0), end - 1).to(tl.int64)[:, None, None]
        loaded = _load_rows(
            row, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
            K, TILES, BG, BITS, GROUP, STEPS, OFFSET, SUB,
        )  # fmt: skip
        if AHEAD:
            used = held
            held = loaded
        else:
            used = loaded
        if ACTIVATION != "none":
            loaded_up = _load_rows(
                row + width, codes_ptr, high_ptr, scales_ptr, offsets_ptr, scale_steps_ptr, offset_steps_ptr,
                K, TILES, BG, BITS, GROUP, STEPS, OFFSET, SUB,
            )  # fmt: skip
            if AHEAD:
                used_up = held_up
                held_up = loaded_up
            else:
                used_up = loaded_up
            up = _row_sums(used_up, activations, TOKENS, TILES, BN, BG, BITS, STEPS, OFFSET, SUB, LIMIT, PTX)
        found = _row_sums(used, activations, TOKENS, TILES, BN, BG, BITS, STEPS, OFFSET, SUB, LIMIT, PTX)
        for m in tl.static_range(TOKENS):
            value = found[m]
            if ACTIVATION != "none":
                value = _activate(value, up[m], ACTIVATION)
            at = out_ptr + tl.minimum(token + m, M - 1).to(tl.int64) * width + n
            tl.store(at, value.to(out_ptr.dtype.element_ty), mask=n < end)


class Int4Matmul(Kernel):
    """x [m, k] times a packed matrix [n, k], transposed, with an epilogue: see `MatmulShape`.

    Inputs "x" (any float dtype) and the matrix's parts (see `PackedMatrix`); one result "out" [m, width]. `cost` counts the
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
        return [Config(programs=264, block_k=1024, tokens=1, ahead=0, warps=8)]

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
        tokens = min(config["tokens"], shape.m)
        parts: dict[str, Any] = {
            "codes_ptr": inputs["codes"].view(torch.int32),
            "high_ptr": inputs["high"].view(torch.int32) if "high" in inputs else None,
            "scales_ptr": inputs["scales"],
            "offsets_ptr": inputs.get("zeros", inputs.get("minima")),
            "scale_steps_ptr": inputs.get("scale_steps"),
            "offset_steps_ptr": inputs.get("minimum_steps"),
        }
        arguments = {name: part for name, part in parts.items() if part is not None}
        absent = {name: None for name, part in parts.items() if part is None}
        arguments |= {"x_ptr": inputs["x"], "out_ptr": outputs["out"], "width": shape.width}
        constants = {
            "M": shape.m, "K": shape.k, "TOKENS": tokens, "BN": 32 * config.warps // blocks, "BG": blocks,
            "BITS": scheme.bits, "GROUP": scheme.group, "STEPS": scheme.steps, "OFFSET": scheme.offset,
            "CENTRE": scheme.centre, "LIMIT": LIMITS[shape.activations], "ACTIVATION": shape.activation,
            "PTX": inputs["x"].device.type != "cpu", "AHEAD": config["ahead"], "STAGES": config.stages, **absent,
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
    wanted["x"] = ((shape.m, shape.k), inputs["x"].dtype if inputs["x"].is_floating_point() else torch.bfloat16)
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
    return ((blocks * inverse).round() * (top / limit)).flatten(-2)


INT4_MATMUL = Int4Matmul()
