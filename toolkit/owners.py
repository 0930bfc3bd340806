"""Which variable holds which memory: a walk over variables to the tensors that they reach.

`find(variables)` names every tensor's memory by the shortest path to it ("model.layers.0.mlp.up.weight", "losses[3]") and says
what kind it is. `hidden()` names what a notebook holds without a variable: the last error's traceback, `Out[7]`, `_`, closures.
It looks at values and changes nothing; properties of other people's classes aren't called.
"""

from __future__ import annotations

import gc
import inspect
import io
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from toolkit.devices.base import Device

MOST = 200_000  # values looked at: a walk ends then, so that a cell never waits long for it
_DEPTH = 6  # how far from a variable
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, CodeType, torch.dtype, torch.device)
_LEAF_TYPES = frozenset(_LEAVES)
_MACHINERY = ("/IPython/", "/toolkit/devices/")  # whose frames hold what the user's hold, too
_OPAQUE = (Device, threading.Thread, io.IOBase)  # machinery, through which all else may be reached
_MODULE_TABLES = frozenset(vars(nn.Module()))  # what every module has: hooks, and tables that are walked by themselves
_KINDS_BY_FILE = {"models/cache.py": "kv", "transformers/cache_utils.py": "kv", "toolkit/loading/": "weights"}


@dataclass(frozen=True)
class Holder:
    """Who holds a piece of memory: the path of a variable, and what kind of tensor it is."""

    owner: str
    kind: str
    bytes: int


Place = tuple[str, int]  # device type, address


def find(variables: Mapping[str, Any]) -> dict[Place, Holder]:
    """The memory that `variables` reach, by device and address: breadth first, so the shortest path names it."""
    return _walk((name, value) for name, value in list(variables.items()) if not name.startswith("_"))


def hidden(shell: Any | None = None, error: BaseException | None = None) -> dict[Place, Holder]:
    """The memory that is held without a variable: by the traceback of the last error (or of `error`), and by what a notebook
    keeps of its results."""
    return _walk(_hidden_values(shell, error))


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where a tensor's memory is; None for one without memory of its own."""
    try:
        kind = tensor.device.type
        if kind == "vgpu":
            from toolkit.devices.virtual_tensor import address_of

            address = address_of(tensor)
            return None if address is None else (kind, address)
        if kind == "meta" or tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, AttributeError):  # tensors without a storage: functional, fake
        return None
    return (kind, address) if address else None


