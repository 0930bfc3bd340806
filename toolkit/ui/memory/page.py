"""A self-contained HTML page of one memory measurement or of a session's cells. It makes no network request.

The file holds up to `MOST_MOMENTS` moments of each measurement (always the peak), its largest blocks, and the same memory.js as
the notebook widget. Without scripts it shows still pictures and tables. Writing it needs no front-end package.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import ToolkitError, kind_of
from toolkit.core.files import replace_text
from toolkit.ui.assets import script_of, style_of
from toolkit.ui.memory import picture as memory_picture
from toolkit.ui.memory import wire as memory_wire
from toolkit.ui.memory.view import AXES, MemoryView
from toolkit.vram.measure import HOST_ONLY, MemoryUse

MOST_MOMENTS = 3000
_MOST_BLOCKS = 1000  # per measurement, the largest first
_MOST_MARKS = 1000


@dataclass(frozen=True)
class _Numbered:
    """A measurement without a cell, with the attributes that a session's picture needs."""

    number: int
    title: str
    status: str
    use: MemoryUse

    @property
    def device(self) -> str:
        return self.use.device

    @property
    def baseline_bytes(self) -> int:
        return self.use.ledger.baseline_bytes

    @property
    def peak_bytes(self) -> int:
        return self.use.ledger.peak_bytes

    @property
    def end_bytes(self) -> int:
        return self.use.ledger.end_bytes


def write_memory_page(
    uses: Any, path: str | os.PathLike[str], title: str | None = None, *, budget_bytes: int | None = None
) -> Path:
    """Write the page of one or several measurements to `path` and return its path. The file is replaced atomically.

    `uses` is a result of `tk.memory()`, or a sequence of results or of a session's cells. Raises ToolkitError otherwise.
    """
    given = list(uses) if isinstance(uses, Sequence) else [uses]
    if not given:
        raise ToolkitError("a page of memory", "no measurements", "Give it at least one")
    cells = [cell if hasattr(cell, "use") else _numbered(cell, n) for n, cell in enumerate(given, 1)]
    return replace_text(path, _document(cells, title, budget_bytes), ToolkitError)


def _numbered(use: Any, number: int) -> _Numbered:
    if not hasattr(use, "ledger"):
        raise ToolkitError("a page of memory", kind_of(use), "Give it the result of tk.memory()")
    return _Numbered(number, "", "error" if use.trace.meta.get("failed") else "ok", use)


def _document(cells: Sequence[Any], title: str | None, budget_bytes: int | None) -> str:
    packed = [None if cell.use.device in HOST_ONLY else packed_use(cell.use) for cell in cells]
    data = json.dumps(packed, separators=(",", ":"))  # base64 can't contain "</script>"
    details = [_details(cell.use, n) for n, cell in enumerate(cells)]
    alone = len(cells) == 1
    body = details[0] if alone else memory_picture.session_html(cells, details, budget_bytes)
    title = title or (f"Memory on {cells[0].use.device}" if alone else f"Memory of {len(cells)} cells")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><link rel="icon" href="data:,">
{style_of("page.css", "memory/memory.css")}</head>
<body><main class="tk-page"><h1>{escape(title)}</h1>{body.replace(memory_picture.style(), "")}</main>
<script type="application/json" id="tk-data">{data}</script>
<script type="module">
{script_of("memory/memory.js")}
startPage();
</script></body></html>
"""


def _details(use: MemoryUse, number: int) -> str:
    place = "" if use.device in HOST_ONLY else f'<div class="tk-place" data-use="{number}"></div>'
    return f"{place}{memory_picture.html(use)}"


def packed_use(use: MemoryUse) -> str:
    """Return a measurement as text: moments that include every peak, the bands of each grouping, and the largest blocks.

    The format is base64 of zlib of: the uint32 length of a JSON header (padded to 8), the header, and columns of differences.
    """
    view = memory_picture.view_of(use)
    found = view.moments(MOST_MOMENTS)
    views = [view if by == view.by else view.regrouped(by) for by in memory_wire.groupings(view)]
    held = [other.bands_at(found.position) for other in views]
    largest = max((int(np.abs(part).max(initial=0)) for part in held), default=0)
    unit = int(np.gcd.reduce(view.ledger.change)) if len(view.ledger.change) else 1
    unit = max(unit, largest >> 30, 1)  # differences in multiples of `unit` fit into 32 bits
    blocks, holders = _blocks(view)
    raw = [np.diff(column, prepend=0).astype("<f8") for column in (found.position, found.total, found.reserved, found.time_ns)]
    raw += [np.diff(column, prepend=0).astype("<f8") for column in blocks[:3]]
    raw.append(np.diff(blocks[3], prepend=0).astype("<i4"))
    raw += [np.diff(np.round(band / unit), prepend=0).astype("<i4") for part in held for band in part]
    header = {
        "meta": memory_wire.meta(use, view), "n": len(found.position), "unit": unit, "blocks": len(blocks[0]),
        "all": len(blocks[0]) == len(view.ledger.blocks.begin), "holders": holders,
        "sets": [[other.by, memory_wire.bands(other)] for other in views],
        "bounds": {axis: view.bounds(axis) for axis in AXES}, "marks": _marks(view),
        "peakX": [view.x_of(view.ledger.peak, axis) for axis in AXES],
        "shortages": [[view.x_of(p, "events"), view.x_of(p, "time"), asked] for p, asked in view.shortages[-20:]],
    }  # fmt: skip
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-(len(blob) + 4) % 8)
    packed = struct.pack("<I", len(blob)) + blob + b"".join(part.tobytes() for part in raw)
    return base64.b64encode(zlib.compress(packed, 6)).decode()


def _marks(view: MemoryView) -> list[list[float]]:
    """Return [x on the axis of events, x on the axis of time, number] where steps or cells begin."""
    _, states, numbers = view.divided
    every = len(states) // _MOST_MARKS + 1
    picked = slice(None, None, every)
    return np.stack([states[picked], view.times[states[picked]], numbers[picked]], 1).tolist() if len(states) else []


def _blocks(view: MemoryView) -> tuple[list[NDArray[Any]], list[list[str]]]:
    """Return ([begin, end, bytes, holder] of the largest blocks in order of begin, the facts of each holder)."""
    blocks = view.ledger.blocks
    chosen = np.sort(np.argsort(-blocks.bytes, kind="stable")[:_MOST_BLOCKS])
    facts, code = view.holders_of(chosen)
    return [blocks.begin[chosen], blocks.end[chosen], blocks.bytes[chosen], code], facts
