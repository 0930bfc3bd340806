"""Figures of decode speed from the records of `python -m toolkit.bench.decode`: rates, roofline, and the time of each kernel.

Modelled rates have open markers and say so in the legend. Backgrounds are transparent, and speed_page.py sets the colors of
text and grid to those of the page, which may be light or dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from toolkit.core.units import GiB, bandwidth_text
from toolkit.decode.strategies import STRATEGIES

Record = Mapping[str, Any]
Rates = Mapping[int, float]  # tokens per second by context

# Each has a contrast of at least 3 to 1 with a white and with a dark page.
COLORS = ("#8a8f98", "#b07a3c", "#c0508f", "#7d72d8", "#2e8fb0", "#3d7fe0", "#dd5f28", "#2c9c5b", "#a8860b", "#9a6fb0")
# Symbols tell strategies apart where their colors look alike. The diamond is that of another engine.
SYMBOLS = ("circle", "square", "triangle-up", "triangle-down", "cross", "x", "star", "pentagon", "hexagon", "hourglass")
GAP = "#78879b"
OTHER = "#a9662c"
FAR = 5  # a limit that is as many times the fastest rate isn't drawn: it would flatten the rates
MOST_KERNELS = 9  # the rest is one part
_LAYOUT: dict[str, Any] = {
    "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "height": 420,
    "margin": {"t": 16, "b": 48, "l": 64, "r": 16}, "font": {"size": 13},
}  # fmt: skip


def colors_of(records: Sequence[Record]) -> dict[str, str]:
    """Return the color of each strategy. Those of `STRATEGIES` have the same one in every figure."""
    names = dict.fromkeys([*STRATEGIES, *strategies_of([row for record in records for row in rows_of(record)])])
    return {name: _color(n) for n, name in enumerate(names)}


def speed_figure(
    record: Record, other: Rates | None = None, other_name: str = "", colors: Mapping[str, str] | None = None
) -> go.Figure:
    """Return tokens per second against context, a line per strategy, and one of another engine's measured rates `other`.

    A bar at a point spans the slowest and the fastest run. `colors` are those of `colors_of` if there are other figures.
    """
    rows, colors = rows_of(record), colors or colors_of([record])
    figure = go.Figure()
    for name in strategies_of(rows):
        points = [(row["context"], row["strategies"][name]) for row in rows if works(row, name)]
        rates = [found["tok_per_s"] for _, found in points]
        above = [max(found["tok_per_s_all"]) - found["tok_per_s"] for _, found in points]
        below = [found["tok_per_s"] - min(found["tok_per_s_all"]) for _, found in points]
        figure.add_scatter(
            x=[context for context, _ in points], y=rates, name=f"{name}, {record['clock']}", mode="lines+markers",
            marker=_marker(record, name, colors),
            line={"color": colors[name], "dash": "dot" if record["clock"] == "modelled" else "solid"},
            error_y={"type": "data", "array": above, "arrayminus": below, "visible": any(above) or any(below)},
            hovertemplate="%{x:,} tokens: %{y:,.1f} tok/s<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    limits = [(row["context"], row["limit_tok_per_s"]) for row in rows if row["limit_tok_per_s"]]
    fastest = max((max(trace.y, default=0.0) for trace in figure.data), default=0.0)
    if limits and max(rate for _, rate in limits) < FAR * fastest:
        figure.add_scatter(
            x=[context for context, _ in limits], y=[rate for _, rate in limits], mode="lines",
            line={"color": GAP, "dash": "dash"}, name="limit: read bandwidth / bytes per token",
            hovertemplate="%{y:,.0f} tok/s<extra>limit</extra>",
        )  # fmt: skip
    if other:
        figure.add_scatter(
            x=list(other), y=list(other.values()), name=f"{other_name}, measured", mode="lines+markers",
            line={"color": OTHER, "width": 3}, marker={"symbol": "diamond", "size": 10},
            hovertemplate="%{x:,} tokens: %{y:,.1f} tok/s<extra>%{fullData.name}</extra>",
        )  # fmt: skip
    ticks = sorted({row["context"] for row in rows})
    figure.update_layout(
        **_LAYOUT, yaxis={"title": "tokens per second", "rangemode": "tozero"},
        xaxis={"title": "context, tokens", "type": "log", "tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]},
    )  # fmt: skip
    return figure


def roofline_figure(records: Sequence[Record]) -> go.Figure:
    """Return tokens per second against GiB read per token, and the limit of each record's read bandwidth."""
    figure, colors = go.Figure(), colors_of(records)
    points = [
        (row["bytes_per_token"] / GiB, row["strategies"][name]["tok_per_s"], name, row["context"], record)
        for record in records for row in rows_of(record) for name in colors if works(row, name)
    ]  # fmt: skip
    if not points:
        return figure
    low, high = min(point[0] for point in points) / 2, max(point[0] for point in points) * 2
    for rate in sorted({record["read_bytes_per_s"] for record in records if record["read_bytes_per_s"]}):
        figure.add_scatter(
            x=[low, high], y=[rate / GiB / low, rate / GiB / high], mode="lines", line={"color": GAP, "dash": "dash"},
            name=f"limit: {bandwidth_text(rate)} of read bandwidth", hoverinfo="skip",
        )  # fmt: skip
    for name in colors:
        for clock in ("modelled", "measured"):
            mine = [point for point in points if point[2] == name and point[4]["clock"] == clock]
            texts = [f"{point[4]['model']}, {point[3]:,} tokens" for point in mine]
            if mine:
                figure.add_scatter(
                    x=[point[0] for point in mine], y=[point[1] for point in mine], text=texts, mode="markers",
                    name=f"{name}, {clock}", marker=_marker(mine[0][4], name, colors),
                    hovertemplate="%{text}: %{x:.2f} GiB per token, %{y:,.1f} tok/s<extra>%{fullData.name}</extra>",
                )  # fmt: skip
    rates = [point[1] for point in points]
    figure.update_layout(
        **_LAYOUT, xaxis={"title": "GiB that a token reads", **_log_axis(low, high)},
        yaxis={"title": "tokens per second", **_log_axis(min(rates) / 2, 2 * max(rates))},
    )  # fmt: skip
    return figure


