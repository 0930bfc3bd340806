"""The registry of renderers: which function draws which type of object, and in which view.

Packages below `toolkit.ui` never import it. Their objects call `render("html", self)` instead, and the first such call imports
`toolkit.ui.renderers`, which registers a renderer for each type with `register`.
"""

from __future__ import annotations

import importlib
from typing import Any

from toolkit.core.errors import ToolkitError, kind_of
from toolkit.core.extras import install_command

_renderers: dict[tuple[str, str], str] = {}  # (type, view) -> "module:function"


def register(type_name: str, view: str, renderer: str) -> None:
    """Let `renderer` ("module:function") draw objects of `type_name` ("module.Class") and of its subclasses in `view`.

    The module is imported when an object is first drawn.
    """
    _renderers[type_name, view] = renderer


def render(view: str, shown: Any, *arguments: Any, **options: Any) -> Any:
    """Draw `shown` in a `view` ("html", "text", "page", "timeline", "progress") and return the result of its type's renderer.

    Further arguments are passed on to the renderer. Raises LookupError if no renderer is registered, and ToolkitError if a
    package that the renderer imports is not installed.
    """
    importlib.import_module("toolkit.ui.renderers")
    for kind in type(shown).__mro__:
        renderer = _renderers.get((f"{kind.__module__}.{kind.__qualname__}", view))
        if renderer is not None:
            module, _, function = renderer.partition(":")
            found = import_ui(module, f"the {view} of a {kind.__name__}")
            return getattr(found, function)(shown, *arguments, **options)
    raise LookupError(f"no renderer is registered for the view {view!r} of {kind_of(shown)}")


def import_ui(module: str, asked: str) -> Any:
    """Import a module of `toolkit.ui`. Raises ToolkitError if a package that it imports is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "toolkit":
            raise
        do = f"Install the packages for notebooks: {install_command('lab')}"
        raise ToolkitError(asked, f"{error.name} is not installed", do) from error
