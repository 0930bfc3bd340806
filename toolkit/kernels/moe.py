# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  # what Triton compiles knows no (*a, b)
"""One token through a mixture of experts: routing, the chosen experts and the shared one, their weighted sum.

Bound by the bytes of the matrices that the token chooses, and almost as much by waiting: two products in a row, each of
a few microseconds. Every block finds the chosen experts itself, from scores that stand in a cache. The activations of
both products are integers of 8 bits (see packed.py), x with a scale per 32, those of the second product with one per 8: as
few as one block of the first product makes. In one launch, blocks of the second product load their rows of the matrices and
then wait for the first product. They come last in the grid: a GPU starts blocks in order, so whom they wait for is running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from toolkit.errors import ModelError
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.packed import (
    BLOCK,
    activate,
    activations,
    dp4a,
    load_blocks,
    load_rows,
    quantise_activations,
    randomise,
    round_low,
    row_sums,
    unpack,
)  # fmt: skip
from toolkit.quant import Scheme, dequantise, find_scheme


@dataclass(frozen=True)
class MoeShape(Shape):
    """`experts` gated MLPs hidden -> width -> hidden, of which a token uses `top_k` and, if `shared`, one more of that size."""

    hidden: int
    width: int
    experts: int
    top_k: int
    shared: bool = True
    scheme: str = "q4_k"  # of gate and up
    down: str = "q4_k"
    activation: str = "silu"  # or "gelu_tanh"
    dtype: str = "bfloat16"

    @property
    def used(self) -> int:
        """Experts that a token goes through."""
        return self.top_k + self.shared

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def check(self) -> str:
        """How an error calls it. Raises ModelError for sizes that the kernel can't take."""
        asked = f"{self.top_k} of {self.experts} experts {self.hidden} -> {self.width}, {self.scheme} and {self.down}"
        up, down = find_scheme(self.scheme), find_scheme(self.down)
        for size, scheme in ((self.hidden, up), (self.width, down)):
            if size < 1 or size % max(BLOCK, scheme.multiple):
                found = f"{size:,} columns don't divide by {max(BLOCK, scheme.multiple)}"
                raise ModelError(asked, found, "Use the model's reference, or another scheme")
        if not 1 <= self.top_k <= self.experts:
            raise ModelError(asked, "a token can't choose so many", "Give a top_k from 1 to the number of experts")
        return asked


