"""The display of a tuning: configs by GPUs as a heat table, reasons for failures, winners, and losses with other winners.

Static HTML without a script: radio buttons choose the figure that the cells show, and a click on a cell opens the details of
its config on every GPU. Modelled figures are hatched. The text form is `repr(tuning)`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import fmean

from toolkit.core.units import bytes_text, plural, seconds_text
from toolkit.kernels.base import Config
from toolkit.tune.results import Row, Tuning
from toolkit.ui.assets import style_of
from toolkit.ui.figures.roofline import roofline, share_of_roof

MOST_CONFIGS = 40  # rows of all heat tables together, the best configs first
FEWEST_CONFIGS = 10  # rows of each heat table at least
MOST_SHAPES = 8  # problems that get a table
MOST_REASONS = 30
HOPELESS = 10.0  # multiple of the winner's time that failed configs count as when rows are sorted
SIGNS = {"ok": "✓", "slow": "✓", "untried": "○", "wrong": "✗", "failed": "!", "excluded": "⊘"}
WORDS = {"ok": "correct", "slow": "correct, slow", "untried": "fits, not run"}
_NEAR = (1.02, 1.1, 1.25, 1.6, 2.5)  # multiples of the winner's time: the limits of the color steps
_MODELLED = "Hatched: modelled, not measured. "


@dataclass(frozen=True)
class Figure:
    """A figure that cells can show: its text, its color step (0 to 5), and a note that explains the color."""

    name: str
    note: str
    text: Callable[[Row], str]
    heat: Callable[[Row, _Scale], int]


@dataclass(frozen=True)
class _Scale:
    """The values that a table's figures are compared with: each GPU's winner, and the largest value of each figure."""

    winners: dict[str, Row | None]
    most_shared: int
    most_registers: int
    most_spilled: int


def html(tuning: Tuning) -> str:
    """Return the full display, with one section per problem."""
    name = f"tk{secrets.token_hex(4)}"  # radio buttons with the same name form one group across the whole page
    shown, rest = tuning.shapes[:MOST_SHAPES], tuning.shapes[MOST_SHAPES:]
    parts = [f'<div class="tk-title">{escape(_title(tuning))}</div>']
    alone = len(tuning.shapes) == 1  # else the chooser stands above all sections
    if shown:
        parts += [_counts(tuning), "" if alone else _chooser(name)]
    for n, shape in enumerate(shown):
        part = Tuning(tuple(row for row in tuning.rows if f"{row.kernel} {row.shape}" == shape))
        most = max(MOST_CONFIGS // len(shown), FEWEST_CONFIGS)
        body = _section(part, f"{name}-{n}", most, _chooser(name) if alone else "")
        head = f"<summary>{escape(shape)}</summary>"
        parts.append(body if alone else f"<details{' open' * (n == 0)}>{head}{body}</details>")
    if rest:
        parts.append(_note(f"{len(rest)} more problems are in to_pandas(): {', '.join(rest)}"))
    parts += [_note(f"Note: {note}") for note in tuning.notes]
    style = style_of("figures/tuning.css")
    return f'{style}<div class="tk-tuning" data-lm-suppress-shortcuts="true">{"".join(parts)}</div>'


def _title(tuning: Tuning) -> str:
    if not tuning.rows:
        return "Nothing was tuned."
    configs = len({row.config for row in tuning.rows})
    what = tuning.shapes[0] if len(tuning.shapes) == 1 else f"{len(tuning.shapes)} problems"
    return f"{what}: {plural(configs, 'config')} on {plural(len(tuning.gpus), 'GPU')}"


def _word(verdict: str) -> str:
    return WORDS.get(verdict, verdict)


def _note(text: str) -> str:
    return f'<p class="tk-note">{escape(text)}</p>'


def _counts(tuning: Tuning) -> str:
    """Return the number of configs per verdict, with its sign and word."""
    found = Counter(row.verdict for row in tuning.rows)
    said = (f'<span class="tk-{v}"><b>{SIGNS[v]}</b> {n} {_word(v)}</span>' for v in SIGNS if (n := found[v]))
    star = "<span><b>★</b> the winner of its GPU</span>" if any(row.usable for row in tuning.rows) else ""
    return f'<div class="tk-counts">{"".join(said)}{star}</div>'


def _chooser(name: str) -> str:
    buttons = "".join(
        f'<label><input type="radio" name="{name}" class="tk-c{n}"{" checked" * (n == 1)}>{figure.name}</label>'
        for n, figure in enumerate(FIGURES, 1)
    )
    notes = "".join(f"<i>{escape(figure.note)}</i>" for figure in FIGURES)
    return (
        f'<div class="tk-choose" role="radiogroup" aria-label="Figure in the cells">{buttons}</div>'
        f'<p class="tk-note tk-figure-notes">{notes} Click a cell to see its details.</p>'
    )


def _section(part: Tuning, name: str, most: int, chooser: str) -> str:
    winners = {gpu: part.best(gpu) for gpu in part.gpus}
    lines = "".join(f"<span>{escape(part.line(gpu))}\n</span>" for gpu in part.gpus)
    return "".join([
        '<div class="tk-sub">Each GPU\'s winner, as code</div>',
        f'<div class="tk-scroll"><pre>{lines}</pre></div>',
        '<div class="tk-sub">Every config</div>', chooser, _heat_table(part, winners, name, most), _reasons(part.rows),
        _fastest(part, winners),
        _losses(part, winners) if len(part.gpus) > 1 and any(winners.values()) else "",
    ])  # fmt: skip


def _heat_table(part: Tuning, winners: dict[str, Row | None], name: str, most: int) -> str:
    cells = {(row.config, row.gpu): row for row in part.rows}
    configs = _ordered(part.rows, winners)
    varying = _varying(configs)
    scale = _Scale(
        winners,
        max((row.shared_bytes or 0 for row in part.rows), default=0),
        max((row.registers or 0 for row in part.rows), default=0),
        max((row.spill_bytes or 0 for row in part.rows), default=0),
    )
    head = "".join(f'<th scope="col">{escape(gpu)}</th>' for gpu in part.gpus)
    body = []
    won = {best.config for best in winners.values() if best is not None}
    shown_configs = [config for n, config in enumerate(configs) if n < most or config in won]
    for n, config in enumerate(shown_configs):
        rows = [cells.get((config, gpu)) for gpu in part.gpus]
        said = escape(_config_text(config, varying))
        opener = f'<label><input type="checkbox" id="{name}-{n}" aria-label="Details of {said}"> {said}</label>'
        shown = "".join(_cell(row, scale, f"{name}-{n}") for row in rows)
        details = "".join(f"<td>{_details(row) if row is not None else ''}</td>" for row in rows)
        body.append(f'<tr class="tk-row"><th scope="row" title="{escape(repr(config))}">{opener}</th>{shown}</tr>')
        body.append(f'<tr class="tk-more"><th scope="row">details</th>{details}</tr>')
    same = ", ".join(f"{key}={value}" for key, value in configs[0].to_dict().items() if key not in varying)
    notes = [f"All configs have {same}."] if same else []
    if len(shown_configs) < len(configs):
        notes.append(f"The best {len(shown_configs)} of {len(configs)} configs; all are in to_pandas().")
    table = f'<table><thead><tr><th scope="col">config</th>{head}</tr></thead><tbody>{"".join(body)}</tbody></table>'
    return f'<div class="tk-scroll">{table}</div>{_note(" ".join(notes)) if notes else ""}'


def _ordered(rows: Sequence[Row], winners: dict[str, Row | None]) -> list[Config]:
    """Return the configs by mean time relative to the winners, the fastest first. Ties keep the order of the kernel's space."""
    times: dict[Config, list[float]] = {}
    for row in rows:
        times.setdefault(row.config, []).append(_ratio(row, winners[row.gpu]))
    return sorted(times, key=lambda config: fmean(times[config]))


