"""Find the line of Python, and the notebook cell, that caused an operation.

Recorders call `caller` or `chain` for each event. Lines are shown as "file:line", with shortened paths,
and notebook cells as "cell 7". IPython is looked up in `sys.modules` and never imported.
"""

from __future__ import annotations

import ast
import importlib.util
import linecache
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType
from typing import Any

Running = Mapping[int, CodeType]  # functions that run, innermost first, by the ids of their frames

LAUNCH_PLAN = "<launch plan>"  # the file name of code that `toolkit.ops.launch_plan` writes
NOTHING_RUNS: Running = MappingProxyType({})
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder of `toolkit`


@lru_cache
def _library_prefixes() -> tuple[str, ...]:
    """Return path prefixes of code that is never reported as the cause.

    This is torch, Triton, `toolkit.gpu`, the building blocks of models (`toolkit.ops`, `toolkit.models.layers`,
    `toolkit.weights.packed`), IPython, which displays what a cell gives it, and code in no file that a program wrote, such as
    the methods of a dataclass.
    """
    import torch

    others = [importlib.util.find_spec(name) for name in ("triton", "IPython")]
    folders = [
        os.path.dirname(torch.__file__),
        *(folder for spec in others if spec is not None for folder in spec.submodule_search_locations or ()),
        *(os.path.join(_PACKAGE, name) for name in ("gpu", "kernels", "ops")),
    ]
    files = [os.path.join(_PACKAGE, *parts) for parts in (("models", "layers.py"), ("weights", "packed.py"))]
    written = ["<frozen", "<attrs generated", "<eval_with_key>", LAUNCH_PLAN]
    if sys.argv[:1] != ["-c"]:  # else it is the user's program
        written.append("<string>")
    return *(folder + os.sep for folder in folders), *files, *written


_library: dict[str, bool] = {}  # file name -> `is_library`


def is_library(filename: str) -> bool:
    """Return whether the lines of a file are never reported as the cause of an operation, but those that called it.

    This holds for torch and what else has `_library_prefixes`, and for files of the standard library and of installed packages
    that do not import torch. Such files (`logging`, `copy`, `tqdm`) only use what they are given.
    """
    found = _library.get(filename)
    if found is None:
        found = filename.startswith(_library_prefixes())
        if not found and not filename.startswith(_PACKAGE + os.sep):
            found = filename.startswith(_installed_prefixes()) and not _imports_torch(filename)
        _library[filename] = found
    return found


def _imports_torch(filename: str) -> bool:
    try:
        text = Path(filename).read_bytes()
        return b"torch" in text and re.search(rb"\b(?:import|from)\s+torch\b", text) is not None
    except OSError:
        return False


def caller(waiting: int | None = None) -> str | None:
    """Return "file:line" of the innermost frame that is not of a library (`is_library`): the line that caused an event.

    In a thread that runs libraries only, such as a worker of a pool, it is the line of the thread `waiting`, which is likely to
    wait for the result. If there is none either, it is the innermost frame outside of this package.
    """
    frame = _nearest(sys._getframe(1)) or _nearest(sys._current_frames().get(waiting or 0)) or _innermost(sys._getframe(1))
    return None if frame is None else f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def _nearest(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        filename = frame.f_code.co_filename
        library = _library.get(filename)  # faster than a call for each frame
        if library is None:
            library = is_library(filename)
        if not library:
            return frame
        frame = frame.f_back
    return None


def _innermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE + os.sep, "<frozen", LAUNCH_PLAN)):
        frame = frame.f_back
    return frame


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the innermost line outside of this package as the cause: the user's line, however it got here."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE + os.sep):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


@lru_cache
def _installed_prefixes() -> tuple[str, ...]:
    """Return path prefixes of code that is not the user's: the standard library, installed packages, and this package.

    Folders of the module search path count as installed if pip installed something there, as `pip install --target` does.
    """
    paths = sysconfig.get_paths()
    folders = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")}
    folders |= {_PACKAGE, os.path.dirname(os.__file__)}  # the latter is the standard library, also if it is a zip file
    folders |= {folder for folder in sys.path if folder and any(Path(folder).glob("*.dist-info"))}
    return (*(folder + os.sep for folder in folders), *_library_prefixes())


_installed: dict[str, bool] = {}  # file name -> whether it is not the user's own code


def is_installed(filename: str) -> bool:
    """Return whether a file is not the user's own: of the standard library, an installed package, this package, or no file."""
    return filename.startswith((*_installed_prefixes(), "<"))


def running() -> Running:
    """Return the functions that run now, to be passed to `chain` later; none in a notebook.

    Frames themselves would keep the variables of their functions alive. An id may come back, so it counts only with its code.
    """
    frame: FrameType | None = sys._getframe(1)
    found = {}
    while frame is not None:
        if _is_cell(frame.f_code.co_filename):
            return NOTHING_RUNS
        found[id(frame)] = frame.f_code
        frame = frame.f_back
    return found


