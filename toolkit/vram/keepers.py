"""Find the names that keep memory alive together: `del a, b` frees it, while `del a` does not.

A name is a variable, or an attribute of a module or of an object of the user ("net.hidden").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import thread_time
from typing import Any

import torch
from torch import nn

from toolkit.trace.ledger import whole
from toolkit.vram import owners
from toolkit.vram.owners import Holder, Place
from toolkit.vram.parts import is_users

_MOST_S = 2.0  # seconds of processor time of each search
_MODULE_TABLES = frozenset(vars(nn.Module()))
_OWN = (str, bytes, Mapping, list, tuple, set, frozenset, type)  # objects without attributes of interest


@dataclass
class Name:
    """A name and the memory on GPUs that it reaches. `root` is its variable, and `values` are the objects that it names."""

    text: str
    root: str
    values: list[Any]
    places: set[Place] = field(default_factory=set)

    @property
    def attribute(self) -> str:
        """The name of the attribute; "" for a variable."""
        return "" if self.text == self.root else self.text.rpartition(".")[2]


def names(variables: Mapping[str, Any], sizes: Mapping[str, int]) -> list[Name]:
    """Return the names that reach memory on a GPU. A variable reaches what none of its listed attributes does, maybe nothing.

    `sizes` are bytes by variable: the largest are walked first. If there is too much to walk one by one, all others together
    have the name "".
    """
    found: dict[str, list[Name]] = {}
    ends_s = thread_time() + _MOST_S
    left = owners.users(variables)
    order = list(left)
    for root in sorted(order, key=lambda name: -sizes.get(name, 0)):
        if thread_time() > ends_s:
            found[""] = [Name("", "", [], set(_on_gpus(owners.find(left))))]
            break
        value = left.pop(root)
        held = _on_gpus(owners.find({root: value}))
        if not held:
            continue
        parts = list(_attributes(root, value))
        for part in parts:
            reached = _on_gpus(owners.walk((part.text, one) for one in part.values))
            module = isinstance(value, nn.Module)  # through a graph, an attribute reaches the weights of its module
            part.places = {place for place, holder in reached.items() if not module or holder.kind == "activations"}
        rest = set(held).difference(*(part.places for part in parts))
        found[root] = [Name(root, root, [value], rest), *(part for part in parts if part.places)]
    return [name for root in (*order, "") for name in found.get(root, ())]


def _on_gpus(found: Mapping[Place, Holder]) -> dict[Place, Holder]:
    return {place: holder for place, holder in found.items() if place[0] != "cpu"}


def _attributes(root: str, value: Any) -> Iterator[Name]:
    """Yield the attributes of an object of the user: those of a module that are neither parameters, buffers nor modules."""
    if isinstance(value, _OWN) or not is_users(type(value).__module__):
        return
    with suppress(Exception):  # a user's object may raise
        if not isinstance(value, nn.Module):
            attributes = object.__getattribute__(value, "__dict__")
            yield from (Name(f"{root}.{name}", root, [held]) for name, held in list(attributes.items()))
            return
        alike: dict[str, list[tuple[str, Any]]] = {}
        for path, module in value.named_modules():
            for name, held in list(vars(module).items()):
                if name not in _MODULE_TABLES:
                    alike.setdefault(name, []).append((".".join(filter(None, (root, path, name))), held))
        for name, same in alike.items():
            yield Name(same[0][0] if len(same) == 1 else f"{root}.*.{name}", root, [held for _, held in same])


def graphs(variables: Mapping[str, Any], found: Mapping[Place, Holder], needed: set[int]) -> list[tuple[str, bool, bool, int]]:
    """Return the variables whose tensors keep memory on GPUs only by their graphs, which `.detach()` would free.

    Each is (name, whether it holds several tensors, whether each has a single element, bytes). `needed` are ids of tensors that
    are left out. `found` maps live memory to its owner.
    """
    only = {place: held for place, held in found.items() if "(its graph" in held.owner and place[0] != "cpu"}
    alike: dict[str, dict[str, torch.Tensor]] = {}  # tensors with graphs, by the name that holds them; one may have several
    ends_s = thread_time() + _MOST_S
    for root, value in owners.users(variables).items() if only else ():
        if thread_time() > ends_s:  # a name that is left out could hold the same graph
            return []
        for path, tensor, _ in owners.tensors([(root, value)]):
            if tensor.grad_fn is not None:
                alike.setdefault(whole(path), {})[path] = tensor
    kept = []
    for name, own in alike.items():
        if thread_time() > ends_s + _MOST_S:
            break
        seen: set[Any] = set()
        for other in (tensor for others, held in alike.items() if others != name for tensor in held.values()):
            seen.update(owners.nodes_of(other, seen))
        saved = [held for tensor in own.values() for _, held in owners.saved_by(tensor, seen)]
        places = {place for held in saved for _, place, _ in owners.memory_of(held)}
        saves = sum(only[place].bytes for place in places if place in only)
        if saves and not any(id(tensor) in needed for tensor in own.values()):
            kept.append((name, [*own] != [name], all(tensor.numel() == 1 for tensor in own.values()), saves))
    return kept