class MoeStep(Kernel):
    """x [hidden], scores [experts] (of the router, before the softmax), shared_gate [1] (before its sigmoid) -> [hidden].

    The experts' matrices are inputs by part (see `PackedMatrix`): "up_codes" [experts, 2 width, hidden / 2], gate rows
    before up rows, "up_scales", ...; "down_codes" [experts, hidden, width / 2], ...; the shared expert's "shared_up_codes"
    [2 width, hidden / 2], ... and "shared_down_codes", ... . Equal scores go to the lowest number.
    """

    name = "moe_step"
    shape_type = MoeShape
    lengths = ("experts",)
    known: ClassVar[Mapping[str, Shape]] = {
        "qwen3.5-35b-a3b experts, q4_k": MoeShape(2048, 512, 256, 8),
        "qwen3.5-35b-a3b experts, q6_k down": MoeShape(2048, 512, 256, 8, down="q6_k"),
        "qwen3-30b-a3b experts": MoeShape(2048, 768, 128, 8, shared=False),
        "qwen3.5-122b-a10b experts": MoeShape(3072, 1024, 256, 8),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        assert isinstance(shape, MoeShape)
        return [
            Config(fused=f, pairs=p, blocks=b, rows=8, warps=w)
            for f in (1, 0)
            for p, w in ((8, 4), (8, 8), (16, 8))
            for b in (64, 32)
            if shape.width % p == 0
        ]

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, MoeShape)
        meta = torch.device(device).type == "meta"
        generator = None if meta else torch.Generator(device).manual_seed(seed)
        found = {"x": torch.empty(shape.hidden, dtype=shape.torch_dtype, device=device)}
        found |= {"scores": torch.empty(shape.experts, dtype=shape.torch_dtype, device=device)}
        if shape.shared:
            found |= {"shared_gate": torch.empty(1, dtype=shape.torch_dtype, device=device)}
        if generator is not None:
            for tensor in found.values():
                tensor.normal_(generator=generator)
        for prefix, (scheme, size) in matrices(shape).items():
            for name, (dtype, per) in scheme.parts().items():
                part = torch.empty(*size[:-1], size[-1] // per, dtype=dtype, device=device)
                if generator is not None:
                    randomise(part, name, scheme, generator)
                found[f"{prefix}_{name}"] = part
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """On the same quantised activations, in fp64 between them."""
        assert isinstance(shape, MoeShape)
        chosen, shares = route(shape, inputs)
        x = quantise_activations(inputs["x"]).double()
        total = torch.zeros(shape.hidden, dtype=torch.float64, device=x.device)
        for slot in range(shape.used):
            prefix, expert = ("", chosen[slot]) if slot < shape.top_k else ("shared_", None)
            gate, up = (matrix(shape, inputs, f"{prefix}up", expert) @ x).float().chunk(2)
            inner = (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
            inner = quantise_activations(inner, group=8).double()
            total += shares[slot] * (matrix(shape, inputs, f"{prefix}down", expert) @ inner)
        return (total.to(shape.torch_dtype),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """The result; the second product's activations, four a word, and their scales; arrivals, which must be zero."""
        assert isinstance(shape, MoeShape)
        device, inner = inputs["x"].device, shape.used * shape.width
        return {
            "output": torch.empty(shape.hidden, dtype=shape.torch_dtype, device=device),
            "inner": torch.empty(inner // 4, dtype=torch.int32, device=device),
            "inner_scales": torch.empty(inner // 8, device=device),
            "arrivals": torch.zeros(2, dtype=torch.int32, device=device),
        }

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, MoeShape)
        up, down = find_scheme(shape.scheme), find_scheme(shape.down)
        arguments, absent = pointers(shape, inputs)
        rows = config["rows"]
        constants = {
            "HIDDEN": shape.hidden, "WIDTH": shape.width, "EXPERTS": shape.experts, "TOP_K": shape.top_k,
            "USED": shape.used, "ACTIVATION": shape.activation, "PAIRS": config["pairs"], "ROWS": rows,
            "UP_BLOCKS": config["blocks"],
            "PTX": inputs["x"].device.type != "cpu",
            **scheme_constants("UP_", up), **scheme_constants("DOWN_", down), **absent,
        }  # fmt: skip
        first, second = shape.used * (shape.width // config["pairs"]), triton.cdiv(shape.hidden, rows)
        phases = [(1, 1, first + second)] if config["fused"] else [(1, 0, first), (0, 1, second)]
        return [
            Launch(_moe, (grid,), {**arguments, **outputs}, {**constants, "FIRST": a, "SECOND": b}, config.warps, config.stages)
            for a, b, grid in phases
        ]

    def cost(self, shape: Shape) -> Cost:
        """The matrices of the experts used, the router's scores, x and the result."""
        assert isinstance(shape, MoeShape)
        bits = 2 * find_scheme(shape.scheme).bits_per_weight + find_scheme(shape.down).bits_per_weight
        weights = shape.used * shape.hidden * shape.width
        vectors = (2 * shape.hidden + shape.experts) * shape.torch_dtype.itemsize
        return Cost(int(weights * bits / 8) + vectors, 6.0 * weights)


def matrices(shape: MoeShape) -> dict[str, tuple[Scheme, tuple[int, ...]]]:
    """The packed matrices among the inputs: prefix -> (scheme, shape)."""
    up, down = find_scheme(shape.scheme), find_scheme(shape.down)
    found: dict[str, tuple[Scheme, tuple[int, ...]]] = {
        "up": (up, (shape.experts, 2 * shape.width, shape.hidden)),
        "down": (down, (shape.experts, shape.hidden, shape.width)),
    }
    if shape.shared:
        found |= {f"shared_{name}": (scheme, size[1:]) for name, (scheme, size) in list(found.items())}
    return found


def matrix(shape: MoeShape, inputs: Tensors, prefix: str, expert: Tensor | None) -> Tensor:
    """The values of one matrix in fp64; `expert` numbers one of a stack, on the device."""
    scheme = matrices(shape)[prefix][0]
    parts = {name: inputs[f"{prefix}_{name}"] for name in scheme.parts()}
    if expert is not None:
        parts = {name: part.index_select(0, expert.view(1))[0] for name, part in parts.items()}
    return dequantise(scheme, parts).double()


def route(shape: MoeShape, inputs: Tensors) -> tuple[Tensor, Tensor]:
    """(numbers [top_k], shares [used]) of the experts a token goes through; the shared one's share is the last."""
    scores = inputs["scores"].float()
    chosen = scores.sort(descending=True, stable=True)[1][: shape.top_k]
    shares = scores[chosen].softmax(-1)
    return chosen, torch.cat((shares, inputs["shared_gate"].float().sigmoid())) if shape.shared else shares


def pointers(shape: MoeShape, inputs: Tensors) -> tuple[dict[str, Tensor], dict[str, None]]:
    """(arguments, constants) for the kernel: every part of every matrix, None for those that a scheme hasn't."""
    asked, like = shape.check(), inputs["x"]
    found: dict[str, Tensor | None] = {}
    for prefix in ("up", "down", "shared_up", "shared_down"):
        scheme, size = matrices(shape).get(prefix, (None, ()))
        parts = {} if scheme is None else {name: inputs[f"{prefix}_{name}"] for name in scheme.parts()}
        if scheme is not None:
            for name, (dtype, per) in scheme.parts().items():
                check_tensor(asked, f"{prefix}_{name}", parts[name], (*size[:-1], size[-1] // per), dtype, like)
        found |= {
            f"{prefix}_codes": parts["codes"].view(torch.int32) if parts else None,
            f"{prefix}_high": parts["high"].view(torch.int32) if "high" in parts else None,
            f"{prefix}_scales": parts.get("scales"),
            f"{prefix}_offsets": parts.get("zeros", parts.get("minima")),
            f"{prefix}_scale_steps": parts.get("scale_steps"),
            f"{prefix}_offset_steps": parts.get("minimum_steps"),
        }
    found["shared_gate"] = inputs.get("shared_gate")
    floats = (torch.float32, torch.bfloat16, torch.float16)
    for name, columns in (("x", shape.hidden), ("scores", shape.experts), ("shared_gate", 1)):
        if name != "shared_gate" or shape.shared:
            check_tensor(asked, name, inputs[name], (columns,), floats, like, 2)
            found[name] = inputs[name]
    present = {name: tensor for name, tensor in found.items() if tensor is not None}
    return present, {name: None for name, tensor in found.items() if tensor is None}


def scheme_constants(prefix: str, scheme: Scheme) -> dict[str, int | str]:
    return {
        f"{prefix}BITS": scheme.bits,
        f"{prefix}GROUP": scheme.group,
        f"{prefix}STEPS": scheme.steps,
        f"{prefix}OFFSET": scheme.offset,
        f"{prefix}CENTRE": scheme.centre,
    }


MOE_STEP = MoeStep()
"""The one instance."""


@triton.jit
def _route(scores, shared_gate, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, USED: tl.constexpr):
    """(numbers, shares): two tuples of scalars.

    Every warp holds all scores, 32 at a time, and finds the best by itself. A score of 16 bits and its expert's number make
    one integer, in the order of scores and then of numbers from the last; one of 32 bits needs a second search for the number.
    """
    lanes = tl.arange(0, 32)
    PIECES: tl.constexpr = (EXPERTS + 31) // 32
    LEAST: tl.constexpr = -2147483648
    NARROW: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth == 16
    keys = ()
    for i in tl.static_range(PIECES):
        at = i * 32 + lanes
        score = tl.load(scores + at, mask=at < EXPERTS, other=0)
        if NARROW:
            key = score.to(tl.int16, bitcast=True).to(tl.int32)
            key = tl.where(key == -32768, 0, key)  # -0 is equal to 0
            key = ((key ^ ((key >> 31) & 0x7FFF)) << 16) | (0xFFFF - at)
        else:
            key = score.to(tl.int32, bitcast=True)
            key = tl.where(key == LEAST, 0, key)
            key ^= (key >> 31) & 0x7FFFFFFF
        keys = keys + (tl.where(at < EXPERTS, key, LEAST),)
    numbers = ()
    shares = ()
    total = 0.0
    peak = 0.0
    for k in tl.static_range(TOP_K):
        best = keys[0]
        for i in tl.static_range(1, PIECES):
            best = tl.maximum(best, keys[i])
        top = tl.max(best, 0)
        if NARROW:
            number = 0xFFFF - (top & 0xFFFF)
            bits = top >> 16
            score = (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(scores.dtype.element_ty, bitcast=True).to(tl.float32)
        else:
            where = tl.full((32,), EXPERTS, tl.int32)
            for i in tl.static_range(PIECES):
                where = tl.minimum(where, tl.where(keys[i] == top, i * 32 + lanes, EXPERTS))
            number = tl.min(where, 0)
            score = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        rest = ()
        for i in tl.static_range(PIECES):
            rest = rest + (tl.where((keys[i] == top) if NARROW else (i * 32 + lanes == number), LEAST, keys[i]),)
        keys = rest
        if k == 0:
            peak = score
        share = tl.exp(score - peak)
        total += share
        numbers = numbers + (number,)
        shares = shares + (share,)
    weighted = ()
    for k in tl.static_range(TOP_K):
        weighted = weighted + (shares[k] / total,)
    if USED > TOP_K:
        weighted = weighted + (tl.sigmoid(tl.load(shared_gate).to(tl.float32)),)
    return numbers, weighted


@triton.jit
def _moe(
    x, scores, shared_gate,
    up_codes, up_high, up_scales, up_offsets, up_scale_steps, up_offset_steps,
    down_codes, down_high, down_scales, down_offsets, down_scale_steps, down_offset_steps,
    shared_up_codes, shared_up_high, shared_up_scales, shared_up_offsets, shared_up_scale_steps, shared_up_offset_steps,
    shared_down_codes, shared_down_high, shared_down_scales, shared_down_offsets, shared_down_scale_steps,
    shared_down_offset_steps, output, inner, inner_scales, arrivals,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, USED: tl.constexpr,
    ACTIVATION: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
    UP_BITS: tl.constexpr, UP_GROUP: tl.constexpr, UP_STEPS: tl.constexpr, UP_OFFSET: tl.constexpr, UP_CENTRE: tl.constexpr,
    DOWN_BITS: tl.constexpr, DOWN_GROUP: tl.constexpr, DOWN_STEPS: tl.constexpr, DOWN_OFFSET: tl.constexpr,
    DOWN_CENTRE: tl.constexpr, UP_BLOCKS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """The first product, the second, or both, a block being of one of them. In one launch the second's come last."""
    FIRST_BLOCKS: tl.constexpr = USED * (WIDTH // PAIRS) if FIRST else 0
    program = tl.program_id(0)
    if program < FIRST_BLOCKS:
        blocks = ()
        for t in tl.static_range((HIDDEN // 32 + UP_BLOCKS - 1) // UP_BLOCKS):
            blocks = blocks + (load_blocks(x, t * UP_BLOCKS, HIDDEN // 32, UP_BLOCKS),)
        codes, high, scales, offsets, scale_steps = up_codes, up_high, up_scales, up_offsets, up_scale_steps
        offset_steps, slot = up_offset_steps, program // (WIDTH // PAIRS)
        expert = program * 0
        if slot < TOP_K:
            numbers, _ = _route(scores, shared_gate, EXPERTS, TOP_K, TOP_K)
            for k in tl.static_range(TOP_K):
                expert = tl.where(slot == k, numbers[k], expert)
        if USED > TOP_K:
            own = slot == TOP_K  # the last blocks, if not all find room at once: they needn't wait for the routing
            codes, scales = tl.where(own, shared_up_codes, up_codes), tl.where(own, shared_up_scales, up_scales)
            if UP_BITS == 5 or UP_BITS == 6:
                high = tl.where(own, shared_up_high, up_high)
            if UP_STEPS:
                scale_steps = tl.where(own, shared_up_scale_steps, up_scale_steps)
            if UP_OFFSET != "centre":
                offsets = tl.where(own, shared_up_offsets, up_offsets)
                if UP_STEPS:
                    offset_steps = tl.where(own, shared_up_offset_steps, up_offset_steps)
        _gate_up(
            blocks, codes, high, scales, offsets, scale_steps, offset_steps, inner, inner_scales, expert.to(tl.int64), program,
            HIDDEN, WIDTH, PAIRS, ACTIVATION, UP_BITS, UP_GROUP, UP_STEPS, UP_OFFSET, UP_CENTRE, UP_BLOCKS, PTX,
        )  # fmt: skip
        if SECOND:
            tl.debug_barrier()  # every thread's results are written before this block says so
            tl.atomic_add(arrivals, 1, sem="release")
    elif SECOND:
        numbers, shares = _route(scores, shared_gate, EXPERTS, TOP_K, USED)
        BLOCKS: tl.constexpr = WIDTH // 32
        BG: tl.constexpr = triton.next_power_of_2(BLOCKS)
        SUB: tl.constexpr = 4 if DOWN_GROUP == 16 else 1
        n = (program - FIRST_BLOCKS) * ROWS + tl.arange(0, ROWS)
        row = tl.minimum(n, HIDDEN - 1).to(tl.int64)[:, None, None]
        held = ()
        for slot in tl.static_range(USED):
            if slot == TOP_K:
                held = held + load_rows(
                    row, shared_down_codes, shared_down_high, shared_down_scales, shared_down_offsets, shared_down_scale_steps,
                    shared_down_offset_steps, WIDTH, 1, BG, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET, SUB,
                )  # fmt: skip
            else:
                held = held + load_rows(
                    numbers[slot].to(tl.int64) * HIDDEN + row, down_codes, down_high, down_scales, down_offsets,
                    down_scale_steps, down_offset_steps, WIDTH, 1, BG, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET, SUB,
                )  # fmt: skip
        tl.debug_barrier()  # all of it is asked for before any of it is used
        if FIRST:
            while tl.load(arrivals, volatile=True) < FIRST_BLOCKS:
                pass
            tl.atomic_add(arrivals, 0, sem="acquire")  # what those blocks wrote is seen from here on
            tl.debug_barrier()
        sums = tl.zeros((ROWS, BG, SUB), tl.float32)
        for slot in tl.static_range(USED):
            sums += shares[slot] * _down(
                held, inner, inner_scales, slot, ROWS, BLOCKS, BG, SUB, DOWN_BITS, DOWN_STEPS, DOWN_OFFSET, DOWN_CENTRE, PTX,
                ".cg" if FIRST else "",
            )  # fmt: skip
        found = tl.sum(tl.sum(sums, 2), 1)
        tl.store(output + n, found.to(output.dtype.element_ty), mask=n < HIDDEN)
        if FIRST and tl.atomic_add(arrivals + 1, 1, sem="relaxed") == tl.num_programs(0) - FIRST_BLOCKS - 1:
            tl.store(arrivals, 0)  # ready for the next launch: no block waits any more
            tl.store(arrivals + 1, 0)


@triton.jit
def _gate_up(
    blocks, codes, high, scales, offsets, scale_steps, offset_steps, inner, inner_scales, expert, program,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, ACTIVATION: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr, BG: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """PAIRS rows of gate and as many of up of one expert, activated and quantised, 8 with a scale."""
    TILES: tl.constexpr = (HIDDEN // 32 + BG - 1) // BG
    SUB: tl.constexpr = 4 if GROUP == 16 else 1
    n = tl.arange(0, 2 * PAIRS)  # rows of gate, then the same of up
    row = expert * (2 * WIDTH) + ((program % (WIDTH // PAIRS)) * PAIRS + n % PAIRS + (n // PAIRS) * WIDTH)
    held = load_rows(
        row[:, None, None], codes, high, scales, offsets, scale_steps, offset_steps, HIDDEN, TILES, BG, BITS, GROUP, STEPS,
        OFFSET, SUB,
    )  # fmt: skip
    given = ()
    for t in tl.static_range(TILES):
        given = given + (activations(blocks[t], BG, SUB, OFFSET, CENTRE, 127, PTX),)
    sums = row_sums(held, given, 1, TILES, 2 * PAIRS, BG, BITS, STEPS, OFFSET, SUB, 127, PTX)
    gate, up = tl.split(tl.trans(tl.reshape(sums[0], (2, PAIRS))))
    EIGHTS: tl.constexpr = PAIRS // 8
    found = tl.reshape(activate(gate, up, ACTIVATION), (EIGHTS, 8))
    top = tl.max(tl.abs(found), 1)
    inverse = tl.where(top > 1e-30, tl.div_rn(127.0, tl.maximum(top, 1e-30)), 0.0)
    rounded = round_low(found, tl.broadcast_to(inverse[:, None], (EIGHTS, 8)), PTX)
    shifts = tl.arange(0, 4) * 8
    integers = tl.reshape(rounded.to(tl.int32, bitcast=True) & 255, (EIGHTS, 2, 4))
    words = tl.sum(integers << shifts[None, None, :], 2)
    eight = program * EIGHTS + tl.arange(0, EIGHTS)
    word = eight // 4 * 8 + eight % 4  # of a block of 32: its four low words, then its four high ones
    tl.store(inner + word[:, None] + 4 * tl.arange(0, 2)[None, :], words)
    tl.store(inner_scales + eight, top / 127 + tl.sum(found, 1) * 0.0)  # not a number where one of them isn't


@triton.jit
def _down(
    held, inner, inner_scales, slot: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BG: tl.constexpr,
    SUB: tl.constexpr, BITS: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, CENTRE: tl.constexpr, PTX: tl.constexpr,
    CACHE: tl.constexpr,
):  # fmt: skip
    """Rows of one expert times what the first product left for it: [ROWS, BG, SUB], to be summed.

    Past the first cache (CACHE) where other blocks wrote it during this launch.
    """
    low, high, scale, offset = unpack(held, slot, BITS, STEPS, OFFSET)
    g = tl.arange(0, BG)[None, :, None]
    at, real = (slot * BLOCKS + g) * 4 + tl.arange(0, 4)[None, None, :], g < BLOCKS
    word = (slot * BLOCKS + g) * 8 + tl.arange(0, 4)[None, None, :]
    x_scale = tl.load(inner_scales + at, mask=real, other=0, cache_modifier=CACHE)
    x_low = tl.load(inner + word, mask=real, other=0, cache_modifier=CACHE)
    x_high = tl.load(inner + word + 4, mask=real, other=0, cache_modifier=CACHE)
    ones = tl.full(x_low.shape, 0x01010101, tl.int32)
    x_sum = dp4a(ones, x_high, dp4a(ones, x_low, tl.zeros_like(x_low), False, PTX), False, PTX)
    if OFFSET == "centre" and BITS < 8:
        dot = tl.broadcast_to(x_sum * -CENTRE, (ROWS, BG, 4))
    else:
        dot = tl.zeros((ROWS, BG, 4), tl.int32)
    found = dp4a(high, x_high, dp4a(low, x_low, dot, BITS == 8, PTX), BITS == 8, PTX).to(tl.float32) * x_scale
    if SUB == 1:
        found = tl.sum(found, 2)[:, :, None]
    found *= scale
    if OFFSET != "centre":
        x_part = x_sum.to(tl.float32) * x_scale
        if SUB == 1:
            x_part = tl.sum(x_part, 2)[:, :, None]
        found -= offset * x_part
    return found
