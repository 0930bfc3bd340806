"""Which thread of the kernel handles the messages of a widget."""

from __future__ import annotations

from typing import TypeVar

import ipywidgets as widgets

_Widget = TypeVar("_Widget", bound=widgets.Widget)


def use_one_thread(widget: _Widget) -> _Widget:
    """Let one thread handle the messages of all such widgets, also while a cell runs, and return `widget`.

    ipykernel 7.4 hands a message of the front end to the thread that last changed the widget. If that was a cell, the widget
    answers when the running cell has ended, and a press of a button can be handled before a value that was typed before it. In
    that version, `_reply_subshell_for(data, named)` of a comm chooses the thread. Here it is the one that JupyterLab names: the
    same for all widgets, and not that of the cells. Other versions don't call it.
    """
    if widget.comm is not None:
        widget.comm._reply_subshell_for = lambda data, named: named
    return widget
