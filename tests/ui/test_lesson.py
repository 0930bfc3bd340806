from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import toolkit as tk
from toolkit.models.shapes import SHAPES
from toolkit.ui.lessons import copies_by_hand
from toolkit.ui.lessons.checks import compare
from toolkit.ui.lessons.decode_faster import differs_in_waiting
from toolkit.ui.lessons.steps import (
    CHANGES,
    change,
    measured_table,
    prefill_us,
    step_facts,
    step_table,
    steps_of,
    timeline_of_step,
)


def test_an_open_prediction_is_asked_for_and_not_answered():
    verdict = compare({"h2d": None, "d2h": 1}, {"h2d": 2, "d2h": 1})
    assert not verdict.right
    assert "h2d" in repr(verdict)
    assert "trace says" not in repr(verdict)


def test_right_and_wrong_predictions_are_told_apart():
    wrong = compare({"h2d": 1, "d2h": 1}, {"h2d": 2, "d2h": 1})
    assert not wrong.right
    assert "wrong: h2d - you said 1, the trace says 2" in repr(wrong)
    assert "right: d2h" in repr(wrong)
    assert compare({"h2d": 2, "d2h": 1}, {"h2d": 2, "d2h": 1}).right


def test_estimates_need_only_come_near():
    near = compare({"GB": 15}, {"GB": 15.14}, within=0.05, who="the catalogue")
    assert near.right
    assert "you said 15, the catalogue says 15.1" in repr(near)
    assert compare({"tok/s": 118.4}, {"tok/s": 118.37}, within=0.001).right
    close = compare({"bytes": 3072.3}, {"bytes": 3072}, who="the model")
    assert str(close) == "wrong: bytes - you said 3072.3, the model says 3,072"
    assert not compare({"tok/s": 1e4}, {"tok/s": 118.37}, within=0.5).right
    assert "10,000" in repr(compare({"tok/s": 1e4}, {"tok/s": 118.37}))


@pytest.mark.parametrize("value", ["2", "two", [2], 2j, b"2", 10**400, torch.ones(2)], ids=str)
def test_what_is_no_number_is_asked_again(value):
    verdict = compare({"h2d": value}, {"h2d": 2})
    assert repr(verdict) == f"The prediction for 'h2d' is {value!r}. Write a number without quotes, then run both cells."
    assert verdict.asks
    assert not verdict.right


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), torch.tensor(2), torch.tensor([2.0])], ids=repr)
def test_every_kind_of_number_can_be_right(value):
    assert repr(compare({"h2d": value}, {"h2d": 2})) == "right: h2d - you said 2, the trace says 2"
    assert not compare({"h2d": float("nan")}, {"h2d": 2}).right


def test_long_numbers_have_separators():
    verdict = compare({"tokens": 8700}, {"tokens": 8715.2}, within=0.25, who="the model")
    assert repr(verdict) == "right: tokens - you said 8,700, the model says 8,715"


def test_every_name_needs_a_prediction():
    for predicted in ({"h2d": 2}, {"h2d": 1}):
        verdict = compare(predicted, {"h2d": 2, "d2h": 1, "d2d": 0}, names=("h2d", "d2h"))
        assert repr(verdict) == "The prediction for 'd2h' is missing. Write it in the cell above, then run both cells."
        assert verdict.asks
        assert not verdict.right
    assert compare({"h2d": 2, "d2h": 1}, {"h2d": 2, "d2h": 1, "d2d": 0}, names=("h2d", "d2h")).right


@pytest.mark.parametrize("found", [float("nan"), np.nan, float("inf"), np.float32("nan")], ids=str)
@pytest.mark.parametrize("value", [2, float("nan"), float("inf")], ids=str)
def test_nothing_is_right_where_no_number_was_found(value, found):
    verdict = compare({"d2h": 1, "h2d": value}, {"h2d": found, "d2h": 1}, within=0.05)
    assert repr(verdict) == f"The trace says {found} for h2d, which can't be compared. Run all cells above again."
    assert verdict.asks
    assert not verdict.right


