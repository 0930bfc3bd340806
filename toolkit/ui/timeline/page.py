"""A self-contained HTML page with the timelines and copies tables of one or several traces. It makes no network request.

The file holds the events in compact columns, the same timeline.js as the notebook widget, and page.js, which does the work of
view.py in JavaScript. Without scripts it shows a still picture. Writing it needs no front-end package.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.errors import ToolkitError
from toolkit.core.files import replace_text
from toolkit.trace.columns import KINDS
from toolkit.trace.differences import typical_step
from toolkit.trace.events import Trace
from toolkit.ui.assets import script_of, style_of
from toolkit.ui.timeline import overview
from toolkit.ui.timeline.ranks import MAX_LINKS
from toolkit.ui.timeline.track import Track, named, tracks_of
from toolkit.ui.timeline.view import MAX_SEGMENTS, MAX_STEPS, Scene

_SMALL = 1 << 16  # bytes; smaller columns aren't compressed, for browsers without DecompressionStream
_NARROW = {
    "kind": "u1", "clock": "u1", "pinned": "i1", "device": "i2", "rank": "i2", "stream": "i4", "step": "i4", "cell": "i4",
    "name": "i4", "where": "i4", "owner": "i4", "operation": "i4", "algorithm": "i4", "group": "i4", "group_size": "i4",
    "peer": "i2", "layer": "i2",
}  # fmt: skip


def write_page(traces: Any, path: str | os.PathLike[str], other: Any = None, *, title: str | None = None) -> Path:
    """Write the page of `traces` to `path` and return its path. The file is replaced atomically.

    `traces` is a Trace or a Run, a sequence of them or of (title, trace) pairs, or a mapping from titles to them. If there are
    several, menus choose the ones to show and compare. `other` is shown next to the first from the start. Raises ToolkitError
    if `traces` is empty or the file can't be written.
    """
    pairs = _pairs(traces, other)
    shown = (0, len(pairs) - 1) if other is not None else None
    return _write(path, pairs, title, shown)


def write_comparison(comparison: Any, path: str | os.PathLike[str]) -> Path:
    """Write the page of a result of `tk.compare`: its table and the timelines of all runs, any two of them side by side."""
    extra = f"<section><h2>Strategies</h2>{comparison._repr_html_()}</section>"
    return _write(path, _pairs(comparison.titled(), None), "Decode strategies compared", extra=extra)


def _pairs(traces: Any, other: Any) -> list[tuple[str, Trace]]:
    if isinstance(traces, Mapping):
        given = [named(thing, str(title)) for title, thing in traces.items()]
    elif isinstance(traces, Sequence):
        given = [named(thing[1], str(thing[0])) if isinstance(thing, tuple) else named(thing) for thing in traces]
    else:
        given = [named(traces)]
    given += [named(other)] if other is not None else []
    if not given:
        raise ToolkitError("a page of timelines", "no traces", "Give it at least one Trace or Run")
    return given


def _write(
    path: str | os.PathLike[str], pairs: list[tuple[str, Trace]], title: str | None, shown: tuple[int, int] | None = None,
    extra: str = "",
) -> Path:  # fmt: skip
    tracks = tracks_of(pairs)
    shown = shown or slowest_and_fastest(tracks)
    text = _document(tracks, title or f"Timeline: {', '.join(track.title for track in tracks)}", extra, shown)
    return replace_text(path, text, ToolkitError)


def slowest_and_fastest(tracks: Sequence[Track]) -> tuple[int, int] | None:
    """Return the indices, in order, of the two tracks whose typical steps differ most in time; None if there is one track."""
    times = {}
    for i, track in enumerate(tracks):
        step = track.step_range(typical_step([track.steps_table]) or 0)
        if step:
            times[i] = step[2] - step[1]
    if len(times) < 2:
        return (0, 1) if len(tracks) > 1 else None
    first, second = sorted((min(times, key=lambda i: times[i]), max(reversed(times), key=lambda i: times[i])))
    return first, second


def _openings(tracks: list[Track]) -> dict[str, Any]:
    """Return the first step and the sentence (`Scene.opening`) of each track ("1") and each pair ("0,1")."""
    numbers = [(i, *j) for i in range(len(tracks)) for j in [(), *((other,) for other in range(len(tracks)))]]
    return {",".join(map(str, chosen)): Scene([tracks[i] for i in chosen]).opening for chosen in numbers}


def _document(tracks: list[Track], title: str, extra: str, shown: tuple[int, int] | None) -> str:
    limits = {"segments": MAX_SEGMENTS, "steps": MAX_STEPS, "links": MAX_LINKS, "kinds": list(KINDS)}
    data = json.dumps(
        {"traces": [_packed(track) for track in tracks], "limits": limits, "openings": _openings(tracks)}, separators=(",", ":")
    )
    data = data.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
    still = overview.html(Scene([tracks[i] for i in shown or (0,)]))
    head = "".join(
        f"<tr><th scope='row'>{escape(track.title)}</th><td>{escape(str(track.trace.meta.get('device', 'unknown')))}</td>"
        f"<td>{escape(track.clock)}</td><td>{_versions(track.trace) or '-'}</td></tr>"
        for track in tracks
    )
    sheets = "".join(_sheet_html(overview.copies_sheet(track), is_open=len(tracks) == 1) for track in tracks)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{escape(title)}</title><link rel="icon" href="data:,">
{style_of("timeline/timeline.css", "page.css")}</head>
<body><main class="tk-page"><h1>{escape(title)}</h1>
<section aria-label="Timeline">{_choices(tracks, shown)}<div id="tk-place"></div>
<noscript>{still}</noscript></section>
{extra}<section><h2>Runs</h2>
<table class="tk-head"><thead><tr><th scope="col">run</th><th scope="col">device</th><th scope="col">times</th>
<th scope="col">versions</th></tr></thead><tbody>{head}</tbody></table></section>
<section><h2>Copies per step</h2>{sheets}</section></main>
<script type="application/json" id="tk-data">{data}</script>
<script type="module">
{script_of("timeline/ranks.js", "timeline/timeline.js", "timeline/page.js")}</script></body></html>
"""


