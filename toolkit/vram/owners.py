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
from functools import lru_cache, partial
from time import perf_counter
from types import CodeType, FrameType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from toolkit.gpu import allocation_scopes
from toolkit.gpu.device import Device

MOST, _MOST_NODES, _MOST_S = (
    200_000,
    50_000,
    0.5,
)  # values, nodes of graphs, seconds: a walk ends then, so that no cell waits long
_DEPTH = 6  # how far from a variable
_LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), type, ModuleType, CodeType, torch.dtype, torch.device)
_LEAF_TYPES = frozenset(_LEAVES)
_MACHINERY = ("/IPython/", "/toolkit/gpu/")  # whose frames hold what the user's hold, too
_OPAQUE = (Device, threading.Thread, io.IOBase)  # machinery, through which all else may be reached
_MODULE_TABLES = frozenset(vars(nn.Module()))  # what every module has: hooks, and tables that are walked by themselves
_KINDS_BY_FILE = {
    "models/cache.py": "kv",
    "models/cache_codes.py": "kv",
    "transformers/cache_utils.py": "kv",
    "toolkit/loading/": "weights",
}


@dataclass(frozen=True)
class Holder:
    """Who holds a piece of memory: the path of a variable, and what kind of tensor it is."""

    owner: str
    kind: str
    bytes: int


Place = tuple[str, int]  # device type, address


def find(variables: Mapping[str, Any]) -> dict[Place, Holder]:
    """The memory that `variables` reach, by device and address: breadth first, so the shortest path names it."""
    named = ((name, value) for name, value in list(variables.items()) if type(name) is str)
    return _walk((name, value) for name, value in named if not name.startswith("_"))


def hidden(shell: Any | None = None, error: BaseException | None = None) -> dict[Place, Holder]:
    """The memory that is held without a variable: by the traceback of the last error (or of `error`), and by what a notebook
    keeps of its results."""
    return _walk(_hidden_values(shell, error))


def place_of(tensor: torch.Tensor) -> Place | None:
    """Where a tensor's memory is; None for one without memory of its own."""
    try:
        kind = tensor.device.type
        if kind == "vgpu":
            from toolkit.gpu.virtual.tensor import address_of

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
    after `del`: it is emptied again, unless somebody else has it (`d = locals()`) or put names of its own in (`exec`). The
    variables themselves lie elsewhere.
    """
    names, code = frame.f_locals, frame.f_code
    found = dict(names)
    if code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
        own = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        if sys.getrefcount(names) <= 3 and own.issuperset(found):  # the frame's, ours, and the one that asks
            names.clear()
    return found


# ---- the walk


def _walk(roots: Iterable[tuple[str, Any]]) -> dict[Place, Holder]:
    found: dict[Place, Holder] = {}
    seen: dict[int, Any] = {}  # by identity; keeps what it has seen, so that no other value gets the same
    nodes: set[Any] = set()
    queue: deque[tuple[str, Any, str | None, int]] = deque((path, value, None, 0) for path, value in roots)
    ends_s = perf_counter() + _MOST_S
    while queue and len(seen) < MOST and perf_counter() < ends_s:
        path, value, kind, depth = queue.popleft()
        if type(value) in _LEAF_TYPES or id(value) in seen:
            continue
        seen[id(value)] = value
        # other people's classes may raise where they are looked into, and threads change what is walked
        with suppress(Exception):
            if _isa(value, torch.Tensor):
                _note(found, path, value, kind)
                if value.is_leaf and value.grad is not None:
                    queue.append((f"{path}.grad", value.grad, "gradients", depth + 1))
                for node, tensor in _graph(value, nodes):
                    _note(found, f"{path} (its graph: {node})", tensor, None if _isa(tensor, nn.Parameter) else "activations")
            elif depth < _DEPTH and not _isa(value, _LEAVES) and len(queue) < MOST:
                parts = _of_module(value, seen) if _isa(value, nn.Module) else _parts(value)
                queue.extend((f"{path}{more}", held, k or kind, depth + 1) for more, held, k in parts)
    return found


def _isa(value: Any, kinds: Any) -> bool:
    """As isinstance, by the type alone: a proxy's `__class__` would load what it stands for."""
    return issubclass(type(value), kinds)


def _note(found: dict[Place, Holder], path: str, tensor: torch.Tensor, kind: str | None) -> None:
    place = place_of(tensor)
    if place is not None:
        kind = kind or ("weights" if isinstance(tensor, nn.Parameter) else "activations")
        found.setdefault(place, Holder(path, kind, tensor.untyped_storage().nbytes()))


