"""Tests of the timeline's colors: text is readable in both themes, and kinds contrast with their lane and each other."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

import toolkit.ui
from toolkit.ui.timeline import overview
from toolkit.ui.timeline.overview import COLORS

CSS = (Path(toolkit.ui.__file__).parent / "timeline" / "timeline.css").read_text()
LIGHT, DARK = CSS.split('[data-jp-theme-light="false"]')[0], CSS.split('[data-jp-theme-light="false"]')[1].split("@media")[0]
KINDS = ("kernel", "h2d", "d2h", "d2d", "p2p", "collective", "sync", "launch")
# Simulated deuteranopia and protanopia, in linear RGB (Viénot, Brettel and Mollon, 1999).
BLIND = {
    "deuteranopia": [[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]],
    "protanopia": [[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]],
}


def linear(color: str) -> np.ndarray:
    srgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """Return the contrast ratio as defined by WCAG."""
    dark, light = sorted(float(linear(color) @ [0.2126, 0.7152, 0.0722]) for color in (a, b))
    return (light + 0.05) / (dark + 0.05)


def variables(css: str) -> dict[str, str]:
    found = dict(re.findall(r"--tk-(\w+): (#\w{6})", css))
    return {**found, **dict(re.findall(r"--tk-(\w+): var\([^,]+, (#\w{6})\)", css))}


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(theme: str) -> None:
    known = variables(theme)
    for text, ground in itertools.product(("fg", "dim"), ("bg", "bar")):
        assert contrast(known[text], known[ground]) >= 4.5
    for kind in KINDS:
        assert contrast(known[kind], known["bg"]) >= 3.0, kind


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("blindness", BLIND)
def test_copies_differ_for_color_blind_eyes(theme: str, blindness: str) -> None:
    known = variables(theme)
    kinds = ("h2d", "d2h", "d2d", "p2p", "collective", "launch", "sync", "python")
    every = {kind: np.clip(np.array(BLIND[blindness]) @ linear(known[kind]), 0, 1) ** (1 / 2.2) for kind in kinds}
    seen, host = ({kind: every[kind] for kind in part} for part in (kinds[:5], kinds[5:]))
    for a, b in itertools.combinations(host, 2):  # they share a row
        assert np.abs(host[a] - host[b]).sum() > 0.3, (a, b)
    for a, b in itertools.combinations(seen, 2):
        assert np.abs(seen[a] - seen[b]).sum() > 0.3, (a, b)


@pytest.mark.parametrize(("theme", "colors"), [(LIGHT, COLORS), (DARK, overview.DARK)], ids=["light", "dark"])
def test_the_still_picture_has_the_palettes_of_the_timeline(theme: str, colors: dict[str, str]) -> None:
    known = variables(theme)
    assert {kind: known[kind] for kind in COLORS} == colors
