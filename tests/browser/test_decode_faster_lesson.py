"""Lesson 6 in a real JupyterLab: it runs through, shows the timeline of each step, and answers after a hint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import expect, run_all
from test_memory_lesson import cell_with, look
from test_model_shown import theme

LESSON = Path(__file__).parent.parent.parent / "notebooks" / "06_decode_faster.ipynb"


def tried(notebook: dict) -> dict:
    """The notebook with a wrong prediction of a number and a right choice."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        source = source.replace('{"slower side": None}', '{"slower side": "the host"}').replace(
            '{"H2D": None, "D2H": None, "kernels": None}', '{"H2D": 2, "D2H": 1, "kernels": 1}'
        )
        cell["source"] = source.splitlines(keepends=True)
    return notebook


@pytest.mark.timeout(400)  # 30 seconds where nothing else runs
def test_the_lesson_hints_and_explains(lab, opened) -> None:
    (lab.root / "06.ipynb").write_text(json.dumps(tried(json.loads(LESSON.read_text()))))
    page = opened("06.ipynb")
    page.set_viewport_size({"width": 1200, "height": 1900})
    run_all(page, timeout_s=150)
    assert page.locator(".jp-OutputArea-output[data-mime-type*='stderr']:has-text('Error')").count() == 0
    expect(cell_with(page, 'ask("who is slower"')).to_contain_text("right: slower side")
    hinted = cell_with(page, 'ask("captured"')
    expect(hinted).to_contain_text("wrong: kernels - you said 1")
    expect(hinted).to_contain_text("Hint: ")
    expect(hinted).not_to_contain_text("the trace says")
    expect(cell_with(page, 'ask("the loop"')).to_contain_text("Write your prediction")
    for name in ("light", "dark"):
        theme(page, name)
        for width in (1200, 900):
            page.set_viewport_size({"width": width, "height": 1900})
            page.wait_for_timeout(300)
            for i, heading in enumerate(page.locator(".jp-MarkdownCell h1, .jp-MarkdownCell h2").all()):
                look(page, heading, f"lesson-06-{name}-{width}-{i:02}")
