"""Name the line that broke a budget.

Copies have a line each, and the line to blame is the one with the most copies more than in the baseline. Memory needs more
thought, because the line that allocates is often not the one that changed:

- If lines allocate more than in the baseline, the first of them is to blame: a cast, a larger buffer.
- If lines allocate as much as before but it is held longer, the line that keeps it is to blame. The `Watch` knows the
  holder. For an element of a list, that is the line that appends; for a variable that accumulates, the line that adds; for an
  autograd graph, the line that calls the model, or the line that ran a backward pass and retained the graph; for another
  variable, the line that assigns it.
"""

from __future__ import annotations

import ast
import linecache
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from toolkit.core.callers import short_path
from toolkit.core.units import bytes_text
from toolkit.decode.copy_budget import counted
from toolkit.testing.measure import UNKNOWN, Block, LineMemory, Lines, Measured, by_line, memory_by_line
from toolkit.testing.watch import Frame, KeptGraphs, Watch
from toolkit.trace.events import Trace
from toolkit.trace.ledger import Ledger

_SHARE = 0.1  # lines with less of an excess are not the first to blame
_ADDERS = ("append", "appendleft", "extend", "add", "insert", "update", "setdefault", "put")
_PATH = re.compile(r"(-?\d+):([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(.*)", re.DOTALL)


class Blame(NamedTuple):
    """A line, its source text, and what it did."""

    line: str  # "train.py:31"; without a number if the line is not known
    source: str
    did: str


# ---- copies


def of_copies(traces: dict[str, list[Trace]], before: Measured | None, lines: Lines) -> list[Blame]:
    """Return the lines that copied more than in the baseline, the one with the most first; without a baseline, all lines.

    `traces` has the events of each kind that exceeded a limit or the baseline.
    """
    places = {lines.key(where): where for some in traces.values() for trace in some for where in trace.text("where")}
    did: dict[str, list[str]] = {}
    rank: dict[str, tuple[int, int]] = {}
    for more_only in (True, False) if before else (False,):
        for kind, some in traces.items():
            known = (before or {}).get("copies", {}).get(kind, {})
            for key, (number, size) in by_line(some, lines).items():
                old_number, old_size = known.get(key, (0, 0)) if more_only else (0, 0)
                more = number - old_number, size - old_size
                if max(more) > 0:
                    was = f", {old_number:,} in the baseline" if before else ""
                    was += f" ({bytes_text(old_size)})" if before and more[0] <= 0 else ""
                    n_bytes = "" if kind == "waits" else f" ({bytes_text(size)})"
                    did.setdefault(key, []).append(f"{counted(number, kind)}{n_bytes}{was}")
                    best = rank.get(key, (0, 0))
                    rank[key] = best[0] + max(more[0], 0), best[1] + max(more[1], 0)
        if did:
            break
    return [_at(lines, places[key], key, "; ".join(did[key])) for key in sorted(did, key=lambda key: rank[key], reverse=True)]


def _at(lines: Lines, place: str | None, key: str, did: str) -> Blame:
    file, number = lines.split(place)
    if file is None:
        return Blame(key, "", did)
    return _line(lines, file, number, did)


# ---- memory


