"""Find the variable that owns each piece of memory, by walking from variables to the tensors that they reach.

`find(variables)` names the memory of every tensor by the shortest path to it ("model.layers.0.mlp.up.weight", "losses[3]") and
classifies it. A path that tells the kind, such as that of a module to its weight, is preferred. `hidden.py` finds the memory
that is held without a variable. The walk only reads: it changes no value and calls no property of a user's class.
"""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from time import thread_time
from types import ModuleType
from typing import Any

import torch
from torch import nn

from toolkit.core.callers import ipython_shell
from toolkit.vram.parts import (
    LEAF_TYPES,
    LEAVES,
    PLAIN,
    Part,
    elements,
    is_leaf,
    is_users,
    isa,
    of_module,
    of_tensor,
    optimized_by,
    own,
    parts_of,
)

# Limits of one walk, so that no cell waits long.
MOST = 200_000  # values
_LEAST = 4096  # values that are walked in any case: a virtual machine may stand still, and processor time passes meanwhile
_AT_ONCE = 1000  # parts of one value: the rest of a larger container waits until everything else is walked
_MOST_NODES = 50_000  # nodes of autograd graphs
_MOST_S = 0.5  # seconds of processor time: on a busy machine a walk takes longer, but finds the same
_DEPTH = 16  # steps from a variable: of a module farther away, only what a graph reaches has an owner
_PYTHONS = re.compile(r"__\w+__")
_NOTEBOOKS = re.compile(r"_+|_i+|_i?[0-9]+|_[ido]h|In|Out|__\w+__")  # inputs and results of cells, and Python's own names
_KINDS_BY_FILE = {
    "models/cache.py": "kv", "models/cache_codes.py": "kv", "transformers/cache_utils.py": "kv", "toolkit/loading/": "weights",
}  # fmt: skip

_ROWS, _COLUMNS = ("crow_indices", "col_indices", "values"), ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"), torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS,
    torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}  # fmt: skip


@dataclass(frozen=True)
class Holder:
    """The owner of a piece of memory: the path from a variable, and the kind of tensor."""

    owner: str
    kind: str
    bytes: int
    node: int = -1  # the number of the autograd node that saved the memory, if only a graph holds it


Place = tuple[str, int]  # device type, address
_Value = tuple[str, Any, str | None, int]  # to be walked: path, value, kind of the tensors below, steps from a variable


def find(variables: Mapping[str, Any], limit: Limit | None = None) -> dict[Place, Holder]:
    """Return the owner of each place in memory that can be reached from `variables`, named by the shortest path to it."""
    return walk(users(variables).items(), limit)


def of_modules() -> Iterator[tuple[str, Any]]:
    """Yield the global variables of the user's modules, as ("module.name", value)."""
    for name, module in list(sys.modules.items()):
        if isa(module, ModuleType) and is_users(name):
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
        if id(value) in seen or isa(value, (*LEAVES, torch.Tensor)):
            continue
        seen[id(value)] = value
        if len(seen) >= MOST or (len(seen) >= _LEAST and thread_time() > ends_s):
            return True
        with suppress(Exception):  # reading a user's object may raise
            queue.extend(held for _, held, _ in parts_of(value))
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


def memory_of(tensor: torch.Tensor) -> list[tuple[str, Place, int]]:
    """Return the memory of a tensor as (path, place, bytes). A sparse tensor has several pieces: its indices and its values."""
    with suppress(RuntimeError, NotImplementedError):  # as above
        parts = [(f".{name}()", part) for name, part in _of_sparse(tensor)] if tensor.layout in _SPARSE else [("", tensor)]
        placed = [(more, place_of(part), part) for more, part in parts]
        return [(more, place, part.untyped_storage().nbytes()) for more, place, part in placed if place is not None]
    return []


