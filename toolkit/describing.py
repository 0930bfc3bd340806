"""What a model costs before it is loaded: from a name or a path to shapes on "meta", and to what a token costs there.

Nothing is allocated and no weight is read, so it takes well under a second for a model of any size.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from toolkit.costing import Costs, costs_of
from toolkit.devices.base import open_device
from toolkit.errors import ToolkitError
from toolkit.loading.checkpoint import find_dtype, open_checkpoint
from toolkit.loading.layout import lay_out
from toolkit.recipes import Recipe, recipe


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
