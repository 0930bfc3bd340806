"""Reading a model's config out of config.json or GGUF metadata, where a wrong field must be named, not guessed around."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from toolkit.errors import ModelError

_REQUIRED = object()


class Fields:
    """Typed look-ups in a mapping that somebody else wrote. Every refusal is a ModelError that names the field.

    `source` says where the mapping comes from ("config.json", "GGUF metadata"), for the message.
    """

    def __init__(self, source: str, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise ModelError(f"a model's {source}", f"a {type(values).__name__}", "It must map field names to values")
        self.source, self.values = source, values

    def size(self, name: str, default: Any = _REQUIRED, null: Any = None) -> int:
        """A whole number from 1 to 2**31; `null` is what a stated null means."""
        value = self._get(name, default)
        value = null if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 31:
            raise self.wrong(name, value, "a whole number from 1 on")
        return int(value)

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
        value = self.values.get(name)
        ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.wrong(name, value, "a token id or a list of token ids")
        return tuple(ids)

    def only(self, name: str, *supported: Any) -> None:
        """Refuse a field whose value is none of `supported` (absent counts as the first)."""
        value = self.values.get(name, supported[0])
        if value not in supported:
            raise self.wrong(name, value, " or ".join(repr(s) for s in supported), "this model file doesn't support it")

    def wrong(self, name: str, value: Any, needed: str, why: str = "not usable") -> ModelError:
        """The error for a field: its name, its value, what would do."""
        found = f"{value!r:.200}: {why}"
        return ModelError(f"{self.source} field {name!r}", found, f"Supported: {needed}", field=name, value=value)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name, default)
        if value is _REQUIRED:
            raise ModelError(f"{self.source} field {name!r}", "it is missing", "This architecture must state it", field=name)
        return value
