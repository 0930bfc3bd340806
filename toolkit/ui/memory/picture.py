"""The display of a memory measurement without a script: the picture, the holders at the peak, and the memory that stayed.

`html` returns the full display, `line_html` one line that expands to it, and `session_html` a chart of a notebook's cells, in
which a click on a bar shows its cell. Pictures are images, not inline SVG, because front ends remove inline SVG from notebooks
that aren't trusted.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Sequence
from functools import cache
from html import escape

from toolkit.core.errors import ToolkitError
from toolkit.core.units import bytes_text, plural
from toolkit.trace.ledger import UNOWNED
from toolkit.ui.assets import style_of
from toolkit.ui.memory.drawing import NEAR, CellRow, colors, label, limit_of, step_of, svg
from toolkit.ui.memory.view import Holding, MemoryView, Moment
from toolkit.vram.measure import HOST_ONLY, MemoryUse
from toolkit.vram.sessions import CellUse

__all__ = ["html", "line_html", "session_html", "svg"]
_MOST_ROWS = 12  # rows of the table of holders at the peak
_OWNED = 0.5  # the bands show owners if variables hold at least this share of the peak


def html(use: MemoryUse, by: str | None = None) -> str:
    """Return the full display: a line, the picture with its legend, the holders at the peak, and the memory freed and kept.

    `by` is one of BY. Default: owners if they are known for half of the peak, else lines.
    """
    return f'{style()}<div class="tk-memory" data-lm-suppress-shortcuts="true">{_body(use, by, None, titled=True)}</div>'


def line_html(use: MemoryUse, budget_bytes: int | None = None, *, is_open: bool = False) -> str:
    """Return a line with the peak and the bytes kept and freed, which expands to the full display.

    The line is red if the peak exceeds the budget or an allocation failed.
    """
    opened = " open" if is_open else ""
    if use.device in HOST_ONLY:
        said = f"{use.line()}. {use.advice()}" if is_open else use.line()
        return f'{style()}<div class="tk-memory tk-line"><span class="tk-words">{escape(said)}</span></div>'
    over = _trouble(use, budget_bytes)
    words = [f"peak <b>{bytes_text(use.peak_bytes)}</b>", f"kept {signed(use.kept_bytes)}"]
    words += [f"freed {bytes_text(use.freed_bytes)}"] if use.freed_bytes else []
    words += [f"<em>{escape(over)}</em>"] if over else []
    summary = f'<span class="tk-words">{" · ".join(words)}</span>{_bar(use, budget_bytes)}'
    classes = "tk-memory tk-line tk-over" if over else "tk-memory tk-line"
    body = _body(use, None, budget_bytes, titled=False)
    return (
        f'{style()}<details class="{classes}" data-lm-suppress-shortcuts="true"{opened}><summary>{summary}</summary>'
        f'<div class="tk-opened">{body}</div></details>'
    )


@cache
def style() -> str:
    """Return the style sheet as a `<style>` element."""
    return style_of("memory/memory.css")


def grouping(view: MemoryView) -> str:
    """Return the first grouping to show: "owner" if variables hold enough of the peak, else "line"."""
    owned = sum(band.at_peak_bytes for band in view.bands if band.name != UNOWNED and band.role != "before")
    return "owner" if view.by == "owner" and owned >= _OWNED * max(view.ledger.peak_bytes, 1) else "line"


def view_of(use: MemoryUse, by: str | None = None) -> MemoryView:
    """Return the view of a measurement, grouped `by`, or by default as `grouping` says."""
    view = MemoryView(use.ledger, by or "owner")
    best = by or grouping(view)
    return view if best == view.by else view.regrouped(best)


def signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else '−' if n_bytes < 0 else ''}{bytes_text(abs(n_bytes))}"


def notes(view: MemoryView) -> list[str]:
    """Return the caveats of a measurement, such as modelled times."""
    said = []
    if view.clock == "modelled":
        said.append("Virtual GPU: bytes come from its simulated allocator; times are modelled, not measured.")
    if view.ledger.trace.meta.get("sizes_only"):
        said.append("Sizes only: tensors held no values.")
    if len(view.ledger.rows) > len(view.ledger.blocks.begin) * 2:
        said.append("Some of the freed blocks were allocated before the recording began.")
    return said


def _trouble(use: MemoryUse, budget_bytes: int | None) -> str:
    """Return the reason why a line is red, or "" if it isn't."""
    failed = str(use.trace.meta.get("failed") or "")
    if failed == "OutOfMemoryError":
        return "out of memory"
    if budget_bytes is not None and use.peak_bytes > budget_bytes:
        return f"over the budget of {bytes_text(budget_bytes)}"
    return ""


