"""RMS norms, and norms fused with the additions before or after them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.collectives import Partial, share_of, whole
from toolkit.ops.define import Problem, aligned, call, define, is_launched, launches, on_gpu
from toolkit.ops.products import Operand, few_rows, quantizes
from toolkit.weights.packed import empty_quantized, quantize_activations


def rms_norm(x: Tensor, weight: Tensor, eps: float, quantize: bool = False) -> Operand:
    """Return x / rms(x) * weight over the last dimension of x [..., hidden], computed in fp32; weight [hidden] is fp32.

    With `quantize`, the result is quantized too if packed products would do so (see `matmul`), in the same launch.
    """
    normed, *quantized = _norm(x, weight, eps, quantize=quantize)
    return Operand(normed, tuple(quantized))


def add_norm(
    residual: Tensor, x: Tensor | Partial, weight: Tensor, eps: float, post_weight: Tensor | None = None,
    scalar: Tensor | None = None, quantize: bool = False, ahead: Tensor | None = None,
) -> tuple[Operand, Tensor]:  # fmt: skip
    """Return (norm(sum), sum), [..., hidden]: sum = residual + x, or with `post_weight` (residual + post_norm(x)) * scalar.

    A `Partial` x is summed over all ranks first. `quantize` as in `rms_norm`. `ahead` is a tensor that is read next and that no
    launch writes, such as the codes of a matrix.
    With two norms, which take twice as long, the launch of a decode step also asks for a part of it to be loaded into the L2
    cache (see `toolkit.kernels.ahead`). No result depends on it.
    """
    if post_weight is None or not few_rows(share_of(x)) or not is_launched():
        ahead = None
    normed, total, *quantized = _norm(x, weight, eps, residual, post_weight, scalar, quantize=quantize, ahead=ahead)
    return Operand(normed, tuple(quantized)), total


def norm_add(residual: Tensor, x: Tensor | Partial, post_weight: Tensor, eps: float, scalar: Tensor | None = None) -> Tensor:
    """Return (residual + norm(x)) * scalar, [..., hidden]. A `Partial` x is summed over all ranks first."""
    return _norm(x, post_weight, eps, residual, post_weight, scalar, False)[0]


def _norm(
    x: Tensor | Partial, weight: Tensor, eps: float, residual: Tensor | None = None, post_weight: Tensor | None = None,
    scalar: Tensor | None = None, normed: bool = True, quantize: bool = False, ahead: Tensor | None = None,
) -> Sequence[Tensor]:  # fmt: skip
    like = share_of(x)
    if not like.numel() or not on_gpu(like, weight, residual, post_weight, scalar):
        return _norm_reference(whole(x), weight, eps, residual, post_weight, scalar, normed, False)
    rest = (post_weight, scalar, normed, quantize and quantizes(like), ahead)

    def run(x: Tensor, inbox: Sequence[Tensor] | None) -> Sequence[Tensor]:
        return call("rms_norm", x, weight, eps, None if residual is None else aligned(residual), *rest, inbox)  # type: ignore[no-any-return]

    if isinstance(x, Partial) and x.is_received:
        return x.taken_by(partial(run, like))
    return run(aligned(whole(x)), None)


def _norm_reference(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, post_weight: Tensor | None, scalar: Tensor | None,
    normed: bool, quantize: bool, ahead: Tensor | None = None, inbox: Sequence[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    if residual is not None:
        x = residual + (x if post_weight is None else F.rms_norm(x.float(), x.shape[-1:], post_weight, eps).to(x.dtype))
        x = x if scalar is None else x * scalar
    found = [F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)] if normed else []
    quantized = quantize_activations(found[0]) if quantize else ()
    return [*found, *quantized] if residual is None else [*found, x, *quantized]


def _norm_shape(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, post_weight: Tensor | None, scalar: Tensor | None,
    normed: bool, quantize: bool, ahead: Tensor | None = None, inbox: Sequence[Tensor] | None = None,
) -> list[Tensor]:  # fmt: skip
    found = [torch.empty_like(x) for _ in range(normed + (residual is not None))]
    if quantize:
        found += empty_quantized(x)
    return found


def _norm_problem(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None, post_weight: Tensor | None, scalar: Tensor | None,
    normed: bool, quantize: bool, ahead: Tensor | None = None, inbox: Sequence[Tensor] | None = None,
) -> Problem:  # fmt: skip
    from toolkit.kernels.norms_rope import RMS_NORM, NormShape

    form = "norm" if residual is None else "add_norm" if post_weight is None else "norm_add_norm" if normed else "norm_add"
    given = {"x": x, "weight": weight, "residual": residual, "scalar": scalar, "ahead": ahead}
    given |= {"post_weight": post_weight} if form == "norm_add_norm" else {}
    hidden = x.shape[-1]
    inputs = {name: t.view(-1, hidden) if name in ("x", "residual") else t for name, t in given.items() if t is not None}
    shape = NormShape(x.numel() // hidden, hidden, form, scalar is not None, quantize, dtype_name(x.dtype), repr(eps))
    return RMS_NORM, shape, inputs | dict(zip(("words", "counts"), inbox or (), strict=False))


define(
    "rms_norm(Tensor x, Tensor weight, float eps, Tensor? residual, Tensor? post_weight, Tensor? scalar, bool normed, "
    "bool quantize, Tensor? ahead=None, Tensor[]? inbox=None) -> Tensor[]",
    _norm_reference, _norm_shape, _norm_problem,
    lambda outputs, x: [t.view(*x.shape[:-1], t.shape[-1]) for t in outputs.values()],
)  # fmt: skip


@rule("toolkit::rms_norm")
def _effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Sequence[Tensor]) -> list[Effect]:
    """Return one kernel that reads x, the residual and a weight, and writes its results: one block per row.

    Two norms, one after the other, take about as long as two kernels.
    """
    x, weight, residual, twice = args[0], args[1], args[3], args[4] is not None and args[6]
    moved = nbytes(x) * (1 + (residual is not None)) + nbytes(weight) + sum(map(nbytes, out))
    return launches("rms_norm", 1, moved, floor=1.9 if twice else 1.0, blocks=x.numel() // x.shape[-1])
