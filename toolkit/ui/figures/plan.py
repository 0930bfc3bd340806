"""The display of a plan: predicted bytes of each phase against the budget, savings of levers, bytes by rank, GPUs that fit.

`package_html` draws the same picture for a package, with the measured bytes as a line. Both return static HTML without a
script; all figures come from the Plan or from the package's manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from toolkit.core.units import bytes_text
from toolkit.planning.plans import CONTEXT_NOTE, Phase, Plan, is_little, left, verdict
from toolkit.ui.assets import style_of
from toolkit.ui.figures import model
from toolkit.ui.memory.drawing import step_of

if TYPE_CHECKING:
    from toolkit.exporting.exporter import Package

_WIDTH, _HEIGHT, _LEFT, _TOP, _FOOT = 470, 210, 62, 14, 44
PARTS = (
    "CUDA", "weights", "state", "cloned state", "activations", "scratch", "PyTorch", "copied table", "plain matrix", "staging",
    "host", "attention",
)  # fmt: skip
COLORS = (*model.COLORS, "#00707a", "#b3123a", "#566500", "#4a4fc4", "#7b2fbe")  # one per part
NOTE = f"Predicted from shapes. Weights and state follow the allocator's rounding rules. {CONTEXT_NOTE}"


def html(plan: Plan) -> str:
    """Return the full display: both pictures, levers, problems, and the catalogue."""
    about = f" context {plan.context:,}{f', keys and values in {plan.kv}' if plan.kv else ''}"
    told = "".join(
        f'<p class="tk-no"><span class="tk-fits">{escape(_sentence(str(problem)))}</span></p>' for problem in plan.problems
    )
    cap = plan.budget_bytes, plan.run_budget_bytes if plan.card is not None else None
    memory = " (host memory)" if plan.card is None else ""
    titles = f"Exporting{memory}", f"Running{memory}"
    whole = plan.card is None or plan.run_budget_bytes == plan.card.memory_bytes
    limits = ("budget", cap[0]), ("GPU memory" if whole else "budget", cap[1])
    held = ([(phase.name, _shown(phase, plan.card is None)) for phase in phases] for phases in (plan.export, plan.run))
    pictures = "".join(
        f'<div style="flex: 1 1 330px">{_picture(title, steps, *limit)}</div>'
        for title, steps, limit in zip(titles, held, limits, strict=True)
    )
    parts = [
        f'<div class="tk-title">{escape(plan.model)} for {escape(plan.where)}<span class="tk-dim">{escape(about)}</span></div>',
        told or f'<p class="tk-yes">{escape(_sentence(verdict(plan)))}.</p>',
        f'<p class="tk-note">{escape(_sentence(plan.unquantized))}.</p>' if plan.unquantized else "",
        f'<div style="display: flex; flex-wrap: wrap; align-items: end; gap: 8px 20px">{pictures}</div>',
        _keys(part for phase in (*plan.export, *plan.run) for part in _shown(phase, plan.card is None)),
        _levers(plan),
        _ranks(plan) if len(plan.ranks) > 1 else "",
        _cards(plan) if plan.card is not None else "",
        f'<p class="tk-note">{NOTE}</p>',
    ]
    return _boxed(parts)


def package_html(package: Package) -> str:
    """Return the predicted and the measured bytes of each phase of an export, and the package's files."""
    manifest, measured = package.manifest, package.measured["phases"]
    target, plan = manifest["target"], manifest["plan"]
    on_cpu = target["device"] == "cpu"
    where = "the CPU" if on_cpu else f"{target['gpu']} (compute capability {target['capability']})"
    kv = f", keys and values in {manifest['kv']}" if manifest["kv"] else ""
    files = sum(entry["bytes"] for entry in manifest["files"].values())
    predicted = {phase["name"]: _shown(Phase(**phase), on_cpu) for phase in plan["export"]}
    known = [phase for phase in measured if phase["phase"] in predicted]
    held = [(phase["phase"], predicted[phase["phase"]]) for phase in known]
    picture = _picture("Exporting", held, "budget", plan["budget_bytes"], [_measured(phase, on_cpu) for phase in known])
    title = (
        f'<div class="tk-title">{escape(str(package.path))}<span class="tk-dim"> for {escape(where)}, context '
        f"{manifest['context']:,}{escape(kv)}, {bytes_text(files)} in {len(manifest['files'])} files</span></div>"
    )
    alone = all(phase.get("gpu_used_by") == "process" for phase in known)
    of_gpu = f"the GPU's memory in use by {'this process' if alone else 'all processes'}"
    note = (
        f'<p class="tk-note">The line shows {"the host memory in use" if on_cpu else of_gpu}, sampled during the export. '
        "All phases are drawn equally wide, whatever time they took.</p>"
    )
    parts = [
        title,
        f'<div style="max-width: 560px">{picture}</div>' if held else "",
        _keys(part for _, parts in held for part in parts),
        _phases(measured, predicted, on_cpu),
        note,
    ]
    return _boxed(parts)


