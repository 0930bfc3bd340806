"""Operations on mixtures of experts with packed matrices: one for a single token (`moe`), one for many (`experts`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.define import Problem, aligned, call, define, dtype_name, launches, on_gpu
from toolkit.ops.products import ACTIVATIONS, FUSED
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.schemes import SCHEMES

LEAST = 32  # number of activations that share one scale; `moe` needs sizes that are multiples of it

Gated = tuple[PackedMatrix, PackedMatrix]  # (gate and up as one matrix, down), of one MLP or of a stack of experts


def experts_fit(x: Tensor, matrices: Gated | None, activation: str, *scores: Tensor | None) -> bool:
    """Return whether `experts` supports these operands. `scores` are only checked for needing a gradient."""
    return matrices is not None and activation in FUSED and x.dtype == torch.bfloat16 and on_gpu(x, *scores)


def moe_fits(x: Tensor, matrices: Gated | None, activation: str, shared: Gated | None, *scores: Tensor | None) -> bool:
    """Return whether `moe` supports these matrices. The shared expert must have the format of the others."""
    if matrices is None or x.shape[0] != 1 or not experts_fit(x, matrices, activation, *scores):
        return False
    up, down = matrices
    whole = all(matrix.shape[-1] % LEAST == 0 for matrix in matrices)
    alike = shared is None or [(m.scheme, m.shape) for m in shared] == [(m.scheme, m.shape[1:]) for m in (up, down)]
    return whole and alike


def moe(
    x: Tensor, scores: Tensor, top_k: int, matrices: Gated, activation: str, shared: Gated | None = None,
    gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Run one token x [1, hidden] through the `top_k` experts with the highest scores [1, experts]. Returns [1, hidden].

    The softmax of those scores weights the experts. A `shared` expert is added with the weight sigmoid(gate), where `gate` is
    [1, 1]. Needs a GPU and matrices for which `moe_fits`.
    """
    up, down = matrices
    held = [_parts(one) for one in matrices] + ([_parts(one) for one in shared] if shared is not None else [[], []])
    return call("moe", aligned(x), scores, gate, *held, up.scheme.name, down.scheme.name, top_k, activation)  # type: ignore[no-any-return]


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
    x: Tensor, scores: Tensor, gate: Tensor | None, up: Sequence[Tensor], down: Sequence[Tensor], shared_up: Sequence[Tensor],
    shared_down: Sequence[Tensor], scheme: str, down_scheme: str, top_k: int, activation: str,
) -> Tensor:  # fmt: skip
    shares, chosen = scores.softmax(-1, dtype=torch.float32).topk(top_k, -1)
    shares = shares / shares.sum(-1, keepdim=True)
    out = _experts_reference(x, chosen, shares, up, down, scheme, down_scheme, activation)
    if gate is None:
        return out
    own = dequantize(SCHEMES[scheme], _named(shared_up, scheme), x.dtype)[None]
    back = dequantize(SCHEMES[down_scheme], _named(shared_down, down_scheme), x.dtype)[None]
    return torch.addcmul(out, _gated(x[None], own, back, activation)[0], gate.sigmoid())


def _moe_problem(
    x: Tensor, scores: Tensor, gate: Tensor | None, up: Sequence[Tensor], down: Sequence[Tensor], shared_up: Sequence[Tensor],
    shared_down: Sequence[Tensor], scheme: str, down_scheme: str, top_k: int, activation: str,
) -> Problem:  # fmt: skip
    from toolkit.kernels.moe import MOE_STEP, MoeShape

    sizes = (x.shape[-1], up[0].shape[1] // 2, scores.shape[-1], top_k, gate is not None)
    inputs = {"x": x[0], "scores": scores[0]} | ({} if gate is None else {"shared_gate": gate[0]})
    inputs |= _named(up, scheme, "up_") | _named(down, down_scheme, "down_")
    if gate is not None:
        inputs |= _named(shared_up, scheme, "shared_up_") | _named(shared_down, down_scheme, "shared_down_")
    shape = MoeShape(*sizes, scheme, down_scheme, activation, dtype_name(x.dtype))
    return MOE_STEP, shape, inputs


define(
    "moe(Tensor x, Tensor scores, Tensor? gate, Tensor[] up, Tensor[] down, Tensor[] shared_up, Tensor[] shared_down, "
    "str scheme, str down_scheme, int top_k, str activation) -> Tensor",
    _moe_reference, lambda x, *rest: torch.empty_like(x), _moe_problem, lambda outputs, x: outputs["output"][None],
)  # fmt: skip


@rule("toolkit::moe")
def _moe_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return the routing, and two products that read the chosen experts and the shared one."""
    x, scores, _, up, down, shared_up, shared_down = args[:7]
    chosen = sum(map(nbytes, (*up, *down))) * args[9] // scores.shape[-1]
    moved = 2 * nbytes(x) + nbytes(scores) + chosen + sum(map(nbytes, (*shared_up, *shared_down)))
    flops = 3.0 * (args[9] + bool(shared_up)) * x.shape[-1] * up[0].shape[1]
    return launches("moe", 3, moved, flops, floor=3.5, share=0.83)


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
    """Return four kernels (sort, two products, sum) that read at most one expert per entry of `chosen`."""
    x, chosen, _, up, down = args[:5]
    matrices = sum(map(nbytes, (*up, *down)))
    share = min(1.0, chosen.numel() / up[0].shape[0])
    flops = 6.0 * chosen.numel() * x.shape[-1] * up[0].shape[1] / 2
    return launches("experts", 4, 2 * nbytes(x) + int(matrices * share), flops, share=0.28)