def _versions(trace: Trace) -> str:
    found = trace.meta.get("versions")
    if isinstance(found, Mapping):
        return escape(", ".join(f"{name} {version}" for name, version in found.items()))
    return escape(", ".join(f"{key} {trace.meta[key]}" for key in ("toolkit", "torch", "cuda") if key in trace.meta))


def _choices(tracks: list[Track], shown: tuple[int, int] | None) -> str:
    if shown is None:
        return ""
    first, second = (
        "".join(
            f"<option{' selected' if i == chosen else ''} value={i}>{escape(track.title)}</option>"
            for i, track in enumerate(tracks)
        )
        for chosen in shown
    )
    return (
        f'<p class="tk-choose"><label>Show <select id="tk-a">{first}</select></label> '
        f'<label>next to <select id="tk-b"><option value="">nothing</option>{second}</select></label></p>'
    )


def _sheet_html(sheet: dict[str, Any], is_open: bool) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in sheet["columns"])
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(text)}</td>" for text in row[1:])}</tr>'
        for row in sheet["rows"]
    )
    note = f"<p>{escape(sheet['note'])}</p>" if sheet["note"] else ""
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
    summary = f"<summary>{escape(sheet['title'])}</summary>"
    return f"<details class='tk-sheet'{' open' if is_open else ''}>{summary}{note}{table}</details>"


def _packed(track: Track) -> dict[str, Any]:
    """Return a track (JSON-able), with the columns of its events packed into base64."""
    trace, total = track.trace, sum(len(lane.rows) for lane in track.lanes)
    rows, lanes = np.zeros(total, np.int64), np.zeros(total, np.uint8 if len(track.lanes) < 256 else np.int16)
    at = 0
    for number, lane in enumerate(track.lanes):
        rows[at : at + len(lane.rows)], lanes[at : at + len(lane.rows)] = lane.rows, number
        at += len(lane.rows)
    order = np.argsort(trace["start_ns"][rows], kind="stable")
    rows, lanes = rows[order], lanes[order]
    wide = {name: trace[f"{name}{unit}"][rows] for name, unit in (("start", "_ns"), ("dur", "_ns"), ("bytes", ""))}
    wide["start"] = np.diff(wide["start"], prepend=0)
    wide["dur"] = np.maximum(wide["dur"], 0)
    columns: list[tuple[str, NDArray[Any]]] = [("lane", lanes)]
    for name, values in wide.items():
        columns += [(f"{name}_low", (values & 0xFFFFFFFF).astype("<u4")), (f"{name}_high", (values >> 32).astype("<i4"))]
    seq = trace["seq"][rows]
    columns += [("seq_low", (seq & 0xFFFFFFFF).astype("<u4")), ("seq_high", (seq >> 32).astype("<i4"))]
    columns += [(name, trace[name][rows].astype(f"<{dtype}")) for name, dtype in _NARROW.items()]
    spec, blob = [], []
    for name, values in columns:
        constant = int(values[0]) if total and (values == values[0]).all() else None
        spec.append([name, values.dtype.str[1:], constant])
        blob.append(values.tobytes() if constant is None else b"")
    raw = b"".join(blob)
    deflated = len(raw) > _SMALL
    data = zlib.compress(raw, 6) if deflated else raw
    return {
        "meta": track.meta, "n": total, "columns": spec, "deflated": deflated, "data": base64.b64encode(data).decode(),
        "strings": trace.strings, "source": trace.meta.get("source") or {}, "start_ns": track.start_ns, "end_ns": track.end_ns,
        "steps": track.steps.tolist(), "step_names": track.step_names, "links": _links(track, rows),
    }  # fmt: skip


def _links(track: Track, rows: NDArray[np.int64]) -> list[list[Any]]:
    """Return [position of the last rank, [lane, event of the page, start], ...] of each collective of several ranks."""
    if track.links is None:
        return []
    number = np.zeros(len(track.trace), np.int64)
    number[rows] = np.arange(len(rows))
    return track.links.points(np.arange(len(track.links.late)), number[track.links.row], track.links.start)
