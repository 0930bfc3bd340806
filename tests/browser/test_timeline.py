"""The timeline in a real JupyterLab: painted, moved by mouse and keys, and fast with a million events."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import __file__ as SYNTHETIC

SETUP = f"""
import sys; sys.path.insert(0, {str(Path(SYNTHETIC).parent)!r})
from synthetic import decode_loop, many_events
from toolkit.notebook.timeline import Timeline
"""
CANVAS = ".tk-timeline canvas"


def test_shows(notebook, tmp_path: Path) -> None:
    page = notebook(
        SETUP,
        "Timeline(decode_loop())",
        "Timeline(decode_loop(), decode_loop(h2d=0, scale=.7), titles=('roundtrip','double-buffered'))",
    )
    page.wait_for_timeout(6000)
    page.screenshot(path="/tmp/s0.png")
    page.wait_for_selector(".tk-timeline[data-ms]", timeout=9000)
    page.wait_for_timeout(1500)
    page.screenshot(path="/tmp/s1.png")
