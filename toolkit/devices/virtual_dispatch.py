"""Running an operation on the virtual GPU: on the host tensors for its values, through `rules` for its effects.

Every operation arrives here: from `VirtualTensor.__torch_dispatch__`, or, where no operand is on the device yet (a
factory), from the PrivateUse1 key. Where CUDA has no kernel of its own (`rules.decomposes`), PyTorch's composite runs, and
its parts come back here one by one, as on CUDA. The first call of an operation picks its handler; later calls go
straight to it. This file doesn't know what anything costs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from toolkit.devices import virtual_stub as rules
from toolkit.devices.virtual_machine import Machine
from toolkit.devices.virtual_tensor import VirtualTensor, follow, hold, rehold, wrap

aten = torch.ops.aten
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

CPU = torch.device("cpu")
_COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd  # type: ignore[attr-defined]
_PLAIN = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.memory_format, torch.layout})
_handlers: dict[Any, Handler] = {}
_machine: list[Machine] = []  # the card that is open; empty before the first

# In place, and may change shape, strides or storage: the wrapper must follow its host tensor.
_RESTRIDES = {
    "resize_", "resize_as_", "set_", "t_", "transpose_", "unsqueeze_", "squeeze_", "swapaxes_", "swapdims_", "as_strided_",
    "_resize_output_", "_reshape_alias_", "data",
}  # fmt: skip
# Operations whose operands may lie on the host beside the device: copies, and the indices of an indexing.
_MIXES = {
    "copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_", "_copy_from", "set_", "_pack_padded_sequence",
    "resize_as_", "empty_like", "new_empty", "new_empty_strided", "_unsafe_index", "_unsafe_index_put",
}  # fmt: skip


def machine() -> Machine:
    """The card that is open. Raises RuntimeError where none is."""
    if not _machine:
        raise RuntimeError('no virtual GPU is open: tk.device("virtual:h200") opens one')
    return _machine[0]


def open_machine(new: Machine) -> None:
    """Let `new` be the card that operations run on."""
    _machine[:] = [new]


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation of the dispatcher: `func` is an OpOverload, tensors are VirtualTensors or plain host tensors."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _choose(func)
    return handler(func, args, kwargs)


VirtualTensor.run = staticmethod(run)  # type: ignore[assignment]


def _choose(func: Any) -> Handler:
    name, schema = func._schema.name.removeprefix("aten::"), func._schema
    if name in SPECIAL:
        return SPECIAL[name]
    if rules.decomposes(func):
        return _composite
    loose = name in _MIXES
    if schema.is_mutable:
        writes_self = bool(schema.arguments) and schema.arguments[0].alias_info is not None and len(schema.returns) == 1
        if writes_self and name.endswith("_") and name not in _RESTRIDES and "out" not in func._overloadname:
            return _in_place_loose if loose else _in_place
        return _writes
    returns = [r.alias_info for r in schema.returns]
    if returns and all(alias is not None for alias in returns):
        return _view
    return _plain_loose if loose else _plain


# ---- handlers


def _composite(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func._op_dk(_COMPOSITE, *args, **kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result shares its operand's storage: nothing runs on the device."""
    out = func._op(*_hosts(args), **_hosts_by_name(kwargs))
    _charge(func, args, kwargs, None)
    if type(out) is torch.Tensor:
        return wrap(out)
    return _wrap_all(out)


def _plain(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loose: bool = False) -> Any:
    out = _call(func, _hosts(args, loose), _hosts_by_name(kwargs, loose))
    if type(out) is torch.Tensor:
        hold(out, _machine[0])
        result = wrap(out)
    else:
        result = _wrap_new(out)
    _charge(func, args, kwargs, result)
    return result


def _plain_loose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _plain(func, args, kwargs, loose=True)


def _in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], loose: bool = False) -> Any:
    target = args[0]
    if type(target) is not VirtualTensor:
        raise _devices_differ(target.device)
    _call(func, _hosts(args, loose), _hosts_by_name(kwargs, loose))
    _charge(func, args, kwargs, target)
    return target


