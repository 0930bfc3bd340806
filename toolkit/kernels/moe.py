# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  # what Triton compiles knows no (*a, b)
"""One token through a mixture of experts: routing, the chosen experts and the shared one, their weighted sum.

Bound by the bytes of the matrices that the token chooses, and almost as much by waiting: two products in a row, each of
a few microseconds. Every block finds the chosen experts itself, from scores that stand in a cache. The activations of
both products are integers of 8 bits (see packed.py), x with a scale per 32, those of the second product with one per 8: as
few as one block of the first product makes. Blocks of the first product ask for all that they read before they use any of it,
and then send for the second product's rows, to be found in L2. In one launch, blocks of the second product wait for the first
product. They come last in the grid: a GPU starts blocks in order, so whom they wait for is running.
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
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors, arrivals
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import await_previous, let_next_begin
from toolkit.kernels.int4_matmul import BLOCK, _randomise
from toolkit.kernels.int4_matmul import _activate as activate
from toolkit.kernels.packed import ROUND, inverse_of, largest, load_blocks, multiply, round_to, to_blocks, to_integers
from toolkit.quant import Scheme, dequantise, find_scheme

EIGHT = 8  # inner activations that share a scale: as few as one block of the first product makes
LINE = 32  # int32 from one counter to the next, which are in lines of their own


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
    [2 width, hidden / 2], ... and "shared_down_codes", ... . Equal scores go to the lowest number. "arrivals" int32
    [32 (used + 1)], zero, and zero again after, may come with them, to be used again.
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
        """One launch (`fused`) or two; the second product's rows loaded `ahead` of the wait for the first, or after it.

        `lanes` hold a row of the first product at a time, `each` of them so many pairs of gate and up; `rows`: of the second.
        What is here suits the registers: all blocks of the first product find room on an H200 at once.
        """
        assert isinstance(shape, MoeShape)
        sizes = [(4, 4, 2), (4, 8, 4), (2, 8, 4), (1, 8, 8)]
        kinds = [(1, 0, 4), (1, 1, 2), (0, 0, 4)]
        return [
            Config(fused=fused, ahead=ahead, lanes=32, each=each, rows=rows, warps=warps)
            for fused, ahead, count in kinds
            for each, rows, warps in sizes[:count]
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
                    _randomise(part, name, scheme, generator)
                found[f"{prefix}_{name}"] = part
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """On the same quantised activations, in fp64 between them."""
        assert isinstance(shape, MoeShape)
        chosen, shares = route(shape, inputs)
        x = to_integers(inputs["x"], BLOCK).double()
        total = torch.zeros(shape.hidden, dtype=torch.float64, device=x.device)
        for slot in range(shape.used):
            prefix, expert = ("", chosen[slot]) if slot < shape.top_k else ("shared_", None)
            gate, up = (matrix(shape, inputs, f"{prefix}up", expert) @ x).float().chunk(2)
            inner = (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
            inner = to_integers(inner, EIGHT).double()
            total += shares[slot] * (matrix(shape, inputs, f"{prefix}down", expert) @ inner)
        return (total.to(shape.torch_dtype),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """The result; the second product's activations as integers, 8 with a scale, scaled sums of these; arrivals, zero."""
        assert isinstance(shape, MoeShape)
        device, inner = inputs["x"].device, shape.used * shape.width
        return {
            "output": torch.empty(shape.hidden, dtype=shape.torch_dtype, device=device),
            "inner": torch.empty(inner, dtype=torch.int8, device=device),
            "inner_scales": torch.empty(inner // EIGHT, device=device),
            "inner_sums": torch.empty(inner // EIGHT, device=device),
            "arrivals": arrivals(inputs, LINE * (shape.used + 1), device),
        }

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, MoeShape)
        up, down = find_scheme(shape.scheme), find_scheme(shape.down)
        arguments = pointers(shape, inputs) | {**outputs, "inner_words": outputs["inner"].view(torch.int32)}
        threads = 32 * config.warps
        lanes = min(config["lanes"], triton.next_power_of_2(shape.hidden // BLOCK))
        while shape.width % (threads // lanes * config["each"]):  # as many pairs a block as there are, or a part of them
            lanes *= 2
        down_lanes = triton.next_power_of_2(shape.width // BLOCK)
        down_rows = max(1, 32 // down_lanes)  # that a warp has side by side
        down_each = max(1, config["rows"] // down_rows)
        constants = {
            "HIDDEN": shape.hidden, "WIDTH": shape.width, "EXPERTS": shape.experts, "TOP_K": shape.top_k, "USED": shape.used,
            "ACTIVATION": shape.activation, "UP_BN": threads // lanes, "UP_BG": lanes, "UP_EACH": config["each"],
            "DOWN_BN": down_rows, "DOWN_BG": down_lanes, "DOWN_EACH": down_each, "AHEAD": config["ahead"],
            "PTX": inputs["x"].device.type != "cpu",
            **scheme_constants("UP_", up), **scheme_constants("DOWN_", down),
        }  # fmt: skip
        first = shape.used * (shape.width // (threads // lanes * config["each"]))
        second = triton.cdiv(shape.hidden, down_rows * down_each)
        phases = [(1, 1, first + second)] if config["fused"] else [(1, 0, first), (0, 1, second)]
        return [
            Launch(_moe, (grid,), arguments, {**constants, "FIRST": a, "SECOND": b}, config.warps, config.stages, early=True)
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


def pointers(shape: MoeShape, inputs: Tensors) -> dict[str, Tensor]:
    """The kernel's arguments: every part of every matrix. Where a scheme, or the model, hasn't one, another stands for it."""
    asked, like = shape.check(), inputs["x"]
    floats = (torch.float32, torch.bfloat16, torch.float16)
    found = {name: inputs.get(name, like) for name in ("x", "scores", "shared_gate")}
    for name, columns in (("x", shape.hidden), ("scores", shape.experts), ("shared_gate", 1)):
        if name != "shared_gate" or shape.shared:
            check_tensor(asked, name, inputs[name], (columns,), floats, like, 2)
    for prefix, (scheme, size) in matrices(shape).items():
        parts = {name: inputs[f"{prefix}_{name}"] for name in scheme.parts()}
        for name, (dtype, per) in scheme.parts().items():
            check_tensor(asked, f"{prefix}_{name}", parts[name], (*size[:-1], size[-1] // per), dtype, like)
        scales = parts["scales"]
        found |= {
            f"{prefix}_codes": parts["codes"].view(torch.int64 if scheme.bits == 8 else torch.int32),
            f"{prefix}_high": parts["high"].view(torch.int64 if scheme.bits == 6 else torch.int32)
            if "high" in parts
            else scales,
            f"{prefix}_scales": scales.view(torch.int16) if scheme.group == 16 else scales,
            f"{prefix}_offsets": parts.get("zeros", parts.get("minima", scales)),
            f"{prefix}_scale_steps": parts.get("scale_steps", scales),
            f"{prefix}_offset_steps": parts.get("minimum_steps", scales),
        }
    return {f"shared_{name}": part for name, part in found.items() if name.startswith(("up_", "down_"))} | found


def scheme_constants(prefix: str, scheme: Scheme) -> dict[str, int | str]:
    return {
        f"{prefix}BITS": scheme.bits,
        f"{prefix}GROUP": scheme.group,
        f"{prefix}STEPS": scheme.steps,
        f"{prefix}OFFSET": scheme.offset,
    }


MOE_STEP = MoeStep()
"""The one instance."""


@triton.jit
def _keys(scores, EXPERTS: tl.constexpr):
    """The scores as integers of their order, 32 a piece, that equal ones follow by number: the lowest is the largest.

    A score stands above its expert's number, counted down. Every warp holds all of them, and finds the best by itself.
    """
    NARROW: tl.constexpr = scores.dtype.element_ty.primitive_bitwidth == 16
    keys = ()
    for i in tl.static_range((EXPERTS + 31) // 32):
        at = i * 32 + tl.arange(0, 32)
        score = tl.load(scores + (at if (i + 1) * 32 <= EXPERTS else tl.minimum(at, EXPERTS - 1)))
        if NARROW:
            key = score.to(tl.int16, bitcast=True).to(tl.int32)
            key = tl.where(key == -32768, 0, key)  # -0 is equal to 0
            key = ((key ^ ((key >> 31) & 0x7FFF)) << 16) | (0xFFFF - at)
        else:
            key = score.to(tl.int32, bitcast=True)
            key = tl.where(key == -2147483648, 0, key)
            key = ((key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) | (0xFFFF - at)
        if (i + 1) * 32 > EXPERTS:
            key = tl.where(at < EXPERTS, key, -2147483648 if NARROW else -9223372036854775808)
        keys = keys + (key,)
    return keys


@triton.jit
def _largest(keys, BELOW: tl.constexpr, below):
    """The largest of `keys`, or of those under `below`."""
    NARROW: tl.constexpr = keys[0].dtype == tl.int32
    least = -2147483648 if NARROW else -9223372036854775808
    best = tl.where(keys[0] < below, keys[0], least) if BELOW else keys[0]
    for i in tl.static_range(1, len(keys)):
        best = tl.maximum(best, tl.where(keys[i] < below, keys[i], least) if BELOW else keys[i])
    return tl.max(best, 0)


@triton.jit
def _number(key):
    """The expert of a key."""
    return 0xFFFF - (key & 0xFFFF).to(tl.int32)


@triton.jit
def _score(key, scores):
    """The score of a key, in fp32; `scores` is where it was loaded from."""
    if key.dtype == tl.int32:
        bits = key >> 16
        return (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(scores.dtype.element_ty, bitcast=True).to(tl.float32)
    bits = (key >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _route(keys, scores, shared_gate, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, USED: tl.constexpr):
    """(numbers, shares, the shared expert's share): of the chosen, as many as the next power of two, shares of the rest 0."""
    k = tl.arange(0, triton.next_power_of_2(TOP_K))
    top = _largest(keys, False, 0)
    chosen = tl.zeros(k.shape, top.dtype) + top
    for i in range(1, TOP_K):
        top = _largest(keys, True, top)
        chosen = tl.where(k >= i, top, chosen)
    share = tl.where(k < TOP_K, tl.exp(_score(chosen, scores) - tl.max(_score(chosen, scores), 0)), 0.0)
    gate = tl.sigmoid(tl.load(shared_gate).to(tl.float32)) if USED > TOP_K else 0.0
    return tl.minimum(_number(chosen), EXPERTS - 1), share / tl.sum(share, 0), gate


@triton.jit
def _chosen(keys, place):
    """The number of the expert whose score comes at `place`: the best's is 0."""
    top = _largest(keys, False, 0)
    for _ in range(place):
        top = _largest(keys, True, top)
    return _number(top)


@triton.jit
def _first(
    x, parts, down, inner, inner_scales, inner_sums, expert, program,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr,
    ACTIVATION: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr,
    DOWN_BITS: tl.constexpr, DOWN_GROUP: tl.constexpr, DOWN_STEPS: tl.constexpr, DOWN_OFFSET: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """BN times EACH rows of gate and as many of up of one expert, activated and made integers, eight with a scale.

    All that the lanes want of the matrix is asked for before any of it is used; then the second product's rows of the same
    expert begin their way into L2; then activations become integers while all that comes.
    """
    BLOCKS: tl.constexpr = HIDDEN // 32
    TILES: tl.constexpr = (BLOCKS + BG - 1) // BG
    PAIRS: tl.constexpr = BN * EACH
    lane = tl.arange(0, BG)[None, :]
    place = program % (WIDTH // PAIRS)
    s = tl.arange(0, 2 * EACH)[:, None, None]  # rows of gate, each before that of up
    row = expert * (2 * WIDTH) + (place * PAIRS + s // 2 * BN + tl.arange(0, BN)[None, :, None] + s % 2 * WIDTH)
    held = ()
    for t in tl.static_range(TILES):
        first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)  # the last tile ends with the row
        g = first + tl.minimum(tl.arange(0, BG), BLOCKS - 1)[None, None, :]
        held = held + (load_blocks(parts, row, g, HIDDEN, BITS, GROUP, STEPS, OFFSET),)
    if PTX:
        _prefetch_parts(
            down, expert, place, HIDDEN * WIDTH, WIDTH // PAIRS, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET
        )  # fmt: skip
    sums = tl.zeros((2 * EACH, BN, BG), tl.float32)
    for t in tl.static_range(TILES):
        first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)
        # What the last tile shares with the one before counts once.
        valid = lane >= ((t + 1) * BG - BLOCKS if (t + 1) * BG > BLOCKS and BLOCKS > BG else 0)
        given = to_blocks(x, first + tl.minimum(lane, BLOCKS - 1), valid & (lane < BLOCKS), BITS, PTX)
        sums += multiply(held[t], given[0], given[1], given[2], given[3], False, BITS, GROUP, STEPS, OFFSET, PTX)
    gate, up = tl.split(tl.permute(tl.reshape(tl.sum(sums, 2), (EACH, 2, BN)), (0, 2, 1)))
    found = tl.reshape(activate(gate, up, ACTIVATION), (PAIRS // 8, 8))
    top = largest(found, 1, PTX)
    rounded = round_to(found, inverse_of(top)[:, None], PTX)
    scale = top * (1 / 127)  # not a number where one of them is none
    eight = program * (PAIRS // 8) + tl.arange(0, PAIRS // 8)
    r = tl.arange(0, 8)[None, :]
    at = place_of(eight, DOWN_BITS)
    byte = (at // 4 * 32 + at % 4 * 4)[:, None] + r // 4 * 16 + r % 4  # of a block: the first fours of its eights, the others
    tl.store(inner + byte, rounded.to(tl.int32, bitcast=True).to(tl.int8))
    tl.store(inner_scales + at, scale)
    tl.store(inner_sums + at, tl.sum(rounded - ROUND, 1) * scale)


@triton.jit
def _again(x, TIMES: tl.constexpr):
    """[1, S, BN, BG, 4] TIMES times, one after the other, in the same registers: [TIMES * S, BN, BG, 4]."""
    whole = tl.broadcast_to(x, (TIMES, x.shape[1], x.shape[2], x.shape[3], 4))
    return tl.reshape(whole, (TIMES * x.shape[1], x.shape[2], x.shape[3], 4))


@triton.jit
def _left(slot, words, scales, sums, WIDTH: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, CACHE: tl.constexpr):
    """What the first product left for `slot` [S] of the experts used: words, low and high, scales, sums [1, S, BN, BG, 4].

    Past the first cache (CACHE) where other blocks wrote it during this launch.
    """
    lane = tl.arange(0, BG)[None, None, None, :, None] + tl.zeros((1, 1, BN, 1, 1), tl.int32)
    block = slot[None, :, None, None, None] * (WIDTH // 32) + tl.minimum(lane, WIDTH // 32 - 1)
    four = tl.arange(0, 4)[None, None, None, None, :]
    low = tl.load(words + block * 8 + four, cache_modifier=CACHE)
    high = tl.load(words + block * 8 + 4 + four, cache_modifier=CACHE)
    scale = tl.load(scales + block * 4 + four, cache_modifier=CACHE)
    return low, high, scale, tl.load(sums + block * 4 + four, cache_modifier=CACHE)


@triton.jit
def _second(
    held, left, EACH: tl.constexpr, WIDTH: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSET: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """EACH rows, `held`, of every expert times what was `left` for it, summed over the blocks: [EACH * S, BN]."""
    found = multiply(
        held, _again(left[0], EACH), _again(left[1], EACH), _again(left[2], EACH), tl.sum(_again(left[3], EACH), 3), True, BITS,
        GROUP, STEPS, OFFSET, PTX,
    )  # fmt: skip
    return tl.sum(tl.where(tl.arange(0, BG)[None, None, :] < WIDTH // 32, found, 0.0), 2)


@triton.jit
def place_of(eight, BITS: tl.constexpr):
    """Where a block's eighth stands that `multiply` takes for codes of BITS."""
    return eight // 4 * 4 + eight % 2 * 2 + eight // 2 % 2 if BITS == 8 else eight


@triton.jit
def _prefetch(part, expert, place, SIZE: tl.constexpr, PLACES: tl.constexpr):
    """Ask for one of PLACES shares of a matrix's part, SIZE elements, to be brought into L2."""
    EACH: tl.constexpr = 32 * 8 // part.dtype.element_ty.primitive_bitwidth  # 32 B: what L2 fetches at least
    LINES: tl.constexpr = (SIZE + EACH * PLACES - 1) // (EACH * PLACES)
    line = place * LINES + tl.arange(0, triton.next_power_of_2(LINES))
    at = part + expert * SIZE + tl.minimum(line, SIZE // EACH - 1 if SIZE > EACH else 0) * EACH
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, False, 1)


@triton.jit
def _prefetch_parts(
    parts, expert, place, SIZE: tl.constexpr, PLACES: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    STEPS: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """... of a whole matrix of SIZE weights."""
    _prefetch(parts[0], expert, place, SIZE // 8, PLACES)
    if BITS == 5 or BITS == 6:
        _prefetch(parts[1], expert, place, SIZE // 32, PLACES)
    _prefetch(parts[2], expert, place, SIZE // (32 if GROUP == 16 else GROUP), PLACES)
    if OFFSET != "centre":
        _prefetch(parts[3], expert, place, SIZE // GROUP, PLACES)
    if STEPS:
        _prefetch(parts[4], expert, place, SIZE // STEPS, PLACES)
        if OFFSET != "centre":
            _prefetch(parts[5], expert, place, SIZE // STEPS, PLACES)


@triton.jit
def _wait(arrivals, wanted, USED: tl.constexpr, PTX: tl.constexpr):
    """Until every expert's counter is at `wanted`: what was written before it got there is seen from here on."""
    counters = arrivals + 32 * tl.minimum(tl.arange(0, triton.next_power_of_2(USED)), USED - 1)
    if PTX:
        least = wanted - 1
        while least < wanted:
            found = tl.inline_asm_elementwise("ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [counters], tl.int32, False, 1)
            least = tl.min(found, 0)


@triton.jit
def _pick(own, shared, stacked):
    """Where a matrix's parts are: the shared expert's if `own`, else those of all."""
    found = ()
    for i in tl.static_range(len(stacked)):
        found = found + (tl.where(own, shared[i], stacked[i]),)
    return found


@triton.jit
def _moe(
    x, scores, shared_gate,
    up_codes, up_high, up_scales, up_offsets, up_scale_steps, up_offset_steps,
    down_codes, down_high, down_scales, down_offsets, down_scale_steps, down_offset_steps,
    shared_up_codes, shared_up_high, shared_up_scales, shared_up_offsets, shared_up_scale_steps, shared_up_offset_steps,
    shared_down_codes, shared_down_high, shared_down_scales, shared_down_offsets, shared_down_scale_steps,
    shared_down_offset_steps, output, inner, inner_words, inner_scales, inner_sums, arrivals,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, USED: tl.constexpr,
    ACTIVATION: tl.constexpr, UP_BN: tl.constexpr, UP_BG: tl.constexpr, UP_EACH: tl.constexpr,
    DOWN_BN: tl.constexpr, DOWN_BG: tl.constexpr, DOWN_EACH: tl.constexpr,
    UP_BITS: tl.constexpr, UP_GROUP: tl.constexpr, UP_STEPS: tl.constexpr, UP_OFFSET: tl.constexpr,
    DOWN_BITS: tl.constexpr, DOWN_GROUP: tl.constexpr, DOWN_STEPS: tl.constexpr, DOWN_OFFSET: tl.constexpr,
    AHEAD: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The first product, the second, or both, a block being of one of them. In one launch the second's come last."""
    PLACES: tl.constexpr = WIDTH // (UP_BN * UP_EACH)
    FIRST_BLOCKS: tl.constexpr = USED * PLACES if FIRST else 0
    program = tl.program_id(0)
    if FIRST and PTX:
        await_previous()
        let_next_begin()
    keys = _keys(scores, EXPERTS)
    down = (down_codes, down_high, down_scales, down_offsets, down_scale_steps, down_offset_steps)
    shared_down = (
        shared_down_codes, shared_down_high, shared_down_scales, shared_down_offsets, shared_down_scale_steps,
        shared_down_offset_steps,
    )  # fmt: skip
    if FIRST and (not SECOND or program < FIRST_BLOCKS):
        up = (up_codes, up_high, up_scales, up_offsets, up_scale_steps, up_offset_steps)
        slot, expert = program // PLACES, program * 0
        if slot < TOP_K:
            expert = tl.minimum(_chosen(keys, slot), EXPERTS - 1)
        if USED > TOP_K:
            shared_up = (
                shared_up_codes, shared_up_high, shared_up_scales, shared_up_offsets, shared_up_scale_steps,
                shared_up_offset_steps,
            )  # fmt: skip
            up, down = _pick(slot == TOP_K, shared_up, up), _pick(slot == TOP_K, shared_down, down)
        _first(
            x, up, down, inner, inner_scales, inner_sums, expert.to(tl.int64), program, HIDDEN, WIDTH, UP_EACH, UP_BN, UP_BG,
            ACTIVATION, UP_BITS, UP_GROUP, UP_STEPS, UP_OFFSET, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET, PTX,
        )  # fmt: skip
        if SECOND:
            tl.debug_barrier()  # every thread's results are written before this block says so
            tl.atomic_add(arrivals + 32 * slot, 1, sem="release")
    else:
        numbers, shares, gate = _route(keys, scores, shared_gate, EXPERTS, TOP_K, USED)
        if FIRST and not AHEAD:
            _wait(arrivals, PLACES, USED, PTX)
        SLOTS: tl.constexpr = triton.next_power_of_2(TOP_K)
        first_row = (program - FIRST_BLOCKS) * (DOWN_EACH * DOWN_BN)
        n = first_row + tl.arange(0, DOWN_EACH)[:, None] * DOWN_BN + tl.arange(0, DOWN_BN)[None, :]
        row = tl.minimum(n, HIDDEN - 1)[:, :, None]
        g = tl.minimum(tl.arange(0, DOWN_BG), WIDTH // 32 - 1)[None, None, :]
        # A row of every expert, warps side by side in them, then the next: a lane's rows are of few experts, or of one.
        routed = numbers.to(tl.int64)[None, :, None] * HIDDEN + tl.minimum(n, HIDDEN - 1)[:, None, :]
        routed = tl.reshape(routed, (DOWN_EACH * SLOTS, DOWN_BN, 1))
        held = load_blocks(down, routed, g, WIDTH, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET)
        if USED > TOP_K:
            held_shared = load_blocks(shared_down, row, g, WIDTH, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET)
        tl.debug_barrier()  # all of it is asked for before any of it is used
        if not FIRST and PTX:
            await_previous()
            let_next_begin()
        if FIRST and AHEAD:
            _wait(arrivals, PLACES, USED, PTX)
        CACHE: tl.constexpr = ".cg" if FIRST else ""
        left = _left(
            tl.minimum(tl.arange(0, SLOTS), TOP_K - 1), inner_words, inner_scales, inner_sums, WIDTH, DOWN_BN, DOWN_BG, CACHE
        )  # fmt: skip
        if USED > TOP_K:
            own = tl.full((1,), TOP_K, tl.int32)
            left_shared = _left(own, inner_words, inner_scales, inner_sums, WIDTH, DOWN_BN, DOWN_BG, CACHE)
        tl.debug_barrier()  # and here
        found = _second(held, left, DOWN_EACH, WIDTH, DOWN_BG, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET, PTX)
        total = tl.sum(tl.reshape(found, (DOWN_EACH, SLOTS, DOWN_BN)) * shares[None, :, None], 1)
        if USED > TOP_K:
            total += gate * _second(
                held_shared, left_shared, DOWN_EACH, WIDTH, DOWN_BG, DOWN_BITS, DOWN_GROUP, DOWN_STEPS, DOWN_OFFSET, PTX
            )  # fmt: skip
        tl.store(output + n, total.to(output.dtype.element_ty), mask=n < HIDDEN)
        if FIRST:
            tl.debug_barrier()  # none of this block's threads waits any more, and after the last block none at all
        if FIRST and tl.atomic_add(arrivals + 32 * USED, 1, sem="relaxed") == tl.num_programs(0) - FIRST_BLOCKS - 1:
            at = tl.arange(0, triton.next_power_of_2(USED + 1))
            tl.store(
                arrivals + 32 * at, tl.zeros_like(at), mask=at <= USED
            )  # ready for the next launch: no block waits any more