def test_a_choice_is_compared_as_text():
    assert compare({"step": "longer"}, {"step": "longer"}, choices=CHANGES).right
    assert repr(compare({"step": "longer"}, {"step": "shorter"}, choices=CHANGES)).startswith("wrong: step - you said longer")
    unknown = compare({"step": "much longer"}, {"step": "longer"}, choices=CHANGES)
    assert repr(unknown) == "'much longer' is not one of the choices: 'shorter', 'about as long', 'longer'."
    number = compare({"step": 1}, {"step": "longer"}, choices=CHANGES)
    assert repr(number) == "1 is not one of the choices: 'shorter', 'about as long', 'longer'."


@pytest.fixture(scope="module")
def runs():
    """One run of each strategy of the lesson, by its name."""
    model = tk.load("demo/qwen3", device=tk.device("virtual:h200"), progress=False)
    captured = replace(tk.STRATEGIES["roundtrip"], name="roundtrip, captured", capture="step")
    strategies = [*tk.STRATEGIES.values(), captured]
    return {each.name: tk.generate(model, "The capital of France is", each, max_new_tokens=12) for each in strategies}


def test_the_figures_of_a_step_are_those_of_its_trace(runs):
    for run in runs.values():
        facts, marks = step_facts(run), {mark.step: mark for mark in run.trace.marks()}
        rows = run.trace.to_pandas().query("step == 8")
        assert facts["step, µs"] == round((marks[9].start_ns - marks[8].start_ns) / 1e3, 1)
        assert facts["GPU works, µs"] == round(rows[rows["kind"] == "kernel"]["dur_ns"].sum() / 1e3, 1)
        assert facts["host waits, µs"] == round(rows[rows["kind"] == "sync"]["dur_ns"].sum() / 1e3, 1)
        assert [facts[name] for name in ("kernels", "H2D", "D2H", "D2D")] == [
            int((rows["kind"] == kind).sum()) for kind in ("kernel", "h2d", "d2h", "d2d")
        ]
        assert prefill_us(run) == (marks[1].start_ns - marks[0].start_ns) / 1e3
        assert steps_of(run) == 11


def test_the_steps_of_the_lesson_are_in_the_steady_state(runs):
    for run in runs.values():
        table = [list(step_facts(run, step).values()) for step in (5, 8, 10)]
        assert table[0] == pytest.approx(table[1], rel=0.02, abs=0.2)
        assert table[1] == pytest.approx(table[2], rel=0.02, abs=0.2)


def test_the_timeline_of_a_step_holds_nothing_else(runs):
    shown = timeline_of_step(runs["roundtrip"], runs["whole-loop"], last=9)
    assert [track.title for track in shown.scene.tracks] == ["roundtrip", "whole-loop"]
    assert [list(track.steps[:, 0]) for track in shown.scene.tracks] == [[8, 9], [8, 9]]
    assert all(set(track.trace["step"].tolist()) == {8, 9} for track in shown.scene.tracks)


def test_explanations_of_decode_faster_are_true(runs):
    """What the explanations say of the figures that the learner sees."""
    table = step_table(*runs.values())
    step, works, waits = (table[f"{name}, µs"] for name in ("step", "GPU works", "host waits"))
    assert step["roundtrip"] - works["roundtrip"] > step["roundtrip"] / 2  # "most of the time, the GPU waits"
    assert abs(table["kernels"]["roundtrip"] - table["kernels"]["host-sampling"]) <= 1  # "about as many kernels"
    assert 4 * SHAPES["gemma4-31b"].config["vocab_size"] == 1 << 20  # "1 MiB"
    assert waits["roundtrip"] < 0.1 * step["roundtrip"]  # "the host hardly waits"
    assert table["kernels"]["roundtrip, captured"] == table["kernels"]["roundtrip"]  # "the same kernels"
    assert waits["roundtrip, captured"] == pytest.approx(works["roundtrip, captured"], rel=0.2)  # "as long as the kernels run"
    assert table["kernels"]["whole-loop"] == table["kernels"]["cuda-graph"] + 1  # "plus the small one that publishes the token"
    for name in ("cuda-graph", "whole-loop"):
        assert prefill_us(runs[name]) < 1.1 * prefill_us(runs["roundtrip"])  # nothing is captured before the first token
    late = step_facts(runs["whole-loop"], 1)["step, µs"] - step_facts(runs["roundtrip"], 1)["step, µs"]
    assert late < 5 * (step["roundtrip"] - step["whole-loop"])  # "a few tokens make up for a capture"
    assert step_facts(runs["cuda-graph"], 2)["step, µs"] > 2 * step_facts(runs["cuda-graph"], 3)["step, µs"]  # "captures then"
    assert change(10, 9.5) == "about as long"


