"""Modules moved to the virtual GPU keep what they share: tied weights stay one parameter, uploaded once.

On CUDA `Module.to` fills each parameter in place, so a shared one is still shared. PyTorch makes new parameters
where the kind of tensor changes, one for each place it is found in; here the places are joined again. Knows no card.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_apply = nn.Module._apply


def _apply_once(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`Module._apply`, with `fn` called once for each parameter, however many modules hold it."""
    if hasattr(fn, "once"):  # inside an outer call
        return _apply(self, fn, recurse)
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for module in self.modules() if recurse else (self,):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module._parameters, name))
    shared = {key: where for key, where in places.items() if len(where) > 1}
    if not shared:
        return _apply(self, fn, recurse)
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # holds the operand too, so that its id stays its own

    @functools.wraps(fn)
    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in shared:
            return fn(tensor)
        if id(tensor) not in kept:
            kept[id(tensor)] = tensor, fn(tensor)
        return kept[id(tensor)][1]

    once.once = True  # type: ignore[attr-defined]
    _apply(self, once, recurse)
    for where in shared.values():
        first_of, first_name = where[0]
        for holder, name in where[1:]:
            holder[name] = first_of[first_name]
    return self


def install() -> None:
    """Replace `Module._apply`, for the process; modules that share nothing are moved as before."""
    nn.Module._apply = _apply_once  # type: ignore[method-assign]
