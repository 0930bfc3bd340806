"""What an object holds: the parts of containers, modules, functions and other objects, with the path to each.

Reading them changes no value and calls no property of a user's class.
"""

from __future__ import annotations

import asyncio
import gc
import io
import re
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import lru_cache, partial
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

import numpy as np
import torch
from torch import nn

from toolkit.core.callers import is_installed
from toolkit.gpu.device import Device
from toolkit.vram.frames import locals_of, of_ended, of_traceback

LEAVES = (str, bytes, bytearray, int, float, complex, bool, type(None), ModuleType, CodeType, torch.dtype, torch.device)
LEAF_TYPES = frozenset(LEAVES)
# Not entered: they lead to objects that the variable does not own.
_OPAQUE = (Device, threading.Thread, io.IOBase, asyncio.AbstractEventLoop)
_KERNEL = ("IPython", "ipykernel")  # packages whose objects aren't either: a widget's kernel leads to all variables and errors
_MODULE_TABLES = frozenset(vars(nn.Module()))  # attributes that every module has; its tables are walked separately
_HOOKS = frozenset(name for name in _MODULE_TABLES if name.endswith("_hooks"))
_WRITTEN_IN_C = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE, a flag of types
PAUSED = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}
_CONTAINERS = (Mapping, list, tuple, set, frozenset, deque)
PLAIN = frozenset((dict, *_CONTAINERS))  # types without attributes
# A cache of keys and values is known by its class or its attributes. Other caches hold results of functions and the like.
_KV_NAME = re.compile(r"(?i)kv\w*cache|cache\w*kv|(key_?value|attention|attn|dynamic|static|sliding\w*|paged|quantized)_?cache")
_KV_MODULES = ("transformers.cache_utils", "toolkit.models.cache")
_KEYS_AND_VALUES = ({"kv"}, {"k", "v"}, {"keys", "values"}, {"k_cache", "v_cache"}, {"key_cache", "value_cache"})
_SMALL = 64  # elements

Part = tuple[str, Any, str | None]


def parts_of(value: Any) -> Iterator[Part]:
    """Yield the values that an object holds, as (".name" or "[i]", value, kind of the tensors below)."""
    if type(value) in PLAIN:  # first, as most values are of these types
        yield from elements(value, None)
        return
    name = type(value).__name__.lower()
    if isa(value, _OPAQUE) or type(value).__module__.partition(".")[0] in _KERNEL:
        return
    if "tokenizer" in name:  # holds 100,000 words, and no tensor of the user
        return
    kind, pandas = _kind_below(value), sys.modules.get("pandas")
    if isa(value, torch.optim.Optimizer):
        for number, state in enumerate(value.state.values()):
            yield from ((f".state[{number}].{name}", held, "optimizer") for name, held in dict(state).items())
        yield from ((more, held, None) for more, held in own(value) if more not in (".param_groups", ".state"))
    elif isa(value, _CONTAINERS):
        yield from elements(value, kind)
        yield from ((more, held, kind) for more, held in own(value))
    elif isa(value, type):
        if is_users(vars(value).get("__module__", "")):
            yield from ((f".{name}", held, kind) for name, held in list(vars(value).items()))
    elif isa(value, FunctionType | MethodType):
        yield from _of_function(value)
    elif isa(value, partial):
        yield from ((f" (its argument {i})", held, kind) for i, held in enumerate((*value.args, *value.keywords.values())))
    elif type(value) in PAUSED:
        frame = getattr(value, PAUSED[type(value)])
        if frame is not None:
            yield from ((f" (paused): {name}", held, kind) for name, held in locals_of(frame).items())
            # what it awaits or loops over has no name
            yield from ((" (paused)", held, kind) for held in gc.get_referents(value) if type(held) is not FrameType)
    elif isa(value, ContextVar):
        with suppress(LookupError):  # it has no value
            yield " (its value)", value.get(), kind
    elif isa(value, BaseException):
        yield from ((f" (its traceback): {more}", held, kind) for more, held in of_traceback(value))
        yield ".args", value.args, kind
        yield from ((more, held, kind) for more, held in own(value))
    elif isa(value, FrameType | TracebackType):
        yield from ((f": {more}", held, kind) for more, held in of_ended(value))
    elif isa(value, np.ndarray):
        if value.dtype == object and not _only_leaves(values := value.ravel().tolist()):
            yield from (
                (f"[{', '.join(map(str, at))}]", held, kind) for at, held in zip(np.ndindex(value.shape), values, strict=True)
            )
    elif pandas is not None and isa(value, pandas.DataFrame | pandas.Series):
        yield from _of_table(value)
    else:
        yield from ((more, held, kind) for more, held in own(value))
        if type(value).__flags__ & _WRITTEN_IN_C:  # such as an iterator, a method of a list or a cache of functools
            yield from ((" (inside)", held, kind) for held in gc.get_referents(value))