def _bar(use: MemoryUse, budget_bytes: int | None) -> str:
    """Return a thin bar with the bytes held before, the peak, and the budget."""
    meta = use.trace.meta
    limit = budget_bytes or int(meta.get("limit_bytes") or 0) or int(meta.get("total_bytes") or 0)
    scale = max(use.peak_bytes, limit if limit <= 20 * use.peak_bytes else 0, 1) / 100
    base, above = min(use.baseline_bytes, use.peak_bytes) / scale, max(use.peak_bytes - use.baseline_bytes, 0) / scale
    mark = f'<i class="tk-limit" style="left:{min(limit / scale, 99):.1f}%"></i>' if 0 < limit <= 100 * scale else ""
    said = f"held before {bytes_text(use.baseline_bytes)}, peak {bytes_text(use.peak_bytes)}"
    said += f", limit {bytes_text(limit)}" if limit else ""
    return (
        f'<span class="tk-bar" role="img" aria-label="{said}" title="{said}"><i class="tk-base" style="width:{base:.1f}%"></i>'
        f'<i class="tk-above" style="width:{above:.1f}%"></i>{mark}</span>'
    )


def _body(use: MemoryUse, by: str | None, budget_bytes: int | None, *, titled: bool) -> str:
    head = f'<div class="tk-title">{escape(use.line())}</div>' if titled else f'<p class="tk-note">{escape(use.line())}</p>'
    if use.device in HOST_ONLY:
        return f'{head}<p class="tk-note">{escape(use.advice())}</p>'
    view = view_of(use, by)
    said = "".join(f'<p class="tk-note">{escape(note)}</p>' for note in notes(view))
    return "".join([
        head, said, image(svg(view, budget_bytes), label(view, budget_bytes)), _keys(view),
        '<div class="tk-sub">Held at the peak</div>', _table(view.at(view.ledger.peak, _MOST_ROWS)), _facts(view, budget_bytes),
    ])  # fmt: skip


def image(picture: str, words: str) -> str:
    """Return an SVG as an `<img>` element with the description `words`. It needs no style sheet to be as wide as its place."""
    data = base64.b64encode(picture.encode()).decode()
    return f'<img class="tk-picture" width="100%" alt="{escape(words)}" src="data:image/svg+xml;base64,{data}">'


def _keys(view: MemoryView) -> str:
    """Return the legend, the topmost band first, with the bytes of each band at the peak."""
    shown = [
        f'<span><i style="background:{color}"></i>{escape(_short(band.words))} <b>{bytes_text(band.at_peak_bytes)}</b></span>'
        for band, color in reversed(list(zip(view.bands, colors(view), strict=True)))
    ]
    return f'<div class="tk-keys"><span class="tk-dim">at the peak, by {view.by}:</span>{"".join(shown)}</div>' if shown else ""


def _short(text: str, most: int = 64) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _table(moment: Moment) -> str:
    if not moment.rows:
        return '<p class="tk-note">No memory was in use.</p>'
    total = max(moment.total_bytes, 1)
    body = "".join(_row(row, total) for row in moment.rows)
    if moment.rest_holders:
        share, words = _share(moment.rest_bytes / total), f"{moment.rest_holders:,} more"
        body += f"<tr><td>{bytes_text(moment.rest_bytes)}</td><td>{share}</td><td></td><td>{words}</td><td></td></tr>"
    head = "".join(f'<th scope="col">{name}</th>' for name in ("bytes", "share", "kind", "held by", "allocated in"))
    return f'<div class="tk-scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _share(share: float) -> str:
    words = f"{100 * share:.0f} %" if share >= 0.005 or not share else "<1 %"
    return f'<span class="tk-share"><i style="width:{100 * share:.0f}%"></i></span> {escape(words)}'


