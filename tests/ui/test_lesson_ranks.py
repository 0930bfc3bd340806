"""What the lesson "Two GPUs" says in words and numbers is what the app says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import toolkit as tk
import toolkit.bench
from toolkit.core.extras import install_command
from toolkit.models.shapes import SHAPES
from toolkit.ui.lessons import two_gpus
from toolkit.ui.lessons.two_gpus import CARD, LARGE, LATE, LATE_NS, MODEL, exchanged, held, scaling, sums, times_of, two_runs
from toolkit.ui.timeline.track import Track
from toolkit.ui.timeline.view import Scene

NOTEBOOK = Path(tk.__file__).parents[1] / "notebooks" / "11_two_gpus.ipynb"


def test_the_recorded_runs_have_what_the_lesson_asks_for() -> None:
    even, late = two_runs()
    for trace in (even, late):
        step = sums(trace)
        assert (len(step), set(step.bytes)) == (exchanged(MODEL)[0], {exchanged(MODEL)[1]})
        assert trace.meta["clock"] == "modelled"
    assert even.ranks().wait_us.tolist() == [0, 0]
    waits = late.ranks().set_index("rank").caused_wait_us
    assert waits.idxmax() == LATE
    step = sums(late)
    assert 0 < step.rank0_wait_us.sum() < LATE_NS / 1e3
    assert step.rank0_wait_us.iloc[0] == step.rank0_wait_us.sum()  # once per step
    times = times_of(late)
    assert times["GPU 0"].iloc[0] - times["GPU 1"].iloc[0] == pytest.approx(step.rank0_wait_us.sum(), abs=0.1)


def test_numbers_in_the_text_are_those_of_the_model_and_the_card() -> None:
    text = "".join("".join(cell["source"]) for cell in json.loads(NOTEBOOK.read_text())["cells"])
    shape = SHAPES[LARGE.removeprefix("random/")].config
    assert f"has {shape['num_hidden_layers']} layers, and its hidden state has {shape['hidden_size']:,} numbers" in text
    assert "which was measured on two H200s" in text
    assert tk.GPUS[CARD].source("collective_ns").how == "measured"


def test_a_rank_reads_its_part() -> None:
    table = scaling()
    assert table.reading_us[2] == pytest.approx(table.reading_us[1] / 2, rel=0.02)
    assert (table.tokens_per_s.diff().dropna() > 0).all()
    assert held(2)["weights"] == pytest.approx(held(1)["weights"] / 2, rel=0.01)


def test_the_step_of_the_real_pair() -> None:
    times_us, step_us = two_gpus.real_times(tk.open_trace(two_gpus.PAIR))
    layers = SHAPES["gemma4-31b"].config["num_hidden_layers"]
    assert len(times_us) == 2 * layers + 2  # also the sum of the embedding, and the logits
    assert (times_us > 0).all()
    record = json.loads((Path(toolkit.bench.__file__).parent / "results" / "h200x2_ranks_tuned.json").read_text())
    models = [row for row in record["models"] if row["model"] == "random/gemma4-31b"]
    rates = {row["ranks"]: row["tok_per_s"]["cuda-graph"] for row in models}
    assert rates == {1: two_gpus.PAIR_TOK_PER_S["alone"], 2: two_gpus.PAIR_TOK_PER_S["both"]}
    assert step_us == pytest.approx(1e6 / rates[2], rel=0.03)
    shown = Scene([Track(tk.open_trace(two_gpus.PAIR), "pair")]).opening["step"]
    assert shown == two_gpus.PAIR_STEP  # the questions are about the step that the timeline shows


def test_new_runs_need_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    with pytest.raises(tk.ToolkitError, match=re.escape(install_command("ranks"))):
        two_gpus.two_runs(live=True)
