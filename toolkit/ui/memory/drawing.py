"""Still pictures of memory: an SVG of the holders of memory over a recording.

A picture takes at most about 60 KB, whatever the size of the recording, and needs no script. It is as wide as its place: bands
and lines are stretched, but heights, texts and strokes keep their sizes. A picture has three layouts, with plots of different
widths and with more or fewer numbers on the axis, and shows the one for its width.
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
_LAYOUTS = {"wide": 700, "middle": 480, "narrow": 340}  # width of the picture in px from which each layout is shown
# A front end shows a picture with the color scheme of its place in the page (memory.css), so this follows the page's theme.
# In an image, a media query compares the width of the image.
_STYLE = in_the_dark(_IN_THE_DARK) + (
    "<style>path{vector-effect:non-scaling-stroke}.middle,.narrow{display:none}"
    f"@media(max-width:{_LAYOUTS['wide'] - 0.1}px){{.wide{{display:none}}.middle{{display:inline}}}}"
    f"@media(max-width:{_LAYOUTS['middle'] - 0.1}px){{.middle{{display:none}}.narrow{{display:inline}}}}</style>"
)
NEAR = 2.0  # a limit is drawn if it is at most this multiple of the peak
_SLIVER = 0.2  # if a smaller share of the memory changes, the axis of bytes begins above 0
_LEFT, _RIGHT, _TOP, _HIGH = 72, 12, 26, 230  # px
_FLOOR = _TOP + _HIGH
_PLOT, _COLUMN = 876, 2  # width of the plot and of a column, before they are stretched
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
    limit_line, limit_words = _limit(limit, columns, scale) if limit else ("", "")
    parts = [_grid(scale), _areas(view, columns, scale), _reserved(view, columns, scale), _broken(scale), limit_line]
    parts += [_peak(view, columns, scale), _shortage(view, axis, (x0, x1), scale), limit_words]
    below, height = _axis(view, axis, (x0, x1))
    numbers = {name: _numbers(view, axis, (x0, x1), width - _LEFT - _RIGHT) for name, width in _LAYOUTS.items()}
    return _document("".join([*parts, below]), numbers, height, label(view, budget_bytes))


def label(view: MemoryView, budget_bytes: int | None = None) -> str:
    """Return a description of the picture in one sentence, for screen readers."""
    ledger = view.ledger
    held = ", ".join(f"{band.words} {bytes_text(band.at_peak_bytes)}" for band in view.bands[:6] if band.at_peak_bytes)
    limit = limit_of(view, budget_bytes)
    words = f"; {limit[1]} {bytes_text(limit[0])}" if limit else ""
    peak = f"Memory over {'time' if view.axis == 'time' else 'events'}: peak {bytes_text(ledger.peak_bytes)}"
    return f"{peak}{words}. At the peak by {view.by}: {held or 'nothing'}"


def _document(body: str, numbers: dict[str, str], height: float, words: str) -> str:
    layouts = "".join(
        f'<svg class="{name}" x="{_LEFT}" width="{100 - 100 * (_LEFT + _RIGHT) / width:.3g}%" overflow="visible">'
        f'<use href="#plot"/>{numbers[name]}</svg>'
        for name, width in _LAYOUTS.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="100%" height="{height:g}" role="img" aria-label="{escape(words)}" '
        f'font-family="system-ui,Segoe UI,Liberation Sans,Arial,sans-serif" font-size="12" fill="{FOREGROUND}" '
        f'style="background:{PAPER}">{_STYLE}<defs><g id="plot">{body}</g></defs>{layouts}</svg>'
    )


def _stretched(body: str) -> str:
    """Return elements with x from 0 to _PLOT, stretched to the width of the plot. Their y are pixels."""
    size = f'viewBox="0 0 {_PLOT} {_HIGH}" width="100%" height="{_HIGH}" preserveAspectRatio="none" overflow="visible"'
    return f"<svg {size}>{body}</svg>"


def _x(share: float) -> str:
    """Return an x in the plot as a share of its width, for elements that are not stretched."""
    return f"{100 * share:.4g}%"


def _text(x: float | str, y: float, markup: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y:g}"{more}>{markup}</text>'


def _wide(markup: str) -> str:
    """Return a part of a text that a narrow picture leaves out."""
    return f'<tspan class="wide">{markup}</tspan>'


_HALO = f' stroke="{PAPER}" stroke-width="5" stroke-linejoin="round" paint-order="stroke"'


@dataclass(frozen=True)
class _Scale:
    """Maps bytes to heights, from `low` (0, unless little of the memory changes) to `top`, with room for a label above."""

    low: int
    top: int

    def y(self, n_bytes: float) -> int:
        return round(_FLOOR - max(n_bytes - self.low, 0) * (_HIGH - 20) / max(self.top - self.low, 1))

    def ys(self, n_bytes: NDArray[np.int64]) -> list[int]:
        heights = np.maximum(n_bytes - self.low, 0) * ((_HIGH - 20) / max(self.top - self.low, 1))
        return np.round(_FLOOR - heights).astype(int).tolist()


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
    return _text(6, _FLOOR - 7, words, _HALO) if scale.low else ""


def _grid(scale: _Scale) -> str:
    step = step_of(scale.top - scale.low)
    ticks = range(scale.low, scale.top + 1, step)  # if the axis begins above 0: 45.6 MiB, +128 KiB, +256 KiB
    texts = [bytes_text(n) if n == scale.low else f"{'+' * bool(scale.low)}{bytes_text(n - scale.low)}" for n in ticks]
    texts[0] = texts[0] if scale.low else "0"
    lines = "".join(f"M0 {scale.y(n)}.5h{_PLOT}" for n in ticks)
    names = "".join(_text(-6, scale.y(n) + 4, text, ' text-anchor="end"') for n, text in zip(ticks, texts, strict=True))
    return _stretched(f'<path fill="none" stroke="{GRID}" d="{lines}"/>') + f'<g fill="{DIM}">{names}</g>'


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
    paths, floor = [], _FLOOR
    for i, color in reversed(list(enumerate(colors(view)))):
        y, under = heights[i], heights[i - 1] if i else [floor] * len(heights[i])
        if y != under:
            paths.append(f'<path fill="{color}" d="M0 {floor}V{y[0]}{_stairs(y)}V{floor}z"/>')
    return _stretched(f'<g shape-rendering="crispEdges">{"".join(paths)}</g>')


def _reserved(view: MemoryView, columns: Columns, scale: _Scale) -> str:
    if not view.knows_reserved:
        return ""
    y = scale.ys(columns.reserved)
    dashed = f'<path fill="none" stroke="{FOREGROUND}" stroke-dasharray="5 3"'
    words = f"reserved{_wide(' by the allocator, peak')} {bytes_text(view.ledger.peak_reserved_bytes)}"
    line, key = f'{dashed} d="M0 {y[0]}{_stairs(y)}"/>', f'{dashed} d="M{6 - _LEFT} 11.5h28"/>'
    return _stretched(line) + key + _text(40 - _LEFT, 15, words)


def _limit(limit: tuple[int, str], columns: Columns, scale: _Scale) -> tuple[str, str]:
    """Return the line of the limit, and its label on the side away from the peak's label."""
    y = scale.y(limit[0])
    right = int(columns.total.argmax()) < len(columns.total) / 2
    at, more = ("100%", ' dx="-4" text-anchor="end"') if right else ("4", "")
    name = limit[1].replace("memory of the ", _wide("memory of the "))
    words = _text(at, y - 6, f"{name} {bytes_text(limit[0])}", f' fill="{RED}"{more}{_HALO}')
    return _stretched(f'<path stroke="{RED}" stroke-width="2" d="M0 {y}h{_PLOT}"/>'), words


