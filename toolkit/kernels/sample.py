# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
"""The next token of a decode step: processors, filters and the choice, without copies and without the host (see `filters`).

Sampling takes the highest logit, or the highest logit / temperature + Gumbel noise (Maddison et al., arXiv 1411.0030), where
the noise is a function of seed, step and token id. Every program finds the best token of its part of the vocabulary. The last
program to finish, according to a counter that it resets, finds the best of those. This takes one launch, repetition penalty and
bias included. A filter adds launches that find its threshold: top-k and top-p three each, and top-p or min-p without top-k one
for the highest logit.

The search for a threshold is a radix search over the bits of the logits. Each of the three launches adds up the tokens
(for top-k) or their integer weights (for top-p) by 12, 10 and 10 bits of the logit; the last program finds the digit at which
the sum reaches its target. Launches and passes over the logits bound the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.kernels import draws, filters, noise
from toolkit.kernels.base import DTYPES, Config, Cost, Kernel, Launch, Shape, Tensors, config_grid
from toolkit.kernels.checks import check_tensor
from toolkit.kernels.early import take_turn
from toolkit.kernels.filters import DIGITS, NUMBERS, WORK, Rules, next_token, numbers_of

# Where the kernels keep values in `work`. All of it is zero between two calls, except for the limits and targets.
COUNT, TOP, LIMIT_K, LIMIT_P, SUMS = (tl.constexpr(at) for at in (0, 1, 2, 4, 8))
INDEX, STEP = tl.constexpr(noise.INDEX), tl.constexpr(noise.STEP)
MIX_1, MIX_2 = tl.constexpr(noise.MIX[0]), tl.constexpr(noise.MIX[1])
NOTHING = tl.constexpr(filters.NO_TOKEN)
INVERSE, PENALTY, TOP_K, TOP_P, RATE, LEAST = (tl.constexpr(i) for i in range(len(NUMBERS)))
C0, C1, C2, C3, C4, C5, C6 = (tl.constexpr(term) for term in filters.POWERS)
FURTHEST, SHIFT = tl.constexpr(filters.FURTHEST), tl.constexpr(filters.WHOLE - 30)


@dataclass(frozen=True)
class SampleShape(Shape):
    """The next token of `vocab` logits.

    The flags select the work: `penalty` and `bias` change logits; `draw` samples at random instead of taking the highest logit;
    `top_k`, `top_p` and `min_p` are filters of `draw`.
    """

    vocab: int
    draw: bool = False
    penalty: bool = False
    bias: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    logits: str = "float32"

    def __post_init__(self) -> None:
        asked = f"the next of {self.vocab:,} tokens"
        if not 1 <= self.vocab <= filters.MOST_TOKENS:
            raise ModelError(asked, "out of range", f"Give 1 to {filters.MOST_TOKENS:,} logits")
        if self.logits not in DTYPES:
            raise ModelError(asked, f"logits={self.logits!r}", f"Give one of {', '.join(DTYPES)}")
        if not self.draw and (self.top_k or self.top_p or self.min_p):
            raise ModelError(asked, "a filter without draw=True", "Leave out the filters, which don't change the highest logit")


class Sample(Kernel):
    """The next token.

    Inputs: logits [vocab]; numbers, state, seen (for `penalty`) and bias (for `bias`) as in `Rules`; work int64 [WORK], which
    is zero before the first call and belongs to the kernel; optionally token and told int64 [1], to write the results to.
    Results: token int64 [1]; in place the state, whose step is incremented, and seen, where the token is marked; and told
    int64 [1], which is the token, or NO_TOKEN if its logit isn't finite. A NaN logit counts as infinite. Raises ModelError for
    tensors with another shape, dtype or device, or that are not contiguous and aligned.
    """

    name: ClassVar[str] = "sample"
    shape_type: ClassVar[type[Shape]] = SampleShape
    lengths = ("vocab",)
    known: ClassVar[Mapping[str, Shape]] = {
        "gemma4-31b greedy": SampleShape(262144),
        "gemma4-31b drawn": SampleShape(262144, draw=True),
        "gemma4-31b top-k, top-p": SampleShape(262144, draw=True, top_k=True, top_p=True),
        "qwen3-8b greedy": SampleShape(151936),
        "qwen3-8b drawn": SampleShape(151936, draw=True),
        "qwen3-8b top-k, top-p": SampleShape(151936, draw=True, top_k=True, top_p=True),
        "qwen3-8b everything": SampleShape(151936, True, True, True, True, True, True),
        "qwen3.5-35b-a3b greedy": SampleShape(248320),
    }

    def space(self, shape: Shape) -> Sequence[Config]:
        return config_grid(Config(block=2048, warps=8), warps=(4, 8), block=(1024, 2048, 4096, 8192))

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, SampleShape)
        device = torch.device(device)
        generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)
        numbers = numbers_of(0.8, 1.3, min(50, shape.vocab), 0.9, 0.02)
        found = {
            "logits": draws.normal((shape.vocab,), generator, device, DTYPES[shape.logits], spread=4.0),
            "numbers": torch.tensor(numbers, dtype=torch.float64, device=device),
            "state": torch.tensor((noise.mixed_seed(seed), 7), device=device),
            "work": torch.zeros(WORK, dtype=torch.int64, device=device),
        }
        if shape.penalty:
            found["seen"] = torch.empty(shape.vocab, dtype=torch.bool, device=device)
            if generator is not None:
                found["seen"].bernoulli_(0.1, generator=generator)
        if shape.bias:
            found["bias"] = draws.normal((shape.vocab,), generator, device)
        return found

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        assert isinstance(shape, SampleShape)
        top_k = int(inputs["numbers"][NUMBERS.index("top_k")]) if shape.top_k else 0
        seen = inputs["seen"] if shape.penalty else None
        bias = inputs["bias"] if shape.bias else None
        flags = shape.draw, top_k, shape.top_p, shape.min_p
        rules = Rules(inputs["numbers"], inputs["state"], inputs["work"], seen, bias, *flags)
        token, told = next_token(inputs["logits"], rules)
        state = inputs["state"] + torch.tensor((0, 1), device=token.device)
        return (token, state, told) if seen is None else (token, state, seen.index_fill(0, token, True), told)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        assert isinstance(shape, SampleShape)
        device = inputs["logits"].device
        most = triton.cdiv(shape.vocab, min(config["block"] for config in self.space(shape)))
        token, told = (inputs.get(name, torch.empty(1, dtype=torch.int64, device=device)) for name in ("token", "told"))
        found = {"token": token, "state": inputs["state"]} | ({"seen": inputs["seen"]} if shape.penalty else {})
        found |= {"told": told}
        scratch = {"best": torch.float64, "best_id": torch.int32}
        return found | {name: torch.empty(most, dtype=dtype, device=device) for name, dtype in scratch.items()}

    def results(self, shape: Shape) -> int:
        assert isinstance(shape, SampleShape)
        return 4 if shape.penalty else 3

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, SampleShape)
        blocks = triton.cdiv(shape.vocab, config["block"])
        self._check(shape, inputs, outputs, blocks)
        logits = inputs["logits"]
        reading: dict[str, Any] = {
            "logits_ptr": logits, "seen_ptr": inputs.get("seen", logits), "bias_ptr": inputs.get("bias", logits),
            "numbers_ptr": inputs["numbers"], "work_ptr": inputs["work"],
        }  # fmt: skip
        constants = {"VOCAB": shape.vocab, "PENALISED": shape.penalty, "BIASED": shape.bias, "BLOCK": config["block"]}

        def launch(function: Any, arguments: dict[str, Any], **more: int) -> Launch:
            return Launch(function, (blocks,), arguments, constants | more, config.warps, config.stages, early=True)

        found, weighed = [], shape.top_p or shape.min_p
        if weighed and not shape.top_k:
            found.append(launch(_top_kernel, reading))
        for by_weight in [False] * shape.top_k + [True] * shape.top_p:
            for n, (low, bits) in enumerate(DIGITS):
                flags = {"FIRST": n == 0, "FIND_TOP": n == 0 and not by_weight and weighed}
                limited = by_weight and shape.top_k
                found.append(launch(_search_kernel, reading, WEIGHED=by_weight, LIMITED=limited, LOW=low, BITS=bits, **flags))
        writing = {f"{name}_ptr": outputs[name] for name in ("token", "told", "state", "best", "best_id")}
        kinds = {"DRAW": shape.draw, "BY_K": shape.top_k, "BY_P": shape.top_p, "BY_SHARE": shape.min_p}
        rounded = triton.next_power_of_2(blocks)
        return [*found, launch(_choice_kernel, reading | writing, **kinds, BLOCKS=rounded)]

    def _check(self, shape: SampleShape, inputs: Tensors, outputs: Tensors, blocks: int) -> None:
        logits = inputs["logits"]
        check_tensor(self.name, "logits", logits, (shape.vocab,), DTYPES[shape.logits], logits)
        check_tensor(self.name, "numbers", inputs["numbers"], (len(NUMBERS),), torch.float64, logits)
        check_tensor(self.name, "work", inputs["work"], (WORK,), torch.int64, logits)
        if shape.penalty:
            check_tensor(self.name, "seen", inputs["seen"], (shape.vocab,), torch.bool, logits)
        if shape.bias:
            check_tensor(self.name, "bias", inputs["bias"], (shape.vocab,), torch.float32, logits)
        check_tensor(self.name, "state", outputs["state"], (2,), torch.int64, logits)
        for name in ("token", "told"):
            check_tensor(self.name, name, outputs[name], (1,), torch.int64, logits, 8)
        if len(outputs["best"]) < blocks:
            found = f"scratch for {len(outputs['best'])} programs where {blocks} run"
            raise ModelError(self.name, found, "Choose a config of the kernel's space, or larger blocks")

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, SampleShape)
        each = DTYPES[shape.logits].itemsize + shape.penalty + 4 * shape.bias
        flops = 1.0 + 120.0 * shape.draw  # a hash and two logarithms in fp64
        return Cost(shape.vocab * each + 8, flops * shape.vocab)


@triton.jit
def _values(
    logits_ptr, seen_ptr, bias_ptr, numbers_ptr, ids, VOCAB: tl.constexpr, PENALISED: tl.constexpr, BIASED: tl.constexpr
):
    """Return the logits of tokens `ids` as `filters.adjusted` does; -inf beyond the vocabulary."""
    there = ids < VOCAB
    x = tl.load(logits_ptr + ids, mask=there, other=float("-inf")).to(tl.float32)
    x = tl.where(x != x, float("inf"), x)
    if PENALISED:
        penalty = tl.load(numbers_ptr + PENALTY)
        wide = x.to(tl.float64)
        penalised = tl.where(x > 0, wide / penalty, wide * penalty).to(tl.float32)
        x = tl.where(tl.load(seen_ptr + ids, mask=there, other=0) != 0, penalised, x)
    if BIASED:
        x += tl.load(bias_ptr + ids, mask=there, other=0.0)
        x = tl.where(x != x, float("-inf"), x)
    return x


@triton.jit
def _order(x):
    """Return 32 bits of the fp32 number `x` in an int64, in descending order: the largest number has the smallest one."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return 2147483647 - (bits ^ ((bits >> 31) & 2147483647)).to(tl.int64)


