"""The timeline in a notebook: a canvas (timeline.js) that asks for views, and Python that answers them from the trace.

The widget's state is the description of the tracks and the last view, both small, so that a saved notebook shows the
last view without a kernel. Where no widget runs, a still picture and a text stand in its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from toolkit.core.errors import ToolkitError
from toolkit.ui.timeline import overview
from toolkit.ui.timeline.view import Scene, Track, named

_HERE = Path(__file__).parent


class Timeline(anywidget.AnyWidget):
    """The interactive timeline of a trace or a run; with `other`, of two on one time axis.

    `Timeline(run)`, `Timeline(trace_a, trace_b, titles=("before", "after"))`. Wheel, drag and keys zoom and move; see the
    canvas's label for the keys. Raises ToolkitError for what is no trace, RecorderError for one still being recorded.
    """

    _esm = (_HERE / "timeline.js").read_text(encoding="utf-8")
    _css = (_HERE / "timeline.css").read_text(encoding="utf-8")
    meta = traitlets.Dict().tag(sync=True)
    view = traitlets.Bytes().tag(sync=True)

    def __init__(self, trace: Any, other: Any = None, *, titles: tuple[str, ...] = ()) -> None:
        given = [trace] if other is None else [trace, other]
        if titles and len(titles) != len(given):
            raise ToolkitError(f"{len(titles)} titles", f"{len(given)} traces", "Give each trace one title")
        pairs = [named(thing, titles[i] if titles else None) for i, thing in enumerate(given)]
        self.scene = Scene([Track(trace, title) for title, trace in pairs])
        super().__init__(meta=self.scene.meta(), view=self.scene.overview())
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return overview.text(self.scene)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = super()._repr_mimebundle_(**kwargs) or ({}, {})
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/plain": repr(self), "text/html": overview.html(self.scene)}, metadata

    def _answer(self, _widget: Any, request: Any, _buffers: Any) -> None:
        """One message of the front end. A malformed one is ignored: the sender gives up after a while."""
        try:
            kind, echo = request["type"], {"vid": str(request["vid"])[:40], "seq": int(request["seq"])}
            align = request.get("align")
            align = None if align is None else int(align)
            if kind == "view":
                t0, t1 = float(request["t0"]), float(request["t1"])
                self.view = self.scene.view(t0, t1, int(request["width"]), align, **echo)
                return
            answer: Any
            if kind == "facts":
                answer = overview.facts(self.scene.tracks[int(request["track"])], int(request["row"]))
            elif kind == "step":
                step, near, move = request.get("step"), float(request.get("near", 0)), int(request.get("move", 0))
                answer = self.scene.find_step(int(request["track"]), None if step is None else int(step), near, move, align)
            elif kind == "table":
                answer = [overview.copies_sheet(track) for track in self.scene.tracks]
            else:
                return
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            return
        self.send({**echo, "answer": answer})