def _peak(view: MemoryView, columns: Columns, scale: _Scale) -> str:
    if not view.ledger.peak_bytes:
        return _text("50%", _TOP + _HIGH / 2, "no memory was in use", f' fill="{DIM}" text-anchor="middle"')
    share = (int(columns.total.argmax()) + 0.5) / len(columns.total)
    y = scale.y(view.ledger.peak_bytes)
    anchor = "middle"
    if share < 0.2 or 0.5 <= share < 0.6:  # it stays in the plot, and leaves the other half to the label of a limit
        anchor = "start"
    elif share >= 0.8 or 0.4 <= share < 0.5:
        anchor = "end"
    dot = f'<circle cx="{_x(share)}" cy="{y}" r="3.5" fill="{PAPER}" stroke="{FOREGROUND}" stroke-width="1.5"/>'
    words = f"peak {bytes_text(view.ledger.peak_bytes)}"
    return _text(_x(share), y - 8, words, f' font-weight="600" text-anchor="{anchor}"{_HALO}') + dot


def _shortage(view: MemoryView, axis: str, bounds: tuple[float, float], scale: _Scale) -> str:
    """Return a mark for the last failed allocation, as high as the memory would have risen."""
    if not view.shortages:
        return ""
    position, asked = view.shortages[-1]
    share = (min(view.x_of(position, axis) + (axis == "events"), bounds[1]) - bounds[0]) / (bounds[1] - bounds[0])
    held = int(view.held[max(position - view.ledger.opening + 1, 0)])
    y, up = scale.y(held), max(scale.y(held + asked), _TOP - 6)
    cross = f'<path stroke="{RED}" stroke-width="2" stroke-dasharray="3 2" d="M0 {y}V{up}"/>'
    cross += f'<path stroke="{RED}" stroke-width="2" d="M-4 {y - 4}l8 8m0-8l-8 8"/>'
    words = f"× out of memory: {bytes_text(asked)}{_wide(' more requested')}"
    return f'<svg x="{_x(share)}" overflow="visible">{cross}</svg>' + _text(
        "100%", 15, words, f' fill="{RED}" font-weight="600" text-anchor="end"'
    )


