"""The operation that chooses the next token from logits."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.kernels.filters import Rules, next_token
from toolkit.ops.define import Problem, call, define, launches, on_gpu


def sample(logits: Tensor, rules: Rules, token: Tensor, told: Tensor) -> Tensor:
    """Write the next token for `logits` [vocab] into `token` [1] int64 and return it. The lowest id wins among equals.

    `told` [1] int64 is for the host: the token, or NO_TOKEN if its logit is NaN or infinite. A later step may feed `token`
    before the host knows. The step in `rules.state` is incremented, and the token is marked in `rules.seen`. On a GPU nothing
    is copied and the host doesn't wait, so a CUDA graph can capture the operation.
    """
    flags = rules.draw, rules.top_k, rules.top_p, rules.min_p
    operands = (logits, token, told, rules.numbers, rules.state, rules.work, rules.seen, rules.bias, *flags)
    if on_gpu(logits):
        call("sample", *operands)
    else:
        _reference(*operands)
    return token


def _reference(
    logits: Tensor, token: Tensor, told: Tensor, numbers: Tensor, state: Tensor, work: Tensor, seen: Tensor | None,
    bias: Tensor | None, draw: bool, top_k: int, top_p: bool, min_p: bool,
) -> None:  # fmt: skip
    chosen, said = next_token(logits, Rules(numbers, state, work, seen, bias, draw, top_k, top_p, min_p))
    token.copy_(chosen)
    told.copy_(said)
    state[1:].add_(1)
    if seen is not None:
        seen.index_fill_(0, token, True)


def _problem(
    logits: Tensor, token: Tensor, told: Tensor, numbers: Tensor, state: Tensor, work: Tensor, seen: Tensor | None,
    bias: Tensor | None, draw: bool, top_k: int, top_p: bool, min_p: bool,
) -> Problem:  # fmt: skip
    from toolkit.kernels.sample import SAMPLE, SampleShape

    flags = draw, seen is not None, bias is not None, top_k > 0, top_p, min_p
    given = {
        "logits": logits,
        "token": token,
        "told": told,
        "numbers": numbers,
        "state": state,
        "seen": seen,
        "bias": bias,
        "work": work,
    }
    inputs = {name: tensor for name, tensor in given.items() if tensor is not None}
    return SAMPLE, SampleShape(logits.shape[0], *flags, dtype_name(logits.dtype)), inputs


define(
    "sample(Tensor logits, Tensor(a!) token, Tensor(e!) told, Tensor numbers, Tensor(b!) state, Tensor(c!) work, "
    "Tensor(d!)? seen, Tensor? bias, bool draw, int top_k, bool top_p, bool min_p) -> ()",
    _reference, lambda *operands: None, _problem, lambda outputs, logits: None,
)  # fmt: skip


@rule("toolkit::sample")
def _effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: None) -> list[Effect]:
    """Return one kernel that chooses, and those that find the thresholds of the filters. Each reads the logits."""
    top_k, top_p, min_p = args[9:12]
    count = 1 + 3 * (top_k > 0) + 3 * top_p + (not top_k and (top_p or min_p))
    return launches("sample", count, count * nbytes(args[0]))
