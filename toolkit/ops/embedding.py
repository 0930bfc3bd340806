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
from toolkit.ops.collectives import Partial, partial_of
from toolkit.ops.define import Problem, call, define, launches, on_gpu
from toolkit.ops.products import DECODED
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.schemes import SCHEMES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of the rows, for the kernel


def embed(ids: Tensor, table: Tensor | PackedMatrix, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return rows `ids` (int64, any shape) of `table` [vocab, hidden] times `scale`: [*ids.shape, hidden].

    Rows of a packed table are rounded to `dtype` before the multiplication; a plain table keeps its dtype. One kernel on a GPU.
    The ids must be below `vocab`: the kernel doesn't check them.
    """
    if not isinstance(table, PackedMatrix) and scale == 1.0:
        return F.embedding(ids, table)
    operands = _operands(ids, table, dtype, scale, -1)
    return _run(*operands) if _launched(*operands) else _reference(*operands)


def embed_partial(
    ids: Tensor, table: Tensor | PackedMatrix, dtype: torch.dtype, scale: float, first: int, ranks: int
) -> Tensor | Partial:
    """Return what `embed` does for a table whose rows are spread over `ranks`, as a `Partial`.

    This rank's `table` holds the rows from `first` on. Its share of the others is zeros.
    """
    operands = _operands(ids, table, dtype, scale, first)
    if not _launched(*operands):
        return Partial(_reference(*operands), ranks)
    if ids.numel() > DECODED:
        return Partial(_run(*operands), ranks)
    n_bytes = ids.numel() * table.shape[-1] * operands[3].itemsize
    return partial_of(lambda targets: [_run(*operands, targets)], ids.device, n_bytes, ranks)[0]


def _operands(
    ids: Tensor, table: Tensor | PackedMatrix, dtype: torch.dtype, scale: float, first: int
) -> tuple[Tensor, list[Tensor], str, torch.dtype, float, int]:
    """Return the operands of the operation."""
    if isinstance(table, PackedMatrix):
        return ids.contiguous(), table.operand(), table.scheme.name, dtype, scale, first
    return ids.contiguous(), [table], "", table.dtype, scale, first


def _launched(ids: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, *rest: Any) -> bool:
    """Return whether the kernel runs."""
    return ids.numel() > 0 and dtype in DTYPES and on_gpu(ids, *parts)


def _run(*operands: Any) -> Tensor:
    return call("embed_rows", *operands)  # type: ignore[no-any-return]


def _reference(
    ids: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float, first: int = -1,
    targets: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    own = ids if first < 0 else ids - first
    held = ids if first < 0 else own.clamp(0, parts[0].shape[0] - 1)
    found = [F.embedding(held, part) for part in parts]
    names = SCHEMES[scheme].parts() if scheme else ()
    rows = dequantize(SCHEMES[scheme], dict(zip(names, found, strict=True)), dtype) if scheme else found[0]
    rows = rows if scale == 1.0 else rows * scale
    return rows if first < 0 else rows.masked_fill_((own != held)[..., None], 0)


def _hidden(parts: Sequence[Tensor], scheme: str) -> int:
    """Return the length of a row; the first part of every scheme holds the codes."""
    return parts[0].shape[1] * (SCHEMES[scheme].parts()["codes"][1] if scheme else 1)


def _shape(
    ids: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float, first: int = -1,
    targets: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    return ids.new_empty(*ids.shape, _hidden(parts, scheme), dtype=dtype)


def _problem(
    ids: Tensor, parts: Sequence[Tensor], scheme: str, dtype: torch.dtype, scale: float, first: int = -1,
    targets: Sequence[Tensor] | None = None,
) -> Problem:  # fmt: skip
    from toolkit.kernels.embed import EMBED_ROWS, EmbedShape

    name = dtype_name(dtype)
    shape = EmbedShape(ids.numel(), parts[0].shape[0], _hidden(parts, scheme), scheme or name, repr(scale), name)
    names = SCHEMES[scheme].parts() if scheme else ("table",)
    inputs = {"ids": ids.view(-1), **dict(zip(names, parts, strict=True))}
    inputs |= {"before": torch.empty(first, 0, device="meta")} if first >= 0 else {}  # its shape says where the part begins
    return EMBED_ROWS, shape, inputs | dict(zip(("targets", "counts"), targets or (), strict=False))


define(
    "embed_rows(Tensor ids, Tensor[] parts, str scheme, ScalarType dtype, float scale, int first=-1, "
    "Tensor[]? targets=None) -> Tensor",
    _reference, _shape, _problem, lambda outputs, ids: outputs["out"].view(*ids.shape, -1),
)  # fmt: skip


@rule("toolkit::embed_rows")
def _effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return one kernel that reads the rows of the table and writes them."""
    ids, parts = args[0], args[1]
    row = sum(part.shape[1] * part.element_size() for part in parts)
    return launches("embed_rows", 1, nbytes(ids) + ids.numel() * row + nbytes(out))
