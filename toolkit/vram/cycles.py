"""Find objects that only Python's garbage collector can free: those in reference cycles, and those that they refer to.

The collector itself finds them only by freeing them. `garbage` applies its rule to a few objects instead: it finds the objects
that refer to them, then those that refer to these, and so on. If every reference to these objects comes from one of them, then
nothing else can reach them.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Set
from functools import lru_cache
from itertools import chain
from types import ModuleType
from typing import Any

import torch

_WIDEST = 256  # objects whose referrers are found at once: each one is compared with every reference of the process


def garbage(objects: list[Any], over: Callable[[], bool]) -> tuple[list[Any], list[Any]]:
    """Return which of `objects`, and of the objects that refer to them, are garbage and which are alive, the nearest first.

    A tensor that only C++ refers to, because an autograd graph saved it, is in neither result. `over` is called before each
    look at all objects of the process. Once it returns True, the undecided objects count as alive. The caller must keep the
    collector from running, and hold no reference to an element of `objects` but this list.
    """
    members: dict[int, Any] = {}  # by id
    children: dict[int, list[int]] = {}  # id of an object -> ids of the members that it refers to
    alive: set[int] = set()
    saved: set[int] = set()
    tasks = [weakref.ref(one) for one in gc.get_objects() if type(one) is asyncio.Task]  # strong references would count
    new = objects
    while new:  # no variable of this function may refer to a member, which would count as a reference
        counts = dict(zip(map(id, new), _references(new), strict=True))
        members.update(zip(counts, new, strict=True))
        if len(new) > _WIDEST or over():
            alive.update(counts)
            break
        above = [one for one in gc.get_referrers(*new) if one is not new and one is not members]
        above += _tasks_above(tasks, counts.keys(), set(map(id, above)))
        edges = [[i for i in map(id, gc.get_referents(one)) if i in counts] for one in above]
        held = Counter(chain.from_iterable(edges))
        undecided: set[int] = set()
        for i, count in counts.items():
            if count > held[i] + _by_cpp(members[i]) or _is_namespace(members[i]):
                alive.add(i)
            else:
                (undecided if held[i] else saved).add(i)
        for i, found in zip(map(id, above), edges, strict=True):
            children.setdefault(i, []).extend(found)
        new = [
            one for one, found in zip(above, edges, strict=True) if id(one) not in members and not undecided.isdisjoint(found)
        ]
        del above
    todo = list(alive)
    while todo:
        reached = set(children.get(todo.pop(), ())) - alive
        alive |= reached
        todo += reached
    dead = [one for i, one in members.items() if i not in alive and i not in saved]
    return dead, [one for i, one in members.items() if i in alive and not _is_namespace(one)]


def _tasks_above(tasks: list[weakref.ref[Any]], wanted: Set[int], known: set[int]) -> list[Any]:
    """Return the tasks that refer to an object in `wanted`, other than those in `known`.

    `gc.get_referrers` doesn't find all of them: in Python 3.11, a task does not report the error with which it ended.
    """
    alive = [task for task in (ref() for ref in tasks) if task is not None and id(task) not in known]
    return [task for task in alive if not wanted.isdisjoint(map(id, gc.get_referents(task)))]


def _references(objects: list[Any]) -> list[int]:
    """Return the number of references to each object, apart from the one by the list `objects`."""
    known = next(map(sys.getrefcount, [object()]))
    return [count - known for count in map(sys.getrefcount, objects)]


def _is_namespace(value: Any) -> bool:
    """Return whether an object is a module or its variables. Everything below is alive, and all functions of it refer to it."""
    return isinstance(value, ModuleType) or (type(value) is dict and "__builtins__" in value)


def _by_cpp(value: Any) -> int:
    """Return how many of the references to an object are those of C++ to a tensor."""
    return int(issubclass(type(value), torch.Tensor) and value._use_count() > 1 and _cpp_counts())


@lru_cache
def _cpp_counts() -> bool:
    """Return whether the references of C++ to a tensor count as one reference to its Python object. It depends on PyTorch."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        before = sys.getrefcount(leaf)
        result = leaf * 2  # its graph refers to the leaf
        return sys.getrefcount(leaf) > before and result.requires_grad
