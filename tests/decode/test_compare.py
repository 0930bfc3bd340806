"""Comparisons of strategies, and copy budgets."""

from __future__ import annotations

import dataclasses
import gc
import re
import threading

import numpy as np
import pytest
import torch
from small_models import SMALL, make

import toolkit as tk
from toolkit.core.errors import CopyBudgetError, RecorderError, ToolkitError, UnknownNameError
from toolkit.decode.compare import steady_steps
from toolkit.decode.strategies import STRATEGIES

PROMPT = list(range(19))


@pytest.fixture(scope="module")
def model():
    yield make(tk.device("virtual:h200"))
    gc.collect()


@pytest.fixture(scope="module")
def comparison(model):
    return tk.compare(model, PROMPT, max_new_tokens=6, eos=())


def test_an_unknown_option_is_one_of_compare(model):
    with pytest.raises(TypeError, match=r"^compare\(\) got an unexpected keyword argument 'max_tokens'"):
        tk.compare(model, PROMPT, max_tokens=2)


def test_a_row_a_strategy(comparison):
    table = comparison.table.set_index("strategy")
    assert list(table.index) == list(comparison.runs) == list(STRATEGIES)
    assert table["same_tokens"].all()
    assert set(table["clock"]) == {"modelled"}
    assert (table["tok_per_s"] > 0).all()
    columns = ["h2d_count", "h2d_bytes", "d2h_count", "d2h_bytes", "d2d_count", "d2d_bytes"]
    row, logits = SMALL.hidden_size * 4, SMALL.vocab_size * 4
    assert {name: tuple(values) for name, values in zip(table.index, table[columns].to_numpy().tolist(), strict=True)} == {
        "host-sampling": (2, 16, 1, logits, 0, 0),
        "host-embedding": (2, 8 + row, 1, 8, 0, 0),
        "roundtrip": (2, 16, 1, 8, 0, 0),
        "token-on-device": (1, 8, 1, 8, 0, 0),
        "position-on-device": (0, 0, 1, 8, 1, 8),
        "double-buffered": (0, 0, 1, 8, 0, 0),
        "cuda-graph": (0, 0, 1, 8, 0, 0),
        "whole-loop": (0, 0, 0, 0, 0, 0),
    }
    assert list(table.index[table["host_wait_us"] == 0]) == ["whole-loop"]  # the host polls memory instead

    launches = dict(zip(table.index, table["launches"], strict=True))
    assert launches["cuda-graph"] == 2  # the graph and the copy of a token: the step before the capture is left out
    assert launches["double-buffered"] > launches["cuda-graph"]
    assert launches["whole-loop"] == 0


def test_text_and_html_say_what_is_modelled(comparison):
    text = str(comparison)
    assert all(name in text for name in STRATEGIES)
    assert "modelled" in text
    assert "388 B" in text
    older = dataclasses.replace(comparison, table=comparison.table.assign(launches=-1))  # its traces have no launches
    assert "-1" not in str(older)
    slow = dataclasses.replace(comparison, table=comparison.table.assign(tok_per_s=0.3125))  # a large model on a CPU
    assert "0.312 modelled" in str(slow)
    assert "<table" in comparison._repr_html_()
    assert "modelled" in comparison._repr_html_()


def test_some_strategies_in_the_order_asked_for(model):
    assert list(tk.compare(model, PROMPT, ["roundtrip", "host-sampling"], max_new_tokens=2).runs) == [
        "roundtrip",
        "host-sampling",
    ]
    assert list(tk.compare(model, PROMPT, "roundtrip", max_new_tokens=2).runs) == ["roundtrip"]


def test_one_token_has_no_decode_steps(model):
    table = tk.compare(model, PROMPT, ["roundtrip"], max_new_tokens=1).table
    assert table["h2d_count"].tolist() == [0]
    assert table["tok_per_s"].isna().all()
    assert "roundtrip" in str(tk.compare(model, PROMPT, ["roundtrip"], max_new_tokens=1))


