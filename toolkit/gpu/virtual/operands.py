"""Walk the lists, tuples and dicts of an operation's operands or results.

torch.utils._pytree supports any container, but is slower: a decode step of a model with sixty layers makes two thousand walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def mapped(change: Callable[[Any], Any], x: Any) -> Any:
    """Return `x` with every leaf of its lists, tuples and dicts replaced by `change(leaf)`."""
    if isinstance(x, list | tuple):
        return type(x)([mapped(change, one) for one in x])
    if isinstance(x, dict):
        return {name: mapped(change, one) for name, one in x.items()}
    return change(x)


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples and dicts, in order."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for one in x:
            yield from tensors_in(one)
    elif isinstance(x, dict):
        yield from tensors_in(list(x.values()))
