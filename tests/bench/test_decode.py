"""The benchmark of decode speed: its records are complete on every device, and its parts measure what they say."""

from __future__ import annotations

import json
import statistics
from types import SimpleNamespace

import pytest

import toolkit as tk
from toolkit.bench import decode, decode_runs
from toolkit.bench.decode import PARTS, Bench, bench, combined, main, table
from toolkit.bench.decode_runs import first_token, names_of
from toolkit.core.errors import DeviceError, ToolkitError, UnknownNameError
from toolkit.decode.strategies import STRATEGIES
from toolkit.planning.costs import costs_of

FIELDS = {
    "tok_per_s", "spread", "tok_per_s_all", "peak_bytes", "host_us_per_step", "nodes", "first_token_s", "first_token_s_all",
    "bandwidth_percent", "kernels_per_step", "copies_per_step", "host_wait_us_per_step",
}  # fmt: skip


@pytest.fixture(scope="module")
def record():
    made = bench("virtual:h200", "demo/gemma4", None, [64, 100, 2000], tokens=10, generation=(19, 6))
    return json.loads(json.dumps(made))


def test_a_record_holds_every_context_and_strategy(record):
    assert record["clock"] == "modelled"
    assert (record["tokens"], record["repeats"]) == (10, 1)
    short, longer, impossible = record["rows"]
    assert "positions for 1,024" in impossible["why_not"]
    for row in (short, longer):
        assert list(row["strategies"]) == list(STRATEGIES)
        assert row["prefill"]["tok_per_s"] == pytest.approx(row["context"] / row["prefill"]["seconds"])
        for found in row["strategies"].values():
            assert set(found) == FIELDS
            assert found["bandwidth_percent"] == pytest.approx(100 * found["tok_per_s"] / row["limit_tok_per_s"])
            assert found["first_token_s"] == statistics.median(found["first_token_s_all"]) > row["prefill"]["seconds"] / 2
    model = tk.load("demo/gemma4", "virtual:h200", progress=False)
    assert longer["bytes_per_token"] == costs_of(model, 105).token_bytes
    assert longer["bytes_per_token"] > short["bytes_per_token"]


def test_strategies_differ_as_they_must(record):
    found = record["rows"][0]["strategies"]
    assert found["cuda-graph"]["tok_per_s"] > 1.5 * found["double-buffered"]["tok_per_s"]
    assert found["cuda-graph"]["host_us_per_step"] < 20 < found["double-buffered"]["host_us_per_step"]
    assert found["whole-loop"]["host_us_per_step"] < found["cuda-graph"]["host_us_per_step"]
    assert found["cuda-graph"]["nodes"] == found["cuda-graph"]["kernels_per_step"]
    assert found["whole-loop"]["nodes"] == found["whole-loop"]["kernels_per_step"]
    assert found["roundtrip"]["nodes"] is None
    copies = {name: [found[name]["copies_per_step"][kind]["count"] for kind in ("h2d", "d2d", "d2h")] for name in STRATEGIES}
    assert copies["roundtrip"] == [2, 0, 1]
    assert copies["position-on-device"] == [0, 1, 1]
    assert copies["cuda-graph"] == copies["double-buffered"] == [0, 0, 1]
    assert copies["whole-loop"] == [0, 0, 0]


def test_copies_of_a_whole_generation(record):
    whole = record["generation"]
    assert (whole["prompt"], whole["decode"]) == (19, 6)
    counts = {name: {kind: found[kind]["count"] for kind in found} for name, found in whole["copies"].items()}
    assert counts["roundtrip"] == {"h2d": 1 + 2 * 6, "d2h": 1 + 6, "d2d": 0}
    assert counts["position-on-device"] == {"h2d": 2, "d2h": 1 + 6, "d2d": 6}
    assert whole["copies"]["roundtrip"]["h2d"]["bytes"] == 19 * 8 + 2 * 6 * 8


def test_a_record_with_every_part(record):
    assert record["parts"] == list(PARTS)
    for row in record["rows"][:2]:
        step = row["breakdown"]
        assert step["unrecorded_us"] == pytest.approx(1e6 / row["strategies"][step["strategy"]]["tok_per_s"])
        assert step["unrecorded_us"] == pytest.approx(step["step_us"], rel=0.01)  # recording costs a virtual GPU nothing


def test_parts_of_a_record_can_be_measured_apart():
    asked = ("virtual:h200", "demo/gemma4", None, [64, 2000], ["roundtrip", "cuda-graph"])
    options = {"tokens": 10, "generation": (19, 6)}
    record = json.loads(json.dumps(bench(*asked, **options)))
    apart = [bench(*asked, parts=[part], **options) for part in PARTS]
    timed, recorded, copies = apart
    assert [made["parts"] for made in apart] == [[part] for part in PARTS]
    assert "breakdown" not in timed["rows"][0]
    assert set(recorded["rows"][0]["strategies"]["roundtrip"]) == FIELDS - set(timed["rows"][0]["strategies"]["roundtrip"])
    assert copies["rows"] == []
    assert table(recorded).count(" | - | - | - | ") == 2
    (whole,) = combined(json.loads(json.dumps(apart)))
    known = {name: record[name] for name in record if name not in ("parts", "date", "commit")}
    assert {name: whole[name] for name in known} == known
    assert len(combined([timed, {**recorded, "scheme": "q4_k_m"}])) == 2
    with pytest.raises(UnknownNameError, match='Did you mean "recorded"'):
        bench("virtual:h200", "demo/gemma4", None, [64], parts=["record"])


