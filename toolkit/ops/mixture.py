"""Operations on mixtures of experts: for one token `moe`, for many `choose_experts` and `experts`.

The matrices of `moe` and `experts` are packed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.collectives import Partial, partial_of, share_of, whole
from toolkit.ops.define import Problem, aligned, call, define, launches, on_gpu
from toolkit.ops.products import ACTIVATIONS, FUSED
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.schemes import SCHEMES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of scores that `choose_experts` has a kernel for
MOST_EXPERTS = 4096  # that it chooses from
CONVERSION = 680.0  # converting a byte of a matrix for the tensor cores takes as long as so many operations of theirs
LEAST = 32  # number of activations that share one scale; `moe` needs sizes that are multiples of it

Gated = tuple[PackedMatrix, PackedMatrix]  # (gate and up as one matrix, down), of one MLP or of a stack of experts


def experts_fit(x: Tensor, matrices: Gated | None, activation: str, *scores: Tensor | None) -> bool:
    """Return whether `experts` supports these operands. `scores` are only checked for needing a gradient."""
    return matrices is not None and activation in FUSED and x.dtype == torch.bfloat16 and on_gpu(x, *scores)


def moe_fits(
    x: Tensor | Partial, residual: Tensor, norm: Tensor, router: Tensor, matrices: Gated | None, activation: str,
    shared: Gated | None,
) -> bool:  # fmt: skip
    """Return whether `moe` supports these operands: x of one token, and a shared expert in the format of the others."""
    x = share_of(x)
    one = math.prod(x.shape[:-1]) == 1 and x.dtype == residual.dtype == router.dtype
    if matrices is None or not one or not experts_fit(x, matrices, activation, residual, norm, router):
        return False
    up, down = matrices
    whole = all(matrix.shape[-1] % LEAST == 0 for matrix in matrices)
    alike = shared is None or [(m.scheme, m.shape) for m in shared] == [(m.scheme, m.shape[1:]) for m in (up, down)]
    return whole and alike


def moe(
    x: Tensor | Partial, residual: Tensor, norm: Tensor, eps: float, router: Tensor, top_k: int, matrices: Gated,
    activation: str, shared: Gated | None = None, ranks: int = 1,
) -> tuple[Tensor | Partial, Tensor]:  # fmt: skip
    """Add x to the residual of one token, normalize the sum, and run it through the `top_k` experts with the highest scores.

    Needs a GPU and operands for which `moe_fits`.

    Args:
        x: [..., hidden], where all other dimensions are 1, as is `residual`. A `Partial` is summed over all ranks first.
        norm: The norm's weight [hidden], fp32.
        router: [experts, hidden], gives the scores, whose softmax weights the experts. If there is a `shared` expert, one more
            row gives its weight before the sigmoid.
        ranks: Over so many, the output is to be summed.

    Returns (output of the experts, residual + x), shaped like x. With several ranks, the output is a `Partial`.
    """
    up, down = matrices
    held = [_parts(one) for one in matrices] + ([_parts(one) for one in shared] if shared is not None else [[], []])
    rest = (norm, eps, router, *held, up.scheme.name, down.scheme.name, top_k, activation)

    def run(x: Tensor, targets: list[Tensor], inbox: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        return call("moe", x, aligned(residual), *rest, targets, inbox)  # type: ignore[no-any-return]

    if isinstance(x, Partial) and x.is_received:
        share, took = x.share, x.taken_by
        out, (total,) = partial_of(lambda targets: took(partial(run, share, targets)), share.device, share.nbytes, ranks)
    else:
        plain = aligned(whole(x))
        out, (total,) = partial_of(partial(run, plain), plain.device, plain.nbytes, ranks)
    return out, total


def choose_experts(scores: Tensor, count: int, top_k: int, over_all: bool = False) -> tuple[Tensor, ...]:
    """Return the `top_k` of `count` experts with the highest scores for each token, and their weights.

    Args:
        scores: [N, count], or with a shared expert [N, count + 1].
        over_all: Whether the weights are the softmax over all scores; by default, it is over the chosen ones.

    Returns (numbers int64 [N, top_k] in descending order of their scores, weights fp32 [N, top_k]), and with a shared expert
    the sigmoid of its score [N, 1], in the dtype of the scores. It is undefined which of equal scores comes first.
    """
    fits = scores.dtype in DTYPES and scores.numel() > 0 and count <= MOST_EXPERTS
    if fits and on_gpu(scores):
        return tuple(call("choose_experts", aligned(scores), count, top_k, over_all))
    return tuple(_choice_reference(scores, count, top_k, over_all))


def experts(x: Tensor, chosen: Tensor, shares: Tensor, matrices: Gated, activation: str) -> Tensor:
    """Run x [N, hidden] through the experts `chosen` [N, k], weighted by `shares` [N, k] in fp32. Returns [N, hidden].

    Needs a GPU and matrices for which `experts_fit`.
    """
    up, down = matrices
    schemes = (up.scheme.name, down.scheme.name)
    return call("experts", aligned(x), chosen, shares, _parts(up), _parts(down), *schemes, activation)  # type: ignore[no-any-return]


def _parts(matrix: PackedMatrix) -> list[Tensor]:
    return matrix.operand()


def _named(parts: Sequence[Tensor], scheme: str, prefix: str = "") -> dict[str, Tensor]:
    return {f"{prefix}{name}": part for name, part in zip(SCHEMES[scheme].parts(), parts, strict=True)}


def _some(parts: Sequence[Tensor], scheme: str, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize some matrices of a stack: [n, out, in]."""
    chosen = {name: part.index_select(0, numbers) for name, part in _named(parts, scheme).items()}
    return dequantize(SCHEMES[scheme], chosen, dtype)


