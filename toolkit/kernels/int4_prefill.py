# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005  # Triton does not compile (*a, b)
"""x times the transpose of a packed matrix, for the many tokens of a prompt: tiles are dequantized for the tensor cores.

The rate of the tensor cores bounds the kernel. The bf16 matrix never exists in memory: a program loads the packed words of a
tile, converts them to bf16 in registers (equal to `packed.dequantize` except for an occasional last bit), and multiplies. The
next program does so again, which is why tiles span many tokens. A code becomes a float by placing it in a mantissa, without a
conversion instruction (as Kim et al., arXiv 2211.10017, do for halves). Sums are fp32 in a fixed order, so the result is
deterministic.
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
from toolkit.kernels import draws
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.packed import randomize, unpack_scales
from toolkit.weights.packed import dequantize
from toolkit.weights.schemes import find_scheme

ACTIVATIONS = ("none", "silu", "gelu_tanh")
COUNTERS = 1024  # the most tiles whose sums are split: more tiles than these fill any GPU without splitting
MOST_PARTS = 1024  # partial sums of a split product: as many keep any GPU busy, and their scratch is bounded
ROWS_AT_ONCE = 4096  # of the matrix, in the reference: bounds its scratch


@dataclass(frozen=True)
class PrefillShape(Shape):
    """x [m, k] times a packed matrix [n, k]; with an `activation`, the matrix holds n / 2 gate rows, then n / 2 up rows."""

    n: int
    k: int
    m: int
    scheme: str = "q4_k"
    activation: str = "none"  # or "silu", "gelu_tanh": the result is activation(gate) * up

    def __post_init__(self) -> None:
        multiple = find_scheme(self.scheme).multiple
        asked = f"a {self.scheme} matrix [{self.n}, {self.k}]"
        if self.k % multiple:
            raise ModelError(asked, f"rows of {self.k:,} don't divide by {multiple}", "Choose a scheme with smaller groups")
        if self.activation not in ACTIVATIONS:
            raise ModelError(asked, f"activation {self.activation!r}", f"Give one of {', '.join(ACTIVATIONS)}")
        if self.activation != "none" and self.n % 2:
            raise ModelError(asked, "an odd number of rows can't be gate and up", "Give as many gate rows as up rows")

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.n if self.activation == "none" else self.n // 2


class Int4Prefill(Kernel):
    """x [m, k] times the transpose of a packed matrix [n, k], or activation(gate) * up if the shape has an activation.

    Inputs are x in bf16, the parts of the matrix (see `PackedMatrix`), and counter int32 [1024], which is zero before and
    after. The result is out bf16 [m, width], all zero if k is 0. Raises ModelError for tensors with another shape, dtype or
    device, or that are not contiguous and aligned.
    """

    name: ClassVar[str] = "int4_prefill"
    shape_type: ClassVar[type[Shape]] = PrefillShape
    lengths = ("n", "k", "m")
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b gate+up, 512 tokens": PrefillShape(43008, 5376, 512, activation="gelu_tanh"),
        "gemma4-31b gate+up, 2048 tokens": PrefillShape(43008, 5376, 2048, activation="gelu_tanh"),
        "gemma4-31b down, 512 tokens": PrefillShape(5376, 21504, 512),
        "gemma4-31b down, 2048 tokens": PrefillShape(5376, 21504, 2048),
        "gemma4-31b qkv sliding, 2048 tokens": PrefillShape(16384, 5376, 2048),
        "gemma4-31b o sliding, 2048 tokens": PrefillShape(5376, 8192, 2048),
        "qwen3-8b gate+up, 512 tokens": PrefillShape(24576, 4096, 512, activation="silu"),
        "qwen3-8b down, 512 tokens": PrefillShape(4096, 12288, 512, "q6_k"),
        "qwen3.5-35b-a3b qkv, 512 tokens": PrefillShape(9216, 2048, 512),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, PrefillShape)
        few, some, many = ((64, 64), (64, 32)), ((64, 128),), ((128, 256), (64, 256), (64, 128))
        blocks = few if shape.m <= 64 else some if shape.m <= 128 else many
        splits = (1, 2, 3, 4, 6, 8) if shape.m <= 64 else (1, 2, 3, 4)
        kinds = 1 if shape.activation == "none" else 2
        found = [Config(block_n=64, block_m=32, block_k=64, split=1, warps=4, stages=2)]
        for (block_n, block_m), split, stages in itertools.product(blocks, splits, (3, 4)):
            warps = 8 if kinds * block_n * block_m > 64 * 256 else 4
            config = Config(block_n=block_n, block_m=block_m, block_k=64, split=split, warps=warps, stages=stages)
            if split == 1 or _tiles(shape, config)[0] * split <= MOST_PARTS:
                found.append(config)
        return found

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, PrefillShape)
        scheme, device = find_scheme(shape.scheme), torch.device(device)
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        found = {"x": draws.normal((shape.m, shape.k), generator, device, torch.bfloat16)}
        for name, (dtype, per) in scheme.parts().items():
            found[name] = torch.empty(shape.n, shape.k // per, dtype=dtype, device=device)
            if generator is not None:
                randomize(found[name], name, scheme, generator)
        return found | {"counter": torch.zeros(COUNTERS, dtype=torch.int32, device=device)}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, PrefillShape)
        scheme, x = find_scheme(shape.scheme), inputs["x"].float()
        out = x.new_empty(shape.m, shape.n)
        for start in range(0, shape.n, ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            weights = dequantize(scheme, {name: inputs[name][rows] for name in scheme.parts()}, torch.bfloat16)
            out[:, rows] = x @ weights.float().T
        if shape.activation != "none":
            gate, up = out.chunk(2, -1)
            out = (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
        return (out.to(torch.bfloat16),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, PrefillShape)
        scratch = max(_tiles(shape, config)[1] for config in self.space(shape))
        partial = torch.empty(scratch, dtype=torch.float32, device=inputs["x"].device)
        return {"out": inputs["x"].new_empty(shape.m, shape.width), "partial": partial}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, PrefillShape)
        self._check(shape, config, inputs, outputs)
        scheme = find_scheme(shape.scheme)
        block_n, block_m, block_k = (config[f"block_{letter}"] for letter in "nmk")
        x, scales = inputs["x"], inputs["scales"]
        arguments: dict[str, Any] = {
            "x_ptr": x, "out_ptr": outputs["out"], "codes_ptr": _words(inputs["codes"]),
            "high_ptr": _words(inputs["high"]) if "high" in inputs else scales,
            "scales_ptr": scales.view(torch.int64) if scheme.joint else scales,
            "offsets_ptr": inputs.get("zeros", inputs.get("minima", scales)), "steps_ptr": inputs.get("scale_steps", scales),
            "partial_ptr": outputs["partial"],
            "counter_ptr": inputs["counter"], "M": shape.m, "N": shape.width,
        }  # fmt: skip
        constants = {
            "K": shape.k, "BITS": scheme.bits, "GROUP": scheme.group, "STEPS": scheme.steps, "OFFSET": scheme.offset,
            "CENTRE": scheme.centre, "ACTIVATION": shape.activation, "BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": block_k,
            "SPLIT": config["split"], "FEW": shape.m < block_m, "HALVES": not x.is_cpu,
        }  # fmt: skip
        grid = (_tiles(shape, config)[0] * config["split"],)
        return [Launch(_prefill_kernel, grid, arguments, constants, config.warps, config.stages)]

    def _check(self, shape: PrefillShape, config: Config, inputs: Tensors, outputs: Tensors) -> None:
        x, parts = inputs["x"], find_scheme(shape.scheme).parts()
        check_tensor(self.name, "x", x, (shape.m, shape.k), torch.bfloat16, x)
        check_tensor(self.name, "out", outputs["out"], (shape.m, shape.width), torch.bfloat16, x)
        for name, (dtype, per) in parts.items():
            check_tensor(self.name, name, inputs[name], (shape.n, shape.k // per), dtype, x)
        tiles, numbers = _tiles(shape, config)
        if config["split"] > 1 and (len(inputs["counter"]) < tiles or len(outputs["partial"]) < numbers):
            found = f"{len(inputs['counter'])} counters and scratch for {len(outputs['partial']):,} sums"
            raise ModelError(self.name, f"{found} where {tiles} and {numbers:,} are needed", "Choose a config of the space")

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, PrefillShape)
        matrix = int(shape.n * shape.k * find_scheme(shape.scheme).bits_per_weight / 8)
        rows = 2 * shape.m * (shape.k + shape.width)
        return Cost(matrix + rows, 2.0 * shape.m * shape.n * shape.k, "bf16_flops")


def _tiles(shape: PrefillShape, config: Config) -> tuple[int, int]:
    """Return the tiles of the result, and the fp32 numbers of scratch for partial sums."""
    block_n, block_m, split = config["block_n"], config["block_m"], config["split"]
    tiles = triton.cdiv(shape.m, block_m) * triton.cdiv(shape.width, block_n)
    kinds = 1 if shape.activation == "none" else 2
    return tiles, tiles * split * kinds * block_n * block_m if split > 1 else 0


def _words(packed: Tensor) -> Tensor:
    """Return the same bytes as 32-bit words."""
    return packed.flatten().view(torch.int32)


@triton.jit
def _fields(words, WIDTH: tl.constexpr, AT: tl.constexpr):
    """[N, W] words -> [N, W * 32 / WIDTH]: their fields of WIDTH bits in the order of the weights, each moved to bit AT.

    Field f of byte b belongs to weight 4 f + b (see `PackedMatrix`). Fields are joined bit by bit of that number, highest
    first, so that a thread keeps the values that it unpacks.
    """
    LEVELS: tl.constexpr = 5 if WIDTH == 1 else 4 if WIDTH == 2 else 3 if WIDTH == 4 else 2
    fields = words
    for level in tl.static_range(LEVELS - 2):
        fields = tl.join(fields, fields >> (WIDTH << (LEVELS - 3 - level)))
    fields = tl.join(fields, fields >> 16)
    fields = tl.join(fields, fields >> 8)
    fields = (fields & ((1 << WIDTH) - 1)) << AT
    return tl.reshape(fields, (words.shape[0], words.shape[1] * (32 // WIDTH)))


@triton.jit
def _load(ptr, base, row, first, PER_ROW: tl.constexpr, COUNT: tl.constexpr, WHOLE: tl.constexpr):
    """Load [N, COUNT] elements of rows base + [N, 1] from `first` on; zeros beyond the end unless WHOLE."""
    at = first + tl.arange(0, COUNT)[None, :]
    ptr += base * PER_ROW
    if WHOLE:
        return tl.load(ptr + (row * PER_ROW + at))
    return tl.load(ptr + (row * PER_ROW + at), mask=at < PER_ROW, other=0)


@triton.jit
def _held(
    codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base, row, k,
    K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
    BLOCK_K: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Load a tile from column k on as stored: codes, scales, and offsets, steps and high bits if the scheme has them.

    Where minima have steps, scales are the pairs of int64 that hold all these numbers of eight groups.
    """
    PER: tl.constexpr = 4 if BITS == 8 else 8
    GROUPS: tl.constexpr = (BLOCK_K + GROUP - 1) // GROUP
    found = (_load(codes_ptr, base, row, k // PER, K // PER, BLOCK_K // PER, WHOLE),)
    if STEPS and OFFSET == "minimum":
        found = found + (_load(scales_ptr, base, row, k // 256 * 2, K // 128, 2, WHOLE),)
    else:
        found = found + (_load(scales_ptr, base, row, k // GROUP, K // GROUP, GROUPS, WHOLE),)
        if OFFSET != "centre":
            found = found + (_load(offsets_ptr, base, row, k // GROUP, K // GROUP, GROUPS, WHOLE),)
        if STEPS:
            found = found + (_load(steps_ptr, base, row, k // STEPS, K // STEPS, 1, WHOLE),)
    if BITS == 5 or BITS == 6:
        HIGH_PER: tl.constexpr = 32 // (BITS - 4)
        found = found + (_load(high_ptr, base, row, k // HIGH_PER, K // HIGH_PER, BLOCK_K // HIGH_PER, WHOLE),)
    return found


@triton.jit
def _weights(
    held, k, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the bf16 values [BLOCK_N, BLOCK_K] of a tile that `_held` loaded from column k on.

    A code is placed in the highest bits of a mantissa, 1 + code / 2^BITS; one multiplication and one addition do the rest.
    """
    words = held[0]
    if BITS == 8:
        words = words ^ -2139062144  # 0x80808080: signed bytes become unsigned ones, 128 higher
    codes = _fields(words, 8 if BITS == 8 else 4, 23 - BITS)
    if BITS == 5 or BITS == 6:
        codes |= _fields(held[len(held) - 1], BITS - 4, 27 - BITS)
    values = (codes | 0x3F800000).to(tl.float32, bitcast=True)
    ONE: tl.constexpr = 1 << BITS  # what 1.0 counts in codes
    BIAS: tl.constexpr = ONE + CENTRE + (128 if BITS == 8 else 0)
    if STEPS and OFFSET == "minimum":
        low, high = tl.split(held[1])
        block = (k // 32 + tl.arange(0, BLOCK_K // 32))[None, :]
        scales, minima, step, minimum_step = unpack_scales(low[:, None], high[:, None], block)
        scales = scales.to(tl.float32) * step
        offsets = scales * BIAS + minima.to(tl.float32) * minimum_step
    else:
        scales = held[1].to(tl.float32)
        if STEPS:
            scales *= held[2].to(tl.float32)
        offsets = scales * BIAS
        if OFFSET == "zero":
            offsets += held[2].to(tl.float32) * scales
        if OFFSET == "minimum":
            offsets += held[2].to(tl.float32)
    values = tl.reshape(values, (BLOCK_N, scales.shape[1], BLOCK_K // scales.shape[1]))
    values = values * (scales * ONE)[:, :, None] - offsets[:, :, None]
    return tl.reshape(values, (BLOCK_N, BLOCK_K)).to(tl.bfloat16)


@triton.jit
def _dot(a, b, sums, HALVES: tl.constexpr):
    """Add a times b to `sums`. Triton's interpreter can't multiply bf16: without HALVES the values become fp32 first."""
    if HALVES:
        return tl.dot(a, b, sums)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate))
    inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-2.0 * inner))  # (1 + tanh z) / 2 = 1 / (1 + exp(-2 z))


@triton.jit
def _finish(out_ptr, sums, up_sums, first, end, n, N, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Store `n` columns of the rows from `first` to `end` of a tile [BLOCK_N, BLOCK_M]; rows of the result are N apart."""
    if ACTIVATION != "none":
        sums = _activated(sums, ACTIVATION) * up_sums
    i, j = tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_M)[None, :]
    tl.store(out_ptr + (j * N + i), sums.to(out_ptr.dtype.element_ty), mask=(j >= first) & (j < end) & (i < n))


@triton.jit(do_not_specialize=["M"])  # its multiples of 16 would be programs of their own, and no faster
def _prefill_kernel(
    x_ptr, out_ptr, codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, partial_ptr,
    counter_ptr, M, N, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
    CENTRE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, FEW: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the result per program, or one of SPLIT partial sums; the last program adds them in order.

    No tile reads tokens beyond the last one: the last tile begins earlier, unless there are too FEW tokens to fill one tile. If
    tiles were filled with copies of the last token, all multiprocessors would wait for the same lines of the L2.

    Tiles for the same rows of the matrix are neighbors and share them in L2. The weights are the left operand, so that a few
    tokens don't occupy more rows of a tensor core than needed. While one tile is multiplied, the next is dequantized and the
    one after it is loaded.
    """
    CHUNK: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K) * BLOCK_K
    tile, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    start = part * CHUNK
    tiles_m = tl.cdiv(M, BLOCK_M)
    n = tile // tiles_m * BLOCK_N
    place = tile % tiles_m * BLOCK_M
    m = 0 if FEW else tl.minimum(place, M - BLOCK_M)
    row = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - n)[:, None]
    x_row = tl.arange(0, BLOCK_M)[:, None]
    base, x_base = n.to(tl.int64), tl.cast(m, tl.int64)
    held = _held(
        codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base, row, start,
        K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
    )  # fmt: skip
    weights = _weights(held, start, BITS, GROUP, STEPS, OFFSET, CENTRE, BLOCK_N, BLOCK_K)
    held = _held(
        codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base, row, start + BLOCK_K,
        K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
    )  # fmt: skip
    sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if ACTIVATION != "none":
        up_held = _held(
            codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base + N, row, start,
            K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
        )  # fmt: skip
        up_weights = _weights(up_held, start, BITS, GROUP, STEPS, OFFSET, CENTRE, BLOCK_N, BLOCK_K)
        up_held = _held(
            codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base + N, row, start + BLOCK_K,
            K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
        )  # fmt: skip
        up_sums = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(start, tl.minimum(start + CHUNK, K), BLOCK_K):
        if FEW:
            columns = k + tl.arange(0, BLOCK_K)[None, :]
            x = tl.load(x_ptr + (x_row * K + columns), mask=(x_row < M) & (columns < K), other=0)
        else:
            x = _load(x_ptr, x_base, x_row, k, K, BLOCK_K, K % BLOCK_K == 0)
        x = tl.trans(x)
        sums = _dot(weights, x, sums, HALVES)
        if ACTIVATION != "none":
            up_sums = _dot(up_weights, x, up_sums, HALVES)
        weights = _weights(held, k + BLOCK_K, BITS, GROUP, STEPS, OFFSET, CENTRE, BLOCK_N, BLOCK_K)
        held = _held(
            codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base, row, k + 2 * BLOCK_K,
            K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
        )  # fmt: skip
        if ACTIVATION != "none":
            up_weights = _weights(up_held, k + BLOCK_K, BITS, GROUP, STEPS, OFFSET, CENTRE, BLOCK_N, BLOCK_K)
            up_held = _held(
                codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base + N, row, k + 2 * BLOCK_K,
                K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
            )  # fmt: skip
    if ACTIVATION == "none":
        up_sums = sums
    out_ptr += x_base * N + n
    if SPLIT == 1:
        _finish(out_ptr, sums, up_sums, place - m, M - m, N - n, N, ACTIVATION, BLOCK_N, BLOCK_M)
    else:
        SIZE: tl.constexpr = BLOCK_N * BLOCK_M
        KINDS: tl.constexpr = 1 if ACTIVATION == "none" else 2
        at = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        partial_ptr += tile.to(tl.int64) * (SPLIT * KINDS * SIZE)
        tl.store(partial_ptr + part * (KINDS * SIZE) + at, sums)
        if KINDS == 2:
            tl.store(partial_ptr + part * (KINDS * SIZE) + SIZE + at, up_sums)
        tl.debug_barrier()  # everything is stored before this program is counted
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(counter_ptr + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            up_total = total
            for i in range(SPLIT):
                total += tl.load(partial_ptr + i * (KINDS * SIZE) + at, cache_modifier=".cg")
                if KINDS == 2:
                    up_total += tl.load(partial_ptr + i * (KINDS * SIZE) + SIZE + at, cache_modifier=".cg")
            _finish(out_ptr, total, up_total, place - m, M - m, N - n, N, ACTIVATION, BLOCK_N, BLOCK_M)


INT4_PREFILL = Int4Prefill()
