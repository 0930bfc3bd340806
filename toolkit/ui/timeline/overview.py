"""A trace without a canvas: a still picture, text, the facts of one event, and the copies as a table.

Front ends without widgets (nbviewer, a terminal) show these, and so does a page without scripts.
"""

from __future__ import annotations

import base64
from html import escape
from textwrap import wrap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.core.units import bytes_text, seconds_text
from toolkit.trace.columns import CLOCKS, COPY_KINDS, KINDS
from toolkit.trace.copies import copies_per_step
from toolkit.trace.differences import brief_time
from toolkit.ui.pictures import in_the_dark, placed
from toolkit.ui.timeline.lanes import Lane
from toolkit.ui.timeline.ranks import facts as communication_facts
from toolkit.ui.timeline.track import Track, string_of
from toolkit.ui.timeline.view import MODELLED, SUBPIXELS, Scene, lane_segments

COLORS = {
    "launch": "#8a8f2a", "sync": "#c0508f", "mark": "#5f6f52", "kernel": "#78879b", "collective": "#6b1030",
    "h2d": "#d55e00", "d2h": "#0072b2", "d2d": "#00845f", "p2p": "#4527a0", "memset": "#a8760b",
}  # fmt: skip
DARK = {
    "launch": "#c3c86a", "sync": "#f08cc0", "mark": "#a9bd97", "kernel": "#8b98a9", "collective": "#d8323c",
    "h2d": "#ff944d", "d2h": "#56b4e9", "d2d": "#35c79b", "p2p": "#e3d5ff", "memset": "#e6b84a",
}  # fmt: skip
_INK, _GROUND = "#1b2430", "#eef1f4"
_STYLE = in_the_dark({_INK: "#e7ebf0", _GROUND: "#1b2027", **{COLORS[kind]: color for kind, color in DARK.items()}})
DIRECTIONS = {"h2d": "host to device", "d2h": "device to host", "d2d": "within the device", "p2p": "device to device"}
_GUTTER, _PLOT, _LANE, _BINS = 150, 810, 20, 270
_CHARACTERS = 125  # of a line across the picture


def svg(scene: Scene) -> str:
    """Return the step that the scene opens on as an SVG, 970 pixels wide and at most about 40 KB; without steps, all events.

    Modelled times are hatched.
    """
    opening = scene.opening
    low, high = scene.first_range(opening["step"])
    y, parts = 4, []
    if opening["sentence"]:
        for line in wrap(opening["sentence"], _CHARACTERS):
            parts.append(_text(0, y + 14, line, bold=True))
            y += 20
        y += 6
    for track, origin in zip(scene.tracks, scene.origins(opening["step"]), strict=True):
        parts.append(_text(0, y + 14, f"{track.title}: {_caption(track)}", bold=True))
        y += 22
        lanes = track.lanes_in((low + origin, high + origin))
        segments = lane_segments(lanes, (low + origin, high + origin), _PLOT, _BINS * max(1, len(lanes)), _BINS)
        heads = {head["rank"]: head["text"] for head in track.meta["ranks"]}
        for lane, segment, shown in zip(lanes, segments, track.meta["lanes"], strict=True):
            if shown["rank"] in heads:
                parts.append(_text(0, y + 14, heads.pop(shown["rank"])))
                y += 20
            parts.append(_text(0, y + 14, f"{shown['label']} {shown['within']}".strip()))
            parts.append(f'<path fill="{_GROUND}" d="M{_GUTTER} {y}h{_PLOT}v{_LANE}h-{_PLOT}z"/>')
            parts.extend(_bars(lane, segment, y))
            y += _LANE + 3
        y += 8
    for t in _ticks(low, high):
        parts.append(_text(_GUTTER + (t - low) / (high - low) * _PLOT, y + 10, brief_time(t)))
    kinds = sorted({place.kind for track in scene.tracks for place in track.places})
    hatches = "".join(
        f'<pattern id="{kind}" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<path fill="{COLORS[kind]}" fill-opacity=".38" d="M0 0h5v5H0z"/>'
        f'<path fill="{COLORS[kind]}" d="M0 0h2v5H0z"/></pattern>'
        for kind in kinds
    )
    label = escape("; ".join(f"{track.title}: {_caption(track)}" for track in scene.tracks))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 970 {y + 18}" width="970" role="img" aria-label="{label}" '
        f'font-family="system-ui,sans-serif" font-size="12" fill="{_INK}" style="background:#fff;max-width:100%">'
        f"{_STYLE}<defs>{hatches}</defs>{''.join(parts)}</svg>"
    )


