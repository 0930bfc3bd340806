# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Running an operation on the virtual GPU: on the host tensors for its values, through `rules` for its effects.

Every operation arrives here: from `VirtualTensor.__torch_dispatch__`, or, where no operand is on the device yet (a
factory), from the PrivateUse1 key. Where CUDA has no kernel of its own (`rules.decomposes`), PyTorch's composite runs, and
its parts come back here one by one, as on CUDA. The first call of an operation makes its handler; later calls go
straight to it. This file doesn't know what anything costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from toolkit.gpu.virtual import sizes_only as sizes
from toolkit.gpu.virtual.effects import rules
from toolkit.gpu.virtual.host_kernels import call_of
from toolkit.gpu.virtual.host_room import LARGE, check_room, could_be_large, refuse_if_full
from toolkit.gpu.virtual.machine import Machine
from toolkit.gpu.virtual.scratch.libraries import SCRATCH, Rule
from toolkit.gpu.virtual.scratch.play import play
from toolkit.gpu.virtual.tensor import VirtualTensor, follow, hold, rehold, wrap

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Args, Kwargs], Any]

_CPU, _META = torch.device("cpu"), torch.device("meta")
_PLAIN = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.memory_format, torch.layout})
_NEVER = 1 << 30
_handlers: dict[Any, Handler] = {}
_machine: list[Machine] = []  # the card that is open; empty before the first

# In place, and may change shape, strides or storage: the wrapper must follow its host tensor.
_FACTORIES = {"arange", "eye", "linspace", "logspace", "range", "randperm"}  # those that fill an empty out=
_RESTRIDES = {
    "resize_", "resize_as_", "set_", "t_", "transpose_", "unsqueeze_", "squeeze_", "swapaxes_", "swapdims_", "as_strided_",
    "_resize_output_",
}  # fmt: skip
# Operands after the first may lie on the host: the indices of an indexing, lengths.
_MIXES = {
    "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "set_", "resize_as_",
    "_pack_padded_sequence", "_foreach_copy_",
}  # fmt: skip

# Needed by torch.tensor and its kin, which run with Python dispatch switched off, where the fallback isn't reached.
_CONSTRUCTING = (
    aten.copy_.default, aten.empty_strided.default, aten.empty.memory_format, aten._to_copy.default,
    aten._local_scalar_dense.default,
)  # fmt: skip
# Kernels on CUDA and on the CPU, which PyTorch would take apart for a device that has none of its own.
_WHOLE = (aten.silu_backward.default, aten.mish_backward.default, aten.native_channel_shuffle.default)


def machine() -> Machine:
    """The card that is open. Raises RuntimeError where none is."""
    if not _machine:
        raise RuntimeError('no virtual GPU is open: tk.device("virtual:h200") opens one')
    return _machine[0]


def open_machine(new: Machine) -> None:
    """Let `new` be the card that operations run on."""
    _machine[:] = [new]


