# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005  # Triton does not compile (*a, b)
"""One token through a mixture of experts: norm, routing, the chosen experts and the shared one, their weighted sum.

The bytes of the chosen matrices bound the kernel, and almost as much the waiting: two products in a row take a few microseconds
each. Three launches overlap (see early.py): the first computes the norm and the router's scores (see routing.py); the blocks of
either product choose the experts and issue all loads of the matrix before they use any, and those of the second product do so
before the first one is complete, as do the shared expert's blocks of the first. The activations of both products are 8-bit
integers, x with one scale per 32, the inner ones with one scale per 8, as few as a block of the first product produces.
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

from toolkit.core.errors import ModelError
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors
from toolkit.kernels.checks import check_tensor, check_word
from toolkit.kernels.early import take_turn
from toolkit.kernels.exchange import count_received, empty, most_warps, place_of, receiving, send, sending, targets_of
from toolkit.kernels.int4_matmul import BLOCK, EPILOGUES, quantise_activations
from toolkit.kernels.packed import activate, block_product, load_activations, load_tiles, matrix_pointers, randomize
from toolkit.kernels.routing import joined, keys_of, nth_expert, route, start
from toolkit.weights.packed import dequantize
from toolkit.weights.schemes import Scheme, find_scheme

EIGHT = 8  # inner activations that share a scale: as few as one block of the first product produces
SCORES = 2  # that a program of the first launch computes: for 256 experts, about as many programs as an H200 has SMs
RECEIVED_SCORES = 4  # with x received, which all programs read at once
START_WARPS = 8  # of such a program


@dataclass(frozen=True)
class MoeShape(Shape):
    """`experts` gated MLPs hidden -> width -> hidden; a token uses `top_k` of them and, if `shared`, one more of that size.

    `eps` is that of the norm before them, a number written as text.
    """

    hidden: int
    width: int
    experts: int
    top_k: int
    shared: bool = True
    scheme: str = "q4_k"  # of gate and up
    down: str = "q4_k"
    activation: str = "silu"  # or "gelu_tanh"
    dtype: str = "bfloat16"
    eps: str = "1e-06"

    @property
    def used(self) -> int:
        """Experts that a token uses."""
        return self.top_k + self.shared

    @property
    def rows(self) -> int:
        """Rows of the router: one per expert, and one for the shared expert's weight."""
        return self.experts + self.shared

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def check(self) -> str:
        """Return the name of this shape in error messages. Raises ModelError for sizes that the kernel doesn't support."""
        asked = f"{self.top_k} of {self.experts} experts {self.hidden} -> {self.width}, {self.scheme} and {self.down}"
        up, down = find_scheme(self.scheme), find_scheme(self.down)
        for size, scheme in ((self.hidden, up), (self.width, down)):
            if size < 1 or size % max(BLOCK, scheme.multiple):
                found = f"{size:,} columns don't divide by {max(BLOCK, scheme.multiple)}"
                raise ModelError(asked, found, "Use the model's reference, or another scheme")
        if not 1 <= self.top_k <= self.experts:
            raise ModelError(asked, "a token can't choose so many", "Give a top_k from 1 to the number of experts")
        check_word(asked, "activation", self.activation, EPILOGUES)
        return asked


