"""`tk.load`: load a model from a path or a name onto a device.

The steps: `checkpoint` opens and checks the files, `layout` decides on "meta" how each weight is stored, `room` checks that the
device has enough memory, then all memory is allocated, and `fill` (or `drawing`, for random/NAME) writes the values.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from toolkit.core.distributed import WHOLE, Shard, check_same, join
from toolkit.core.errors import ModelError, ToolkitError, brief, kind_of, unknown_name
from toolkit.core.flags import flag
from toolkit.core.numbers import seed_of
from toolkit.core.progress import Counter, Progress
from toolkit.core.units import bytes_text
from toolkit.core.version import __version__
from toolkit.gpu.device import Device, Memory
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.device import VirtualGpu
from toolkit.loading.checkpoint import Checkpoint, find_dtype, open_headers, open_local, resolve
from toolkit.loading.download import Repository
from toolkit.loading.drawing import draw
from toolkit.loading.fill import Filler, scratch_for
from toolkit.loading.huggingface import import_transformers, wrap
from toolkit.loading.layout import Layout, lay_out
from toolkit.loading.report import Report
from toolkit.loading.room import check_empty, check_room, needed_bytes, too_big
from toolkit.models.model import CausalLM
from toolkit.models.places import assign
from toolkit.ops.exchange import links
from toolkit.weights.recipes import Recipe, recipe, storage
from toolkit.weights.schemes import Scheme


class OnRanks(Protocol):
    """Processes that load a model together: `toolkit.ranks.cluster.Cluster`."""

    def load(self, path: Any, **options: Any) -> Any:
        """Load a model on all ranks and return a handle of it."""


ENGINES = ("toolkit", "hf")
SMALLER = ("int8", "q4_k_m")  # schemes to propose if the weights do not fit, the most precise first


def load(
    path: str | os.PathLike[str] | nn.Module,
    device: Device | str = "auto",
    dtype: torch.dtype | str | None = None,
    scheme: str | Scheme | Recipe | None = None,
    engine: str | None = None,
    progress: bool | Progress = True,
    cancel: threading.Event | None = None,
    fuse: bool = True,
    seed: int = 0,
    revision: str | None = None,
    token: str | bool | None = None,
    tensor_parallel: int = 1,
    cluster: OnRanks | None = None,
) -> Any:
    """Load a model onto a device, ready for `tk.generate` and for `model(ids)`.

    Args:
        path: a demo model ("demo/qwen3"), real shapes with random weights ("random/qwen3-8b"; sizes only on a virtual GPU), a
            Hugging Face folder (config.json, .safetensors files, tokenizer.json), a .gguf file, or a repository on the Hugging
            Face Hub ("Qwen/Qwen3-8B"; "ORG/REPO:FILE.gguf" for one GGUF model), which is downloaded into the cache of
            huggingface_hub. A path that exists is used before a name.
        device: a Device or a name that `tk.device` accepts.
        dtype: the dtype of computation. Default: the one in config.json, else that of the stored weights; bfloat16 for
            quantized and random weights.
        scheme: how matrices are stored on the device. None: as in the file (quantized matrices stay packed, no value
            changes). "none": in `dtype`. "q4_k_m", "int4", "int8" or another scheme: quantize while loading (min-max).
        engine: "hf" loads the model of transformers from a folder or a repository. An instance of such a model needs no
            engine. `scheme` is refused for these models, `tensor_parallel` for instances; `fuse` and `seed` have no effect.
        progress: True (one line on a terminal or in a notebook), False, or a function of (done_bytes, total_bytes, tensor
            name), which is called at most ten times a second and once at the end. If it raises, loading stops. A download
            reports in the same way before the load.
        cancel: an event that stops loading. The device memory is freed.
        fuse: False keeps matrices separate that share an input and would be multiplied as one (gate and up; q, k and v).
        seed: seed of the random weights of "random/NAME".
        revision: branch, tag or commit of the repository. Default: "main".
        token: access token of the Hub. Default: HF_TOKEN, else the one that `hf auth login` saved. False: none.
        tensor_parallel: the number of ranks that divide the model: all processes of torch.distributed's default group, which
            torchrun starts. Each of them calls `load` with the same arguments, and reads and holds only its part.
        cluster: a cluster from `tk.cluster`, whose ranks load the model on its devices, each its part. `tk.generate` and
            `tk.compare` then run on all ranks. Leave out device= and functions of progress.

    Returns the model. `model.report` describes the load; an instance has none. Raises FormatError if files are missing,
    damaged or do not match the config, UnknownNameError for an unknown model, scheme or dtype, ModelError for an unknown
    architecture or a scheme that can hold no matrix, DeviceError if the weights do not fit on the device (of a repository,
    before they are downloaded),
    HubError if a repository cannot be downloaded, RankError if the ranks differ or are missing, and CancelledError.
    """
    fuse = flag("fuse", fuse)
    given = dict(locals())
    if cluster is not None:
        if not hasattr(cluster, "load"):
            raise ModelError(f"loading onto {brief(cluster)}", "that is no cluster", "Give the result of tk.cluster(...)")
        return cluster.load(**{name: value for name, value in given.items() if name != "cluster"})
    if engine not in (None, *ENGINES):
        raise unknown_name("engine", engine, ENGINES)
    if not isinstance(path, str | os.PathLike | nn.Module):
        raise ToolkitError(
            f"model {brief(path)}", f"{kind_of(path)}, not a path", 'Pass "demo/qwen3", a folder or a .gguf file'
        )
    if engine == "hf" or isinstance(path, nn.Module):
        chosen = _option_of_wrapped(dtype, engine, scheme, tensor_parallel, path)
        shard = join(tensor_parallel)
        if shard != WHOLE:
            check_ranks(shard, brief(path), open_device(device), dtype=chosen)
        if not isinstance(path, nn.Module):
            found = resolve(os.fspath(path), revision, token)
            if isinstance(found, Repository):  # what can be refused is refused before the download
                import_transformers()
                open_device(device)
            return wrap(_whole(found, progress, cancel), device, chosen, shard)
        return wrap(path, device, chosen, shard)
    if (drawn := seed_of(seed)) is None:
        raise ToolkitError(
            f"random weights of seed={brief(seed)}", "not a seed", "Give a whole number from -2**63 to 2**64 - 1"
        )
    chosen, wanted, shard = find_dtype(dtype), storage(scheme), join(tensor_parallel)
    asked, found = os.fspath(path), resolve(os.fspath(path), revision, token)
    return _load(asked, found, device, chosen, wanted, fuse, shard, drawn, progress, cancel)


def load_part(
    path: str | os.PathLike[str], shard: Shard, dtype: torch.dtype | str | None = None, scheme: str | Recipe | None = None,
    progress: bool | Progress = True, cancel: threading.Event | None = None,
) -> CausalLM:  # fmt: skip
    """Load the part of a model that one rank holds onto the CPU, without the other ranks, so that it can't run."""
    asked, chosen, wanted = os.fspath(path), find_dtype(dtype), storage(scheme)
    return _load(asked, resolve(asked), "cpu", chosen, wanted, True, shard, 0, progress, cancel, alone=True)