def _ratio(row: Row, best: Row | None) -> float:
    """Return the time of a config as a multiple of the winner's time, or HOPELESS if either is unknown."""
    if not row.usable or row.ns is None or best is None or not best.ns:
        return HOPELESS
    return min(row.ns / best.ns, HOPELESS)


def _varying(configs: Sequence[Config]) -> list[str]:
    """Return the parameters in which the configs differ, or all parameters of a single config."""
    every = [config.to_dict() for config in configs]
    names = dict.fromkeys(name for one in every for name in one)
    return [name for name in names if len(every) == 1 or len({one.get(name) for one in every}) > 1]


def _config_text(config: Config, names: Sequence[str]) -> str:
    return " ".join(f"{name}={value}" for name, value in config.to_dict().items() if name in names)


def _cell(row: Row | None, scale: _Scale, opens: str) -> str:
    if row is None:
        return "<td>-</td>"
    won = scale.winners[row.gpu] is row
    sign = "★ " if won else "" if row.usable else f"{SIGNS[row.verdict]} "
    texts = []
    for figure in FIGURES:
        text, level = figure.text(row), figure.heat(row, scale) if row.usable else 0
        kind = f' class="tk-h{level}"' if level else ""
        texts.append(f"<i{kind}>{'' if figure is VERDICT else sign}{escape(text)}</i>")
    modelled = " tk-modelled" if row.clock == "modelled" and row.usable else ""
    kinds = f"tk-{row.verdict}{modelled}{' tk-won' if won else ''}"
    return f'<td class="{kinds}" title="{escape(_tip(row))}"><label for="{opens}">{" ".join(texts)}</label></td>'


