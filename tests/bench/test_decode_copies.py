"""The record of what strategies copy: complete, comparable, and honest about differences."""

from __future__ import annotations

import copy
import json

import pytest

import toolkit as tk
from toolkit.bench.decode_copies import RANDOM, bench, main, open_model, table
from toolkit.core.errors import ToolkitError
from toolkit.decode.strategies import STRATEGIES


@pytest.fixture(scope="module")
def record():
    return json.loads(json.dumps(bench("virtual:h200", "demo/qwen3", prompt_length=19, decode=5, repeats=3)))


def test_a_record_holds_every_strategy(record):
    assert list(record["strategies"]) == list(STRATEGIES)
    assert record["same_tokens"]
    assert record["clock"] == "modelled"
    assert (record["prompt"], record["decode"]) == (19, 5)
    for name, found in record["strategies"].items():
        assert len(found["tokens"]) == 6
        assert found["decode_steps"] == 5
        assert found["every_step_alike"], name
        assert found["total"]["d2h"]["count"] == {"host-embedding": 7, "whole-loop": 0}.get(name, 6)
        assert found["ms_per_step"] > 0
        assert not any(found["outside"].values())
    roundtrip = record["strategies"]["roundtrip"]
    assert roundtrip["sizes"] == {
        "prefill": {"h2d": [[152, 1]], "d2h": [[8, 1]], "d2d": []},
        "decode": {"h2d": [[8, 10]], "d2h": [[8, 5]], "d2d": []},
    }
    assert roundtrip["total"]["h2d"] == {"count": 11, "bytes": 152 + 80}


def test_times_are_those_of_runs_without_recording(record):
    model = tk.load("demo/qwen3", device="virtual:h200", progress=False)
    prompt = [5] * 19  # times don't depend on the values
    for name in ("roundtrip", "cuda-graph"):
        rate = tk.generate(model, prompt, name, max_new_tokens=6, eos=(), record=False).tok_per_s
        assert record["strategies"][name]["ms_per_step"] == pytest.approx(1e3 / rate)


def test_a_record_equals_itself_and_not_a_changed_one(record):
    text, differ = table(record, record)
    assert not differ
    assert "1.00" in text
    changed = copy.deepcopy(record)
    changed["strategies"]["roundtrip"]["sizes"]["decode"]["h2d"][0][1] += 1
    changed["strategies"]["double-buffered"]["tokens"][-1] += 1
    assert table(record, changed)[1] == ["roundtrip: sizes", "double-buffered: tokens"]


def test_a_strategy_or_a_time_that_is_missing_is_named(record):
    fewer = copy.deepcopy(record)
    del fewer["strategies"]["cuda-graph"]
    fewer["strategies"]["roundtrip"]["ms_per_step"] = None  # of a run of one token
    text, differ = table(fewer, record)
    assert differ == ["cuda-graph: only measured"]
    (line,) = (line for line in text.splitlines() if line.startswith("| `roundtrip` "))
    assert [cell.strip() for cell in line.split("|")[5:-1:2]] == ["-", "-"]


def test_command_line(tmp_path, record, capsys):
    out = tmp_path / "record.json"
    assert main(["--device", "cpu", "--decode", "2", "--repeats", "1", "--out", str(out)]) == 0
    measured = json.loads(out.read_text())
    assert measured["clock"] == "measured"
    assert len(measured["strategies"]["roundtrip"]["ms_per_step_all"]) == 1
    other = tmp_path / "other.json"
    other.write_text(json.dumps(record))
    assert main(["--table", str(other), str(other)]) == 0
    assert "all copies are equal" in capsys.readouterr().out
    assert main(["--table", str(other), str(out)]) == 1
    assert "Different: decode" in capsys.readouterr().out


def test_only_the_demo_has_a_stand_in():
    with pytest.raises(ToolkitError):
        open_model("demo/no-such-model", "cpu")
    name, model = open_model("demo/qwen3", "cpu")
    assert name == "demo/qwen3" or model.config == RANDOM
