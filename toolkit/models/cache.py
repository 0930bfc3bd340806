"""The static key-value cache: room for a whole conversation, allocated once, written in place.

It holds tensors and positions' tables; it doesn't know a model, nor how far decoding has come: the position is given
with every write, as a tensor on the device, so that no step needs the host to know it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toolkit.errors import ModelError

BOUND_MULTIPLE = 256  # attention reads a whole number of these slots: few distinct shapes, little read in vain


class Cache:
    """Keys and values of every layer for one sequence of at most `context` tokens.

    `keys[layer]`, `values[layer]`: [1, KV heads, context, head_dim], zero where nothing was written yet (attention
    reads beyond the current length and masks it; a NaN there would survive the mask). `slots`: [context] int64, the
    numbers 0 to context - 1; `rope`: [context, 2, head_dim], the rotary table of these positions.
    """

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots: Tensor, rope: Tensor) -> None:
        self.keys, self.values, self.slots, self.rope = keys, values, slots, rope
        self.context = slots.shape[0]

    @classmethod
    def empty(cls, layers: int, kv_heads: int, head_dim: int, slots: Tensor, rope: Tensor) -> Cache:
        """A cache of `slots.shape[0]` positions on the device and in the dtype of `rope`."""
        shape = (1, kv_heads, slots.shape[0], head_dim)
        cache = cls([], [], slots, rope)
        try:
            for held in (cache.keys, cache.values):
                held.extend(torch.zeros(shape, dtype=rope.dtype, device=rope.device) for _ in range(layers))
        except torch.OutOfMemoryError:
            cache.free()  # the error's traceback would hold what was allocated so far
            raise
        return cache

    def write(self, layer: int, key: Tensor, value: Tensor, positions: Tensor) -> None:
        """Put `key` and `value` [1, KV heads, T, head_dim] where `positions` [T] (on the device) says."""
        self.keys[layer].index_copy_(2, positions, key)
        self.values[layer].index_copy_(2, positions, value)

    def read(self, layer: int, bound: int) -> tuple[Tensor, Tensor]:
        """Views of the first `bound` slots: [1, KV heads, bound, head_dim] each."""
        return self.keys[layer][:, :, :bound], self.values[layer][:, :, :bound]

    def bound(self, length: int) -> int:
        """How many slots attention must read for `length` tokens. ModelError where the cache is too small for them."""
        if length > self.context:
            raise ModelError(f"{length:,} tokens", f"the cache has room for {self.context:,}", "Give a larger context=")
        return min(self.context, -(-length // BOUND_MULTIPLE) * BOUND_MULTIPLE)

    def free(self) -> None:
        """Let go of the device memory now, even where a traceback still holds this object."""
        self.keys.clear()
        self.values.clear()
        self.slots = self.rope = torch.empty(0)
