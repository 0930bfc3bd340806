"""Operations in which all ranks of a model take part: the sum of their tensors, and their tensors joined.

All ranks get the same bits: their tensors are exchanged as they are, and summed in the order of the ranks. All ranks must run
the same operations in the same order. On a single rank, the functions return their operand and launch nothing. On CUDA, see
`toolkit.ops.exchange`.

The sum of a product's results can wait for the operation that needs it: the product returns a `Partial`, which norms and
mixtures of experts take instead of a tensor. In decode steps on CUDA they compute the sum in the same launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

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

# What a sum of what products have sent takes, of the time of a collective on its own. With this, steps of two models on two
# virtual H200s take as long as measured, within 2 % (`step_us` in bench/results/h200x2_ranks_tuned.json).
SENT_FLOOR = 0.45

_library = torch.library.Library("toolkit", "FRAGMENT")
_T = TypeVar("_T")


@dataclass(eq=False)
class Partial:
    """This rank's share of a sum over all ranks that is still to be computed (a term of PyTorch's DTensor).

    Attributes:
        share: The share; the sum has its shape and its dtype.
        ranks: The number of ranks.
        sent: Whether the product has sent its result to all ranks. Then `share` only has the memory for the sum, which must be
            taken before another product sends: by `sum`, or by an operation. If an error other than that of too little memory
            comes first, leave the process group.
        inbox: By which an operation receives what the ranks have sent; empty if it can't.
        taken: Whether an operation has received the sum. Nobody else has it then.
    """

    share: Tensor
    ranks: int
    sent: bool = False
    inbox: Sequence[Tensor] = ()
    taken: bool = False

    def sum(self) -> Tensor:
        """Return the sum over all ranks, computed in fp32. Raises ModelError if an operation has taken it."""
        if self.taken:
            found, do = "the operation that used it received it, and nobody else has it", "Use the result of that operation"
            raise ModelError("a sum over ranks", found, do)
        if not self.sent:
            self.share = all_reduce(self.share, self.ranks)
        elif not describing():
            _all_reduce_sent(self.share, self.ranks)
        self.ranks, self.sent = 1, False
        return self.share

    @property
    def is_received(self) -> bool:
        """Whether an operation can take the sum, instead of its caller: a single row that was sent, on CUDA."""
        return self.sent and not self.taken and len(self.inbox) > 0 and self.share.numel() == self.share.shape[-1]

    def taken_by(self, operation: Callable[[Sequence[Tensor]], _T]) -> _T:
        """Return `operation(inbox)`, which launches an operation that receives the sum. Needs `is_received`."""
        assert self.is_received
        try:
            found = operation(self.inbox)
        except torch.OutOfMemoryError:
            self.sum()  # what was sent must not stay there
            raise
        if not describing():
            exchange.announce(self.share, self.ranks)
        self.taken = True
        return found


def share_of(x: Tensor | Partial) -> Tensor:
    """Return a tensor with the shape, dtype and device of x."""
    return x.share if isinstance(x, Partial) else x


def whole(x: Tensor | Partial) -> Tensor:
    """Return x, the sum over all ranks if it is a `Partial`."""
    return x.sum() if isinstance(x, Partial) else x


def all_reduce(x: Tensor, ranks: int) -> Tensor:
    """Return the sum of the tensors of all ranks, which have one shape, in the dtype of `x`. It is computed in fp32."""
    if ranks == 1:
        return x
    _check(x)
    if _launches_directly(x):
        return exchange.all_reduce(x, ranks)
    return torch.ops.toolkit.all_reduce(x, ranks)  # type: ignore[no-any-return]


def partial_of(
    product: Callable[[list[Tensor]], Sequence[Tensor]], device: torch.device, n_bytes: int, ranks: int
) -> tuple[Tensor | Partial, Sequence[Tensor]]:
    """Return the results of `product`: the first one, of `n_bytes`, as a `Partial`, and the others. They are on `device`.

    On CUDA, `product` launches an operation with the tensors that it is given, by which that operation sends its result to all
    ranks itself. The list is empty on all ranks if their GPUs or the size don't allow it. All ranks must call this, or none: a
    rank that calls `all_reduce` instead waits forever. With one rank, the first result is a tensor.
    """
    if ranks == 1:
        first, *others = product([])
        return first, others
    sends = is_launched() and not is_compiling() and exchange.can_send(device, n_bytes)
    sent = exchange.inbox_of(device) if sends and device.type == "cuda" else None
    share, *others = product([] if sent is None else [sent.targets, sent.counts])
    return Partial(share, ranks, sends, () if sent is None else (sent.words, sent.counts)), others


def _all_reduce_sent(share: Tensor, ranks: int) -> None:
    """Write the sum of what all ranks have sent to `share`."""
    if _launches_directly(share):
        exchange.all_reduce_sent(share, ranks)
    else:
        torch.ops.toolkit.all_reduce_sent_(share, ranks)


def all_gather(x: Tensor, sizes: Sequence[int], dim: int = -1, fp32: bool = False) -> Tensor:
    """Return the tensors of all ranks, joined along `dim`, in which that of rank i has `sizes[i]` entries.

    With `fp32`, the result is converted. On CUDA, small tensors are converted in the same launch.
    """
    if len(sizes) == 1:
        return x.float() if fp32 else x
    _check(x)
    if fp32 and not exchange.is_small(x, exchange.bytes_with(x, max(sizes), dim)):  # NCCL joins them, and doesn't convert
        return all_gather(x, sizes, dim).float()
    if _launches_directly(x):
        return exchange.all_gather(x, sizes, dim, fp32)
    return torch.ops.toolkit.all_gather(x, list(sizes), dim, fp32)  # type: ignore[no-any-return]


def _launches_directly(x: Tensor) -> bool:
    """Return whether the launch bypasses PyTorch's dispatcher: on CUDA, if nobody observes it or a tape records it."""
    return x.is_cuda and (direct(x) or recording() is not None)


