"""Convert stack frames to a `where` text "OUTER > INNER": the line of the user's code and the line that requested memory.

Files are classified by their paths alone, since a snapshot may come from another machine or operating system, unless the caller
knows which ones are installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from types import CodeType
from typing import Any

Frame = Mapping[str, Any]  # "name", "filename" and "line", as in PyTorch's snapshots

MAX_REMEMBERED = 1 << 16  # maximum number of files in each cache

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))).replace(os.sep, "/") + "/"
_CPP = re.compile(r"\.(c|cc|cpp|cxx|cu|cuh|h|hpp|inc|inl|so(\.[\d.]+)?|dll|pyd|pyx)$", re.IGNORECASE)
_INSTALLED = re.compile(r"(?:^|/)(?:site|dist)-packages/(.+)$")
_STANDARD = re.compile(
    r"/lib(64)?/python\d[\d.]*t?/|/python[\d.]*\.zip/|/(python[\d.]*|(mini|ana)conda\d*|miniforge\d*|envs/[^/]+)/lib/",
    re.IGNORECASE,
)
_OWN = re.compile(
    r"(?:^|/)toolkit/(?:(?:bench|core|decode|demo|exporting|gpu|kernels|loading|models|ops|planning|ranks|testing|text|trace|tune|ui|vram|weights)/[\w/]+|\w+)\.py$"
)
_LAUNCHER = re.compile(r"/(bin|scripts)/[^/.]+(\.exe(/.*)?)?$", re.IGNORECASE)  # scripts without .py: torchrun, pytest, jupyter
_MACHINERY = re.compile(
    r"^(?:torch|triton|IPython)/|/pytorch/torch/|^typing_extensions\.py$"
    r"|(?:^|/)toolkit/(?:(?:gpu|kernels)/|ops/(?:define|launch_plan|plans|tape|zeros)\.py$)"
)
_TYPED_IN = ("<stdin>", "<ipython-input", "<console>")
_STARTED = "<string>"  # the file name of `python -c` and of some launchers: use other files if there are any


class Kinds(dict[str, "str | None"]):
    """Maps a file to "user", "machinery" or "other" (all Python), or to None if it is not Python.

    `is_installed` tells of further files that they are not the user's, such as those of packages in a folder of any name, and
    `is_library` of further machinery.
    """

    def __init__(
        self, is_installed: Callable[[str], bool] = lambda file: False, is_library: Callable[[str], bool] = lambda file: False
    ) -> None:
        self._is_installed, self._is_library = is_installed, is_library

    def __missing__(self, filename: str) -> str | None:
        kind = _kind_of_file(filename)
        if kind is not None and not filename.startswith("<"):
            if self._is_library(filename):
                kind = "machinery"
            elif kind == "user" and self._is_installed(filename):
                kind = "other"
        if len(self) < MAX_REMEMBERED:
            self[filename] = kind
        return kind


BY_PATH = Kinds()


def chain(
    frames: Iterable[Frame], shorten: Callable[[str], str] | None = None, kinds: Kinds = BY_PATH,
    only_calls: Callable[[str, int], bool] = lambda file, line: False, within: Sequence[CodeType] = (),
) -> str | None:  # fmt: skip
    """Return the `where` of `frames` (innermost first): "OUTER > INNER", one line if both are equal, None without Python.

    OUTER is the outermost line of the user's code, without a line of a script that `only_calls` its functions. It is not
    further out than the function that runs the block; `within` are the functions that ran when it began, innermost first.
    INNER is the innermost Python line that is not machinery, such as torch and the standard library, or the innermost one of
    all if there is no other. `shorten` maps a file name to the displayed name (default: `short_file`).
    """
    outer: Frame | None = None
    inner: Frame | None = None
    innermost: Frame | None = None
    stack = list(frames)
    block = len(stack) - _shared(stack, within)  # the place of the function that runs the block
    for i, frame in enumerate(stack):
        kind = kinds[frame["filename"]]
        if kind is None or frame["line"] <= 0:
            continue
        if innermost is None:
            innermost = frame
        if inner is None and kind != "machinery":
            inner = frame
        if kind == "user":
            module = frame["name"] == "<module>"
            if outer is None or i == block or not (module and only_calls(frame["filename"], frame["line"])):
                outer = frame
            if module:  # the frames outside a module belong to its launcher
                break
        if i >= block and outer is not None:
            break
    inner = inner or innermost
    if inner is None:
        return None
    last = _line(inner, shorten)
    first = last if outer is None else _line(outer, shorten)
    return last if first == last else f"{first} > {last}"


def _shared(stack: Sequence[Frame], within: Sequence[CodeType]) -> int:
    """Return the number of functions, from the outermost on, that are the same in both."""
    pairs = zip(reversed(stack), reversed(within), strict=False)
    alike = ((frame["filename"], frame["name"]) == (code.co_filename, code.co_name) for frame, code in pairs)
    return sum(1 for _ in takewhile(bool, alike))


def _line(frame: Frame, shorten: Callable[[str], str] | None) -> str:
    return f"{(shorten or short_file)(frame['filename'])}:{frame['line']}"


def _kind_of_file(filename: str) -> str | None:
    path = filename.replace("\\", "/")
    if path in ("", "??") or _CPP.search(path):
        return None
    if path.startswith("<"):
        return "user" if path.startswith(_TYPED_IN) else "other" if path.startswith(_STARTED) else "machinery"
    own = path.startswith(_HERE) or _OWN.search(path)
    short = short_file(filename)
    if _MACHINERY.search(path if own else short):
        return "machinery"
    if own or _INSTALLED.search(path) or _LAUNCHER.search(path):
        return "other"
    return "machinery" if _STANDARD.search(path) else "user"


@lru_cache(maxsize=MAX_REMEMBERED)
def short_file(filename: str) -> str:
    """Return a path to display, with "/" as the separator. Paths of installed packages start at the package."""
    path = filename.replace("\\", "/")
    installed = _INSTALLED.search(path)
    if installed is not None:
        return installed[1]
    return path.rsplit("/", 1)[1] if "/ipykernel_" in path else path
