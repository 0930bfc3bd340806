"""Options that are True or False. A text counts as true in Python, also "no", so nothing but a boolean is accepted."""

from __future__ import annotations

from toolkit.core.errors import ToolkitError, brief


def is_flag(value: object) -> bool:
    """Return whether `value` is a boolean, of Python or NumPy. NumPy isn't imported."""
    kind = type(value)
    return kind is bool or (kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"))  # bool_ before NumPy 2


def flag(name: str, value: object, error: type[ToolkitError] = ToolkitError) -> bool:
    """Return the option `name` as Python's True or False. Raises `error` if its value is not a boolean."""
    if not is_flag(value):
        raise error(f"{name}={brief(value)}", "neither True nor False", "Give one of them")
    return bool(value)
