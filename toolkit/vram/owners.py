"""Find the variable that owns each piece of memory, by walking from variables to the tensors that they reach.

`find(variables)` names the memory of every tensor by the shortest path to it ("model.layers.0.mlp.up.weight", "losses[3]") and
classifies it. A path that tells the kind, such as that of a module to its weight, is preferred. `hidden.py` finds the memory
that is held without a variable. The walk only reads: it changes no value and calls no property of a user's class.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import io
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from time import thread_time
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any

import torch
from torch import nn

from toolkit.core.callers import ipython_shell, is_installed
from toolkit.gpu.device import Device

# Limits of one walk, so that no cell waits long.
MOST = 200_000  # values
_LEAST = 4096  # values that are walked in any case: a virtual machine may stand still, and processor time passes meanwhile
_MOST_NODES = 50_000  # nodes of autograd graphs
_MOST_S = 0.5  # seconds of processor time: on a busy machine a walk takes longer, but finds the same
_DEPTH = 16  # steps from a variable: of a module farther away, only what a graph reaches has an owner
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), ModuleType, CodeType, torch.dtype, torch.device)
LEAF_TYPES = frozenset(_LEAVES)
# Frames that hold the same values as the user's frames.
_MACHINERY = ("/IPython/", "/toolkit/gpu/", "/toolkit/vram/", "/toolkit/ui/")
# Not entered: they lead to objects that the variable does not own.
_OPAQUE = (Device, threading.Thread, io.IOBase, asyncio.AbstractEventLoop)
_KERNEL = ("IPython", "ipykernel")  # packages whose objects aren't either: a widget's kernel leads to all variables and errors
_MODULE_TABLES = frozenset(vars(nn.Module()))  # attributes that every module has; its tables are walked separately
_HOOKS = frozenset(name for name in _MODULE_TABLES if name.endswith("_hooks"))
_WRITTEN_IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, a flag of types
_PAUSED = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
_PLAIN = frozenset((dict, *_CONTAINERS))  # types without attributes
_PYTHONS = re.compile(r"__\w+__")
_NOTEBOOKS = re.compile(r"_+|_i+|_i?[0-9]+|_[ido]h|In|Out|__\w+__")  # inputs and results of cells, and Python's own names
_KINDS_BY_FILE = {
    "models/cache.py": "kv", "models/cache_codes.py": "kv", "transformers/cache_utils.py": "kv", "toolkit/loading/": "weights",
}  # fmt: skip


@dataclass(frozen=True)
class Holder:
    """The owner of a piece of memory: the path from a variable, and the kind of tensor."""

    owner: str
    kind: str
    bytes: int
    node: int = -1  # the number of the autograd node that saved the memory, if only a graph holds it


Place = tuple[str, int]  # device type, address


def find(variables: Mapping[str, Any]) -> dict[Place, Holder]:
    """Return the owner of each place in memory that can be reached from `variables`, named by the shortest path to it."""
    return walk(users(variables).items())


def of_modules() -> Iterator[tuple[str, Any]]:
    """Yield the global variables of the user's modules, as ("module.name", value)."""
    for name, module in list(sys.modules.items()):
        if _isa(module, ModuleType) and is_users(name):
            yield from ((f"{name}.{variable}", value) for variable, value in users(vars(module)).items())


