"""Pickle functions, also those of a notebook, with the names of their files and their lines, which errors on a rank name."""

from __future__ import annotations

import io
import marshal
from types import CodeType
from typing import Any


def pack(value: object) -> bytes:
    """Return `value` pickled by cloudpickle: functions of `__main__` with their code and the globals that they use.

    cloudpickle alone would drop the files of their code. The reader must run the same version of Python, as marshal demands.
    """
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, CodeType):
                return marshal.loads, (marshal.dumps(obj),)
            return super().reducer_override(obj)

    file = io.BytesIO()
    Pickler(file).dump(value)
    return file.getvalue()
