# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  # Triton does not compile (*a, b)
"""Many tokens through a mixture of experts: two products with packed matrices, each expert with the tokens that chose it.

For short prompts the bytes of all experts bound the kernel; for long ones the tensor cores and the conversion of weights to
bf16. Nothing is read back to the host: a launch sorts the pairs of token and expert by expert with a counting sort (as before
the grouped products of Gale et al., MegaBlocks, arXiv 2211.15841), and the grid has as many tiles as could be needed; surplus
tiles end at once. Tiles of weights become bf16 in registers, as in int4_prefill.py. Every pair has its own row in memory, and a
last launch adds the rows of a token in order, so the result is deterministic.
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
from toolkit.kernels.int4_prefill import ACTIVATIONS, _activated, _dot, _held, _load, _weights, _words
from toolkit.kernels.packed import randomize
from toolkit.weights.packed import dequantize
from toolkit.weights.schemes import Scheme, find_scheme

SORTED_AT_ONCE = 4096  # pairs of token and expert
SUMMED_AT_ONCE = 1024  # columns


@dataclass(frozen=True)
class ExpertsShape(Shape):
    """`tokens`, each of which goes through `top_k` of `experts` gated MLPs hidden -> width -> hidden."""

    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int
    scheme: str = "q4_k"  # of gate and up
    down: str = "q4_k"
    activation: str = "silu"  # or "gelu_tanh"

    def __post_init__(self) -> None:
        asked = f"{self.top_k} of {self.experts} experts {self.hidden} -> {self.width}, {self.scheme} and {self.down}"
        for size, scheme in ((self.hidden, find_scheme(self.scheme)), (self.width, find_scheme(self.down))):
            if size < 1 or size % scheme.multiple:
                found = f"{size:,} columns don't divide by {scheme.multiple}"
                raise ModelError(asked, found, "Use the model's reference, or another scheme")
        if not 1 <= self.top_k <= self.experts:
            raise ModelError(asked, "a token can't choose so many", "Give a top_k from 1 to the number of experts")
        if self.activation not in ACTIVATIONS[1:]:
            found = f"activation {self.activation!r}"
            raise ModelError(asked, found, f"Give one of {', '.join(ACTIVATIONS[1:])}")

    @property
    def pairs(self) -> int:
        """The number of pairs of a token and an expert that it chose."""
        return self.tokens * self.top_k

    @property
    def matrices(self) -> dict[str, tuple[Scheme, tuple[int, int, int]]]:
        """The packed stacks among the inputs: prefix -> (scheme, shape)."""
        return {
            "up": (find_scheme(self.scheme), (self.experts, 2 * self.width, self.hidden)),
            "down": (find_scheme(self.down), (self.experts, self.hidden, self.width)),
        }

    def tiles(self, block_m: int) -> int:
        """Return the largest possible number of tiles with `block_m` pairs of one expert, however the tokens choose."""
        return (self.pairs + min(self.experts, self.pairs) * (block_m - 1)) // block_m


class MoePrefill(Kernel):
    """x [tokens, hidden] bf16 through the experts `chosen` [tokens, top_k] (int32 or int64), weighted by `shares` (fp32).

    The experts' matrices are inputs by part (see `PackedMatrix`): "up_codes" [experts, 2 width, hidden / 2], gate rows before
    up rows, "up_scales", ...; "down_codes" [experts, hidden, width / 2], ... . A token chooses an expert at most once. The
    result is out [tokens, hidden] bf16. Raises ModelError for tensors with another shape, dtype or device, or that are not
    contiguous.
    """

    name: ClassVar[str] = "moe_prefill"
    shape_type: ClassVar[type[Shape]] = ExpertsShape
    lengths: ClassVar[tuple[str, ...]] = ("tokens", "hidden", "width", "experts")
    known: ClassVar[Mapping[str, Shape]] = {
        "qwen3.5-35b-a3b experts, 512 tokens": ExpertsShape(512, 2048, 512, 256, 8),
        "qwen3.5-35b-a3b experts, 2048 tokens": ExpertsShape(2048, 2048, 512, 256, 8),
        "qwen3.5-35b-a3b experts, q6_k down, 512 tokens": ExpertsShape(512, 2048, 512, 256, 8, down="q6_k"),
        "qwen3.5-35b-a3b experts, q6_k down, 2048 tokens": ExpertsShape(2048, 2048, 512, 256, 8, down="q6_k"),
        "qwen3-30b-a3b experts, 512 tokens": ExpertsShape(512, 2048, 768, 128, 8),
        # Rows of 704 can't be divided into a K scheme's groups of 256, so GGUF files use an older scheme for them.
        "gemma4-26b-a4b experts, 512 tokens": ExpertsShape(512, 2816, 704, 128, 8, down="q5_0", activation="gelu_tanh"),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        """Return configs with tiles as tall as an expert's average number of pairs, and taller, so that few experts need a
        second tile.
        """
        assert isinstance(shape, ExpertsShape)
        usual = triton.next_power_of_2(max(1, shape.pairs // shape.experts))
        heights = sorted({min(max(usual * times, 16), 128) for times in (1, 2, 4)})
        found = [Config(block_n=64, block_m=32, block_k=64, warps=4, stages=2)]
        for m, (n, stages) in itertools.product(heights, ((64, 3), (64, 4), (128, 3))):
            found.append(Config(block_n=n, block_m=m, block_k=64, warps=n // 16, stages=stages))
        return found

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, ExpertsShape)
        device = torch.device(device)
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        x = torch.empty(shape.tokens, shape.hidden, dtype=torch.bfloat16, device=device)
        best = torch.empty(shape.tokens, shape.top_k, device=device)
        found = {"x": x, "chosen": best.to(torch.int64), "shares": best}
        if generator is not None:
            x.normal_(generator=generator)
            best, chosen = draws.normal((shape.tokens, shape.experts), generator, device).topk(shape.top_k, -1)
            found |= {"chosen": chosen, "shares": best.softmax(-1)}
        for prefix, (scheme, size) in shape.matrices.items():
            for name, (dtype, per) in scheme.parts().items():
                part = torch.empty(*size[:2], size[2] // per, dtype=dtype, device=device)
                if generator is not None:
                    randomize(part, name, scheme, generator)
                found[f"{prefix}_{name}"] = part
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """Round weights and inner activations to bf16, and sum in fp32."""
        assert isinstance(shape, ExpertsShape)
        x, chosen, shares = inputs["x"].float(), inputs["chosen"], inputs["shares"]
        total = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ self._matrix(shape, inputs, "up", expert).T).chunk(2, -1)
            inner = (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
            row = inner.to(torch.bfloat16).float() @ self._matrix(shape, inputs, "down", expert).T
            total[token] += shares[token, slot, None] * row
        return (total.to(torch.bfloat16),)

    @staticmethod
    def _matrix(shape: ExpertsShape, inputs: Tensors, prefix: str, expert: int) -> Tensor:
        scheme = shape.matrices[prefix][0]
        parts = {name: inputs[f"{prefix}_{name}"][expert] for name in scheme.parts()}
        return dequantize(scheme, parts, torch.bfloat16).float()

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """Return the result, the pairs sorted by expert, each expert's first pair, inner activations, and the rows of the
        pairs.
        """
        assert isinstance(shape, ExpertsShape)
        x = inputs["x"]
        return {
            "out": x.new_empty(x.shape),
            "order": torch.empty(shape.pairs, dtype=torch.int32, device=x.device),
            "starts": torch.empty(shape.experts + 1, dtype=torch.int32, device=x.device),
            "inner": x.new_empty(shape.pairs, shape.width),
            "rows": x.new_empty(shape.pairs, shape.hidden),
        }

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, ExpertsShape)
        self._check(shape, inputs, outputs)
        where = {name: outputs[name] for name in ("order", "starts")}
        sort = Launch(
            _sort, (shape.experts if shape.pairs else 0,), {"chosen": inputs["chosen"], **where, "pairs": shape.pairs},
            {"EXPERTS": shape.experts, "BLOCK": SORTED_AT_ONCE}, warps=8,
        )  # fmt: skip
        total = Launch(
            _sum, (shape.tokens, triton.cdiv(shape.hidden, SUMMED_AT_ONCE)), {"rows": outputs["rows"], "out": outputs["out"]},
            {"HIDDEN": shape.hidden, "TOP_K": shape.top_k, "BLOCK": SUMMED_AT_ONCE},
        )  # fmt: skip
        products = (self._product(shape, config, prefix, inputs, outputs) for prefix in shape.matrices)
        return [sort, *products, total]

    def _product(self, shape: ExpertsShape, config: Config, prefix: str, inputs: Tensors, outputs: Tensors) -> Launch:
        scheme, (_, _, columns) = shape.matrices[prefix]
        parts = {name: inputs[f"{prefix}_{name}"] for name in scheme.parts()}
        scales, inner = parts["scales"], outputs["inner"]
        x, out, width = (inputs["x"], inner, shape.width) if prefix == "up" else (inner, outputs["rows"], shape.hidden)
        arguments: dict[str, Any] = {
            "x_ptr": x, "out_ptr": out, "codes_ptr": _words(parts["codes"]),
            "high_ptr": _words(parts["high"]) if "high" in parts else scales,
            "scales_ptr": scales.view(torch.int64) if scheme.joint else scales,
            "offsets_ptr": parts.get("zeros", parts.get("minima", scales)), "steps_ptr": parts.get("scale_steps", scales),
            "shares": inputs["shares"], "order": outputs["order"], "starts": outputs["starts"],
        }  # fmt: skip
        block_n, block_m, block_k = (config[f"block_{letter}"] for letter in "nmk")
        constants = {
            "N": width, "K": columns, "EXPERTS": shape.experts, "TOP_K": shape.top_k, "BITS": scheme.bits,
            "GROUP": scheme.group, "STEPS": scheme.steps, "OFFSET": scheme.offset, "CENTRE": scheme.centre,
            "ACTIVATION": shape.activation if prefix == "up" else "none", "BLOCK_N": block_n, "BLOCK_M": block_m,
            "BLOCK_K": block_k, "HALVES": not x.is_cpu,
        }  # fmt: skip
        grid = (shape.tiles(block_m) * triton.cdiv(width, block_n),)
        return Launch(_grouped, grid, arguments, constants, config.warps, config.stages)

    def _check(self, shape: ExpertsShape, inputs: Tensors, outputs: Tensors) -> None:
        x, chosen = inputs["x"], (shape.tokens, shape.top_k)
        check_tensor(self.name, "x", x, (shape.tokens, shape.hidden), torch.bfloat16, x)
        check_tensor(self.name, "chosen", inputs["chosen"], chosen, (torch.int32, torch.int64), x)
        check_tensor(self.name, "shares", inputs["shares"], chosen, torch.float32, x)
        check_tensor(self.name, "out", outputs["out"], x.shape, torch.bfloat16, x)
        for prefix, (scheme, size) in shape.matrices.items():
            for name, (dtype, per) in scheme.parts().items():
                part = inputs[f"{prefix}_{name}"]
                check_tensor(self.name, f"{prefix}_{name}", part, (*size[:2], size[2] // per), dtype, x)

    def cost(self, shape: Shape) -> Cost:
        """Count the matrices of all experts that can have been chosen, x and the result."""
        assert isinstance(shape, ExpertsShape)
        bits = 2 * find_scheme(shape.scheme).bits_per_weight + find_scheme(shape.down).bits_per_weight
        weights = min(shape.experts, shape.pairs) * shape.hidden * shape.width
        flops = 6.0 * shape.pairs * shape.hidden * shape.width
        return Cost(int(weights * bits / 8) + 4 * shape.tokens * shape.hidden, flops, "bf16_flops")


@triton.jit
def _sort(chosen, order, starts, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    """Write the pairs that chose this program's expert, in order, after those of the experts before it."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        before += tl.load(chosen + first + at, mask=first + at < pairs, other=EXPERTS) < expert
    end = tl.sum(before, 0)
    tl.store(starts + expert, end)
    for first in range(0, pairs, BLOCK):
        own = (tl.load(chosen + first + at, mask=first + at < pairs, other=EXPERTS) == expert).to(tl.int32)
        tl.store(order + end - 1 + tl.cumsum(own, 0), first + at, mask=own != 0)
        end += tl.sum(own, 0)
    if expert == EXPERTS - 1:
        tl.store(starts + EXPERTS, end)


