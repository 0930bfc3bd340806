"""Prompts into token ids, and token ids into text piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from toolkit.core.errors import ModelError

if TYPE_CHECKING:
    from toolkit.models.model import Model


def prompt_ids(model: Model, prompt: object) -> list[int]:
    """The token ids of `prompt`: a text, a list of ids, or a tensor or array of them [T] or [1, T].

    Raises ModelError for a text without a tokenizer, a batch, an empty prompt, or ids outside of the vocabulary.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ModelError("a prompt of text", "this model came without a tokenizer", "Pass token ids: [1, 2, 3] or a tensor")
        ids: Any = model.tokenizer.encode(prompt)
    else:
        ids = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
    if not isinstance(ids, list | tuple):
        raise ModelError(
            "a prompt", f"a {type(prompt).__name__}", "Give a text, a list of token ids, or a tensor [T] or [1, T]"
        )
    if ids and all(isinstance(row, list | tuple) for row in ids):
        if len(ids) > 1:
            raise ModelError("a prompt", f"a batch of {len(ids)} sequences", "Batches aren't supported: one sequence at a time")
        ids = ids[0]
    if not ids:
        raise ModelError("a prompt", "it has no tokens", "Give at least one token")
    vocab_size = model.config.vocab_size
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size:
            raise ModelError(
                "a prompt of token ids", f"{i!r:.80} is among them", f"Ids are whole numbers from 0 to {vocab_size - 1:,}"
            )
    return list(ids)


class TextStream:
    """Turns tokens into text as they come. A character that several tokens spell is held back until it is whole."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = self.start = 0  # ids[start:shown] have been shown; they give the next piece its context

    def piece(self, token: int) -> str:
        """The text that `token` adds; empty while a character is incomplete, or without a tokenizer."""
        if self.tokenizer is None:
            return ""
        self.ids.append(token)
        before = self.tokenizer.decode(self.ids[self.start : self.shown])
        text: str = self.tokenizer.decode(self.ids[self.start :])
        if len(text) <= len(before) or text.endswith("\ufffd"):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return text[len(before) :]
