"""Memory over time in a notebook: a canvas (memory.js) that asks for columns, and Python that answers from the ledger."""

from __future__ import annotations

from typing import Any

from toolkit.core.errors import ToolkitError, kind_of
from toolkit.ui.assets import script_of, text_of
from toolkit.ui.canvas import CanvasWidget
from toolkit.ui.memory import picture as memory_picture
from toolkit.ui.memory import wire as memory_wire
from toolkit.ui.memory.view import AXES, MemoryView
from toolkit.vram.measure import MemoryUse


class MemoryTimeline(CanvasWidget):
    """The interactive picture of the memory that a block of code used.

    `MemoryTimeline(use)`, or `use.timeline()`. Wheel, drag and keys zoom and move; a click lists the blocks that were alive
    then. `by` names the grouping of the bands. Raises ToolkitError if `use` is not a measurement, RecorderError if its block
    has not ended.
    """

    _esm = script_of("memory/memory.js")
    _css = text_of("memory/memory.css")

    def __init__(self, use: MemoryUse, by: str | None = None) -> None:
        if not isinstance(use, MemoryUse):
            raise ToolkitError("a picture of memory", kind_of(use), "Give it the result of tk.memory()")
        self.use = use
        first = memory_picture.view_of(use, by)
        self._views: dict[str, MemoryView] = {first.by: first}
        super().__init__(meta=memory_wire.meta(use, first), view=memory_wire.whole(first))
        self.on_msg(self._answer)

    def __repr__(self) -> str:
        return repr(self.use)

    def _still(self) -> str:
        return memory_picture.html(self.use, str(self.meta["by"]))

    def _packed_view(self, request: Any, echo: dict[str, Any]) -> bytes:
        by, axis = str(request["by"]), str(request["axis"])
        if by not in self.meta["groupings"] or axis not in AXES:
            raise KeyError(by, axis)
        shown = memory_wire.regrouped(self._views, self.use, by)
        x0, x1, width = float(request["x0"]), float(request["x1"]), int(request["width"])
        return memory_wire.packed(shown, x0, x1, width, axis, **echo)

    def _reply(self, kind: str, request: Any) -> Any:
        if kind != "at":
            raise KeyError(kind)
        return memory_wire.moment(next(iter(self._views.values())).at(int(request["position"])))