def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run one operation of the dispatcher: `func` is an OpOverload, tensors are VirtualTensors or plain host tensors."""
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _handler(func)
    try:
        return handler(args, kwargs)
    except RuntimeError as error:
        refuse_if_full(_machine[0].memory if _machine else None, error)
        raise


VirtualTensor.run = staticmethod(run)  # type: ignore[assignment]


def _handler(func: Any) -> Handler:
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if name in SPECIAL:
        return SPECIAL[name](func)
    composite = None if func in _WHOLE else rules.decomposes(func)  # parts instead of a kernel of its own, on CUDA
    if composite is not None:
        return lambda args, kwargs: func._op_dk(composite, *args, **kwargs)
    aliases = [result.alias_info for result in schema.returns]
    if name in ("_conj", "_neg_view"):
        return _plain(func)
    if name == "_unsafe_view" or (aliases and all(alias is not None and not alias.is_write for alias in aliases)):
        return _view(func)
    host_from = 1 if name in _MIXES else _NEVER
    scratch = SCRATCH.get(name)
    if schema.is_mutable:
        first = schema.arguments[0].alias_info
        in_place = first is not None and first.is_write and len(schema.returns) == 1
        if name in _FACTORIES:
            return _makes(func) if scratch is None else _beside(_makes(func), scratch)
        writes = (_in_place if in_place and name not in _RESTRIDES else _writes)(func, host_from)
        return writes if scratch is None else _beside(writes, scratch)
    return _plain(func, host_from) if scratch is None else _with_scratch(func, host_from, scratch)


# ---- the kinds of operation


def _plain(func: Any, host_from: int = _NEVER) -> Handler:
    """Makes new tensors."""
    call = call_of(func)

    def plain(args: Args, kwargs: Kwargs) -> Any:
        hosts, named = _hosts(args, host_from), _named(kwargs, host_from)
        if could_be_large(hosts):
            check_room(machine().memory, func, hosts, named)
        out = call(*hosts, **named)
        if type(out) is torch.Tensor:
            hold(out, _machine[0])
            result = wrap(out)
        else:
            result = _wrap_new(out)
        _charge(func, args, kwargs, result)
        return result

    return plain


def _with_scratch(func: Any, host_from: int, scratch: Rule) -> Handler:
    """Makes new tensors, and takes memory of its own while it runs."""
    call = call_of(func)

    def plain(args: Args, kwargs: Kwargs) -> Any:
        hosts, named = _hosts(args, host_from), _named(kwargs, host_from)
        if could_be_large(hosts):
            check_room(machine().memory, func, hosts, named)
        out = call(*hosts, **named)
        script = scratch(args, kwargs, out)
        if script:
            play(script, out, _machine[0])
        result = _wrap_new(out)
        _charge(func, args, kwargs, result)
        return result

    return plain


def _beside(handler: Handler, scratch: Rule) -> Handler:
    """Writes its operands, and takes memory of its own while it runs."""

    def writes(args: Args, kwargs: Kwargs) -> Any:
        script = scratch(args, kwargs, None)  # before: what is written may be what it depends on
        result = handler(args, kwargs)
        if script:
            play(script, None, _machine[0])
        return result

    return writes


def _view(func: Any) -> Handler:
    """Shares its operand's storage: no memory, and nothing runs on the device."""
    call = func._op

    def view(args: Args, kwargs: Kwargs) -> Any:
        out = call(*_hosts(args), **_named(kwargs))
        _charge(func, args, kwargs, None)
        return wrap(out) if type(out) is torch.Tensor else _wrap_views(out)

    return view


def _in_place(func: Any, host_from: int = _NEVER) -> Handler:
    """Writes its first operand, and leaves its shape as it is."""
    call = call_of(func)

    def in_place(args: Args, kwargs: Kwargs) -> Any:
        if type(args[0]) is not VirtualTensor:
            raise _devices_differ(_CPU)
        call(*_hosts(args, host_from), **_named(kwargs, host_from))
        _charge(func, args, kwargs, args[0])
        return args[0]

    return in_place


def _writes(func: Any, host_from: int = _NEVER) -> Handler:
    """out=, resizing, lists written in place: operands may change shape, and results may be operands."""
    call = call_of(func)

    def writes(args: Args, kwargs: Kwargs) -> Any:
        out = call(*_hosts(args, host_from), **_named(kwargs, host_from))
        same = {}
        for tensor in _virtuals((*args, *kwargs.values())):
            same[id(tensor._host)] = tensor
            rehold(tensor._host, _machine[0])
            follow(tensor)
        result = _wrap_new(out, same)
        _charge(func, args, kwargs, result)
        return result

    return writes


def _makes(func: Any) -> Handler:
    """A factory into an empty out=: its size follows from numbers alone."""
    writes = _writes(func)

    def makes(args: Args, kwargs: Kwargs) -> Any:
        numbers = [abs(x) for x in args if type(x) in (int, float) and x]
        if math.prod(max(x, 1 / x) for x in numbers) > LARGE and not _virtuals(args):
            out = torch.empty(0, dtype=kwargs["out"].dtype, device=_META)
            machine().memory.check(func._op(*args, out=out).nbytes)
        return writes(args, kwargs)

    return makes


def _copy(func: Any) -> Handler:
    """copy_: the one place where values cross between host and device."""

    def copy(args: Args, kwargs: Kwargs) -> Any:
        hosts = _hosts(args, 0)
        if sizes.seen and (hosts[0].is_meta or hosts[1].is_meta):
            sizes.copy(hosts[0], hosts[1])
        else:
            func._op(*hosts, **kwargs)
        if hosts[0] is args[0] and hosts[0].is_meta:  # onto PyTorch's own meta device, which nothing reaches
            return args[0]
        _charge(func, args, kwargs, args[0])
        return args[0]

    return copy


def _item(func: Any) -> Handler:
    def item(args: Args, kwargs: Kwargs) -> Any:
        host = args[0]._host
        value = sizes.placeholder(host.dtype) if host.is_meta else func._op(host)
        _charge(func, args, kwargs, value)
        return value

    return item