def _ticks(low: float, high: float) -> list[int]:
    """Return about five times between `low` and `high` that are 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / 5
    power = 10 ** np.floor(np.log10(raw))
    tick = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [round(k * tick) for k in range(int(np.ceil(low / tick)), int(np.floor((high - (high - low) / 20) / tick)) + 1)]


def _caption(track: Track) -> str:
    device = track.trace.meta.get("device", "unknown device")
    return f"{device}, {track.clock} time, {seconds_text((track.end_ns - track.start_ns) / 1e9)}"


def _text(x: float, y: float, text: str, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}"{weight}>{escape(text)}</text>'


def _bars(lane: Lane, segment: dict[str, NDArray[Any]], y: int) -> list[str]:
    """Return the bars as one path per height (there are four heights), with adjacent bars joined."""
    x0 = np.round(segment["x0"] / SUBPIXELS).astype(int) + _GUTTER
    x1 = np.maximum(np.round(segment["x1"] / SUBPIXELS).astype(int) + _GUTTER, x0 + 1)
    height = np.ceil(segment["level"] / 255 * 4).astype(int)
    modelled = bool((segment["kind"].astype(int) & MODELLED).any())
    fill = f"url(#{lane.kind})" if modelled else COLORS[lane.kind]
    paths = []
    for quarter in range(1, 5):
        runs: list[list[int]] = []
        for start, end in zip(x0[height == quarter].tolist(), x1[height == quarter].tolist(), strict=True):
            if runs and start <= runs[-1][1]:
                runs[-1][1] = max(end, runs[-1][1])
            else:
                runs.append([start, end])
        high = _LANE * quarter // 4
        data = "".join(f"M{a} {y + _LANE - high}h{b - a}v{high}h{a - b}z" for a, b in runs)
        paths += [f'<path fill="{fill}" d="{data}"/>'] if data else []
    return paths


def text(scene: Scene) -> str:
    """Return a few lines for a terminal."""
    opening = scene.opening
    lines = [_answer(opening)] if opening["sentence"] else []
    for track in scene.tracks:
        steps = track.meta["steps"]
        lines.append(f"{track.title}: {_caption(track)}" + (f", steps {steps[0]} to {steps[1]}" if steps else ""))
        lines += [f"  {row['label']} {row['place']}: {row['count']:,} {row['bytes']}".rstrip() for row in track.meta["lanes"]]
        lines += [f"  {note}" for note in track.notes()]
    return "\n".join(lines)


def _answer(opening: dict[str, Any]) -> str:
    return str(opening["sentence"]) + ("" if opening["step"] is None else f" (step {opening['step']})")


def html(scene: Scene) -> str:
    """Return the picture and its totals as HTML without a script.

    The picture is an image, not inline SVG, because front ends remove inline SVG from notebooks that aren't trusted.
    """
    rows = [
        f"<tr><td>{escape(track.title)}</td><td>{escape((row['label'] + ' ' + row['place']).strip())}</td>"
        f"<td>{row['count']:,}</td><td>{row['bytes']}</td></tr>"
        for track in scene.tracks
        for row in track.meta["lanes"]
    ]
    opening = scene.opening
    shown = [_answer(opening)] if opening["sentence"] else []
    captions = [*shown, *(f"{track.title}: {_caption(track)}" for track in scene.tracks)]
    notes = [note for track in scene.tracks for note in track.notes()]
    head = "<tr><th>run</th><th>lane</th><th>events</th><th>bytes</th></tr>"
    table = f"<table>{head}{''.join(rows)}</table>" if rows else ""
    words = "".join(f"<p>{escape(words)}</p>" for words in dict.fromkeys([*captions, *notes]))
    picture = base64.b64encode(svg(scene).encode()).decode()
    image = f'<img alt="{escape("; ".join(captions))}" src="data:image/svg+xml;base64,{picture}">'
    return placed(f"{image if rows else ''}{words}{table}")


def facts(track: Track, row: int) -> list[list[str]]:
    """Return the facts of one event as [label, text] pairs, or an empty list if there is no such row."""
    trace = track.trace
    if not 0 <= row < len(trace):
        return []
    get = {name: int(column[row]) for name, column in trace.columns.items()}
    kind, modelled = KINDS[get["kind"]], CLOCKS[get["clock"]]
    where = string_of(trace, "where", row)
    lines: list[tuple[str, str | None]] = [
        ("name", string_of(trace, "name", row)),
        ("kind", f"{kind} ({DIRECTIONS[kind]})" if kind in DIRECTIONS else kind),
        ("bytes", _size_text(get["bytes"])),
        ("caused by", where),
        ("source", (trace.meta.get("source") or {}).get(where)),
        ("duration", f"{seconds_text(get['dur_ns'] / 1e9)}, {modelled}"),
        ("start", f"{seconds_text((get['start_ns'] - track.start_ns) / 1e9)} after the first event"),
        *communication_facts(track, row),
        ("step", str(get["step"]) if get["step"] >= 0 else "outside all steps"),
        ("layer", str(get["layer"]) if get["layer"] >= 0 else None),
        ("stream", str(get["stream"]) if get["stream"] >= 0 else None),
        ("device", f"GPU {get['device']}" if get["device"] >= 0 else "host"),
        ("host memory", {0: "pageable", 1: "pinned"}.get(get["pinned"])),
        ("cell", str(get["cell"]) if get["cell"] >= 0 else None),
        ("rank", str(get["rank"]) if get["rank"] or len(track.ranks) > 1 else None),
        ("owner", string_of(trace, "owner", row)),
    ]
    return [[label, text] for label, text in lines if text is not None]


def _size_text(size: int) -> str | None:
    """Return a size in words; None for 0, which means that an event has no size or that it is not known."""
    return f"{bytes_text(size)} ({size:,} B)" if size >= 1024 else f"{size} B" if size else None


def copies_sheet(track: Track, limit: int = 300) -> dict[str, Any]:
    """Return the first `limit` rows of the copies per step as text, for a table that screen readers can read."""
    frame = copies_per_step(track.trace)
    clock = f"host wait ({track.clock})"
    several = "rank" in frame.columns
    kinds = (*COPY_KINDS, "p2p") if "p2p_count" in frame.columns else COPY_KINDS
    copied = [f"{k.upper()} {what}" for k in kinds for what in ("copies", "bytes")]
    copied += ["collectives", "collective bytes"] if several else []
    columns = ["step", *(["rank"] if several else []), "kernels", "launches", *copied, clock]
    rows = []
    for row in frame.head(limit).itertuples(index=False):
        copied_kinds = (*kinds, "collective") if several else kinds
        copies = [
            text for k in copied_kinds for text in _count_and_bytes(getattr(row, f"{k}_count"), getattr(row, f"{k}_bytes"))
        ]
        step = "outside" if row.step == -1 else str(row.step)
        launches = f"{row.launches:,}" if row.launches >= 0 else "not recorded"
        rows.append(
            [
                step,
                *([str(row.rank)] if several else []),
                f"{row.kernels:,}",
                launches,
                *copies,
                brief_time(1e3 * row.host_wait_us),
            ]
        )
    note = f"the first {limit:,} of {len(frame):,} steps" if len(frame) > limit else ""
    return {"title": f"{track.title}: copies per step", "note": note, "columns": columns, "rows": rows}


def _count_and_bytes(count: int, size: int) -> tuple[str, str]:
    return f"{count:,}", bytes_text(size)
