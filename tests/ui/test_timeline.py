"""Tests of the timeline widget without a browser: answers, state, and the static fallback."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from synthetic import decode_loop, many_events
from test_view import parse

from toolkit.core.errors import ToolkitError
from toolkit.trace.events import TraceBuilder
from toolkit.ui import canvas
from toolkit.ui.timeline import overview
from toolkit.ui.timeline.track import Track
from toolkit.ui.timeline.view import Scene
from toolkit.ui.timeline.widget import Timeline


class Heard(Timeline):
    """A timeline that records the messages it sends."""

    def send(self, content: object, buffers: object = None) -> None:
        self.__dict__.setdefault("heard", []).append(content)

    def ask(self, **request: object) -> None:
        self._answer(self, request, [])


def test_answers_a_view_in_its_state() -> None:
    widget = Heard(decode_loop())
    widget.ask(type="view", vid="me", seq=3, t0=0.0, t1=1e5, width=700, align=None)
    view = parse(widget.view)
    assert (view["vid"], view["seq"], view["width"], view["t1"]) == ("me", 3, 700, 1e5)


def test_answers_facts_steps_and_table() -> None:
    widget = Heard(decode_loop())
    for request in ({"type": "facts", "track": 0, "row": 1}, {"type": "step", "track": 0, "step": 2}, {"type": "table"}):
        widget.ask(vid="me", seq=1, **request)
    facts, step, table = (message["answer"] for message in widget.heard)
    assert ["kind", "mark"] in facts
    assert step[0] == 2
    assert len(table[0]["rows"]) == 6
    json.dumps(widget.heard)


@pytest.mark.parametrize(
    "request_",
    [
        None, [], "view", {}, {"type": "view"}, {"type": "nonsense", "vid": "a", "seq": 1},
        {"type": "view", "vid": "a", "seq": 1, "t0": "x", "t1": 2, "width": 3},
        {"type": "view", "vid": "a", "seq": 1, "t0": float("nan"), "t1": 1, "width": float("inf")},
        {"type": "facts", "vid": "a", "seq": 1, "track": 9, "row": 0}, {"type": "step", "vid": "a", "seq": 1, "track": None},
    ],
)  # fmt: skip
def test_malformed_messages_are_ignored(request_: object) -> None:
    widget = Heard(decode_loop())
    before = widget.view
    widget._answer(widget, request_, [])
    assert widget.view == before
    assert not getattr(widget, "heard", [])


@pytest.mark.parametrize("request_", [(5, 5), (9, 1), (-1e18, 1e18), (1e9, 2e9)], ids=str)
def test_odd_ranges_give_a_view(request_: tuple[float, float]) -> None:
    widget = Heard(decode_loop())
    widget.ask(type="view", vid="me", seq=1, t0=request_[0], t1=request_[1], width=0)
    assert parse(widget.view)["seq"] == 1


def test_state_of_a_million_events_fits_a_saved_notebook() -> None:
    state = Timeline(many_events()).get_state()
    text = sum(len(value) for value in state.values() if isinstance(value, str)) + len(json.dumps(state["meta"]))
    assert text + len(state["view"]) * 4 / 3 < 100_000


def test_fallbacks_for_places_without_widgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canvas, "ipython_shell", lambda: None)  # another test may have made one
    widget = Timeline(decode_loop(), decode_loop(clock="measured"), titles=("a <b>", "b"))
    data, _ = widget._repr_mimebundle_()
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= set(data)
    assert "a &lt;b&gt;" in data["text/html"]
    assert "modelled time" in data["text/plain"]
    assert "measured time" in data["text/plain"]


def test_still_picture_is_well_formed_small_and_hatched() -> None:
    for trace in (decode_loop(), many_events(200_000), TraceBuilder().build({})):
        text = overview.svg(Scene([Track(trace, "a & b")]))
        ET.fromstring(text)
        assert len(text) < 40_000
    assert "url(#h2d)" in overview.svg(Scene([Track(decode_loop(), "a")]))
    assert "url(#" not in overview.svg(Scene([Track(decode_loop(clock="measured"), "a")]))


def test_runs_of_one_title_are_numbered() -> None:
    scene = Timeline(decode_loop(), decode_loop(scale=2.0)).scene
    assert [track.title for track in scene.tracks] == ["recording 1", "recording 2"]
    assert "recording 2" in scene.opening["sentence"]
    assert [track.title for track in Timeline(decode_loop()).scene.tracks] == ["recording"]


def test_a_long_sentence_is_drawn_in_several_lines() -> None:
    title = "a strategy with a long name, " * 5
    lines = ET.fromstring(overview.svg(Timeline(decode_loop(), titles=(title,)).scene)).iter("{http://www.w3.org/2000/svg}text")
    bold = [line.text for line in lines if line.get("font-weight")]
    assert len(bold) > 1
    assert all(len(text) <= 125 for text in bold[:-1])


def test_titles_must_match() -> None:
    with pytest.raises(ToolkitError, match="2 titles"):
        Timeline(decode_loop(), titles=("a", "b"))


def test_steps_that_take_no_time_are_drawn() -> None:
    trace = TraceBuilder()
    for step in range(3):
        trace.add("mark", 1000, 0, device=-1, step=step, name="decode")
    ET.fromstring(overview.svg(Scene([Track(trace.build({}), "empty steps")])))
