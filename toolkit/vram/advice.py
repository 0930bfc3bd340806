"""Explain out-of-memory errors: the owners of memory when an allocation failed, and what would have made it fit.

`explain` computes a `Shortage` from the ledger and the user's variables. Each proposal states the bytes that it is predicted to
save. The number is exact if memory would be freed, and an estimate if data would be stored in another form.
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
_Q4_BITS = 4.5  # per weight of Q4_K: 4 bits, and 16 bytes of scales per 256 weights (ggml-quants.h)
_CHUNK = 512  # tokens per chunk of a prompt
_LEAST = 0.02  # share of the missing bytes; proposals that save less are left out
# End of the first line if the numbers show no shortage, by `Shortage.exact`.
_NOT_SHORT = {True: ", but only in fragments.", False: ": memory has been freed since the allocation failed."}


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
    exact: bool = True  # False: the numbers are from after the failure, when memory may have been freed

    @property
    def missing_bytes(self) -> int:
        """The bytes by which the allocation exceeded the limit; 0 if the numbers show no shortage."""
        return max(self.asked_bytes + self.held_bytes - self.limit_bytes, 0)

    def __str__(self) -> str:
        asked, limit, held = (bytes_text(n) for n in (self.asked_bytes, self.limit_bytes, self.held_bytes))
        free = bytes_text(max(self.limit_bytes - self.held_bytes, 0))
        short = f": {bytes_text(self.missing_bytes)} short." if self.missing_bytes else _NOT_SHORT[self.exact]
        by = f" by {self.where}" if self.where else ""
        lines = [
            f"{asked} requested{by}; of {limit}, {held} were allocated and {free} free{short}",
            "Allocated at that moment:",
            *(f"  {holder}" for holder in self.holders),
        ]
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
    """Return the size that the error message states, to three digits; 0 if it states none."""
    match = pattern.search(str(error))
    return parse_bytes(match[1]) if match else 0


Saving = tuple[str, int]


def _converted(where: str | None, asked: int) -> list[Saving]:
    """Propose converting less, if the failing line converts a tensor to float32 or float64."""
    if where is None or not re.search(r"\.float\(\)|float32|\.double\(\)", where):
        return []
    return [("converting only what is needed, such as the last position: logits[:, -1].float() (nearly all of it)", asked)]


def _let_go(variables: Mapping[str, Any], found: Mapping[owners.Place, owners.Holder]) -> list[Saving]:
    """Propose `del x` for memory that only x holds, and releasing memory that no variable holds."""
    roots: dict[str, int] = {}
    stale = 0
    for place, holder in found.items():
        if place[0] == "cpu":
            continue
        if "(the traceback of" in holder.owner:  # freed together with the explained error
            continue
        if holder.owner.startswith(("Out[", "_")):
            stale += holder.bytes
        else:
            root = re.split(r"[.\[ ]", holder.owner, maxsplit=1)[0]
            roots[root] = roots.get(root, 0) + holder.bytes
    results = owners.results(ipython_shell())
    savings = [("%memory release (results kept by Out[] and _)", stale)]
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
    """Propose inference mode for tensors that are kept for a backward pass."""
    saved = sum(h.bytes for place, h in found.items() if "(its graph" in h.owner and place[0] != "cpu")
    return [("with torch.inference_mode(): around code that needs no gradients", saved)]


def _smaller_weights(variables: Mapping[str, Any]) -> list[Saving]:
    """Propose a narrower dtype for the weights of each module that a variable holds."""
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
