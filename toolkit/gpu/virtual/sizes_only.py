# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Sizes only: tensors of the virtual GPU without values, so that a 31B model runs on a laptop.

The host tensor of a floating-point tensor is on PyTorch's `meta` device. Integers and booleans keep their values, because
programs branch and index by them, up to a size of KEPT_BYTES (PACKED dtypes: KEPT_PACKED_BYTES). An integer that depends on
absent values is zero. What is computed from absent integers, such as unpacked weights, is kept as if it were packed. Shapes,
bytes and modelled times are therefore those of the real run, but the values are meaningless.
"""

from __future__ import annotations

import importlib
import math
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.gpu.virtual.operands import mapped, tensors_in

KEPT_BYTES = 1 << 24  # integers up to this size keep their values: positions, token ids, masks
KEPT_PACKED_BYTES = 1 << 16  # the same for PACKED dtypes, which mostly hold packed weights
PACKED = (torch.uint8, torch.int8, torch.int16)  # int16 also holds keys and values; PyTorch does not index by it
_META = torch.device("meta")
# Operations whose results have a size that depends on values.
_UNSIZED = {
    "nonzero", "_unique2", "_unique", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount",
    "vgpu::distinct_entries",
}  # fmt: skip

seen = False  # whether this process has created a tensor without values; before that, operands are not checked
used = False  # whether an operation ran without values since the recording began


def _note() -> None:
    global used
    used = True


def _is_fractional(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def keeps_values(shape: Any, dtype: torch.dtype, from_packed: bool = False) -> bool:
    """Return whether a tensor created in sizes-only mode keeps its values. `from_packed`: computed from absent integers."""
    kept = KEPT_PACKED_BYTES if dtype in PACKED or (from_packed and dtype != torch.bool) else KEPT_BYTES
    return not _is_fractional(dtype) and math.prod(shape) * dtype.itemsize <= kept


def absent(*trees: Any) -> bool:
    """Return whether any tensor among these operands has no values."""
    return any(x.is_meta for x in tensors_in(trees))


def unpacked(*trees: Any) -> bool:
    """Return whether any tensor among these operands holds integers without values. Masks, which hold booleans, don't count."""
    return any(x.is_meta and x.dtype != torch.bool and not _is_fractional(x.dtype) for x in tensors_in(trees))


def placeholder(dtype: torch.dtype) -> bool | int | float | complex:
    """Return the zero that `.item()` returns for an absent value."""
    _note()
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else False if dtype == torch.bool else 0


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """Run target.copy_(source) if one of them has no values: a target with values becomes zero."""
    _note()
    torch.broadcast_shapes(target.shape, source.shape)
    if not target.is_meta:
        target.zero_()


def run(func: Any, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation for its shapes only. Raises RuntimeError if a shape depends on absent values."""
    _note()
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if name in _UNSIZED or (name == "masked_select" and args[1].is_meta):
        raise RuntimeError(f"sizes only: the size of the result of {name} depends on values that were not computed")
    if name == "equal":
        return False
    if name == "masked_select":
        return args[0].new_empty(int(torch.broadcast_to(args[1], args[0].shape).sum()))
    targets = [x for x in written(schema, args, kwargs) if not x.is_meta]
    for x in targets:
        x.zero_()
    if schema.is_mutable and not any(argument.is_out for argument in schema.arguments):
        # PyTorch's kernels for random numbers on "meta" import the compiler, which takes seconds.
        if torch.Tag.nondeterministic_seeded not in func.tags and all(x.is_meta for x in tensors_in((args, kwargs))):
            return kernel(*args, **kwargs)  # may change shape or strides
        if schema.returns and schema.returns[0].alias_info is None:  # writes operands, and returns new tensors
            return on_meta(kernel, args, kwargs)
        return args[0] if schema.returns else None
    if name in ("index", "_unsafe_index"):
        args = (args[0], _without_masks(args[1]), *args[2:])
    if schema.is_mutable:
        return on_meta(kernel, args, kwargs)
    key = (func, _key(args), _key(tuple(kwargs.items())))
    shapes = _known.get(key)
    if shapes is None:
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        shapes = _known[key] = mapped(_Shape.of, on_meta(kernel, args, kwargs))
    from_packed = unpacked(args, kwargs)
    return mapped(lambda x: x.make(from_packed) if isinstance(x, _Shape) else x, shapes)


@dataclass(frozen=True)
class _Shape:
    """The shape of a result, cached because PyTorch's meta kernels are slow and decoding repeats the same calls."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Any) -> Any:
        return _Shape(x.size(), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x

    def make(self, from_packed: bool) -> torch.Tensor:
        if keeps_values(self.size, self.dtype, from_packed):
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype).zero_()
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_META)


_known: dict[Any, Any] = {}  # results by operation and operands
_MOST_KNOWN = 1 << 14


def _key(x: Any) -> Any:
    """Return a hashable key with everything about the operands that the shape of a result depends on."""
    if isinstance(x, torch.Tensor):
        return x.size(), x.stride(), x.dtype
    return tuple(map(_key, x)) if isinstance(x, tuple | list) else (type(x), x)


def on_meta(kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run on meta tensors, and return results without values; a result that is an operand is returned as that operand."""
    if "torch._dynamo" not in sys.modules:
        _import_compiler()
    originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def shape_of(x: Any) -> Any:
        if isinstance(x, torch.device):
            return _META
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return x
        twin = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=_META)
        originals[id(twin)] = (twin, x)
        return twin

    out = kernel(*mapped(shape_of, args), **mapped(shape_of, kwargs))
    for twin, original in originals.values():
        if twin.shape != original.shape:  # a resized out=
            original.resize_(twin.shape).zero_()
    return mapped(lambda x: originals[id(x)][1] if id(x) in originals else _valued(x), out)


def _import_compiler() -> None:
    """Import PyTorch's compiler, as most meta kernels do when they first run, but on a thread of its own.

    The import leaves reference cycles, and these refer to the frames of its callers. Until the garbage collector ran, they
    would keep all that the callers' variables held, such as a model that has been deleted.
    """
    thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
    thread.start()
    thread.join()


def _valued(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and keeps_values(x.shape, x.dtype):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).zero_()
    return x


def written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation writes in place."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def _without_masks(indices: Any) -> list[Any]:
    """Return the indices with each mask replaced by the coordinates that it picks, so that the result's size is known."""
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        elif index.is_meta:
            raise RuntimeError("sizes only: the size of indexing by a mask depends on values that were not computed")
        else:
            found.extend(index.nonzero(as_tuple=True))
    return found
