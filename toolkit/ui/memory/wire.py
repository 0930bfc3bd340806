"""The messages to memory.js: the description of a measurement, columns as bytes, and a moment as a table."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.core.units import seconds_text
from toolkit.ui.memory.drawing import colors, floor_of, limit_of
from toolkit.ui.memory.picture import notes, view_of
from toolkit.ui.memory.view import MemoryView, Moment

if TYPE_CHECKING:
    from toolkit.vram.measure import MemoryUse

MOST_COLUMNS = 4000
_TEXT = 160  # longest name or line, in characters


def meta(use: MemoryUse, view: MemoryView) -> dict[str, Any]:
    """Return the description of the whole measurement (JSON-able)."""
    ledger = view.ledger
    limit = limit_of(view)
    low, high = view.bounds("time")
    return {
        "title": use.line(), "device": use.device, "clock": view.clock, "events": len(view.held) - 1,
        "span": seconds_text((high - low) / 1e9), "first": ledger.opening - 1,
        "peak": ledger.peak_bytes, "position": ledger.peak,
        "reserved": ledger.peak_reserved_bytes if view.knows_reserved else 0, "by": view.by, "axis": view.axis,
        "groupings": groupings(view), "limit": None if limit is None else [limit[0], limit[1]], "divided": view.divided[0],
        "stretched": floor_of(view, ledger.peak_bytes) > 0, "notes": notes(view),
    }  # fmt: skip


def groupings(view: MemoryView) -> list[str]:
    """Return the possible groupings. Cells and steps are included only if there are several."""
    labels = {what: view.ledger.trace[what][view.ledger.rows] for what in ("cell", "step")}
    return ["owner", "kind", "line", *(what for what, label in labels.items() if len(label) and (label != label[0]).any())]


def bands(view: MemoryView) -> list[list[Any]]:
    """Return [name, color, bytes at the peak, role] of each band, the lowest first."""
    return [
        [band.words[:_TEXT], color, band.at_peak_bytes, band.role] for band, color in zip(view.bands, colors(view), strict=True)
    ]


def packed(view: MemoryView, x0: float, x1: float, width: int, axis: str, **echo: Any) -> bytes:
    """Return the columns of [x0, x1) as bytes: the uint32 length of a JSON header (padded to 8), the header, then the columns.

    The columns are position, total, reserved and time_ns in float64, then every band in float32. The header contains `echo`.
    """
    width = int(np.clip(width, 16, MOST_COLUMNS))
    columns = view.columns(x0, x1, width, axis)
    header = {
        **echo, "by": view.by, "axis": axis, "x0": columns.x0, "x1": columns.x1, "width": width, "bounds": view.bounds(axis),
        "bands": bands(view), "marks": view.marks(columns.x0, columns.x1, axis), "peakX": view.x_of(view.ledger.peak, axis),
        "shortages": [[view.x_of(position, axis), asked] for position, asked in view.shortages[-20:]],
    }  # fmt: skip
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-(len(blob) + 4) % 8)
    numbers = np.stack([columns.position, columns.total, columns.reserved, columns.time_ns]).astype("<f8")
    return struct.pack("<I", len(blob)) + blob + numbers.tobytes() + columns.bands.astype("<f4").tobytes()


def whole(view: MemoryView, width: int = 800) -> bytes:
    """Return the columns of the whole measurement, for the first picture, before any request."""
    return packed(view, *view.bounds(view.axis), width, view.axis, seq=0, vid="")


def moment(found: Moment) -> dict[str, Any]:
    """Return a moment (JSON-able). Rows are [bytes, blocks, owner, kind, source, place]."""
    rows = [
        [row.bytes, row.blocks, row.owner[:_TEXT], row.kind[:_TEXT], row.code[:_TEXT], row.place[:_TEXT]] for row in found.rows
    ]
    return {
        "position": found.position, "time": found.time_ns, "total": found.total_bytes, "rows": rows,
        "rest": [found.rest_bytes, found.rest_holders],
    }  # fmt: skip


def regrouped(cache: dict[str, MemoryView], use: MemoryUse, by: str) -> MemoryView:
    """Return the view grouped `by`, and store it in `cache`."""
    if by not in cache:
        other = next(iter(cache.values()), None)
        cache[by] = other.regrouped(by) if other is not None else view_of(use, by)
    return cache[by]
