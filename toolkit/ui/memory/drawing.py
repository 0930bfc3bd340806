"""Still pictures of memory: an SVG of the holders of memory over a recording, and one of the cells of a session.

A picture takes at most about 60 KB, whatever the size of the recording, and needs no script.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from toolkit.core.units import bytes_text, seconds_text
from toolkit.ui.memory.view import Columns, MemoryView
from toolkit.ui.pictures import in_the_dark

# Middle tones with a contrast of 3 against white and against a dark page. Neighbors differ in hue and in lightness.
PALETTE = (
    "#3579bd", "#d96c1a", "#2a9d70", "#8560d0", "#b3851a", "#c94f86", "#2596ac", "#b04a38", "#718a2c", "#5b6fd6", "#95663f",
)  # fmt: skip
KINDS = ("weights", "activations", "kv", "gradients", "optimizer", "workspace", "input", "garbage")  # fixed colors of PALETTE
GRAYS = {"rest": "#8b95a3", "before": "#66717f"}
RED, FOREGROUND, DIM, GRID, TICKS, PAPER = "#b3261e", "#1b2430", "#4f5b6b", "#dde3ea", "#9aa5b1", "#fff"
_IN_THE_DARK = {RED: "#ff9a91", FOREGROUND: "#e7ebf0", DIM: "#aab4c1", GRID: "#323a44", TICKS: "#66717f", PAPER: "#14181d"}
# A front end shows a picture with the color scheme of its place in the page (memory.css), so this follows the page's theme.
_STYLE = in_the_dark(_IN_THE_DARK)
NEAR = 2.0  # a limit is drawn if it is at most this multiple of the peak
_SLIVER = 0.2  # if a smaller share of the memory changes, the axis of bytes begins above 0
_WIDTH, _LEFT, _TOP, _HIGH, _COLUMN = 960, 78, 26, 230, 2
_PLOT = _WIDTH - _LEFT - 12
_LETTER = 6.6  # px: approximate width of a letter at 12 px


class CellRow(Protocol):
    """The attributes of a cell that a session's picture needs. `status` is "ok", "error" or "interrupted"."""

    @property
    def number(self) -> int: ...
    @property
    def title(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def baseline_bytes(self) -> int: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def end_bytes(self) -> int: ...


def colors(view: MemoryView) -> list[str]:
    """Return a color for each band. A kind of memory has the same color in every picture."""
    fixed = {kind: PALETTE[i] for i, kind in enumerate(KINDS)} if view.by == "kind" else {}
    free = [color for color in PALETTE if color not in {fixed.get(band.name) for band in view.bands}]
    found, taken = [], 0
    for band in view.bands:
        color = GRAYS.get(band.role) or fixed.get(band.name)
        if color is None:
            color = free[taken % len(free)]
            taken += 1
        found.append(color)
    return found


def limit_of(view: MemoryView, budget_bytes: int | None = None) -> tuple[int, str] | None:
    """Return (bytes, name) of the limit: the budget, else the memory of the GPU; None if neither is known."""
    meta = view.ledger.trace.meta
    limit, total = int(meta.get("limit_bytes") or 0), int(meta.get("total_bytes") or 0)
    if budget_bytes:
        return int(budget_bytes), "budget"
    if limit and limit != total:
        return limit, "budget"
    return (total, "memory of the GPU") if total else None


def step_of(top: float) -> int:
    """Return the power of two that divides `top` bytes into four to eight parts, so that ticks are round in binary units."""
    return int(1 << max(int(np.floor(np.log2(max(top, 1.0) / 4))), 0))


def svg(view: MemoryView, budget_bytes: int | None = None, axis: str | None = None) -> str:
    """Return the picture: bands of holders over events or time, the peak, reserved bytes, a near limit, and steps or cells."""
    axis = axis or view.axis
    x0, x1 = view.bounds(axis)
    columns = view.columns(x0, x1, _PLOT // _COLUMN, axis)
    limit = limit_of(view, budget_bytes)
    top = max(view.ledger.peak_bytes, int(columns.reserved.max(initial=0)), 1)
    if limit and limit[0] <= NEAR * top:
        top = max(top, limit[0])
    else:
        limit = None
    scale = _Scale(floor_of(view, top), top)
    parts = [_grid(scale), _areas(view, columns, scale), _reserved(view, columns, scale), _broken(scale)]
    parts += [
        _limit(limit, columns, scale) if limit else "",
        _peak(view, columns, scale),
        _shortage(view, axis, (x0, x1), scale),
    ]
    below, height = _axis(view, axis, (x0, x1))
    return _document("".join([*parts, below]), height, label(view, budget_bytes))


def label(view: MemoryView, budget_bytes: int | None = None) -> str:
    """Return a description of the picture in one sentence, for screen readers."""
    ledger = view.ledger
    held = ", ".join(f"{band.words} {bytes_text(band.at_peak_bytes)}" for band in view.bands[:6] if band.at_peak_bytes)
    limit = limit_of(view, budget_bytes)
    words = f"; {limit[1]} {bytes_text(limit[0])}" if limit else ""
    peak = f"Memory over {'time' if view.axis == 'time' else 'events'}: peak {bytes_text(ledger.peak_bytes)}"
    return f"{peak}{words}. At the peak by {view.by}: {held or 'nothing'}"


def _document(body: str, height: float, words: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:g}" width="{_WIDTH}" role="img" '
        f'aria-label="{escape(words)}" font-family="system-ui,Segoe UI,Liberation Sans,Arial,sans-serif" font-size="12" '
        f'fill="{FOREGROUND}" style="background:{PAPER};max-width:100%">{_STYLE}{body}</svg>'
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(text)}</text>'


def _tag(x: float, y: float, text: str, more: str, end: bool = False) -> str:
    """Return a text with a background, so that it is readable on any band."""
    wide = len(text) * _LETTER + 8
    left = x - wide + 4 if end else x - 4
    anchor = ' text-anchor="end"' if end else ""
    ground = f'<path fill="{PAPER}" fill-opacity=".9" d="M{left:.1f} {y - 12:g}h{wide:.1f}v15h-{wide:.1f}z"/>'
    return ground + _text(x, y, text, more + anchor)


_HALO = f' stroke="{PAPER}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"'


@dataclass(frozen=True)
class _Scale:
    """Maps bytes to heights, from `low` (0, unless little of the memory changes) to `top`, with room for a label above."""

    low: int
    top: int

    def y(self, n_bytes: float) -> int:
        return round(_TOP + _HIGH - max(n_bytes - self.low, 0) * (_HIGH - 20) / max(self.top - self.low, 1))

    def ys(self, n_bytes: NDArray[np.int64]) -> list[int]:
        heights = np.maximum(n_bytes - self.low, 0) * ((_HIGH - 20) / max(self.top - self.low, 1))
        return np.round(_TOP + _HIGH - heights).astype(int).tolist()


def floor_of(view: MemoryView, top: int) -> int:
    """Return where the axis of bytes begins: 0, or just below the least value if only a small share of the memory changes."""
    least = int(view.held.min())
    changed = top - least
    if not 0 < changed < _SLIVER * top:
        return 0
    step = step_of(changed)
    return max(least - changed // 2, 0) // step * step


def _broken(scale: _Scale) -> str:
    words = f"the axis begins at {bytes_text(scale.low)}, not at 0"
    return _tag(_LEFT + 6, _TOP + _HIGH - 7, words, "") if scale.low else ""


def _grid(scale: _Scale) -> str:
    step = step_of(scale.top - scale.low)
    ticks = range(scale.low, scale.top + 1, step)  # if the axis begins above 0: 45.6 MiB, +128 KiB, +256 KiB
    texts = [bytes_text(n) if n == scale.low else f"{'+' * bool(scale.low)}{bytes_text(n - scale.low)}" for n in ticks]
    texts[0] = texts[0] if scale.low else "0"
    lines = "".join(f"M{_LEFT} {scale.y(n)}.5h{_PLOT}" for n in ticks)
    names = "".join(_text(_LEFT - 6, scale.y(n) + 4, text, ' text-anchor="end"') for n, text in zip(ticks, texts, strict=True))
    return f'<path fill="none" stroke="{GRID}" d="{lines}"/><g fill="{DIM}">{names}</g>'


def _stairs(y: list[int]) -> str:
    """Return a step line through columns of these heights, as SVG path data."""
    data, last = "", y[0]
    for value, run in groupby(y):
        data += (f"v{value - last}" if value != last else "") + f"h{_COLUMN * sum(1 for _ in run)}"
        last = value
    return data


def _areas(view: MemoryView, columns: Columns, scale: _Scale) -> str:
    """Return the bands, the topmost first: each reaches down to the axis, and the next is painted over it."""
    tops = np.cumsum(np.maximum(columns.bands, 0), axis=0)
    heights = [scale.ys(top) for top in tops]
    paths, floor = [], _TOP + _HIGH
    for i, color in reversed(list(enumerate(colors(view)))):
        y, under = heights[i], heights[i - 1] if i else [floor] * len(heights[i])
        if y != under:
            paths.append(f'<path fill="{color}" d="M{_LEFT} {floor}V{y[0]}{_stairs(y)}V{floor}z"/>')
    return f'<g shape-rendering="crispEdges">{"".join(paths)}</g>'


def _reserved(view: MemoryView, columns: Columns, scale: _Scale) -> str:
    if not view.knows_reserved:
        return ""
    y = scale.ys(columns.reserved)
    line = f'<path fill="none" stroke="{FOREGROUND}" stroke-dasharray="5 3" d="M{_LEFT} {y[0]}{_stairs(y)}"/>'
    key = f'<path stroke="{FOREGROUND}" stroke-dasharray="5 3" d="M{_LEFT} 11.5h28"/>'
    return line + key + _text(_LEFT + 34, 15, f"reserved by the allocator, peak {bytes_text(view.ledger.peak_reserved_bytes)}")


def _limit(limit: tuple[int, str], columns: Columns, scale: _Scale) -> str:
    """Return the line of the limit, with its label on the side away from the peak's label."""
    y = scale.y(limit[0])
    right = int(columns.total.argmax()) < len(columns.total) / 2
    at = _LEFT + _PLOT - 6 if right else _LEFT + 6
    words = _tag(at, y - 5, f"{limit[1]} {bytes_text(limit[0])}", f' fill="{RED}"', end=right)
    return f'<path stroke="{RED}" stroke-width="2" d="M{_LEFT} {y}h{_PLOT}"/>{words}'


def _peak(view: MemoryView, columns: Columns, scale: _Scale) -> str:
    if not view.ledger.peak_bytes:
        return _text(_LEFT + _PLOT / 2, _TOP + _HIGH / 2, "no memory was in use", f' fill="{DIM}" text-anchor="middle"')
    x = _LEFT + _COLUMN * int(columns.total.argmax()) + _COLUMN / 2
    y = scale.y(view.ledger.peak_bytes)
    words = f"peak {bytes_text(view.ledger.peak_bytes)}"
    half = len(words) * _LETTER / 2
    at = min(max(x, _LEFT + half + 2), _LEFT + _PLOT - half - 2)
    dot = f'<circle cx="{x:g}" cy="{y}" r="3.5" fill="{PAPER}" stroke="{FOREGROUND}" stroke-width="1.5"/>'
    return dot + _text(at, y - 8, words, f' font-weight="600" text-anchor="middle"{_HALO}')


def _shortage(view: MemoryView, axis: str, bounds: tuple[float, float], scale: _Scale) -> str:
    """Return a mark for the last failed allocation, as high as the memory would have risen."""
    if not view.shortages:
        return ""
    position, asked = view.shortages[-1]
    x = _LEFT + (min(view.x_of(position, axis) + (axis == "events"), bounds[1]) - bounds[0]) / (bounds[1] - bounds[0]) * _PLOT
    held = int(view.held[max(position - view.ledger.opening + 1, 0)])
    y, up = scale.y(held), max(scale.y(held + asked), _TOP - 6)
    cross = f'<path stroke="{RED}" stroke-width="2" stroke-dasharray="3 2" d="M{x:.1f} {y}V{up}"/>'
    cross += f'<path stroke="{RED}" stroke-width="2" d="M{x - 4:.1f} {y - 4}l8 8m0-8l-8 8"/>'
    words = f"× out of memory: {bytes_text(asked)} more requested"
    return cross + _text(_LEFT + _PLOT, 15, words, f' fill="{RED}" font-weight="600" text-anchor="end"')


def _axis(view: MemoryView, axis: str, bounds: tuple[float, float]) -> tuple[str, int]:
    """Return the elements below the plot, and the height of the whole picture."""
    (low, high), y = bounds, _TOP + _HIGH
    span, device = high - low, str(view.ledger.trace.meta.get("device", "unknown device"))

    def at(x: float) -> float:
        return _LEFT + (x - low) / span * _PLOT

    step = next(m * 10.0**p for p in range(-3, 20) for m in (1, 2, 5) if span / (m * 10.0**p) <= 9)
    step = max(step, 1.0)
    ticks = [low + i * step for i in range(int(span / step) + 1)]
    names = [
        f"{tick - low:,.0f}" if axis == "events" else seconds_text((tick - low) / 1e9) if tick > low else "0" for tick in ticks
    ]
    lines = "".join(f"M{at(tick):.1f} {y}v5" for tick in ticks)
    words = "".join(
        _text(round(at(tick), 1), y + 17, name, f' text-anchor="{"middle" if i else "start"}"')
        for i, (tick, name) in enumerate(zip(ticks, names, strict=True))
        if at(tick) < _WIDTH - 30
    )
    parts = [f'<path fill="none" stroke="{DIM}" d="M{_LEFT} {y}.5h{_PLOT}{lines}"/><g fill="{DIM}">{words}</g>']
    if view.divided[0]:
        parts.append(_marks(view, axis, bounds, y + 22))
        y += 20
    events = len(view.held) - 1
    counted = f"{events:,} allocations and frees, in order" if events != 1 else "one allocation or free"
    title = counted if axis == "events" else f"time, {view.clock}"
    clock = "; times are modelled" if view.clock == "modelled" and axis == "events" else ""
    parts.append(_text(_LEFT, y + 36, f"{title}  ({device}{clock})", f' fill="{DIM}"'))
    return "".join(parts), y + 44


def _marks(view: MemoryView, axis: str, bounds: tuple[float, float], y: int) -> str:
    """Return ticks where steps or cells begin, with numbers where there is room."""
    lines, words, free = "", "", -1.0
    marks = view.marks(*bounds, axis)
    wide = len(str(max(number for _, number in marks))) * _LETTER + 10
    room = _PLOT / wide
    every = next(m * 10**p for p in range(12) for m in (1, 2, 5) if sum(n % (m * 10**p) == 0 for _, n in marks) <= room)
    for x, number in marks:
        at = _LEFT + (x - bounds[0]) / (bounds[1] - bounds[0]) * _PLOT
        lines += f"M{at:.1f} {y}v14"
        if number >= 0 and number % every == 0 and at >= free and at + wide < _WIDTH:
            words += _text(round(at + 3, 1), y + 12, str(number))
            free = at + wide
    name = _text(_LEFT - 6, y + 12, view.divided[0], ' text-anchor="end"')
    return f'<path fill="none" stroke="{TICKS}" d="{lines}"/><g fill="{DIM}">{name}{words}</g>'
