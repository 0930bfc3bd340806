"""Convert the docstrings' light markup (single backticks, indented examples) into reStructuredText for autodoc."""

from __future__ import annotations

import re
from typing import Any

_SPECIAL = re.compile(r"([*|\\])|(?<=\w)_(?=\W|$)")


def process(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Handle Sphinx's event `autodoc-process-docstring`: rewrite `lines` in place."""
    lines[:] = converted(lines)


def signature(_app: Any, what: str, *_: Any) -> tuple[str, str] | None:
    """Handle Sphinx's event `autodoc-process-signature`: leave out constructors, since functions create these objects."""
    return ("", "") if what in {"class", "exception"} else None


def converted(lines: list[str]) -> list[str]:
    """Return the lines with `code` as literals, other special characters escaped, and indented blocks as code blocks."""
    found: list[str] = []
    code = False
    for line in _listed(lines):
        indented = line.startswith("    ") or (code and not line.strip())
        if indented and not code:
            found += ["", ".. code-block:: text", ""]
        if code and not indented:
            found.append("")
        code = indented
        found.append(line if code else _inline(line))
    return found


def _listed(lines: list[str]) -> list[str]:
    """Return the lines with each entry of a section ("Args:", "Attributes:", "Raises:") as one item of a list."""
    found: list[str] = []
    section = False
    for line in lines:
        entry = re.match(r"    (\w[^:]*): (.*)", line) if section else None
        if entry:
            found.append(f"- `{entry[1]}`: {entry[2]}")
        elif section and line.startswith("        "):
            found[-1] += f" {line.strip()}"
        else:
            section = line in {"Args:", "Attributes:", "Raises:"}
            found += [line, ""] if section else [line]
    return found


def _inline(line: str) -> str:
    """Return one line of prose: every other piece between backticks is code."""
    pieces = re.split(r"`+", line)
    if len(pieces) % 2 == 0:  # an unpaired backtick
        return _escaped(line.replace("`", "'"))
    return "".join(_escaped(piece) if i % 2 == 0 else f"``{piece}``" for i, piece in enumerate(pieces))


def _escaped(text: str) -> str:
    return _SPECIAL.sub(lambda found: "\\" + found[0], text)
