# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Operations that return a new tensor here, and write into their first operand on CUDA.

For a subclass of Tensor, as the virtual GPU's is, PyTorch runs functional forms (isTensorSubclassLike). The result then takes
over the device memory of the operand. The host keeps both tensors, so that no value depends on this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from toolkit.gpu.virtual.tensor import VirtualTensor
from toolkit.gpu.virtual.threads import called_by_engine

# Operations that a backward pass runs in place on CUDA, with the formulas that do so: sums of gradients, and writes into fresh
# zeros.
_SELECTING = ("Max", "Min", "Sort", "Topk", "Kthvalue", "Median", "Nanmedian", "Mode")  # value_selecting_reduction_backward
_GATHERING = ("Gather", "Cummax", "Cummin")
# Two gradients of the same formula are summed in place if it is one of these. Others have sums inside, which are not in place.
_WITHOUT_SUMS = ("Mul", "Sub", "Add", "Cat", "Stack", "Mm", "Bmm", "Scaled")
IN_PLACE_BACKWARD = {
    "add": ("",), "index_put": ("Index",), "index_add": ("IndexSelect",), "scatter_add": _GATHERING, "scatter": _SELECTING,
}  # fmt: skip
_held_once = (0, 0)  # references to an operand that one place in C++ holds; `count_references` sets them
_use_count: Callable[[torch.Tensor], int] | None = getattr(torch.Tensor, "_use_count", None)  # not in every version


def in_place_on_cuda(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Return whether CUDA writes the result of an operation of IN_PLACE_BACKWARD into its first operand.

    It does so in a backward pass without a graph, if the engine or one of PyTorch's formulas calls the operation, and nobody
    else holds the operand or shares its memory.
    """
    if kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or not called_by_engine():
        return False
    if type(args[0]) is not VirtualTensor or type(out) is not torch.Tensor:
        return False
    python, cpp = _references(args)
    if python > _held_once[0] or (name == "add" and not 0 < cpp <= _held_once[1]):  # the others write into fresh zeros
        return False
    self, node = args[0], torch._C._current_autograd_node()
    if node is None or "::" in node.name():  # a function of TorchScript or of an extension
        return False
    own = getattr(self, "_made_by", None) == node._sequence_nr()
    if not node.name().startswith(_WITHOUT_SUMS if name == "add" and own else IN_PLACE_BACKWARD[name]):
        return False
    host = self._host
    shared = torch._C._storage_Use_Count(host.untyped_storage()._cdata) > 2  # one for the tensor, one for the question
    return not shared and (out.shape, out.dtype, out.stride()) == (host.shape, host.dtype, host.stride())


def _references(args: tuple[Any, ...]) -> tuple[int, int]:
    """Return the number of references to an operand, as counted inside a handler: those of Python, and those of C++.

    The latter are 0 if this version of PyTorch doesn't count them. No sum of gradients is then taken as made in place, so that
    the peak is too high rather than too low.
    """
    return sys.getrefcount(args[0]), 0 if _use_count is None else _use_count(args[0])


def count_references() -> None:
    """Count the references to an operand that only one place in C++ holds, which depend on the versions of Python and PyTorch.

    `linear` has one: the product to which it adds a bias. Must not be called from inside an operation.
    """

    class Probe(torch.Tensor):
        host: torch.Tensor
        __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            if func is torch.ops.aten.add.Tensor:
                global _held_once
                _held_once = _references(args)
            return probe(func(*[getattr(x, "host", x) for x in args]))

    def probe(host: torch.Tensor) -> Probe:
        made = torch.Tensor._make_wrapper_subclass(Probe, host.size(), host.stride(), host.storage_offset())  # type: ignore[attr-defined]
        made.host = host
        return made

    # Not contiguous, so that the bias is not part of the product.
    operands = (probe(torch.ones(2, 3, 4).transpose(0, 1)), probe(torch.ones(5, 4)), probe(torch.ones(5)))
    with torch.inference_mode(False):
        torch.ops.aten.linear(*operands)


def note_maker(result: VirtualTensor) -> None:
    """Note the node of the backward pass that makes `result`, if one does."""
    if torch._C._current_graph_task_id() != -1 and (node := torch._C._current_autograd_node()) is not None:
        result._made_by = node._sequence_nr()
