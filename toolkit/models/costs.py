"""Count the memory of each part of a model and the cost of one token, from its weights; a model on "meta" suffices.

Each model file assigns its modules to parts and states the arithmetic and the state per token; this module counts the bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.core.display import render
from toolkit.weights.packed import PackedMatrix


@dataclass(frozen=True)
class Cost:
    """The cost of one part of a model: its memory, and its share of the work for one token.

    `part` is "embedding", "attention", "delta net", "mlp", "experts", "router", "norms", "head" or "per-layer inputs"; `kind`
    distinguishes parts of the same name ("sliding", "full"). `layers` are the numbers of the layers with this part, if any.
    """

    part: str
    layers: tuple[int, ...]
    parameters: int
    weight_bytes: int  # memory of all weights
    read_bytes: int  # weights read for one token
    state_bytes: int  # per token: keys and values read, recurrent states read and written
    state_per_token_bytes: int  # growth of the state per token
    state_held_bytes: int  # memory of the state
    flops: int  # per token
    kind: str = ""


class Shown:
    """Mixin whose repr shows memory and costs. It comes before nn.Module among the bases of a model."""

    def __repr__(self) -> str:
        return str(render("text", self))

    def _repr_html_(self) -> str:
        return str(render("html", self))


Parts = nn.Module | Mapping[int, Sequence[nn.Module]]


def each(layers: nn.ModuleList, *names: str, only: Collection[int] | None = None) -> dict[int, list[nn.Module]]:
    """Return the modules called `names` ("attention", "mlp.down") of every layer in `only` (default: all), by layer number."""
    chosen = [i for i in range(len(layers)) if only is None or i in only]
    return {i: [layers[i].get_submodule(name) for name in names] for i in chosen}


def weigh(
    part: str, modules: Parts, *, kind: str = "", share: float = 1.0, tied: bool = False, flops: int = 0, state_bytes: int = 0,
    state_per_token_bytes: int = 0, state_held_bytes: int | None = None,
) -> Cost:  # fmt: skip
    """Return the cost of `modules`: one module outside the layers, or the modules of each layer by its number (see `each`).

    Args:
        share: The fraction of the weights that a token uses (chosen experts / experts). Each weight in use is read once and
            takes two operations.
        tied: Whether the weights belong to another part and are only read here.
        flops: Operations of one layer besides those on weights, as in attention.
        state_bytes: The state of one layer that is read for a token.
        state_per_token_bytes: The growth of that state per token.
        state_held_bytes: The memory of that state. Default: `state_bytes`; 0 if the layer reads another layer's state.
    """
    found = weights_of(modules)
    parameters = sum(weight.numel() for weight in found)
    n_bytes = sum(weight.nbytes for weight in found)
    times = len(modules) if isinstance(modules, Mapping) else 1
    return Cost(
        part=part, kind=kind, layers=tuple(sorted(modules)) if isinstance(modules, Mapping) else (),
        parameters=0 if tied else parameters, weight_bytes=0 if tied else n_bytes, read_bytes=round(n_bytes * share),
        state_bytes=times * state_bytes, state_per_token_bytes=times * state_per_token_bytes,
        state_held_bytes=times * (state_bytes if state_held_bytes is None else state_held_bytes),
        flops=2 * round(parameters * share) + times * flops,
    )  # fmt: skip


def look_up(part: str, table: nn.Module, kind: str = "") -> Cost:
    """Return the cost of an embedding `table`: a token reads one row and needs no arithmetic."""
    held = weigh(part, table, kind=kind)
    rows = sum(weight.shape[0] for weight in weights_of(table))
    return Cost(part, (), held.parameters, held.weight_bytes, held.weight_bytes // rows, 0, 0, 0, 0, kind)


def weights_of(modules: Parts) -> list[Tensor | PackedMatrix]:
    """Return the weights of `modules`; a weight that several modules share occurs once."""
    flat = [module for some in modules.values() for module in some] if isinstance(modules, Mapping) else [modules]
    return list({id(weight): weight for module in flat for _, weight in named_weights(module)}.values())


def named_weights(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor | PackedMatrix]]:
    """Yield (name, weight) for the parameters and buffers of `module`; a packed matrix counts as one weight."""
    if isinstance(module, PackedMatrix):
        yield prefix, module
        return
    own: dict[str, Any] = {**module._parameters, **module._buffers}
    for name, weight in own.items():
        if isinstance(weight, torch.Tensor):
            yield f"{prefix}.{name}" if prefix else name, weight
    for name, child in module.named_children():
        yield from named_weights(child, f"{prefix}.{name}" if prefix else name)