def _measured(phase: dict[str, Any], on_cpu: bool) -> list[tuple[float, int]]:
    """Return (share of the phase's time, bytes in use) of each sample."""
    seconds = max(phase["seconds"], 1e-3)
    return [(min(at / seconds, 1.0), host if on_cpu else gpu) for at, host, gpu in phase["curve"]]


def _phases(measured: list[dict[str, Any]], predicted: dict[str, dict[str, int]], on_cpu: bool) -> str:
    rows: list[list[str]] = []
    for phase in measured:
        most = phase["host_peak_bytes"] if on_cpu else phase["gpu_used_bytes"]
        parts = predicted.get(phase["phase"])
        cells = [f"{phase['seconds']:.1f} s", "" if parts is None else bytes_text(sum(parts.values())), bytes_text(most)]
        cells += [] if on_cpu else [bytes_text(phase["gpu_reserved_bytes"]), bytes_text(phase["host_peak_bytes"])]
        rows.append([escape(phase["phase"]), *cells])
    names = ["phase", "time", "predicted", "measured"] + ([] if on_cpu else ["reserved by PyTorch", "host"])
    return _table(names, rows)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _boxed(parts: Iterable[str]) -> str:
    return f'{style_of("figures/model.css")}<div class="tk-model tk-plan">{"".join(parts)}</div>'


def _color(part: str) -> str:
    return COLORS[PARTS.index(part)]


def _shown(phase: Phase, on_cpu: bool) -> dict[str, int]:
    return {"host": phase.host_bytes} if on_cpu else phase.parts


def _picture(
    title: str, held: list[tuple[str, dict[str, int]]], what: str, limit: int | None,
    measured: Sequence[list[tuple[float, int]]] = (),
) -> str:  # fmt: skip
    """Draw stacked bars, one per phase, the limit (named `what`) as a dashed line, and the measured bytes as a line."""
    most = max(sum(parts.values()) for _, parts in held)
    reached = max((used for curve in measured for _, used in curve), default=0)
    top = 1.08 * max(most, reached, limit if limit is not None and limit < 4 * most else 0)
    wide, high = (_WIDTH - _LEFT - 8) / len(held), _HEIGHT - _TOP - _FOOT

    def y(n_bytes: float) -> float:
        return _TOP + high * (1 - n_bytes / top)

    drawn = [
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(n):.1f}" y2="{y(n):.1f}" stroke="var(--tk-line)"/>'
        f'<text x="{_LEFT - 6}" y="{y(n) + 4:.1f}" text-anchor="end" fill="var(--tk-dim)">{bytes_text(n)}</text>'
        for n in range(0, int(top) + 1, step_of(top))
    ]
    for number, (name, parts) in enumerate(held):
        x, below = _LEFT + number * wide, 0
        for part, size in parts.items():
            drawn.append(
                f'<rect x="{x:.1f}" y="{y(below + size):.1f}" width="{wide - 1:.1f}" height="{high * size / top:.1f}" '
                f'fill="{_color(part)}"><title>{escape(name)}: {escape(part)} {bytes_text(size)}</title></rect>'
            )
            below += size
        middle, foot = x + wide / 2, _HEIGHT - _FOOT
        first, _, second = name.partition(" ")
        texts = ((first, 13, "fg"), (second, 25, "fg"), (bytes_text(below), 38, "dim"))
        drawn += [
            f'<text x="{middle:.1f}" y="{foot + down}" text-anchor="middle" fill="var(--tk-{color})">{escape(text)}</text>'
            for text, down, color in texts
        ]
    for number, curve in enumerate(measured):
        points = [(_LEFT + (number + share) * wide, y(used)) for share, used in curve]
        if points:  # the last sample holds until the end of the phase
            path = " ".join(f"{x:.1f},{at:.1f}" for x, at in [*points, (_LEFT + (number + 1) * wide - 1, points[-1][1])])
            drawn += [
                f'<polyline points="{path}" fill="none" stroke="var(--tk-{color})" stroke-width="{width}"/>'
                for color, width in (("bg", 5), ("fg", 2))  # the edge makes the line visible on any color
            ]
    said = f", measured at most {bytes_text(reached)}" if reached else ""
    if limit is not None:
        said += f", {what} {bytes_text(limit)}"
        if limit <= top:
            drawn.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y(limit):.1f}" y2="{y(limit):.1f}" stroke="var(--tk-bad)" '
                f'stroke-width="2" stroke-dasharray="6 4"><title>{what} {bytes_text(limit)}</title></line>'
            )
    label = f"{title}: predicted at most {bytes_text(most)}{said}"
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}" style="width: 100%; font-size: 11px">'
    return f'<div class="tk-sub">{escape(label)}</div>{svg}{"".join(drawn)}</svg>'