def chain(within: Running = NOTHING_RUNS) -> str | None:
    """Return the lines that led to an allocation, "cell 7:3 > model.py:41": the user's outermost frame and the innermost one.

    The outermost frame is in the user's own cell or script, without a line that `only_calls`. It is not further out than the
    function that runs the block which began `within` these functions, because all that the block allocates shares those lines.
    The innermost is the one that `caller` returns. If both are the same line, it is returned once.
    """
    frame: FrameType | None = sys._getframe(1)
    inner, outer = _nearest(frame) or _innermost(frame), None
    blocks, reached = bool(within), False  # reached: this frame and those further out ran when the block began
    while frame is not None:
        code = frame.f_code
        filename = code.co_filename
        installed = _installed.get(filename)
        if installed is None:
            # "<string>" is code of `python -c` or of a launcher, and says little about the cause
            installed = _installed[filename] = filename.startswith((*_installed_prefixes(), "<string>"))
        runs_block = blocks and not reached and within.get(id(frame)) is code
        reached = reached or runs_block
        if not installed:
            module = code.co_name == "<module>"
            if outer is None or runs_block or not (module and only_calls(filename, frame.f_lineno)):
                outer = frame
            if module:  # frames above the module's code belong to a launcher
                break
        if reached and outer is not None:
            break
        frame = frame.f_back
    if inner is None:
        return None
    text = f"{short_path(inner.f_code.co_filename)}:{inner.f_lineno}"
    if outer is None or outer is inner:
        return text
    first = f"{short_path(outer.f_code.co_filename)}:{outer.f_lineno}"
    return text if first == text else f"{first} > {text}"  # a comprehension has a frame of its own on the same line


def only_calls(filename: str, line: int) -> bool:
    """Return whether a line of a script is a statement such as `main()`, at the top level or below an `if` there.

    A whole program runs in such a line, so it says nothing about an allocation. `x = make()` says which call made it.
    """
    return not filename.startswith("<") and not _is_cell(filename) and line in _calling_lines(filename)


@lru_cache(maxsize=256)
def _calling_lines(filename: str) -> frozenset[int]:
    try:
        top = ast.parse("".join(linecache.getlines(filename))).body
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    below = [each for statement in top if isinstance(statement, ast.If) for each in statement.body]
    calls = [each for each in (*top, *below) if isinstance(each, ast.Expr | ast.Raise)]  # raise SystemExit(main())
    return frozenset(line for each in calls for line in range(each.lineno, (each.end_lineno or each.lineno) + 1))


def _is_cell(filename: str) -> bool:
    return "ipykernel_" in filename or filename.startswith("<ipython-input")


def short_path(filename: str) -> str:
    """Return a short path: relative to site-packages or to the working directory, or "cell N" for a notebook cell."""
    if _is_cell(filename):
        return cell_name(filename)  # not cached: the same text may run again as another cell
    return _short_file(filename)


@lru_cache(maxsize=4096)
def _short_file(filename: str) -> str:
    for marker in ("site-packages" + os.sep, "dist-packages" + os.sep):
        if marker in filename:
            return filename.split(marker, 1)[1]
    if filename.startswith(_PACKAGE + os.sep):  # a checkout is shown as "toolkit/...", like an installed package
        filename = filename.removeprefix(os.path.dirname(_PACKAGE) + os.sep)
    elif filename.startswith(os.getcwd() + os.sep):
        filename = os.path.relpath(filename)
    return filename.replace(os.sep, "/")


def cell_name(filename: str) -> str:
    """Return "cell 7" for the source file that IPython made for a notebook cell, else the file's name."""
    number = _cell_files().get(filename)
    return os.path.basename(filename) if number is None else f"cell {_cell_of(filename, number)}"


def _cell_of(filename: str, number: int) -> int:
    """Return the cell that ran a file, to which IPython gave `number`: that of its cell, or of the next cell.

    The latter is that of code that a magic runs, if IPython counts a cell before it runs it, as newer versions do.
    """
    inputs = _inputs()
    latest = max(len(inputs) - 1, 1)
    if number >= len(inputs) or _is_text_of(filename, inputs[number]):
        return min(number, latest)
    counts_before = getattr(ipython_shell(), "execution_count", 0) > latest
    return max(number - 1, 1) if counts_before else number


@lru_cache(maxsize=4096)
def _is_text_of(filename: str, cell: str) -> bool:
    """Return whether a file has the text of a cell, and not of code that a magic runs. It has if either text is gone."""
    text = "".join(linecache.getlines(filename)).rstrip("\n")
    return not text or not cell or text == "\n".join(cell.splitlines()).rstrip("\n")


def file_of(short: str) -> str:
    """Return the file with the source of a cell, given as "cell 7". Other short paths are returned unchanged.

    If magics of the cell ran other code, it is the file of the innermost: what they ran has the lines.
    """
    if short.startswith("cell "):
        files = _cell_files()
        names = [name for name in reversed(files) if cell_name(name) == short]
        return max(names, key=lambda name: files[name], default=short)
    return short


def source_line(place: str) -> str | None:
    """Return the source text of a line given as "file:line", or None if it isn't found."""
    file, _, line = place.rpartition(":")
    if not file or not line.isdecimal() or len(line) > 9:
        return None
    text = linecache.getline(file_of(file), int(line)).strip()
    return None if text.startswith("get_ipython().run_cell_magic(") else text or None  # that is the whole cell, not a line


def current_cell() -> int:
    """Return the number of the notebook cell that is running, or -1 outside of IPython. Never imports IPython."""
    return len(_inputs()) - 1 or -1  # `execution_count` is that of the next cell in newer versions


def _inputs() -> list[str]:
    """Return the text of each cell that has run, as Python. The first cell is at 1. Empty outside of IPython."""
    found: list[str] = getattr(getattr(ipython_shell(), "history_manager", None), "input_hist_parsed", [])
    return found


def _cell_files() -> dict[str, int]:
    """Return the files that IPython made for the code that it ran, with their numbers."""
    found: dict[str, int] = getattr(getattr(ipython_shell(), "compile", None), "_filename_map", {})
    return found


def ipython_shell() -> Any | None:
    """Return the IPython shell that runs this code, or None. Never imports IPython."""
    ipython = sys.modules.get("IPython")
    get = getattr(ipython, "get_ipython", None)
    return get() if get else None
