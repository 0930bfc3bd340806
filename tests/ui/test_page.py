"""Tests of the self-contained page: written atomically, escaped, without network access or front-end packages."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from synthetic import decode_loop, many_events

import toolkit as tk
from toolkit.core.errors import ToolkitError
from toolkit.core.extras import install_command
from toolkit.trace.events import Trace, TraceBuilder
from toolkit.ui.timeline.page import write_comparison, write_page

EVIL = "</script><script>alert('x')</script><img src=x onerror=alert(1)>"


def data_of(path: Path) -> dict:
    return json.loads(re.search(r'id="tk-data">(.*?)</script>', path.read_text(), re.DOTALL)[1])


def column(packed: dict, name: str) -> np.ndarray:
    """Decode one column of a packed trace like page.js does."""
    raw = base64.b64decode(packed["data"])
    raw, at = zlib.decompress(raw) if packed["deflated"] else raw, 0
    for known, dtype, constant in packed["columns"]:
        size = 0 if constant is not None else packed["n"] * np.dtype(dtype).itemsize
        if known == name:
            return np.full(packed["n"], constant) if constant is not None else np.frombuffer(raw, dtype, packed["n"], at)
        at += size
    raise KeyError(name)


def test_a_run_of_512_steps_takes_less_than_200_kB(tmp_path: Path) -> None:
    path = write_page(decode_loop(steps=512, kernels=100), tmp_path / "a.html")
    assert path.stat().st_size < 170_000  # runs of the demo models differ more from step to step


@pytest.mark.parametrize("trace", [decode_loop(), many_events(30_000)], ids=["small", "deflated"])
def test_holds_every_event(tmp_path: Path, trace: Trace) -> None:
    packed = data_of(write_page(trace, tmp_path / "a.html"))["traces"][0]
    kept = ~(trace.is_kind("mark") & (trace["step"] >= 0))
    start = np.cumsum(column(packed, "start_low").astype(np.int64) + (column(packed, "start_high").astype(np.int64) << 32))
    assert start.tolist() == trace["start_ns"][kept].tolist()
    assert column(packed, "bytes_low").tolist() == trace["bytes"][kept].tolist()
    assert column(packed, "where").tolist() == trace["where"][kept].tolist()


def test_times_beyond_four_seconds_and_bytes_beyond_four_gib(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.add("h2d", 0, 6 << 32, bytes=5 << 32, stream=0)
    builder.add("h2d", 7 << 32, 1, bytes=1, stream=0)
    packed = data_of(write_page(builder.build({}), tmp_path / "a.html"))["traces"][0]
    assert column(packed, "start_high").tolist() == [0, 7]
    assert column(packed, "bytes_high").tolist() == [5, 0]
    assert column(packed, "dur_high").tolist() == [6, 0]


def test_everything_is_escaped(tmp_path: Path) -> None:
    builder = TraceBuilder()
    builder.add("kernel", 0, 5, stream=0, name=EVIL, where=EVIL)
    builder.add("mark", 0, 5, step=0, device=-1, name=EVIL)
    trace = builder.build({"device": EVIL, "versions": {EVIL: EVIL}})
    text = write_page({EVIL: trace, "b": trace}, tmp_path / "a.html", title=EVIL).read_text()
    assert "<script>alert" not in text
    assert "<img src=x" not in text
    assert text.count("</script>") == 2


def test_asks_nothing_of_the_network(tmp_path: Path) -> None:
    text = write_page(decode_loop(), tmp_path / "a.html").read_text()
    assert not re.search(r"https?://", text)
    assert not re.search(r"\bimport\s*\(|\bimport .* from|@import|url\(", text)


def test_several_runs_can_be_chosen_and_put_beside_each_other(tmp_path: Path) -> None:
    path = write_page([("one", decode_loop()), ("two", decode_loop(h2d=0))], tmp_path / "a.html", decode_loop(clock="measured"))
    text = path.read_text()
    assert [packed["meta"]["title"] for packed in data_of(path)["traces"]] == ["one", "two", "recording"]
    assert "<option selected value=2>" in text
    assert "measured" in text


def test_files_of_other_tools_are_called_by_their_names(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 1}
    files = [tmp_path / name for name in ("before.json", "after.json", "half \udcff.json")]
    for file in files:
        file.write_text(json.dumps({"traceEvents": [event]}))
    before, after, odd = map(tk.open_trace, files)
    after.meta["title"] = "with graphs"
    titles = [packed["meta"]["title"] for packed in data_of(before.to_html(tmp_path / "a.html", after))["traces"]]
    assert titles == ["before.json", "with graphs"]
    assert data_of(odd.to_html(tmp_path / "a.html"))["traces"][0]["meta"]["title"] == "half ?.json"


def test_comparison_brings_its_table(tmp_path: Path) -> None:
    class Comparison:
        def titled(self) -> dict[str, Trace]:
            return {"roundtrip": decode_loop(), "double-buffered": decode_loop(h2d=0)}

        def _repr_html_(self) -> str:
            return "<table><tr><td>the table</td></tr></table>"

    text = write_comparison(Comparison(), tmp_path / "a.html").read_text()
    assert "the table" in text
    assert 'id="tk-b"' in text


def test_an_empty_trace_makes_a_page(tmp_path: Path) -> None:
    assert "No events" in write_page(TraceBuilder().build({}), tmp_path / "a.html").read_text()


def test_replaces_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_page(decode_loop(), tmp_path / "a.html")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(ToolkitError, match="No space"):
        write_page(decode_loop(steps=2), path)
    assert path.read_bytes() == before
    assert [item.name for item in tmp_path.iterdir()] == ["a.html"]


def test_a_folder_that_is_not_there_and_no_traces(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="Check that the folder exists"):
        write_page(decode_loop(), tmp_path / "missing" / "a.html")
    with pytest.raises(ToolkitError, match="no traces"):
        write_page([], tmp_path / "a.html")


def test_needs_no_front_end_package(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('IPython', 'ipywidgets', 'anywidget', 'plotly', 'traitlets', 'torch'): sys.modules[name] = None\n"
        "from toolkit.trace.events import TraceBuilder\n"
        "builder = TraceBuilder(); builder.add('h2d', 0, 5, bytes=8, stream=0)\n"
        f"builder.build({{}}).to_html({str(tmp_path / 'a.html')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert (tmp_path / "a.html").stat().st_size > 10_000


def test_without_their_packages_timelines_and_the_lab_say_what_to_install() -> None:
    code = (
        "import sys\n"
        "for name in ('IPython', 'ipywidgets', 'anywidget'): sys.modules[name] = None\n"
        "import toolkit as tk\n"
        "trace = tk.open_trace('h200/qwen3/roundtrip')\n"
        "for work in (trace.timeline, lambda: tk.Lab()):\n"
        "    try: work()\n"
        "    except tk.ToolkitError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    do = "is not installed. Install the packages for notebooks: " + install_command("lab")
    assert done.stdout.splitlines() == [f"the timeline of a Trace: anywidget {do}", f"tk.Lab: ipywidgets {do}"]