def kind_by_place(where: str | None) -> str | None:
    """What an allocation was for, as far as the file of its line says; "workspace" where no line of Python asked for it."""
    if where is None:
        return "workspace"
    inner = where.rpartition(" > ")[2]
    return next((kind for file, kind in _KINDS_BY_FILE.items() if file in inner), None)


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The local variables of a frame, and nothing that keeps them alive.

    Before Python 3.13 a function's frame keeps the dictionary that `f_locals` made, and with it what the variables held even
    after `del`: it is emptied again. The variables themselves lie elsewhere.
    """
    names = frame.f_locals
    found = dict(names)
    if frame.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        names.clear()
    return found


# ---- the walk


def _walk(roots: Iterable[tuple[str, Any]]) -> dict[Place, Holder]:
    found: dict[Place, Holder] = {}
    seen: set[int] = set()
    queue: deque[tuple[str, Any, str | None, int]] = deque((path, value, None, 0) for path, value in roots)
    looked = 0
    while queue and looked < MOST:
        path, value, kind, depth = queue.popleft()
        if type(value) in _LEAF_TYPES or id(value) in seen:
            continue
        seen.add(id(value))
        looked += 1
        # other people's classes may raise where they are looked into, and threads change what is walked
        with suppress(Exception):
            if isinstance(value, torch.Tensor):
                _note(found, path, value, kind)
                queue.extend((f"{path}{more}", held, k, depth + 1) for more, held, k in _of_tensor(value))
            elif depth < _DEPTH and not isinstance(value, _LEAVES):
                parts = _of_module(value, seen) if isinstance(value, nn.Module) else _parts(value)
                queue.extend((f"{path}{more}", held, k or kind, depth + 1) for more, held, k in parts)
    return found


def _note(found: dict[Place, Holder], path: str, tensor: torch.Tensor, kind: str | None) -> None:
    place = place_of(tensor)
    if place is not None:
        kind = kind or ("weights" if isinstance(tensor, nn.Parameter) else "activations")
        found.setdefault(place, Holder(path, kind, tensor.untyped_storage().nbytes()))


Part = tuple[str, Any, str | None]


def _of_tensor(tensor: torch.Tensor) -> Iterator[Part]:
    """What a tensor keeps alive beside its own memory: its gradient, and what its graph has saved for the backward pass."""
    if tensor.is_leaf:
        if tensor.grad is not None:
            yield ".grad", tensor.grad, "gradients"
        return
    nodes: deque[Any] = deque([tensor.grad_fn])
    seen: set[Any] = set()
    while nodes and len(seen) < 10_000:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from _saved(node, name)
        nodes.extend(following for following, _ in node.next_functions)


def _saved(node: Any, name: str) -> Iterator[Part]:
    try:
        value = getattr(node, name)
    except RuntimeError:  # freed by the backward pass, or changed in place since
        return
    for tensor in value if isinstance(value, tuple | list) else (value,):
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, nn.Parameter):
            yield f" (its graph: {node.name()})", tensor, "activations"


def _of_module(root: nn.Module, seen: set[int]) -> Iterator[Part]:
    """The weights and buffers of a module and of those inside, and what else they hold. Thousands: nothing is asked twice."""
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
                seen.add(id(child))
                modules.append((f"{path}.{name}", child))
        kind = "kv" if "cache" in type(module).__name__.lower() else None
        for name, held in list(names.items()):
            if name not in _MODULE_TABLES and type(held) not in _LEAF_TYPES:
                yield f"{path}.{name}", held, kind


def _parts(value: Any) -> Iterator[Part]:
    """What a value that isn't a tensor holds, by how it is reached: (".name" or "[i]", value, kind of the tensors below)."""
    name = type(value).__name__.lower()
    if isinstance(value, _OPAQUE) or "tokenizer" in name:  # a hundred thousand blocks or words, and no tensor of the user's
        return
    kind = "kv" if "cache" in name else None
    if isinstance(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from ((f".param_groups[...]['params'][{i}]", held, "weights") for i, held in enumerate(group["params"]))
        for number, state in enumerate(value.state.values()):
            yield from ((f".state[{number}].{name}", held, "optimizer") for name, held in dict(state).items())
    elif isinstance(value, Mapping):
        if not _only_leaves(value.values()):
            yield from ((f"[{key!r}]" if len(repr(key)) < 40 else "[...]", held, kind) for key, held in list(value.items()))
    elif isinstance(value, list | tuple | set | frozenset | deque):
        if not _only_leaves(value):
            yield from ((f"[{i}]", held, kind) for i, held in enumerate(list(value)))
    elif isinstance(value, FunctionType | MethodType):
        yield from _closure(value)
    elif isinstance(value, partial):
        yield from ((f" (its argument {i})", held, kind) for i, held in enumerate((*value.args, *value.keywords.values())))
    elif isinstance(value, GeneratorType) and value.gi_frame is not None:
        yield from ((f" (paused): {name}", held, kind) for name, held in locals_of(value.gi_frame).items())
    elif not isinstance(value, FrameType):
        yield from ((more, held, kind) for more, held in _own(value))


def _only_leaves(values: Iterable[Any]) -> bool:
    """Is there nothing below these? A tokenizer has a hundred thousand words, which are asked all at once."""
    return set(map(type, values)) <= _LEAF_TYPES


def _own(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object keeps itself, without asking its class."""
    try:
        names = object.__getattribute__(value, "__dict__")
    except AttributeError:
        names = {}
    yield from ((f".{name}", held) for name, held in list(names.items()))
    for base in type(value).__mro__:
        for name in base.__dict__.get("__slots__", ()) if isinstance(base.__dict__.get("__slots__", ()), tuple | list) else ():
            member = base.__dict__.get(name)
            if member is not None and hasattr(value, name):
                yield f".{name}", getattr(value, name)


def _closure(function: Any) -> Iterator[Part]:
    function = getattr(function, "__func__", function)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f" (its closure): {name}", cell.cell_contents, None
        except ValueError:  # not filled yet
            continue
    for i, held in enumerate(function.__defaults__ or ()):
        yield f" (its default {i})", held, None


# ---- what no variable holds


def _hidden_values(shell: Any | None, error: BaseException | None) -> Iterator[tuple[str, Any]]:
    yield from _of_traceback(error)
    if shell is not None:
        names = shell.user_ns
        for number, value in list(names.get("Out", {}).items()):
            yield f"Out[{number}]", value
        for name in ("_", "__", "___"):
            yield name, names.get(name)


def _of_traceback(error: BaseException | None) -> Iterator[tuple[str, Any]]:
    """The variables of the frames that the last error passed through: it keeps them until the next one."""
    error = error or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        trace = error.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            file = frame.f_code.co_filename.replace("\\", "/")
            ours = frame.f_code.co_name != "<module>" and not any(folder in file for folder in _MACHINERY)
            for name, value in locals_of(frame).items() if ours else ():
                yield f"{name} in {frame.f_code.co_name}() (the traceback of {type(error).__name__})", value
            trace = trace.tb_next
        error = error.__cause__ or error.__context__


def release(shell: Any | None = None, variables: Mapping[str, Any] | None = None) -> int:
    """Let go of the last error's traceback and of a notebook's kept results (`Out`, `_`). Variables stay as they are.

    Returns the bytes on devices that were given back. `variables` are the user's.
    """
    kept = find(variables or {})
    held = {place: holder.bytes for place, holder in hidden(shell).items() if place not in kept and place[0] != "cpu"}
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    if shell is not None:
        for names in (shell.user_ns, shell.user_ns_hidden):
            for name in [name for name in names if re.fullmatch(r"_+|_[0-9]+", name)]:
                del names[name]
        shell.user_ns.get("_oh", {}).clear()
        shell.displayhook._ = shell.displayhook.__ = shell.displayhook.___ = ""
        shell.last_execution_result = None
        shell.InteractiveTB.tb = None
    gc.collect()
    return sum(held.values())