def _graph(tensor: torch.Tensor, seen: set[Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """What a tensor's graph has saved for the backward pass: (node, tensor). `seen`: the nodes of this walk, each once.

    What hooks have packed isn't unpacked: that would run them, and compute a checkpoint's forward pass again.
    """
    nodes: deque[Any] = deque([tensor.grad_fn])
    while nodes and len(seen) < _MOST_NODES:
        node = nodes.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf: Any = getattr(node, "variable", None)  # of a leaf whose gradient is accumulated
        if _isa(leaf, torch.Tensor):
            yield node.name(), leaf
        for name in _saved_names(type(node)):  # type: ignore[arg-type]
            raw = getattr(node, name)
            for saved in raw if _isa(raw, tuple | list) else (raw,):
                if getattr(saved, "unpack_hook", saved) is None and _isa(saved.data, torch.Tensor):
                    yield node.name(), saved.data
        nodes.extend(following for following, _ in node.next_functions)


@lru_cache(maxsize=4096)
def _saved_names(node: type) -> tuple[str, ...]:
    """Under which names a kind of node has its saved tensors, packed."""
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))


Part = tuple[str, Any, str | None]


def _of_module(root: nn.Module, seen: dict[int, Any]) -> Iterator[Part]:
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
                seen[id(child)] = child
                modules.append((f"{path}.{name}", child))
        kind = "kv" if "cache" in type(module).__name__.lower() else None
        for name, held in list(names.items()):
            if name not in _MODULE_TABLES and type(held) not in _LEAF_TYPES:
                yield f"{path}.{name}", held, kind


def _parts(value: Any) -> Iterator[Part]:
    """What a value that isn't a tensor holds, by how it is reached: (".name" or "[i]", value, kind of the tensors below)."""
    name = type(value).__name__.lower()
    if _isa(value, _OPAQUE) or "tokenizer" in name:  # a hundred thousand blocks or words, and no tensor of the user's
        return
    kind = "kv" if "cache" in name else None
    if _isa(value, torch.optim.Optimizer):
        for group in value.param_groups:
            yield from ((f".param_groups[...]['params'][{i}]", held, "weights") for i, held in enumerate(group["params"]))
        for number, state in enumerate(value.state.values()):
            yield from ((f".state[{number}].{name}", held, "optimizer") for name, held in dict(state).items())
    elif _isa(value, Mapping):
        if not _only_leaves(value.values()):
            yield from ((_key_text(key), held, kind) for key, held in list(value.items()))
    elif _isa(value, list | tuple | set | frozenset | deque):
        if not _only_leaves(value):
            yield from ((f"[{i}]", held, kind) for i, held in enumerate(list(value)))
    elif _isa(value, FunctionType | MethodType):
        yield from _closure(value)
    elif _isa(value, partial):
        yield from ((f" (its argument {i})", held, kind) for i, held in enumerate((*value.args, *value.keywords.values())))
    elif _isa(value, GeneratorType) and value.gi_frame is not None:
        yield from ((f" (paused): {name}", held, kind) for name, held in locals_of(value.gi_frame).items())
    elif not _isa(value, FrameType):
        yield from ((more, held, kind) for more, held in _own(value))


def _key_text(key: Any) -> str:
    """How a key reads, where that is short and looking at it does nothing: a tensor's text would be copied from the GPU."""
    text = repr(key) if type(key) in (str, int, bool, type(None)) else ""
    return f"[{text}]" if 0 < len(text) < 40 else "[...]"


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
            member: Any = base.__dict__.get(name)
            if _isa(member, MemberDescriptorType):
                with suppress(AttributeError):  # not set
                    yield f".{name}", member.__get__(value)


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
    yield from _results(shell)


def results(shell: Any | None) -> dict[Place, Holder]:
    """What a notebook keeps of its cells' results: `Out[7]` and `_`."""
    return _walk(_results(shell))


def _results(shell: Any | None) -> Iterator[tuple[str, Any]]:
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


def release(shell: Any | None = None) -> int:
    """Let go of the last error's traceback and of a notebook's kept results (`Out`, `_`). Variables stay as they are.

    Returns by how much less the GPU in use has allocated then.
    """
    gpu = allocation_scopes.in_use()
    before = gpu.memory().allocated_bytes if gpu is not None else 0
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    if shell is not None:
        for names in (shell.user_ns, shell.user_ns_hidden):
            for name in [name for name in names if type(name) is str and re.fullmatch(r"_+|_[0-9]+", name)]:
                del names[name]
        shell.user_ns.get("_oh", {}).clear()
        shell.displayhook._ = shell.displayhook.__ = shell.displayhook.___ = ""
        shell.last_execution_result = None
        shell.InteractiveTB.tb = None
    gc.collect()
    return max(before - gpu.memory().allocated_bytes, 0) if gpu is not None else 0
