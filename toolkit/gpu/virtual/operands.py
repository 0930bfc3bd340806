"""Operands and results of operations, taken apart by the containers they come in. PyTorch's walk through trees of any type is
slower, and a model of sixty layers took it two thousand times a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """The same lists, tuples and dicts, with what `change` makes of everything else in them."""
    if isinstance(x, list | tuple):
        return type(x)([mapped(change, one) for one in x])
    if isinstance(x, dict):
        return {name: mapped(change, one) for name, one in x.items()}
    return change(x)


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in lists, tuples and dicts, in order."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for one in x:
            yield from tensors_in(one)
    elif isinstance(x, dict):
        yield from tensors_in(list(x.values()))
