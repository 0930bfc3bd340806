"""Typed access to the fields of config.json and GGUF metadata, with errors that name the field."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.core.errors import ModelError, kind_of
from toolkit.core.numbers import real

_REQUIRED = object()
MOST_LAYERS = MOST_EXPERTS = 4096  # well above any real model: rejects corrupt headers before allocating lists


class Fields:
    """Typed look-ups in a mapping from a file. Every method raises ModelError, naming the field, if its value is not usable.

    `source` names the origin ("config.json", "GGUF metadata") in messages. `prefix` is prepended to each name ("qwen3.").
    """

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"reading {source}", f"it is {kind_of(values)}", "Give a mapping of field names to values")
        self.source, self.values, self.prefix = source, values, prefix

    def size(self, name: str, default: Any = _REQUIRED, null: Any = None, most: int = 1 << 31) -> int:
        """Return a whole number from 1 to `most`. A missing field gives `default`, an explicit null gives `null`."""
        value = self._get(name, default)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(name, value, "a whole number of at least 1" + (f" and at most {most:,}" if most < 1 << 31 else ""))
        return int(value)

    def count(self, name: str, default: int) -> int:
        """Return a whole number of at least 0; null gives the default."""
        value = self._get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 31:
            raise self.wrong(name, value, "a whole number of at least 0")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """Return a finite number above 0."""
        value = self._get(name, default)
        found = real(value)
        if found is None or not 0 < found < math.inf:
            raise self.wrong(name, value, "a number above 0")
        return found

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """Return True or False; null is False."""
        value = self._get(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """Return the token ids of a field that holds one id, a list of ids, or nothing."""
        value = self.values.get(self.prefix + name)
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(name, value, "a token id or a list of token ids")
        return tuple(ids)

    def only(self, name: str, *supported: Any) -> None:
        """Raise ModelError unless the field has one of the `supported` values; a missing field has the first of them."""
        value = self.values.get(self.prefix + name, supported[0])
        if value not in supported:
            raise self.wrong(name, value, " or ".join(repr(s) for s in supported), "not supported")

    def wrong(self, name: str, value: Any, needed: str, why: str = "not valid") -> ModelError:
        """Return the error for a field with an unusable value."""
        name, found = self.prefix + name, f"{value!r:.200}: {why}"
        return ModelError(f"{self.source} field {name!r}", found, f"Supported: {needed}", field=name, value=value)

    def _get(self, name: str, default: Any) -> Any:
        name = self.prefix + name
        value = self.values.get(name, default)
        if value is _REQUIRED:
            raise ModelError(
                f"{self.source} field {name!r}", "it is missing", "Add it, since this architecture requires it", field=name
            )
        return value


def check_gguf_routing(own: Fields) -> None:
    """Raise ModelError unless experts are chosen among all and weighted by a softmax, with weights scaled to sum to one."""
    own.only("expert_group_count", 0, 1)
    own.only("expert_weights_norm", True)
    own.only("expert_weights_scale", 1.0, 0.0)
    own.only("expert_gating_func", 1)  # softmax


def check_gguf_window(own: Fields) -> None:
    """Raise ModelError if layers attend to a sliding window only. GGUF does not say which layers of a Qwen do."""
    name, most = "attention.sliding_window", own.size("context_length")
    window = own.values.get(own.prefix + name)
    if window not in (None, 0) and not (isinstance(window, int) and window >= most):
        raise own.wrong(name, window, f"0, or a window of at least the context_length of {most:,}", "not supported")


def vocab_from_gguf(fields: Fields, own: Fields, tensors: Mapping[str, Sequence[int]]) -> int:
    """Return the vocabulary size of a GGUF model: the rows of its embedding table, or else the length of its token list."""
    tokens = fields.values.get("tokenizer.ggml.tokens")
    table = tensors.get("token_embd.weight")
    known = table[0] if table else len(tokens) if isinstance(tokens, Sequence) else None
    return own.size("vocab_size") if known is None else int(known)
