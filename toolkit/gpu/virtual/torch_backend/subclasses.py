# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Subclasses of torch.Tensor, such as nn.Parameter, on the virtual GPU.

There, a tensor of the class `T` has a class of the same name, derived from `T` and from VirtualTensor. `install` replaces the
functions of PyTorch that make a tensor of a given class.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.fx.experimental import proxy_tensor

from toolkit.gpu.virtual.tensor import VirtualTensor

_make_subclass: Any = torch.Tensor._make_subclass
_new_parameter: Any = nn.Parameter.__new__
_classes: dict[type, Any] = {torch.Tensor: VirtualTensor}
_hosts: dict[type, type] = {VirtualTensor: torch.Tensor}


def on_host(cls: type) -> type:
    """Return the class that a tensor of the class `cls` has on the host."""
    return _hosts.get(cls, cls)


def on_device(cls: type) -> Any:
    """Return the class that a tensor of the class `cls` has on the virtual GPU. Raises TypeError if it dispatches itself."""
    if issubclass(cls, VirtualTensor):
        return cls
    if cls not in _classes:
        if cls.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # type: ignore[attr-defined]
            raise TypeError(f"the virtual GPU does not support {cls.__name__}, a subclass of Tensor with __torch_dispatch__")
        made = types.new_class(cls.__name__, (cls, VirtualTensor), exec_body=lambda body: body.update(_body(cls)))
        _classes[cls], _hosts[made] = made, cls
    return _classes[cls]


def _body(cls: Any) -> dict[str, Any]:
    """Return what the class of device tensors defines itself: wherever `cls` refers to classes, it gets those of the host."""
    body: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    body["__new__"] = lambda _, *args, **kwargs: cls.__new__(cls, *args, **kwargs)
    if cls.__torch_function__ is not torch._C._disabled_torch_function_impl:

        def torch_function(_: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cls.__torch_function__(func, tuple(map(on_host, types)), args, kwargs or {})

        body["__torch_function__"] = classmethod(torch_function)

    def reduce(self: Any, protocol: Any) -> Any:
        make, args, *rest = super(on_device(cls), self).__reduce_ex__(protocol)
        return on_host(make), tuple(on_host(x) if isinstance(x, type) else x for x in args), *rest

    body["__reduce_ex__"] = reduce
    if hasattr(cls, "cls_to_become"):  # an uninitialized parameter or buffer of a lazy module
        body["cls_to_become"] = on_device(cls.cls_to_become)
    return body


def _of_class(cls: type, data: Any, requires_grad: bool = False, **kwargs: Any) -> Any:
    """Replace torch.Tensor._make_subclass. torch.compile requires these names; PyTorch's own function has `require_grad`."""
    requires_grad = kwargs.pop("require_grad", requires_grad)
    if not isinstance(data, VirtualTensor):
        return _make_subclass(cls, data, requires_grad, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        made = data.detach().requires_grad_(requires_grad)
    made.__class__ = on_device(cls)
    return made


def _parameter(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
    """Replace nn.Parameter.__new__, which would only mark a tensor of another class than torch.Tensor as a parameter."""
    data = torch.empty(0) if data is None else data
    if type(data) in (VirtualTensor, on_device(nn.Parameter)):
        return _of_class(cls, data, requires_grad)
    return _new_parameter(cls, data, requires_grad)


def _as_subclass(self: VirtualTensor, cls: type) -> Any:
    """Replace Tensor.as_subclass."""
    made = torch.ops.aten.alias.default(self)
    made.__class__ = on_device(cls)
    return made


def install() -> None:
    """Replace the functions of PyTorch in this process. They act as before on other devices."""
    torch.Tensor._make_subclass = staticmethod(_of_class)  # type: ignore[method-assign, assignment]
    nn.Parameter.__new__ = staticmethod(_parameter)  # type: ignore[method-assign, assignment]
    VirtualTensor.__new__ = lambda _, *args, **kwargs: torch.Tensor(*args, **kwargs)  # type: ignore[method-assign, assignment]
    VirtualTensor.as_subclass = _as_subclass  # type: ignore[method-assign, assignment]
    # Otherwise, make_fx would record an operation with a tensor from outside of the function as a constant.
    proxy_tensor.HANDLED_TYPES += (VirtualTensor, on_device(nn.Parameter))  # type: ignore[assignment]