def _row(row: Holding, total: int) -> str:
    blocks = f' <span class="tk-dim">in {row.blocks:,} blocks</span>' if row.blocks > 1 else ""
    owner = f'<span class="tk-dim">{row.owner}</span>' if row.owner == UNOWNED else f"<code>{escape(_short(row.owner))}</code>"
    code = f"<code>{escape(_short(row.code, 90))}</code> " if row.code else ""
    place = f'{code}<span class="tk-dim">{escape(row.place)}</span>'
    cells = (f"{bytes_text(row.bytes)}{blocks}", _share(row.bytes / total), escape(row.kind), owner, place)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _facts(view: MemoryView, budget_bytes: int | None) -> str:
    """Return a list of the bytes freed, kept (with their holders) and reserved, and the limit."""
    ledger = view.ledger
    before = ledger.baseline_bytes
    said = [f"<b>{bytes_text(before)}</b> held before" if before else "no memory was held before"]
    if ledger.freed_bytes:
        said[0] += f", of which <b>{bytes_text(ledger.freed_bytes)}</b> freed"
    kept = view.kept(3)
    if kept.total_bytes:
        rows = "; ".join(f"{bytes_text(row.bytes)} {_who(row)}" for row in kept.rows)
        more = f"; {kept.rest_holders:,} more" if kept.rest_holders else ""
        said.append(f"<b>{bytes_text(kept.total_bytes)}</b> allocated during the measurement stayed: {rows}{more}")
    else:
        said.append("all memory allocated during the measurement was freed")
    for _, asked in view.shortages[-1:]:
        said.append(f"<em>out of memory: <b>{bytes_text(asked)}</b> more requested</em>")
    if view.knows_reserved:
        said.append(f"the allocator reserved up to <b>{bytes_text(ledger.peak_reserved_bytes)}</b>")
    limit = limit_of(view, budget_bytes)
    if limit:
        said.append(f"{limit[1]}: <b>{bytes_text(limit[0])}</b>")
    return f"<ul>{''.join(f'<li>{words}</li>' for words in said)}</ul>"


def _who(row: Holding) -> str:
    name = f"<code>{escape(_short(row.owner, 40))}</code> " if row.owner != UNOWNED else ""
    return f'{name}<span class="tk-dim">({escape(_short(row.words, 90))})</span>'


# ---- the cells of a session


def cell_html(cell: CellUse, budget_bytes: int | None) -> str:
    """Return a cell's picture. Its events are read from disk and not kept, because all cells together may be large."""
    try:
        use = cell.read()
    except ToolkitError as error:  # its file is gone or damaged, but other cells can be shown
        return f'<p class="tk-note">{escape(str(error))}</p>'
    return line_html(use, budget_bytes, is_open=True)


def peak_words(rows: Sequence[CellRow]) -> str:
    """Return the largest peak of cells in words; that of GPU memory, which some or all of them may not have used."""
    uncounted = dict.fromkeys(HOST_ONLY[row.device] for row in rows if row.device in HOST_ONLY)
    if uncounted and all(row.device in HOST_ONLY for row in rows):
        return " and ".join(uncounted)
    return f"peak {bytes_text(max((row.peak_bytes for row in rows), default=0))}"


