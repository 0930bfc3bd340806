"""Keep the parameter objects when a module moves to or from the virtual GPU.

On CUDA, `Module.to` and `parameter.data = ...` fill the existing parameter, so that an optimizer created before still refers to
it, and a shared parameter is uploaded once. If the Python type of the tensor changes, as it does here, PyTorch creates new
parameters or raises; `install` patches both functions to swap the contents of the two tensor objects instead.

PyTorch's own `torch.__future__.set_swap_module_params_on_conversion(True)` cannot replace the patches. It raises if a parameter
has a weak reference or a view, drops attributes that the user set on a parameter, breaks a backward pass that began before the
move, and would do all of this to modules of other devices too, since it applies to the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from toolkit.core.signals import signals_deferred
from toolkit.gpu.virtual.tensor import OWN, VirtualTensor
from toolkit.gpu.virtual.torch_backend.subclasses import on_device, on_host

_apply = nn.Module._apply
_data: Any = torch.Tensor.data


def _apply_in_place(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """Run `Module._apply` so that every parameter stays the same object."""
    before = dict(self._parameters)
    _apply(self, fn, recurse)
    for name, old in before.items():
        new = self._parameters.get(name)
        if new is old or new is None or old is None or old.is_meta:  # as on CUDA, parameters on the meta device are replaced
            continue
        if isinstance(old, VirtualTensor) or isinstance(new, VirtualTensor):
            _become(old, new)
            self._parameters[name] = old
    return self


def _set_data(self: torch.Tensor, value: torch.Tensor) -> None:
    """Set `tensor.data = value`, also if `value` is on the other device."""
    if isinstance(value, VirtualTensor) is isinstance(self, VirtualTensor):
        _data.__set__(self, value)
        if isinstance(value, VirtualTensor):  # module.half(): the host tensor follows
            self._host = value._host  # type: ignore[attr-defined]
    else:
        _become(self, value.detach().requires_grad_(self.requires_grad and isinstance(self, nn.Parameter)))


def _become(old: torch.Tensor, new: torch.Tensor) -> None:
    """Move the contents of `new` into the object `old`, which keeps the attributes that the user set."""
    with signals_deferred:
        _exchange(old, new)


def _exchange(old: torch.Tensor, new: torch.Tensor) -> None:
    given = {name: value for name, value in old.__dict__.items() if name not in OWN}
    old.__class__, new.__class__ = _there(type(old), new), _there(type(new), old)
    old.__dict__, new.__dict__ = new.__dict__ | given, old.__dict__
    torch._C._swap_tensor_impl(old, new)  # type: ignore[attr-defined]


def _there(cls: type, tensor: torch.Tensor) -> type:
    """Return the class that a tensor of the class `cls` has on the device of `tensor`."""
    return on_device(on_host(cls)) if isinstance(tensor, VirtualTensor) else on_host(cls)


def install() -> None:
    """Replace `Module._apply` and the setter of `Tensor.data` in this process. They act as before on other devices."""
    nn.Module._apply = _apply_in_place  # type: ignore[method-assign]
    torch.Tensor.data = property(_data.__get__, _set_data)  # type: ignore[assignment, misc]
