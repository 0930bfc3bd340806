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

# Operations that a backward pass runs in place on CUDA, with the formulas that do so: sums of gradients, and writes into fresh
# zeros.
_SELECTING = ("Max", "Min", "Sort", "Topk", "Kthvalue", "Median", "Nanmedian", "Mode")  # value_selecting_reduction_backward
_GATHERING = ("Gather", "Cummax", "Cummin")
# Two gradients of the same formula are summed in place if it is one of these. Others have sums inside, which are not in place.
_WITHOUT_SUMS = ("Mul", "Sub", "Add", "Cat", "Stack", "Mm", "Bmm", "Scaled")
IN_PLACE_BACKWARD = {
    "add": ("",), "index_put": ("Index",), "index_add": ("IndexSelect",), "scatter_add": _GATHERING, "scatter": _SELECTING,
}  # fmt: skip
# References to an operand that only one place in C++ holds, as counted inside a handler: those of Python, and those of C++.
_PYTHON_REFERENCES, _CPP_REFERENCES = 4, 4
_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda self: 0)  # not in every version


def in_place_on_cuda(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Return whether CUDA writes the result of an operation of IN_PLACE_BACKWARD into its first operand.

    It does so in a backward pass without a graph, and when `linear` adds a bias to a product, if nobody else holds the operand
    or shares its memory.
    """
    self = args[0]
    bias = name == "add" and type(args[1]) is VirtualTensor and args[1].dim() == 1 < self.dim()
    if kwargs or not (bias or (torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled())):
        return False
    if type(self) is not VirtualTensor or sys.getrefcount(self) > _PYTHON_REFERENCES or type(out) is not torch.Tensor:
        return False
    if name == "add" and _use_count(self) > _CPP_REFERENCES:  # the others write into fresh zeros
        return False
    host = self._host
    if not bias:
        node = torch._C._current_autograd_node()
        if node is None:
            return False
        own = getattr(self, "_made_by", None) == node._sequence_nr()
        if not node.name().startswith(_WITHOUT_SUMS if name == "add" and own else IN_PLACE_BACKWARD[name]):
            return False
    shared = torch._C._storage_Use_Count(host.untyped_storage()._cdata) > 2  # one for the tensor, one for the question
    return not shared and (out.shape, out.dtype, out.stride()) == (host.shape, host.dtype, host.stride())


def note_maker(result: VirtualTensor) -> None:
    """Note the node of the backward pass that makes `result`, if one does."""
    if torch._C._current_graph_task_id() != -1 and (node := torch._C._current_autograd_node()) is not None:
        result._made_by = node._sequence_nr()
