"""The operation that turns logits into the next token and its embedding row: the boundary between two decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.kernels.noise import gumbel
from toolkit.ops.define import Problem, call, counters, define, dtype_name, launches
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.schemes import SCHEMES


def sample_embed(
    logits: Tensor, table: Tensor | PackedMatrix, dtype: torch.dtype, scale: float, token: Tensor,
    draw: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Write the next token for fp32 `logits` [vocab] into `token` [1] int64 and return its row of `table` times `scale`.

    Greedy by default, with the lowest id among equals. With `draw` = (temperature fp64 [1], key int64 [1] from `mixed_seed`,
    step int64 [1]) the token has the highest logit / temperature + noise, and the step is incremented. The row is [1, hidden]
    in `dtype`. Needs a GPU.
    """
    packed = table if isinstance(table, PackedMatrix) else None
    parts, scheme = ([table], "") if packed is None else (list(packed.parts().values()), packed.scheme.name)
    given = (None, None, None) if draw is None else draw
    return call("sample_embed", logits, parts, scheme, dtype, scale, token, *given)  # type: ignore[no-any-return]


def _row(parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float, token: Tensor) -> Tensor:
    rows = [part.index_select(0, token) for part in parts]
    names = SCHEMES[scheme].parts() if scheme else ()
    row = dequantize(SCHEMES[scheme], dict(zip(names, rows, strict=True)), dtype) if scheme else rows[0]
    return row if scale == 1.0 else row * scale


def _reference(
    logits: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float, token: Tensor,
    temperature: Tensor | None, key: Tensor | None, step: Tensor | None,
) -> Tensor:  # fmt: skip
    scores = logits
    if temperature is not None and key is not None and step is not None:
        scores = logits.double() * (1 / temperature) + gumbel(key, step, len(logits))
        step.add_(1)
    token.copy_(scores.argmax(-1, keepdim=True))
    return _row(parts, scheme, dtype, scale, token)


def _shape(logits: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, *rest: Any) -> Tensor:
    per = next(iter(SCHEMES[scheme].parts().values()))[1] if scheme else 1
    return logits.new_empty(1, parts[0].shape[1] * per, dtype=dtype)


def _problem(
    logits: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float, token: Tensor,
    temperature: Tensor | None, key: Tensor | None, step: Tensor | None,
) -> Problem:  # fmt: skip
    from toolkit.kernels.sample_embed import SAMPLE_EMBED, SampleShape

    hidden = _shape(logits, parts, scheme, dtype).shape[1]
    shape = SampleShape(
        logits.shape[0], hidden, scheme or dtype_name(dtype), temperature is not None, scale=repr(scale),
        logits=dtype_name(logits.dtype), dtype=dtype_name(dtype),
    )  # fmt: skip
    names = SCHEMES[scheme].parts() if scheme else ("table",)
    inputs = {"logits": logits, "counter": counters(logits, 1), "token": token, **dict(zip(names, parts, strict=True))}
    if temperature is not None and key is not None and step is not None:
        inputs |= {"temperature": temperature, "key": key, "step": step}
    return SAMPLE_EMBED, shape, inputs


define(
    "sample_embed(Tensor logits, Tensor[] parts, str scheme, ScalarType dtype, float scale, Tensor(a!) token, "
    "Tensor? temperature, Tensor? key, Tensor(b!)? step) -> Tensor",
    _reference, _shape, _problem, lambda outputs, logits: outputs["row"],
)  # fmt: skip


@rule("toolkit::sample_embed")
def _effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return one kernel that reads the logits once, and one row of the table."""
    return launches("sample_embed", 1, nbytes(args[0]) + 2 * nbytes(out))