def test_a_record_is_written_after_each_part(tmp_path, monkeypatch):
    def stop(self, name, *arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "whole_copies", stop)
    out = tmp_path / "record.json"
    with pytest.raises(KeyboardInterrupt):
        bench("virtual:h200", "demo/qwen3", None, [16], ["cuda-graph"], tokens=8, parts=["recorded", "copies"], out=out)
    assert json.loads(out.read_text())["rows"][0]["breakdown"]["kernels"]


def test_all_timing_comes_before_all_recording(monkeypatch):
    model = tk.load("demo/qwen3", "virtual:h200", progress=False)
    order: list[bool] = []
    generate = decode_runs.generate
    monkeypatch.setattr(
        decode_runs, "generate", lambda *a, record=True, **more: order.append(record) or generate(*a, record=record, **more)
    )
    Bench(model, ["double-buffered", "cuda-graph"], 8, 2, 512, None).run([16, 40])
    assert order == sorted(order)
    assert {True, False} == set(order)


def test_a_strategy_that_fails_leaves_the_others(monkeypatch):
    model = tk.load("demo/qwen3", "virtual:h200", progress=False)

    def refuse(*arguments):
        raise DeviceError("capturing", "it failed", "Don't")

    monkeypatch.setattr(model.device, "capture", refuse)
    (row,) = Bench(model, ["roundtrip", "cuda-graph", "whole-loop"], 8, 1, 512, None).run([16])
    assert row["strategies"]["cuda-graph"] == {"why_not": "capturing: it failed. Don't"}
    assert set(row["strategies"]["whole-loop"]) == set(row["strategies"]["roundtrip"]) == FIELDS
    assert row["breakdown"]["strategy"] == "roundtrip"


def test_sizes_suffice():
    model = tk.load("random/qwen3-8b", "virtual:h200", scheme="q4_k_m", progress=False)
    (row,) = Bench(model, ["cuda-graph"], 8, 1, 2048, None).run([3000])
    found = row["strategies"]["cuda-graph"]
    assert 30 < found["bandwidth_percent"] < 100
    assert found["peak_bytes"] > 4.6e9
    (coded,) = Bench(model, [], 8, 1, 2048, "int4").run([3000])
    plain = 36 * 2 * 8 * 128 * 2 * 3004  # layers, keys and values, heads, size of a head, bytes, positions
    assert row["bytes_per_token"] - costs_of(model, 3004).read_bytes == pytest.approx(plain, rel=0.01)
    assert row["bytes_per_token"] - coded["bytes_per_token"] == pytest.approx(plain * (1 - 4.25 / 16), rel=0.05)


@pytest.mark.parametrize(("clock", "runs"), [("measured", 7), ("modelled", 3)])
def test_short_prompts_are_timed_more_often(monkeypatch, clock, runs):
    now = [0]

    def generate(model, ids, name, on_token, **options):
        now[0] += 200_000_000
        on_token(5, "")
        now[0] += 100_000_000

    monkeypatch.setattr(decode_runs, "generate", generate)
    device = SimpleNamespace(clock=clock, now_ns=lambda: now[0], sync=lambda: None)
    assert first_token(SimpleNamespace(device=device), [1], "roundtrip", 3) == pytest.approx([0.2] * runs)


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode_runs, "ENOUGH_S", 0.0)
    out = tmp_path / "record.json"
    options = ["--device", "cpu", "--context", "12", "--tokens", "6", "--repeats", "2", "--copies", "", "--out", str(out)]
    assert main([*options, "--decode", "roundtrip, double-buffered", "--parts", "timed, recorded"]) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert record["clock"] == "measured"
    assert list(row["strategies"]) == ["roundtrip", "double-buffered"]
    assert len(row["strategies"]["roundtrip"]["tok_per_s_all"]) == 2
    assert row["strategies"]["roundtrip"]["bandwidth_percent"] is None
    assert "| 12 | `roundtrip` |" in capsys.readouterr().out


@pytest.fixture
def page(record, tmp_path):
    """The page of two records, as text."""
    paths = []
    for n, changes in enumerate(({}, {"model": "random/gemma4-31b", "clock": "measured", "kv": "int4", "device": "<cuda>"})):
        paths.append(tmp_path / f"{n}.json")
        paths[-1].write_text(json.dumps({**record, **changes}))
    assert main(["--report", *map(str, paths), "--out", str(tmp_path / "page.html")]) == 0
    return (tmp_path / "page.html").read_text()


