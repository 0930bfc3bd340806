"""The timeline in a notebook: a canvas (timeline.js) that asks for views, and Python that answers from the trace."""

from __future__ import annotations

from typing import Any

from toolkit.core.errors import ToolkitError
from toolkit.ui.assets import script_of, text_of
from toolkit.ui.canvas import CanvasWidget
from toolkit.ui.timeline import overview
from toolkit.ui.timeline.track import named, tracks_of
from toolkit.ui.timeline.view import Scene


class Timeline(CanvasWidget):
    """The interactive timeline of a trace or a run, or of two on one time axis if `other` is given.

    `Timeline(run)`, `Timeline(trace_a, trace_b, titles=("before", "after"))`. Wheel, drag and keys zoom and move; the canvas's
    label lists the keys. Raises ToolkitError if an argument is not a trace, RecorderError if it is still being recorded.
    """

    _esm = script_of("timeline/ranks.js", "timeline/timeline.js")
    _css = text_of("timeline/timeline.css")

    def __init__(self, trace: Any, other: Any = None, *, titles: tuple[str, ...] = ()) -> None:
        given = [trace] if other is None else [trace, other]
        if titles and len(titles) != len(given):
            raise ToolkitError(f"{len(titles)} titles", f"{len(given)} traces", "Give each trace one title")
        pairs = [named(thing, titles[i] if titles else None) for i, thing in enumerate(given)]
        self.scene = Scene(tracks_of(pairs))
        meta = self.scene.meta()
        super().__init__(meta=meta, view=self.scene.first(meta["step"]))
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return overview.text(self.scene)

    def _still(self) -> str:
        return overview.html(self.scene)

    def _packed_view(self, request: Any, echo: dict[str, Any]) -> bytes:
        return self.scene.view(float(request["t0"]), float(request["t1"]), int(request["width"]), _align(request), **echo)

    def _reply(self, kind: str, request: Any) -> Any:
        if kind == "table":
            return [overview.copies_sheet(track) for track in self.scene.tracks]
        if kind == "sums":
            return self.scene.sums(float(request["t0"]), float(request["t1"]), _align(request))
        if kind == "find":
            last = None if request.get("last") is None else int(request["last"])
            return self.scene.find(str(request["text"]), float(request["near"]), int(request["move"]), _align(request), last)
        number = int(request["track"])
        if kind == "facts":
            return overview.facts(self.scene.tracks[number], int(request["row"]))
        if kind != "step":
            raise KeyError(kind)
        step, near, move = request.get("step"), float(request.get("near", 0)), int(request.get("move", 0))
        return self.scene.find_step(number, None if step is None else int(step), near, move, _align(request))


def _align(request: Any) -> int | None:
    """Return the number of the step that both tracks are aligned at, or None if they are aligned at their starts."""
    align = request.get("align")
    return None if align is None else int(align)