def _empty(func: Any) -> Handler:
    """Memory without values. The card is asked before the host allocates its own."""

    def empty(args: Args, kwargs: Kwargs) -> Any:
        card = machine()
        kwargs = {**kwargs, "pin_memory": None}
        device = kwargs.get("device")
        if device is not None and device.index:
            raise RuntimeError(f"invalid device ordinal: there is one virtual GPU, vgpu:0, and {device} was asked for")
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        card.memory.check(math.prod(args[0]) * dtype.itemsize)
        kwargs = _named(kwargs)
        if card.sizes_only and not sizes.keeps_values(args[0], dtype):
            kwargs["device"] = _META
        out = func._op(*args, **kwargs)
        hold(out, card)
        result = wrap(out)
        _charge(func, args, kwargs, result)
        return result

    return empty


def _no_nested(func: Any) -> Handler:
    def refuse(args: Args, kwargs: Kwargs) -> Any:
        raise RuntimeError("the virtual GPU has no nested tensors, only strided ones: pad the parts, or keep them in a list")

    return refuse


def _one_hot(labels: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Zeros, and ones scattered into them, as on CUDA; PyTorch compares with a range on devices that it doesn't know."""
    if labels.dtype != torch.int64:
        raise RuntimeError("one_hot is only applicable to index tensor of type LongTensor.")
    if not labels.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    classes = int(labels.max()) + 1 if num_classes == -1 else num_classes
    zeros = torch.zeros((*labels.shape, classes), dtype=torch.int64, device=labels.device)
    return zeros.scatter_(-1, labels.unsqueeze(-1), 1)


SPECIAL: dict[str, Callable[[Any], Handler]] = {
    "copy_": lambda func: _beside(_copy(func), SCRATCH["copy_"]),
    "_local_scalar_dense": _item,
    "_nested_view_from_jagged": _no_nested,
    "empty": _empty,
    "empty_strided": _empty,
    "is_pinned": lambda func: lambda args, kwargs: False,
    "one_hot": lambda func: lambda args, kwargs: _one_hot(*args, **kwargs),
}


# ---- operands and results


def _hosts(args: Iterable[Any], host_from: int = _NEVER) -> list[Any]:
    """Operands as the host runs them.

    Raises RuntimeError, as CUDA does, for one that isn't on the device: from position `host_from` on they need not be, and
    single numbers never need to be.
    """
    out: list[Any] = []
    for i, x in enumerate(args):
        kind = type(x)
        if kind is VirtualTensor:
            out.append(x._host)
        elif kind in _PLAIN:
            out.append(x)
        elif kind is list or kind is tuple:
            out.append(_hosts(x, 0 if host_from <= i else _NEVER))
        elif kind is torch.device:
            out.append(_CPU)
        else:
            if i < host_from and isinstance(x, torch.Tensor) and x.dim():
                raise _devices_differ(x.device)
            out.append(x)
    return out


def _named(kwargs: Kwargs, host_from: int = _NEVER) -> Kwargs:
    return dict(zip(kwargs, _hosts(kwargs.values(), 0 if host_from < _NEVER else _NEVER), strict=True)) if kwargs else kwargs


def _devices_differ(other: torch.device) -> RuntimeError:
    return RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, vgpu:0 and {other}!")


def _virtuals(xs: Iterable[Any]) -> list[VirtualTensor]:
    found = []
    for x in xs:
        if type(x) is VirtualTensor:
            found.append(x)
        elif type(x) is list or type(x) is tuple:
            found.extend(_virtuals(x))
    return found


def _wrap_views(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return wrap(out)
    return type(out)(_wrap_views(x) for x in out) if isinstance(out, list | tuple) else out


def _wrap_new(out: Any, same: dict[int, VirtualTensor] | None = None) -> Any:
    """Results as device tensors; those that are operands (by identity of the host tensor) as the operand's own."""
    if isinstance(out, torch.Tensor):
        if same and id(out) in same:
            return same[id(out)]
        hold(out, _machine[0])
        return wrap(out)
    return type(out)(_wrap_new(x, same) for x in out) if isinstance(out, list | tuple) else out


def _charge(func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Let the operation's effects happen on the card."""
    card = _machine[0]
    happened = rules.effects(func, args, kwargs, out)
    if not happened:
        card.launch_nothing()
    for effect in happened:
        card.execute(effect)


# ---- registration


def register() -> list[torch.library.Library]:
    """Give the PrivateUse1 key its kernels: a fallback for everything, and those that are needed by name."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: run(func, args, kwargs), "PrivateUse1")
    named = torch.library.Library("aten", "IMPL")
    for func in (*_CONSTRUCTING, *_WHOLE):
        named.impl(func, _kernel(func), "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        named.impl("one_hot", _one_hot, key)
    return [everything, named]


def _kernel(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: run(func, args, kwargs)