def test_rates_are_those_of_runs_without_recording(comparison, model):
    for name, rate in zip(comparison.table["strategy"], comparison.table["tok_per_s"], strict=True):
        run = tk.generate(model, PROMPT, name, max_new_tokens=6, eos=(), record=False)
        assert rate == pytest.approx(run.tok_per_s), name
        assert (comparison.runs[name].tok_per_s, comparison.runs[name].slowed) == (rate, "")
        recorded = tk.generate(model, PROMPT, name, max_new_tokens=6, eos=()).tok_per_s
        assert rate > 1.2 * recorded if STRATEGIES[name].capture == "none" else rate == pytest.approx(recorded)


def test_on_a_measured_clock_times_come_from_unrecorded_runs():
    model = make(tk.device("cpu"))
    seen: list[int] = []
    comparison = tk.compare(
        model, PROMPT, ["roundtrip", "double-buffered"], max_new_tokens=4, on_token=lambda token, text: seen.append(token)
    )
    assert set(comparison.table["clock"]) == {"measured"}
    assert comparison.table["same_tokens"].all()
    assert tuple(seen) == comparison.runs["roundtrip"].tokens + comparison.runs["double-buffered"].tokens
    again = tk.compare(model, PROMPT, ["roundtrip"], max_new_tokens=4)
    assert "CUPTI" not in str(again)  # which records on CUDA only


def test_cancel_keeps_the_strategies_begun(model):
    cancel, seen = threading.Event(), []

    def on_token(token, text):
        seen.append(token)
        if len(seen) == 8:
            cancel.set()

    comparison = tk.compare(model, PROMPT, max_new_tokens=5, eos=(), cancel=cancel, on_token=on_token)
    assert list(comparison.runs) == ["host-sampling", "host-embedding"]
    assert comparison.runs["host-embedding"].stop_reason == "cancelled"


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"decode": ["round-trip"]}, UnknownNameError, 'Did you mean "roundtrip"'),
        ({"decode": 3}, UnknownNameError, "decode strategy 3: no such name"),
        ({"decode": []}, ToolkitError, "comparing strategies: the list is empty"),
        ({"record": False}, ToolkitError, "record"),
    ],
    ids=["unknown", "number", "none", "unrecorded"],
)
def test_comparisons_that_cannot_be(model, arguments, error, said):
    with pytest.raises(error, match=said):
        tk.compare(model, PROMPT, **arguments)


def test_different_ones_need_different_names(model):
    other = make(model.device)
    mine = dataclasses.replace(STRATEGIES["roundtrip"], position="device")
    with pytest.raises(ToolkitError, match="comparing strategies: two different ones are called 'roundtrip'"):
        tk.compare(model, PROMPT, ["roundtrip", mine])
    with pytest.raises(ToolkitError, match="comparing models: two different ones are called '1'"):
        tk.compare({1: model, "1": other}, PROMPT)
    same = tk.compare({1: model, "1": model}, PROMPT, ["roundtrip", STRATEGIES["roundtrip"]], max_new_tokens=2)
    assert list(same.runs) == ["1: roundtrip"]


def test_comparing_inside_a_recording_is_refused(model):
    with tk.record(model.device), pytest.raises(RecorderError, match="being recorded"):
        tk.compare(model, PROMPT, max_new_tokens=2)


# ---- copy_budget


def test_a_budget_that_holds(model):
    with tk.copy_budget(h2d=1, d2h=5, d2d=0):
        run = tk.generate(model, PROMPT, "double-buffered", max_new_tokens=5, eos=())
    assert len(run.copies()) == 6


def test_a_broken_budget_names_line_and_counts(model):
    def upload():
        for _ in range(3):
            torch.tensor([1.0], device=model.device.torch)
        return torch.tensor([1.0, 2.0], device=model.device.torch)

    with pytest.raises(CopyBudgetError) as broken, tk.copy_budget(h2d=0):
        kept = upload()
    said, line = str(broken.value), upload.__code__.co_firstlineno
    assert f"test_compare.py:{line + 2} × 3 (12 B), " in said
    assert f"test_compare.py:{line + 3} × 1 (8 B)" in said
    assert "at most 0 H2D copies in the block: 4 H2D copies from " in said
    assert broken.value.facts["counts"] == {"h2d": 4}
    assert kept.device.type == "vgpu"
    assert model.device.recording is None


