"""Explain out-of-memory errors: the owners of memory when an allocation failed, and what would have made it fit.

`explain` computes a `Shortage` from the ledger and the user's variables. Each proposal states the bytes that it is predicted to
save. The number is exact if memory would be freed, and an estimate if data would be stored in another form.
"""

from __future__ import annotations

import dis
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import nn

from toolkit.core.callers import ipython_shell
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.gpu.virtual.allocator.blocks import segment_bytes
from toolkit.trace.ledger import OTHER_KIND, UNOWNED, Ledger, place_text
from toolkit.vram import hidden, keepers, owners
from toolkit.vram.frames import locals_of

_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_FREE = re.compile(r"of which ([0-9.]+ [KMGT]?i?B) is free")
_ALLOWED = re.compile(r"([0-9.]+ [KMGT]?i?B) allowed")
# Source code that converts a tensor to another dtype: x.float(), x.to(torch.float32), softmax(x, dtype=torch.float32).
_CONVERTS = re.compile(
    r"\.(float|double|half|bfloat16|int|long)\(\)|\.type_as\("
    r"|\b(to|type|softmax)\([^()]*(\bdtype\b|\btorch\.\w*(float|double|half|int|long))"
)
_Q4_BITS = 4.5  # per weight of Q4_K: 4 bits, and 16 bytes of scales per 256 weights (ggml-quants.h)
_READS = ("LOAD_NAME", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR")
_READS_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_RESULTS = "Out[] and _"  # stands for the results that a notebook keeps
_MOST_DELETIONS = 4  # proposals
_MOST_NAMES = 4  # in one of them
_CHUNK = 512  # tokens per chunk of a prompt
_LEAST = 0.02  # share of the missing bytes; proposals that save less are left out


@dataclass(frozen=True)
class Proposal:
    """An action, the bytes that it would save, and whether it alone is enough."""

    do: str
    saves_bytes: int
    enough: bool

    def __str__(self) -> str:
        return f"{self.do}: saves {bytes_text(self.saves_bytes)}{', enough' if self.enough else ''}"


@dataclass(frozen=True)
class Shortage:
    """A failed allocation of `asked_bytes`, when `held_bytes` were already allocated and `limit_bytes` were the maximum."""

    asked_bytes: int
    held_bytes: int
    limit_bytes: int
    where: str | None
    holders: tuple[str, ...]
    proposals: tuple[Proposal, ...]
    not_short: str = ", but only in fragments."  # end of the first line if the numbers show no shortage

    @property
    def missing_bytes(self) -> int:
        """The bytes by which the allocation exceeded the limit; 0 if the numbers show no shortage."""
        return max(self.asked_bytes + self.held_bytes - self.limit_bytes, 0)

    def __str__(self) -> str:
        asked, limit, held = (bytes_text(n) for n in (self.asked_bytes, self.limit_bytes, self.held_bytes))
        free = bytes_text(max(self.limit_bytes - self.held_bytes, 0))
        short = f": {bytes_text(self.missing_bytes)} short." if self.missing_bytes else self.not_short
        by = f" by {self.where}" if self.where else ""
        lines = [f"{asked} requested{by}; of {limit}, {held} were allocated and {free} free{short}"]
        if self.holders:
            lines += ["Allocated at that moment:", *(f"  {holder}" for holder in self.holders)]
        if self.proposals:
            lines += ["What would help:", *(f"  {proposal}" for proposal in self.proposals)]
        return "\n".join(lines)


def explain(
    ledger: Ledger, variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder], error: BaseException,
    limit_bytes: int,
) -> Shortage:  # fmt: skip
    """Explain the out-of-memory error `error`. `found` maps live memory to its owner; `variables` are those of the user.

    The numbers are those at the failed allocation if the trace has it (an event of kind "oom"), otherwise those at the peak.
    """
    trace = ledger.trace
    failed = trace.is_kind("oom").nonzero()[0]
    at = ledger.peak
    failed_at, asked = None, _stated(_ASKED, error)
    if len(failed):
        at = int(ledger.rows.searchsorted(failed[-1])) - 1
        asked = int(trace["bytes"][failed[-1]])
        code = int(trace["where"][failed[-1]])
        failed_at = trace.strings[code] if code >= 0 else None
    where = place_text(failed_at, trace.meta.get("source", {})) if failed_at else None
    held = int(ledger.held[at]) if at >= 0 else 0
    limit = min(limit_bytes, _stated(_ALLOWED, error) or limit_bytes)
    missing = max(asked + held - limit, 1)
    proposals = [*_let_go(variables, found, error, missing), *_without_graph(found), *_smaller_weights(variables)]
    proposals += _converted(ledger, at, failed_at, asked)
    proposals += [*_smaller_state(ledger, at), *_chunks(ledger, at, variables), *_in_pieces(ledger, at, asked, held, limit)]
    useful = [Proposal(do, saves, saves >= missing) for do, saves in proposals if saves >= max(_LEAST * missing, 1 << 20)]
    useful.sort(key=lambda proposal: (not proposal.enough, -proposal.saves_bytes))
    why = ": memory has been freed since the allocation failed."
    if len(failed):
        cached = int(ledger.cached[at]) if at >= 0 else 0
        why = _not_short(asked, held, limit, cached, _stated(_FREE, error) if _FREE.search(str(error)) else limit)
    return Shortage(asked, held, limit, where, tuple(ledger.sentences(at)), tuple(useful[:6]), why)