def check_load(path: Path, scheme: str | Recipe | None, name: str, total: int, shard: Shard = WHOLE) -> None:
    """Raise the error of `load` for files that can't be loaded, or weights that exceed the memory of a GPU that is empty.

    The GPU called `name` has `total` bytes, or memory that isn't counted if that is 0. It need not be open.
    """
    checkpoint, device = open_local(path), open_device("cpu")
    layout = lay_out(checkpoint, device, checkpoint.dtype, storage(scheme), True, shard)
    if total:
        needed = needed_bytes(layout.model.parameters())
        smaller = _smaller(checkpoint, device, checkpoint.dtype, shard, needed)
        check_empty(_described(checkpoint, layout), name, total, needed, smaller)


def _load(
    asked: str, found: Path | Repository, device: Device | str, chosen: torch.dtype | None, wanted: Recipe | str | None,
    fuse: bool, shard: Shard, drawn: int, progress: bool | Progress, cancel: threading.Event | None, alone: bool = False,
) -> CausalLM:  # fmt: skip
    """Load a model, or the part that `shard` holds; `alone` if there is no process for each rank."""
    if isinstance(found, Repository):  # download its weights only if the device exists and has room for them
        card = open_device(device)
        described = open_headers(found, cancel)
        if described is not None:
            _check(described, lay_out(described, card, chosen or described.dtype, wanted, fuse, shard), card)
    local, began = _whole(found, progress, cancel), time.perf_counter()
    counter = Counter(f"loading {asked}", progress, cancel, "Its memory was released; it can be loaded again", bytes_text)
    checkpoint = open_local(local)
    target = open_device(device)
    if not alone:
        facts = {"config": checkpoint.config, "dtype": chosen or checkpoint.dtype, "scheme": wanted, "seed": drawn}
        check_ranks(shard, asked, target, **facts)
    layout = lay_out(checkpoint, target, chosen or checkpoint.dtype, wanted, fuse, shard)
    before = target.memory()
    with target.sizes_only() if checkpoint.weights is None else nullcontext():
        _place(checkpoint, layout, target, counter, drawn)
    layout.model.report = _report(checkpoint, layout, target, before, counter.total, time.perf_counter() - began)
    return layout.model


