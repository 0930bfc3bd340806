"""Identify a kernel: a fingerprint of the code that runs on the GPU, and a description from which a worker loads the kernel.

The fingerprint covers `launches()` and `outputs()`, the `triton.jit` functions that they reach, and the values and functions
that these use from the kernel's own file and from the package of kernels. It leaves out comments, docstrings and line numbers,
and also `space()` and `known`, so that stored timings stay valid when configs or shapes are added. It is the same with and
without Triton's interpreter.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import importlib
import importlib.util
import inspect
import linecache
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from toolkit.core.errors import ToolkitError
from toolkit.kernels.base import Kernel

PLAIN = (int, float, str, bool, type(None))
CONTAINERS = ("constexpr", "tuple", "list", "dict", "mappingproxy")
KERNELS = Kernel.__module__.rpartition(".")[0]
WORDS_ONLY = (f"{KERNELS}.base", f"{KERNELS}.checks")  # describe launches and check arguments: nothing that runs on a GPU
DEFINING = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign, ast.If, ast.Try)
NO_CODE = ("ctx", "kind", "type_comment", "type_params")  # fields of syntax trees that are left out
METHODS = ("launches", "outputs", "space", "inputs", "reference", "cost", "results", "modelled_ns")  # of kernels
FOREIGN = {"torch", "triton", "numpy", *sys.stdlib_module_names} - {"__main__"}


@lru_cache(maxsize=256)
def fingerprint(kernel: Kernel) -> str:
    """Return 16 hexadecimal digits that change when the code that the kernel launches changes.

    Raises ToolkitError if its source can't be read.
    """
    parts: dict[str, str] = {}
    for method in ("launches", "outputs"):
        function = getattr(type(kernel), method)
        try:
            _gather(function, function.__module__, type(kernel), parts)
        except OSError as error:
            raise _no_source(kernel, str(error)) from error
    text = "\n".join(f"{name}:\n{source}" for name, source in sorted(parts.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _gather(thing: Any, home: str, owner: type, parts: dict[str, str]) -> None:
    """Add the source of a function, and of what it uses, to `parts`."""
    is_kernel = hasattr(thing, "fn")
    while hasattr(thing, "fn"):  # a triton.jit function, perhaps inside of several wrappers
        thing = thing.fn
    module = getattr(thing, "__module__", None) or ""
    ours = is_kernel or module == home or (module.startswith(f"{KERNELS}.") and module not in WORDS_ONLY)
    if not isinstance(thing, types.FunctionType) or module.split(".")[0] in FOREIGN or not ours:
        return
    name = f"{thing.__module__ if module != home else 'here'}.{thing.__qualname__}"
    if name in parts:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    parts[name] = _bare(tree)
    scope = {**thing.__globals__, **inspect.getclosurevars(thing).nonlocals}
    for used, value in _used(tree, scope, owner):
        if used == "INTERPRETED":  # a property of the process, not of the kernel
            continue
        if isinstance(value, PLAIN) or (type(value).__name__ in CONTAINERS and " at 0x" not in repr(value)):
            parts[f"{name} uses {used}"] = repr(value)
        else:
            _gather(value, home, owner, parts)


def _used(tree: ast.AST, scope: dict[str, Any], owner: type) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the globals, module attributes and methods of `self` that a function's source names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            yield node.id, scope[node.id]
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            base = owner if node.value.id == "self" else scope.get(node.value.id)
            if base is owner or isinstance(base, types.ModuleType):
                yield f"{node.value.id}.{node.attr}", getattr(base, node.attr, None)


def _bare(tree: ast.Module) -> str:
    """Return the source as text, without comments and docstrings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return _written(tree)


def _written(node: Any) -> str:
    """Return a syntax tree as text that is the same in every version of Python, unlike that of `ast.dump`."""
    if isinstance(node, list):
        return f"[{' '.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if value not in (None, []) and name not in NO_CODE]
    return f"{type(node).__name__}({' '.join(f'{name}={_written(value)}' for name, value in fields)})"


@dataclass(frozen=True)
class Origin:
    """Where a worker process finds a kernel: a module to import, or else the text of its file or notebook cell."""

    kernel: str  # its `name`
    module: str
    file: str
    text: str

    def load(self) -> Kernel:
        """Return the kernel from its module or its text. Raises ToolkitError if neither defines it."""
        module, failed = self._import()
        for value in vars(module).values():
            if isinstance(value, Kernel) and value.name == self.kernel:
                return value
        because = f" ({type(failed).__name__}: {failed})" if failed is not None else ""
        raise ToolkitError(
            f"kernel {self.kernel!r}", f"{self.file or self.module} defines no instance of that name{because}",
            "Create one at the top level of the file (or cell) that defines its class",
        )  # fmt: skip

    def _import(self) -> tuple[types.ModuleType, Exception | None]:
        if self.module != "__main__":
            spec = importlib.util.find_spec(self.module)
            if spec is not None and spec.origin == self.file:
                return importlib.import_module(self.module), None
        return self._run_text()

    def _run_text(self) -> tuple[types.ModuleType, Exception | None]:
        """Run the definitions of the text in a new module. Return the module and the first error.

        Statements that define nothing are left out, because a cell or script may train, write files or call the tuner.
        Statements that fail are skipped, because the kernel may not need them. The text is put in linecache, from which
        Triton reads the source of functions.
        """
        name = f"kernel_{hashlib.sha256(self.text.encode()).hexdigest()[:12]}"
        file, first = f"<{name}>", None
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        module = types.ModuleType(name)
        module.__file__ = file
        sys.modules[name] = module
        postponed = compile(self.text, file, "exec", dont_inherit=True).co_flags & __future__.annotations.compiler_flag
        for statement in ast.parse(self.text).body:
            try:
                if isinstance(statement, DEFINING):
                    exec(compile(ast.Module([statement], []), file, "exec", postponed, dont_inherit=True), module.__dict__)
            except Exception as error:
                first = first or error
        return module, first


def origin(kernel: Kernel) -> Origin:
    """Return where `kernel` is defined. For a notebook this is one cell, which must define everything that the kernel needs.

    Raises ToolkitError if its source can't be read.
    """
    kind = type(kernel)
    # A class may inherit launches() from one in another file.
    own = next((vars(kind)[name] for name in METHODS if isinstance(vars(kind).get(name), types.FunctionType)), None)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) if own is None else None
    file = file or inspect.unwrap(own or kind.launches).__code__.co_filename
    text = Path(file).read_text() if Path(file).is_file() else "".join(linecache.getlines(file))
    if not text:
        raise _no_source(kernel, f"{file} can't be read")
    return Origin(kernel.name, kind.__module__, file, text)


def _no_source(kernel: Kernel, found: str) -> ToolkitError:
    return ToolkitError(f"the source of kernel {kernel.name!r}", found, "Define the kernel in a file or a notebook cell")
