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
    _remember_types(interpreter)
    interpreter.patched_once = True  # type: ignore[attr-defined]


def _remember_types(interpreter: ModuleType) -> None:
    """Work out a type's name, number of values and NumPy dtype, and the shape of its tensors, only once per type.

    The interpreter works them out for the result of each operation, which took a third of the time of small kernels.
    """
    core, semantic = interpreter.tl.core, interpreter.interpreter_semantic
    find_common = semantic.broadcast_impl_value
    new_type, new_tensor, find_dtype = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    types, shapes, dtypes = dict[Any, dict[str, Any]](), dict[Any, tuple[Any, Any]](), dict[str, Any]()

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = (each.value if isinstance(each, core.constexpr) else each for each in shape)
        key = (type(shape), element_ty.name, *sizes)
        if key not in types:
            new_type(self, element_ty, shape)
            types[key] = {name: value for name, value in vars(self).items() if name != "element_ty"}
        self.element_ty = element_ty
        vars(self).update(types[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            new_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def np_dtype(type: Any) -> Any:
        name = type.scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(type)
        return dtypes[name]

    def broadcast(one: Any, other: Any) -> tuple[Any, Any]:
        same = one.type.is_block() and other.type.is_block() and one.type.shape.values == other.type.shape.values
        return (one, other) if same else find_common(one, other)

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
    semantic.broadcast_impl_value = broadcast
    interpreter._get_np_dtype = np_dtype  # type: ignore[attr-defined]