def test_several_directions_at_once(model):
    with pytest.raises(CopyBudgetError) as broken, tk.copy_budget(h2d=0, d2h=0, d2d=0):
        torch.tensor([1.0], device=model.device.torch).clone().item()
    assert broken.value.facts["counts"] == {"h2d": 1, "d2h": 1, "d2d": 1}


def test_pageable_copies_and_waits(model):
    device, pinned = model.device.torch, torch.ones(4).pin_memory()
    with tk.copy_budget(h2d=1, pageable=0, waits=0):
        pinned.to(device, non_blocking=True)
    with (
        pytest.raises(
            CopyBudgetError, match="at most 0 pageable copies and 1 wait in the block: 1 pageable copy from"
        ) as broken,
        tk.copy_budget(pageable=0, waits=1),
    ):
        torch.ones(4).to(device).sum().item()
    assert broken.value.facts["counts"] == {"pageable": 1, "waits": 2}
    assert re.search(r"1 pageable copy from \S+ × 1 \(16 B\); 2 waits from \S+ × 2\. Keep", str(broken.value))


@pytest.mark.parametrize(("name", "holds"), [("roundtrip", False), ("position-on-device", True), ("double-buffered", True)])
def test_per_step_leaves_the_prefill_out(model, name, holds):
    def run():
        with tk.copy_budget(h2d=0, d2h=1, per="step", device=model.device):
            tk.generate(model, PROMPT, name, max_new_tokens=4, eos=())
            tk.generate(model, PROMPT, name, max_new_tokens=3, eos=())

    if holds:
        run()
    else:
        with pytest.raises(CopyBudgetError, match=r"copies in step 1, run 2 times: 4 H2D"):
            run()


def test_per_step_without_steps_is_no_silent_pass(model):
    with pytest.raises(RecorderError, match="no steps"), tk.copy_budget(h2d=0, per="step", device=model.device):
        torch.tensor([1.0], device=model.device.torch)


def test_the_blocks_own_exception_passes(model):
    def fail():
        raise KeyError(torch.tensor([1.0], device=model.device.torch).shape)

    with pytest.raises(KeyError), tk.copy_budget(h2d=0):
        fail()
    assert model.device.recording is None


def test_limits_may_be_numbers_of_numpy(model):
    with tk.copy_budget(h2d=np.int64(0), d2h=np.int32(1)):
        pass
    with pytest.raises(CopyBudgetError, match="at most 0 H2D copies in the block"), tk.copy_budget(h2d=np.int64(0)):
        torch.ones(1).to(model.device.torch)


@pytest.mark.parametrize("outer", ["record", "copy_budget"])
def test_inside_a_recording_it_is_refused(model, outer):
    around = tk.record(model.device) if outer == "record" else tk.copy_budget(h2d=5)
    with pytest.raises(RecorderError, match=r"inside of the tk\.copy_budget block"), around, tk.copy_budget(h2d=0):
        pass
    assert model.device.recording is None


@pytest.mark.parametrize(
    ("options", "said"),
    [({"h2d": -1}, "h2d=-1"), ({"d2h": 1.5}, "d2h=1.5"), ({"d2d": True}, "d2d=True"), ({"per": "stpe"}, 'Did you mean "step"')],
    ids=str,
)
def test_budgets_that_are_none(model, options, said):
    with pytest.raises(ToolkitError, match=said), tk.copy_budget(**options):
        pass


@pytest.mark.parametrize(
    ("name", "launches"), [("roundtrip", 41), ("double-buffered", 40), ("cuda-graph", 2), ("whole-loop", 0)]
)
def test_steady_steps_of_traces_of_a_real_gpu(name, launches):
    steps = steady_steps(tk.open_trace(f"h200/qwen3/{name}"))
    assert steps["launches"].tolist()[1:] == [launches] * (len(steps) - 1)
    assert steps["step"].min() == (1 if launches > 10 else 2)
