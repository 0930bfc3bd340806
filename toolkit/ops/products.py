"""Products with a matrix, plain or packed, and with the joined gate and up matrices of a gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.collectives import Partial, partial_of, whole
from toolkit.ops.define import Problem, aligned, call, counters, define, launches, on_gpu
from toolkit.weights.packed import ACTIVATIONS_PER_SCALE, PackedMatrix, packed_matmul
from toolkit.weights.schemes import SCHEMES

DECODED = 8  # up to this many tokens a product is limited by reading the matrix, as in decoding
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh"), "gelu": F.gelu, "relu": F.relu,
}  # fmt: skip
FUSED = ("silu", "gelu_tanh")  # activations that the kernel can apply to its result


@dataclass(frozen=True)
class Operand:
    """The input of products. The operation that computes it may also quantize it, so that packed products don't have to.

    Attributes:
        plain: x [..., k].
        quantized: x in 8 bits, or empty: int8 codes [..., k], fp32 scales [..., k / 32], and in the same shape the sums of the
            codes times their scale (see `toolkit.weights.packed.quantize_activations`).
    """

    plain: Tensor
    quantized: tuple[Tensor, ...] = ()


def few_rows(x: Tensor) -> bool:
    """Return whether products of x [..., k] are those of decoding, whose time is that of reading the matrix."""
    return 0 < x.numel() <= DECODED * x.shape[-1]


def quantizes(x: Tensor) -> bool:
    """Return whether packed products quantize an input like x [..., k] on a GPU to 8 bits."""
    return few_rows(x) and x.dtype == torch.bfloat16 and x.shape[-1] % ACTIVATIONS_PER_SCALE == 0


def takes_quantized(weight: Tensor | PackedMatrix) -> bool:
    """Return whether products with `weight` use an `Operand` in 8 bits."""
    return isinstance(weight, PackedMatrix)


def read_first(weight: Tensor | PackedMatrix) -> Tensor | None:
    """Return the largest tensor that a product with `weight` reads, for `ahead` of `add_norm`; None if it is not packed."""
    return weight.operand()[0] if isinstance(weight, PackedMatrix) else None  # its codes


def matmul(x: Tensor | Operand, weight: Tensor | PackedMatrix, activation: str = "none") -> Tensor:
    """Return x [..., in] times the transpose of weight [out, in]: [..., out] in the dtype of `x`.

    With an `activation` of `ACTIVATIONS`, the matrix holds gate rows followed by as many up rows, and the result [..., out / 2]
    is activation(gate) * up. On CUDA, up to `DECODED` rows are quantized before the product: bf16 to 8-bit integers with one
    scale per 32 numbers, fp16 and fp32 to 16-bit integers. More rows in fp16 or fp32 use the reference. An `Operand` that is
    quantized already gives the same result, with one launch less.
    """
    x, quantized = (x.plain, x.quantized) if isinstance(x, Operand) else (x, ())
    if activation != "none" and activation not in FUSED:
        return _activated(matmul(Operand(x, quantized), weight), activation)
    if not isinstance(weight, PackedMatrix):
        return _activated(F.linear(x, weight), activation)
    parts, scheme, dtype = weight.operand(), weight.scheme.name, x.dtype
    if on_gpu(x) and x.numel():
        few = few_rows(x)
        if dtype == torch.bfloat16 or (few and dtype == torch.float32):
            return _launched(Operand(x, quantized), weight, activation, [])[0]
        if few and dtype == torch.float16:
            return matmul(x.float(), weight, activation).to(dtype)
    return _matmul_reference(x, parts, scheme, activation)


def matmul_sum(x: Tensor | Operand, weight: Tensor | PackedMatrix, ranks: int) -> Tensor:
    """Return the sum of `matmul(x, weight)` over all ranks, each with its own operands (see `all_reduce`)."""
    return whole(matmul_partial(x, weight, ranks))


def matmul_partial(x: Tensor | Operand, weight: Tensor | PackedMatrix, ranks: int) -> Tensor | Partial:
    """Return `matmul(x, weight)` as a `Partial` of its sum over all ranks; as a tensor if there is only one."""
    if ranks == 1:
        return matmul(x, weight)
    x = x if isinstance(x, Operand) else Operand(x)
    of = x.plain
    few = few_rows(of) and of.dtype in (torch.bfloat16, torch.float32)
    if few and isinstance(weight, PackedMatrix) and on_gpu(of):
        n_bytes = of.nbytes // of.shape[-1] * weight.shape[-2]
        return partial_of(partial(_launched, x, weight, "none"), of.device, n_bytes, ranks)[0]
    return Partial(matmul(x, weight), ranks)


def _launched(x: Operand, weight: PackedMatrix, activation: str, targets: list[Tensor]) -> list[Tensor]:
    given = aligned(x.plain), weight.operand(), weight.scheme.name, activation, list(x.quantized), targets
    return [call("packed_matmul", *given)]


def _activated(both: Tensor, activation: str) -> Tensor:
    if activation == "none":
        return both
    gate, up = both.chunk(2, -1)
    return ACTIVATIONS[activation](gate) * up


def _matmul_reference(
    x: Tensor, parts: Sequence[Tensor], scheme: str, activation: str, quantized: Sequence[Tensor] = (),
    targets: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    found = SCHEMES[scheme]
    return _activated(packed_matmul(x, found, dict(zip(found.parts(), parts, strict=True))), activation)


def _matmul_shape(
    x: Tensor, parts: Sequence[Tensor], scheme: str, activation: str, quantized: Sequence[Tensor],
    targets: Sequence[Tensor] | None = None,
) -> Tensor:  # fmt: skip
    return x.new_empty(*x.shape[:-1], parts[0].shape[0] // (1 if activation == "none" else 2))


def _matmul_problem(
    x: Tensor, parts: Sequence[Tensor], scheme: str, activation: str, quantized: Sequence[Tensor],
    targets: Sequence[Tensor] | None = None,
) -> Problem:  # fmt: skip
    n, k = parts[0].shape[0], x.shape[-1]
    rows = x.reshape(-1, k)
    matrix = dict(zip(SCHEMES[scheme].parts(), parts, strict=True))
    if rows.shape[0] > DECODED:
        from toolkit.kernels.int4_prefill import COUNTERS, INT4_PREFILL, PrefillShape

        given = {"x": rows, "counter": counters(x, COUNTERS)}
        return INT4_PREFILL, PrefillShape(n, k, rows.shape[0], scheme, activation), given | matrix
    from toolkit.kernels.int4_matmul import INT4_MATMUL, MatmulShape

    digits, out = ("bf16", "fp32") if x.dtype == torch.float32 else ("int8", "bf16")
    given = {"x": rows}
    if quantized:
        given = {f"x_{name}": t.view(rows.shape[0], -1) for name, t in zip(("codes", "scales", "sums"), quantized, strict=True)}
    shape = MatmulShape(n, k, rows.shape[0], scheme, digits, activation, out, bool(quantized))
    return INT4_MATMUL, shape, given | matrix | dict(zip(("targets", "counts"), targets or (), strict=False))


@rule("toolkit::packed_matmul")
def _matmul_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return a product that reads each packed byte once; for few rows, a small launch quantizes x first unless it is.

    More rows are limited by arithmetic, of which the kernel reaches nearly half of the peak.
    """
    x, parts, quantized = args[0], args[1], args[4]
    rows = x.numel() // x.shape[-1]
    moved = sum(map(nbytes, (*(quantized or (x,)), *parts, out)))
    flops = 2.0 * x.numel() * parts[0].shape[0]
    if rows > DECODED:
        return launches("packed_matmul", 1, moved, flops, floor=11.0, share=0.593)
    return launches("packed_matmul", 1 if quantized else 2, moved, flops, floor=1.45)


define(
    "packed_matmul(Tensor x, Tensor[] parts, str scheme, str activation, Tensor[] quantized, Tensor[]? targets=None) -> "
    "Tensor",
    _matmul_reference, _matmul_shape, _matmul_problem,
    lambda outputs, x: outputs["out"].view(*x.shape[:-1], -1),
)  # fmt: skip