def test_a_strategy_that_waits_differs_in_one_field(runs):
    graph = tk.STRATEGIES["cuda-graph"]
    unchanged = differs_in_waiting(replace(graph, name="yours"), runs["cuda-graph"])
    assert next(iter(unchanged)) == "fields changed: none, wanted one"
    assert list(unchanged.values()) == [False, False]
    assert all(differs_in_waiting(replace(graph, readback="wait"), runs["roundtrip, captured"]).values())
    two = differs_in_waiting(replace(graph, readback="wait", position="array"), runs["roundtrip, captured"])
    assert next(iter(two)) == "fields changed: position, readback, wanted one"
    assert list(two.values()) == [False, True]


def test_a_verdict_is_wrapped_in_a_notebook():
    assert compare({"x": 1}, {"x": 1}).with_line("`a` < b")._repr_html_() == (
        "<div>right: x - you said 1, the trace says 1</div><div><code>a</code> &lt; b</div>"
    )


def test_measured_steps_next_to_the_modelled_ones(runs):
    names = ("host-sampling", "roundtrip", "double-buffered", "cuda-graph", "whole-loop")
    table = measured_table(*(runs[name] for name in names))
    assert list(table.index) == list(names)
    assert (table > 0).all(axis=None)
    for name in names:
        assert table.loc[name, "modelled, µs"] == step_facts(runs[name])["step, µs"]
        trace = tk.open_trace(f"h200/qwen3/{name}")
        assert table.loc[name, "measured, µs"] == round(1e6 / trace.meta["tok_per_s"], 1)
    for name in names[:3]:
        assert table.loc[name, "recorded, µs"] > table.loc[name, "measured, µs"]  # "so the host takes longer"
    # "Without a graph, `double-buffered` isn't faster here than `roundtrip`, although it waits less"
    assert table.loc["double-buffered", "measured, µs"] > table.loc["roundtrip", "measured, µs"]
    assert step_facts(runs["double-buffered"])["host waits, µs"] < step_facts(runs["roundtrip"])["host waits, µs"]


def test_the_measured_timeline_holds_steps_whose_kernels_leave_hardly_a_gap():
    recorded = tk.open_trace("h200/qwen3-8b/cuda-graph")
    scene = timeline_of_step(recorded, first=5, last=7).scene
    (track,) = scene.tracks
    assert track.title == "cuda-graph, NVIDIA H200"
    kernels = track.trace.select(track.trace.is_kind("kernel"))
    assert np.bincount(kernels["step"])[[5, 6, 7]].min() > 200
    (origin,) = scene.origins(6)
    begin, end = (int(at) + origin for at in scene.first_range(6))  # what is shown first
    start, stop = kernels["start_ns"].clip(begin, end), (kernels["start_ns"] + kernels["dur_ns"]).clip(begin, end)
    assert (stop - start).sum() > 0.9 * (end - begin)  # "the GPU works all the time"
    with pytest.raises(tk.ToolkitError, match="has the steps 5 to 7"):
        timeline_of_step(recorded, first=8)


def test_a_recorded_loop_is_shown_as_a_whole():
    """Inferred steps would count other kernels in each loop, and the timeline would say so in its title."""
    gpu = tk.device("virtual:rtx-5090")
    batches, weight = [torch.rand(64, 64).pin_memory() for _ in range(4)], torch.rand(64, 64, device=gpu.torch)

    def loop():
        return [batch.to(gpu.torch, non_blocking=True) @ weight for batch in batches]

    trace, results = copies_by_hand.run(gpu, loop)
    order = copies_by_hand.order_of(trace)
    assert len(results) == len(order) == 4
    began = trace["start_ns"].min()  # the zero of the timeline
    copied = trace["start_ns"][trace.is_kind("h2d")].min() - began
    assert order["copy begins"].iloc[0] == pytest.approx(copied / 1e3, abs=0.1)
    assert trace.meta["steps_from"] is None
    shown = copies_by_hand.side_by_side(trace, trace)
    assert shown.scene.opening == {"step": None, "sentence": ""}
