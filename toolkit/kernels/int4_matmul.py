# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="override, assignment, misc"
# ruff: noqa: RUF005  # Triton does not compile (*a, b)
"""x times the transpose of a packed matrix, for 1 to 8 tokens: the product of decoding.

The matrix's bytes bound the kernel, so each is loaded once, 16 at a time, and multiplied four weights per instruction (dp4a);
converting each code to float would take all lane operations that a GPU has for it. Activations therefore become integers, in a
small launch before the product unless they are quantized already: 8 bits with one scale per 32 ("int8"), or 16 bits as two
8-bit digits ("bf16": weight-only quantization to about 90 dB, finer than a bf16 result). Zeros and minima are factored out with
the group's sum of activations. llama.cpp's mat-vec kernels use integer activations in the same way. Many small programs hide
the latency of memory better than a few that walk over rows (measured), especially if each issues the loads of several tiles, or
of the whole row, before it uses any, and starts while the activations are still being quantized (early.py). Caches drop the
matrix first, since it is read once per step: otherwise a decode step of a 31B model took 1 % longer on an H200. The warps of a
program share a row if there are few rows, so no sum crosses programs and the result is deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors
from toolkit.kernels.checks import check_tensor, check_word
from toolkit.kernels.early import await_previous, let_next_begin, take_turn
from toolkit.kernels.exchange import send, sending, targets_of
from toolkit.kernels.packed import (
    activate,
    block_product,
    load_activations,
    load_tiles,
    matrix_pointers,
    quantise_blocks,
    randomize,
)
from toolkit.weights.packed import dequantize
from toolkit.weights.schemes import Scheme, find_scheme

BLOCK = 32  # activations that share a scale
LIMITS = {"int8": 127, "bf16": 32512}  # the largest integer of an activation: one digit, or 127 * 256
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # of results
EPILOGUES = ("silu", "gelu_tanh")  # the activations of `activate`


@dataclass(frozen=True)
class MatmulShape(Shape):
    """x [m, k] times a packed matrix [n, k]; with an `activation`, the matrix holds n / 2 gate rows, then n / 2 up rows."""

    n: int
    k: int
    m: int = 1
    scheme: str = "q4_k"
    activations: str = "int8"  # or "bf16"
    activation: str = "none"  # or "silu", "gelu_tanh": the result is activation(gate) * up
    out: str = "bf16"  # or "fp32"
    quantised: bool = False  # x is 8-bit codes, scales and sums from a norm; otherwise a launch here quantizes it

    def __post_init__(self) -> None:
        check_word("int4_matmul", "activations", self.activations, LIMITS)
        check_word("int4_matmul", "activation", self.activation, ("none", *EPILOGUES))
        check_word("int4_matmul", "out", self.out, DTYPES)

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.n if self.activation == "none" else self.n // 2


@triton.jit(do_not_specialize=["size"])
def _quantise(x_ptr, codes_ptr, scales_ptr, sums_ptr, size, BLOCKS: tl.constexpr, LIMIT: tl.constexpr, PTX: tl.constexpr):
    """Quantize all blocks of x, BLOCKS per program: see `quantise_blocks`."""
    let_next_begin()
    await_previous()
    quantise_blocks(x_ptr, codes_ptr, scales_ptr, sums_ptr, size, tl.program_id(0), BLOCKS, LIMIT, PTX)


@triton.jit
def _matmul(
    x_codes_ptr, x_scales_ptr, x_sums_ptr, codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, out_ptr, width,
    targets_ptr, counts_ptr,
    M: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    AHEAD: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, LIMIT: tl.constexpr,
    ACTIVATION: tl.constexpr, LEVELS: tl.constexpr, PTX: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of each of BN, over all of K, for TOKENS tokens. Loads have no masks, which would take more instructions.

    With several RANKS, the result is sent to all of them instead (see `toolkit.kernels.exchange`).
    """
    BLOCKS: tl.constexpr = K // 32
    TILES: tl.constexpr = (BLOCKS + BG - 1) // BG
    TOKEN_BLOCKS: tl.constexpr = (M + TOKENS - 1) // TOKENS
    HALVES: tl.constexpr = 1 if ACTIVATION == "none" else 2
    RESULTS: tl.constexpr = TOKENS * ROWS
    token = (tl.program_id(0) % TOKEN_BLOCKS) * TOKENS
    first_row = tl.program_id(0) // TOKEN_BLOCKS * (ROWS * BN)
    base = tl.minimum(first_row, width - ROWS * BN)  # the last program is aligned to the end of the rows
    same = tl.zeros((BN, 1), tl.int32)  # for every row
    targets = ()
    parts = (codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr)
    sums = ()
    for _ in tl.static_range(RESULTS * HALVES):
        sums = sums + (tl.zeros((BN, BG), tl.float32),)
    held = load_tiles(parts, base, width, 0, AHEAD, ROWS, HALVES, BN, BG, K, BITS, GROUP, STEPS, OFFSET, "evict_first")
    for c in tl.static_range(0, TILES, AHEAD):
        # Loads are issued before the fence: otherwise the compiler spreads them and waits for each.
        coming = load_tiles(
            parts, base, width, c + AHEAD, AHEAD, ROWS, HALVES, BN, BG, K, BITS, GROUP, STEPS, OFFSET, "evict_first"
        )  # fmt: skip
        if c == 0:
            take_turn()  # wait for the activations; the matrix is there already
            if RANKS > 1:
                at, inside = _places(token, first_row, base, width, M, ROWS, BN, RESULTS)
                targets = targets_of(targets_ptr, counts_ptr, at, out_ptr.dtype.element_ty, RANKS)
        if PTX:
            tl.debug_barrier()
        for t in tl.static_range(c, c + AHEAD):
            if t < TILES:
                first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)
                following = ()
                for m in tl.static_range(TOKENS):
                    of = tl.minimum(token + m, M - 1)
                    x = load_activations(
                        x_codes_ptr + of * (K // 8), x_scales_ptr + of * BLOCKS, x_sums_ptr + of * BLOCKS, first, same,
                        t, M, K, BG, OFFSET, LIMIT, False,
                    )  # fmt: skip
                    for uh in tl.static_range(ROWS * HALVES):
                        product = block_product(
                            held[(t - c) * ROWS * HALVES + uh], x, BITS, GROUP, STEPS, OFFSET, LIMIT, False, PTX
                        )  # fmt: skip
                        following = following + (sums[m * ROWS * HALVES + uh] + product,)
                sums = following
        held = coming
    for level in tl.static_range(LEVELS):  # all sums over a row at once: [BN, BG, 2, 2, ...]
        joined = ()
        for i in tl.static_range(RESULTS * HALVES >> (level + 1)):
            joined = joined + (tl.join(sums[i], sums[i + (RESULTS * HALVES >> (level + 1))]),)
        sums = joined
    value = tl.sum(sums[0], 1)  # gate and up next to each other
    if OFFSET == "centre" and BITS < 8:
        value *= 1.0 / (1 << (8 - BITS))  # where weights are in the upper bits
    if ACTIVATION == "none":
        value = tl.reshape(value, (BN, RESULTS))
    else:
        gate, up = tl.split(tl.reshape(value, (BN, RESULTS, 2)))
        value = activate(gate, up, ACTIVATION)
    at, inside = _places(token, first_row, base, width, M, ROWS, BN, RESULTS)
    if RANKS > 1:
        send(value.to(out_ptr.dtype.element_ty), targets, inside)
    else:
        tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _places(token, first_row, base, width, M: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, RESULTS: tl.constexpr):
    """Return the places of a program's results [BN, RESULTS], and which of them are its own."""
    result = tl.arange(0, RESULTS)[None, :]
    n = base + (result % ROWS) * BN + tl.arange(0, BN)[:, None]
    of = token + result // ROWS
    return of.to(tl.int64) * width + n, (n >= first_row) & (of < M)


class Int4Matmul(Kernel):
    """x [m, k] times the transpose of a packed matrix [n, k], with an epilogue: see `MatmulShape`.

    Inputs are "x" (bf16 or fp32), or "x_codes", "x_scales" and "x_sums" of 8-bit activations, and the parts of the matrix (see
    `PackedMatrix`); the result is "out" [m, width]. With inputs "targets" and "counts" (see `toolkit.kernels.exchange.Sent`) it
    is sent to all ranks instead of written. `cost` counts the matrix in its packed size, which is that in a GGUF file.
    """

    name = "int4_matmul"
    shape_type = MatmulShape
    lengths = ("n", "quantised")
    carveouts = (0, 4, 50)
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b gate+up": MatmulShape(n=43008, k=5376, activation="gelu_tanh"),
        "gemma4-31b down": MatmulShape(n=5376, k=21504),
        "gemma4-31b qkv sliding": MatmulShape(n=16384, k=5376),
        "gemma4-31b o sliding": MatmulShape(n=5376, k=8192),
        "gemma4-31b lm_head": MatmulShape(n=262144, k=5376, scheme="q6_k", out="fp32"),
        "gemma4-31b gate+up, x in 8 bits": MatmulShape(n=43008, k=5376, activation="gelu_tanh", quantised=True),
        "gemma4-31b down, x in 8 bits": MatmulShape(n=5376, k=21504, quantised=True),
        "gemma4-31b qkv sliding, x in 8 bits": MatmulShape(n=16384, k=5376, quantised=True),
        "gemma4-31b o sliding, x in 8 bits": MatmulShape(n=5376, k=8192, quantised=True),
        "qwen3-8b gate+up": MatmulShape(n=24576, k=4096, activation="silu"),
        "qwen3-8b down": MatmulShape(n=4096, k=12288),
        "qwen3-8b qkv": MatmulShape(n=6144, k=4096),
        "qwen3-8b o": MatmulShape(n=4096, k=4096),
        "qwen3-8b lm_head": MatmulShape(n=151936, k=4096, scheme="q6_k", out="fp32"),
    }

    def space(self, shape: MatmulShape) -> Sequence[Config]:
        """Return configs with several warps per row for few or long rows; `ahead` is the number of tiles loaded at a time.

        More rows per thread share the loads of activations. The loads in flight of a thread, twice `ahead` tiles or the whole
        row, take some 64 to 128 registers: with fewer the memory is idle, with more there is no room for other warps
        (measured). Code unrolled into more than 32 blocks compiles slowly and isn't faster.
        """
        halves = 1 if shape.activation == "none" else 2
        tokens = sorted({min(t, triton.next_power_of_2(shape.m)) for t in (1, 2, 4, 8)})
        found = [Config(block_k=1024, rows=1, tokens=tokens[-1], ahead=1, warps=1)]
        for warps, rows, ahead, t in itertools.product((1, 2, 4, 8), (1, 2, 4), (1, 2, 3, 6), tokens[-2:]):
            block_k = 1024 * warps
            tiles = -(-shape.k // block_k)
            held = 8 * rows * halves * (2 * ahead if ahead < tiles else tiles)
            sums = rows * halves * t
            fits = (warps == 1 or block_k < 2 * shape.k) and ahead <= tiles and held <= 128 and (t == 1 or sums <= 8)
            fits &= tiles * rows * halves <= 32
            if fits and (held >= 64 or ahead == tiles or sums == 8):
                found.append(Config(block_k=block_k, rows=rows, tokens=t, ahead=ahead, warps=warps))
        return list(dict.fromkeys(found))

    def inputs(self, shape: MatmulShape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        scheme = find_scheme(shape.scheme)
        generator = torch.Generator(device if device != "meta" else "cpu").manual_seed(seed)
        x = torch.empty(shape.m, shape.k, dtype=torch.bfloat16, device=device)
        found = {"x": x if x.is_meta else x.normal_(generator=generator)}
        if shape.quantised and x.is_meta:
            blocks = torch.empty(shape.m, shape.k // BLOCK, device=device)
            found = {"x_codes": x.to(torch.int8), "x_scales": blocks, "x_sums": blocks}
        elif shape.quantised:
            codes, scales = to_integers(found.pop("x"))
            found |= {"x_codes": codes.to(torch.int8), "x_scales": scales}
            found["x_sums"] = codes.unflatten(-1, (-1, BLOCK)).sum(-1) * scales
        for name, (dtype, per) in scheme.parts().items():
            part = torch.empty(shape.n, shape.k // per, dtype=dtype, device=device)
            if not part.is_meta:
                randomize(part, name, scheme, generator)
            found[name] = part
        return found

    def reference(self, shape: MatmulShape, inputs: Tensors) -> tuple[Tensor, ...]:
        scheme = find_scheme(shape.scheme)
        if shape.quantised:
            x = _values(inputs["x_codes"].float(), inputs["x_scales"])
        else:
            x = quantise_activations(inputs["x"]) if shape.activations == "int8" else inputs["x"].float()
        parts = {name: inputs[name] for name in scheme.parts()}
        step = max(1, (1 << 26) // shape.k)
        chunks = [{name: part[i : i + step] for name, part in parts.items()} for i in range(0, shape.n, step)]
        y = torch.cat([(x.double() @ dequantize(scheme, chunk).double().T).float() for chunk in chunks], -1)
        if shape.activation != "none":
            gate, up = y.chunk(2, -1)
            y = (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        return (y.to(DTYPES[shape.out]),)

    def outputs(self, shape: MatmulShape, inputs: Tensors) -> dict[str, Tensor]:
        device = inputs["codes"].device
        found = {"out": torch.empty(shape.m, shape.width, dtype=DTYPES[shape.out], device=device)}
        if not shape.quantised:
            digits = 1 if shape.activations == "int8" else 2
            found["x_codes"] = torch.empty(digits, shape.m, shape.k, dtype=torch.int8, device=device)
            found |= {name: torch.empty(shape.m, shape.k // BLOCK, device=device) for name in ("x_scales", "x_sums")}
        return found

    def launches(self, shape: MatmulShape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        scheme = find_scheme(shape.scheme)
        _check(shape, scheme, inputs, outputs)
        x = inputs if shape.quantised else outputs
        shared = {"LIMIT": LIMITS[shape.activations], "PTX": inputs["codes"].device.type != "cpu"}
        tokens = min(config["tokens"], triton.next_power_of_2(shape.m))
        rows, blocks = config["rows"], config["block_k"] // BLOCK
        while rows * (32 * config.warps // blocks) > max(1, shape.width):  # not more rows at a time than there are
            rows, blocks = (rows // 2, blocks) if rows > 1 else (1, 2 * blocks)
        parts = {f"{name}_ptr": part for name, part in matrix_pointers(scheme, inputs).items()}
        arguments: dict[str, Any] = {name: part for name, part in parts.items() if part is not None}
        absent = {name: None for name, part in parts.items() if part is None}
        arguments |= {"x_codes_ptr": x["x_codes"].view(torch.int64), "x_scales_ptr": x["x_scales"], "x_sums_ptr": x["x_sums"]}
        arguments |= {"out_ptr": outputs["out"], "width": shape.width}
        to, ranks = sending(inputs)
        arguments |= to
        constants = {
            "M": shape.m, "K": shape.k, "TOKENS": tokens, "ROWS": rows, "BN": 32 * config.warps // blocks, "BG": blocks,
            "AHEAD": min(config["ahead"], -(-shape.k // (BLOCK * blocks))),
            "BITS": scheme.bits, "GROUP": scheme.group, "STEPS": scheme.steps, "OFFSET": scheme.offset,
            "ACTIVATION": shape.activation, "LEVELS": (tokens * rows * (shape.n // max(1, shape.width))).bit_length() - 1,
            **ranks, **shared, **absent,
        }  # fmt: skip
        grid = (-(-shape.width // max(1, rows * constants["BN"])) * -(-shape.m // tokens),)
        matmul = Launch(
            _matmul, grid, arguments, constants, config.warps, config.stages, early=True, carveout=config.carveout
        )  # fmt: skip
        return [matmul] if shape.quantised else [_quantising(shape, inputs, outputs, shared), matmul]

    def cost(self, shape: MatmulShape) -> Cost:
        matrix = shape.n * shape.k * find_scheme(shape.scheme).bits_per_weight / 8
        vectors = shape.m * (2 * shape.k + shape.width * DTYPES[shape.out].itemsize)
        return Cost(int(matrix) + vectors, 2.0 * shape.m * shape.n * shape.k)


def _quantising(shape: MatmulShape, inputs: Tensors, outputs: Tensors, constants: Mapping[str, Any]) -> Launch:
    """Return the launch that quantizes x. It is small, so a few blocks per program spread it over the GPU."""
    size = shape.m * shape.k // BLOCK
    pointers = {f"{name.removeprefix('x_')}_ptr": outputs[name] for name in ("x_codes", "x_scales", "x_sums")}
    arguments = {"x_ptr": inputs["x"], **pointers, "size": size}
    return Launch(_quantise, (-(-size // 16),), arguments, {"BLOCKS": 16, **constants}, warps=2, early=True)


def _check(shape: MatmulShape, scheme: Scheme, inputs: Tensors, outputs: Tensors) -> None:
    """Raise ModelError if the kernel can't read or write the tensors, or doesn't support the shape."""
    odd = (shape.activation != "none" and shape.n % 2) or (shape.quantised and shape.activations != "int8")
    if not 1 <= shape.m <= 8 or shape.k < 1 or shape.k % scheme.multiple or odd:
        limits = f"m is 1 to 8, k a multiple of {scheme.multiple}, n of gate and up even, quantised x int8"
        raise ModelError(f"int4_matmul of {shape.key}", "sizes that don't fit", f"Of this kernel {limits}")
    device = inputs["codes"]
    for name, (dtype, per) in scheme.parts().items():
        check_tensor("int4_matmul", name, inputs[name], (shape.n, shape.k // per), dtype, device)
    check_tensor("int4_matmul", "out", outputs["out"], (shape.m, shape.width), DTYPES[shape.out], device)
    if not shape.quantised:
        check_tensor("int4_matmul", "x", inputs["x"], (shape.m, shape.k), (torch.bfloat16, torch.float32), device)
        return
    check_tensor("int4_matmul", "x_codes", inputs["x_codes"], (shape.m, shape.k), torch.int8, device)
    for name in ("x_scales", "x_sums"):
        check_tensor("int4_matmul", name, inputs[name], (shape.m, shape.k // BLOCK), torch.float32, device)


def to_integers(x: Tensor, limit: int = LIMITS["int8"], group: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Quantize x [..., k] as the kernel does: integers [..., k] (in fp32) and scales [..., k / group] = largest / `limit`."""
    blocks = x.float().unflatten(-1, (-1, group))
    top = blocks.abs().amax(-1)
    inverse = torch.full_like(top, limit) / top.clamp_min(1e-30)  # one division: `limit / top` would be two operations
    inverse = inverse.where(top > 1e-30, 0.0)[..., None]
    return (blocks.double() * inverse.double()).round().float().flatten(-2), top / limit


def quantise_activations(x: Tensor, limit: int = LIMITS["int8"], group: int = BLOCK) -> Tensor:
    """Return x [..., k] after quantization by the kernel, in fp32."""
    return _values(*to_integers(x, limit, group))


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    return (codes.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)


INT4_MATMUL = Int4Matmul()
