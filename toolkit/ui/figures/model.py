"""The display of a model: its memory, the cost of one token, and the highest speed on each GPU of the catalogue.

`html` returns about 20 KB of static HTML without a script, `text` lines for a terminal. All figures come from a `Costs`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape

from toolkit.core.units import GiB, bytes_text, count_text, decimal_text
from toolkit.models.costs import Cost
from toolkit.models.model import Model
from toolkit.planning.costs import Bound, Costs, costs_of, label, period, runs
from toolkit.ui.assets import style_of
from toolkit.ui.figures.treemap import Area, treemap
from toolkit.weights.schemes import SCHEMES

# White text is readable on each of them, and each stands out from a white and from a dark page.
COLORS = ("#0b62b0", "#a04000", "#00684a", "#6b3fa0", "#7d5a00", "#9c2f6d", "#4f5b6b")
_SHOWN_LENGTHS = (0, 4096, 32768, 131072)
_UNITS = (
    "GB/s: the bandwidth as in the datasheet, in powers of 1,000. GiB/s: the same in powers of 1,024, as all sizes here are; "
    "this is the one to divide."
)
NOTE = (
    "Modelled, not measured. Limit: the bandwidth in the datasheet divided by the bytes that a token reads (or the time of the "
    "operations, if that is longer); no program is faster at batch size 1, and a small model is much slower, because it waits "
    "for kernel launches. Reachable: with the share of that bandwidth that a streaming kernel reaches. {how} "
    'Fits: weights and state fit in the GPU\'s memory, without workspace; "to N" is the longest context that fits.'
)


def text_of(model: Model) -> str:
    """Return the `repr` of a model."""
    return text(costs_of(model))


def html_of(model: Model) -> str:
    """Return the HTML that a notebook shows for a model."""
    return html(costs_of(model))


def text(costs: Costs) -> str:
    """Return about twenty lines for a terminal."""
    lines = [f"{_head(costs)}{_place(costs)}", _held_as(costs)]
    if costs.layers:
        lines.append(f"layers: {pattern_text(costs.pattern())}")
    lines += ["", f"one token{_after(costs)} reads {_reads(costs)} and computes {decimal_text(costs.flops, 'FLOP')}"]
    lines += [_state_text(costs)] if costs.exact else []
    lines += ["", *_aligned([_PART_HEAD, *(_part_row(costs, part) for part in costs.parts)]), ""]
    lines.append("speed limit, modelled (bandwidth in the datasheet / bytes that a token reads):")
    rows = [("gpu", "tok/s", "reachable", "memory", "fits")]
    rows += [
        (b.card.key, _rate(b.tok_per_s), _rate(b.reached_tok_per_s), bytes_text(b.card.memory_bytes), _fits(costs, b))
        for b in costs.bounds()
    ]
    return "\n".join([*lines, *_aligned(rows)])


def html(costs: Costs) -> str:
    """Return the full display: figures, layers, treemap, parts, contexts and GPUs."""
    kinds = costs.by_kind()
    colors = {kind: COLORS[min(i, len(COLORS) - 1)] for i, kind in enumerate(kinds)}
    place = escape(_place(costs))
    parts = [
        f'<div class="tk-title">{escape(_head(costs))}<span class="tk-dim">{place}</span></div>',
        _facts(costs),
        f'<div class="tk-sub">Weight formats</div>{_stack(kinds, colors)}',
        _layers(costs),
        f'<div class="tk-sub">Where the bytes are</div>{_treemap(costs, colors)}',
        f'<div class="tk-sub">What one token costs{escape(_after(costs))}</div>{_parts(costs)}',
        _contexts(costs),
        '<div class="tk-sub">Highest tokens per second on every GPU of the catalogue (batch size 1)</div>',
        gpus_html(costs),
    ]
    return f'{style_of("figures/model.css")}<div class="tk-model">{"".join(parts)}</div>'


def pattern_text(pattern: tuple[str, ...]) -> str:
    """Return the layers in words, such as "10 × (5 attention (sliding) + mlp, 1 attention (full) + mlp)"."""
    first = period(pattern)
    if len(runs(first)) > 4:  # no clear pattern: count each kind instead
        return ", ".join(f"{n} × {name}" for name, n in Counter(pattern).items())
    said = ", ".join(f"{n} × {name}" for n, name in runs(first))
    if len(runs(first)) == 1:
        return f"{len(pattern)} × {first[0]}"
    whole, rest = divmod(len(pattern), len(first))
    left = "".join(f", {n} × {name}" for n, name in runs(pattern[whole * len(first) :])) if rest else ""
    return said if whole == 1 and not rest else f"{whole} × ({said}){left}"


def _head(costs: Costs) -> str:
    layers = f"{costs.layers} layers, " if costs.layers else ""
    return f"{costs.name}: {layers}{count_text(costs.parameters)} parameters, {bytes_text(costs.weight_bytes)}"


def _place(costs: Costs) -> str:
    return " (shapes only, nothing is loaded)" if costs.place == "meta" else f" on {costs.place}"


def _after(costs: Costs) -> str:
    if not costs.exact:
        return ""
    return f" after {costs.context:,} tokens" if costs.context else " with an empty context"


def _held_as(costs: Costs) -> str:
    return "weight formats: " + ", ".join(f"{_kind(kind)} {bytes_text(n)}" for kind, (_, n) in costs.by_kind().items())


def _kind(kind: str) -> str:
    return f"{kind} ({SCHEMES[kind].bits_per_weight:.3g} bits per weight)" if kind in SCHEMES else kind


def _reads(costs: Costs) -> str:
    if not costs.exact:
        return f"{bytes_text(costs.read_bytes)} (every weight once; the size of its state is unknown)"
    return f"{bytes_text(costs.read_bytes)} of weights and {bytes_text(costs.state_bytes)} of state"


def _state_text(costs: Costs) -> str:
    fixed = f"; {bytes_text(costs.fixed_state_bytes)} of it doesn't grow" if costs.fixed_state_bytes > 0 else ""
    return f"state: {bytes_text(costs.state_held_bytes)}; 1K more tokens add {_per_1k(costs)}{fixed}"


def _per_1k(costs: Costs) -> str:
    return bytes_text(1024 * costs.state_per_token_bytes)


def _rate(tok_per_s: float) -> str:
    return "-" if tok_per_s == float("inf") else f"{tok_per_s:,.0f}" if tok_per_s >= 100 else f"{tok_per_s:.1f}"


_PART_HEAD = ("part", "layers", "parameters", "memory", "read per token", "state read", "FLOP")


def _part_row(costs: Costs, part: Cost) -> tuple[str, ...]:
    return (
        label(part), str(len(part.layers)) if part.layers else "", count_text(part.parameters) if part.parameters else "tied",
        bytes_text(part.weight_bytes), bytes_text(part.read_bytes),
        bytes_text(part.state_bytes) if part.state_bytes else "", decimal_text(part.flops, "FLOP") if part.flops else "",
    )  # fmt: skip


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *rest in rows:
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        lines.append("  ".join(("", first.ljust(widths[0]), *cells)).rstrip())
    return lines


def _facts(costs: Costs) -> str:
    per_byte = costs.flops / costs.token_bytes if costs.token_bytes else 0.0
    facts = [
        (bytes_text(costs.token_bytes), f"one token{_after(costs)} reads: {_reads(costs)}"),
        (decimal_text(costs.flops, "FLOP"), f"one token computes: {per_byte:.2g} FLOP per byte read"),
    ]
    if costs.exact:
        fixed = f"; {bytes_text(costs.fixed_state_bytes)} doesn't grow" if costs.fixed_state_bytes > 0 else ""
        facts.append((f"{_per_1k(costs)} per 1K", f"growth of the state per 1,024 tokens{fixed}"))
        facts.append(
            (bytes_text(costs.weight_bytes + costs.state_held_bytes), f"weights and state for {costs.context:,} tokens")
        )
    cells = "".join(f'<div class="tk-fact"><b>{escape(big)}</b><span>{escape(small)}</span></div>' for big, small in facts)
    return f'<div class="tk-facts">{cells}</div>'


def _stack(kinds: dict[str, tuple[int, int]], colors: dict[str, str]) -> str:
    total = sum(n for _, n in kinds.values()) or 1
    bars = "".join(f'<i style="width:{100 * n / total:.2f}%;background:{colors[kind]}"></i>' for kind, (_, n) in kinds.items())
    keys = ((colors[kind], f"{_kind(kind)}: {bytes_text(n)}, {_percent(n / total)}") for kind, (_, n) in kinds.items())
    return f'<div class="tk-stack" aria-hidden="true">{bars}</div>{_keys(keys)}'


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else "under 1 %"


def _keys(keys: Iterable[tuple[str, str]]) -> str:
    said = "".join(f'<span><i style="background:{color}"></i>{escape(name)}</span>' for color, name in keys)
    return f'<div class="tk-keys">{said}</div>'


def _layers(costs: Costs) -> str:
    pattern = costs.pattern()
    if not pattern:
        return ""
    names = list(dict.fromkeys(pattern))
    color = {name: COLORS[min(i, len(COLORS) - 1)] for i, name in enumerate(names)}
    marks = "".join(
        f'<i style="background:{color[name]}" title="layer {i}: {escape(name)}"></i>' for i, name in enumerate(pattern)
    )
    keys = _keys((color[name], f"{pattern.count(name)} × {name}") for name in names)
    said = escape(pattern_text(pattern))
    return f'<div class="tk-sub">Layers</div><div class="tk-layers" role="img" aria-label="{said}">{marks}</div>{keys}'


def _treemap(costs: Costs, colors: dict[str, str]) -> str:
    groups: dict[str, list[Area]] = {}
    for held in costs.holdings:
        group, _, name = held.where.partition(".")
        note = f"{held.where}: {bytes_text(held.n_bytes)}, {count_text(held.parameters)} weights, {_kind(held.kind)}"
        groups.setdefault(group, []).append(Area(name, held.n_bytes, colors[held.kind], note, bytes_text(held.n_bytes)))
    drawn = treemap(groups, f"Bytes of {costs.name} by the names of its weights")
    return f'<div class="tk-scroll">{drawn}</div>'


def _table(head: Sequence[str], rows: Sequence[str], foot: str = "") -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    end = f"<tfoot>{foot}</tfoot>" if foot else ""
    return f'<div class="tk-scroll"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(rows)}</tbody>{end}</table></div>'


def _row(cells: Sequence[str]) -> str:
    first, *rest = map(escape, cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'


def _parts(costs: Costs) -> str:
    total = (
        "all", "", count_text(costs.parameters), bytes_text(costs.weight_bytes), bytes_text(costs.read_bytes),
        bytes_text(costs.state_bytes) if costs.state_bytes else "", decimal_text(costs.flops, "FLOP"),
    )  # fmt: skip
    return _table(_PART_HEAD, [_row(_part_row(costs, part)) for part in costs.parts], _row(total))


def _contexts(costs: Costs) -> str:
    shown = [state for state in costs.states if state.length in (*_SHOWN_LENGTHS, costs.context)]
    if len(shown) < 2:
        return ""
    rows = [
        _row((
            f"{state.length:,}", bytes_text(costs.read_bytes), bytes_text(state.read_bytes),
            f"{100 * state.read_bytes / max(1, costs.read_bytes + state.read_bytes):.0f} %", bytes_text(state.held_bytes),
        ))
        for state in shown
    ]  # fmt: skip
    head = ("context", "weights read", "state read", "share of the state", "memory of the state")
    return f"<details><summary>With a longer context</summary>{_table(head, rows)}</details>"


def gpus_html(costs: Costs) -> str:
    """Return the table of every GPU's limit, the fastest first. Bars are hatched because the figures are modelled."""
    bounds = costs.bounds()
    most = max((b.tok_per_s for b in bounds if b.tok_per_s != float("inf")), default=1.0)
    rows = [_gpu_row(bound, most, _fits(costs, bound)) for bound in bounds]
    shares = [
        f"{100 * card.reached_bandwidth_bytes_per_s / card.bandwidth_bytes_per_s:.0f} % on the {card.key.upper()}"
        for card in (bound.card for bound in bounds)
        if card.source("reached_bandwidth_bytes_per_s").how == "measured"
    ]
    how = f"It was measured as {' and '.join(shares)}, and is assumed to be 88 % on the others."
    head = ("GPU", "limit, tok/s", "", "reachable", "fits", "memory", "GB/s", "GiB/s", "limited by")
    return f'{_table(head, rows)}<p class="tk-note">{escape(f"{NOTE.format(how=how)} {_UNITS}")}</p>'


