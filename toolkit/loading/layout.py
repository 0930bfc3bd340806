"""Decide how a model is stored before anything is allocated: the scheme or dtype of each weight, and the fused matrices."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from toolkit.core.distributed import WHOLE, Shard
from toolkit.core.errors import FormatError, ModelError
from toolkit.core.units import dtype_name, plural
from toolkit.gpu.device import Device
from toolkit.loading.checkpoint import Checkpoint
from toolkit.models.layers import Embedding, Joined, Linear
from toolkit.models.model import CausalLM
from toolkit.models.places import Source, Spot, set_scheme, spot
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.recipes import ALWAYS_PLAIN, Recipe, misfit, nothing_to_quantize
from toolkit.weights.repacking import block_of, scheme_of
from toolkit.weights.schemes import Scheme
from toolkit.weights.stored import Stored, Weights

BLOCK = "block"  # a fact of an error: the number of weights that can't be separated
TOGETHER = "Check that config and weights belong together"


@dataclass(frozen=True)
class Fused:
    """A group of matrices with the same input that were fused: names, number of layers, and number of fused matrices."""

    names: tuple[str, ...]
    layers: int
    matrices: int

    def __str__(self) -> str:
        return f"{'+'.join(self.names)} in {plural(self.layers, 'layer')}"


@dataclass(frozen=True)
class Layout:
    """A model on "meta", whose parameters describe the memory to allocate, and the matrices that were fused."""

    model: CausalLM
    fused: tuple[Fused, ...]

    def held(self) -> Counter[str]:
        """Return bytes by scheme, or by dtype for plain weights."""
        found: Counter[str] = Counter()
        seen: set[int] = set()
        for module in self.model.modules():
            for parameter in module.parameters(recurse=False):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    kind = module.scheme.name if isinstance(module, PackedMatrix) else dtype_name(parameter.dtype)
                    found[kind] += parameter.nbytes
        return found


def lay_out(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, scheme: Recipe | str | None, fuse: bool, shard: Shard = WHOLE
) -> Layout:
    """Return the model of `checkpoint` on "meta", or the part of it that `shard` holds, with each weight in its scheme.

    `scheme` is None (as stored), "none" (plain in `dtype`), or a recipe. A weight has the same scheme for any number of ranks.
    `model.unquantized` names the matrices that the recipe can't quantize. Raises FormatError if a stored tensor does not have
    the shape that follows from the config, or if no model of these sizes can exist, and ModelError if the recipe can quantize
    nothing, or the ranks can't divide the heads, the sizes or the blocks of a scheme.
    """
    try:
        return _laid_out(checkpoint, device, dtype, scheme, fuse, shard)
    except ModelError as error:
        block = error.facts.get(BLOCK)
        if not isinstance(block, int) or block <= shard.block:
            raise
    return lay_out(checkpoint, device, dtype, scheme, fuse, replace(shard, block=block))  # equal parts would separate blocks


def _laid_out(
    checkpoint: Checkpoint, device: Device, dtype: torch.dtype, scheme: Recipe | str | None, fuse: bool, shard: Shard
) -> Layout:
    model = _build(checkpoint, device, dtype, shard)
    if checkpoint.weights is not None:
        _check_shapes(model, checkpoint, checkpoint.weights)
    packed = False
    left: dict[str, tuple[str, ...]] = {}
    for name, source in checkpoint.names.items():
        place = spot(model, name)
        chosen = _scheme(checkpoint, name, source, place, scheme)
        why = misfit(chosen, place.whole_shape) if isinstance(scheme, Recipe) and chosen is not None else ""
        if why:
            chosen = None
            left[why] = (*left.get(why, ()), name)
        _check_blocks(checkpoint, name, source, place, chosen)
        if chosen is not None:
            packed = True
            set_scheme(model, name, chosen)
    if isinstance(scheme, Recipe) and not packed:
        raise nothing_to_quantize(scheme.name, left or (ALWAYS_PLAIN,))
    model.unquantized = left
    return Layout(model, _join(model) if fuse else ())


def stored_scheme(stored: Stored) -> Scheme | None:
    """Return the scheme that stores a tensor without changing a value; None for plain tensors, or if there is none."""
    if stored.dtype is not None:
        return None
    return scheme_of(stored.kind, stored.bits, stored.group, stored.columns, stored.centred)


def _build(checkpoint: Checkpoint, device: Device, dtype: torch.dtype, shard: Shard) -> CausalLM:
    try:
        model = checkpoint.architecture.Model(checkpoint.config, device, dtype, shard)
    except RuntimeError as error:  # the number of elements is too large for a tensor
        found = f"a model of these sizes can't be created ({error!s:.120})"
        raise FormatError(f"config of {checkpoint.path}", found, "Check the sizes in the config") from error
    named = {id(place.weight) for place in (spot(model, name) for name in checkpoint.names)}
    orphans = [name for name, parameter in model.named_parameters() if id(parameter) not in named]
    if orphans:
        raise ModelError(
            f"model {checkpoint.path}", f"it stores no tensor for the weight {orphans[0]}", TOGETHER, missing=orphans
        )
    return model


def _scheme(checkpoint: Checkpoint, name: str, source: Source, place: Spot, scheme: Recipe | str | None) -> Scheme | None:
    """Return the scheme of one weight, or None for plain. Only matrices and embedding tables have a scheme.

    The groups of a recipe's scheme may not divide the rows.
    """
    if scheme == "none" or place.leaf != "weight" or not isinstance(place.owner, Linear | Embedding) or source.change:
        return None
    if isinstance(scheme, Recipe):
        config = checkpoint.config
        return scheme.meant_for(name, place.whole_shape, config.num_hidden_layers, config.tie_word_embeddings)
    if checkpoint.weights is None or source.shape is not None:
        return None
    kinds = {stored_scheme(checkpoint.weights.find(stored)) for stored in source.names}
    return kinds.pop() if len(kinds) == 1 else None


def _check_blocks(checkpoint: Checkpoint, name: str, source: Source, place: Spot, scheme: Scheme | None) -> None:
    """Check that the ranks divide the rows of a weight between blocks, of the file as of the scheme on the device."""
    if len(place.cuts) < 2 or place.cuts[1].held == place.cuts[1].size:
        return
    found = [] if checkpoint.weights is None else [checkpoint.weights.find(stored) for stored in source.names]
    blocks = {stored.kind: block_of(stored) for stored in found} | ({scheme.name: scheme.multiple} if scheme else {})
    columns = place.cuts[1]
    for kind, block in blocks.items():
        if any(end % block for ends in columns.ranges for end in ends):
            ranks = columns.shard.ranks
            raise ModelError(
                f"{name} in {kind} over {ranks} ranks",
                f"each would hold {columns.held:,} of its {columns.size:,} columns, which come in blocks of {block}",
                "Use fewer ranks, or a scheme or file with smaller blocks",
                **{BLOCK: block},
            )


def _join(model: CausalLM) -> tuple[Fused, ...]:
    """Fuse the matrices that can be fused. Returns one record per group of names, in the order of the model."""
    layers: dict[tuple[str, ...], set[str]] = {}
    matrices: Counter[tuple[str, ...]] = Counter()
    for path, module in list(model.named_modules()):
        for names in module.join() if isinstance(module, Joined) else ():
            layers.setdefault(names, set()).add(".".join(path.split(".")[:2]))
            matrices[names] += 1
    return tuple(Fused(names, len(where), matrices[names]) for names, where in layers.items())


def _check_shapes(model: CausalLM, checkpoint: Checkpoint, weights: Weights) -> None:
    """Check that every stored tensor has the shape that follows from the config, and that all of its rows are used."""
    rows: dict[str, int] = {}
    for ours, source in checkpoint.names.items():
        wanted = spot(model, ours).whole_shape
        each = wanted if len(source.names) == 1 else wanted[1:]
        for stored in map(weights.find, source.names):
            shape = _seen_as(stored, source, each)
            one = len(source.names) == 1
            fits = (
                each in (shape, (1, *shape)) if one else shape == each and wanted[0] == len(source.names)
            )  # the weight of a single expert is (1, ...)
            if not fits:
                raise _misshapen(checkpoint.path, stored, f"the config requires {list(wanted)}")
            if stored.dtype is not None and not stored.dtype.is_floating_point:
                found = f"it holds {stored.kind}, not floating-point numbers"
                do = "Get the checkpoint in bfloat16, float16 or float32"
                raise FormatError(f"tensor {stored.name!r} of {checkpoint.path}", found, do, tensor=stored.name)
            if source.rows is not None:
                rows[stored.name] = max(rows.get(stored.name, 0), source.rows.stop)
    for name, stop in rows.items():
        if weights.find(name).shape[-2] != stop:
            raise _misshapen(checkpoint.path, weights.find(name), f"the config requires {stop:,} rows")


def _seen_as(stored: Stored, source: Source, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the part of a stored tensor that `source` uses."""
    shape = stored.shape
    if source.shape is not None:
        same = torch.Size(shape).numel() == torch.Size(source.shape).numel()
        in_order = shape[-1:] == source.shape[-1:]  # MLX stores a convolution as [C, K, 1], next to norms that differ
        shape = source.shape if same and in_order else shape
    if source.rows is not None and len(shape) > 1 and shape[-2] >= source.rows.stop:
        shape = (*shape[:-2], source.rows.stop - source.rows.start, shape[-1])
    return shape


def _misshapen(path: Path, stored: Stored, why: str) -> FormatError:
    return FormatError(
        f"tensor {stored.name!r} of {path}", f"its shape is {list(stored.shape)}, {why}", TOGETHER, tensor=stored.name
    )


def parts_of(place: Spot) -> dict[str, Tensor]:
    """Return the memory of one weight as views [matrices, rows, elements]: the parts of a packed matrix, or "values"."""
    weight = place.weight
    whole = weight.parts() if isinstance(weight, PackedMatrix) else {"values": weight}
    return {name: _as_matrices(tensor.detach(), place.rows) for name, tensor in whole.items()}


def _as_matrices(tensor: Tensor, rows: slice | None) -> Tensor:
    if rows is not None:
        tensor = tensor[rows] if tensor.ndim == 1 else tensor[..., rows, :]
    return tensor.reshape(1, 1, 1) if tensor.ndim == 0 else tensor if tensor.ndim > 2 else tensor.view(1, -1, tensor.shape[-1])