def _tip(row: Row) -> str:
    why = f": {row.reason}" if row.reason else ""
    would = "" if row.usable else "would take "
    time = f", {would}{seconds_text(row.ns / 1e9)} {row.clock}" if row.ns is not None else ""
    return f"{row.gpu}, {row.config!r}: {_word(row.verdict)}{time}{why}"


def _details(row: Row) -> str:
    """Return the details that the cells don't show: code sizes, limits, the place under the roofline, and the full reason."""
    lines = []
    if row.ptx_bytes is not None and row.sass_bytes is not None:
        lines += [f"PTX {bytes_text(row.ptx_bytes)}", f"SASS {bytes_text(row.sass_bytes)}"]
    if row.registers is not None:
        lines.append(f"{row.registers} registers")
    if row.occupancy is not None:
        lines.append(f"SM {100 * row.occupancy:.0f} % full, limited by {row.occupancy_limit}")
    if row.spread_ns is not None:
        lines.append(f"± {seconds_text(row.spread_ns / 2e9)}")
    if row.cosine is not None:
        lines.append(f"cosine {row.cosine:.6f}")
    if row.bytes and row.flops:
        per_byte = row.flops / row.bytes
        lines.append(f"{per_byte:,.0f} operations per byte" if per_byte >= 100 else f"{per_byte:.2g} operations per byte")
    if row.bound and row.usable:
        lines.append(f"bound by {row.bound}")
    share = share_of_roof(row)
    if share is not None:
        lines.append(f"{100 * share:.0f} % of the roof, {row.clock}")
    lines += [row.reason] if row.reason else []
    return "".join(f"<div>{escape(line)}</div>" for line in lines) + (roofline(row) if share is not None else "")


def _reasons(rows: Sequence[Row]) -> str:
    """Return the reasons why configs failed, each once, with the GPUs and configs concerned."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in sorted((row for row in rows if not row.usable), key=lambda row: list(SIGNS).index(row.verdict)):
        groups.setdefault((row.verdict, row.reason), []).append(row)
    if not groups:
        return ""
    names = _varying(list(dict.fromkeys(row.config for row in rows)))
    items = []
    for (verdict, reason), found in list(groups.items())[:MOST_REASONS]:
        gpus, configs = dict.fromkeys(row.gpu for row in found), dict.fromkeys(row.config for row in found)
        some = [_config_text(config, names) for config in list(configs)[:3]] + ["..."] * (len(configs) > 3)
        where = f"{', '.join(gpus)}: {'; '.join(filter(None, some))}" if any(some) else ", ".join(gpus)
        sign = f'<b class="tk-{verdict}">{SIGNS[verdict]} {verdict}</b>'
        items.append(f"<li>{sign} {escape(reason or 'no reason was recorded')} <span>({escape(where)})</span></li>")
    if len(groups) > MOST_REASONS:
        items.append(f"<li>{len(groups) - MOST_REASONS} more reasons are in to_pandas()</li>")
    count = Counter(row.verdict for row in rows if not row.usable)
    head = ", ".join(f"{n} {_word(verdict)}" for verdict, n in count.items())
    return f"<details{' open' * (len(items) <= 6)}><summary>Unusable: {head}</summary><ul>{''.join(items)}</ul></details>"


def _fastest(part: Tuning, winners: dict[str, Row | None]) -> str:
    """Return a table of each GPU's winner and of the faster configs that are wrong or don't fit; "" if there are none."""
    rejected = [v for v in ("wrong", "excluded") if any(row.verdict == v and row.ns is not None for row in part.rows)]
    if not rejected:
        return ""
    names = _varying(list(dict.fromkeys(row.config for row in part.rows)))
    head = "".join(f'<th scope="col">{SIGNS[v]} {v}</th>' for v in rejected)
    body = []
    for gpu in part.gpus:
        rows = [winners[gpu], *(part.fastest(gpu, verdict) for verdict in rejected)]
        body.append(f'<tr><th scope="row">{escape(gpu)}</th>{"".join(_timed_config(row, names) for row in rows)}</tr>')
    heads = f'<thead><tr><th scope="col">GPU</th><th scope="col">★ correct</th>{head}</tr></thead>'
    return (
        '<div class="tk-sub">The fastest correct config, and the fastest that is wrong or doesn\'t fit</div>'
        f'<div class="tk-scroll tk-fastest"><table>{heads}<tbody>{"".join(body)}</tbody></table></div>'
    )


def _timed_config(row: Row | None, names: Sequence[str]) -> str:
    if row is None or row.ns is None:
        return "<td>-</td>"
    modelled = ' class="tk-modelled"' if row.clock == "modelled" else ""
    said, time = escape(_config_text(row.config, names) or repr(row.config)), _unbroken(seconds_text(row.ns / 1e9))
    return f'<td class="tk-{row.verdict}" title="{escape(_tip(row))}"><b{modelled}>{time}</b> {said}</td>'


def _losses(part: Tuning, winners: dict[str, Row | None]) -> str:
    """Return a table of the time lost when the GPU of the row runs the winner of the GPU of the column."""
    head = "".join(f'<th scope="col">{escape(gpu)}</th>' for gpu in part.gpus)
    cells = {(row.config, row.gpu): row for row in part.rows}
    body = []
    for gpu in part.gpus:
        there = {other: cells.get((best.config, gpu)) if best is not None else None for other, best in winners.items()}
        shown = [_loss(part.loss(gpu, other), there[other]) for other in part.gpus]
        body.append(f'<tr><th scope="row">{escape(gpu)}</th>{"".join(shown)}</tr>')
    heads = f'<thead><tr><th scope="col">runs ↓ the winner of →</th>{head}</tr></thead>'
    hatched = _MODELLED if any(best is not None and best.clock == "modelled" for best in winners.values()) else ""
    return (
        '<div class="tk-sub">Time lost when a GPU runs the winner of another GPU</div>'
        f'<div class="tk-scroll tk-losses"><table>{heads}<tbody>{"".join(body)}</tbody></table></div>'
        f"{_note(hatched + '0: as fast as its own winner.')}"
    )


def _loss(loss: float | str, row: Row | None) -> str:
    """Return one cell. `row` is the other GPU's winner, timed on this GPU."""
    if isinstance(loss, str):
        rejected = row.verdict if row is not None and not row.usable else ""
        text = f"{SIGNS[rejected]} {rejected}" if rejected else "unknown"
        return f'<td class="tk-{rejected or "none"}" title="{escape(loss)}">{text}</td>'
    level = sum(1 + loss > near for near in (1.02, 1.1, 1.25))
    modelled = " tk-modelled" if row is not None and row.clock == "modelled" else ""
    more = f"+{100 * loss:.1f} %" if loss < 0.0995 else f"+{100 * loss:.0f} %" if loss < 3 else f"{1 + loss:.3g} ×"
    text = "0" if loss < 0.0005 else _unbroken(more)
    return f'<td class="tk-l{level}{modelled}">{text}</td>'


