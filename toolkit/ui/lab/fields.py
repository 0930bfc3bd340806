"""Builders of the Lab's widgets: fields, buttons, progress bars and rows, with the same layout in every panel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets


def field(kind: Any, value: Any, name: str, label_px: int = 70, **more: Any) -> Any:
    """Return a field of the class `kind` with the label `name`, which is `label_px` pixels wide."""
    return kind(value=value, description=name, style={"description_width": f"{label_px}px"}, **more)


def button(name: str, icon: str, act: Callable[[], Any], tip: str | None = None, primary: bool = False) -> widgets.Button:
    """Return a button that calls `act` when it is pressed."""
    made = widgets.Button(description=name, icon=icon, tooltip=tip, button_style="primary" if primary else "")
    made.on_click(lambda _: act())
    return made


def progress_bar() -> widgets.FloatProgress:
    """Return a hidden progress bar."""
    return widgets.FloatProgress(0.0, min=0, max=1, layout={"width": "260px", "display": "none"})


def start(bar: widgets.FloatProgress, most: float = 1.0) -> None:
    """Show `bar` at 0 of `most`."""
    bar.max, bar.value, bar.layout.display = most, 0.0, ""


def row(*parts: widgets.Widget) -> widgets.HBox:
    """Return the widgets side by side, wrapped if the page is narrow."""
    return widgets.HBox(parts, layout={"flex_flow": "row wrap"})
