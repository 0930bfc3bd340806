"""Tests of displaying a tuning in a notebook: verdicts, winners, losses, reasons; also empty, hostile and large tunings."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from test_colors import contrast, variables
from tuned import CONFIGS, GPUS, every_verdict, nothing_runs, row

import toolkit.ui
from toolkit.kernels.base import Config
from toolkit.tune.results import Tuning, joined
from toolkit.ui.figures.roofline import HEIGHT, WIDTH, roofline, share_of_roof
from toolkit.ui.figures.tuning import FEWEST_CONFIGS, FIGURES, MOST_CONFIGS, MOST_SHAPES, html

CSS = (Path(toolkit.ui.__file__).parent / "figures" / "tuning.css").read_text()
LIGHT, DARK = CSS.split('[data-jp-theme-light="false"]')[0], CSS.split('[data-jp-theme-light="false"]')[1].split("@media")[0]


@pytest.fixture(scope="module")
def page() -> str:
    return html(every_verdict())


def cells(page: str) -> list[tuple[str, str, list[str]]]:
    """Return (classes, tooltip, the seven numbers) of every cell of the heat tables."""
    found = re.findall(r'<td class="([^"]*)" title="([^"]*)"><label for="[^"]*">(.*?)</label></td>', page)
    return [(kinds, tip, re.findall(r"<i[^>]*>(.*?)</i>", inner)) for kinds, tip, inner in found]


def test_it_is_still_and_whole(page: str) -> None:
    assert len(page) < 130_000
    assert 'class="tk-tuning"' in every_verdict()._repr_html_()
    assert "<script" not in page
    for tag in ("div", "td", "tr", "table", "details", "label", "i", "svg"):
        assert len(re.findall(rf"<{tag}[ >]", page)) == page.count(f"</{tag}>"), tag
    assert len(cells(page)) == len(GPUS) * len(CONFIGS)
    assert all(len(figures) == len(FIGURES) for _, _, figures in cells(page))


def test_verdicts_have_a_sign_a_word_and_a_reason(page: str) -> None:
    for said in ("<b>✓</b> 8 correct", "<b>✗</b> 2 wrong", "<b>⊘</b> 12 excluded", "<b>!</b> 9 failed", "<b>○</b> 76 fits"):
        assert said in page
    tips = {kinds.split()[0]: tip for kinds, tip, _ in cells(page)}
    assert "needs 131,072 B of shared memory, RTX-" in tips["tk-excluded"]
    assert "cosine 0.97120" in tips["tk-wrong"]
    assert "CompileTimeAssertionFailure" in tips["tk-failed"]
    listed = re.search(r"<summary>Unusable: 12 excluded, 9 failed, 2 wrong</summary><ul>(.*?)</ul>", page)
    assert listed
    assert "L4 allows 101,376" in listed[1]
    assert listed[1].count("CompileTimeAssertionFailure") == 1  # once, with all its GPUs


def test_measured_and_modelled_are_told_apart(page: str) -> None:
    for kinds, tip, figures in cells(page):
        assert ("tk-modelled" in kinds) == ("modelled" in tip and "would take" not in tip)
        if tip.startswith("h200"):
            assert "tk-modelled" not in kinds
        assert (figures[5].endswith("-")) == (not tip.startswith("h200") or "failed" in kinds)
    assert "Hatched: modelled, not measured" in page


def test_one_winner_a_gpu_and_its_line(page: str) -> None:
    tuning = every_verdict()
    won = [tip for kinds, tip, figures in cells(page) if "tk-won" in kinds and figures[0].startswith("★ ")]
    assert len(won) == len(GPUS)
    for gpu in GPUS:
        best = tuning.best(gpu)
        assert best is not None
        assert any(tip.startswith(f"{gpu}, {best.config!r}") for tip in won)
        assert f"{best.config!r}  # {gpu}: " in page


def test_what_would_have_won_unchecked(page: str) -> None:
    assert page.index("Each GPU's winner") < page.index("Every config") < page.index("The fastest correct config")
    table = page.split("The fastest correct config")[1].split("</table>")[0]
    h200 = re.search(r'<th scope="row">h200</th>(.*?)</tr>', table)
    assert h200
    right, wrong, excluded = re.findall(r"<td[^>]*>(.*?)</td>", h200[1])
    assert right == "<b>64.2\u00a0µs</b> block_m=128 warps=8 stages=4"
    assert wrong.startswith('<b class="tk-modelled">')
    assert excluded == "-"
    assert re.search(r'<th scope="row">l4</th>.*?tk-excluded" title="l4[^"]*would take', table)
    everything_fits = Tuning((row("l4", CONFIGS[0], 0),))
    assert "The fastest correct config" not in html(everything_fits)


def test_what_other_winners_cost(page: str) -> None:
    table = page.split("Time lost when")[1]
    rows = re.findall(r'<tr><th scope="row">([\w-]+)</th>(.*?)</tr>', table)
    assert [name for name, _ in rows] == list(GPUS)
    lost = {name: re.findall(r"<td[^>]*>(.*?)</td>", inner) for name, inner in rows}
    assert all(lost[gpu][n] == "0" for n, gpu in enumerate(GPUS))
    assert lost["rtx-5090"][GPUS.index("h200")] == "⊘ excluded"
    assert lost["h200"][GPUS.index("b200")] == "14\u00a0×"
    assert lost["rtx-4090"][0] == "+7.0\u00a0%"


def test_nothing_runs_and_nothing_at_all() -> None:
    page = html(nothing_runs())
    assert "⊘</b> 4 excluded" in page
    assert "# l4: no config runs on it: needs 262,144 B" in page
    assert "Time lost when" not in page
    assert "fastest" not in page.split("tk-choose")[0]
    empty = html(Tuning((), ("a note <b>",)))
    assert "Nothing was tuned." in empty
    assert "a note &lt;b&gt;" in empty
    assert "<table" not in empty


def test_what_is_hostile_is_escaped() -> None:
    evil = '<img src=x onerror="alert(1)">'
    one = replace(row("l4", CONFIGS[0], 0), verdict="failed", reason=evil, kernel=evil, ns=None)
    others = replace(one, gpu="h200", verdict="untried", ns=1.0), replace(one, gpu=evil, verdict="excluded", ns=1.0)
    page = html(Tuning((one, *others, replace(one, shape=evil, gpu=evil))))
    assert "<img" not in page


def test_many_configs_and_many_problems_are_cut_and_say_so() -> None:
    many = [Config(block=n + 1, warps=4, stages=1) for n in range(MOST_CONFIGS + 7)]
    base = row("l4", CONFIGS[0], 0)
    big = Tuning(tuple(replace(base, config=config, ns=1000.0 + n) for n, config in enumerate(many)))
    page = html(big)
    assert page.count('class="tk-row"') == MOST_CONFIGS
    assert f"The best {MOST_CONFIGS} of {MOST_CONFIGS + 7} configs" in page
    assert "> block=1</label>" in page
    odd = replace(base, gpu="h200", config=many[-1], ns=1.0)  # a winner, though of one GPU alone
    assert f"> block={len(many)}</label>" in html(Tuning((*big.rows, odd)))
    several = joined(Tuning(tuple(replace(one, shape=f"n={n}") for one in big.rows)) for n in range(MOST_SHAPES + 2))
    page = html(several)
    assert page.count('class="tk-row"') == MOST_SHAPES * FEWEST_CONFIGS
    assert page.count("<details open><summary>a_matmul") == 1
    assert "2 more problems" in page


def test_two_views_in_one_page_choose_by_themselves() -> None:
    names = [re.findall(r'type="radio" name="(\w+)"', html(nothing_runs())) for _ in range(2)]
    assert len(set(names[0])) == len(set(names[1])) == 1
    assert names[0][0] != names[1][0]


def test_rooflines() -> None:
    base = row("l4", CONFIGS[0], 0)
    assert share_of_roof(replace(base, ns=18_000.0)) == 0.5
    assert share_of_roof(replace(base, ns=4_000.0)) == 1.0  # with a warm L2 the bandwidth can exceed that of memory
    assert share_of_roof(replace(base, ns=None)) is None
    assert share_of_roof(replace(base, memory_ns=0.0, compute_ns=0.0)) is None
    for memory, compute, ns in ((1e4, 1.0, 1e9), (1.0, 1e4, 1e4), (0.0, 5.0, 9.0), (5.0, 0.0, 9.0), (1.0, 1.0, 1.0)):
        drawn = roofline(replace(base, memory_ns=memory, compute_ns=compute, ns=ns))
        x, y = (float(re.search(rf'c{axis}="([\d.]+)"', drawn)[1]) for axis in "xy")  # type: ignore[index]
        assert 0 <= x <= WIDTH
        assert 0 <= y <= HEIGHT
    assert "tk-hollow" in roofline(base)
    assert "tk-hollow" not in roofline(replace(base, clock="measured"))


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_text_reads_on_every_step_of_the_heat(theme: str) -> None:
    known = variables(theme)
    for ground in ("bg", "h1", "h2", "h3", "h4", "h5", "l1", "l2", "l3"):
        assert contrast(known["fg"], known[ground]) >= 5.5, ground  # a margin, since hatched lines reduce the contrast
    for text in ("dim", "good", "bad", "odd", "accent"):
        assert contrast(known[text], known["bg"]) >= 4.5, text
    steps = [contrast(known[f"h{n}"], known["bg"]) for n in range(1, 6)]
    assert steps == sorted(steps)
