"""A self-contained HTML page of records of `python -m toolkit.bench.decode`. It makes no network request.

The file holds Plotly's script once. The tables are plain HTML, so that the figures' numbers can be read without scripts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from toolkit.core.errors import ToolkitError
from toolkit.core.files import replace_text
from toolkit.core.units import bytes_text, seconds_text
from toolkit.trace.columns import COPY_KINDS
from toolkit.ui.assets import style_of
from toolkit.ui.figures.kernel_table import kernel_table, step_times
from toolkit.ui.figures.speed import (
    Rates,
    Record,
    breakdown_figure,
    colors_of,
    roofline_figure,
    rows_of,
    speed_figure,
    strategies_of,
    works,
)  # fmt: skip

TITLE = "Decode speed"
# The colors of text and grid follow the theme of the page, also when it changes while the page is open.
_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const figures = [...document.querySelectorAll(".tk-figure")];
const theme = () => {
  const ink = dark.matches ? "#e7ebf0" : "#1b2430", grid = dark.matches ? "#323b47" : "#dde3ea";
  const axis = { gridcolor: grid, zerolinecolor: grid, linecolor: grid };
  return { font: { color: ink }, hoverlabel: { bgcolor: dark.matches ? "#1b2027" : "#ffffff", font: { color: ink } }, axis };
};
const draw = () => {
  for (const place of figures) {
    const { data, layout } = JSON.parse(place.nextElementSibling.textContent), { font, hoverlabel, axis } = theme();
    const styled = { ...layout, hoverlabel, font: { ...layout.font, ...font } };
    for (const name of ["xaxis", "yaxis"]) styled[name] = { ...layout[name], ...axis };
    Plotly.react(place, data, styled, { responsive: true, displaylogo: false });
  }
};
draw();
dark.addEventListener("change", draw);
"""


