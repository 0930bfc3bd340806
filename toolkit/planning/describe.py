"""`tk.costs` and `tk.plan`: compute costs and memory of a model from its shapes, before it is loaded.

The model is created on the "meta" device. Nothing is allocated and no weight is read, so this takes under a second.
"""

from __future__ import annotations

import os

import torch
from torch import nn

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import ToolkitError, brief, kind_of, unknown_name
from toolkit.core.numbers import integer
from toolkit.core.remote import check_here
from toolkit.core.units import parse_bytes
from toolkit.decode.prefix import check_chunk
from toolkit.gpu.catalogue import GpuSpec
from toolkit.gpu.device import Device
from toolkit.gpu.opening import name_of, open_device
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.loading.checkpoint import find_dtype, open_checkpoint
from toolkit.loading.layout import lay_out
from toolkit.models.cuts import parts_of
from toolkit.models.layers import Linear
from toolkit.models.model import CausalLM, Model
from toolkit.planning.costs import Costs, costs_of
from toolkit.planning.plans import Levers, Plan, plan_of
from toolkit.tune.cards import find_card
from toolkit.weights.recipes import Recipe, storage


def describe(
    path: str | os.PathLike[str], scheme: str | Recipe | None = None, dtype: torch.dtype | str | None = None, fuse: bool = True,
    shard: Shard = WHOLE,
) -> CausalLM:  # fmt: skip
    """Return the model, or the part of it, that `tk.load` would create from `path`, on "meta": shapes and schemes alone."""
    checkpoint = open_checkpoint(path)
    wanted = storage(scheme)
    return lay_out(checkpoint, open_device("cpu"), find_dtype(dtype) or checkpoint.dtype, wanted, fuse, shard).model


def costs(
    model: Model | nn.Module | str | os.PathLike[str],
    context: int | None = None,
    scheme: str | Recipe | None = None,
    dtype: torch.dtype | str | None = None,
) -> Costs:
    """Return the cost of one token at batch size 1: bytes stored and read, operations, and an upper bound of tokens/s per GPU.

    `model` is a loaded model, or a name that `tk.load` accepts ("random/gemma4-31b", a folder, a .gguf file). A named model is
    not loaded; its costs are those with `scheme` and `dtype`. `context` is the number of tokens before this one (default:
    4,096, or the maximum of the model or package if that is less). The result displays as a table and a treemap in a notebook;
    `.to_pandas()`, `.gpus()` and `.contexts()` return DataFrames.

    Raises ToolkitError if `scheme` or `dtype` is given for a loaded model, ModelError if `context` is not a number of
    positions, UnknownNameError for an unknown model or scheme, and FormatError for damaged files.
    """
    if isinstance(model, str | os.PathLike):
        return costs_of(describe(model, scheme, dtype), context, _name(model, scheme))
    check_here(model, "costs of a model on a cluster", "Give its name, for the costs of the whole model: tk.costs({named})")
    if scheme is not None or dtype is not None:
        asked = f"costs of {kind_of(model)} with scheme={scheme!r}, dtype={dtype!r}"
        raise ToolkitError(asked, "the model is already loaded", "Leave out scheme and dtype, or pass the name")
    return costs_of(model, context)