def _in_place_loose(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _in_place(func, args, kwargs, loose=True)


def _writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """out=, resizing and lists written in place: operands may change shape, results may be operands."""
    loose = func._schema.name.removeprefix("aten::") in _MIXES
    out = _call(func, _hosts(args, loose), _hosts_by_name(kwargs, loose))
    same = {}
    for tensor in _virtuals((*args, *kwargs.values())):
        same[id(tensor._host)] = tensor
        rehold(tensor._host, _machine[0])
        follow(tensor)
    result = _wrap_new(out, same)
    _charge(func, args, kwargs, result)
    return result


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """copy_: the one place where values cross between host and device."""
    target, source = args[0], args[1]
    func._op(*_hosts(args, True), **kwargs)
    _charge(func, args, kwargs, target)
    return target


def _item(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    value = func._op(args[0]._host)
    _charge(func, args, kwargs, value)
    return value


def _empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Factories check that the memory is there before the host allocates its own."""
    card = machine()
    device = kwargs.get("device")
    if device is not None and torch.device(device).index:
        raise RuntimeError(f"invalid device ordinal: there is one virtual GPU, vgpu:0, and {device} was asked for")
    host_kwargs = _hosts_by_name(kwargs)
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    size, itemsize = args[0], (kwargs.get("dtype") or torch.get_default_dtype()).itemsize
    count = 1
    for n in size:
        count *= n
    card.memory.check(count * itemsize)
    out = func._op(*_hosts(args), **host_kwargs)
    hold(out, card)
    result = wrap(out)
    _charge(func, args, kwargs, result)
    return result


def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


SPECIAL: dict[str, Handler] = {
    "copy_": _copy,
    "_local_scalar_dense": _item,
    "empty": _empty,
    "empty_strided": _empty,
    "is_pinned": _is_pinned,
}


# ---- operands and results


def _call(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return func._op(*args, **kwargs)


def _hosts(args: Any, loose: bool = False) -> list[Any]:
    """Operands as the host runs them. Raises RuntimeError for one that isn't on the device, as CUDA would."""
    out = []
    for x in args:
        kind = type(x)
        if kind is VirtualTensor:
            out.append(x._host)
        elif kind in _PLAIN:
            out.append(x)
        elif kind is list or kind is tuple:
            out.append(_hosts(x, loose))  # type: ignore[arg-type]
        elif kind is torch.device:
            out.append(CPU)  # type: ignore[arg-type]
        elif isinstance(x, torch.Tensor):
            if x.dim() and not loose:
                raise _devices_differ(x.device)
            out.append(x)
        else:
            out.append(x)
    return out


def _hosts_by_name(kwargs: dict[str, Any], loose: bool = False) -> dict[str, Any]:
    return dict(zip(kwargs, _hosts(kwargs.values(), loose), strict=True)) if kwargs else kwargs


def _devices_differ(other: torch.device) -> RuntimeError:
    return RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, vgpu:0 and {other}!")


def _virtuals(xs: Any) -> list[VirtualTensor]:
    found = []
    for x in xs:
        if type(x) is VirtualTensor:
            found.append(x)
        elif type(x) is list or type(x) is tuple:
            found.extend(_virtuals(x))
    return found


def _wrap_all(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return wrap(out)
    return type(out)(_wrap_all(x) for x in out) if isinstance(out, list | tuple) else out


def _wrap_new(out: Any, same: dict[int, VirtualTensor] | None = None) -> Any:
    """Results as device tensors; those that are operands (by identity of the host tensor) as the operand's own."""
    if isinstance(out, torch.Tensor):
        if same and id(out) in same:
            return same[id(out)]
        hold(out, _machine[0])
        return wrap(out)
    return type(out)(_wrap_new(x, same) for x in out) if isinstance(out, list | tuple) else out


def _charge(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
    """Let the operation's effects happen on the card."""
    card = _machine[0]
    for effect in rules.effects(func, args, kwargs, out):
        card.execute(effect)


_libraries: list[torch.library.Library] = []  # kept: a library that is collected takes its kernels with it


def register() -> None:
    """Give the PrivateUse1 key its kernels: a fallback for everything, and those that torch.tensor needs by name.

    torch.tensor and its kin run with Python dispatch switched off, where the fallback isn't reached.
    """
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    named = torch.library.Library("aten", "IMPL")
    for func in (aten.copy_.default, aten.empty_strided.default, aten.empty.memory_format, aten._to_copy.default,
                 aten._local_scalar_dense.default):  # fmt: skip
        named.impl(func, _kernel(func), "PrivateUse1")
    _libraries.extend((everything, named))


def _kernel(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(func, args, kwargs)
