"""Modules moved to the virtual GPU keep their parameters: the same objects, shared ones still shared, uploaded once.

On CUDA `Module.to` and `parameter.data = ...` fill the parameter that is there, so that an optimiser made before goes on
with it. Where the kind of tensor changes PyTorch makes new parameters, or refuses; here the old object gets the new
one's contents. Knows no card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from toolkit.gpu.virtual.tensor import VirtualTensor

_apply = nn.Module._apply
_data: Any = torch.Tensor.data
_OF_A_KIND = ("_host", "_is_param")  # attributes that say what kind of tensor an object is; all others are the user's


def _apply_in_place(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply`, after which every parameter is the object that it was before."""
    before = dict(self._parameters)
    _apply(self, fn, recurse)
    for name, old in before.items():
        new = self._parameters.get(name)
        if new is old or new is None or old is None or old.is_meta:  # CUDA keeps those of the meta device no more than this
            continue
        if isinstance(old, VirtualTensor) or isinstance(new, VirtualTensor):
            _become(old, new)
            self._parameters[name] = old
    return self


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, also from one device to another."""
    if (type(value) is VirtualTensor) is (type(self) is VirtualTensor):
        _data.__set__(self, value)
        if type(value) is VirtualTensor:  # module.half(): the host tensor follows
            self._host = value._host  # type: ignore[attr-defined]
    else:
        moved = value.detach()
        _become(self, nn.Parameter(moved, self.requires_grad) if isinstance(self, nn.Parameter) else moved)


def _become(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let the object `old` be the tensor that `new` is; attributes that the user gave it stay."""
    given = {name: value for name, value in old.__dict__.items() if name not in _OF_A_KIND}
    old.__class__, new.__class__ = new.__class__, old.__class__
    old.__dict__, new.__dict__ = new.__dict__ | given, old.__dict__
    torch._C._swap_tensor_impl(old, new)  # type: ignore[attr-defined]


def install() -> None:
    """Replace `Module._apply` and the setter of `Tensor.data`, for the process; other devices' tensors are set as before."""
    nn.Module._apply = _apply_in_place  # type: ignore[method-assign]
    torch.Tensor.data = property(_data.__get__, _set_data)  # type: ignore[assignment, misc]