def _not_short(asked: int, held: int, limit: int, cached: int, free: int) -> str:
    """Return why an allocation failed that the numbers leave room for. The GPU has `free` bytes apart from `cached` ones."""
    if held + segment_bytes(asked) > limit:
        return f", but CUDA's allocator reserves {bytes_text(segment_bytes(asked))} at a time for a request of this size."
    if cached + free < asked:
        return f", but only {bytes_text(cached + free)} of the GPU are free: other programs or CUDA itself use the rest."
    return ", but only in fragments."


def _stated(pattern: re.Pattern[str], error: BaseException) -> int:
    """Return the size that the error message states, to three digits; 0 if it states none."""
    match = pattern.search(str(error))
    return parse_bytes(match[1]) if match else 0


Saving = tuple[str, int]


def _converted(ledger: Ledger, at: int, failed: str | None, asked: int) -> list[Saving]:
    """Propose converting less if the failing line converts to another dtype, and doing without the copies of other lines."""
    savings = []
    source = ledger.trace.meta.get("source", {})
    if failed is not None and _conversion(failed, source):
        do = "converting only what is needed, such as the last position: logits[:, -1].float() (nearly all of it)"
        savings.append((do, asked))
    (kinds, names), (codes, places) = ledger.group("kind"), ledger.group("where")
    alive = ledger.alive(at)
    alive = alive[[names[code] in (OTHER_KIND, hidden.GARBAGE) for code in kinds[alive].tolist()]]  # a model converts in place
    sizes = np.bincount(codes[alive], ledger.blocks.bytes[alive], len(places)).astype(np.int64)
    for place, size in zip(places, sizes.tolist(), strict=True):
        line = _conversion(place, source) if size else None
        if line is not None:
            savings.append((f"without the copy in another dtype by {place_text(line, source)}", size))
    return savings


def _conversion(place: str, source: Mapping[str, str]) -> str | None:
    """Return the innermost line of a place whose source converts tensors to another dtype, or None."""
    return next((line for line in reversed(place.split(" > ")) if _CONVERTS.search(source.get(line, ""))), None)


def _let_go(
    variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder], error: BaseException, missing: int
) -> list[Saving]:
    """Propose `del x` for memory that only x holds, `del x, y` for what both hold, and releasing what no variable holds.

    The failing line needs its own inputs, and what the traceback of `error` holds is freed together with it.
    """
    shell = ipython_shell()
    visible, with_error = owners.find(variables), hidden.of_error(error)
    on_gpu = {place: holder for place, holder in found.items() if place[0] != "cpu"}
    stale: dict[str, int] = {}
    callers: dict[str, int] = {}
    widgets = 0
    results = hidden.results(shell)
    for place, holder in on_gpu.items():
        if place in visible:
            continue
        if holder.kind == hidden.GARBAGE:
            stale["reference cycles"] = stale.get("reference cycles", 0) + holder.bytes
        elif hidden.of_widget(holder.owner):
            widgets += holder.bytes
        elif root := hidden.running(holder.owner):
            callers[root] = callers.get(root, 0) + holder.bytes
        elif shell is not None and place not in with_error:
            kept = "old tracebacks" if "(the traceback of" in holder.owner else "results kept by Out[] and _"
            if kept == "old tracebacks" or place in results:
                stale[kept] = stale.get(kept, 0) + holder.bytes
    do = "gc.collect()" if shell is None else "%memory release"
    savings = [(f"{do} ({', '.join(stale)})", sum(stale.values()))]
    savings += [(f"del {root}", callers[root]) for root in sorted(callers, key=lambda name: -callers[name])[:4]]
    savings.append(("closing the open widgets that hold memory: widget.close()", widgets))
    needed = _inputs(error)
    savings += _graphs(variables, found, needed)
    sizes = {place: holder.bytes for place, holder in on_gpu.items() if place in visible}
    of_root: dict[str, int] = {}
    for holder in visible.values():
        root = re.split(r"[.\[ ]", holder.owner, maxsplit=1)[0]
        of_root[root] = of_root.get(root, 0) + holder.bytes
    return savings + _deletions(keepers.names(variables, of_root), sizes, set(results), needed, missing)