def of_module(root: nn.Module, seen: dict[int, Any]) -> Iterator[Part]:
    """Yield the parameters, buffers and other attributes of a module and of its submodules."""
    modules = [("", root)]
    while modules:
        path, module = modules.pop()
        names = vars(module)
        kind = _kind_below(module)
        for table, table_kind in (("_parameters", "weights"), ("_buffers", kind or "weights")):
            for name, tensor in names[table].items():
                if tensor is not None:
                    yield f"{path}.{name}", tensor, table_kind
        for name, child in names["_modules"].items():
            if child is not None and id(child) not in seen:
                seen[id(child)] = child
                modules.append((f"{path}.{name}", child))
        for name, held in list(names.items()):
            if held if name in _HOOKS else name not in _MODULE_TABLES and type(held) not in LEAF_TYPES:
                yield f"{path}.{name}", held, kind


def optimized_by(optimizer: torch.optim.Optimizer) -> Iterator[Part]:
    """Yield the tensors that an optimizer changes."""
    for group in optimizer.param_groups:
        yield from ((f".param_groups[...]['params'][{i}]", held, "weights") for i, held in enumerate(group["params"]))


def of_tensor(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of a tensor, and the attributes that the user set."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(tensor, name)
        if hooks:
            yield f".{name}", hooks
    yield from ((more, held) for more, held in own(tensor) if more != "._host")  # the values of a tensor on the virtual GPU


def elements(value: Any, kind: str | None) -> Iterator[Part]:
    """Yield the elements of a mapping or a sequence, unless all of them are leaves, and likewise the keys of a mapping."""
    if isa(value, Mapping):
        keys, values = list(value), list(value.values())
        if not _only_leaves(values):
            yield from ((_key_text(key), held, kind) for key, held in zip(keys, values, strict=False))
        if not _only_leaves(keys):
            yield from ((f" (its key {i})", key, kind) for i, key in enumerate(keys))
    elif not _only_leaves(value):
        yield from ((f"[{i}]", held, kind) for i, held in enumerate(list(value)))


def own(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes stored in an object, without calling properties or `__getattr__`."""
    try:
        names = object.__getattribute__(value, "__dict__")
    except AttributeError:
        names = {}
    for name, held in list(names.items()):
        yield f".{name}", held
    for base in type(value).__mro__:
        if "__slots__" in vars(base):
            for name, member in list(vars(base).items()):
                if isa(member, MemberDescriptorType):
                    with suppress(AttributeError):  # not set
                        yield f".{name}", member.__get__(value)


def _of_table(table: Any) -> Iterator[Part]:
    """Yield the columns of a pandas table that hold Python objects, and its attributes."""
    columns = [("", table)]
    if table.ndim == 2:
        columns = [(_key_text(name), table.iloc[:, i]) for i, name in enumerate(table.columns)]
    yield from ((more, column.to_numpy(), None) for more, column in columns if column.dtype == object)
    yield from ((more, held, None) for more, held in own(table))


def _kind_below(value: Any) -> str | None:
    """Return the kind of the tensors that an object holds: "kv" for a cache of keys and values; None if it isn't known."""
    kind = type(value)
    if "cache" not in kind.__name__.lower():
        return None
    if any(_KV_NAME.search(base.__name__) or base.__module__.endswith(_KV_MODULES) for base in kind.__mro__):
        return "kv"
    names = {name[1:].lstrip("_") for name, _ in own(value)}
    return "kv" if any(pair <= names for pair in _KEYS_AND_VALUES) else None


def _of_function(function: Any) -> Iterator[Part]:
    """Yield what a function or a bound method holds: its object, closure, default arguments and attributes."""
    if isa(function, MethodType):
        yield ".__self__", function.__self__, None
        function = function.__func__
    if not isa(function, FunctionType):  # a method may be bound to any callable object
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
    yield from ((more, held, None) for more, held in own(function))


def _key_text(key: Any) -> str:
    """Return a key as text if it is short and plain. The repr of a tensor would copy it from the GPU."""
    text = repr(key) if type(key) in (str, int, bool, type(None)) else ""
    return f"[{text}]" if 0 < len(text) < 40 else "[...]"


def is_leaf(value: Any) -> bool:
    """Return whether a value holds nothing of interest: a number, a text or the like, or a small container of such values."""
    kind = type(value)
    if kind in LEAF_TYPES:
        return True
    if kind not in PLAIN or len(value) > _SMALL:
        return False
    return _only_leaves(value) and (kind is not dict or _only_leaves(value.values()))


def _only_leaves(values: Iterable[Any]) -> bool:
    """Return whether all values are of leaf types. One set operation is fast enough for a tokenizer's 100,000 words."""
    return set(map(type, values)) <= LEAF_TYPES


@lru_cache(maxsize=4096)
def is_users(module: str) -> bool:
    """Return whether a module is the user's: not of the standard library, of an installed package, or of this package."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module == "__main__" or (file is not None and not is_installed(file))


def isa(value: Any, kinds: Any) -> bool:
    """Return isinstance(value, kinds) by the type alone: reading the `__class__` of a lazy proxy would load its target."""
    return issubclass(type(value), kinds)