def _of_sparse(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return the indices and values of a sparse tensor, which are views. On a virtual GPU, they would take time."""
    timeless: AbstractContextManager[None] = nullcontext()
    if tensor.device.type == "vgpu":
        from toolkit.gpu.virtual.dispatch import machine

        timeless = machine().from_tape()
    with torch.no_grad(), timeless:
        return [(name, getattr(tensor, name)()) for name in _SPARSE[tensor.layout]]


def kind_by_place(where: str | None) -> str | None:
    """Return the kind of an allocation by the file of its line, or None; "workspace" if it comes from no line of Python."""
    if where is None:
        return "workspace"
    inner = where.rpartition(" > ")[2]
    return next((kind for file, kind in _KINDS_BY_FILE.items() if file in inner), None)


# ---- the walk


@dataclass
class Limit:
    """How long walks follow the rest of large containers, in seconds of processor time, and whether a walk ended early."""

    rest_s: float = _MOST_S
    reached: bool = False


def walk(roots: Iterable[tuple[str, Any]], limit: Limit | None = None) -> dict[Place, Holder]:
    """Return the owner of each place in memory that can be reached from `roots`: pairs of a name and a value."""
    found: dict[Place, Holder] = {}
    graphs: list[tuple[str, torch.Tensor]] = []
    reached = list(tensors(roots, limit))
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
                gradient = _gradient(tensor)
                if gradient is not None:
                    _note(found, f"{path} (its graph: {node.name()}).grad", gradient, "gradients", number)
    return found


def tensors(roots: Iterable[tuple[str, Any]], limit: Limit | None = None) -> Iterator[tuple[str, torch.Tensor, str | None]]:
    """Yield (path, tensor, kind) for each tensor that can be reached from `roots`, those with the shortest paths first.

    The kind is None if the path doesn't tell it. A tensor is yielded again for each path that does. Tensors that only an
    autograd graph holds are not yielded.
    """
    limit = limit or Limit()
    seen: dict[int, Any] = {}  # by id; keeps the values alive, so that no id is reused
    queue: deque[_Value] = deque((path, value, None, 0) for path, value in roots)
    rest: deque[tuple[Iterator[Part], str, str | None, int]] = deque()  # of large containers, each in turn
    optimized: deque[_Value] = deque()  # comes last, as its tensors may have another owner
    began_s, looked, over = thread_time(), 0, False
    while queue or rest or optimized:
        if looked >= _LEAST and (looked % 128 == 0 or not queue) and not over:  # reading the time takes 1 µs
            over = thread_time() - began_s > (_MOST_S if queue else limit.rest_s)
        if (over or len(seen) >= MOST) and (queue or rest):
            limit.reached, over = True, True
            queue.clear()
            rest.clear()
            continue
        looked += 1
        if not queue and rest:
            some = rest.popleft()
            with suppress(Exception):  # as below
                count = _follow(queue, *some)
                looked += count
                if count == _AT_ONCE:
                    rest.append(some)
            continue
        last = not queue
        path, value, kind, depth = (queue or optimized).popleft()
        if type(value) in LEAF_TYPES:
            continue
        if id(value) in seen:
            if kind is not None and not last and isa(value, torch.Tensor):
                yield path, value, kind
            continue
        seen[id(value)] = value
        is_tensor = isa(value, torch.Tensor)
        if is_tensor:
            yield path, value, kind
        # reading a user's object may raise, and other threads may change it during the walk
        with suppress(Exception):
            if is_tensor:
                gradient = _gradient(value)
                if gradient is not None:
                    queue.append((f"{path}.grad", gradient, None, depth + 1))
                if depth < _DEPTH:
                    queue.extend((f"{path}{more}", held, None, depth + 1) for more, held in of_tensor(value))
            elif depth < _DEPTH and not isa(value, LEAVES) and len(queue) < MOST:
                if isa(value, torch.optim.Optimizer):
                    optimized.extend((f"{path}{more}", held, k, depth + 1) for more, held, k in optimized_by(value))
                module = isa(value, nn.Module)
                parts = of_module(value, seen) if module else parts_of(value)
                if _follow(queue, parts, path, kind, depth + 1, None if module else _AT_ONCE) == _AT_ONCE and not module:
                    rest.append((parts, path, kind, depth + 1))


def _follow(
    queue: deque[_Value], parts: Iterator[Part], path: str, kind: str | None, depth: int, most: int | None = _AT_ONCE
) -> int:
    """Add up to `most` parts of the value at `path` to the queue. Return how many were looked at."""
    count = 0
    for more, held, own_kind in islice(parts, most):
        count += 1
        if not is_leaf(held):
            queue.append((f"{path}{more}", held, own_kind or kind, depth))
    return count


def _gradients(reached: Iterable[tuple[str, torch.Tensor, str | None]]) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the gradients of tensors, with their paths."""
    for path, tensor, _ in reached:
        with suppress(Exception):  # a class of tensors may refuse
            gradient = _gradient(tensor)
            if gradient is not None:
                yield f"{path}.grad", gradient, "gradients"


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that a tensor keeps. Reading `.grad` of another one would warn."""
    return tensor.grad if tensor.is_leaf or tensor.retains_grad else None


def _note(found: dict[Place, Holder], path: str, tensor: torch.Tensor, kind: str | None, node: int = -1) -> None:
    for more, place, n_bytes in memory_of(tensor):
        kind = kind or ("weights" if isinstance(tensor, nn.Parameter) else "activations")
        found.setdefault(place, Holder(f"{path}{more}", kind, n_bytes, node))


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
        if isa(leaf, torch.Tensor):
            yield node, leaf
        if isa(node, torch._C._FunctionBase):  # of a torch.autograd.Function: `ctx`, with the attributes that the user set
            for _, held in own(node):
                parts = (part for _, part, _ in elements(held, None)) if type(held) in PLAIN else (held,)
                yield from ((node, part) for part in parts if isa(part, torch.Tensor))
        for name in _saved_names(type(node)):  # type: ignore[arg-type]
            raw = getattr(node, name)
            for saved in raw if isa(raw, tuple | list) else (raw,):
                if getattr(saved, "unpack_hook", saved) is None and isa(saved.data, torch.Tensor):
                    yield node, saved.data


@lru_cache(maxsize=4096)
def _saved_names(node: type) -> tuple[str, ...]:
    """Return the attributes in which a type of node keeps its packed saved tensors."""
    return tuple(name for name in dir(node) if name.startswith("_raw_saved_"))