def _fits(costs: Costs, bound: Bound) -> str:
    """Return "yes", "no", or "to 24,576" if only contexts up to that length fit."""
    longest = costs.longest_context(bound.card) if costs.exact else costs.context
    if longest is None or not (costs.exact or bound.fits):
        return "no"
    return f"to {longest:,}" if longest < costs.states[-1].length else "yes"


def _gpu_row(bound: Bound, most: float, fits: str) -> str:
    card = bound.card
    rates = "".join(f"<td>{card.bandwidth_bytes_per_s / unit:,.0f}</td>" for unit in (1e9, GiB))
    share = min(100.0, 100 * bound.tok_per_s / most)
    cells = [
        f"<td>{_rate(bound.tok_per_s)}</td>",
        f'<td class="tk-wide"><span class="tk-tok" style="width:{share:.1f}%"></span></td>',
        f"<td>{_rate(bound.reached_tok_per_s)}</td>",
        f'<td class="tk-fits{" tk-yes" if bound.fits else ""}">{fits}</td><td>{bytes_text(card.memory_bytes)}</td>',
        f"{rates}<td>{bound.limit}</td>",
    ]
    kind = "" if bound.fits else ' class="tk-no"'
    return f'<tr{kind}><th scope="row" title="{escape(card.name)}">{card.key}</th>{"".join(cells)}</tr>'
