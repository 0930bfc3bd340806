"""Numbers that users give: Python's or NumPy's, but neither booleans nor texts."""

from __future__ import annotations

import math
import numbers
import operator

LARGEST = (1 << 63) - 1  # of an int64, in which PyTorch holds sizes


def integer(value: object, least: int | None = None, most: int | None = None) -> int | None:
    """Return `value` as an int if it is a whole number (of any type with `__index__`) from `least` to `most`, else None."""
    if isinstance(value, bool):
        return None
    try:
        found = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):  # a NumPy boolean, an array or a tensor of several numbers
        return None
    return found if (least is None or found >= least) and (most is None or found <= most) else None


def seed_of(value: object) -> int | None:
    """Return `value` as an int if it is a seed that `torch.manual_seed` takes, from -2**63 to 2**64 - 1, else None."""
    return integer(value, -(1 << 63), (1 << 64) - 1)


def real(value: object) -> float | None:
    """Return `value` as a float if it is a number that a float can hold, infinity included, and not NaN; else None."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return None if math.isnan(found) else found
