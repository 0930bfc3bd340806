"""From a path to a model on a device: a demo model, a Hugging Face folder, or a GGUF file, tensor by tensor.

Weights stay in the mapped file until their turn comes; each crosses to the device once. Which architectures there
are, and what their weights are called, the models say; this file knows none by name.
"""

from __future__ import annotations

import difflib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from toolkit import tokenizer as tokenizers
from toolkit.devices.base import Device, open_device
from toolkit.errors import DeviceError, FormatError, ModelError, ToolkitError, unknown_name
from toolkit.formats.gguf import GgufFile
from toolkit.formats.safetensors import PICKLES, open_safetensors, pickled, read_json
from toolkit.formats.stored import Stored, Weights, nearest
from toolkit.models import ARCHITECTURES
from toolkit.models.layers import Source, assign
from toolkit.units import bytes_text

if TYPE_CHECKING:
    from toolkit.models.qwen3 import Config, Model
    from toolkit.tokenizer import Tokenizer

Progress = Callable[[int, int, str], None]
DEMOS = Path(__file__).parent / "demo"
DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16, "half": torch.float16,
}  # fmt: skip
REPORTS_PER_S = 10


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: its weights, the architecture they are of, and everything needed to build the model."""

    path: Path
    weights: Weights
    architecture: ModuleType
    config: Config
    names: Mapping[str, str]  # our parameter names to the file's
    dtype: torch.dtype  # what the model computes in unless asked otherwise
    tokenizer: Tokenizer | None


def load(
    path: str | os.PathLike[str],
    device: Device | str = "auto",
    dtype: torch.dtype | str | None = None,
    scheme: str | None = None,
    engine: str | None = None,
    progress: bool | Progress = True,
) -> Model:
    """Load a model onto a device, ready for `tk.generate` and for `model(ids)`.

    `path` is "demo/qwen3", a Hugging Face folder (config.json, one or many .safetensors, tokenizer.json), or a .gguf
    file. `dtype` is what the model computes in; by default what config.json says, else what the weights are stored in
    (bfloat16 for quantised ones, which are dequantised). `scheme` and `engine` must be None in this version.
    `progress` is True (a line on a terminal), False, or a function of (done_bytes, total_bytes, tensor name) that is
    called at most ten times a second and at the end. If it raises, the load ends and the device memory is given back.

    Raises FormatError for files that are missing, damaged or don't fit the config, ModelError for an unknown
    architecture, DeviceError where the weights don't fit on the device.
    """
    if not isinstance(path, str | os.PathLike):
        raise ToolkitError(
            f"model {path!r:.80}", f"a {type(path).__name__}, not a path", 'Give "demo/qwen3", a folder or a .gguf file'
        )
    asked = os.fspath(path)
    if scheme is not None or engine is not None:
        option, value = ("scheme", scheme) if scheme is not None else ("engine", engine)
        raise ToolkitError(f"{option}={value!r} for {asked}", "not in this version", f"Leave {option} out")
    chosen = _dtype(dtype)
    checkpoint = open_checkpoint(asked)
    target = open_device(device)
    report = _reporter(progress, asked)
    return _place(checkpoint, target, chosen or checkpoint.dtype, report)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open what `load` takes and check it (names, shapes, dtypes, tokenizer) without reading a weight."""
    found = _resolve(os.fspath(path))
    checkpoint = _open_gguf(found) if found.suffix == ".gguf" else _open_folder(found)
    _check_names(checkpoint)
    known = 0 if checkpoint.tokenizer is None else checkpoint.tokenizer.vocab_size
    if known > checkpoint.config.vocab_size:
        raise FormatError(
            f"tokenizer of {found}",
            f"it has {known:,} tokens, the model knows {checkpoint.config.vocab_size:,}",
            "Use the tokenizer that belongs to these weights",
        )
    return checkpoint


def _resolve(asked: str) -> Path:
    """The folder or .gguf file that the user means by `asked`; a ToolkitError that says what would do, otherwise."""
    family, _, name = asked.partition("/")
    if family == "random" and not Path(asked).exists():
        raise ToolkitError(
            f"model {asked!r}", "random models are not in this version", 'Use "demo/qwen3" or a checkpoint of yours'
        )
    if family == "demo":
        demos = {p.parent.name for p in DEMOS.glob("*/config.json")}
        if name in demos:
            return DEMOS / name
        if not Path(asked).exists():
            raise unknown_name("demo model", asked, [f"demo/{demo}" for demo in demos])
    path = Path(asked).expanduser()
    if path.suffix in PICKLES and path.exists():
        raise pickled(path)
    if path.suffix == ".safetensors" and path.is_file():
        if not (path.parent / "config.json").exists():
            raise FormatError(
                f"model {path}", "weights alone, without a config.json beside them", "Give a folder that has both"
            )
        return path.parent
    if path.is_dir() or (path.is_file() and path.suffix == ".gguf"):
        return path
    if path.exists():
        raise FormatError(f"model {path}", "neither a folder nor a .gguf file", "Give a Hugging Face folder or a .gguf file")
    do = 'Give "demo/qwen3", a Hugging Face folder, or a .gguf file'
    if asked.count("/") == 1 and not asked.startswith((".", "~", "/")) and "\\" not in asked:
        do += f". Nothing is downloaded for you; from the Hub: hf download {asked} --local-dir {name}"
    raise FormatError(f"model {asked!r}", "no such file or folder", do)


