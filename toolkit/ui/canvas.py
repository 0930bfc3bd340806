"""The base class of the two canvas widgets: a script asks for views of some data, and Python answers.

The widget's state is a description of the data and the last view. Both are small, so a saved notebook shows the last view
without a kernel. Where no widget runs, a still picture and a text stand in (`stills.py`).
"""

from __future__ import annotations

from typing import Any

import anywidget
import traitlets
from IPython.display import publish_display_data

from toolkit.core.callers import ipython_shell
from toolkit.ui import stills
from toolkit.ui.comms import use_one_thread


class CanvasWidget(anywidget.AnyWidget):
    """A canvas whose script sends requests (shared.js, `kernelWidget`). Subclasses set `_esm` and `_css`, and answer them."""

    meta = traitlets.Dict().tag(sync=True)
    view = traitlets.Bytes().tag(sync=True)
    hide = traitlets.Unicode().tag(sync=True)  # the style sheet that hides the still

    def __init__(self, **state: Any) -> None:
        super().__init__(**state)
        use_one_thread(self)

    def _packed_view(self, request: Any, echo: dict[str, Any]) -> bytes:
        """Return the bytes of a view, with `echo` in its header."""
        raise NotImplementedError  # each canvas has its own

    def _reply(self, kind: str, request: Any) -> Any:
        """Return the JSON-able answer to a request other than for a view. Raises KeyError if `kind` is unknown."""
        raise NotImplementedError  # each canvas has its own

    def _still(self) -> str:
        """Return the HTML that stands in for the widget."""
        raise NotImplementedError  # each canvas has its own

    def _repr_mimebundle_(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        bundle = super()._repr_mimebundle_(**kwargs) or ({}, {})
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        if ipython_shell() is None:
            return {**data, "text/plain": repr(self), "text/html": self._still()}, metadata
        # The widget comes first, so that front ends that draw it never lay out the still.
        name = stills.new_name()
        self.hide += stills.hiding(name)
        publish_display_data({**data, "text/plain": ""}, metadata)
        return {"text/plain": repr(self), "text/html": stills.wrapped(name, self._still())}, {}

    def _answer(self, _widget: Any, request: Any, _buffers: Any) -> None:
        """Answer one message of the script. A malformed one is ignored: the script gives up waiting after four seconds."""
        try:
            kind, echo = request["type"], {"vid": str(request["vid"])[:40], "seq": int(request["seq"])}
            if kind == "view":
                self.view = self._packed_view(request, echo)
            else:
                self.send({**echo, "answer": self._reply(kind, request)})
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError):
            return
