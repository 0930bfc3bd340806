# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Run operations on the virtual GPU: host tensors compute the values, and `effects.lookup` says what CUDA would do.

Every operation arrives here: from `VirtualTensor.__torch_dispatch__`, or, if no operand is on the device (a factory), from the
PrivateUse1 dispatch key. If CUDA has no kernel for an operation (`decomposes`), PyTorch's composite runs, and its parts arrive
here one by one, as on CUDA. The first call of an operation creates its handler, which later calls reuse.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from toolkit.gpu.virtual import sizes_only as sizes
from toolkit.gpu.virtual.dispatch_keys import parts_of
from toolkit.gpu.virtual.effects.lookup import SAME_DEVICE, decomposes, effects, is_view
from toolkit.gpu.virtual.host_kernels import call_of, check_generator
from toolkit.gpu.virtual.host_room import LARGE, check_room, could_be_large, raise_if_full
from toolkit.gpu.virtual.in_place import IN_PLACE_BACKWARD, in_place_on_cuda, note_maker
from toolkit.gpu.virtual.lifetimes import settle
from toolkit.gpu.virtual.machine import Machine
from toolkit.gpu.virtual.scratch import (  # noqa: F401  register all rules
    convolutions,
    decompositions,
    indexing,
    layers,
    recurrent,
    sorting,
    sparse,
)
from toolkit.gpu.virtual.scratch.script import SCRATCH, Rule, play
from toolkit.gpu.virtual.tensor import VirtualTensor, follow, hold, rehold, take_over, wrap
from toolkit.gpu.virtual.threads import finish, handle_signals, here

aten = torch.ops.aten
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Args, Kwargs], Any]

COMPILED = (
    "torch.compile is not supported on the virtual GPU, which can't predict the kernels and the memory of compiled code. "
    'To run the same program operation by operation, call torch.compiler.set_stance("force_eager") first'
)
NESTED = (
    "the virtual GPU does not support nested tensors outside of the fast path of nn.TransformerEncoder: pad the parts, or keep "
    "them in a list. enable_nested_tensor=False avoids that path."
)
_CPU, _META = torch.device("cpu"), torch.device("meta")
_PLAIN = frozenset({int, float, bool, complex, str, type(None), torch.dtype, torch.memory_format, torch.layout})
_NEVER, _NO_NUMBERS = 1 << 30, 1 << 31  # see `_hosts`
_handlers: dict[Any, Handler] = {}
_machine: Machine | None = None  # the machine of the virtual GPU that is open

_FACTORIES = {"arange", "eye", "linspace", "logspace", "range", "randperm"}  # operations that can resize an empty out=
_RESTRIDES = {  # in-place operations that may change shape, strides or storage: the wrapper must follow its host tensor
    "resize_", "resize_as_", "set_", "t_", "transpose_", "unsqueeze_", "squeeze_", "swapaxes_", "swapdims_", "as_strided_",
    "_resize_output_",
}  # fmt: skip
_MIXES = {  # operations whose operands after the first may be on the host: indices, lengths
    "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "set_", "resize_as_",
    "_pack_padded_sequence", "_foreach_copy_",
}  # fmt: skip
_PUTS = {"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"}  # their values are on the device, indices may not
# Operations whose composites make an empty tensor, by the bytes from which it has no values if the operand has none.
_LIKE = {"clone": 0, "_to_copy": 0} | dict.fromkeys(("empty_like", "new_empty", "new_empty_strided"), sizes.KEPT_BYTES + 1)

# torch.tensor and similar functions run with Python dispatch switched off, where the fallback is not reached.
_CONSTRUCTING = (
    aten.copy_.default, aten.empty_strided.default, aten.empty.memory_format, aten._to_copy.default,
    aten._local_scalar_dense.default,
)  # fmt: skip
# Operations with kernels on CUDA and the CPU, which PyTorch would decompose for other devices.
_WHOLE = (aten.silu_backward.default, aten.mish_backward.default, aten.native_channel_shuffle.default)


class SparseOperand(RuntimeError):
    """An operand has a sparse layout, for which `SPARSE` runs the operation."""


def machine() -> Machine:
    """Return the machine of the virtual GPU that is open. Raises RuntimeError if none is."""
    if _machine is None:
        raise RuntimeError('no virtual GPU is open: tk.device("virtual:h200") opens one')
    return _machine