def session_html(rows: Sequence[CellRow], details: Sequence[str], budget_bytes: int | None = None) -> str:
    """Return the cells as bars without a script. A click on a bar (or the arrow keys) shows the cell's entry of `details`."""
    name = f"tk{secrets.token_hex(4)}"  # radio buttons with the same name form one group across the whole page
    peak = max((row.peak_bytes for row in rows), default=0)
    budget = budget_bytes if budget_bytes and budget_bytes <= NEAR * peak else 0
    top = max(peak, budget, 1) * 1.06  # room for the budget's label
    chosen = max(range(len(rows)), key=lambda i: rows[i].peak_bytes, default=0)
    bars = "".join(_cell_bar(row, n, top, name, n == chosen, budget_bytes) for n, row in enumerate(rows))
    step = step_of(top)
    ticks = "".join(
        f'<i style="bottom:{100 * n / top:.2f}%"><span>{bytes_text(n) if n else "0"}</span></i>'
        for n in range(0, int(top) + 1, step)
    )
    line = (
        f'<i class="tk-budget" style="bottom:{100 * budget / top:.2f}%"><span>budget {bytes_text(budget)}</span></i>'
        if budget
        else ""
    )
    rules = "".join(
        f"#{name}:has(.tk-c{n}:checked) .tk-d{n}" + ("," if n + 1 < len(rows) else "{display:block}") for n in range(len(rows))
    )
    seen = re.compile(r"<style>.*?</style>", re.DOTALL)
    shown = "".join(
        f'<div class="tk-cell tk-d{n}">{_cell_title(row)}{seen.sub("", text)}</div>'
        for n, (row, text) in enumerate(zip(rows, details, strict=True))
    )
    keys = '<span><i class="tk-base"></i>held before</span><span><i class="tk-above"></i>its peak above that</span>'
    keys += '<span><i class="tk-end"></i>held at its end</span><span><em>!</em> ended with an error</span>'
    return (
        f'{style()}<style>{rules}</style><div class="tk-memory tk-session" id="{name}" data-lm-suppress-shortcuts="true">'
        f'<div class="tk-title">{plural(len(rows), "cell")}, {peak_words(rows)}</div>'
        f'<div class="tk-keys">{keys}<span class="tk-dim">Click a cell to see its details.</span></div>'
        f'<div class="tk-chart"><div class="tk-ticks">{ticks}{line}</div>'
        f'<div class="tk-bars" role="radiogroup" aria-label="Cells">{bars}</div></div>{shown}</div>'
    )  # fmt: skip


def _cell_bar(row: CellRow, n: int, top: float, name: str, checked: bool, budget_bytes: int | None) -> str:
    """Return a bar that is a radio button: gray up to the bytes held before, colored up to the peak, a line at the end."""
    base = min(row.baseline_bytes, row.peak_bytes)
    heights = (100 * base / top, 100 * (row.peak_bytes - base) / top, 100 * row.end_bytes / top)
    bad = row.status == "error" or bool(budget_bytes and row.peak_bytes > budget_bytes)
    found = f"peak {bytes_text(row.peak_bytes)}, kept {signed(row.end_bytes - row.baseline_bytes)}"
    said = escape(f"cell {row.number}, {row.status}: {HOST_ONLY.get(row.device, found)}: {row.title}")
    return (
        f'<label class="{"tk-bad" if bad else "tk-fine"}" title="{said}">'
        f'<input type="radio" name="{name}" class="tk-c{n}" aria-label="{said}" data-lm-suppress-shortcuts="true"'
        f'{" checked" if checked else ""}>'
        f'<span class="tk-column"><i class="tk-base" style="height:{heights[0]:.2f}%"></i>'
        f'<i class="tk-above" style="height:{heights[1]:.2f}%"></i>'
        f'<i class="tk-end" style="bottom:{heights[2]:.2f}%"></i></span>'
        f'<span class="tk-number">{row.number}{"" if row.status == "ok" else "!"}</span></label>'
    )  # fmt: skip


def _cell_title(row: CellRow) -> str:
    status = "" if row.status == "ok" else f" <em>{escape(row.status)}</em>"
    code = f" <code>{escape(_short(row.title, 110))}</code>" if row.title else ""
    return f'<div class="tk-sub">cell {row.number}{status}{code}</div>'
