"""`HfCache`: the static cache of transformers with the interface of the toolkit's caches."""

from __future__ import annotations

import copy
from typing import Any

import torch

from toolkit.core.errors import ModelError
from toolkit.core.units import plural
from toolkit.models.cache import Cache


class HfCache(Cache):
    """A StaticCache of transformers, which counts positions itself, and the slot indices for a prefill."""

    def __init__(self, config: Any, context: int, device: torch.device) -> None:
        from transformers import StaticCache

        super().__init__(torch.arange(context, device=device), {})
        self.inner = StaticCache(config=config, max_cache_len=context)
        self._saved: dict[int, list[dict[str, Any]]] = {}  # the states of all layers at the checkpoint, by its position

    def __repr__(self) -> str:
        if not self.inner.layers:
            return "HfCache(freed)"
        room = f"{self.length:,} of {plural(self.context, 'position')} filled"
        return f"HfCache({plural(len(self.inner.layers), 'layer')}, {room})"

    def checkpoint(self) -> int:
        """Save the layers, so that `rollback` can return to this position, and return it. Forgets an earlier checkpoint."""
        self._saved = {self.length: [copy.deepcopy(_passing(layer)) for layer in self.inner.layers]}
        return self.length

    def rollback(self, position: int) -> None:
        """Forget the tokens from `position` on. Raises ModelError unless the `checkpoint` was made there."""
        if position not in self._saved:
            found = f"checkpoints: {', '.join(map(str, self._saved)) or 'none'}"
            raise ModelError(f"rollback to {position:,}", found, "Call cache.checkpoint() at the position to return to")
        for layer, saved in zip(self.inner.layers, self._saved[position], strict=True):
            vars(layer).update(copy.deepcopy(saved))
        self.length = position

    def free(self) -> None:
        """Free the device memory now, even if a traceback keeps this object alive."""
        self.inner.layers.clear()
        self._saved.clear()
        super().free()


def _passing(layer: Any) -> dict[str, Any]:
    """Return the attributes of a layer that new tokens change for good.

    A StaticLayer overwrites keys and values after its length before it reads them, so these may stay.
    """
    stay = ("keys", "values") if type(layer).__name__ == "StaticLayer" else ()
    return {name: value for name, value in vars(layer).items() if name not in stay}