def users(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables without those that Python and a notebook create."""
    others = _PYTHONS if ipython_shell() is None else _NOTEBOOKS
    return {name: value for name, value in list(variables.items()) if type(name) is str and not others.fullmatch(name)}


def holds(variables: Mapping[str, Any], wanted: Any) -> bool:
    """Return whether `wanted` can be reached from `variables`. Also True if there is too much to walk."""
    seen: dict[int, Any] = {}  # by id; keeps the values alive, so that no id is reused
    queue: deque[Any] = deque(users(variables).values())
    ends_s = thread_time() + _MOST_S
    while queue:
        value = queue.popleft()
        if value is wanted:
            return True
        if id(value) in seen or _isa(value, (*_LEAVES, torch.Tensor)):
            continue
        seen[id(value)] = value
        if len(seen) >= MOST or (len(seen) >= _LEAST and thread_time() > ends_s):
            return True
        with suppress(Exception):  # reading a user's object may raise
            queue.extend(held for _, held, _ in _parts(value))
    return False


def place_of(tensor: torch.Tensor) -> Place | None:
    """Return the place of a tensor's memory, or None if it has no memory of its own."""
    try:
        kind = tensor.device.type
        if kind == "vgpu":
            from toolkit.gpu.virtual.tensor import address_of

            address = address_of(tensor)
            return None if address is None else (kind, address)
        if kind == "meta" or tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":  # that of a fake tensor, whatever device the tensor names
            return None
        address = storage.data_ptr()
    except (RuntimeError, NotImplementedError, AttributeError):  # functional and fake tensors have no storage
        return None
    return (kind, address) if address else None


def kind_by_place(where: str | None) -> str | None:
    """Return the kind of an allocation by the file of its line, or None; "workspace" if it comes from no line of Python."""
    if where is None:
        return "workspace"
    inner = where.rpartition(" > ")[2]
    return next((kind for file, kind in _KINDS_BY_FILE.items() if file in inner), None)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """Return the local variables of a frame, without keeping them alive.

    Before Python 3.13 a function's frame caches the dictionary that `f_locals` creates. The cache would keep values alive even
    after `del`, so it is cleared here, unless the user's code holds it (`d = locals()`) or added names to it (`exec`). Clearing
    it does not change the variables themselves.
    """
    names, code = frame.f_locals, frame.f_code
    found = dict(names)
    if code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        if sys.getrefcount(names) <= 3 and own.issuperset(found):  # held by the frame, by this function, and by getrefcount
            names.clear()
    return found


def of_frame(frame: FrameType) -> Iterator[tuple[str, Any]]:
    """Yield the local variables of a user's function as ("x in f()", value)."""
    file = frame.f_code.co_filename.replace("\\", "/")
    if frame.f_code.co_name != "<module>" and not any(folder in file for folder in _MACHINERY):
        for name, value in locals_of(frame).items():
            yield f"{name} in {frame.f_code.co_name}()", value


def of_traceback(error: BaseException | None) -> Iterator[tuple[str, Any]]:
    """Yield the variables of the user's functions in the traceback of an error and of its causes, with their names."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            for name, value in of_frame(trace.tb_frame):
                yield f"{name} (the traceback of {type(error).__name__})", value
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


# ---- the walk


def walk(roots: Iterable[tuple[str, Any]]) -> dict[Place, Holder]:
    """Return the owner of each place in memory that can be reached from `roots`: pairs of a name and a value."""
    found: dict[Place, Holder] = {}
    graphs: list[tuple[str, torch.Tensor]] = []
    reached = list(tensors(roots))
    told, rest = ([one for one in reached if (one[2] is None) is unknown] for unknown in (False, True))
    for path, tensor, kind in (*told, *_gradients((*told, *rest)), *rest):
        with suppress(Exception):  # other threads may change a tensor during the walk
            _note(found, path, tensor, kind)
            if tensor.grad_fn is not None:
                graphs.append((path, tensor))
    nodes: set[Any] = set()
    for path, value in graphs:  # last: what a graph saved may belong to a module, an optimizer or another variable
        with suppress(Exception):  # as above
            for node, tensor in sorted(saved_by(value, nodes), key=lambda saved: not isinstance(saved[1], nn.Parameter)):
                kind = None if isinstance(tensor, nn.Parameter) else "activations"
                number = node._sequence_nr()
                _note(found, f"{path} (its graph: {node.name()})", tensor, kind, number)
                if tensor.is_leaf and tensor.grad is not None:
                    _note(found, f"{path} (its graph: {node.name()}).grad", tensor.grad, "gradients", number)
    return found


def tensors(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yield (path, tensor, kind) for each tensor that can be reached from `roots`, those with the shortest paths first.

    The kind is None if the path doesn't tell it. A tensor is yielded again for each path that does. Tensors that only an
    autograd graph holds are not yielded.
    """
    seen: dict[int, Any] = {}  # by id; keeps the values alive, so that no id is reused
    queue: deque[tuple[str, Any, str | None, int]] = deque((path, value, None, 0) for path, value in roots)
    optimized: deque[tuple[str, Any, str | None, int]] = deque()  # comes last, as its tensors may have another owner
    ends_s = thread_time() + _MOST_S
    while (queue or optimized) and len(seen) < MOST:
        if len(seen) >= _LEAST and len(seen) % 128 == 0 and thread_time() > ends_s:  # a call takes 1 µs
            break
        last = not queue
        path, value, kind, depth = (queue or optimized).popleft()
        if type(value) in LEAF_TYPES:
            continue
        if id(value) in seen:
            if kind is not None and not last and _isa(value, torch.Tensor):
                yield path, value, kind
            continue
        seen[id(value)] = value
        is_tensor = _isa(value, torch.Tensor)
        if is_tensor:
            yield path, value, kind
        # reading a user's object may raise, and other threads may change it during the walk
        with suppress(Exception):
            if is_tensor:
                if value.is_leaf and value.grad is not None:
                    queue.append((f"{path}.grad", value.grad, None, depth + 1))
                if depth < _DEPTH:
                    queue.extend((f"{path}{more}", held, None, depth + 1) for more, held in _of_tensor(value))
            elif depth < _DEPTH and not _isa(value, _LEAVES) and len(queue) < MOST:
                parts = _of_module(value, seen) if _isa(value, nn.Module) else _parts(value)
                if _isa(value, torch.optim.Optimizer):
                    optimized.extend((f"{path}{more}", held, k, depth + 1) for more, held, k in _optimized(value))
                queue.extend((f"{path}{more}", held, k or kind, depth + 1) for more, held, k in parts)


def _gradients(reached: Iterable[tuple[str, torch.Tensor, str | None]]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the gradients of tensors, with their paths."""
    for path, tensor, _ in reached:
        with suppress(Exception):  # a class of tensors may refuse
            if tensor.is_leaf and tensor.grad is not None:
                yield f"{path}.grad", tensor.grad, "gradients"


def _isa(value: Any, kinds: Any) -> bool:
    """Return isinstance(value, kinds) by the type alone: reading the `__class__` of a lazy proxy would load its target."""
    return issubclass(type(value), kinds)


def _note(found: dict[Place, Holder], path: str, tensor: torch.Tensor, kind: str | None, node: int = -1) -> None:
    place = place_of(tensor)
    if place is not None:
        kind = kind or ("weights" if isinstance(tensor, nn.Parameter) else "activations")
        found.setdefault(place, Holder(path, kind, tensor.untyped_storage().nbytes(), node))


def nodes_of(tensor: torch.Tensor, seen: set[Any]) -> Iterator[Any]:
    """Yield the nodes of a tensor's autograd graph that are not in `seen`, and add them to it."""
    nodes: deque[Any] = deque([tensor.grad_fn])
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        nodes.extend(following for following, _ in node.next_functions)


def saved_by(tensor: torch.Tensor, seen: set[Any]) -> Iterator[tuple[Any, torch.Tensor]]:
    """Yield (node, tensor) for the tensors that a graph saved for the backward pass. `seen` holds the nodes visited so far.

    Tensors packed by saved-tensor hooks are not unpacked: that would run the hooks, and recompute checkpointed forward passes.
    """
    for node in nodes_of(tensor, seen):
        leaf: Any = getattr(node, "variable", None)  # AccumulateGrad has its leaf here
        if _isa(leaf, torch.Tensor):
            yield node, leaf
        if _isa(node, torch._C._FunctionBase):  # of a torch.autograd.Function: `ctx`, with the attributes that the user set
            for _, held in _own(node):
                parts = (part for _, part, _ in _elements(held, None)) if type(held) in _PLAIN else (held,)
                yield from ((node, part) for part in parts if _isa(part, torch.Tensor))
        for name in _saved_names(type(node)):  # type: ignore[arg-type]
            raw = getattr(node, name)
            for saved in raw if _isa(raw, tuple | list) else (raw,):
                if getattr(saved, "unpack_hook", saved) is None and _isa(saved.data, torch.Tensor):
                    yield node, saved.data


@lru_cache(maxsize=4096)
def _saved_names(node: type) -> tuple[str, ...]:
    """Return the attributes in which a type of node keeps its packed saved tensors."""
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))