def _deletions(
    names: list[keepers.Name], sizes: Mapping[owners.Place, int], results: set[owners.Place], needed: Needed, missing: int
) -> list[Saving]:
    """Propose to delete each set of names that holds memory together, those that free the most first.

    `sizes` are the bytes of all memory that variables hold, and `results` the part that a notebook's results hold, too.
    """
    by_place: dict[owners.Place, set[str]] = {place: {_RESULTS} if place in results else set() for place in sizes}
    for name in names:
        for place in name.places & sizes.keys():
            by_place[place].add(name.text)
    of_root: dict[str, set[str]] = {}
    for name in names:
        of_root.setdefault(name.root, set()).update([name.text] if name.places else [])
    stuck = {name.text for name in names if _is_needed(name, needed)}
    sets = {frozenset(held) for held in (*by_place.values(), *of_root.values()) if held - {_RESULTS} and not held & stuck}
    saves = {held: sum(size for place, size in sizes.items() if by_place[place] and by_place[place] <= held) for held in sets}
    chosen: dict[frozenset[str], Saving] = {}
    for held in sorted(sets, key=lambda held: (-min(saves[held], missing), len(held), -saves[held])):
        less = [smaller for smaller in chosen if smaller < held]
        if len(chosen) < _MOST_DELETIONS and not any(saves[smaller] >= min(saves[held], missing) for smaller in less):
            whole = {root for root, own in of_root.items() if root not in stuck and (root in held or own <= held)}
            chosen[held] = (_deleting(held, names, whole), saves[held])
    return list(chosen.values())


def _deleting(held: frozenset[str], names: list[keepers.Name], whole: set[str]) -> str:
    """Return how to delete names in words. In place of all names of a variable in `whole`, the variable is named."""
    texts = list(dict.fromkeys(name.root if name.root in whole else name.text for name in names if name.text in held))
    values = {name.text: value for name in names for value in name.values}
    if len(held) == 1 and isinstance(values.get(texts[0]), nn.Module):
        return f'{texts[0]}.to("cpu"), until it is needed'
    more = f" and {len(texts) - _MOST_NAMES} more names of it" if len(texts) > _MOST_NAMES else ""
    return f"del {', '.join(texts[:_MOST_NAMES])}{more}{', and %memory release' if _RESULTS in held else ''}"


def _is_needed(name: keepers.Name, needed: Needed) -> bool:
    """Return whether the failing line needs a name, or whether it can't be deleted."""
    if any(id(value) in needed.values for value in name.values):
        return True
    return name.text in ("self", "") or name.attribute in needed.attributes


def _graphs(variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder], needed: Needed) -> list[Saving]:
    """Propose to detach tensors that variables keep, such as the losses of all steps."""
    savings = []
    for name, several, numbers, saves in keepers.graphs(variables, found, needed.values):
        ways = ".detach() or .item()" if numbers else ".detach()"
        what = f"elements of {name} without their graphs" if several else f"{name} without its graph"
        savings.append((f"{what} ({ways}), unless backward() needs {'them' if several else 'it'}", saves))
    return savings


@dataclass(frozen=True)
class Needed:
    """What the failing expressions read, in all frames of a traceback: ids of variables' values, and names of attributes."""

    values: set[int]
    attributes: set[str]


def _inputs(error: BaseException) -> Needed:
    """Return what the failing expressions read, in all frames of the traceback of `error`."""
    found = Needed(set(), set())
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        names = {**frame.f_globals, **locals_of(frame)}
        found.values.update(id(names[name]) for name in _read(frame.f_code, trace.tb_lasti, _READS) if name in names)
        found.attributes.update(_read(frame.f_code, trace.tb_lasti, _READS_ATTRIBUTES))
        trace = trace.tb_next
    return found