def write_speed_page(
    records: Sequence[Record], path: str | os.PathLike[str], others: Mapping[str, Rates] | None = None, *, name: str = "",
    source: str = "",
) -> Path:  # fmt: skip
    """Write the page of `records` to `path`, atomically, and return its path.

    `others` are measured rates of the engine `name` by model; `source` says where they come from. Raises ToolkitError if there
    are no records or the file can't be written.
    """
    if not records:
        raise ToolkitError("a page of decode speeds", "no records", "Give it at least one record")
    others, colors = others or {}, colors_of(records)
    parts = [_section(record, others.get(record["model"]), name, colors) for record in records]
    compared = any(record["model"] in others for record in records)
    note = f'<p class="tk-note">{escape(source)}</p>' if compared and source else ""
    roofline = (
        "<section><h2>Bytes per token and speed</h2>"
        '<p class="tk-note">A token reads every weight that it uses and the cache once. No run is above the line: its rate is '
        f"the read bandwidth divided by these bytes.</p>{_figure(roofline_figure(records))}</section>"
    )
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{TITLE}</title><link rel="icon" href="data:,">
{style_of("page.css", "figures/speed.css")}</head>
<body><main class="tk-page tk-speed"><h1>{TITLE}</h1>{"".join(parts)}{roofline}{note}</main>
<script>{get_plotlyjs()}</script>
<script type="module">{_SCRIPT}</script></body></html>
"""
    return replace_text(path, text, ToolkitError)


def _section(record: Record, other: Rates | None, name: str, colors: Mapping[str, str]) -> str:
    rates = [row for row in rows_of(record) if any(works(row, each) for each in row["strategies"])]
    drawn = f"{_figure(speed_figure(record, other, name, colors))}{_rates(record)}" if rates else ""
    return f"<section><h2>{escape(_title(record))}</h2>{_about(record)}{drawn}{_steps(record)}</section>"


def _steps(record: Record) -> str:
    """Return the figure and the table of one step of each context, kernel by kernel; nothing without breakdowns."""
    broken = {row["context"]: row["breakdown"] for row in rows_of(record) if row.get("breakdown", {}).get("kernels")}
    if not broken:
        return ""
    head, rows = kernel_table(record)
    cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) for row in rows]
    body = [f'<tr><th scope="row">{escape(row[0])}</th>{rest}</tr>' for row, rest in zip(rows, cells, strict=True)]
    named = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    notes = [f"{context:,} tokens: a step takes {step_times(step)}." for context, step in broken.items()]
    notes.append(
        "A kernel's time begins at the end of the kernels before it, so all times add up to the step. The difference to the "
        "time that its bytes take at the read bandwidth is what a faster kernel could gain at most."
    )
    return (
        f"<h3>One step of <code>{escape(next(iter(broken.values()))['strategy'])}</code>, kernel by kernel</h3>"
        f"{_figure(breakdown_figure(record))}"
        f'<table class="tk-rates tk-kernels"><thead><tr>{named}</tr></thead><tbody>{"".join(body)}</tbody></table>'
        + "".join(f'<p class="tk-note">{escape(note)}</p>' for note in notes)
    )


def _title(record: Record) -> str:
    stored = ", ".join(part for part in (record["scheme"], record["kv"] and f"KV cache in {record['kv']}") if part)
    return f"{record['model']}{f' ({stored})' if stored else ''}"


def _about(record: Record) -> str:
    modelled = record["clock"] == "modelled"
    where = f"{'virtual ' if modelled else ''}{record['gpu'] or record['device']}"
    commit = f", commit {record['commit'][:7]}" if record["commit"] else ""
    said = f"{where}, PyTorch {record['torch']}, {record['date']}{commit}. "
    if modelled:
        said += "All times are modelled, not measured. Copies, kernels and memory are those of a real GPU."
    else:
        said += f"Rates are medians of {record['repeats']} runs of {record['tokens']} tokens, measured without recording."
    said += f" {record['note']}" if "note" in record else ""
    return f'<p class="tk-note{" tk-modelled" if modelled else ""}">{escape(said)}</p>'


_HEAD = (
    "context", "strategy", "tok/s", "first token", "of the read bandwidth", "kernels per step", "nodes",
    "H2D, D2H, D2D per step", "host per step", "peak memory",
)  # fmt: skip


def _rates(record: Record) -> str:
    """Return the table of all contexts and strategies, and of the prefills."""
    lines, notes = [], [f"{row['context']:,} tokens: {row['why_not']}." for row in record["rows"] if "why_not" in row]
    for row in rows_of(record):
        names = [name for name in strategies_of([row]) if works(row, name)]
        best = max(names, key=lambda name: row["strategies"][name]["tok_per_s"], default=None)
        for name in names:
            first = f'<th scope="row">{row["context"]:,}</th><td><code>{escape(name)}</code></td>'
            lines.append((f"<tr{' class=tk-best' if name == best else ''}>{first}", _cells(row, row["strategies"][name])))
        notes += [
            f"{row['context']:,} tokens, {name}: {found['why_not']}."
            for name, found in row["strategies"].items()
            if "why_not" in found
        ]
        notes += [_prefill(row)] if "prefill" in row else []
    known = [i for i in range(len(_HEAD) - 2) if any(cells[i].strip("-, ") for _, cells in lines)]  # the record has it
    body = [f"{first}{''.join(f'<td>{escape(cells[i])}</td>' for i in known)}</tr>" for first, cells in lines]
    head = "".join(f'<th scope="col">{name}</th>' for name in (*_HEAD[:2], *(_HEAD[2 + i] for i in known)))
    table = f'<table class="tk-rates"><thead><tr>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return table + "".join(f'<p class="tk-note">{escape(note)}</p>' for note in notes)


def _prefill(row: Mapping[str, Any]) -> str:
    found = row["prefill"]
    return (
        f"{row['context']:,} tokens: prefill in {seconds_text(found['seconds'])} ({found['tok_per_s']:,.0f} tok/s); "
        f"each decoded token reads {bytes_text(row['bytes_per_token'])}."
    )


def _cells(row: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the cells of a strategy, with "-" for what the record doesn't have."""
    spread = f" ± {50 * found['spread']:.1f} %" if len(found["tok_per_s_all"]) > 1 else ""
    share, nodes = found["bandwidth_percent"], found["nodes"]
    kernels, copies = found.get("kernels_per_step"), [found.get("copies_per_step", {}).get(kind) for kind in COPY_KINDS]
    crossed = ["-" if each is None else _copies(each) for each in copies]
    return [
        f"{found['tok_per_s']:,.1f}{spread}", seconds_text(found["first_token_s"]), "-" if share is None else f"{share:.1f} %",
        "-" if kernels is None else f"{kernels:.0f}", "-" if nodes is None else f"{nodes:,}", ", ".join(crossed),
        seconds_text(found["host_us_per_step"] / 1e6), bytes_text(max(found["peak_bytes"], row["prefill"]["peak_bytes"])),
    ]  # fmt: skip


def _copies(found: Mapping[str, Any]) -> str:
    return f"{found['count']:g}" + (f" ({bytes_text(found['bytes'])})" if found["count"] else "")


def _figure(figure: go.Figure) -> str:
    """Return the place of a figure, and its data right after it."""
    drawn = json.loads(figure.to_json())
    drawn["layout"].pop("template", None)
    data = json.dumps({"data": drawn["data"], "layout": drawn["layout"]}, separators=(",", ":"))
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    return f'<div class="tk-figure"></div><script type="application/json">{data}</script>'