def of_peak(block: Block, before: Measured | None, lines: Lines) -> list[Blame]:
    """Return the lines to blame for a peak, the one that broke the budget first, then those that held the most at the peak."""
    ledger = block.memory
    assert ledger is not None
    known = defaultdict(LineMemory, _memory(before))
    texts = ledger.trace.text("where")
    places = [texts[row] for row in ledger.blocks.row.tolist()]
    blocks = _at_peak(ledger, all_of_them=before is not None)
    key_of = {i: lines.key(places[i]) for i in blocks}
    held = Counter[str]()
    for i, key in key_of.items():
        held[key] += int(ledger.blocks.bytes[i])
    excess = +Counter({key: n - known[key].most for key, n in held.items()})
    if not excess:  # no line holds more than it ever did, but some hold more at the peak
        excess = +Counter({key: n - known[key].at_peak for key, n in held.items()}) or held
    of_line = {key_of[i]: i for i in sorted(blocks, key=lambda i: -ledger.blocks.begin[i])}  # the first block of each line
    order, found = [key for key, _ in excess.most_common(5)], list[Blame]()

    now = memory_by_line(ledger, lines)
    more = +Counter({key: now[key].allocated - known[key].allocated for key in now}) if before is not None else Counter[str]()
    if 2 * sum(excess[key] for key in excess if more[key]) >= excess.total():  # most of it was not allocated before
        # a line that runs more often, but holds no more at a time, is not to blame
        large = {key for key, n in more.items() if n >= _SHARE * excess.total() and now[key].most > known[key].most}
        began = ((i, lines.key(places[i])) for i in np.flatnonzero(ledger.blocks.begin >= ledger.opening).tolist())
        first, key = next((one for one in began if one[1] in large), (None, ""))
        if first is not None:
            of_line.setdefault(key, first)
            order.insert(0, key)
    elif block.watch is not None and block.watch.frames:
        found = list(_keeper(block.watch, ledger, [i for i, key in key_of.items() if key in excess], lines))

    for key in dict.fromkeys(order):
        i = of_line[key]
        was = f", at most {bytes_text(known[key].most)} in the baseline" if before else ""
        old = before is None and ledger.blocks.begin[i] < ledger.opening
        when = "held before the test" if old else f"at the peak{was}"
        found.append(_at(lines, places[i], key, f"{bytes_text(held[key])} {when}"))
    first_of: dict[str, Blame] = {}
    for blame in found:
        first_of.setdefault(blame.line, blame)
    return list(first_of.values())


def _memory(before: Measured | None) -> dict[str, LineMemory]:
    """Return the memory of each line in a baseline."""
    return {key: LineMemory(*of_line) for key, of_line in (before or {}).get("memory", {}).items()}


def _at_peak(ledger: Ledger, all_of_them: bool) -> list[int]:
    """Return the blocks that were held at the peak.

    Those from before the test are left out unless `all_of_them`, or unless they are the larger part.
    """
    alive: list[int] = ledger.alive().tolist()
    if all_of_them or 2 * ledger.baseline_bytes > ledger.peak_bytes:
        return alive
    return [i for i in alive if ledger.blocks.begin[i] >= ledger.opening] or alive


def of_graphs(graphs: KeptGraphs, lines: Lines) -> list[Blame]:
    """Return the line that keeps the most autograd nodes of earlier steps."""
    path = _PATH.fullmatch(graphs.owner)
    if path is None:
        return []
    how = "element" if path[3].startswith("[") else "value"
    did = f"{graphs.most:,} nodes kept by {_WHAT[how].format(path[2])}"
    return [_line(lines, *_place_that_keeps(graphs.frames, int(path[1]), path[2], how), did)]


def of_lines(block: Block, before: Measured, lines: Lines) -> list[Blame]:
    """Return the lines of the baseline that hold more than they did, the one with the most more first."""
    ledger = block.memory
    assert ledger is not None
    known, now = _memory(before), memory_by_line(ledger, lines)
    more = +Counter({key: now[key].most - known[key].most for key in now if key in known})
    places = {lines.key(place): place for place in ledger.group("where")[1]}
    return [
        _at(lines, places[key], key, f"{bytes_text(now[key].most)} at a time, {bytes_text(known[key].most)} in the baseline")
        for key, _ in more.most_common()
        if key != UNKNOWN
    ]


_WHAT = {"graph": "the graph of `{}`, for a backward pass", "element": "elements of `{}`", "value": "`{}`"}