def _axis(view: MemoryView, axis: str, bounds: tuple[float, float]) -> tuple[str, int]:
    """Return the elements below the plot without numbers, and the height of the whole picture."""
    y, device = _FLOOR, escape(str(view.ledger.trace.meta.get("device", "unknown device")))
    parts = [_stretched(f'<path stroke="{DIM}" d="M0 {y}.5h{_PLOT}"/>')]
    if view.divided[0]:
        parts.append(_text(-6, y + 34, view.divided[0], f' fill="{DIM}" text-anchor="end"'))
        y += 20
    events = len(view.held) - 1
    title, more = f"time, {view.clock}", ""
    if axis == "events":
        title = f"{events:,} allocations and frees" if events != 1 else "one allocation or free"
        more = ", in order" if events != 1 else ""
        device += "; times are modelled" if view.clock == "modelled" else ""
    parts.append(_text(0, y + 36, title + _wide(f"{more} ({device})"), f' fill="{DIM}"'))
    return "".join(parts), y + 44


def _numbers(view: MemoryView, axis: str, bounds: tuple[float, float], width: float) -> str:
    """Return the numbers of the axis below a plot of `width` px, with ticks, and those of steps or cells."""
    span, lines, words = bounds[1] - bounds[0], "", ""
    most = min(width / (_LETTER * len(f"{span:,.0f}" if axis == "events" else "1.00 ms") + 12), 9)
    step = max(next(m * 10.0**p for p in range(-3, 20) for m in (1, 2, 5) if span / (m * 10.0**p) <= most), 1.0)
    for i in range(int(span / step) + 1):
        at, share = i * step, i * step / span
        lines += f"M{share * _PLOT:.1f} {_FLOOR}v5"
        name = f"{at:,.0f}" if axis == "events" else seconds_text(at / 1e9) if at else "0"
        if (1 - share) * width + _RIGHT > len(name) * _LETTER / 2:
            words += _text(_x(share), _FLOOR + 17, name, f' text-anchor="{"middle" if i else "start"}"')
    ticks = _stretched(f'<path fill="none" stroke="{DIM}" d="{lines}"/>')
    marks = _marks(view, axis, bounds, width) if view.divided[0] else ""
    return f'<g fill="{DIM}">{ticks}{words}{marks}</g>'


def _marks(view: MemoryView, axis: str, bounds: tuple[float, float], width: float) -> str:
    """Return ticks where steps or cells begin: long ones with numbers where there is room, else short ones."""
    lines, words, free, y = "", "", -1.0, _FLOOR + 22
    marks = view.marks(*bounds, axis)
    wide = len(str(max(number for _, number in marks))) * _LETTER + 10
    room = width / wide
    every = next(m * 10**p for p in range(12) for m in (1, 2, 5) if sum(n % (m * 10**p) == 0 for _, n in marks) <= room)
    for x, number in marks:
        share = (x - bounds[0]) / (bounds[1] - bounds[0])
        at, high = share * width, 3
        if number >= 0 and number % every == 0 and at >= free and at + wide < width + _RIGHT:
            words += _text(_x(share), y + 12, str(number), ' dx="3"')
            free, high = at + wide, 14
        lines += f"M{share * _PLOT:.1f} {y}v{high}"
    return _stretched(f'<path fill="none" stroke="{TICKS}" d="{lines}"/>') + words
