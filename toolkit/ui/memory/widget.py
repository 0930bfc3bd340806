"""Memory over time in a notebook: a canvas (memory.js) that asks for columns, and Python that answers them from the ledger.

The widget's state is what is known of the whole and the last view, both small, so that a saved notebook shows the last view
without a kernel. Where no widget runs, the still picture and its tables stand in its place.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anywidget
import traitlets

from toolkit.core.errors import ToolkitError
from toolkit.ui.memory import picture as memory_picture
from toolkit.ui.memory import wire as memory_wire
from toolkit.ui.memory.view import AXES, MemoryView
from toolkit.vram.measure import MemoryUse

_HERE = Path(__file__).parent


class MemoryTimeline(anywidget.AnyWidget):
    """The interactive picture of what a stretch of code did with memory.

    `MemoryTimeline(use)`, or `use.timeline()`. Wheel, drag and keys zoom and move, a click lists what was alive then. `by` is
    what the bands are. Raises ToolkitError for what is no measurement, RecorderError for one whose block still runs.
    """

    _esm = (_HERE / "memory.js").read_text(encoding="utf-8")
    _css = (_HERE / "memory.css").read_text(encoding="utf-8")
    meta = traitlets.Dict().tag(sync=True)
    view = traitlets.Bytes().tag(sync=True)

    def __init__(self, use: MemoryUse, by: str | None = None) -> None:
        if not isinstance(use, MemoryUse):
            raise ToolkitError("a picture of memory", f"a {type(use).__name__}", "Give it what tk.memory() measured")
        self.use = use
        first = memory_picture.view_of(use, by)
        self._views: dict[str, MemoryView] = {first.by: first}
        super().__init__(meta=memory_wire.meta(use, first), view=memory_wire.whole(first))
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return repr(self.use)

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = super()._repr_mimebundle_(**kwargs) or ({}, {})
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        still = memory_picture.html(self.use, str(self.meta["by"]))
        return {**data, "text/plain": repr(self), "text/html": still}, metadata

    def _answer(self, _widget: Any, request: Any, _buffers: Any) -> None:
        """One message of the front end. A malformed one is ignored: the sender gives up after a while."""
        try:
            kind, echo = request["type"], {"vid": str(request["vid"])[:40], "seq": int(request["seq"])}
            if kind == "view":
                by, axis = str(request["by"]), str(request["axis"])
                if by not in self.meta["groupings"] or axis not in AXES:
                    return
                shown = memory_wire.regrouped(self._views, self.use, by)
                x0, x1, width = float(request["x0"]), float(request["x1"]), int(request["width"])
                self.view = memory_wire.packed(shown, x0, x1, width, axis, **echo)
            elif kind == "at":
                found = next(iter(self._views.values())).at(int(request["position"]))
                self.send({**echo, "answer": memory_wire.moment(found)})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            return