def _open_folder(folder: Path) -> Checkpoint:
    values = read_json(folder / "config.json", "config", max_bytes=16 << 20)
    architecture = _architecture(values.get("model_type"), f"config {folder / 'config.json'}", values.get("architectures"))
    config = architecture.Config.from_hf(values)
    weights = open_safetensors(folder)
    named = values.get("dtype", values.get("torch_dtype"))
    dtype = DTYPES.get(str(named).removeprefix("torch.")) or _most(weights.stored.values())
    _check_layers(folder, config, weights)
    tokenizer = tokenizers.from_folder(folder)
    return Checkpoint(folder, weights, architecture, config, _single(architecture.names_hf(config)), dtype, tokenizer)


def _open_gguf(path: Path) -> Checkpoint:
    weights = GgufFile(path)
    architecture = _architecture(weights.metadata.get("general.architecture"), f"GGUF file {path}")
    config = architecture.Config.from_gguf(weights.metadata, {name: t.shape for name, t in weights.stored.items()})
    _check_layers(path, config, weights)
    dtype = _most(weights.stored.values())
    tokenizer = tokenizers.from_gguf(weights.metadata, str(path))
    return Checkpoint(path, weights, architecture, config, _single(architecture.names_gguf(config)), dtype, tokenizer)


def _single(sources: Mapping[str, Source]) -> dict[str, str]:
    return {ours: source.names[0] for ours, source in sources.items()}


def _architecture(name: object, asked: str, classes: object = None) -> ModuleType:
    known = ", ".join(ARCHITECTURES)
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    what = "it doesn't say its architecture" if name is None else f"its architecture is {name!r:.60}"
    also = f" ({', '.join(map(str, classes))[:80]})" if isinstance(classes, list) and classes else ""
    raise ModelError(asked, what + also, f"This version loads: {known}", architecture=name, known=list(ARCHITECTURES))


def _check_layers(path: Path, config: Config, weights: Weights) -> None:
    """Refuse a config with more layers than there are tensors, before its names (2**31 layers' worth?) are listed."""
    if config.num_hidden_layers > len(weights.stored):
        found = f"the config has {config.num_hidden_layers:,} layers, the weights are {len(weights.stored):,} tensors"
        raise FormatError(f"model {path}", found, "Check that config and weights belong together")


def _most(stored: Iterable[Stored]) -> torch.dtype:
    """The dtype that most bytes are stored in; bfloat16 where that is a quantised one or none to compute in."""
    totals: dict[torch.dtype | None, int] = {}
    for tensor in stored:
        totals[tensor.dtype] = totals.get(tensor.dtype, 0) + tensor.nbytes
    most = max(totals, key=lambda dtype: totals[dtype], default=None)
    return most if most in DTYPES.values() and most is not None else torch.bfloat16


def _dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype.removeprefix("torch.") not in DTYPES:
            raise unknown_name("dtype", dtype, DTYPES)
        return DTYPES[dtype.removeprefix("torch.")]
    if dtype is not None and dtype not in DTYPES.values():
        raise ToolkitError(f"dtype={dtype!r}", "not one that models compute in", "Use float32, bfloat16 or float16")
    return dtype


def _check_names(checkpoint: Checkpoint) -> None:
    """Every weight of the model is in the file, and every tensor of the file has its place in the model."""
    stored, wanted = checkpoint.weights.stored, set(checkpoint.names.values())
    asked = f"weights of {checkpoint.path}"
    missing = sorted(wanted - set(stored))
    unknown = sorted(name for name in set(stored) - wanted if not _redundant(name, checkpoint.config))
    if missing:
        found = f"{len(missing)} of {len(wanted)} tensors are missing: {', '.join(missing[:3])}"
        raise FormatError(asked, found, nearest(missing[0], unknown), missing=missing, unknown=unknown)
    if unknown:
        found = f"{len(unknown)} tensors have no place in this architecture: {', '.join(unknown[:3])}"
        near = difflib.get_close_matches(unknown[0], wanted, n=1, cutoff=0.5)
        do = f"The nearest it has is {near[0]!r}: check" if near else "Check"
        raise FormatError(asked, found, f"{do} that config and weights belong together", unknown=unknown)


def _redundant(name: str, config: Config) -> bool:
    """Tensors that some checkpoints hold and none needs: the tied head a second time, rotary tables."""
    return (name == "lm_head.weight" and config.tie_word_embeddings) or name.endswith("rotary_emb.inv_freq")


