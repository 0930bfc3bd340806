"""A plan as a notebook shows it: predicted bytes phase by phase against the budget, what each lever saves, what fits where.

Static HTML without script; every figure is in the Plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from toolkit.notebook.model import COLOURS
from toolkit.planning import Phase, Plan
from toolkit.units import bytes_text

_CSS = Path(__file__).with_name("model.css")
_WIDTH, _HEIGHT, _LEFT, _TOP, _FOOT = 470, 210, 62, 14, 44
PARTS = ("CUDA", "weights", "state", "cloned state", "activations", "scratch", "plain matrix", "staging", "host")
NOTE = (
    "Predicted from shapes, not measured: weights and states by the allocator's own rules; CUDA's memory and what compilers "
    "try kernels on are estimates."
)


def html(plan: Plan) -> str:
    """The whole of it: both timelines, levers, what doesn't fit, and the catalogue."""
    where = "this CPU" if plan.card is None else plan.card.name
    about = f" context {plan.context:,}{f', keys and values in {plan.kv}' if plan.kv else ''}"
    told = "".join(f'<p class="tk-no"><span class="tk-fits">{escape(str(problem))}</span></p>' for problem in plan.problems)
    cap = plan.budget_bytes, plan.run_budget_bytes if plan.card is not None else None
    memory = " (host memory)" if plan.card is None else ""
    titles = f"Exporting{memory}", f"Running{memory}"
    pictures = "".join(
        f'<div style="flex: 1 1 330px">{_picture(title, phases, limit, plan)}</div>'
        for title, phases, limit in zip(titles, (plan.export, plan.run), cap, strict=True)
    )
    parts = [
        f'<div class="tk-title">{escape(plan.model)} for {escape(where)}<span class="tk-dim">{escape(about)}</span></div>',
        told or '<p class="tk-yes">Fits.</p>',
        f'<div style="display: flex; flex-wrap: wrap; gap: 8px 20px">{pictures}</div>{_keys(plan)}',
        _levers(plan),
        _cards(plan) if plan.card is not None else "",
        f'<p class="tk-note">{NOTE}</p>',
    ]
    return f'<style>{_CSS.read_text(encoding="utf-8")}</style><div class="tk-model tk-plan">{"".join(parts)}</div>'


def _colour(part: str) -> str:
    return COLOURS[PARTS.index(part) % len(COLOURS)]


def _shown(phase: Phase, plan: Plan) -> dict[str, int]:
    return {"host": phase.host_bytes} if plan.card is None else phase.parts


def _picture(title: str, phases: Iterable[Phase], limit: int | None, plan: Plan) -> str:
    """Stacked steps, one a phase, and the limit as a dashed line."""
    held = [(phase.name, _shown(phase, plan)) for phase in phases]
    most = max(sum(parts.values()) for _, parts in held)
    top = 1.08 * max(most, limit if limit is not None and limit < 4 * most else 0)
    wide, high = (_WIDTH - _LEFT - 8) / len(held), _HEIGHT - _TOP - _FOOT

    def y(n_bytes: float) -> float:
        return _TOP + high * (1 - n_bytes / top)

    drawn = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(top * f):.1f}" y2="{y(top * f):.1f}" stroke="var(--tk-line)"/>'
        f'<text x="{_LEFT - 6}" y="{y(top * f) + 4:.1f}" text-anchor="end" fill="var(--tk-dim)">{bytes_text(top * f)}</text>'
        for f in (0.0, 0.5, 1.0)
    ]
    for number, (name, parts) in enumerate(held):
        x, below = _LEFT + number * wide, 0
        for part, size in parts.items():
            drawn.append(
                f'<rect x="{x:.1f}" y="{y(below + size):.1f}" width="{wide - 1:.1f}" height="{high * size / top:.1f}" '
                f'fill="{_colour(part)}"><title>{escape(name)}: {escape(part)} {bytes_text(size)}</title></rect>'
            )
            below += size
        middle, foot = x + wide / 2, _HEIGHT - _FOOT
        first, _, second = name.partition(" ")
        texts = ((first, 13, "fg"), (second, 25, "fg"), (bytes_text(below), 38, "dim"))
        drawn += [
            f'<text x="{middle:.1f}" y="{foot + down}" text-anchor="middle" fill="var(--tk-{colour})">{escape(text)}</text>'
            for text, down, colour in texts
        ]
    said = ""
    if limit is not None:
        what = "budget" if phases is plan.export else "the card has"
        said = f", {what} {bytes_text(limit)}"
        if limit <= top:
            drawn.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="var(--tk-bad)" '
                f'stroke-width="2" stroke-dasharray="6 4"><title>{what} {bytes_text(limit)}</title></line>'
            )
    label = f"{title}, predicted: at most {bytes_text(most)}{said}"
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}" style="width: 100%; font-size: 11px">'
    return f'<div class="tk-sub">{escape(label)}</div>{svg}{"".join(drawn)}</svg>'


def _keys(plan: Plan) -> str:
    there = {part for phase in (*plan.export, *plan.run) for part in _shown(phase, plan)}
    keys = "".join(f'<span><i style="background: {_colour(part)}"></i>{part}</span>' for part in PARTS if part in there)
    return f'<div class="tk-keys">{keys}</div>'


def _levers(plan: Plan) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(pull.lever.replace("_", " "))}</th><td>{bytes_text(pull.saves_bytes)}</td>'
        f'<td class="tk-left">{escape(pull.why)}</td></tr>'
        for pull in plan.pulled
    )
    head = '<tr><th scope="col">lever</th><th scope="col">saves</th><th scope="col" class="tk-left">why</th></tr>'
    table = f'<div class="tk-scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    return f'<div class="tk-sub">Levers that are pulled: without each the peak would be higher by</div>{table}' if rows else ""


def _cards(plan: Plan) -> str:
    """The catalogue: which card can export this within the budget, which can run it, up to which context."""
    rows = []
    for row in plan.fits_on():
        longest = row["longest_context"]
        cells = [
            bytes_text(row["memory_bytes"]),
            _yes(row["can_export"]),
            _yes(row["can_run"]),
            f"{longest:,}" if longest else "none",
        ]
        rows.append(f'<tr><th scope="row">{escape(row["gpu"])}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>')
    names = ("GPU", "memory", "can export", f"can run at {plan.context:,}", "longest context")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    table = f'<div class="tk-scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return f"<details><summary>What fits on which GPU</summary>{table}</details>"


def _yes(fits: bool) -> str:
    return '<span class="tk-yes">yes</span>' if fits else '<span class="tk-no"><span class="tk-fits">no</span></span>'
