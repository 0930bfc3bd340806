"""The problems that a model's operations give to kernels, for the tuner and for compiling ahead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from toolkit import ops
from toolkit.kernels.filters import NUMBERS, WORK, Rules
from toolkit.models.layers import Residual

if TYPE_CHECKING:
    from toolkit.models.model import CausalLM
    from toolkit.ops.define import Problem

OF_EACH = 2  # layers: the first one of a model has no layer before it whose output it adds


def samples(model: CausalLM) -> list[int]:
    """Return the numbers of layers that use all kernels: some of each kind, and those whose keys and values these share."""
    counted: Counter[str] = Counter()
    found: set[int] = set()
    for number, layer in enumerate(model.layers):
        kind = repr(describe(layer))
        counted[kind] += 1
        if counted[kind] <= OF_EACH:
            found |= {number, model.source(number)}
    return sorted(found)


def problems_of(model: CausalLM, layers: Sequence[int], parts: Iterable[int], context: int, kv: str | None) -> list[Problem]:
    """Return (kernel, shape, inputs) of feeding `parts`, numbers of tokens, one after the other, and of sampling.

    The inputs are on "meta". The tokens pass through `layers`, with a cache for `context` tokens in the format `kv`. On CUDA,
    no kernel of the toolkit is launched. Of sampling, the greedy choice and the plain draw are included.
    """
    device, start = model.device.torch, 0
    with torch.no_grad(), ops.describe_problems() as found:
        cache = model.new_cache(context, kv)
        try:
            for tokens in parts:
                positions = torch.arange(start, start + tokens, device=device)
                start += tokens
                x = model.embed(torch.zeros(1, tokens, dtype=torch.int64, device=device))
                at = model.passing(x, cache, model.reaches(positions, cache, start))
                x, given = model.enter(x)
                residual = Residual(x)
                for layer in layers:
                    residual = model.run_layer(layer, residual, at, *given[layer : layer + 1])
                logits = model.logits(residual.sum()[:, -1:]).view(-1)
            number, whole = partial(torch.zeros, dtype=torch.float64), partial(torch.zeros, dtype=torch.int64)
            rules = Rules(number(len(NUMBERS), device=device), whole(2, device=device), whole(WORK, device=device))
            for draw in (False, True):
                ops.sample(logits, replace(rules, draw=draw), whole(1, device=device), whole(1, device=device))
        finally:
            cache.free()  # also if a notebook keeps the traceback of an error
    return found


def describe(value: Any) -> Any:
    """Describe everything in a module that determines its graph: classes, attributes and shapes, but no index or weights.

    An object of an unknown type is described by its address, so that it never matches another one: the same work twice is
    better than the wrong code.
    """
    if isinstance(value, nn.Module):
        left_out = ("layer", "source", "training")
        own = {n: describe(v) for n, v in sorted(vars(value).items()) if not n.startswith("_") and n not in left_out}
        held = [(n, str(p.dtype), tuple(p.shape)) for n, p in value.named_parameters(recurse=False)]
        return [type(value).__qualname__, own, held, [(n, describe(m)) for n, m in value.named_children()]]
    if isinstance(value, partial):
        return [describe(value.func), describe(value.args), describe(value.keywords)]
    if isinstance(value, dict):
        return [(describe(k), describe(v)) for k, v in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(describe, value)]
    if isinstance(value, Callable) and hasattr(value, "__qualname__"):  # type: ignore[arg-type]
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)
