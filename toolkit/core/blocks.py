"""Context managers whose repr says how to use them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import _GeneratorContextManager
from functools import wraps
from typing import ParamSpec, TypeVar

from toolkit.core.errors import ToolkitError

P = ParamSpec("P")
T = TypeVar("T")


def block(use: str) -> Callable[[Callable[P, Iterator[T]]], Callable[P, _GeneratorContextManager[T]]]:
    """Return a decorator like `contextlib.contextmanager`. `use` is a line for the repr: "with tk.record(gpu) as trace:".

    Entering a block twice raises ToolkitError.
    """
    name = use.removeprefix("with ").partition("(")[0]

    class Block(_GeneratorContextManager[T]):
        def __repr__(self) -> str:
            return f"{name}(...), to be used as `{use}`"

        def __enter__(self) -> T:
            if not hasattr(self, "args"):  # the first call has deleted it
                raise ToolkitError(f"{name}(...)", "this object was used before", f"Call {name} for each block: `{use}`")
            return super().__enter__()

    def decorated(function: Callable[P, Iterator[T]]) -> Callable[P, _GeneratorContextManager[T]]:
        @wraps(function)
        def made(*args: P.args, **kwargs: P.kwargs) -> _GeneratorContextManager[T]:
            return Block(function, args, kwargs)  # type: ignore[arg-type]  # Iterator: as contextmanager has it

        return made

    return decorated
