"""`HfCache`: the static cache of transformers with the interface of the toolkit's caches."""

from __future__ import annotations

import copy
from typing import Any

import torch

from toolkit.core.errors import ModelError
from toolkit.core.units import plural
from toolkit.models.cache import Cache

_SLOTS = "transformers computes its attention for the number of tokens so far, not for the slots of a static cache"
_REASONS = {  # by model_type: transformers raises an error for the first two, and gives other tokens for the rest
    "bloom": _SLOTS,
    "minimax": "it uses a cache of its own",
    "doge": _SLOTS,
    "gpt_neo": _SLOTS,
    "recurrent_gemma": "it keeps its recurrent state in its modules, not in a cache",
}
_WHOLE = ("jamba", "zamba")  # their recurrent state begins anew with several tokens


def why_no_static_cache(config: Any) -> str | None:
    """Return why a model of transformers can't use a static cache, or None if it can."""
    text = config.get_text_config(decoder=True)
    reason = _SLOTS if getattr(text, "alibi", False) else _REASONS.get(text.model_type)
    if reason is not None:
        return reason
    try:
        HfCache(config, 1, torch.device("cpu"))
    except Exception as error:  # layer types that have no static cache
        return f"transformers has no static cache for it ({type(error).__name__}: {error!s:.80})"
    return None


class HfCache(Cache):
    """A StaticCache of transformers, which counts positions itself, and the slot indices for a prefill."""

    def __init__(self, config: Any, context: int, device: torch.device) -> None:
        from transformers import StaticCache

        super().__init__(torch.arange(context, device=device), {})
        self.inner = StaticCache(config=config, max_cache_len=context)
        self._whole = config.get_text_config(decoder=True).model_type in _WHOLE
        self._saved: dict[int, list[dict[str, Any]]] = {}  # the states of all layers at the checkpoint, by its position

    def __repr__(self) -> str:
        if not self.inner.layers:
            return "HfCache(freed)"
        room = f"{self.length:,} of {plural(self.context, 'position')} filled"
        return f"HfCache({plural(len(self.inner.layers), 'layer')}, {room})"

    def check_part(self, tokens: int) -> None:
        """Raise ModelError if the model can't continue the tokens that it was fed with several ones at a time."""
        if self._whole and self.length and tokens > 1:
            found = "in transformers, the recurrent state of this model begins anew with each part"
            do = 'Give prefill_chunk= the length of the prompt or more and no prefix=, or use decode="hf-generate"'
            raise ModelError("feeding a prompt in parts", found, do)

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