def _time(row: Row) -> str:
    return _unbroken(seconds_text(row.ns / 1e9)) if row.ns is not None and row.usable else _word(row.verdict)


def _unbroken(text: str) -> str:
    """Return a number and its unit without a place for a line break, for narrow tables."""
    return text.replace(" ", "\u00a0")


def _nearness(row: Row, scale: _Scale) -> int:
    return sum(_ratio(row, scale.winners[row.gpu]) <= near for near in _NEAR)


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _of_most(value: int | None, most: int) -> int:
    return round(5 * (value or 0) / most) if most else 0


def _error_level(row: Row) -> int:
    """Return 0 for an error of at most 1e-5 of the largest value, up to 5 for 1e-2."""
    return sum((row.max_error or 0) > 10 ** (power / 2 - 5) for power in range(0, 10, 2))


MORE = "a stronger color means more."
VERDICT = Figure(
    "verdict", "Verdict: correct configs were compared with the reference.",
    lambda row: f"{SIGNS[row.verdict]} {_word(row.verdict)}", lambda row, scale: 0,
)  # fmt: skip
FIGURES = (
    Figure(
        "time",
        f"Time: a stronger color means nearer to the winner of its GPU. {_MODELLED}Measured configs win over modelled ones.",
        _time, _nearness,
    ),
    Figure(
        "shared memory", f"Bytes of shared memory per block: {MORE}",
        lambda row: _count(row.shared_bytes), lambda row, scale: _of_most(row.shared_bytes, scale.most_shared),
    ),
    Figure(
        "registers", f"Registers per thread, at most 255: {MORE}",
        lambda row: _count(row.registers), lambda row, scale: _of_most(row.registers, scale.most_registers),
    ),
    Figure(
        "spills", f"Bytes per thread that spilled from registers to memory: {MORE}",
        lambda row: _count(row.spill_bytes), lambda row, scale: _of_most(row.spill_bytes, scale.most_spilled),
    ),
    Figure(
        "occupancy", f"Share of an SM's threads that can be resident: {MORE}",
        lambda row: "-" if row.occupancy is None else f"{100 * row.occupancy:.0f} %",
        lambda row, scale: round(5 * (row.occupancy or 0)),
    ),
    Figure(
        "error", f"Largest difference from the reference, as a share of its largest value (-: not run): {MORE}",
        lambda row: "-" if row.max_error is None else f"{row.max_error:.1e}", lambda row, scale: _error_level(row),
    ),
    VERDICT,
)  # fmt: skip