def open_machine(new: Machine) -> None:
    """Make `new` the machine that operations run on."""
    global _machine
    _machine = new


def run(func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run the OpOverload `func`; tensors among the operands are VirtualTensors or plain host tensors.

    Raises RuntimeError inside a function that torch.compile compiles.
    """
    if get_eval_frame_callback():  # torch.compile runs this operation
        raise RuntimeError(COMPILED)
    settle()
    handle_signals()
    handler = _handlers.get(func)
    if handler is None:
        handler = _handlers[func] = _handler(func)
    graph = here().graph
    if graph is not None:
        graph.begin(func, args, kwargs)
    try:
        return handler(args, kwargs)
    except SparseOperand:
        pass
    except RuntimeError as error:
        raise_if_full(_machine.memory if _machine else None, error)
        raise
    return SPARSE[0](func, args, kwargs)


VirtualTensor.run = staticmethod(run)  # type: ignore[assignment]


def _handler(func: Any) -> Handler:
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if name in SPECIAL:
        return SPECIAL[name](func)
    composite = None if func in _WHOLE else decomposes(func)
    if composite is not None and name in _LIKE:
        return _like(func, composite, _LIKE[name])
    if composite is not None:
        return parts_of(func, composite)
    if is_view(schema) and name not in ("_conj", "_neg_view"):
        return _view(func)
    host_from = 1 if name in _MIXES else _NO_NUMBERS if name in SAME_DEVICE else _NEVER
    scratch = SCRATCH.get(name)
    if schema.is_mutable:
        first = schema.arguments[0].alias_info
        in_place = first is not None and first.is_write and len(schema.returns) == 1
        if name in _FACTORIES:
            handler = _factory(func)
        else:
            handler = (_in_place if in_place and name not in _RESTRIDES else _writes)(func, host_from)
        handler = handler if scratch is None else _with_temporaries(handler, scratch)
    else:
        handler = plain(func, host_from, scratch)
    return _with_values_here(handler) if name in _PUTS else handler


# ---- handlers


def plain(func: Any, host_from: int = _NEVER, scratch: Rule | None = None) -> Handler:
    """Return a handler of an operation that returns new tensors; `scratch` gives the temporaries that it needs."""
    call = call_of(func)
    name = func._schema.name.removeprefix("aten::")
    may_be_in_place = name in IN_PLACE_BACKWARD

    def run_plain(args: Args, kwargs: Kwargs) -> Any:
        hosts, named = _hosts(args, host_from), _named(kwargs, host_from)
        if could_be_large(name, hosts):
            check_room(machine(), func, hosts, named)
        out = call(*hosts, **named)
        in_place = may_be_in_place and in_place_on_cuda(name, args, kwargs, out)
        if in_place:
            take_over(out, args[0]._host, machine())
        if scratch is not None and (script := scratch(args, kwargs, out)):
            play(script, out, machine())
        if type(out) is torch.Tensor:
            hold(out, machine())
            result = wrap(out)
            note_maker(result)
        else:
            result = _wrap_new(out)
        _execute_effects(func, args, kwargs, args[0] if in_place else result)
        return result

    return run_plain


def _with_temporaries(handler: Handler, scratch: Rule) -> Handler:
    """Return `handler` of an operation that writes its operands, with the temporaries that it needs."""

    def writes(args: Args, kwargs: Kwargs) -> Any:
        try:
            script = scratch(args, kwargs, None)  # before the operation, which may overwrite values that the rule reads
        except RuntimeError:
            _hosts(args)  # raises SparseOperand if the rule can't read an operand because it is sparse
            raise
        result = handler(args, kwargs)
        if script:
            play(script, None, machine())
        return result

    return writes


def _with_values_here(handler: Handler) -> Handler:
    """Return `handler` of an operation whose third operand may be on the host only if it has no dimensions."""

    def checked(args: Args, kwargs: Kwargs) -> Any:
        if not isinstance(args[2], VirtualTensor) and args[2].dim():
            raise _unusable(args[2])
        return handler(args, kwargs)

    return checked


def _view(func: Any) -> Handler:
    """Return a handler of an operation whose results share the storage of its operand: nothing runs on the device."""
    call = func._op

    def view(args: Args, kwargs: Kwargs) -> Any:
        if torch.is_inference_mode_enabled() and isinstance(args[0], VirtualTensor) and not args[0].is_inference():
            with torch.inference_mode(False):  # as on CUDA, a view of an ordinary tensor is an ordinary tensor
                return view(args, kwargs)
        out = call(*_hosts(args), **_named(kwargs))
        _execute_effects(func, args, kwargs, None)
        return wrap(out) if type(out) is torch.Tensor else _wrap_views(out)

    return view


def _in_place(func: Any, host_from: int = _NEVER) -> Handler:
    """Return a handler of an operation that writes its first operand without changing its shape."""
    call = call_of(func)

    def in_place(args: Args, kwargs: Kwargs) -> Any:
        if not isinstance(args[0], VirtualTensor):
            raise devices_differ(_CPU)
        call(*_hosts(args, host_from), **_named(kwargs, host_from))
        _execute_effects(func, args, kwargs, args[0])
        return args[0]

    return in_place


def _writes(func: Any, host_from: int = _NEVER) -> Handler:
    """Return a handler for out=, resizing, and lists written in place. Operands may change shape and may be results."""
    call = call_of(func)

    def writes(args: Args, kwargs: Kwargs) -> Any:
        out = call(*_hosts(args, host_from), **_named(kwargs, host_from))
        same = {}
        for tensor in _virtuals((*args, *kwargs.values())):
            same[id(tensor._host)] = tensor
            rehold(tensor._host, machine())
            follow(tensor)
        result = _wrap_new(out, same)
        _execute_effects(func, args, kwargs, result)
        return result

    return writes


def _factory(func: Any) -> Handler:
    """Return a handler of a factory with an empty out=, whose size follows from numbers alone."""
    writes = _writes(func)

    def factory(args: Args, kwargs: Kwargs) -> Any:
        numbers = [abs(x) for x in args if type(x) in (int, float) and x]
        if math.prod(max(x, 1 / x) for x in numbers) > LARGE and not _virtuals(args):
            out = torch.empty(0, dtype=kwargs["out"].dtype, device=_META)
            machine().check(func._op(*args, out=out).nbytes)
        return writes(args, kwargs)

    return factory


def _copy(func: Any) -> Handler:
    """Return the handler of copy_, the only operation that copies values between host and device."""

    def copy(args: Args, kwargs: Kwargs) -> Any:
        hosts = _hosts(args, 0)
        if sizes.seen and (hosts[0].is_meta or hosts[1].is_meta):
            sizes.copy(hosts[0], hosts[1])
        else:
            func._op(*hosts, **kwargs)
        if hosts[0] is args[0] and hosts[0].is_meta:  # a copy to PyTorch's own meta device moves nothing
            return args[0]
        _execute_effects(func, args, kwargs, args[0])
        return args[0]

    return copy


def _like(func: Any, composite: Any, absent_from: int) -> Handler:
    """Return the handler of an operation of _LIKE. Without values in its operand, `absent_from` bytes or more have none."""

    def like(args: Args, kwargs: Kwargs) -> Any:
        state, of = here(), args[0]
        if not sizes.seen or not isinstance(of, VirtualTensor) or not of._host.is_meta:
            return func._op_dk(composite, *args, **kwargs)
        outer, state.absent_from = state.absent_from, min(state.absent_from, absent_from)
        try:
            return func._op_dk(composite, *args, **kwargs)
        finally:
            state.absent_from = outer

    return like


def _item(func: Any) -> Handler:
    def item(args: Args, kwargs: Kwargs) -> Any:
        host = args[0]._host
        value = sizes.placeholder(host.dtype) if host.is_meta else func._op(host)
        _execute_effects(func, args, kwargs, value)
        return value

    return item


def _empty(func: Any) -> Handler:
    """Return the handler of empty, which checks the memory of the virtual GPU before the host allocates its own."""

    def empty(args: Args, kwargs: Kwargs) -> Any:
        card = machine()
        kwargs = {**kwargs, "pin_memory": None}
        device = kwargs.get("device")
        if device is not None and device.index:
            raise RuntimeError(f"invalid device ordinal: {device} was requested, and the only virtual GPU is vgpu:0")
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        card.check(nbytes := math.prod(args[0]) * dtype.itemsize)
        kwargs = _named(kwargs)
        if (card.sizes_only or nbytes >= here().absent_from) and not sizes.keeps_values(args[0], dtype, card.from_packed):
            kwargs["device"] = _META
        out = func._op(*args, **kwargs)
        hold(out, card)
        result = wrap(out)
        _execute_effects(func, args, kwargs, result)
        return result

    return empty


SPARSE: list[Callable[[Any, Args, Kwargs], Any]] = []  # one function, which runs operations with sparse operands
SPECIAL: dict[str, Callable[[Any], Handler]] = {
    "copy_": lambda func: _with_temporaries(_copy(func), SCRATCH["copy_"]),
    "_local_scalar_dense": _item,
    "empty": _empty,
    "empty_strided": _empty,
    "is_pinned": lambda func: lambda args, kwargs: False,
}


# ---- operands and results


def _hosts(args: Iterable[Any], host_from: int = _NEVER) -> list[Any]:
    """Return the operands as host tensors.

    Raises RuntimeError, as CUDA does, for a tensor or a generator that is not on the device. Tensors without dimensions
    (except with _NO_NUMBERS), and those from position `host_from` on, may be on the host.
    """
    out: list[Any] = []
    for i, x in enumerate(args):
        kind = type(x)
        if kind in _PLAIN:
            out.append(x)
        elif issubclass(kind, VirtualTensor):
            out.append(x._host)
        elif kind is list or kind is tuple:
            out.append(_hosts(x, 0 if host_from <= i else _NEVER))
        elif kind is torch.device:
            out.append(_CPU)
        else:
            if i < host_from and isinstance(x, torch.Tensor) and (x.dim() or host_from > _NEVER):
                raise _unusable(x)
            check_generator(x)
            out.append(x)
    return out


def _named(kwargs: Kwargs, host_from: int = _NEVER) -> Kwargs:
    return dict(zip(kwargs, _hosts(kwargs.values(), 0 if host_from < _NEVER else _NEVER), strict=True)) if kwargs else kwargs


def _unusable(x: torch.Tensor) -> RuntimeError:
    """Return the error for an operand that is not a VirtualTensor."""
    if x.layout is not torch.strided:
        return SparseOperand()
    return RuntimeError(NESTED) if x.device.type == "vgpu" else devices_differ(x.device)


def devices_differ(other: torch.device) -> RuntimeError:
    return RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, vgpu:0 and {other}!")


def _virtuals(xs: Iterable[Any]) -> list[VirtualTensor]:
    found = []
    for x in xs:
        if isinstance(x, VirtualTensor):
            found.append(x)
        elif type(x) is list or type(x) is tuple:
            found.extend(_virtuals(x))
    return found


def _wrap_views(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return wrap(out)
    return type(out)(_wrap_views(x) for x in out) if isinstance(out, list | tuple) else out


def _wrap_new(out: Any, same: dict[int, VirtualTensor] | None = None) -> Any:
    """Wrap results as device tensors. A result that is an operand's host tensor (`same`, by its id) becomes that operand."""
    if isinstance(out, torch.Tensor):
        if same and id(out) in same:
            return same[id(out)]
        hold(out, machine())
        return wrap(out)
    return type(out)(_wrap_new(x, same) for x in out) if isinstance(out, list | tuple) else out


def _execute_effects(func: Any, args: Args, kwargs: Kwargs, out: Any) -> None:
    """Execute the effects of the operation on the virtual GPU."""
    card = machine()
    happened = effects(func, args, kwargs, out)
    graph = here().graph
    if graph is not None:
        graph.check(func, happened)
    if not happened:
        card.launch_nothing()
    for effect in happened:
        card.execute(effect)


# ---- registration


def register() -> list[torch.library.Library]:
    """Register kernels with the PrivateUse1 key: a fallback for all operations, and those that PyTorch needs by name."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(from_torch, "PrivateUse1")
    named = torch.library.Library("aten", "IMPL")
    for func in (*_CONSTRUCTING, *_WHOLE):
        named.impl(func, functools.partial(from_torch, func), "PrivateUse1")
    return [everything, named]


def from_torch(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation that PyTorch dispatches to the PrivateUse1 key."""
    try:
        return run(func, args, kwargs)
    except torch.OutOfMemoryError as error:
        finish(error)
        raise