Part = tuple[str, Any, str | None]


def _of_module(root: nn.Module, seen: dict[int, Any]) -> Iterator[Part]:
    """Yield the parameters, buffers and other attributes of a module and of its submodules."""
    modules = [("", root)]
    while modules:
        path, module = modules.pop()
        names = vars(module)
        for table in ("_parameters", "_buffers"):
            for name, tensor in names[table].items():
                if tensor is not None:
                    yield f"{path}.{name}", tensor, "weights"
        for name, child in names["_modules"].items():
            if child is not None and id(child) not in seen:
                seen[id(child)] = child
                modules.append((f"{path}.{name}", child))
        kind = "kv" if "cache" in type(module).__name__.lower() else None
        for name, held in list(names.items()):
            if held if name in _HOOKS else name not in _MODULE_TABLES and type(held) not in LEAF_TYPES:
                yield f"{path}.{name}", held, kind


def _parts(value: Any) -> Iterator[Part]:
    """Yield the values that an object holds, as (".name" or "[i]", value, kind of the tensors below)."""
    if type(value) in _PLAIN:  # first, as most values are of these types
        yield from _elements(value, None)
        return
    name = type(value).__name__.lower()
    if _isa(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _KERNEL:
        return
    if "tokenizer" in name:  # holds 100,000 words, and no tensor of the user
        return
    kind = "kv" if "cache" in name else None
    if _isa(value, torch.optim.Optimizer):
        for number, state in enumerate(value.state.values()):
            yield from ((f".state[{number}].{name}", held, "optimizer") for name, held in dict(state).items())
        yield from ((more, held, None) for more, held in _own(value) if more not in (".param_groups", ".state"))
    elif _isa(value, _CONTAINERS):
        yield from _elements(value, kind)
        yield from ((more, held, kind) for more, held in _own(value))
    elif _isa(value, type):
        if is_users(vars(value).get("__module__", "")):
            yield from ((f".{name}", held, kind) for name, held in list(vars(value).items()))
    elif _isa(value, FunctionType | MethodType):
        yield from _of_function(value)
    elif _isa(value, partial):
        yield from ((f" (its argument {i})", held, kind) for i, held in enumerate((*value.args, *value.keywords.values())))
    elif type(value) in _PAUSED:
        frame = getattr(value, _PAUSED[type(value)])
        if frame is not None:
            yield from ((f" (paused): {name}", held, kind) for name, held in locals_of(frame).items())
    elif _isa(value, ContextVar):
        with suppress(LookupError):  # it has no value
            yield " (its value)", value.get(), kind
    elif _isa(value, BaseException):
        yield from ((f" (its traceback): {more}", held, kind) for more, held in of_traceback(value))
        yield from ((more, held, kind) for more, held in _own(value))
    elif not _isa(value, FrameType | TracebackType):
        yield from ((more, held, kind) for more, held in _own(value))
        if type(value).__flags__ & _WRITTEN_IN_C:  # such as an iterator, a method of a list or a cache of functools
            yield from ((" (inside)", held, kind) for held in gc.get_referents(value))


def _optimized(optimizer: torch.optim.Optimizer) -> Iterator[Part]:
    """Yield the tensors that an optimizer changes."""
    for group in optimizer.param_groups:
        yield from ((f".param_groups[...]['params'][{i}]", held, "weights") for i, held in enumerate(group["params"]))


def _elements(value: Any, kind: str | None) -> Iterator[Part]:
    """Yield the elements of a mapping or a sequence, unless all of them are leaves."""
    if _isa(value, Mapping):
        if not _only_leaves(value.values()):
            yield from ((_key_text(key), held, kind) for key, held in list(value.items()))
    elif not _only_leaves(value):
        yield from ((f"[{i}]", held, kind) for i, held in enumerate(list(value)))


def _of_tensor(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of a tensor, and the attributes that the user set."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks:
            yield f".{name}", hooks
    yield from ((more, held) for more, held in _own(tensor) if more != "._host")  # the values of a tensor on the virtual GPU


@lru_cache(maxsize=4096)
def is_users(module: str) -> bool:
    """Return whether a module is the user's: not of the standard library, of an installed package, or of this package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not is_installed(file))


def _key_text(key: Any) -> str:
    """Return a key as text if it is short and plain. The repr of a tensor would copy it from the GPU."""
    text = repr(key) if type(key) in (str, int, bool, type(None)) else ""
    return f"[{text}]" if 0 < len(text) < 40 else "[...]"


def _only_leaves(values: Iterable[Any]) -> bool:
    """Return whether all values are of leaf types. One set operation is fast enough for a tokenizer's 100,000 words."""
    return set(map(type, values)) <= LEAF_TYPES


def _own(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes stored in an object, without calling properties or `__getattr__`."""
    try:
        names = object.__getattribute__(value, "__dict__")
    except AttributeError:
        names = {}
    for name, held in list(names.items()):
        yield f".{name}", held
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__")
        for name in slots if slots and isinstance(slots, (tuple, list)) else ():
            member: Any = base.__dict__.get(name)
            if _isa(member, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield f".{name}", member.__get__(value)


def _of_function(function: Any) -> Iterator[Part]:
    """Yield what a function or a bound method holds: its object, closure, default arguments and attributes."""
    if _isa(function, MethodType):
        yield ".__self__", function.__self__, None
        function = function.__func__
    if not _isa(function, FunctionType):  # a method may be bound to any callable object
        yield ".__func__", function, None
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f" (its closure): {name}", cell.cell_contents, None
        except ValueError:  # not filled yet
            continue
    for i, held in enumerate(function.__defaults__ or ()):
        yield f" (its default {i})", held, None
    yield from ((f" (its default {name})", held, None) for name, held in (function.__kwdefaults__ or {}).items())
    yield from ((more, held, None) for more, held in _own(function))
