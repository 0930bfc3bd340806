"""Parse JSON into typed values: the one place where data from files gets its types."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")


def parse_json(data: bytes | str, kind: type[T] | Any = Any) -> T:
    """Return JSON as a value of type `kind`: a dataclass, TypedDict, dict[str, int], ...

    Raises ValueError, which says where, if it is not JSON, is nested too deeply, or contains a value of another type.
    """
    try:
        return convert(json.loads(data), kind)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deeply") from error


def convert(value: Any, kind: type[T] | Any) -> T:
    """Return plain data (dicts, lists, text, numbers) as a value of type `kind`. Raises ValueError, which says where."""
    try:
        found: T = msgspec.convert(value, kind)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    return found


def without_surrogates(value: Any) -> Any:
    """Return JSON with "?" for each half of a surrogate pair, which can neither be printed nor written in UTF-8."""
    try:
        return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