def _keys(parts: Iterable[str]) -> str:
    there = set(parts)
    keys = "".join(f'<span><i style="background: {_color(part)}"></i>{part}</span>' for part in PARTS if part in there)
    return f'<div class="tk-keys">{keys}</div>'


def _levers(plan: Plan) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(pull.lever.replace("_", " "))}</th><td>{bytes_text(pull.saves_bytes)}</td>'
        f'<td class="tk-left tk-words">{escape(pull.why)}</td></tr>'
        for pull in plan.pulled
    )
    head = '<tr><th scope="col">lever</th><th scope="col">saves</th><th scope="col" class="tk-left">why</th></tr>'
    table = f'<div class="tk-scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'
    return f'<div class="tk-sub">Levers in use, with the bytes that each saves at the peak</div>{table}' if rows else ""


def _ranks(plan: Plan) -> str:
    """Return the table of bytes by rank and purpose."""
    table = plan.by_rank()
    rows = [[str(rank), *map(bytes_text, row)] for rank, row in zip(table.index, table.to_numpy().tolist(), strict=True)]
    names = [name.removesuffix("_bytes").replace("cuda", "CUDA") for name in table.columns]  # as in the picture
    return f'<div class="tk-sub">Each rank, while it processes a prompt</div>{_table(["rank", *names[:-1], "sum"], rows)}'


def _cards(plan: Plan) -> str:
    """Return the table of GPUs that can export within the budget, that can run the model, and their longest context."""
    rows = []
    for row in plan.fits_on():
        longest = row["longest_context"]
        tight = row["can_run"] and is_little(row["spare_bytes"], row["memory_bytes"])
        runs = _yes(row["can_run"]) + (f", leaves {left(row['spare_bytes'], row['memory_bytes'])}" if tight else "")
        cells = [_yes(row["can_export"]), runs, f"{longest:,}" if longest else "none"]
        rows.append([escape(row["gpu"]), bytes_text(row["memory_bytes"]), *cells])
    table = _table(["GPU", "memory", "can export", f"can run at {plan.context:,}", "longest context"], rows)
    many = f", {len(plan.ranks)} of each" if len(plan.ranks) > 1 else ""
    return f"<details><summary>Which GPUs can export and run it{many}</summary>{table}</details>"


def _table(names: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. The first cell of each row names it."""
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for first, *cells in rows
    )
    return f'<div class="tk-scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _yes(fits: bool) -> str:
    return '<span class="tk-yes">yes</span>' if fits else '<span class="tk-no"><span class="tk-fits">no</span></span>'
