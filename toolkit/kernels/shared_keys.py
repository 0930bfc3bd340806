"""Keys of which a cache holds only the numbers that rotate, because all others equal the value's.

Gemma 4 31B and 26B-A4B compute keys and values of their full layers by one projection, and normalize both by the same root mean
square. Keys are also multiplied by a weight, and the rotary embedding turns a quarter of their numbers. For the other numbers,
the weight may multiply the queries instead: the scores stay the same, and three quarters of each key equal the value's numbers.

The stored numbers of a key are the first ones of its first half and the first ones of its second half, because the rotary
embedding pairs halves (`toolkit.ops.reference.attention.rotate`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def shared_numbers(head_dim: int, key_dim: int, device: torch.device) -> Tensor:
    """Return which of `head_dim` numbers are not stored for keys: booleans [head_dim]."""
    return torch.arange(head_dim, device=device) % (head_dim // 2) >= key_dim // 2


def shared_weight(k_weight: Tensor, key_dim: int) -> Tensor:
    """Return what multiplies queries instead of keys: the keys' weight [D] where keys equal values, and 1 elsewhere."""
    return torch.where(shared_numbers(k_weight.shape[0], key_dim, k_weight.device), k_weight, 1.0)


def stored_numbers(x: Tensor, key_dim: int) -> Tensor:
    """Return the numbers of x [..., D] that are stored for keys: [..., key_dim]. D itself gives x."""
    if key_dim == x.shape[-1]:
        return x
    return x.unflatten(-1, (2, -1))[..., : key_dim // 2].flatten(-2)


def whole_keys(keys: Tensor, values: Tensor) -> Tensor:
    """Return keys [..., D] from their stored numbers [..., key_dim] and the values [..., D]."""
    if keys.shape == values.shape:
        return keys
    first, second = keys.unflatten(-1, (2, -1)).unbind(-2)
    below, above = values.unflatten(-1, (2, -1))[..., first.shape[-1] :].unbind(-2)
    return torch.cat((first, below, second, above), -1)
