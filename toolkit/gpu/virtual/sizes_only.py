# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""Sizes only: tensors of the virtual GPU whose values take no memory, so that a 31B model runs on a laptop.

Floating-point values are left out (their host tensor is on PyTorch's `meta` device); integers and booleans are kept, as
programs branch and index by them, unless they are larger than KEPT_BYTES (KEPT_PACKED_BYTES). Where an integer would
depend on values that are not there, it is zero. So shapes, bytes and modelled times are those of the real run, and
values mean nothing. Knows host tensors only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from toolkit.gpu.virtual.operands import mapped, tensors_in

KEPT_BYTES = 1 << 24  # integers up to this size keep their values: positions, token ids, masks
KEPT_PACKED_BYTES = 1 << 16  # the same for PACKED, which are packed weights more often than numbers to index by
PACKED = (torch.uint8, torch.int8, torch.int16)  # and int16 keys and values: PyTorch doesn't index by it
_META = torch.device("meta")
# The size of what these return depends on values.
_UNSIZED = {"nonzero", "_unique2", "_unique", "unique_dim", "unique_consecutive", "unique_dim_consecutive", "bincount"}

seen = False  # has there been such a tensor in this process? Until then nothing is checked
used = False  # has anything been answered without values since the recording began?


def _note() -> None:
    global used
    used = True


def keeps_values(shape: Any, dtype: torch.dtype) -> bool:
    """Does a tensor made in sizes-only mode keep its values?"""
    number = dtype.is_floating_point or dtype.is_complex
    kept = KEPT_PACKED_BYTES if dtype in PACKED else KEPT_BYTES
    return not number and math.prod(shape) * dtype.itemsize <= kept


def absent(*trees: Any) -> bool:
    """Is there a tensor without values among these operands?"""
    return any(x.is_meta for x in tensors_in(trees))


def placeholder(dtype: torch.dtype) -> bool | int | float | complex:
    """What `.item()` answers for a value that was never computed: zero."""
    _note()
    if dtype.is_complex:
        return 0j
    return 0.0 if dtype.is_floating_point else False if dtype == torch.bool else 0


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    """target.copy_(source) where one of them has no values: a target that has some becomes zero."""
    _note()
    torch.broadcast_shapes(target.shape, source.shape)
    if not target.is_meta:
        target.zero_()


def run(func: Any, kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run an operation for its shapes alone. Raises RuntimeError where these depend on values that are absent."""
    _note()
    schema, name = func._schema, func._schema.name.removeprefix("aten::")
    if name in _UNSIZED or (name == "masked_select" and args[1].is_meta):
        raise RuntimeError(f"sizes only: what {name} returns has a size that depends on values that were never computed")
    if name == "equal":
        return False
    if name == "masked_select":
        return args[0].new_empty(int(torch.broadcast_to(args[1], args[0].shape).sum()))
    written = [x for x in _written(schema, args, kwargs) if not x.is_meta]
    for x in written:
        x.zero_()
    if schema.is_mutable and not any(argument.is_out for argument in schema.arguments):
        if all(x.is_meta for x in tensors_in((args, kwargs))):
            return kernel(*args, **kwargs)  # it may resize or restride
        if schema.returns and schema.returns[0].alias_info is None:  # writes operands, and returns something else
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
    return mapped(lambda x: x.make() if isinstance(x, _Shape) else x, shapes)


@dataclass(frozen=True)
class _Shape:
    """What a result looks like, learnt once: PyTorch takes a while to work it out, and decoding repeats itself."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Any) -> Any:
        return _Shape(x.size(), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else x

    def make(self) -> torch.Tensor:
        if keeps_values(self.size, self.dtype):
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype).zero_()
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=_META)


_known: dict[Any, Any] = {}  # results by operation and operands
_MOST_KNOWN = 1 << 14


def _key(x: Any) -> Any:
    """Operands as far as the shape of a result depends on them."""
    if isinstance(x, torch.Tensor):
        return x.size(), x.stride(), x.dtype
    return tuple(map(_key, x)) if isinstance(x, tuple | list) else (type(x), x)


def on_meta(kernel: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run on tensors without values, for the shapes of the results; a result that is an operand is that operand."""
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
        if twin.shape != original.shape:  # an out= that was resized
            original.resize_(twin.shape).zero_()
    return mapped(lambda x: originals[id(x)][1] if id(x) in originals else _valued(x), out)


def _valued(x: Any) -> Any:
    if isinstance(x, torch.Tensor) and keeps_values(x.shape, x.dtype):
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype).zero_()
    return x


def _written(schema: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    found: list[torch.Tensor] = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += tensors_in(value)
    return found


def _without_masks(indices: Any) -> list[Any]:
    """Masks among the indices as the coordinates they pick, so that the result's size is known."""
    found: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        elif index.is_meta:
            raise RuntimeError("sizes only: indexing by a mask that was never computed has no known size")
        else:
            found.extend(index.nonzero(as_tuple=True))
    return found
