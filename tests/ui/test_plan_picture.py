"""Tests of a plan's picture: it shows every phase, part and number, escapes names, is small and contains no script."""

from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import toolkit as tk
from toolkit.core.units import bytes_text
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.planning.describe import describe
from toolkit.planning.plans import NONE


def shown(**options):
    options = {"device": "rtx-5090", "budget": "4 GiB", "context": 8192, "kv": None, **options}
    return tk.plan(describe("random/qwen3-8b", "int4"), **options)


def test_everything_a_plan_says_is_in_its_picture():
    plan = shown()
    page = plan._repr_html_()
    for phase in (*plan.export, *plan.run):
        assert f"<title>{phase.name}: {next(iter(phase.parts))}" in page
        assert bytes_text(phase.device_bytes) in page
    for pull in plan.pulled:
        assert pull.why in page
        assert bytes_text(pull.saves_bytes) in page
    assert all(key in page for key in CATALOGUE)
    assert "Predicted" in page
    assert "budget 4.00 GiB" in page
    assert "Fits: " in page
    assert len(page) < 40_000
    assert "<script" not in page
    assert page.count("<svg") == 2
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)


def test_bars_stand_on_each_other_and_stay_in_the_picture():
    for plan in (shown(), shown(levers=NONE), shown(budget="512 MiB")):
        for svg in re.findall(r"<svg.*?</svg>", plan._repr_html_(), re.DOTALL):
            columns = {}
            for rect in ElementTree.fromstring(svg).iter("rect"):
                columns.setdefault(rect.get("x"), []).append((float(rect.get("y")), float(rect.get("height"))))
            assert len(columns) in (3, 5)
            for bars in columns.values():
                for (y, _), (above, height) in pairwise(bars):
                    assert abs(above + height - y) < 0.3
                assert min(y for y, _ in bars) >= 13.9


def test_what_does_not_fit_is_said_and_a_budget_beside_it_is_drawn():
    page = shown(budget="512 MiB")._repr_html_()
    assert "Use a budget of at least" in page
    assert "stroke-dasharray" in page
    assert "Fits: " not in page


def test_a_budget_for_running_is_not_called_the_memory_of_the_gpu():
    page = shown(run_budget="8 GiB")._repr_html_()
    assert "budget 8.00 GiB" in page
    assert "GPU memory 8.00 GiB" not in page
    assert "GPU memory 31.4 GiB" in shown(run_budget="32 GiB")._repr_html_()


def test_names_are_escaped():
    plan = tk.plan(describe("demo/qwen3"), "h200", name="<script>alert(1)</script>")
    assert "<script" not in plan._repr_html_()


def test_on_a_cpu_the_host_is_drawn():
    page = tk.plan("demo/qwen3", "cpu", budget="2 GiB")._repr_html_()
    assert "Exporting (host memory): predicted" in page
    assert "Which GPUs can export and run it" not in page
