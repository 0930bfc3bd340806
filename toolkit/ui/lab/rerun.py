"""Which cell of the notebook runs, and whether a variable still holds what an earlier run of that cell made."""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

from toolkit.core.callers import ipython_shell
from toolkit.vram import owners
from toolkit.vram.hidden import user_variables


def cell() -> str | None:
    """Return the id of the running cell, which stays the same when it runs again; None if the front end doesn't send one."""
    get_parent = getattr(getattr(ipython_shell(), "kernel", None), "get_parent", None)
    parent = get_parent("shell") if get_parent is not None else None
    metadata = parent.get("metadata") if isinstance(parent, dict) else None
    found = metadata.get("cellId") if isinstance(metadata, dict) else None
    return found if isinstance(found, str) and found else None


def is_held(made: Any) -> bool:
    """Return whether a variable of the user holds `made` that the running cell doesn't assign anew."""
    shell = ipython_shell()
    if shell is None:
        return True
    anew = _assigned(shell.history_manager.input_hist_parsed[-1])
    return owners.holds({name: value for name, value in user_variables(shell).items() if name not in anew}, made)


def _assigned(source: str) -> set[str]:
    """Return the names of the variables that a cell assigns. Those in functions are variables of the functions."""
    names: set[str] = set()
    with suppress(SyntaxError, ValueError, RecursionError):  # what can't be parsed did not run, so it assigned nothing
        nodes: list[ast.AST] = [ast.parse(source)]
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
                nodes.extend(ast.iter_child_nodes(node))
    return names
