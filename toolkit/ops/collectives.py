"""Operations in which all ranks of a model take part: the sum of their tensors, and their tensors joined.

All ranks get the same bits: their tensors are exchanged as they are, and summed in the order of the ranks. All ranks must run
the same operations in the same order. On a single rank, the functions return their operand and launch nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.core.errors import DeviceError, ModelError
from toolkit.core.ranks import gather
from toolkit.gpu.virtual.effects.effect import Effect, collective, nbytes
from toolkit.gpu.virtual.effects.operations import rule

ONE_SHOT_BYTES = 1 << 18  # up to this size an all-reduce of more than two ranks takes one phase

_library = torch.library.Library("toolkit", "FRAGMENT")


def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """Return the sum of the tensors of all ranks, which have one shape, in the dtype of `x`. It is computed in fp32."""
    if ranks == 1:
        return x
    _check(x)
    return torch.ops.toolkit.all_reduce(x, ranks)  # type: ignore[no-any-return]


def all_gather(x: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
    """Return the tensors of all ranks, joined along `dim`, in which that of rank i has `sizes[i]` entries."""
    if len(sizes) == 1:
        return x
    _check(x)
    return torch.ops.toolkit.all_gather(x, list(sizes), dim)  # type: ignore[no-any-return]


def _check(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        found = "the sum over the ranks has no gradient"
        raise ModelError("a gradient of a model over several ranks", found, "Run it under torch.no_grad()")


def _all_reduce(x: Tensor, ranks: int) -> Tensor:
    return gather(x).sum(0, dtype=torch.float32).to(x.dtype)


def _all_gather(x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    short = max(sizes) - len(rows)
    padded = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, short)) if short else rows
    return torch.cat([part[:size] for part, size in zip(gather(padded), sizes, strict=True)]).movedim(0, dim).contiguous()


def _not_on_cuda(x: Tensor, *rest: Any) -> NoReturn:
    raise DeviceError(
        "a model over several CUDA GPUs", "collectives on CUDA are not written yet", 'Use device="cpu" or "virtual:h200"'
    )


def _all_gather_shape(x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


for _schema, _on_host, _shape in (
    ("all_reduce(Tensor x, int ranks) -> Tensor", _all_reduce, lambda x, ranks: torch.empty_like(x)),
    ("all_gather(Tensor x, int[] sizes, int dim) -> Tensor", _all_gather, _all_gather_shape),
):
    _name = _schema.split("(")[0]
    _library.define(_schema)
    _library.impl(_name, _on_host, "CPU")
    _library.impl(_name, _not_on_cuda, "CUDA")
    torch.library.register_fake(f"toolkit::{_name}", _shape, lib=_library)


@rule("toolkit::all_reduce")
def _all_reduce_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return the sum, as symmetric memory computes it: small tensors in one phase, large ones in two that move fewer bytes.

    In one phase, each rank reads the tensors of all others. In two, it reads and sums its part, and then reads the other sums.
    """
    size, ranks = nbytes(args[0]), args[1]
    if size <= ONE_SHOT_BYTES or ranks == 2:
        return [collective("all_reduce", size, (ranks - 1) * size, ranks, "one-shot")]
    return [collective("all_reduce", size, 2 * (ranks - 1) * size // ranks, ranks, "two-shot")]


@rule("toolkit::all_gather")
def _all_gather_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return the exchange, in which each rank reads the tensors of all others."""
    return [collective("all_gather", nbytes(out), nbytes(out) - nbytes(args[0]), len(args[1]), "one-shot")]
