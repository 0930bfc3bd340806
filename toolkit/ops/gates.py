"""Gates: the output of attention times the sigmoid of numbers from the projection of its queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.define import Problem, aligned, call, define, launches, on_gpu
from toolkit.ops.products import Operand, quantizes
from toolkit.weights.packed import empty_quantized, quantize_activations


def gate_heads(x: Tensor, row: Tensor, heads: int, quantize: bool = False) -> Operand:
    """Return x [..., heads * D] times the sigmoid of its gates: row [..., width] begins with each query head and its gate.

    With `quantize`, the result is quantized too if packed products would do so (see `matmul`), in the same launch.
    """
    if not x.numel() or x.dtype != row.dtype or not on_gpu(x, row):
        return Operand(_reference(x, row, heads, False)[0])
    out, *quantized = call("gate_heads", aligned(x), aligned(row), heads, quantize and quantizes(x))
    return Operand(out, tuple(quantized))


def _reference(x: Tensor, row: Tensor, heads: int, quantize: bool) -> list[Tensor]:
    size = x.shape[-1]
    gate = row[..., : 2 * size].unflatten(-1, (heads, 2, size // heads))[..., 1, :]
    out = (x.unflatten(-1, (heads, -1)) * gate.sigmoid()).flatten(-2)
    return [out, *(quantize_activations(out) if quantize else ())]


def _shape(x: Tensor, row: Tensor, heads: int, quantize: bool) -> list[Tensor]:
    found = [torch.empty_like(x)]
    if quantize:
        found += empty_quantized(x)
    return found


def _problem(x: Tensor, row: Tensor, heads: int, quantize: bool) -> Problem:
    from toolkit.kernels.gate import GATE_HEADS, GateShape

    size, width = x.shape[-1], row.shape[-1]
    shape = GateShape(x.numel() // size, heads, size // heads, width, quantize, dtype_name(x.dtype))
    return GATE_HEADS, shape, {"x": x.view(-1, size), "row": row.view(-1, width)}


define(
    "gate_heads(Tensor x, Tensor row, int heads, bool quantize) -> Tensor[]",
    _reference, _shape, _problem, lambda outputs, x: [t.view(*x.shape[:-1], t.shape[-1]) for t in outputs.values()],
)  # fmt: skip


@rule("toolkit::gate_heads")
def _effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Sequence[Tensor]) -> list[Effect]:
    """Return one kernel that reads x and its gates, and writes its results."""
    return launches("gate_heads", 1, 2 * nbytes(args[0]) + sum(map(nbytes, out)), floor=1.2, share=0.75)
