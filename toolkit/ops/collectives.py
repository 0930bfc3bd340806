"""Operations in which all ranks of a model take part: the sum of their tensors, and their tensors joined.

All ranks get the same bits: their tensors are exchanged as they are, and summed in the order of the ranks. All ranks must run
the same operations in the same order. On a single rank, the functions return their operand and launch nothing. On CUDA, see
`toolkit.ops.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling

from toolkit.core.distributed import gather
from toolkit.core.errors import ModelError
from toolkit.gpu.virtual.effects.effect import NCCL, Effect, collective, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Kwargs, Script, Take, scratch
from toolkit.ops import exchange
from toolkit.ops.define import describing, direct, is_launched
from toolkit.ops.tape import recording

_library = torch.library.Library("toolkit", "FRAGMENT")


def all_reduce(x: Tensor, ranks: int, sent: bool = False) -> Tensor:
    """Return the sum of the tensors of all ranks, which have one shape, in the dtype of `x`. It is computed in fp32.

    `sent` is for `summed`: `x` has been sent to the other ranks already.
    """
    if ranks == 1:
        return x
    _check(x)
    if _launches_directly(x):
        return exchange.all_reduce(x, ranks, sent)
    return torch.ops.toolkit.all_reduce(x, ranks, sent)  # type: ignore[no-any-return]


def summed(product: Callable[[list[Tensor]], Sequence[Tensor]], like: Tensor, values: int, ranks: int) -> list[Tensor]:
    """Return the results of `product`, the first of them summed over all ranks: `values` numbers in the dtype of `like`.

    On CUDA, `product` launches an operation with the tensors that it is given, by which that operation sends its result to the
    other ranks itself. The sum is then there sooner. The list is empty on all ranks if their GPUs or the size don't allow it.
    All ranks must call this, or none: a rank that calls `all_reduce` instead waits forever.
    """
    sends = ranks > 1 and like.is_cuda and is_launched() and not is_compiling()
    targets = exchange.targets(like.device, values * like.element_size()) if sends else []
    out, *others = product(targets)
    return [all_reduce(out, ranks, bool(targets) and not describing()), *others]


def all_gather(x: Tensor, sizes: Sequence[int], dim: int = -1) -> Tensor:
    """Return the tensors of all ranks, joined along `dim`, in which that of rank i has `sizes[i]` entries."""
    if len(sizes) == 1:
        return x
    _check(x)
    if _launches_directly(x):
        return exchange.all_gather(x, sizes, dim)
    return torch.ops.toolkit.all_gather(x, list(sizes), dim)  # type: ignore[no-any-return]


def _launches_directly(x: Tensor) -> bool:
    """Return whether the launch bypasses PyTorch's dispatcher: on CUDA, if nobody observes it or a tape records it."""
    return x.is_cuda and (direct(x) or recording() is not None)


def _check(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        found = "the sum over the ranks has no gradient"
        raise ModelError("a gradient of a model over several ranks", found, "Run it under torch.no_grad()")


def _all_reduce(x: Tensor, ranks: int, sent: bool = False) -> Tensor:
    return gather(x).sum(0, dtype=torch.float32).to(x.dtype)


def _all_gather(x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    rows = x.movedim(dim, 0)
    short = max(sizes) - len(rows)
    padded = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, short)) if short else rows
    return torch.cat([part[:size] for part, size in zip(gather(padded), sizes, strict=True)]).movedim(0, dim).contiguous()


def _all_reduce_shape(x: Tensor, ranks: int, sent: bool = False) -> Tensor:
    return torch.empty_like(x)


def _all_gather_shape(x: Tensor, sizes: Sequence[int], dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape)


for _schema, _on_host, _on_cuda, _shape in (
    ("all_reduce(Tensor x, int ranks, bool sent=False) -> Tensor", _all_reduce, exchange.all_reduce, _all_reduce_shape),
    ("all_gather(Tensor x, int[] sizes, int dim) -> Tensor", _all_gather, exchange.all_gather, _all_gather_shape),
):
    _name = _schema.split("(")[0]
    _library.define(_schema)
    _library.impl(_name, _on_host, "CPU")
    _library.impl(_name, _on_cuda, "CUDA")
    torch.library.register_fake(f"toolkit::{_name}", _shape, lib=_library)


@rule("toolkit::all_reduce")
def _all_reduce_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return the sum, as on CUDA: in one launch that sends the tensor to all others, or by NCCL and a sum of what it joined."""
    x, ranks = args[0], args[1]
    size = nbytes(x)
    small = exchange.is_small(x, size)
    found = [collective("all_reduce", size, (ranks - 1) * size, ranks, exchange.ONE_SHOT if small else NCCL)]
    return found if small else [*found, Effect("kernel", 0, "sum", moved_bytes=(ranks + 1) * size, cost="op_host_ns")]


@rule("toolkit::all_gather")
def _all_gather_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return the exchange, in which each rank receives the tensors of all others; those of NCCL are joined by a kernel."""
    x, sizes = args[0], args[1]
    small = exchange.is_small(x, _largest(out, sizes))
    algorithm = exchange.ONE_SHOT if small else NCCL
    found = [collective("all_gather", nbytes(out), nbytes(out) - nbytes(x), len(sizes), algorithm)]
    return found if small else [*found, Effect("kernel", 0, "cat", moved_bytes=2 * nbytes(out), cost="op_host_ns")]


def _largest(out: Tensor, sizes: Sequence[int]) -> int:
    """Return the bytes of the largest tensor among those that `out` joins."""
    return nbytes(out) // max(sum(sizes), 1) * max(sizes)


@scratch("toolkit::all_reduce")
def _all_reduce_scratch(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """NCCL joins the tensors of all ranks, which are then summed."""
    x, ranks = args[0], args[1]
    return () if exchange.is_small(x, nbytes(x)) else [Take(ranks * nbytes(x)), MAKE_RESULTS]


@scratch("toolkit::all_gather")
def _all_gather_scratch(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """NCCL joins tensors of one size: shorter ones are padded before, and all are cut to their sizes afterwards."""
    x, sizes = args[0], args[1]
    largest = _largest(out, sizes)
    if exchange.is_small(x, largest):
        return ()
    padded = [] if nbytes(x) == largest else [Take(largest)]
    return [*padded, Take(len(sizes) * largest), MAKE_RESULTS]