def _keeper(watch: Watch, ledger: Ledger, blocks: list[int], lines: Lines) -> Iterator[Blame]:
    """Yield the line that keeps the most of the `blocks`, unless it keeps little of them."""
    kept = Counter[tuple[int, str, str]]()  # frame, variable, how
    retained = Counter[Frame]()  # the line that ran the backward pass of a graph that is still held
    for i in blocks:
        holder = watch.held.get(int(ledger.trace["address"][ledger.blocks.row[i]]))
        path = _PATH.fullmatch(holder.owner) if holder else None
        if holder and path:
            how = "graph" if holder.node >= 0 else "element" if path[3].startswith("[") else "value"
            kept[int(path[1]), path[2], how] += int(ledger.blocks.bytes[i])
            if holder.node in watch.ran:
                retained[watch.ran[holder.node]] += int(ledger.blocks.bytes[i])
    if not kept:
        return
    (most, held), elements = kept.most_common(1)[0], [item for item in kept.most_common() if item[0][2] == "element"]
    if elements and 4 * elements[0][1] >= kept.total():
        most, held = elements[0]
    if 4 * held < ledger.blocks.bytes[blocks].sum():
        return
    index, name, how = most
    did = f"{bytes_text(held)} kept by {_WHAT[how].format(name)}"
    if how == "graph" and 2 * retained.total() >= held:
        frame = retained.most_common(1)[0][0]
        yield _line(lines, frame.file, frame.line, f"{did}, although a backward pass has used it")
        return
    yield _line(lines, *_place_that_keeps(watch.frames, index, name, how), did)


def _place_that_keeps(frames: list[Frame], index: int, name: str, how: str) -> tuple[Path, int]:
    """Return the file and the line that make a variable of the frame `index` keep something; `how` is a key of `_WHAT`."""
    for wanted in (_adds,) if how == "element" else (_accumulates,) if how == "graph" else (_accumulates, _assigns):
        for frame in reversed(frames) if index < 0 else [frames[index]]:
            for whole_file in (False, True) if how == "element" else (False,):
                number = wanted(_function(frame, whole_file), name)
                if number is not None:
                    return frame.file, number
    frame = frames[index] if index >= 0 and how != "graph" else _caller(frames[max(index, 0) :])
    return frame.file, frame.line


def _caller(frames: list[Frame]) -> Frame:
    """Return the frame that calls a module: the outermost one that does, so that what a module calls belongs to the module."""
    return next((frame for frame, called in pairwise(frames) if called.of_module and not frame.of_module), frames[-1])


def _line(lines: Lines, file: Path, number: int, did: str) -> Blame:
    return Blame(f"{short_path(str(file))}:{number}", lines.source(file, number), did)


def _tree(file: Path) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(str(file))))
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def _function(frame: Frame, whole_file: bool) -> ast.AST:
    """Return the function that the frame runs, or its whole file."""
    tree = _tree(frame.file)
    for node in () if whole_file else ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == frame.first:
                return node
    return tree


def _adds(tree: ast.AST, name: str) -> int | None:
    """Return the line that adds an element to the container `name`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _ADDERS:
            if _is(node.func.value, name) or (isinstance(node.func.value, ast.Subscript) and _is(node.func.value.value, name)):
                return node.lineno
        elif isinstance(node, ast.AugAssign) and _is(node.target, name):
            return node.lineno
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and _is(target.value, name):
                    return node.lineno
    return None


def _accumulates(tree: ast.AST, name: str) -> int | None:
    """Return the line that adds to the variable `name`: `x += y`, `x = x + y`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and _is(node.target, name):
            return node.lineno
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
            both = (node.targets, ast.walk(node.value))
            if all(any(_is(part, name) for part in parts) for parts in both):
                return node.lineno
    return None


def _assigns(tree: ast.AST, name: str) -> int | None:
    """Return the last line that assigns the variable `name`."""
    lines = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assign) and any(_is(t, name) for t in n.targets)]
    return max(lines, default=None)


def _is(node: ast.AST, name: str) -> bool:
    """Return whether an expression is the variable or attribute `name`; of "a.b.c", only the last name must agree."""
    text = ast.unparse(node)
    return text == name or ("." in name and text.rpartition(".")[2] == name.rpartition(".")[2])