def _read(code: CodeType, at: int, reads: tuple[str, ...]) -> set[str]:
    """Return the names that instructions `reads` read in the expression to which the instruction at offset `at` belongs."""
    instructions = list(dis.get_instructions(code))
    span = next((_span(one) for one in instructions if one.offset == at), None)
    if span is None:
        return set()
    inside = (one for one in instructions if one.opname.startswith(reads) and _within(_span(one), span))
    return {name for one in inside for name in (one.argval if isinstance(one.argval, tuple) else (one.argval,))}


Span = tuple[tuple[int, int], tuple[int, int]]


def _span(instruction: dis.Instruction) -> Span | None:
    """Return the begin and the end (line, column) of an instruction's source; None if Python kept no columns."""
    at = instruction.positions
    if at is None or at.lineno is None or at.end_lineno is None or at.col_offset is None or at.end_col_offset is None:
        return None
    return (at.lineno, at.col_offset), (at.end_lineno, at.end_col_offset)


def _within(inner: Span | None, outer: Span) -> bool:
    return inner is not None and outer[0] <= inner[0] and inner[1] <= outer[1]


def _without_graph(found: Mapping[owners.Place, owners.Holder]) -> list[Saving]:
    """Propose inference mode for tensors that are kept for a backward pass."""
    saved = sum(h.bytes for place, h in found.items() if "(its graph" in h.owner and place[0] != "cpu")
    return [("with torch.inference_mode(): around code that needs no gradients", saved)]


def _smaller_weights(variables: Mapping[str, Any]) -> list[Saving]:
    """Propose a narrower dtype for the weights of each module that a variable holds."""
    savings = []
    for name, value in owners.users(variables).items():
        if not isinstance(value, nn.Module):
            continue
        sizes = {torch.float32: 0, torch.bfloat16: 0, torch.float16: 0}
        for parameter in value.parameters():
            if parameter.device.type in ("cuda", "vgpu") and parameter.dtype in sizes:
                sizes[parameter.dtype] += parameter.nbytes
        half = sizes[torch.bfloat16] + sizes[torch.float16]
        savings.append((f"{name} in bfloat16 instead of float32", sizes[torch.float32] // 2))
        if not type(value).__module__.startswith("toolkit.models"):  # tk.load cannot load it again
            continue
        int4 = sizes[torch.float32] * (1 - _Q4_BITS / 32) + half * (1 - _Q4_BITS / 16)
        savings.append((f'{name} in 4 bits: tk.load(..., scheme="q4_k_m")', int(int4)))
    return savings


def _smaller_state(ledger: Ledger, at: int) -> list[Saving]:
    """Propose a smaller KV cache: a shorter context or fewer bits."""
    codes, names = ledger.group("kind")
    if "kv" not in names:
        return []
    alive = ledger.alive(at)
    kv = int(ledger.blocks.bytes[alive[codes[alive] == names.index("kv")]].sum())
    return [
        ("half the context length (keys and values)", kv // 2),
        ("keys and values in 8 bits instead of 16, if the cache supports it", kv // 2),
    ]


def _chunks(ledger: Ledger, at: int, variables: Mapping[str, Any]) -> list[Saving]:
    """Propose running a long prompt in chunks: activations shrink with the chunk."""
    lengths = [
        value.shape[-1] for value in variables.values()
        if isinstance(value, torch.Tensor) and value.dim() in (1, 2) and value.dtype in (torch.int64, torch.int32)
    ]  # fmt: skip
    longest = max(lengths, default=0)
    if longest < 2 * _CHUNK:
        return []
    kinds, names = ledger.group("kind")
    owner, owned = ledger.group("owner")
    nobody = owned.index(UNOWNED) if UNOWNED in owned else -1
    alive = ledger.alive(at)
    made = alive[(ledger.blocks.begin[alive] >= ledger.opening) & (owner[alive] == nobody)]
    made = made[[names[code] not in ("kv", "weights") for code in kinds[made].tolist()]] if len(made) else made
    saves = int(ledger.blocks.bytes[made].sum() * (1 - _CHUNK / longest))
    return [(f"running the {longest:,} tokens in chunks of {_CHUNK} (estimate)", saves)]


def _in_pieces(ledger: Ledger, at: int, asked: int, held: int, limit: int) -> list[Saving]:
    """Propose expandable segments if enough memory is reserved and free, but fragmented."""
    if asked + held > limit or not len(ledger.rows) or not ledger.trace.is_kind("segment_alloc").any():
        return []
    return [
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before the first allocation", int(ledger.reserved[at]) - held)
    ]
