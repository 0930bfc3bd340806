"""Plotly figures of a trace. They are static and small; use the timeline for details."""

from __future__ import annotations

from typing import Literal

import plotly.graph_objects as go

from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.copies import copies_per_step
from toolkit.trace.events import Trace
from toolkit.ui.timeline.overview import COLORS


def copies_per_step_figure(trace: Trace, what: Literal["count", "bytes"] = "count", title: str = "") -> go.Figure:
    """Return stacked bars, one per step, of the copies (or bytes) in each direction. Counts are exact on any clock."""
    frame = copies_per_step(trace)
    steps = ["outside" if step == -1 else str(step) for step in frame["step"]]
    bars = [go.Bar(x=steps, y=frame[f"{kind}_{what}"], name=kind.upper(), marker_color=COLORS[kind]) for kind in COPY_KINDS]
    return _styled(go.Figure(bars), title or f"Copies per step ({what})", "copies" if what == "count" else "bytes")


def waits_per_step_figure(trace: Trace, title: str = "") -> go.Figure:
    """Return bars, one per step, of the time that the host waited, in microseconds. Modelled times are hatched and labeled."""
    frame = copies_per_step(trace)
    bars = []
    for clock in sorted(set(frame["clock"])):
        part = frame[frame["clock"] == clock]
        steps = ["outside" if step == -1 else str(step) for step in part["step"]]
        pattern = {"shape": "/", "fgcolor": "white"} if clock == "modelled" else {}
        marker = {"color": COLORS["sync"], "pattern": pattern}
        bars.append(go.Bar(x=steps, y=part["host_wait_us"], name=f"host waits, {clock}", marker=marker, showlegend=True))
    return _styled(go.Figure(bars), title or "Host waits per step", "µs")


def _styled(figure: go.Figure, title: str, unit: str) -> go.Figure:
    figure.update_layout(
        title=title, barmode="stack", template="plotly_white", height=320, margin={"t": 48, "b": 40, "l": 56, "r": 16},
        xaxis={"title": "step", "type": "category"}, yaxis={"title": unit},
    )  # fmt: skip
    return figure