def plan(
    model: CausalLM | str | os.PathLike[str],
    device: Device | GpuSpec | str = "auto",
    budget: int | float | str | None = None,
    context: int | None = None,
    *,
    scheme: str | Recipe | None = None,
    dtype: torch.dtype | str | None = None,
    kv: str | None = "auto",
    run_budget: int | float | str | None = None,
    levers: Levers | None = None,
    name: str | None = None,
    prefill_chunk: int | None = None,
    tensor_parallel: int = 1,
) -> Plan:
    """Predict the GPU memory of exporting and running a model, phase by phase, from its shapes.

    Args:
        model: a loaded model, or a name that `tk.load` accepts (`scheme` and `dtype` as there).
        device: a name that `tk.device` accepts, or a GPU of `tk.GPUS`. The GPU need not exist, and a virtual GPU is not opened.
        budget: GPU memory for the export, in bytes or as text ("4 GiB").
        context: tokens in the KV cache (default: 4,096, the model's maximum if that is less, or that of a package).
        kv: format of keys and values. None is plain, as for `tk.generate`, and "auto" the first of plain, "int8", "k4v8" and
            "int4" that fits. A package has its own format.
        run_budget: GPU memory for running (default: all memory of the GPU).
        levers: measures by which the export saves memory (`toolkit.planning.plans.Levers`).
        name: the model's name in the plan.
        prefill_chunk: tokens of a prompt that are fed at a time (default: as in `tk.generate`). Fewer need less memory.
        tensor_parallel: the number of ranks that divide the model, each on a GPU of its own (see `tk.load`). All sizes are then
            those of one GPU, also the budgets; `.by_rank()` is a table of all ranks.

    Returns a Plan, which displays itself in a notebook. `.gpus()` is a table of all GPUs, and `.check()` raises an error if
    the plan does not fit. Raises ToolkitError for unknown names, invalid sizes, contexts that the model does not support, and
    numbers of ranks that can't divide the model.
    """
    check_here(model, "a plan of a model on a cluster", "Give its name: tk.plan({divided})")
    if kv not in (None, "auto", *KV_SCHEMES):
        raise unknown_name("KV scheme", kv, ["None (plain)", "auto", *KV_SCHEMES])
    spec = _figures(device)
    most, running = (None if size is None else parse_bytes(size) for size in (budget, run_budget))
    if isinstance(model, str | os.PathLike):
        shapes, own = describe_parts(model, scheme, dtype, tensor_parallel), _name(model, scheme)
    elif not isinstance(model, CausalLM) and not hasattr(model, "package"):
        do = 'Pass a name, a path, or a model of tk.load or tk.load_exported that is not loaded with engine="hf"'
        raise ToolkitError("a plan", f"{kind_of(model)} is not a model of the toolkit", do)
    elif scheme is not None or dtype is not None or tensor_parallel != 1:
        asked = f"a plan of {kind_of(model)} with scheme={scheme!r}, dtype={dtype!r}, tensor_parallel={tensor_parallel!r}"
        raise ToolkitError(asked, "the model is already loaded", "Leave out these options, or pass the name")
    elif package := getattr(model, "package", None):
        shapes, own = [model], package.name
        context = getattr(model, "context", None) if context is None else context
        kv = getattr(model, "kv", None) if kv in (None, "auto") else kv
    else:
        shapes, own = [model], type(model).__module__.rpartition(".")[2]
    if levers is not None and not isinstance(levers, Levers):
        raise ToolkitError("a plan", f"levers={brief(levers)}", "Pass a toolkit.planning.plans.Levers")
    chunk = None if prefill_chunk is None else check_chunk(prefill_chunk)
    return plan_of(shapes, name or own, spec, context, most, running, kv, levers or Levers(), chunk)


def _name(path: str | os.PathLike[str], scheme: str | Recipe | None) -> str:
    held = "" if scheme is None else f", {scheme if isinstance(scheme, str) else scheme.name}"
    return f"{os.fspath(path)}{held}"


def describe_parts(
    path: str | os.PathLike[str], scheme: str | Recipe | None, dtype: torch.dtype | str | None, ranks: object
) -> list[CausalLM]:
    """Return what each rank would load, on "meta". Ranks whose parts have the same sizes share one model.

    Parts may differ in the number of tokens of the vocabulary and of blocks of weights. Raises ModelError if the ranks can't
    divide the model.
    """
    count = integer(ranks, least=1)
    if count is None:
        raise ToolkitError(f"a plan for {brief(ranks)} ranks", "not a whole number of at least 1", "Try tensor_parallel=2")
    first = describe(path, scheme, dtype, shard=Shard(0, count))
    parts = zip(first.vocab_sizes, *(parts_of(blocks, count) for blocks in _uneven(first)), strict=True)
    made, found = {}, []
    for rank, held in enumerate(parts):
        if held not in made:
            made[held] = describe(path, scheme, dtype, shard=Shard(rank, count)) if rank else first
        found.append(made[held])
    return found


def _uneven(model: CausalLM) -> set[int]:
    """Return how many blocks each row has that the ranks divide unequally."""
    columns = (module.cuts["weight"][1] for module in model.modules() if isinstance(module, Linear))
    return {cut.size // model.shard.block for cut in columns if cut.held * cut.shard.ranks != cut.size}


def _figures(device: Device | GpuSpec | str) -> GpuSpec | None:
    """Return the figures of the named GPU, which need not exist; None for the CPU. "auto" is resolved as by `tk.device`."""
    if isinstance(device, GpuSpec):
        return device
    name = device.name if isinstance(device, Device) else name_of(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "h200"
    card = find_card(name)
    return None if card is None else card.spec
