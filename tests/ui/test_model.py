"""Tests of displaying a model in a notebook: text, HTML and treemap, including unusual models."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from test_colors import contrast, variables
from torch import nn

import toolkit.ui
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.planning.costs import costs_of
from toolkit.planning.describe import costs, describe
from toolkit.ui.figures.model import COLORS, html, pattern_text, text
from toolkit.ui.figures.treemap import HEIGHT, WIDTH, Area, squarify, treemap

CSS = (Path(toolkit.ui.__file__).parent / "figures" / "model.css").read_text()
LIGHT, DARK = CSS.split('[data-jp-theme-light="false"]')[0], CSS.split('[data-jp-theme-light="false"]')[1].split("@media")[0]


@pytest.fixture(scope="module")
def gemma() -> object:
    return describe("random/gemma4-31b", "q4_k_m")


def test_text_is_short_and_tells_the_main_figures(gemma: object) -> None:
    said = repr(gemma)
    assert len(said.splitlines()) < 18 + len(CATALOGUE)  # a line for each GPU
    assert max(map(len, said.splitlines())) <= 128
    for piece in ("60 layers", "30.7 billion", "q4_k (4.5 bits per weight)", "10 × (5 × attention (sliding) + mlp, 1 ×",
                  "17.4 GiB of weights", "50.0 MiB", "modelled", "h200"):  # fmt: skip
        assert piece in said, piece


def test_html_is_light_still_and_whole(gemma: object) -> None:
    page = gemma._repr_html_()
    assert len(page) < 40_000
    assert "<script" not in page
    assert page.count("<div") == page.count("</div>")
    for piece in ("Modelled, not measured", "attention (sliding)", "gate_up", "b200", "50.0 MiB per 1K", "131,072"):
        assert piece in page, piece
    assert page.count('class="tk-tok"') == len(CATALOGUE)


def test_sizes_have_one_kind_of_unit_which_bandwidths_have_too(gemma: object) -> None:
    for shown in (repr(gemma), gemma._repr_html_()):
        assert re.findall(r"[\d.,]+ [kMGT]B\b(?!/s)", shown) == []
    assert "<td>1,792</td><td>1,669</td>" in gemma._repr_html_()


def test_cards_that_are_too_small_say_so() -> None:
    page = html(costs("random/gemma4-31b"))  # 57 GiB in bfloat16
    found = re.findall(r'<tr( class="tk-no")?><th scope="row" title="[^"]*">([\w-]+)</th>', page)
    rows = {name: no for no, name in found}
    assert rows["l4"]
    assert rows["rtx-5090"]
    assert not rows["h200"]
    assert "to " in text(costs("random/gemma4-31b", scheme="q4_k_m")).split("rtx-4090")[1].splitlines()[0]


class Evil(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.add_module("<img src=x onerror=alert(1)>", nn.Linear(3, 3))


@pytest.mark.parametrize(
    "model",
    [nn.Identity(), nn.Linear(3, 3), nn.Embedding(5, 2), Evil(), nn.Linear(3, 3, dtype=torch.float16, device="meta")],
    ids=["nothing", "linear", "table alone", "evil names", "meta"],
)
def test_odd_models_are_shown(model: nn.Module) -> None:
    found = costs_of(model)
    said, page = text(found), html(found)
    assert type(model).__name__ in said
    assert "<img" not in page
    assert "nan" not in page
    assert "inf" not in page.split("</style>")[1].replace("info", "")


def test_the_display_says_on_which_gpus_the_reachable_bandwidth_was_measured(gemma: object) -> None:
    page = gemma._repr_html_()
    for card in CATALOGUE.values():
        share = f"{100 * card.reached_bandwidth_bytes_per_s / card.bandwidth_bytes_per_s:.0f} % on the {card.key.upper()}"
        assert (share in page) == (card.source("reached_bandwidth_bytes_per_s").how == "measured"), card.key


def test_a_context_of_nothing_and_one_beyond_what_the_model_knows() -> None:
    assert "0 B of state" in text(costs("random/qwen3-8b", context=0))
    assert "after 1,000,000" in text(costs("random/qwen3-8b", context=1_000_000))


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (("a",) * 4, "4 × a"),
        (("a", "a", "b") * 3, "3 × (2 × a, 1 × b)"),
        (("a", "a", "b", "a", "a"), "1 × (2 × a, 1 × b), 2 × a"),
        (("a", "b", "b"), "1 × a, 2 × b"),
        (("a", "b", "a", "c", "a", "d"), "3 × a, 1 × b, 1 × c, 1 × d"),
    ],
    ids=["same", "repeats", "cut off", "once", "irregular"],
)
def test_layers_in_words(pattern: tuple[str, ...], said: str) -> None:
    assert pattern_text(pattern) == said


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("box", [(0, 0, 100, 40), (5, 7, 30, 90)], ids=["wide", "tall"])
def test_squares_fill_their_box_in_proportion(n: int, box: tuple[float, ...]) -> None:
    sizes = sorted(np.random.default_rng(n).lognormal(0, 2, n), reverse=True)
    found = np.array(squarify(sizes, box))
    x, y, w, h = found.T
    assert (w * h) == pytest.approx(np.array(sizes) / sum(sizes) * box[2] * box[3])
    assert (x >= box[0] - 1e-6).all()
    assert (x + w <= box[0] + box[2] + 1e-6).all()
    assert (y >= box[1] - 1e-6).all()
    assert (y + h <= box[1] + box[3] + 1e-6).all()
    for i in range(n):  # none lies on another
        over = np.minimum(x + w, x[i] + w[i]) - np.maximum(x, x[i])
        under = np.minimum(y + h, y[i] + h[i]) - np.maximum(y, y[i])
        assert ((np.clip(over, 0, None) * np.clip(under, 0, None)).sum() - w[i] * h[i]) < 1e-6


def test_a_treemap_of_next_to_nothing() -> None:
    area = Area("a", 1e-9, "#000000", "note", "tiny")
    assert f'viewBox="0 0 {WIDTH} {HEIGHT}"' in treemap({}, "empty")
    assert "<rect" in treemap({"g": [area, Area("b", 0, "#000000", "", "")]}, "one")
    assert len(re.findall("<rect", treemap({"g": [area, Area("b", 1e12, "#000000", "", "")]}, "two"))) == 1


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(theme: str) -> None:
    known = variables(theme)
    for name in ("fg", "dim", "good", "bad"):
        assert contrast(known[name], known["bg"]) >= 4.5, name
    assert contrast(known["accent"], known["bg"]) >= 3.0


@pytest.mark.parametrize("color", COLORS)
def test_white_reads_on_every_area(color: str) -> None:
    assert contrast("#ffffff", color) >= 4.5
