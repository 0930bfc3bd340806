"""The operation that looks up rows of an embedding table, plain or packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.define import Problem, call, define, launches, on_gpu
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.schemes import SCHEMES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the rows, for the kernel


def embed(ids: Tensor, table: Tensor | PackedMatrix, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return rows `ids` (int64, any shape) of `table` [vocab, hidden] times `scale`: [*ids.shape, hidden].

    Rows of a packed table are rounded to `dtype` before the multiplication; a plain table keeps its dtype. One kernel on a GPU.
    The ids must be below `vocab`: the kernel doesn't check them.
    """
    parts: list[Tensor]
    if isinstance(table, PackedMatrix):
        parts, scheme = table.operand(), table.scheme.name
    elif scale == 1.0:
        return F.embedding(ids, table)
    else:
        parts, scheme, dtype = [table], "", table.dtype
    if not ids.numel() or dtype not in DTYPES or not on_gpu(ids, *parts):
        return _reference(ids, parts, scheme, dtype, scale)
    return call("embed_rows", ids.contiguous(), parts, scheme, dtype, scale)  # type: ignore[no-any-return]


def _reference(ids: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float) -> Tensor:
    found = [F.embedding(ids, part) for part in parts]
    names = SCHEMES[scheme].parts() if scheme else ()
    rows = dequantize(SCHEMES[scheme], dict(zip(names, found, strict=True)), dtype) if scheme else found[0]
    return rows if scale == 1.0 else rows * scale


def _hidden(parts: Sequence[Tensor], scheme: str) -> int:
    """Return the length of a row; the first part of every scheme holds the codes."""
    return parts[0].shape[1] * (SCHEMES[scheme].parts()["codes"][1] if scheme else 1)


def _shape(ids: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float) -> Tensor:
    return ids.new_empty(*ids.shape, _hidden(parts, scheme), dtype=dtype)


def _problem(ids: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float) -> Problem:
    from toolkit.kernels.embed import EMBED_ROWS, EmbedShape

    name = dtype_name(dtype)
    shape = EmbedShape(ids.numel(), parts[0].shape[0], _hidden(parts, scheme), scheme or name, repr(scale), name)
    names = SCHEMES[scheme].parts() if scheme else ("table",)
    return EMBED_ROWS, shape, {"ids": ids.view(-1), **dict(zip(names, parts, strict=True))}


define(
    "embed_rows(Tensor ids, Tensor[] parts, str scheme, ScalarType dtype, float scale) -> Tensor",
    _reference, _shape, _problem, lambda outputs, ids: outputs["out"].view(*ids.shape, -1),
)  # fmt: skip


@rule("toolkit::embed_rows")
def _effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return one kernel that reads the rows of the table and writes them."""
    ids, parts = args[0], args[1]
    row = sum(part.shape[1] * part.element_size() for part in parts)
    return launches("embed_rows", 1, nbytes(ids) + ids.numel() * row + nbytes(out))