def _gated(x: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Run x [n, 1, hidden] through n gated MLPs."""
    gate, rest = torch.bmm(x, up.transpose(1, 2)).chunk(2, -1)
    return torch.bmm(ACTIVATIONS[activation](gate) * rest, down.transpose(1, 2))


def _moe_reference(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, router: Tensor, up: Sequence[Tensor], down: Sequence[Tensor],
    shared_up: Sequence[Tensor], shared_down: Sequence[Tensor], scheme: str, down_scheme: str, top_k: int, activation: str,
    targets: Sequence[Tensor] | None = None, inbox: Sequence[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    total = residual + x
    normed = F.rms_norm(total.float(), total.shape[-1:], norm, eps).to(x.dtype).view(1, -1)
    count = up[0].shape[0]
    scores = F.linear(normed, router)
    shares, chosen = scores[:, :count].softmax(-1, dtype=torch.float32).topk(top_k, -1)
    shares = shares / shares.sum(-1, keepdim=True)
    out = _experts_reference(normed, chosen, shares, up, down, scheme, down_scheme, activation)
    if shared_up:
        own = dequantize(SCHEMES[scheme], _named(shared_up, scheme), x.dtype)[None]
        back = dequantize(SCHEMES[down_scheme], _named(shared_down, down_scheme), x.dtype)[None]
        out = torch.addcmul(out, _gated(normed[None], own, back, activation)[0], scores[:, count:].sigmoid())
    return [out.view(x.shape), total]


def _moe_problem(
    x: Tensor, residual: Tensor, norm: Tensor, eps: float, router: Tensor, up: Sequence[Tensor], down: Sequence[Tensor],
    shared_up: Sequence[Tensor], shared_down: Sequence[Tensor], scheme: str, down_scheme: str, top_k: int, activation: str,
    targets: Sequence[Tensor] | None = None, inbox: Sequence[Tensor] | None = None,
) -> Problem:  # fmt: skip
    from toolkit.kernels.moe import MOE_STEP, MoeShape

    count, width = up[0].shape[0], up[0].shape[1] // 2
    inputs = {"x": x.view(-1), "residual": residual.view(-1), "norm": norm, "router": router}
    inputs |= _named(up, scheme, "up_") | _named(down, down_scheme, "down_")
    if shared_up:
        inputs |= _named(shared_up, scheme, "shared_up_") | _named(shared_down, down_scheme, "shared_down_")
    inputs |= dict(zip(("targets", "counts"), targets or (), strict=False))
    inputs |= dict(zip(("words", "counts"), inbox or (), strict=False))
    sizes = (x.shape[-1], width, count, top_k, bool(shared_up))
    return MOE_STEP, MoeShape(*sizes, scheme, down_scheme, activation, dtype_name(x.dtype), repr(eps)), inputs


define(
    "moe(Tensor x, Tensor residual, Tensor norm, float eps, Tensor router, Tensor[] up, Tensor[] down, Tensor[] shared_up, "
    "Tensor[] shared_down, str scheme, str down_scheme, int top_k, str activation, "
    "Tensor[]? targets=None, Tensor[]? inbox=None) -> Tensor[]",
    _moe_reference, lambda x, *rest: [torch.empty_like(x), torch.empty_like(x)], _moe_problem,
    lambda outputs, x: [outputs["output"].view(x.shape), outputs["residual"].view(x.shape)],
)  # fmt: skip


@rule("toolkit::moe")
def _moe_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Sequence[Tensor]) -> list[Effect]:
    """Return the norm with the router, and two products that read the chosen experts and the shared one."""
    x, router, up, down, shared_up, shared_down, top_k = args[0], args[4], *args[5:9], args[11]
    chosen = sum(map(nbytes, (*up, *down))) * top_k // up[0].shape[0]
    moved = 4 * nbytes(x) + nbytes(args[2]) + nbytes(router) + chosen + sum(map(nbytes, (*shared_up, *shared_down)))
    flops = 3.0 * (top_k + bool(shared_up)) * x.shape[-1] * up[0].shape[1]
    return launches("moe", 3, moved, flops, floor=3.5, share=0.83)


def _choice_reference(scores: Tensor, count: int, top_k: int, over_all: bool) -> list[Tensor]:
    routed, shared = scores[:, :count], scores[:, count:]
    if over_all:
        weights, chosen = routed.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    else:
        highest, chosen = routed.topk(top_k, -1)
        weights = highest.softmax(-1, dtype=torch.float32)
    return [chosen, weights, *([shared.sigmoid()] if shared.shape[1] else [])]


def _choice_shape(scores: Tensor, count: int, top_k: int, over_all: bool) -> list[Tensor]:
    found = [scores.new_empty(scores.shape[0], top_k, dtype=dtype) for dtype in (torch.int64, torch.float32)]
    return [*found, *([scores.new_empty(scores.shape[0], 1)] if scores.shape[1] > count else [])]


def _choice_problem(scores: Tensor, count: int, top_k: int, over_all: bool) -> Problem:
    from toolkit.kernels.expert_choice import EXPERT_CHOICE, ChoiceShape

    gated = scores.shape[1] > count
    return (
        EXPERT_CHOICE,
        ChoiceShape(scores.shape[0], count, top_k, gated, over_all, dtype_name(scores.dtype)),
        {"scores": scores},
    )


define(
    "choose_experts(Tensor scores, int count, int top_k, bool over_all) -> Tensor[]",
    _choice_reference, _choice_shape, _choice_problem, lambda outputs, scores: list(outputs.values()),
)  # fmt: skip


@rule("toolkit::choose_experts")
def _choice_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Sequence[Tensor]) -> list[Effect]:
    """Return one kernel that reads the scores, and writes its results."""
    return launches("choose_experts", 1, nbytes(args[0]) + sum(map(nbytes, out)), floor=2.0)


def _experts_reference(
    x: Tensor, chosen: Tensor, shares: Tensor, up: Sequence[Tensor], down: Sequence[Tensor], scheme: str, down_scheme: str,
    activation: str,
) -> Tensor:  # fmt: skip
    """Run token by token, so that only a few experts are dequantized at a time."""
    rows = []
    for row, numbers, weights in zip(x, chosen, shares, strict=True):
        own, back = _some(up, scheme, numbers, x.dtype), _some(down, down_scheme, numbers, x.dtype)
        each = _gated(row.expand(len(numbers), 1, -1), own, back, activation)[:, 0]
        rows.append((each * weights.to(x.dtype)[:, None]).sum(0))
    return torch.stack(rows)


def _experts_problem(
    x: Tensor, chosen: Tensor, shares: Tensor, up: Sequence[Tensor], down: Sequence[Tensor], scheme: str, down_scheme: str,
    activation: str,
) -> Problem:  # fmt: skip
    from toolkit.kernels.moe_prefill import MOE_PREFILL, ExpertsShape

    count, width = up[0].shape[0], up[0].shape[1] // 2
    shape = ExpertsShape(x.shape[0], x.shape[-1], width, count, chosen.shape[-1], scheme, down_scheme, activation)
    inputs = {"x": x, "chosen": chosen.contiguous(), "shares": shares.contiguous()}
    return MOE_PREFILL, shape, inputs | _named(up, scheme, "up_") | _named(down, down_scheme, "down_")


define(
    "experts(Tensor x, Tensor chosen, Tensor shares, Tensor[] up, Tensor[] down, str scheme, str down_scheme, str activation) "
    "-> Tensor",
    _experts_reference, lambda x, *rest: torch.empty_like(x), _experts_problem, lambda outputs, x: outputs["out"],
)  # fmt: skip


@rule("toolkit::experts")
def _experts_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return four kernels (sort, two products, sum) that read at most one expert per entry of `chosen`.

    Converting the matrices takes longer than reading or multiplying them.
    """
    x, chosen, _, up, down = args[:5]
    matrices = sum(map(nbytes, (*up, *down)))
    share = min(1.0, chosen.numel() / up[0].shape[0])
    flops = 6.0 * chosen.numel() * x.shape[-1] * up[0].shape[1] / 2
    return launches("experts", 4, 2 * nbytes(x) + int(matrices * share), max(flops, CONVERSION * matrices * share))
