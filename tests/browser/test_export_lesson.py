"""Lesson 9 in a real JupyterLab: it runs through, exports for real, and shows its pictures in both themes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import expect, run_all
from test_memory_lesson import cell_with, look
from test_model_shown import FAULTS, theme

LESSON = Path(__file__).parent.parent.parent / "notebooks" / "09_export_under_a_budget.ipynb"


@pytest.mark.skipif(not shutil.which("g++"), reason="exports are compiled with g++")
@pytest.mark.timeout(500)  # two minutes where nothing else runs: pieces are compiled
def test_the_lesson_runs_as_it_is(lab, opened) -> None:
    (lab.root / "09.ipynb").write_text(json.dumps(json.loads(LESSON.read_text())))
    page = opened("09.ipynb")
    page.set_viewport_size({"width": 1280, "height": 1900})
    run_all(page, timeout_s=300)
    page.wait_for_selector(".jp-OutputArea:has-text('was changed')", timeout=60_000)
    assert page.locator(".jp-OutputArea-output[data-mime-type*='stderr']").count() == 0
    expect(page.locator(".tk-plan")).to_have_count(3)  # the plain plan, the one with all levers, the package
    assert "the same tokens: True" in cell_with(page, "theirs = tk.generate").text_content()
    for name in ("light", "dark"):
        theme(page, name)
        for width in (1440, 900):
            page.set_viewport_size({"width": width, "height": 1900})
            page.wait_for_timeout(300)
            for i, heading in enumerate(page.locator(".jp-MarkdownCell h1, .jp-MarkdownCell h2").all()):
                look(page, heading, f"lesson-09-{name}-{width}-{i:02}")
            look(page, page.locator(".tk-plan").last, f"lesson-09-{name}-{width}-package")
            page.wait_for_timeout(400)
            assert page.evaluate(FAULTS.replace(".tk-model", ".tk-plan")) == []
