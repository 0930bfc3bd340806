"""Reading a model's config out of config.json or GGUF metadata, where a wrong field must be named, not guessed around."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.core.errors import ModelError

_REQUIRED = object()
MOST_LAYERS, MOST_EXPERTS = 4096, 4096  # what no model comes near: a header that lies is refused before lists are made of it


class Fields:
    """Typed look-ups in a mapping that somebody else wrote. Every refusal is a ModelError that names the field.

    `source` says where the mapping comes from ("config.json", "GGUF metadata"), for the message. `prefix` stands before
    every name asked for ("qwen3.").
    """

    def __init__(self, source: str, values: Mapping[str, Any], prefix: str = "") -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"a model's {source}", f"a {type(values).__name__}", "It must map field names to values")
        self.source, self.values, self.prefix = source, values, prefix

    def size(self, name: str, default: Any = _REQUIRED, null: Any = None, most: int = 1 << 31) -> int:
        """A whole number from 1 to `most`; `null` is what a stated null means."""
        value = self._get(name, default)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise self.wrong(name, value, "a whole number from 1 on" + (f", up to {most:,}" if most < 1 << 31 else ""))
        return int(value)

    def count(self, name: str, default: int) -> int:
        """A whole number from 0 on; null is the default."""
        value = self._get(name, default)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 31:
            raise self.wrong(name, value, "a whole number from 0 on")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number above 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or false; null is false."""
        value = self._get(name, default)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return bool(value)

    def ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.values.get(self.prefix + name)
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(name, value, "a token id or a list of token ids")
        return tuple(ids)

    def only(self, name: str, *supported: Any) -> None:
        """Refuse a field whose value is none of `supported` (absent counts as the first)."""
        value = self.values.get(self.prefix + name, supported[0])
        if value not in supported:
            raise self.wrong(name, value, " or ".join(repr(s) for s in supported), "this model file doesn't support it")

    def wrong(self, name: str, value: Any, needed: str, why: str = "not usable") -> ModelError:
        """The error for a field: its name, its value, what would do."""
        name, found = self.prefix + name, f"{value!r:.200}: {why}"
        return ModelError(f"{self.source} field {name!r}", found, f"Supported: {needed}", field=name, value=value)

    def _get(self, name: str, default: Any) -> Any:
        name = self.prefix + name
        value = self.values.get(name, default)
        if value is _REQUIRED:
            raise ModelError(f"{self.source} field {name!r}", "it is missing", "This architecture must state it", field=name)
        return value


def vocab_from_gguf(fields: Fields, own: Fields, tensors: Mapping[str, Sequence[int]]) -> int:
    """How many tokens a model of GGUF metadata knows: its table's rows (shapes as PyTorch writes them), or its tokenizer's."""
    tokens = fields.values.get("tokenizer.ggml.tokens")
    table = tensors.get("token_embd.weight")
    known = table[0] if table else len(tokens) if isinstance(tokens, Sequence) else None
    return own.size("vocab_size") if known is None else int(known)
