"""Lesson 5 in a real JupyterLab: it runs through, though one cell fails on purpose, and shows its pictures in both themes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import expect, run_all
from test_memory_shown import VIEW
from test_model_shown import FAULTS, theme
from test_timeline_in_lab import shot

LESSON = Path(__file__).parent.parent.parent / "notebooks" / "05_memory_cell_by_cell.ipynb"
LINE = f"{VIEW}.tk-line"


def cell_with(page, text: str):
    """The cell whose source has this text."""
    return page.locator(".jp-CodeCell", has=page.locator(f".jp-InputArea-editor:has-text({json.dumps(text)})")).first


def look(page, cell, name: str) -> None:
    """Bring a cell to the top, and keep a picture of it and what follows if that is wanted."""
    cell.evaluate("(node) => node.scrollIntoView({ block: 'start' })")
    if os.environ.get("TOOLKIT_SHOTS"):
        page.wait_for_timeout(300)
        shot(page, name)


@pytest.mark.timeout(400)  # 40 seconds where nothing else runs
def test_the_lesson_runs_as_it_is(lab, opened) -> None:
    (lab.root / "05.ipynb").write_text(json.dumps(json.loads(LESSON.read_text())))
    page = opened("05.ipynb")
    page.set_viewport_size({"width": 1280, "height": 1900})
    run_all(page, timeout_s=150)
    page.wait_for_selector(".jp-OutputArea:has-text('session.html')", timeout=60_000)
    (on_purpose,) = page.locator(".jp-OutputArea-output[data-mime-type*='stderr']").all()
    assert "100 weights for 2048 rows" in on_purpose.text_content()
    assert "kept +18.0 MiB" in cell_with(page, "def likeness").locator(LINE).text_content()
    assert "kept +48.0 MiB" in cell_with(page, "net = optimizer = None").locator(LINE).text_content()  # three times 16
    assert "kept +16.0 MiB" in cell_with(page, "Is it?").locator(LINE).text_content()
    expect(page.locator(f"{VIEW}.tk-live")).to_have_count(3)
    for name in ("light", "dark"):
        theme(page, name)
        for width in (1440, 900):
            page.set_viewport_size({"width": width, "height": 1900})
            page.wait_for_timeout(300)
            for i, heading in enumerate(page.locator(".jp-MarkdownCell h1, .jp-MarkdownCell h2").all()):
                look(page, heading, f"lesson-05-{name}-{width}-{i:02}")
            page.wait_for_timeout(400)
            assert page.evaluate(FAULTS.replace(".tk-model", VIEW)) == []
    line = cell_with(page, "Is it?").locator(LINE)
    line.locator("summary").click()
    line.locator("img").wait_for(state="visible")
    assert "optimizer" in line.inner_text()
    look(page, line, "lesson-05-line-open")
    page.wait_for_timeout(400)
    assert page.evaluate(FAULTS.replace(".tk-model", VIEW)) == []