def _log_axis(low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at 1, 2, 5, 10, 20 ...; Plotly's own say "2" at 20."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [each for n in decades for each in (1 * 10.0**n, 2 * 10.0**n, 5 * 10.0**n) if low <= each <= high]
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{tick:,.10g}" for tick in ticks],
        "range": [math.log10(low), math.log10(high)],
    }


def breakdown_figure(record: Record) -> go.Figure:
    """Return one bar per context: the time of each kernel in a recorded step, and the time without any kernel."""
    rows = [row for row in rows_of(record) if row.get("breakdown", {}).get("kernels")]
    totals: dict[str, float] = {}
    for row in rows:
        for kernel in row["breakdown"]["kernels"]:
            totals[kernel["name"]] = totals.get(kernel["name"], 0.0) + kernel["us"]
    shown = sorted(totals, key=lambda name: -totals[name])[:MOST_KERNELS]
    bars = [f"{row['context']:,} tokens" for row in rows]
    figure = go.Figure()
    for n, name in enumerate([*shown, "other kernels", "gaps: no kernel runs"]):
        parts = [_part(row["breakdown"], name, shown) for row in rows]
        shares = [100 * us / row["breakdown"]["step_us"] for (us, _), row in zip(parts, rows, strict=True)]
        if any(us for us, _ in parts):
            pattern = {"shape": "/"} if name not in shown and name != "other kernels" else {}
            figure.add_bar(
                y=bars, x=[us / 1e3 for us, _ in parts], orientation="h", name=short_name(name),
                marker={"color": GAP if pattern else _color(n + 1), "pattern": pattern},
                customdata=[[count, us, share] for (us, count), share in zip(parts, shares, strict=True)],
                hovertemplate="%{customdata[1]:,.1f} µs, %{customdata[2]:.1f} % of the step, %{customdata[0]} launches"
                "<extra>%{fullData.name}</extra>",
            )  # fmt: skip
    figure.update_layout(
        **{**_LAYOUT, "height": 180 + 60 * len(rows)}, barmode="stack",
        xaxis={"title": "time in one step, ms"}, legend={"traceorder": "normal"},
        yaxis={"autorange": "reversed", "type": "category", "automargin": True},
    )  # fmt: skip
    return figure


def rows_of(record: Record) -> list[dict[str, Any]]:
    """Return the contexts that were measured."""
    return [row for row in record["rows"] if "strategies" in row]


def strategies_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the strategies in `rows`, each once, in their order."""
    return list(dict.fromkeys(name for row in rows for name in row["strategies"]))


def works(row: Mapping[str, Any], name: str) -> bool:
    """Return whether the strategy `name` was measured at this context."""
    return "tok_per_s" in row["strategies"].get(name, {})


def short_name(kernel: str) -> str:
    """Return the name of a kernel without the arguments and return type of a C++ template, at most 48 characters long."""
    name = kernel.removeprefix("void ").partition("<")[0].partition("(")[0] or kernel
    return name if len(name) <= 48 else name[:45] + "..."


def _part(found: Mapping[str, Any], name: str, shown: Sequence[str]) -> tuple[float, int]:
    """Return (µs, launches) of one part of a step."""
    if name in shown:
        mine = [kernel for kernel in found["kernels"] if kernel["name"] == name]
    elif name == "other kernels":
        mine = [kernel for kernel in found["kernels"] if kernel["name"] not in shown]
    else:
        return found["gap_us"], 0
    return sum(kernel["us"] for kernel in mine), sum(kernel["count"] for kernel in mine)


def _color(n: int) -> str:
    return COLORS[n % len(COLORS)]


def _marker(record: Record, name: str, colors: Mapping[str, str]) -> dict[str, Any]:
    symbol = SYMBOLS[list(colors).index(name) % len(SYMBOLS)]
    return {"color": colors[name], "size": 9, "symbol": f"{symbol}-open" if record["clock"] == "modelled" else symbol}