def _check(x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        found = "the sum over the ranks has no gradient"
        raise ModelError("a gradient of a model over several ranks", found, "Run it under torch.no_grad()")


def _all_reduce(x: Tensor, ranks: int) -> Tensor:
    return gather(x).sum(0, dtype=torch.float32).to(x.dtype)


def _all_gather(x: Tensor, sizes: Sequence[int], dim: int, fp32: bool = False) -> Tensor:
    rows = x.movedim(dim, 0)
    short = max(sizes) - len(rows)
    padded = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, short)) if short else rows
    found = torch.cat([part[:size] for part, size in zip(gather(padded), sizes, strict=True)])
    return (found.float() if fp32 else found).movedim(0, dim).contiguous()


def _all_reduce_in_place(x: Tensor, ranks: int) -> None:
    x.copy_(_all_reduce(x, ranks))


def _all_reduce_shape(x: Tensor, ranks: int) -> Tensor:
    return torch.empty_like(x)


def _all_gather_shape(x: Tensor, sizes: Sequence[int], dim: int, fp32: bool = False) -> Tensor:
    shape = list(x.shape)
    shape[dim] = sum(sizes)
    return x.new_empty(shape, dtype=torch.float32 if fp32 else x.dtype)


for _schema, _on_host, _on_cuda, _shape in (
    ("all_reduce(Tensor x, int ranks) -> Tensor", _all_reduce, exchange.all_reduce, _all_reduce_shape),
    (
        "all_reduce_sent_(Tensor(a!) x, int ranks) -> ()",
        _all_reduce_in_place,
        exchange.all_reduce_sent,
        lambda x, ranks: None,
    ),
    (
        # A flag instead of a dtype: code that PyTorch 2.11 has compiled passes torch.float64 for torch.float32.
        "all_gather(Tensor x, int[] sizes, int dim, bool fp32=False) -> Tensor",
        _all_gather,
        exchange.all_gather,
        _all_gather_shape,
    ),
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


@rule("toolkit::all_reduce_sent_")
def _all_reduce_sent_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: None) -> list[Effect]:
    """Return the sum, which waits for the other ranks. On CUDA, the launch that needs the sum of one token computes it."""
    x, ranks = args[0], args[1]
    size = nbytes(x)
    return [collective("all_reduce", size, (ranks - 1) * size, ranks, exchange.ONE_SHOT)._replace(floor=SENT_FLOOR)]


@rule("toolkit::all_gather")
def _all_gather_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return the exchange, in which each rank receives the tensors of all others; those of NCCL are joined by a kernel."""
    x, sizes, dim = args[:3]
    small, size = exchange.is_small(x, exchange.bytes_with(x, max(sizes), dim)), exchange.bytes_with(x, sum(sizes), dim)
    found = [collective("all_gather", size, size - nbytes(x), len(sizes), exchange.ONE_SHOT if small else NCCL)]
    return found if small else [*found, Effect("kernel", 0, "cat", moved_bytes=2 * size, cost="op_host_ns")]


@scratch("toolkit::all_reduce")
def _all_reduce_scratch(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """NCCL joins the tensors of all ranks, which are then summed."""
    x, ranks = args[0], args[1]
    return () if exchange.is_small(x, nbytes(x)) else [Take(ranks * nbytes(x)), MAKE_RESULTS]


@scratch("toolkit::all_gather")
def _all_gather_scratch(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """NCCL joins tensors of one size: shorter ones are padded before, and all are cut to their sizes afterwards."""
    x, sizes, dim = args[:3]
    largest = exchange.bytes_with(x, max(sizes), dim)
    if exchange.is_small(x, largest):
        return ()
    padded = [] if nbytes(x) == largest else [Take(largest)]
    return [*padded, Take(len(sizes) * largest), MAKE_RESULTS]
