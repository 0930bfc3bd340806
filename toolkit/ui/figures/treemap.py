"""A treemap of two levels as an SVG of a few KB without a script.

The layout is the squarified treemap of Bruls, Huizing and van Wijk (2000): rows are filled to keep aspect ratios near one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 940, 250
_HEAD, _GAP = 16, 2  # px: height of the line with a group's name, and the space between groups
_LETTER = 6.4  # px: approximate width of a letter at 11 px
_LEAST = 0.8  # px: thinner rectangles aren't drawn


@dataclass(frozen=True)
class Area:
    """One rectangle: `size` in any unit, a `color` on which white text is readable, and a `note` shown on hover."""

    name: str
    size: float
    color: str
    note: str
    text: str  # the size in words


Box = tuple[float, float, float, float]  # x, y, width, height


def treemap(groups: Mapping[str, Sequence[Area]], label: str) -> str:
    """Return the SVG of `groups`. `label` describes it for screen readers."""
    sizes = {name: sum(area.size for area in areas) for name, areas in groups.items()}
    ordered = sorted((name for name in sizes if sizes[name] > 0), key=lambda name: -sizes[name])
    parts: list[str] = []
    for name, (x, y, w, h) in zip(ordered, squarify([sizes[n] for n in ordered], (0, 0, WIDTH, HEIGHT)), strict=True):
        areas = sorted((area for area in groups[name] if area.size > 0), key=lambda area: -area.size)
        box = (x + _GAP / 2, y + _GAP / 2, w - _GAP, h - _GAP)
        if len(areas) > 1 and h > 3 * _HEAD and len(name) * _LETTER < box[2] - 8:
            parts.append(f'<text class="tk-group" x="{box[0] + 3:.1f}" y="{box[1] + 12:.1f}">{escape(name)}</text>')
            box = (box[0], box[1] + _HEAD, box[2], box[3] - _HEAD)
            shown = [area.name for area in areas]
        else:
            shown = [name if area.name in ("", name) else f"{name} {area.name}" for area in areas]
        for title, area, inner in zip(shown, areas, squarify([a.size for a in areas], box), strict=True):
            parts.append(_rectangle(title, area, inner))
    return (
        f'<svg class="tk-treemap" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def squarify(sizes: Sequence[float], box: Box) -> list[Box]:
    """Return a box for each of `sizes` (largest first, all above 0), with areas that divide `box` in that proportion."""
    x, y, w, h = box
    total = sum(sizes)
    if total <= 0 or w <= 0 or h <= 0:
        return [(x, y, 0.0, 0.0) for _ in sizes]
    areas = [size * w * h / total for size in sizes]
    found: list[Box] = []
    while areas:
        short = max(min(w, h), 1e-9)
        n = 1
        while n < len(areas) and _worst(areas[: n + 1], short) <= _worst(areas[:n], short):
            n += 1
        row, areas = areas[:n], areas[n:]
        thick = sum(row) / short
        at = 0.0
        for area in row:
            long = area / thick if thick > 0 else 0.0
            found.append((x, y + at, thick, long) if w >= h else (x + at, y, long, thick))
            at += long
        if w >= h:
            x, w = x + thick, max(w - thick, 0.0)
        else:
            y, h = y + thick, max(h - thick, 0.0)
    return found


def _worst(row: Sequence[float], short: float) -> float:
    """Return the worst aspect ratio in a row laid along a side of length `short`."""
    total = sum(row)
    return max(short**2 * max(row) / total**2, total**2 / (short**2 * min(row)))


def _rectangle(name: str, area: Area, box: Box) -> str:
    x, y, w, h = box
    if w < _LEAST or h < _LEAST:
        return ""
    lines = [line for line in (name, area.text) if line]
    fitting = [line for line in lines if len(line) * _LETTER < w - 8][: int((h - 4) // 14)]
    written = "".join(
        f'<text class="tk-area" x="{x + 5:.1f}" y="{y + 14 * (i + 1):.1f}">{escape(line)}</text>'
        for i, line in enumerate(fitting if fitting[:1] == lines[:1] else [])
    )
    return (
        f'<g><title>{escape(area.note)}</title><rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" '
        f'fill="{area.color}"/>{written}</g>'
    )
