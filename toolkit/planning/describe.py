"""What a model costs before it is loaded: from a name or a path to shapes on "meta", and to what a token costs there.

Nothing is allocated and no weight is read, so it takes well under a second for a model of any size.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from toolkit.core.errors import ToolkitError
from toolkit.core.units import parse_bytes
from toolkit.gpu.catalogue import GpuSpec
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.loading.checkpoint import find_dtype, open_checkpoint
from toolkit.loading.layout import lay_out
from toolkit.planning.costs import Costs, costs_of
from toolkit.planning.plans import Levers, Plan, plan_of
from toolkit.tune.cards import find_card
from toolkit.weights.recipes import Recipe, recipe


def describe(
    path: str | os.PathLike[str],
    scheme: str | Recipe | None = None,
    dtype: torch.dtype | str | None = None,
    fuse: bool = True,
) -> Any:
    """The model that `tk.load` would make of `path` with these options, on "meta": every shape and scheme, no values."""
    checkpoint = open_checkpoint(path)
    chosen = "none" if scheme == "none" else None if scheme is None else recipe(scheme)
    return lay_out(checkpoint, open_device("cpu"), find_dtype(dtype) or checkpoint.dtype, chosen, fuse).model


def costs(
    model: Any,
    context: int | None = None,
    scheme: str | Recipe | None = None,
    dtype: torch.dtype | str | None = None,
) -> Costs:
    """What one token costs a model at batch 1: bytes held and read, operations, and the most tokens a second of every GPU.

    `model` is a loaded one, or a name as for `tk.load` ("random/gemma4-31b", a folder, a .gguf file): that is only
    looked at, as `scheme` and `dtype` would hold it. `context`: how many tokens came before (4,096 unless given). Shows itself
    as a table and a treemap; `.to_pandas()`, `.gpus()` and `.contexts()` are DataFrames.
    """
    if isinstance(model, str | os.PathLike):
        held = f", {scheme if isinstance(scheme, str) else scheme.name}" if scheme is not None else ""
        return costs_of(describe(model, scheme, dtype), context, f"{os.fspath(model)}{held}")
    if scheme is not None or dtype is not None:
        asked = f"costs of a {type(model).__name__} with scheme={scheme!r}, dtype={dtype!r}"
        raise ToolkitError(asked, "the model is loaded: it is held as it is", "Leave them out, or give the model's name")
    return costs_of(model, context)


def plan(
    model: Any,
    device: Device | str = "auto",
    budget: int | float | str | None = None,
    context: int | None = None,
    *,
    scheme: str | Recipe | None = None,
    dtype: torch.dtype | str | None = None,
    kv: str | None = "auto",
    run_budget: int | float | str | None = None,
    levers: Levers | None = None,
    name: str | None = None,
) -> Plan:
    """What exporting and running a model would take of a GPU, phase by phase: predicted from shapes, in well under a second.

    `model` is what `tk.load` takes, with `scheme` and `dtype` as there, or a loaded one. `device`: a name as for `tk.device`;
    the GPU needn't be there, and a virtual one isn't opened. `budget` ("4 GiB", 4e9) is for the GPU's memory while exporting,
    `run_budget` for running (all that the card has, unless given). `context`: 4,096 tokens unless given. `kv`: in what keys and
    values are held; "auto" takes the first of plain, "int8", "k4v8" and "int4" that fits. `levers`: what an export would do to
    need less (`toolkit.planning.plans.Levers`). `name`: what the plan calls the model.

    The plan shows itself; `.gpus()` is the table of all cards, `.check()` raises what doesn't fit. Raises ToolkitError for
    unknown names, sizes that are none, and contexts that the model hasn't.
    """
    spec = _figures(device)
    most, running = (None if size is None else parse_bytes(size) for size in (budget, run_budget))
    if isinstance(model, str | os.PathLike):
        held = f", {scheme if isinstance(scheme, str) else scheme.name}" if scheme is not None else ""
        shapes, own = describe(model, scheme, dtype), f"{os.fspath(model)}{held}"
    elif not hasattr(model, "new_cache"):
        raise ToolkitError("a plan", f"a {type(model).__name__}, not a model", "Give one that tk.load made, or a name or path")
    elif scheme is not None or dtype is not None:
        asked = f"a plan of a {type(model).__name__} with scheme={scheme!r}, dtype={dtype!r}"
        raise ToolkitError(asked, "the model is loaded: it is held as it is", "Leave them out, or give the model's name")
    else:
        shapes, own = model, type(model).__module__.rpartition(".")[2]
    return plan_of(shapes, name or own, spec, context, most, running, kv, levers or Levers())


def _figures(device: Device | str) -> GpuSpec | None:
    """Of the GPU called so, which needn't be there; None for the CPU. "auto" is what `tk.device` would open."""
    name = device.name if isinstance(device, Device) else str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "h200"
    if name.startswith("virtual:"):
        from toolkit.gpu.virtual.device import spec_of

        return spec_of(name.removeprefix("virtual:"))
    card = find_card(name)
    return None if card is None else card.spec
