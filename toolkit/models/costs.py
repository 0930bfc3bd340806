"""What a part of a model holds and what one token costs it: counted from its weights, plain or packed, also on "meta".

A model file says which modules are which part, and what a token's arithmetic and state are there; bytes and parameters
are counted here. It knows no GPU.
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
    """One part of a model. What it holds, and what one token costs it when that many tokens came before.

    `part`: "embedding", "attention", "delta net", "mlp", "experts", "router", "norms", "head" or "per-layer inputs".
    `kind` tells parts of one name apart ("sliding", "full"). `layers`: the numbers of the layers that have it, none for
    what stands outside the layers.
    """

    part: str
    layers: tuple[int, ...]
    parameters: int
    weight_bytes: int  # all it holds
    read_bytes: int  # of weights, for one token
    state_bytes: int  # KV read for one token, recurrent state read and written back
    state_per_token_bytes: int  # by which the state grows with a token
    state_held_bytes: int  # memory the state takes
    flops: int  # for one token
    kind: str = ""


class Shown:
    """Mixed into a model (before nn.Module): it shows itself as what it holds and what a token costs, not as its modules."""

    def __repr__(self) -> str:
        return str(render("text", self))

    def _repr_html_(self) -> str:
        return str(render("html", self))


Parts = nn.Module | Mapping[int, Sequence[nn.Module]]


def each(layers: nn.ModuleList, *names: str, only: Collection[int] | None = None) -> dict[int, list[nn.Module]]:
    """The modules called `names` ("attention", "mlp.down") of every layer, by its number; of the layers in `only`."""
    chosen = [i for i in range(len(layers)) if only is None or i in only]
    return {i: [layers[i].get_submodule(name) for name in names] for i in chosen}


def weigh(
    part: str,
    modules: Parts,
    *,
    kind: str = "",
    share: float = 1.0,
    tied: bool = False,
    flops: int = 0,
    state_bytes: int = 0,
    state_per_token_bytes: int = 0,
    state_held_bytes: int | None = None,
) -> Cost:
    """The cost of `modules`: one that stands outside the layers, or those of each layer by its number (see `each`).

    `share`: how much of the weights a token uses (chosen experts / experts); each used weight is read once and takes two
    operations. `tied`: the weights belong to another part, and are only read here. The other figures are a single
    layer's: `flops` beside the weights (attention, recurrence); the state read for a token; by how much it grows;
    and the memory it takes (None: as much as is read; 0 where another layer's is read).
    """
    found = weights_of(modules)
    parameters = sum(weight.numel() for weight in found)
    n_bytes = sum(weight.nbytes for weight in found)
    times = len(modules) if isinstance(modules, Mapping) else 1
    return Cost(
        part=part,
        kind=kind,
        layers=tuple(sorted(modules)) if isinstance(modules, Mapping) else (),
        parameters=0 if tied else parameters,
        weight_bytes=0 if tied else n_bytes,
        read_bytes=round(n_bytes * share),
        state_bytes=times * state_bytes,
        state_per_token_bytes=times * state_per_token_bytes,
        state_held_bytes=times * (state_bytes if state_held_bytes is None else state_held_bytes),
        flops=2 * round(parameters * share) + times * flops,
    )


def look_up(part: str, table: nn.Module, kind: str = "") -> Cost:
    """The cost of an embedding `table`: a token reads one row of its weight, and there is nothing to multiply."""
    held = weigh(part, table, kind=kind)
    rows = sum(weight.shape[0] for weight in weights_of(table))
    return Cost(part, (), held.parameters, held.weight_bytes, held.weight_bytes // rows, 0, 0, 0, 0, kind)


def weights_of(modules: Parts) -> list[Tensor | PackedMatrix]:
    """Every weight of `modules`, each once, though several of them may share it."""
    flat = [module for some in modules.values() for module in some] if isinstance(modules, Mapping) else [modules]
    return list({id(weight): weight for module in flat for _, weight in named_weights(module)}.values())


def named_weights(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor | PackedMatrix]]:
    """(name, weight) of everything `module` holds: parameters and buffers, and packed matrices as one weight each."""
    if isinstance(module, PackedMatrix):
        yield prefix, module
        return
    own: dict[str, Any] = {**module._parameters, **module._buffers}
    for name, weight in own.items():
        if isinstance(weight, torch.Tensor):
            yield f"{prefix}.{name}" if prefix else name, weight
    for name, child in module.named_children():
        yield from named_weights(child, f"{prefix}.{name}" if prefix else name)