class MoeStep(Kernel):
    """x and residual [hidden] -> the experts' sum for norm(residual + x), and residual + x: [hidden] each.

    `norm` [hidden] is the norm's weight in fp32. `router` [experts, hidden] gives the scores before the softmax. With a shared
    expert it has one more row, which gives that expert's weight before the sigmoid. Among equal scores the lowest number wins.
    The experts' matrices are inputs by part (see `PackedMatrix`): "up_codes" [experts, 2 width, hidden / 2], gate rows before
    up rows, "up_scales", ...; "down_codes" [experts, hidden, width / 2], ...; for the shared expert "shared_up_codes" [2 width,
    hidden / 2], ... and "shared_down_codes", ... . With inputs "targets" and "counts" (see `toolkit.kernels.exchange.Sent`) the
    experts' sum is sent to all ranks instead of written. With inputs "words" and "counts", x is received, and
    only its shape and dtype count.
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
        """Return configs: `each` is the pairs of gate and up per lane in the first product, `rows` the rows per lane in the
        second.

        `warps` belongs to the first product, `down_warps` to the second.
        """
        downs = [(1, 1), (2, 1), (2, 2), (2, 4)]
        return [
            Config(each=each, rows=rows, down_warps=down, warps=warps)
            for each, warps in ((2, 4), (4, 2), (1, 8), (4, 4))
            for rows, down in downs
        ]

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, MoeShape)
        meta = torch.device(device).type == "meta"
        generator = None if meta else torch.Generator(device).manual_seed(seed)
        found = {name: torch.empty(shape.hidden, dtype=shape.torch_dtype, device=device) for name in ("x", "residual")}
        found["norm"] = torch.empty(shape.hidden, device=device)
        found["router"] = torch.empty(shape.rows, shape.hidden, dtype=shape.torch_dtype, device=device)
        if generator is not None:
            for tensor in found.values():
                tensor.normal_(generator=generator)
            found["norm"].mul_(0.3).add_(1)
            found["router"].mul_(shape.hidden**-0.5)  # scores of unit variance
        for prefix, (scheme, size) in matrices(shape).items():
            for name, (dtype, per) in scheme.parts().items():
                part = torch.empty(*size[:-1], size[-1] // per, dtype=dtype, device=device)
                if generator is not None:
                    randomize(part, name, scheme, generator)
                found[f"{prefix}_{name}"] = part
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        """Compute with the same quantized activations, in fp64 between them."""
        assert isinstance(shape, MoeShape)
        residual, normed, scores = scored(shape, inputs)
        chosen, shares = choose_experts(shape, scores)
        x = quantise_activations(normed).double()
        total = torch.zeros(shape.hidden, dtype=torch.float64, device=x.device)
        for slot in range(shape.used):
            prefix, expert = ("", chosen[slot]) if slot < shape.top_k else ("shared_", None)
            gate, up = (matrix(shape, inputs, f"{prefix}up", expert) @ x).float().chunk(2)
            inner = (F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")) * up
            inner = quantise_activations(inner, group=EIGHT).double()
            total += shares[slot] * (matrix(shape, inputs, f"{prefix}down", expert) @ inner)
        return total.to(shape.torch_dtype), residual

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        """Return the results, the router's scores, the norm as integers, and the inner activations."""
        assert isinstance(shape, MoeShape)
        device, inner = inputs["x"].device, shape.used * shape.width
        return {
            "output": torch.empty(shape.hidden, dtype=shape.torch_dtype, device=device),
            "residual": torch.empty(shape.hidden, dtype=shape.torch_dtype, device=device),
            "scores": torch.empty(-(-shape.rows // 4) * 4, dtype=shape.torch_dtype, device=device),
            "x_codes": torch.empty(shape.hidden, dtype=torch.int8, device=device),
            "x_scales": torch.empty(shape.hidden // BLOCK, device=device),
            "x_sums": torch.empty(shape.hidden // BLOCK, device=device),
            "inner": torch.empty(inner, dtype=torch.int8, device=device),
            "inner_scales": torch.empty(inner // EIGHT, device=device),
            "inner_sums": torch.empty(inner // EIGHT, device=device),
        }

    def results(self, shape: Shape) -> int:
        return 2

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, MoeShape)
        ptx, blocks = {"PTX": inputs["x"].device.type != "cpu"}, shape.hidden // BLOCK
        up, down = pointers(shape, inputs, "up"), pointers(shape, inputs, "down")
        sizes = {"HIDDEN": shape.hidden, "WIDTH": shape.width, "TOP_K": shape.top_k, "USED": shape.used, **ptx}
        sizes["EXPERTS"] = shape.experts
        x = {name: outputs[name] for name in ("x_codes", "x_scales", "x_sums")}
        inner = {name: outputs[name] for name in ("inner", "inner_scales", "inner_sums")}
        scores = {"scores": outputs["scores"]}
        given = {name: inputs[name] for name in ("x", "residual", "norm", "router")}
        given |= {"new_residual": outputs["residual"], "eps": float(shape.eps)}  # type: ignore[dict-item]
        first_of_all = {"HIDDEN": shape.hidden, "BLOCK": max(BLOCK, triton.next_power_of_2(shape.hidden)), **ptx}

        threads = 32 * config.warps
        lanes = min(32, triton.next_power_of_2(blocks))  # lanes per row
        while shape.width % (threads // lanes * config["each"]):  # so that a block's pairs divide the width
            lanes *= 2
        first = {"EACH": config["each"], "BN": threads // lanes, "BG": lanes, "ACTIVATION": shape.activation}
        pairs = config["each"] * threads // lanes

        threads = 32 * config["down_warps"]
        lanes = min(32, triton.next_power_of_2(shape.width // BLOCK))
        while threads // lanes * config["rows"] > shape.hidden:  # not more rows at a time than there are
            lanes *= 2
        second = {"EACH": config["rows"], "BN": threads // lanes, "BG": lanes}
        rows = config["rows"] * threads // lanes
        words = {"x_codes": x["x_codes"].view(torch.int64)}, {"inner": inner["inner"].view(torch.int64)}
        up_arguments = {**up, **x, **inner, **words[0], **scores}
        down_arguments = {**down, **inner, **words[1], **scores, "output": outputs["output"]}
        to, ranks = sending(inputs)
        down_arguments |= to
        second |= ranks
        arrived, ranks = receiving(inputs)
        each = RECEIVED_SCORES if arrived else SCORES
        first_of_all |= {"ROWS": shape.rows, "EACH": each}
        given |= arrived
        first_of_all |= ranks
        up_arguments |= arrived
        first |= {**ranks, "ROOM": first_of_all["BLOCK"]}
        first |= scheme_constants(find_scheme(shape.scheme))
        second |= scheme_constants(find_scheme(shape.down))
        starts, ups, downs = 1 + -(-shape.rows // each), shape.used * shape.width // pairs, -(-shape.hidden // rows)
        ups += bool(arrived)
        start_warps = min(START_WARPS, most_warps(first_of_all["BLOCK"])) if arrived else START_WARPS
        return [
            Launch(start, (starts,), {**given, **scores, **x}, first_of_all, start_warps, early=True),
            Launch(_up, (ups,), up_arguments, sizes | first, config.warps, early=True),
            Launch(_down, (downs,), down_arguments, sizes | second, config["down_warps"], early=True),
        ]

    def cost(self, shape: Shape) -> Cost:
        """Count the matrices of the experts used, the router, the norm's weight, and the vectors."""
        assert isinstance(shape, MoeShape)
        bits = 2 * find_scheme(shape.scheme).bits_per_weight + find_scheme(shape.down).bits_per_weight
        weights = shape.used * shape.hidden * shape.width
        rows = (4 + shape.rows) * shape.hidden * shape.torch_dtype.itemsize
        return Cost(int(weights * bits / 8) + rows + 4 * shape.hidden, 6.0 * weights)


def matrices(shape: MoeShape) -> dict[str, tuple[Scheme, tuple[int, ...]]]:
    """Return the packed matrices among the inputs: prefix -> (scheme, shape)."""
    up, down = find_scheme(shape.scheme), find_scheme(shape.down)
    found: dict[str, tuple[Scheme, tuple[int, ...]]] = {
        "up": (up, (shape.experts, 2 * shape.width, shape.hidden)),
        "down": (down, (shape.experts, shape.hidden, shape.width)),
    }
    if shape.shared:
        found |= {f"shared_{name}": (scheme, size[1:]) for name, (scheme, size) in list(found.items())}
    return found


def matrix(shape: MoeShape, inputs: Tensors, prefix: str, expert: Tensor | None) -> Tensor:
    """Return the values of one matrix in fp64; `expert` is its number in a stack, on the device."""
    scheme = matrices(shape)[prefix][0]
    parts = {name: inputs[f"{prefix}_{name}"] for name in scheme.parts()}
    if expert is not None:
        parts = {name: part.index_select(0, expert.view(1))[0] for name, part in parts.items()}
    return dequantize(scheme, parts).double()


def scored(shape: MoeShape, inputs: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """Return residual + x, its norm [hidden], and the router's scores [rows], the shared expert's last."""
    residual = inputs["residual"] + inputs["x"]
    normed = F.rms_norm(residual.float(), (shape.hidden,), inputs["norm"], float(shape.eps)).to(shape.torch_dtype)
    return residual, normed, (inputs["router"].double() @ normed.double()).to(shape.torch_dtype)


def choose_experts(shape: MoeShape, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return (numbers [top_k], weights [used]) of the experts of a token; the shared one's weight is last."""
    scores, gate = scores.float().split((shape.experts, shape.rows - shape.experts))
    chosen = scores.sort(descending=True, stable=True)[1][: shape.top_k]
    return chosen, torch.cat((scores[chosen].softmax(-1), gate.sigmoid()))


def pointers(shape: MoeShape, inputs: Tensors, which: str) -> dict[str, Tensor]:
    """Return the parts of the matrices `which` ("up" or "down"), and of the shared expert's, for a launch.

    A part that the scheme or the model doesn't have is replaced by another tensor.
    """
    asked, like = shape.check(), inputs["x"]
    for name, size in (("x", ()), ("residual", ()), ("router", (shape.rows,))):
        check_tensor(asked, name, inputs[name], (*size, shape.hidden), shape.torch_dtype, like)
    check_tensor(asked, "norm", inputs["norm"], (shape.hidden,), torch.float32, like)
    found = {}  # type: ignore[var-annotated]
    for prefix, (scheme, size) in matrices(shape).items():
        if not prefix.endswith(which):
            continue
        parts = {name: inputs[f"{prefix}_{name}"] for name in scheme.parts()}
        for name, (dtype, per) in scheme.parts().items():
            check_tensor(asked, f"{prefix}_{name}", parts[name], (*size[:-1], size[-1] // per), dtype, like)
        given = matrix_pointers(scheme, parts)
        found |= {prefix.replace(which, name): given["scales"] if part is None else part for name, part in given.items()}
    return {f"shared_{name}": part for name, part in found.items() if not name.startswith("shared_")} | found


def scheme_constants(scheme: Scheme) -> dict[str, int | str]:
    """Return the constants that describe a scheme to the kernels."""
    return {"BITS": scheme.bits, "GROUP": scheme.group, "STEPS": scheme.steps, "OFFSET": scheme.offset}


MOE_STEP = MoeStep()
"""The one instance."""


@triton.jit
def _pick(own, shared, stacked):
    """Return the pointer to a matrix's parts: the shared expert's if `own`, else those of all experts."""
    found = ()
    for i in tl.static_range(len(stacked)):
        found = found + (tl.where(own, shared[i], stacked[i]),)
    return found


@triton.jit
def _up(
    codes, high, scales, offsets, steps, shared_codes, shared_high, shared_scales, shared_offsets, shared_steps,
    x_codes, x_scales, x_sums, inner, inner_scales, inner_sums, scores, words_ptr, counts_ptr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, USED: tl.constexpr,
    EACH: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, ACTIVATION: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr, STEPS: tl.constexpr, OFFSET: tl.constexpr, PTX: tl.constexpr, RANKS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """BN times EACH rows of gate and of up of one expert, activated and quantized, eight to a scale.

    With several RANKS, one more program empties and counts what `start` received: all programs of `start` have read it then.

    A block of the shared expert takes its turn after its loads, the others before they choose their expert. The next launch may
    begin only after the turn, because `_down` reads the scores when it begins.
    """
    PAIRS: tl.constexpr = BN * EACH
    BLOCKS: tl.constexpr = HIDDEN // 32
    TILES: tl.constexpr = (BLOCKS + BG - 1) // BG
    program = tl.program_id(0)
    if RANKS > 1:  # noqa: SIM102  # known when the kernel is compiled, unlike the next one
        if program == tl.num_programs(0) - 1:
            take_turn()
            number = tl.load(counts_ptr)
            at = tl.arange(0, ROOM)
            empty(place_of(words_ptr, number, at, scores.dtype.element_ty, RANKS), at < HIDDEN, RANKS)
            tl.debug_barrier()  # all threads have read the number
            count_received(counts_ptr, number)
            return
    slot, place = program // (WIDTH // PAIRS), program % (WIDTH // PAIRS)
    expert = tl.cast(0, tl.int32)
    if slot < TOP_K:
        take_turn()
        expert = nth_expert(keys_of(scores, EXPERTS, ""), slot, EXPERTS)
    parts = (codes, high, scales, offsets, steps)
    if USED > TOP_K:
        shared = (shared_codes, shared_high, shared_scales, shared_offsets, shared_steps)
        parts = _pick(slot == TOP_K, shared, parts)
    base = expert.to(tl.int64) * (2 * WIDTH) + place * PAIRS
    held = load_tiles(parts, base, WIDTH, 0, TILES, EACH, 2, BN, BG, HIDDEN, BITS, GROUP, STEPS, OFFSET, "")
    if slot == TOP_K:
        take_turn()
    if PTX:
        tl.debug_barrier()  # all loads are issued before any value is used
    same = tl.zeros((BN, 1), tl.int32)
    sums = ()
    for _ in tl.static_range(2 * EACH):
        sums = sums + (tl.zeros((BN, BG), tl.float32),)
    for t in tl.static_range(TILES):
        first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)
        given = load_activations(x_codes, x_scales, x_sums, first, same, t, 1, HIDDEN, BG, OFFSET, 127, False)
        following = ()
        for i in tl.static_range(2 * EACH):
            product = block_product(held[t * 2 * EACH + i], given, BITS, GROUP, STEPS, OFFSET, 127, False, PTX)
            following = following + (sums[i] + product,)
        sums = following
    found = joined(sums)  # gate and up of each row are neighbors
    if OFFSET == "centre" and BITS < 8:
        found *= 1.0 / (1 << (8 - BITS))  # where weights are in the upper bits
    gate, up = tl.split(tl.reshape(found, (BN, EACH, 2)))
    value = activate(gate, up, ACTIVATION)  # [BN, EACH]: rows place * PAIRS + EACH index * BN + BN index
    value = tl.reshape(tl.trans(value), (PAIRS // 8, 8))
    top = tl.max(tl.abs(value), 1)
    inverse = tl.where(top > 1e-30, tl.div_rn(127.0, tl.maximum(top, 1e-30)), 0.0)
    inverse = tl.broadcast_to(inverse[:, None], (PAIRS // 8, 8))
    if PTX:  # as in `quantise_blocks`
        nearest = tl.fma(value, inverse, tl.full((PAIRS // 8, 8), 12582912.0, tl.float32))
    else:
        nearest = (value.to(tl.float64) * inverse.to(tl.float64) + 12582912.0).to(tl.float32)
    total = tl.sum(nearest - 12582912.0, 1)
    scale = tl.div_rn(top, 127.0) + total * 0.0  # NaN if one of them is NaN
    eight = program * (PAIRS // 8) + tl.arange(0, PAIRS // 8)
    tl.store(inner + eight[:, None] * 8 + tl.arange(0, 8)[None, :], nearest.to(tl.int32, bitcast=True).to(tl.int8))
    tl.store(inner_scales + eight, scale)
    tl.store(inner_sums + eight, total * scale)


@triton.jit
def _down(
    codes, high, scales, offsets, steps, shared_codes, shared_high, shared_scales, shared_offsets, shared_steps,
    inner, inner_scales, inner_sums, scores, output, targets_ptr, counts_ptr,
    HIDDEN: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, USED: tl.constexpr,
    EACH: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, STEPS: tl.constexpr,
    OFFSET: tl.constexpr, PTX: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """BN times EACH rows of every expert used, times its inner activations, summed with the experts' weights.

    With several RANKS, the sum is sent to all of them instead (see `toolkit.kernels.exchange`).
    """
    BLOCKS: tl.constexpr = WIDTH // 32
    TILES: tl.constexpr = (BLOCKS + BG - 1) // BG
    first_row = tl.program_id(0) * (EACH * BN)
    base = tl.minimum(first_row, HIDDEN - EACH * BN)  # the last block is aligned to the end of the rows
    held = ()
    # The launch before the previous one wrote the scores. It is complete when this one starts.
    chosen, shares = route(keys_of(scores, EXPERTS, ".cg"), scores, EXPERTS, TOP_K)
    if USED > TOP_K:
        chosen = chosen + (tl.cast(0, tl.int32),)
        shares = shares + (tl.sigmoid(tl.load(scores + EXPERTS, cache_modifier=".cg").to(tl.float32)),)
    for s in tl.static_range(USED):
        parts = (codes, high, scales, offsets, steps)
        if s == TOP_K:
            parts = (shared_codes, shared_high, shared_scales, shared_offsets, shared_steps)
        at = chosen[s].to(tl.int64) * HIDDEN + base
        held = held + load_tiles(parts, at, 0, 0, TILES, EACH, 1, BN, BG, WIDTH, BITS, GROUP, STEPS, OFFSET, "")
    take_turn()
    to = ()
    if RANKS > 1:
        n = base + tl.arange(0, EACH)[None, :] * BN + tl.arange(0, BN)[:, None]
        to = targets_of(targets_ptr, counts_ptr, n, output.dtype.element_ty, RANKS)
    if PTX:
        tl.debug_barrier()
    same = tl.zeros((BN, 1), tl.int32)
    sums = ()
    for _ in tl.static_range(EACH):
        sums = sums + (tl.zeros((BN, BG), tl.float32),)
    for s in tl.static_range(USED):
        for t in tl.static_range(TILES):
            first = t * BG if (t + 1) * BG <= BLOCKS else (BLOCKS - BG if BLOCKS > BG else 0)
            at = s * (WIDTH // 8)
            given = load_activations(
                inner + at, inner_scales + at, inner_sums + at, first, same, t, 1, WIDTH, BG, OFFSET, 127, True
            )  # fmt: skip
            following = ()
            for i in tl.static_range(EACH):
                product = block_product(held[(s * TILES + t) * EACH + i], given, BITS, GROUP, STEPS, OFFSET, 127, True, PTX)
                following = following + (sums[i] + shares[s] * product,)
            sums = following
    found = joined(sums)
    if OFFSET == "centre" and BITS < 8:
        found *= 1.0 / (1 << (8 - BITS))
    n = base + tl.arange(0, EACH)[None, :] * BN + tl.arange(0, BN)[:, None]
    if RANKS > 1:
        send(found.to(output.dtype.element_ty), to, n >= first_row)
    else:
        tl.store(output + n, found.to(output.dtype.element_ty), mask=n >= first_row)
