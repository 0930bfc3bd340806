# mypy: allow-untyped-defs
"""Fix Triton's interpreter, which runs kernels on machines without a GPU. Importing this file does not import Triton."""

from __future__ import annotations

from functools import cache

MODULE = "triton.runtime.interpreter"


@cache
def index_by_arrays() -> None:
    """Let loops of kernels end at numbers that they compute or are given.

    For these, Triton 3.6 needs a conversion that NumPy 2.4 refuses: that of an array with one number. Does nothing if a later
    version has other functions.
    """
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def fixed(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = fixed