@triton.jit
def _number(order):
    """Return the number that `_order` maps to `order`."""
    bits = (2147483647 - order).to(tl.int32)
    return (bits ^ ((bits >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit
def _store_top(work_ptr, order):
    """Keep the highest logit of all programs. `work` holds 2^32 - order, because it is zero at the beginning."""
    tl.atomic_max(work_ptr + TOP, 4294967296 - tl.min(order))


@triton.jit
def _weights(x, work_ptr, numbers_ptr):
    """Return the weights of the logits `x` as `filters.weights_of` does."""
    top = _number(4294967296 - tl.load(work_ptr + TOP))
    below = tl.where(x == top, 0.0, top.to(tl.float64) - x.to(tl.float64))
    exponent = tl.minimum(below * tl.load(numbers_ptr + RATE), FURTHEST).to(tl.int64)
    fraction = (exponent & 4294967295) >> 1
    power = C5 + ((C6 * fraction) >> 31)
    power = C4 + ((power * fraction) >> 31)
    power = C3 + ((power * fraction) >> 31)
    power = C2 + ((power * fraction) >> 31)
    power = C1 + ((power * fraction) >> 31)
    power = C0 + ((power * fraction) >> 31)
    return (((power << SHIFT) >> (exponent >> 32)) + 1) >> 1


@triton.jit
def _noise(ids, state_ptr):
    """Return the Gumbel noise of token `ids` in fp64."""
    key = tl.load(state_ptr).to(tl.uint64, bitcast=True)
    step = tl.load(state_ptr + 1).to(tl.uint64, bitcast=True)
    z = ids.to(tl.uint64) * INDEX + (key + step * STEP)
    z = (z ^ (z >> 30)) * MIX_1
    z = (z ^ (z >> 27)) * MIX_2
    z = (z ^ (z >> 31)) >> 12
    uniform = (z.to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52: in (0, 1), exact
    return -tl.log(-tl.log(uniform))


@triton.jit
def _is_last(work_ptr):
    """Return whether all other programs have arrived. Their stores and atomic operations are then complete."""
    tl.debug_barrier()  # those of this program are issued before it is counted
    return tl.atomic_add(work_ptr + COUNT, 1, sem="acq_rel") == tl.num_programs(0) - 1


@triton.jit
def _top_kernel(
    logits_ptr, seen_ptr, bias_ptr, numbers_ptr, work_ptr, VOCAB: tl.constexpr, PENALISED: tl.constexpr,
    BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the highest logit."""
    take_turn()
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _store_top(work_ptr, _order(_values(logits_ptr, seen_ptr, bias_ptr, numbers_ptr, ids, VOCAB, PENALISED, BIASED)))


@triton.jit
def _search_kernel(
    logits_ptr, seen_ptr, bias_ptr, numbers_ptr, work_ptr, VOCAB: tl.constexpr, PENALISED: tl.constexpr,
    BIASED: tl.constexpr, BLOCK: tl.constexpr, WEIGHED: tl.constexpr, LIMITED: tl.constexpr, FIRST: tl.constexpr,
    FIND_TOP: tl.constexpr, LOW: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Find the next BITS bits of the order of the last token to keep: top-p's if WEIGHED, otherwise top-k's.

    `work` holds a limit, the bits found so far, followed by the number of tokens (or the weight) that is still to be reached
    among the tokens with these bits. LIMITED leaves out the tokens beyond the limit of top-k.
    """
    take_turn()
    limit_ptr = work_ptr + (LIMIT_P if WEIGHED else LIMIT_K)
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = _values(logits_ptr, seen_ptr, bias_ptr, numbers_ptr, ids, VOCAB, PENALISED, BIASED)
    order = _order(x)
    there = ids < VOCAB
    if FIND_TOP:
        _store_top(work_ptr, order)
    if LIMITED:
        there = there & (order <= tl.load(work_ptr + LIMIT_K))
    if not FIRST:
        there = there & (order >> (LOW + BITS) == tl.load(limit_ptr))
    amounts = _weights(x, work_ptr, numbers_ptr) if WEIGHED else tl.full((BLOCK,), 1, tl.int64)
    sums_ptr = work_ptr + SUMS
    tl.atomic_add(sums_ptr + ((order >> LOW) & ((1 << BITS) - 1)), amounts, mask=there & (amounts > 0), sem="relaxed")
    if _is_last(work_ptr):
        digit = tl.arange(0, 1 << BITS)
        sums = tl.load(sums_ptr + digit, cache_modifier=".cg")
        through = tl.cumsum(sums, 0)
        before = through - sums
        if not FIRST:
            target = tl.load(limit_ptr + 1)
        elif WEIGHED:
            total = tl.sum(sums)
            target = tl.minimum(tl.ceil(total.to(tl.float64) * tl.load(numbers_ptr + TOP_P)).to(tl.int64), total)
        else:
            target = tl.load(numbers_ptr + TOP_K).to(tl.int64)
        reached = (before < target) & (through >= target)
        limit = tl.sum(tl.where(reached, digit, 0)).to(tl.int64)
        if not FIRST:
            limit |= tl.load(limit_ptr) << BITS
        tl.debug_barrier()  # all threads have read before one writes
        tl.store(limit_ptr, limit)
        tl.store(limit_ptr + 1, target - tl.sum(tl.where(reached, before, 0)))
        tl.store(sums_ptr + digit, tl.zeros((1 << BITS,), tl.int64))
        tl.store(work_ptr + COUNT, 0)


@triton.jit
def _choice_kernel(
    logits_ptr, seen_ptr, bias_ptr, numbers_ptr, work_ptr, token_ptr, told_ptr, state_ptr, best_ptr, best_id_ptr,
    VOCAB: tl.constexpr, PENALISED: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, DRAW: tl.constexpr,
    BY_K: tl.constexpr, BY_P: tl.constexpr, BY_SHARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """BLOCK logits per program; the last program to arrive does the rest."""
    take_turn()
    NONE: tl.constexpr = 2147483647
    ids = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = _values(logits_ptr, seen_ptr, bias_ptr, numbers_ptr, ids, VOCAB, PENALISED, BIASED)
    scores = x.to(tl.float64)
    if DRAW:
        scores = scores * tl.load(numbers_ptr + INVERSE) + _noise(ids, state_ptr)
        kept = ids < VOCAB
        if BY_P:
            kept = kept & (_order(x) <= tl.load(work_ptr + LIMIT_P))
        elif BY_K:
            kept = kept & (_order(x) <= tl.load(work_ptr + LIMIT_K))
        if BY_SHARE:
            kept = kept & (_weights(x, work_ptr, numbers_ptr) >= tl.load(numbers_ptr + LEAST).to(tl.int64))
        scores = tl.where(kept, scores, float("-inf"))
    best = tl.max(scores)
    tl.store(best_ptr + tl.program_id(0), best)
    tl.store(best_id_ptr + tl.program_id(0), tl.min(tl.where((scores == best) & (ids < VOCAB), ids, NONE)))
    if _is_last(work_ptr):
        part = tl.arange(0, BLOCKS)
        there = part < tl.num_programs(0)
        scores_of = tl.load(best_ptr + part, mask=there, other=float("-inf"), cache_modifier=".cg")
        ids_of = tl.load(best_id_ptr + part, mask=there, other=NONE, cache_modifier=".cg")
        highest = tl.max(scores_of)
        token = tl.min(tl.where(scores_of == highest, ids_of, NONE)).to(tl.int64)
        tl.store(token_ptr, token)
        tl.store(told_ptr, tl.where(tl.abs(highest) == float("inf"), NOTHING, token))
        tl.store(work_ptr + COUNT, 0)
        tl.store(work_ptr + TOP, 0)
        tl.store(state_ptr + 1, tl.load(state_ptr + 1) + 1)
        if PENALISED:
            tl.store(seen_ptr + token, 1)


SAMPLE = Sample()
