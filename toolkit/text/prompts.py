"""Converts prompts to token ids (`prompt_ids`), and streams of token ids to text (`TextStream`, `StopText`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from toolkit.core.errors import ModelError, brief, kind_of
from toolkit.core.numbers import integer

if TYPE_CHECKING:
    from toolkit.models.model import Model

MOST_HELD = 64  # tokens held back, all of which are decoded for each token: an incomplete character has at most four


def prompt_ids(model: Model, prompt: object) -> list[int]:
    """Return the token ids of `prompt`: a str, a sequence of ids, or a tensor or array of ids [T] or [1, T].

    Raises ModelError for a str if the model has no tokenizer, for a batch, an empty prompt, and ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        if model.tokenizer is None:
            raise ModelError("a prompt of text", "this model came without a tokenizer", "In Python, pass token ids: [1, 2, 3]")
        ids: Any = model.tokenizer.encode(prompt)
    else:
        if isinstance(prompt, Tensor) and (prompt.is_meta or prompt.is_nested or prompt.layout is not torch.strided):
            kind = "of sequences (nested)" if prompt.is_nested else f"with the layout {prompt.layout}"
            kind = "on the device meta, without values" if prompt.is_meta else kind
            raise ModelError("a prompt", f"a tensor {kind}", "Give an ordinary tensor [T] or [1, T]")
        ids = prompt.tolist() if isinstance(prompt, Tensor | np.ndarray) else prompt
        if isinstance(ids, Sequence) and not isinstance(ids, bytes | bytearray | memoryview):
            ids = list(ids)
    if not isinstance(ids, list | tuple):
        raise ModelError("a prompt", kind_of(prompt), "Give a text, a list of token ids, or a tensor [T] or [1, T]")
    if ids and all(isinstance(row, list | tuple) for row in ids):
        if len(ids) > 1:
            raise ModelError("a prompt", f"a batch of {len(ids)} sequences", "Batches aren't supported: one sequence at a time")
        ids = ids[0]
    if not ids:
        raise ModelError("a prompt", "it has no tokens", "Give at least one token")
    vocab_size = model.config.vocab_size
    found = [integer(i, least=0) for i in ids]
    for given, i in zip(ids, found, strict=True):
        if isinstance(given, str | Mapping):
            do = "Give one text. For messages, it is model.tokenizer.chat(messages)"
            raise ModelError("a prompt", "a list of texts or chat messages, which aren't supported", do)
        if i is None or i >= vocab_size:
            raise ModelError(
                "a prompt of token ids", f"{brief(given)} is among them", f"Ids are whole numbers from 0 to {vocab_size - 1:,}"
            )
    return [i for i in found if i is not None]


class TextStream:
    """Decodes tokens one at a time. A character that is spread over several tokens is held back until it is complete."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = self.start = 0  # ids[start:shown] were decoded before; they are the context of the next piece

    def piece(self, token: int) -> str:
        """Return the text that `token` adds: empty while a character is incomplete, or if there is no tokenizer."""
        if self.tokenizer is None:
            return ""
        self.ids.append(token)
        held = self._held()
        if not held or (held.endswith("\ufffd") and len(self.ids) - self.shown < MOST_HELD):
            return ""
        self.start, self.shown = self.shown, len(self.ids)
        return held

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Return the text that `tokens` add, in pieces."""
        whole = self.tokenizer.decode(tokens) if self.tokenizer is not None and tokens else ""
        return [whole] if "\ufffd" not in whole else list(map(self.piece, tokens))

    def rest(self) -> str:
        """Return the text that was held back, after the last token. A character that is still incomplete becomes U+FFFD."""
        held = self._held()
        self.start, self.shown = self.shown, len(self.ids)
        return held

    def _held(self) -> str:
        if self.shown == len(self.ids):
            return ""
        before = self.tokenizer.decode(self.ids[self.start : self.shown])
        text: str = self.tokenizer.decode(self.ids[self.start :])
        if text.startswith(before):
            return text[len(before) :]
        # Decoders of byte tokens (<0x0A>) make a whole run of them U+FFFD if one character of it is incomplete.
        alone: str = self.tokenizer.decode(self.ids[self.shown :])
        return alone


class StopText:
    """Ends a text before the first of some stop strings. The end of the text so far is held back if a stop may begin there."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.found = False
        self._held = ""

    def add(self, piece: str) -> str:
        """Append `piece` and return the text that can be shown now. Sets `found` if the text ended."""
        text = self._held + piece
        at = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if at:
            self.found, self._held = True, ""
            return text[: min(at)]
        keep = max((n for stop in self.stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
        shown, self._held = text[: len(text) - keep], text[len(text) - keep :]
        return shown

    def rest(self) -> str:
        """Return the text that was held back, at the end of a text without a stop string."""
        held, self._held = self._held, ""
        return held
