"""Out of memory: who held what when an allocation failed, and what would have made it fit.

A `Shortage` is made of the ledger at that moment and of the variables that were there. Each proposal has the bytes that
it is predicted to save: exact where something is let go, stated as a share where something would be held differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.core.callers import ipython_shell
from toolkit.core.units import bytes_text, parse_bytes
from toolkit.trace.ledger import UNOWNED, Ledger, place_text
from toolkit.vram import owners

_ASKED = re.compile(r"Tried to allocate ([0-9.]+ [KMGT]?i?B)")
_ALLOWED = re.compile(r"([0-9.]+ [KMGT]?i?B) allowed")
_Q4_BITS = 4.5  # a weight of Q4_K: 4 bits, and 16 bytes of scales for each 256 (ggml-quants.h)
_CHUNK = 512  # tokens of a prompt at a time
_LEAST = 0.02  # of what is missing: what saves less isn't proposed
_NOT_SHORT = {True: ", but in pieces.", False: ": what was held when it failed has been let go of since."}


@dataclass(frozen=True)
class Proposal:
    """Something to do, the bytes that it saves, and whether that alone is enough."""

    do: str
    saves_bytes: int
    enough: bool

    def __str__(self) -> str:
        return f"{self.do}: saves {bytes_text(self.saves_bytes)}{', enough' if self.enough else ''}"


@dataclass(frozen=True)
class Shortage:
    """An allocation of `asked_bytes` that failed where `limit_bytes` may be had and `held_bytes` were allocated."""

    asked_bytes: int
    held_bytes: int
    limit_bytes: int
    where: str | None
    holders: tuple[str, ...]
    proposals: tuple[Proposal, ...]
    exact: bool = True  # is the moment that of the failure? else what was held then may have been let go of

    @property
    def missing_bytes(self) -> int:
        """What would have to be free, and isn't."""
        return max(self.asked_bytes + self.held_bytes - self.limit_bytes, 0)

    def __str__(self) -> str:
        asked, limit, held = (bytes_text(n) for n in (self.asked_bytes, self.limit_bytes, self.held_bytes))
        free = bytes_text(max(self.limit_bytes - self.held_bytes, 0))
        short = f": {bytes_text(self.missing_bytes)} too little." if self.missing_bytes else _NOT_SHORT[self.exact]
        by = f" by {self.where}" if self.where else ""
        lines = [
            f"{asked} asked for{by}; of {limit}, {held} were held and {free} free{short}",
            "Held then:",
            *(f"  {holder}" for holder in self.holders),
        ]
        if self.proposals:
            lines += ["What would help:", *(f"  {proposal}" for proposal in self.proposals)]
        return "\n".join(lines)


def explain(
    ledger: Ledger, variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder], error: BaseException,
    limit_bytes: int,
) -> Shortage:  # fmt: skip
    """Why `error`, an out-of-memory error, came. `found` names what is alive, `variables` are those that the user sees.

    The moment is that of the failed allocation where the history has it (a row of kind "oom"), else the peak.
    """
    trace = ledger.trace
    failed = trace.is_kind("oom").nonzero()[0]
    at = ledger.peak
    where, asked = None, _stated(_ASKED, error)
    if len(failed):
        at = int(ledger.rows.searchsorted(failed[-1])) - 1
        asked = int(trace["bytes"][failed[-1]])
        code = int(trace["where"][failed[-1]])
        where = place_text(trace.strings[code], trace.meta.get("source", {})) if code >= 0 else None
    held = int(ledger.held[at]) if at >= 0 else 0
    limit = min(limit_bytes, _stated(_ALLOWED, error) or limit_bytes)
    missing = max(asked + held - limit, 1)
    proposals = [*_let_go(variables, found), *_without_graph(found), *_smaller_weights(variables)]
    proposals += _converted(where, asked)
    proposals += [*_smaller_state(ledger, at), *_chunks(ledger, at, variables), *_in_pieces(ledger, at, asked, held, limit)]
    useful = [Proposal(do, saves, saves >= missing) for do, saves in proposals if saves >= max(_LEAST * missing, 1 << 20)]
    useful.sort(key=lambda proposal: (not proposal.enough, -proposal.saves_bytes))
    return Shortage(asked, held, limit, where, tuple(ledger.sentences(at)), tuple(useful[:6]), bool(len(failed)))


