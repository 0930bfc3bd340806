"""Links that open the lessons on Binder and Colab. They need the repository's address from [project.urls] in pyproject.toml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HOST = "https://github.com/"  # Colab opens notebooks of GitHub only
FIRST = "notebooks/00_course.ipynb"


def badge(project: Mapping[str, Any]) -> str:
    """Return the README's badge in Markdown, or "" without an address."""
    name = _name(project)
    return f"[![Open on Binder](https://mybinder.org/badge_logo.svg)]({_binder(name)})" if name else ""


def links(project: Mapping[str, Any]) -> str:
    """Return Markdown that says where the lessons run without an installation."""
    name = _name(project)
    if not name:
        return "They can't be opened on Binder or Colab yet, because the repository has no public address."
    return (
        f"Without an installation: [Binder]({_binder(name)}) starts them in a machine with 2 GB of memory and no GPU. "
        f"[Colab](https://colab.research.google.com/github/{name}) opens a lesson, too; run this in its first cell:\n\n"
        f'```python\n%pip install -q "decode-toolkit[lab] @ git+{HOST}{name}"\n```'
    )


def _binder(name: str) -> str:
    return f"https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/{FIRST}"


def _name(project: Mapping[str, Any]) -> str:
    address = project.get("urls", {}).get("Repository", "")
    return address.removeprefix(HOST).removesuffix(".git").strip("/") if address.startswith(HOST) else ""
