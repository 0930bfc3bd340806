"""Runs at the start of every kernel that executes a page of the documentation: shows widgets without a kernel.

A timeline or a memory picture becomes the self-contained page that `to_html` writes, inside an iframe. It zooms and answers
clicks in the browser alone.
"""

from __future__ import annotations

import html
import tempfile
from pathlib import Path
from typing import Any

STYLE = """<style>
.tk-page { max-width: none; padding: 0 } .tk-page h1, .tk-page h2 { display: none }
body.tk-dark { background: transparent; color: #e7ebf0 } body.tk-light { background: transparent; color: #1b2430 }
</style></head>"""


def _bundle(page: str, widget: Any, label: str) -> dict[str, str]:
    """Return an iframe that holds a whole page. docs.js fits its height to the content and sets its theme."""
    page = html.escape(page.replace("</head>", STYLE, 1).replace("<details open>", "<details>"))
    frame = f'<iframe class="tk-frame" title="{label}" srcdoc="{page}"></iframe>'
    return {"text/html": frame, "text/plain": repr(widget)}


def _timeline(widget: Any, **_: Any) -> dict[str, str]:
    from toolkit.ui.timeline.page import _document

    tracks = widget.scene.tracks
    return _bundle(_document(tracks, "Timeline", "", (0, 1) if len(tracks) > 1 else None), widget, "Timeline")


def _memory(widget: Any, **_: Any) -> dict[str, str]:
    from toolkit.ui.memory.page import write_memory_page

    with tempfile.TemporaryDirectory() as folder:
        page = write_memory_page(widget.use, Path(folder) / "page.html").read_text(encoding="utf-8")
    return _bundle(page, widget, "Memory over time")


def register(bundles: Any) -> None:
    """Register both functions with IPython's formatter of MIME bundles.

    By class, not by name: anywidget makes a subclass for each widget, and a name would apply to the first of them only.
    """
    from toolkit.ui.memory.widget import MemoryTimeline
    from toolkit.ui.timeline.widget import Timeline

    bundles.for_type(Timeline, _timeline)
    bundles.for_type(MemoryTimeline, _memory)


if __name__ == "__main__":
    register(get_ipython().display_formatter.mimebundle_formatter)  # type: ignore[name-defined]  # noqa: F821