def _place(checkpoint: Checkpoint, device: Device, dtype: torch.dtype, report: Progress) -> Model:
    """Build the model without memory, then give it its weights one by one. If anything fails, the device is as before."""
    model = _build(checkpoint, device, dtype)
    model.tokenizer = checkpoint.tokenizer
    stored = {ours: checkpoint.weights.find(theirs) for ours, theirs in checkpoint.names.items()}
    _check_shapes(model, stored, checkpoint.path)
    needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
    _check_room(checkpoint.path, device, dtype, needed)
    total, done = sum(tensor.nbytes for tensor in stored.values()), 0
    try:
        report(0, total, "")
        for ours, tensor in stored.items():
            assign(model, ours, _move(checkpoint.weights, tensor.name, device.torch, model.get_parameter(ours).dtype))
            done += tensor.nbytes
            report(done, total, tensor.name)
        device.sync()
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        _empty(model, device)
        if isinstance(error, torch.OutOfMemoryError):
            raise _too_big(checkpoint.path, device, dtype, needed) from error
        raise
    model.requires_grad_(False).eval()
    return model


def _build(checkpoint: Checkpoint, device: Device, dtype: torch.dtype) -> Model:
    try:
        model: Model = checkpoint.architecture.Model(checkpoint.config, device, dtype)
    except RuntimeError as error:  # sizes whose product no tensor can have
        found = f"a model of these sizes can't be ({error!s:.120})"
        raise FormatError(f"config of {checkpoint.path}", found, "Check the sizes in the config") from error
    return model


def _move(weights: Weights, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """One tensor on `device` in `dtype`: it crosses in the smaller of its two dtypes and is cast on the other side."""
    host = weights.read(name, dtype)
    if host.dtype.itemsize > dtype.itemsize:
        host = host.to(dtype)
    there = host.to(device, copy=True)  # a copy on the CPU too: a model must not change when its file does
    return there if there.dtype == dtype else there.to(dtype)


def _check_shapes(model: Model, stored: Mapping[str, Stored], path: Path) -> None:
    for ours, tensor in stored.items():
        wanted = tuple(model.get_parameter(ours).shape)
        if tensor.shape != wanted:
            found = f"its shape is {list(tensor.shape)}, the config asks for {list(wanted)}"
            do = "Check that config and weights belong together"
            raise FormatError(f"tensor {tensor.name!r} of {path}", found, do, tensor=tensor.name)
        if tensor.dtype is not None and not tensor.dtype.is_floating_point:
            found = f"it holds {tensor.kind}, not floating-point numbers"
            do = "Get the checkpoint in bfloat16, float16 or float32"
            raise FormatError(f"tensor {tensor.name!r} of {path}", found, do, tensor=tensor.name)


def _check_room(path: Path, device: Device, dtype: torch.dtype, needed: int) -> None:
    """Refuse at once what can't fit, before gigabytes have crossed."""
    memory = device.memory()
    if memory.total_bytes and needed > memory.total_bytes - memory.allocated_bytes:  # 0: a device that counts none
        raise _too_big(path, device, dtype, needed)


def _too_big(path: Path, device: Device, dtype: torch.dtype, needed: int) -> DeviceError:
    memory = device.memory()
    free = memory.total_bytes - memory.allocated_bytes
    room = f"{device.name} has {bytes_text(free)} of {bytes_text(memory.total_bytes)} free"
    smaller = 'Choose dtype="bfloat16", a' if dtype.itemsize > 2 else "Choose a"
    return DeviceError(
        f"{path.name} in {str(dtype).removeprefix('torch.')} on {device.name}",
        f"its weights need {bytes_text(needed)}, {room}",
        f"{smaller} larger card, or free what is on it",
        needed_bytes=needed,
        free_bytes=free,
    )


def _empty(model: Model, device: Device) -> None:
    """Let go of every weight now: a traceback may hold the model for long."""
    for name in [name for name, _ in model.named_parameters()]:
        assign(model, name, torch.empty(0, device="meta"))
    empty_cache = getattr(torch.get_device_module(device.torch), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def _reporter(progress: bool | Progress, what: str) -> Progress:
    """`progress` as a function that is called for every tensor and passes on at most ten reports a second, and the last."""
    if callable(progress):
        show = progress
    elif progress and sys.stderr is not None and sys.stderr.isatty():
        show = _line(what)
    else:
        return lambda done, total, name: None
    last = float("-inf")

    def report(done: int, total: int, name: str) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= 1 / REPORTS_PER_S:
            last = time.monotonic()
            show(done, total, name)

    return report


def _line(what: str) -> Progress:
    """A line on the terminal that is written over."""

    def show(done: int, total: int, name: str) -> None:
        share = 100 * done // total if total else 100
        text = f"Loading {what}: {share:3d} % of {bytes_text(total)}  {name}"
        sys.stderr.write(f"\r{text[:100]:<100}" + ("\n" if done == total else ""))
        sys.stderr.flush()

    return show
