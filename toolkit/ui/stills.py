"""A still picture in the notebook next to a widget, which hides it while it is shown.

Front ends that can't show a widget show its text only, or nothing: `nbconvert` without a network, and a notebook that is opened
without the state of its widgets. So a widget is displayed as two outputs: a still (a picture and a table), and the widget
itself, which contains the style sheet `hiding(name)`. The still can be replaced later, as the Lab does after each run.
"""

from __future__ import annotations

import uuid

from IPython.display import publish_display_data

from toolkit.core.callers import ipython_shell


def new_name() -> str:
    """Return a name for a still."""
    return f"tk-still-{uuid.uuid4().hex[:12]}"


def hiding(name: str) -> str:
    """Return the style sheet that hides the still, and in JupyterLab and Notebook 7 the output that holds it."""
    return f".{name}, .jp-OutputArea-child:has(.{name}) {{ display: none }}"


def wrapped(name: str, html: str) -> str:
    """Return the HTML of a still that `hiding(name)` hides."""
    return f'<div class="{name}">{html}</div>'


def publish(name: str, html: str, text: str, update: bool = False) -> bool:
    """Display the still below the running cell, or replace it everywhere (`update`). Returns False outside of notebooks."""
    if ipython_shell() is None:
        return False
    data = {"text/html": wrapped(name, html), "text/plain": text}
    publish_display_data(data, transient={"display_id": name}, update=update)
    return True
