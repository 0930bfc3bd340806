"""Builders of the Lab's widgets: fields, buttons, rows and panels, with the same layout in every panel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import torch

from toolkit.core.errors import DeviceError, ToolkitError
from toolkit.ui.comms import use_one_thread


def field(kind: Any, value: Any, name: str, label_px: int = 70, **more: Any) -> Any:
    """Return a field of the class `kind` with the label `name`, which is `label_px` pixels wide."""
    return use_one_thread(kind(value=value, description=name, style={"description_width": f"{label_px}px"}, **more))


def button(name: str, icon: str, act: Callable[[], Any], tip: str | None = None, primary: bool = False) -> widgets.Button:
    """Return a button that calls `act` when it is pressed."""
    layout = {"width": "auto", "min_width": "110px"}
    made = widgets.Button(description=name, icon=icon, tooltip=tip, button_style="primary" if primary else "", layout=layout)
    made.on_click(lambda _: act())
    return use_one_thread(made)


def row(*parts: widgets.Widget) -> widgets.HBox:
    """Return the widgets side by side, wrapped if the page is narrow."""
    return widgets.HBox(parts, layout={"flex_flow": "row wrap"})


def close(widget: widgets.Widget) -> None:
    """Close a widget and its parts. Until then ipywidgets holds each of them, and the Lab whose method a button calls."""
    for part in (*getattr(widget, "children", ()), getattr(widget, "layout", None), getattr(widget, "style", None)):
        if isinstance(part, widgets.Widget):
            close(part)
    widget.close()


def replace_children(box: widgets.Box, *children: widgets.Widget) -> None:
    """Show `children` in `box`, and close what it showed before."""
    old, box.children = box.children, children
    for widget in old:
        close(widget)


def path_of(text: str, suffix: str, *others: str) -> Path:
    """Return the path that a file field names, ending in `suffix` instead of one of `others`.

    Raises ToolkitError if the field is empty, or names a folder such as "/" or "..", or a user that doesn't exist.
    """
    name = text.strip()
    if not name:
        raise ToolkitError("saving a file", "the file field is empty", 'Type a name, for example "run"')
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:
        raise ToolkitError(f"saving a file as {name!r}", str(error), "Type a path without ~") from error
    if path.name in ("", ".."):
        raise ToolkitError(f"saving a file as {name!r}", "this is a folder", 'Add the name of a file, for example "run"')
    stem = path.name.removesuffix(suffix)  # keeps other dots, as in "run.2"
    for other in others:
        stem = stem.removesuffix(other)
    return path.with_name(f"{stem or 'run'}{suffix}")


def folder_of(text: str) -> str:
    """Return the folder that a field names. Raises ToolkitError if it is empty."""
    if not text.strip():
        raise ToolkitError("an export", "the folder field is empty", "Type the name of a new folder")
    return text.strip()


@contextmanager
def without_gpu(name: str, do: str) -> Iterator[None]:
    """Advise `do`, which names a field, if a `with` block fails because `name` is a CUDA GPU and this machine has none."""
    try:
        yield
    except DeviceError as error:
        if "cuda" not in name or torch.cuda.is_available():
            raise
        raise DeviceError(error.asked, error.found, do) from error


class Panel(widgets.VBox):  # type: ignore[misc]  # ipywidgets has no types
    """The content of one tab."""

    def __init__(self, *children: widgets.Widget) -> None:
        super().__init__(children)
        self.add_class("tk-panel")


def error_html(error: BaseException) -> str:
    """Return an error as HTML: asked, found, do. Other errors than ToolkitError show their type and first lines."""
    if isinstance(error, ToolkitError):
        parts = {"Asked": error.asked, "Found": error.found, "Do": error.do}
    else:
        message = str(error).strip()[:600] or "no message"
        parts = {"Failed": f"{type(error).__name__}: {message}", "Do": "Look at the exception: lab.error"}
    lines = "".join(f"<div><b>{label}</b> {escape(text)}</div>" for label, text in parts.items())
    return f'<div class="tk-error" role="alert">{lines}</div>'