def check_ranks(shard: Shard, asked: str, device: Device, **facts: object) -> None:
    """Check that the ranks load the same model on devices of one kind, on which they can exchange results."""
    if shard == WHOLE:
        return
    card = device.name if device.spec is None else device.spec.name
    check_same(shard, f"loading {asked}", device=card, torch=torch.__version__, toolkit=__version__, **facts)
    if device.torch.type == "cuda":
        torch.cuda.set_device(device.torch)  # NCCL and launch plans use the current one
        links(device.torch)


def _option_of_wrapped(
    dtype: torch.dtype | str | None, engine: str | None, scheme: object, tensor_parallel: object, path: object
) -> torch.dtype | None:
    """Return the dtype of a model of transformers. Raises ModelError for options that apply to the toolkit's models only."""
    if isinstance(path, nn.Module) and tensor_parallel != 1:
        found = f"tensor_parallel={tensor_parallel!r}, and transformers divides weights only while it loads them"
        raise ModelError(f"an instance of {type(path).__name__}", found, 'Pass its folder with engine="hf"')
    if scheme is not None or engine == "toolkit":
        option = "engine='toolkit'" if engine == "toolkit" else f"scheme={scheme!r}"
        raise ModelError(
            "a model of transformers", f"{option} applies to the toolkit's models only", "Leave it out, or pass a path"
        )
    return find_dtype(dtype)


def _whole(found: Path | Repository, progress: bool | Progress, cancel: threading.Event | None) -> Path:
    """Return the path of a model, after downloading it if it is a repository."""
    return found.download(progress, cancel) if isinstance(found, Repository) else found


def _place(checkpoint: Checkpoint, layout: Layout, device: Device, counter: Counter, seed: int) -> None:
    """Allocate the weights of a layout and fill them. If anything fails, all device memory is freed."""
    model = layout.model
    what, needed = _check(checkpoint, layout, device)
    largest = max(parameter.nbytes for parameter in model.parameters())
    try:
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                assign(module, name, torch.empty(parameter.shape, dtype=parameter.dtype, device=device.torch))
        if checkpoint.weights is None:
            draw(model, device, seed, counter, model.shard)
        else:
            Filler(checkpoint.weights, device.torch, scratch_for(largest), counter).fill(model, checkpoint.names)
        device.sync()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        _empty(model, device)
        if isinstance(error, torch.OutOfMemoryError):
            raise too_big(what, device, needed, _smaller(checkpoint, device, model.dtype, model.shard, needed)) from error
        raise
    model.tokenizer = checkpoint.tokenizer
    model.requires_grad_(False).eval()


def _check(checkpoint: Checkpoint, layout: Layout, device: Device) -> tuple[str, int]:
    """Return what is loaded and the bytes that it needs. Raises DeviceError if the device does not have them free."""
    needed = needed_bytes(layout.model.parameters())
    what = _described(checkpoint, layout)
    check_room(what, device, needed, _smaller(checkpoint, device, layout.model.dtype, layout.model.shard, needed))
    return what, needed


def _described(checkpoint: Checkpoint, layout: Layout) -> str:
    return f"{checkpoint.path.name} in {', '.join(layout.held())}"


def _smaller(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, shard: Shard, needed: int
) -> Iterator[tuple[str, int]]:
    """Yield options that need less than `needed` bytes, with the bytes that they need."""
    ways: list[tuple[str, torch.dtype, Recipe | str | None]] = []
    if dtype.itemsize > 2:
        ways.append(('dtype="bfloat16"', torch.bfloat16, None))
    ways += [(f'scheme="{name}"', torch.bfloat16, recipe(name)) for name in SMALLER]
    for option, held_in, way in ways:
        with suppress(ModelError):  # it can quantize nothing
            size = needed_bytes(lay_out(checkpoint, device, held_in, way, False, shard).model.parameters())
            if size < needed:
                yield option, size


def _empty(model: nn.Module, device: Device) -> None:
    """Free every weight now, because a traceback may keep the model alive."""
    for name in [name for name, _ in model.named_parameters()]:
        assign(model, name, torch.empty(0, device="meta"))
    empty_cache = getattr(torch.get_device_module(device.torch), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def _report(
    checkpoint: Checkpoint, layout: Layout, device: Device, before: Memory, stored_bytes: int, seconds: float
) -> Report:
    held, after = layout.held(), device.memory()
    drawn = checkpoint.weights is None
    return Report(
        source=str(checkpoint.path), device=device.name, fused=layout.fused, bytes_by_kind=dict(held.most_common()),
        weight_bytes=held.total(), allocated_bytes=needed_bytes(layout.model.parameters()),
        peak_bytes=after.peak_bytes - before.allocated_bytes if after.peak_bytes > before.peak_bytes else None,
        stored_bytes=0 if drawn else stored_bytes, skipped=checkpoint.skipped, seconds=seconds, drawn=drawn,
        sizes_only=drawn and isinstance(device, VirtualGpu), shard=layout.model.shard, unquantized=layout.model.unquantized,
    )  # fmt: skip
