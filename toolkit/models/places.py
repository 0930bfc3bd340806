"""Where the weights of a model are, and their sources in a checkpoint: find, replace and initialize them by name.

Models are built on "meta"; the functions here put weights into them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from toolkit.models.cuts import Cut
from toolkit.models.layers import Joined, RMSNorm
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import Scheme


@dataclass(frozen=True)
class Source:
    """The source of one weight in a checkpoint.

    Attributes:
        names: The stored tensors. Several are single experts, stacked in this order along a new first dimension.
        rows: The rows (of the second to last dimension) to use, if two matrices are stored as one.
        change: A function applied to the values in fp32, such as adding one to a norm; never for quantized weights.
        shape: The shape to view the stored tensor in first (a convolution is stored as [C, 1, K]); None leaves it as it is.
    """

    names: tuple[str, ...]
    rows: slice | None = None
    change: Callable[[Tensor], Tensor] | None = None
    shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Spot:
    """The place of a weight in a model: attribute `leaf` of `owner`, and its rows if matrices were joined.

    `cuts` are those of its last dimensions, if ranks hold parts of it.
    """

    owner: nn.Module
    leaf: str
    rows: slice | None = None
    cuts: tuple[Cut, ...] = ()

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the weight, apart from weights that it is joined to, if one rank held all of it."""
        return whole_shape(self.weight, self.cuts)

    @property
    def weight(self) -> Tensor | PackedMatrix:
        """The current weight: the whole matrix, to which `rows` applies."""
        found: Tensor | PackedMatrix = getattr(self.owner, self.leaf)
        return found


def spot(model: nn.Module, name: str) -> Spot:
    """Return the place of the weight called `name` ("layers.0.mlp.gate_up.gate.weight"), joined or not."""
    path, _, leaf = name.rpartition(".")
    parent_path, _, part = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if not isinstance(parent, Joined):
        owner = model.get_submodule(path)
        return Spot(owner, leaf, cuts=cuts_of(owner, leaf))
    group = next(group for group in parent.groups if part in group)
    start = sum(parent.sizes[before] for before in group[: group.index(part)])
    rows = slice(start, start + parent.sizes[part]) if len(group) > 1 else None
    return Spot(parent.get_submodule("_".join(group)), leaf, rows, parent.cuts[part][leaf])


def cuts_of(owner: nn.Module, leaf: str) -> tuple[Cut, ...]:
    """Return the cuts of the last dimensions of a parameter; () if all ranks hold all of it.

    Modules state them in an attribute `cuts`, by the name of the parameter.
    """
    cuts: tuple[Cut, ...] = getattr(owner, "cuts", {}).get(leaf, ())
    return cuts


def whole_shape(weight: Tensor | PackedMatrix, cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Return the shape that a weight with these cuts of its last dimensions has if one rank holds all of it."""
    return (*weight.shape[: len(weight.shape) - len(cuts)], *(cut.size for cut in cuts))


def held_of(value: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """Return the part of a whole weight that the rank holds, by the cuts of its last dimensions."""
    for dim, cut in zip(range(-len(cuts), 0), cuts, strict=True):
        if cut.held < cut.size:
            value = torch.cat([value.narrow(dim, start, stop - start) for start, stop in cut.ranges], dim)
    return value


def set_scheme(model: nn.Module, name: str, scheme: Scheme) -> None:
    """Replace the weight called `name` by a packed one in `scheme`. The model is on "meta", and the weight not joined yet.

    Raises ModelError if the rows can't be divided into the scheme's groups.
    """
    place = spot(model, name)
    assert place.rows is None, f"{name} is joined to others"
    packed = PackedMatrix(scheme, tuple(place.weight.shape))
    delattr(place.owner, place.leaf)  # a module can't take the name of a parameter
    setattr(place.owner, place.leaf, packed)


def assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Replace the parameter called `name` by `tensor`, which has the right device and dtype, without a copy."""
    owner, _, leaf = name.rpartition(".")
    old = module.get_parameter(name)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=old.requires_grad))


def to_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters of `module` to `dtype`, except those that stay fp32: norms, and names in `KEEPS_FP32`."""
    for part in module.modules():
        if not isinstance(part, RMSNorm | PackedMatrix):
            kept = getattr(part, "KEEPS_FP32", ())
            for name, old in part.named_parameters(recurse=False):
                if old.dtype.is_floating_point and name not in kept:
                    setattr(part, name, nn.Parameter(old.to(dtype), requires_grad=old.requires_grad))


def initialize(module: nn.Module, device: torch.device, seed: int, std: float = 0.02) -> None:
    """Initialize every parameter: norms to one, biases to zero, others normal with `std`, drawn on the CPU from `seed`.

    The same seed gives the same weights on every device. A rank keeps its part of them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, old in list(module.named_parameters()):
        path, _, leaf = name.rpartition(".")
        cuts = cuts_of(module.get_submodule(path), leaf)
        shape = whole_shape(old, cuts)
        if old.ndim > 1:
            value = torch.randn(shape, generator=generator, device="cpu") * std
        else:
            value = torch.full(shape, 0.0 if name.endswith("bias") else 1.0, device="cpu")
        assign(module, name, held_of(value, cuts).to(device, old.dtype))
