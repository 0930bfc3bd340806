"""Makes Triton's interpreter faster, which runs the kernels in tests without a GPU, and lets sums of int32 wrap around."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np


def patch_once_per_launch(interpreter: ModuleType) -> None:
    """Let a launch replace the functions of `triton.language` once, and not again in each call of a device function.

    To do so, the interpreter looks at all members of the module, which took a fifth of the time of small kernels. Does
    nothing the second time, or if this version of Triton has other functions.
    """
    if hasattr(interpreter, "patched_once") or not hasattr(interpreter, "_patch_lang"):
        return
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language, done = (interpreter.tl, interpreter.tl.core), set[Any]()

    def patch_lang(function: Any) -> Any:
        used = tuple(module for module in language if any(value is module for value in function.__globals__.values()))
        if used in done:
            return None
        done.add(used)
        return patch(function)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call  # type: ignore[attr-defined]
    to_tensor = interpreter.ReduceOps.to_tensor

    def wrapped(self: Any, found: Any, dtype: Any) -> Any:
        """As Triton's, which refuses a sum beyond int32 before version 3.9 (NumPy adds in int64)."""
        wraps = dtype is interpreter.tl.int32 and isinstance(found, np.integer)
        return to_tensor(self, np.int64(found).astype(np.int32) if wraps else found, dtype)

    interpreter.ReduceOps.to_tensor = wrapped  # type: ignore[attr-defined]
    interpreter.patched_once = True  # type: ignore[attr-defined]
