"""The scripts and styles of the front end as text, for notebook widgets and for self-contained pages.

Both take one ES module and one style sheet, so several files are joined here. No bundler is needed: the files are plain
JavaScript and CSS, and `shared.js` comes first.
"""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def text_of(*names: str) -> str:
    """Return the files `names`, paths relative to this folder, joined by line breaks."""
    return "\n".join((_HERE / name).read_text(encoding="utf-8") for name in names)


def script_of(*names: str) -> str:
    """Return `shared.js` and the scripts `names` as one ES module."""
    return text_of("shared.js", *names)


def style_of(*names: str) -> str:
    """Return the style sheets `names` as one `<style>` element."""
    return f"<style>{text_of(*names)}</style>"
