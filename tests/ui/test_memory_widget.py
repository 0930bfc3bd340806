"""Tests of the memory widget and its page without a browser: answers, state, fallbacks, sizes, embedded data."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from memory_events import GIB, HOSTILE, many_events, recording, small, use_of

from toolkit.core.errors import RecorderError, ToolkitError
from toolkit.ui import canvas
from toolkit.ui.memory.page import packed_use, write_memory_page
from toolkit.ui.memory.widget import MemoryTimeline
from toolkit.vram.measure import MemoryUse


def parse(blob: bytes) -> dict[str, Any]:
    (size,) = struct.unpack_from("<I", blob)
    view = json.loads(blob[4 : 4 + size])
    numbers = np.frombuffer(blob, "<f8", 4 * view["width"], 4 + size).reshape(4, -1)
    held = np.frombuffer(blob, "<f4", -1, 4 + size + numbers.nbytes).reshape(len(view["bands"]), view["width"])
    return {**view, **dict(zip(("position", "total", "reserved", "time"), numbers, strict=True)), "held": held}


class Heard(MemoryTimeline):
    """A widget that records the messages it sends."""

    def send(self, content: object, buffers: object = None) -> None:
        self.__dict__.setdefault("heard", []).append(content)

    def ask(self, **request: object) -> None:
        self._answer(self, {"vid": "me", "seq": 3, **request}, [])


def test_the_first_view_is_the_whole() -> None:
    use = use_of(many_events(20_000))
    widget = MemoryTimeline(use)
    view = parse(widget.view)
    assert view["total"].max() == use.peak_bytes == widget.meta["peak"]
    assert np.allclose(view["held"].sum(0), view["total"], rtol=1e-6)
    assert widget.meta["groupings"] == ["owner", "kind", "line", "cell", "step"]


def test_answers_any_range_grouping_and_axis() -> None:
    widget = Heard(use_of(many_events(20_000)))
    for by in widget.meta["groupings"]:
        for axis in ("events", "time"):
            widget.ask(type="view", by=by, axis=axis, x0=0, x1=-1, width=700)
            view = parse(widget.view)
            assert (view["vid"], view["seq"], view["by"], view["axis"], view["width"]) == ("me", 3, by, axis, 700)
            assert [view["x0"], view["x1"]] == view["bounds"]
            assert view["total"].max() == widget.use.peak_bytes


def test_lists_what_was_alive() -> None:
    widget = Heard(small(owner="model.weight"))
    widget.ask(type="at", position=2)
    (answer,) = (message["answer"] for message in widget.heard)
    assert answer["total"] == 5 * GIB
    assert answer["rows"] == [[5 * GIB, 3, "model.weight", "activations", "x = f()", "cell 1 line 1"]]
    json.dumps(widget.heard)


@pytest.mark.parametrize(
    "request_",
    [
        None, [], "view", {}, {"type": "view"}, {"type": "nonsense", "vid": "a", "seq": 1},
        {"type": "at", "vid": "a", "seq": 1},
        {"type": "view", "vid": "a", "seq": 1, "by": "color", "axis": "time", "x0": 0, "x1": 1, "width": 9},
        {"type": "view", "vid": "a", "seq": 1, "by": "owner", "axis": "place", "x0": 0, "x1": 1, "width": 9},
        {"type": "view", "vid": "a", "seq": 1, "by": "owner", "axis": "time", "x0": "x", "x1": 1, "width": 9},
        {"type": "view", "vid": "a", "seq": 1, "by": "owner", "axis": "time", "x0": 0, "x1": 1, "width": float("inf")},
    ],
)  # fmt: skip
def test_malformed_messages_are_ignored(request_: object) -> None:
    widget = Heard(small())
    before = widget.view
    widget._answer(widget, request_, [])
    assert widget.view == before
    assert not getattr(widget, "heard", [])


@pytest.mark.parametrize("x", [(5, 5), (9, 1), (-1e18, 1e18), (1e9, 2e9), (float("nan"), 1), (0, float("inf"))], ids=str)
@pytest.mark.parametrize("axis", ["events", "time"])
def test_odd_ranges_give_a_view(x: tuple[float, float], axis: str) -> None:
    widget = Heard(small())
    widget.ask(type="view", by="owner", axis=axis, x0=x[0], x1=x[1], width=0)
    assert parse(widget.view)["seq"] == 3


def test_state_of_many_events_fits_a_saved_notebook() -> None:
    state = MemoryTimeline(use_of(many_events(200_000)), "line").get_state()
    assert len(json.dumps(state["meta"])) + len(state["view"]) * 4 / 3 < 130_000


def test_fallbacks_for_places_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "ipython_shell", lambda: None)  # another test may have made one
    widget = small(owner=HOSTILE, clock="modelled").timeline()
    data, _ = widget._repr_mimebundle_()
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= set(data)
    assert "data:image/svg+xml" in data["text/html"]
    assert "<script" not in data["text/html"]
    assert "modelled, not measured" in data["text/html"]
    assert "peak 5.00 GiB" in data["text/plain"]


def test_a_measurement_shows_itself() -> None:
    assert "Held at the peak" in small()._repr_html_()
    assert MemoryUse()._repr_html_() is None


def test_what_is_no_measurement_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match="an int"):
        MemoryTimeline(3)  # type: ignore[arg-type]
    with pytest.raises(RecorderError):
        MemoryTimeline(MemoryUse())
    for nothing in ([], 3, [3]):
        with pytest.raises(ToolkitError):
            write_memory_page(nothing, tmp_path / "a.html")
    with pytest.raises(ToolkitError, match="folder"):
        write_memory_page(small(), tmp_path / "none" / "a.html")


def test_an_empty_measurement_has_a_widget_and_a_page(tmp_path: Path) -> None:
    for trace in (recording(), recording(("alloc", 1, 512), opening=1)):
        assert parse(MemoryTimeline(use_of(trace)).view)["total"].max() == use_of(trace).peak_bytes
        write_memory_page(use_of(trace), tmp_path / "a.html")
    write_memory_page([small(), use_of(recording(device="none"))], tmp_path / "a.html")


def test_the_page_embeds_the_peak_and_all_bands() -> None:
    use = use_of(many_events(60_000))
    raw = zlib.decompress(base64.b64decode(packed_use(use)))
    (size,) = struct.unpack_from("<I", raw)
    header = json.loads(raw[4 : 4 + size])
    n, at = header["n"], 4 + size
    position, total = (np.cumsum(np.frombuffer(raw, "<f8", n, at + 8 * n * i)) for i in (0, 1))
    assert total.max() == use.peak_bytes
    assert use.ledger.peak in position
    at += 8 * 4 * n + (3 * 8 + 4) * header["blocks"]
    for _, bands in header["sets"]:
        held = np.cumsum(np.frombuffer(raw, "<i4", n * len(bands), at).reshape(-1, n), axis=1) * header["unit"]
        assert (held.sum(0) == total).all()
        at += 4 * n * len(bands)
    assert at == len(raw)


def test_a_session_of_thirty_cells_is_a_small_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    use = use_of(many_events(20_000))
    cells = [
        SimpleNamespace(
            number=n, title=HOSTILE, status="ok", use=use, device="gpu", baseline_bytes=0, peak_bytes=GIB, end_bytes=0
        )
        for n in range(1, 31)
    ]
    path = write_memory_page(cells, tmp_path / "session.html", budget_bytes=GIB)
    size = path.stat().st_size
    with capsys.disabled():
        print(f"\n30 cells of 20,000 events each: {size / 1e6:.1f} MB")
    assert size < 5_000_000
    text = path.read_text()
    assert HOSTILE not in text
    assert text.count("<script") == 2
    assert text.count("<style>") == 2
    assert [*tmp_path.iterdir()] == [path]  # no partial file is left
