"""A small roofline plot as an SVG: the limit of a GPU, and the performance of one config.

Both axes are logarithmic and relative to the GPU's ridge point, so that every GPU has the same roof. The x-axis is the time of
the operations divided by the time of the bytes (1: equal); the y-axis is the share of the GPU's peak operations per second.
"""

from __future__ import annotations

import math

from toolkit.tune.results import Row

WIDTH, HEIGHT = 84, 52
_RIDGE, _TOP = 52, 6  # x and y of the ridge point, in pixels
_OCTAVE = 5.5  # pixels per factor of two


def share_of_roof(row: Row) -> float | None:
    """Return the share of the roofline that is reached, 0 to 1, or None if there is no time or no work."""
    floor = max(row.memory_ns or 0.0, row.compute_ns or 0.0)
    return min(floor / row.ns, 1.0) if row.usable and row.ns and floor else None


def roofline(row: Row) -> str:
    """Return the roofline with a dot for `row`: filled if its time was measured, hollow if it is modelled."""
    share = share_of_roof(row) or 0.0
    memory, compute = row.memory_ns or 0.0, row.compute_ns or 0.0
    intensity = compute / memory if memory and compute else (1e9 if compute else 1e-9)
    x = min(max(_RIDGE + _OCTAVE * math.log2(intensity), 4), WIDTH - 4)
    roof = _TOP + max(_RIDGE - x, 0) * (HEIGHT - 2 - _TOP) / _RIDGE
    y = min(roof - _OCTAVE * math.log2(max(share, 1e-9)), HEIGHT - 3)
    label = f"Roofline: {100 * share:.0f} % of the {row.bound or 'roofline'} limit, {row.clock}"
    dot = "tk-dot tk-hollow" if row.clock == "modelled" else "tk-dot"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{label}">'
        f'<path class="tk-roof" d="M0 {HEIGHT - 2}L{_RIDGE} {_TOP}H{WIDTH}"/>'
        f'<path class="tk-gap" d="M{x:.1f} {roof:.1f}V{y:.1f}"/><circle class="{dot}" cx="{x:.1f}" cy="{y:.1f}" r="3"/></svg>'
    )