@triton.jit
def _tile(starts, tile, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return (expert, its first pair in this tile, pairs left); a surplus tile has none left."""
    e = tl.arange(0, triton.next_power_of_2(EXPERTS))
    start = tl.load(starts + tl.minimum(e, EXPERTS))
    end = tl.load(starts + tl.minimum(e + 1, EXPERTS))
    tiles = tl.cdiv(end - start, BLOCK_M)
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(e == expert, start + (tile - ends + tiles) * BLOCK_M, 0), 0)
    return expert, first, tl.sum(tl.where(e == expert, end, 0), 0) - first


@triton.jit
def _grouped(
    x_ptr, out_ptr, codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, shares, order, starts,
    N: tl.constexpr, K: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """A tile of one expert's product: gate and up of tokens with an ACTIVATION, else down, weighted, to the pairs' rows.

    Tiles of the same pairs are neighbors and share them in L2. While one tile is multiplied, the next is dequantized and the
    one after it is loaded (see int4_prefill.py).
    """
    DOWN: tl.constexpr = ACTIVATION == "none"
    KINDS: tl.constexpr = 1 if DOWN else 2
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    expert, first, left = _tile(starts, tl.program_id(0) // COLUMNS, EXPERTS, BLOCK_M)
    if left <= 0:
        return
    n = tl.program_id(0) % COLUMNS * BLOCK_N
    place = first + tl.minimum(tl.arange(0, BLOCK_M), left - 1)
    pair = tl.load(order + place)
    x_row = (place if DOWN else pair // TOP_K).to(tl.int64)[:, None]
    row = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - n)[:, None]
    base = expert.to(tl.int64) * (N * KINDS) + n
    weights = ()
    held = ()
    sums = ()
    for kind in tl.static_range(KINDS):
        now = _held(
            codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base + kind * N, row, 0,
            K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
        )  # fmt: skip
        weights = weights + (_weights(now, 0, BITS, GROUP, STEPS, OFFSET, CENTRE, BLOCK_N, BLOCK_K),)
        held = held + (
            _held(
                codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base + kind * N, row, BLOCK_K,
                K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
            ),
        )  # fmt: skip
        sums = sums + (tl.zeros((BLOCK_N, BLOCK_M), tl.float32),)
    for k in range(0, K, BLOCK_K):
        x = tl.trans(_load(x_ptr, 0, x_row, k, K, BLOCK_K, K % BLOCK_K == 0))
        added = ()
        for kind in tl.static_range(KINDS):
            added = added + (_dot(weights[kind], x, sums[kind], HALVES),)
        sums = added
        following = ()
        coming = ()
        for kind in tl.static_range(KINDS):
            following = following + (_weights(held[kind], k + BLOCK_K, BITS, GROUP, STEPS, OFFSET, CENTRE, BLOCK_N, BLOCK_K),)
            coming = coming + (
                _held(
                    codes_ptr, high_ptr, scales_ptr, offsets_ptr, steps_ptr, base + kind * N, row,
                    k + 2 * BLOCK_K, K, BITS, GROUP, STEPS, OFFSET, BLOCK_K, False,
                ),
            )  # fmt: skip
        weights = following
        held = coming
    result = sums[0] * tl.load(shares + pair)[None, :] if DOWN else _activated(sums[0], ACTIVATION) * sums[1]
    i, j = n + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_M)[None, :]
    out_row = (pair if DOWN else place).to(tl.int64)[None, :]
    tl.store(out_ptr + out_row * N + i, result.to(out_ptr.dtype.element_ty), mask=(j < left) & (i < N))


@triton.jit
def _sum(rows, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """Add the rows of a token in the order of its choices."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        total += tl.load(rows + (token * TOP_K + k) * HIDDEN + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + at, total.to(out.dtype.element_ty), mask=at < HIDDEN)


MOE_PREFILL = MoePrefill()
"""The one instance."""
