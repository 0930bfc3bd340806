"""A line chart as an SVG: the same in JupyterLab, on a page and in a repository's preview, in light and dark themes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from toolkit.core.units import number_text

WIDTH, HEIGHT = 640, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 30, 44  # margins; the names of the lines are on the right
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito's, which color-blind people can tell apart
_LETTER = 13  # height of a line of text


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, and the x and y of its points. `dots` draws the points without connecting them."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dots: bool = False


@dataclass(frozen=True)
class Chart:
    """A chart of lines with linear axes. The y axis includes 0. As text, it is one row per line with its last y."""

    lines: tuple[Line, ...]
    x_title: str
    y_title: str

    def __repr__(self) -> str:
        rows = [f"  {line.name}: {number_text(line.y[-1])} at {number_text(line.x[-1])}" for line in self.lines]
        return "\n".join([f"{self.y_title} by {self.x_title}", *rows])

    def _repr_html_(self) -> str:
        xs, ys = [x for line in self.lines for x in line.x], [y for line in self.lines for y in line.y]
        x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(0, *ys), max(ys))
        right, bottom = WIDTH - _RIGHT, HEIGHT - _BOTTOM

        def across(x: float) -> float:
            return _LEFT + (right - _LEFT) * (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])

        def up(y: float) -> float:
            return bottom - (bottom - _TOP) * (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])

        parts = [f'<path d="M{_LEFT} {up(y):.1f}H{right}" stroke="currentColor" opacity="0.2"/>' for y in y_ticks]
        parts += [_text(_LEFT - 8, up(y) + 4, f"{y:,.6g}", "end") for y in y_ticks]
        parts += [_text(across(x), bottom + 18, f"{x:,.6g}", "middle") for x in x_ticks]
        parts += [_text((_LEFT + right) / 2, HEIGHT - 8, self.x_title, "middle"), _text(4, 12, self.y_title, "start")]
        heights = _apart([up(line.y[-1]) for line in self.lines])
        for line, color, height in zip(self.lines, _COLORS, heights, strict=False):
            points = [(across(x), up(y)) for x, y in zip(line.x, line.y, strict=True)]
            if line.dots:
                parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>' for x, y in points]
            else:
                path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
                parts.append(f'<path d="M{path}" fill="none" stroke="{color}" stroke-width="2.5"/>')
            parts.append(f'<circle cx="{right + 12}" cy="{height:.1f}" r="4" fill="{color}"/>')
            parts.append(_text(right + 22, height + 4, line.name, "start"))
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(repr(self))}" font-size="12" '
            f'style="max-width: {WIDTH}px; width: 100%" font-family="sans-serif">{"".join(parts)}</svg>'
        )


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round numbers from at most `low` to at least `high`, about `most` of them."""
    rough = (high - low or 1.0) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough)
    first = math.floor(low / step)
    last = max(math.ceil(high / step), first + 1)
    return [number * step for number in range(first, last + 1)]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor">{escape(text)}</text>'


def _apart(heights: Sequence[float]) -> list[float]:
    """Return the heights in pixels, moved down where two names would overlap."""
    moved = list(heights)
    order = sorted(range(len(moved)), key=lambda i: moved[i])
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + _LETTER + 3)
    return moved