def _stated(pattern: re.Pattern[str], error: BaseException) -> int:
    """A size that the message states, to three digits; 0 where it doesn't."""
    match = pattern.search(str(error))
    return parse_bytes(match[1]) if match else 0


Saving = tuple[str, int]


def _converted(where: str | None, asked: int) -> list[Saving]:
    """The line that failed makes a float32 of something whole."""
    if where is None or not re.search(r"\.float\(\)|float32|\.double\(\)", where):
        return []
    return [("converting only what is needed, such as the last position: logits[:, -1].float() (nearly all of it)", asked)]


def _let_go(variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder]) -> list[Saving]:
    """`del x`, for what only x holds; and what no variable holds at all."""
    roots: dict[str, int] = {}
    stale = 0
    for place, holder in found.items():
        if place[0] == "cpu":
            continue
        if "(the traceback of" in holder.owner:  # of the error that is explained: it lets go by itself
            continue
        if holder.owner.startswith(("Out[", "_")):
            stale += holder.bytes
        else:
            root = re.split(r"[.\[ ]", holder.owner, maxsplit=1)[0]
            roots[root] = roots.get(root, 0) + holder.bytes
    results = owners.results(ipython_shell())
    savings = [("%memory release (results that Out[] and _ keep)", stale)]
    for root in sorted(roots, key=lambda name: -roots[name])[:4]:
        if root == "self":
            continue
        others = {**results, **owners.find({name: value for name, value in variables.items() if name != root})}
        alone = sum(
            h.bytes for place, h in found.items() if place[0] != "cpu" and place not in others and _rooted(h.owner, root)
        )
        module = isinstance(variables.get(root), nn.Module)
        savings.append((f'{root}.to("cpu"), until it is needed' if module else f"del {root}", alone))
    return savings


def _rooted(owner: str, root: str) -> bool:
    return owner == root or owner.startswith((f"{root}.", f"{root}[", f"{root} "))


def _without_graph(found: Mapping[owners.Place, owners.Holder]) -> list[Saving]:
    """What is kept for a backward pass, where gradients are on."""
    saved = sum(h.bytes for place, h in found.items() if "(its graph" in h.owner and place[0] != "cpu")
    return [("with torch.inference_mode(): around what needs no gradients", saved)]


def _smaller_weights(variables: Mapping[str, Any]) -> list[Saving]:
    """Weights in a narrower type: of every module that a variable holds."""
    savings = []
    for name, value in variables.items():
        if not isinstance(value, nn.Module) or name.startswith("_"):
            continue
        sizes = {torch.float32: 0, torch.bfloat16: 0, torch.float16: 0}
        for parameter in value.parameters():
            if parameter.device.type in ("cuda", "vgpu") and parameter.dtype in sizes:
                sizes[parameter.dtype] += parameter.nbytes
        half = sizes[torch.bfloat16] + sizes[torch.float16]
        savings.append((f"{name} in bfloat16 instead of float32", sizes[torch.float32] // 2))
        if not type(value).__module__.startswith("toolkit.models"):  # what tk.load can't make again
            continue
        int4 = sizes[torch.float32] * (1 - _Q4_BITS / 32) + half * (1 - _Q4_BITS / 16)
        savings.append((f'{name} in 4 bits: tk.load(..., scheme="q4_k_m")', int(int4)))
    return savings


def _smaller_state(ledger: Ledger, at: int) -> list[Saving]:
    """A shorter context: keys and values shrink with it."""
    codes, names = ledger.group("kind")
    if "kv" not in names:
        return []
    alive = ledger.alive(at)
    kv = int(ledger.blocks.bytes[alive[codes[alive] == names.index("kv")]].sum())
    return [
        ("half the context (keys and values)", kv // 2),
        ("keys and values in 8 bits instead of 16, where the cache can", kv // 2),
    ]


def _chunks(ledger: Ledger, at: int, variables: Mapping[str, Any]) -> list[Saving]:
    """A prompt in parts: what was made while running it shrinks with the part."""
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
    return [(f"the {longest:,} tokens in chunks of {_CHUNK} (about)", saves)]


def _in_pieces(ledger: Ledger, at: int, asked: int, held: int, limit: int) -> list[Saving]:
    """Reserved and free, but in pieces too small."""
    if asked + held > limit or not len(ledger.rows) or not ledger.trace.is_kind("segment_alloc").any():
        return []
    return [
        ("PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, set before the first allocation", int(ledger.reserved[at]) - held)
    ]