def test_the_page_shows_every_strategy_and_what_failed(page, record):
    tables = page.partition("plotly.js v")[0]
    for row in record["rows"][:2]:
        for name, found in row["strategies"].items():
            assert f"<code>{name}</code></td><td>{found['tok_per_s']:,.1f}</td>" in tables
    assert tables.count("2,000 tokens: decoding after 2,000 tokens: the model has positions for 1,024.") == 2
    assert tables.count("All times are modelled, not measured.") == 1
    assert "random/gemma4-31b (KV cache in int4)" in tables


def test_the_page_holds_its_figures_and_asks_for_no_file(page):
    figures = [json.loads(part.partition("</script>")[0]) for part in page.split('<script type="application/json">')[1:]]
    assert len(figures) == 5  # speed and breakdown of each record, and the roofline
    names = [[trace["name"] for trace in figure["data"]] for figure in figures]
    assert [name.partition(",")[0] for name in names[0]][: len(STRATEGIES)] == list(STRATEGIES)
    assert ("llama.cpp, measured" in names[0], "llama.cpp, measured" in names[2]) == (False, True)
    assert names[1][-1] == "gaps: no kernel runs"
    assert "src=" not in page.partition("plotly.js v")[0]
    assert page.count("plotly.js v") == 1


def test_a_record_of_timed_runs_alone_has_a_table_and_a_page(record, tmp_path):
    rows = [{key: row[key] for key in row if key != "breakdown"} for row in record["rows"]]
    for row in rows[:2]:
        row["strategies"] = {
            name: {key: found[key] for key in FIELDS - {"kernels_per_step", "copies_per_step", "host_wait_us_per_step"}}
            for name, found in row["strategies"].items()
        }
    timed = {key: record[key] for key in record if key != "generation"} | {"rows": rows, "note": "Only timed."}
    assert table(timed).count(" | - | ") == 2 * len(STRATEGIES)
    (tmp_path / "timed.json").write_text(json.dumps(timed))
    assert main(["--report", str(tmp_path / "timed.json"), "--out", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text().partition("plotly.js v")[0]
    assert page.count("<td><code>") == 2 * len(STRATEGIES)
    assert "per step</th>" in page  # "host per step"
    assert "kernels per step" not in page
    assert "H2D, D2H, D2D per step" not in page
    assert "Only timed." in page
    assert "kernel by kernel" not in page


def test_the_bars_of_a_step_add_up(record):
    speed = pytest.importorskip("toolkit.ui.figures.speed")
    bars = speed.breakdown_figure(record).data
    for n, row in enumerate(record["rows"][:2]):
        assert sum(bar.x[n] for bar in bars) == pytest.approx(row["breakdown"]["step_us"] / 1e3)
    assert speed.short_name("void at::native::add<float, 4>(int, float)") == "at::native::add"


def test_pages_need_a_record(tmp_path):
    pages = pytest.importorskip("toolkit.ui.figures.speed_page")
    with pytest.raises(ToolkitError, match="no records"):
        pages.write_speed_page([], tmp_path / "page.html")


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--context=8,abc", "'abc' is not a whole number of at least 1"),
        ("--context=", "argument --context: '' has no entry: give one, or several separated by commas"),
        ("--context=8,", "'8,' has an empty entry"),
        ("--parts= ", "argument --parts: ' ' has no entry"),
        ("--decode=", "argument --decode: '' has no entry"),
        ("--context=-5", "'-5' is not a whole number of at least 1"),
        ("--tokens=1", "'1' is not a whole number of at least 2"),  # which has no rate
        ("--repeats=0", "'0' is not a whole number of at least 1"),
        ("--chunk=0", "'0' is not a whole number of at least 1"),
        ("--copies=19", "'19' is not two numbers, such as 19,128"),
    ],
)
def test_a_wrong_number_is_refused_before_anything_is_measured(option, said, capsys):
    with pytest.raises(SystemExit):
        main(["--device", "virtual:h200", "--decode", "roundtrip", option])
    assert said in capsys.readouterr().err


def test_what_the_model_cant_do_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(Bench, "run", lambda *_: pytest.fail("measured"))
    with pytest.raises(UnknownNameError, match="'foo'"):
        bench("virtual:h200", "demo/gemma4", None, [8], kv="foo")
    with pytest.raises(ToolkitError, match=r"2,000 decode steps after 19 tokens: the model has positions for 1,024"):
        bench("virtual:h200", "demo/gemma4", None, [8], generation=(19, 2000))


def test_names():
    model = tk.load("demo/qwen3", "cpu", progress=False)
    assert "cuda-graph" not in names_of(model, ["all"])
    with pytest.raises(ToolkitError, match="no graphs"):
        names_of(model, ["cuda-graph"])
    with pytest.raises(UnknownNameError):
        names_of(model, ["rountrip"])
