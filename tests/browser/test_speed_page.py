"""The page of decode speeds, opened from disk in both themes: it draws its figures and asks nothing of the network."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.ui.figures.speed_page import write_speed_page

RESULTS = Path(__file__).parents[2] / "toolkit" / "bench" / "results"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_opens_from_disk(browser, tmp_path: Path, scheme: str) -> None:
    records = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*_speed_*.json"))]
    broken = [record for record in records if any("breakdown" in row for row in record["rows"])]
    assert records
    path = write_speed_page(records, tmp_path / "page.html", {"random/gemma4-31b": {64: 80.9, 8192: 78.3}}, name="other")
    page = browser.new_context(color_scheme=scheme, viewport={"width": 1200, "height": 800}).new_page()
    asked, said = [], []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(path.as_uri())
    page.wait_for_selector(".tk-figure .main-svg")
    assert page.locator(".tk-figure:has(.main-svg)").count() == len(records) + len(broken) + 1
    ink = page.evaluate("getComputedStyle(document.querySelector('.tk-figure .xtick text')).fill")
    assert ink == {"light": "rgb(27, 36, 48)", "dark": "rgb(231, 235, 240)"}[scheme]
    page.emulate_media(color_scheme={"light": "dark", "dark": "light"}[scheme])
    page.wait_for_function(f"getComputedStyle(document.querySelector('.tk-figure .xtick text')).fill !== '{ink}'")
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    page.context.close()
