"""The gated delta net as one operation: everything between its input and output matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.define import Problem, aligned, aligned_rows, call, counters, define, launches, on_gpu
from toolkit.ops.products import Operand, quantizes
from toolkit.ops.reference.delta_rule import DeltaNetLayer
from toolkit.ops.reference.delta_rule import delta_net as delta_net_reference
from toolkit.weights.packed import ACTIVATIONS_PER_SCALE, empty_quantized, quantize_activations


def delta_net(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, positions: Tensor, ring: Tensor, memory: Tensor, layer: DeltaNetLayer,
    quantize: bool = False,
) -> Operand:  # fmt: skip
    """Run T tokens through the convolution, the gated delta rule and the gated norm of `layer`.

    Args:
        qkv, z, b, a: The outputs of the input matrices: [T, channels], [T, value heads * Dv], and [T, value heads] each.
        positions: [T] int64, the positions of the tokens.
        ring: [taps, channels], the last inputs of the convolution. Updated in place.
        memory: [value heads, Dk, Dv] in fp32, the state of the delta rule. Updated in place.
        quantize: Whether to quantize the result of one token in the same launch, if packed products would do so.

    Returns [T, value heads * Dv] in the dtype of `qkv`. On CUDA, the launch in front of this one must not write positions, ring
    or memory, because one token's are read before it has ended. In a model, it is the product that makes `qkv`.
    """
    states = (positions, ring, memory)
    # For several tokens the kernels multiply in TF32 (10-bit mantissas): finer than bf16, but coarser than fp32.
    rough = qkv.shape[0] > 1 and qkv.dtype == torch.float32
    weights = (layer.conv, layer.decay, layer.dt_bias, layer.norm)
    if rough or layer.key_dim > 256 or memory.shape[2] > 256 or not on_gpu(qkv, z, b, a, *states, *weights):
        return Operand(delta_net_reference(qkv, z, b, a, *states, layer))
    one = qkv.shape[0] == 1
    rows = map(aligned if one else aligned_rows, (qkv, z, b, a))
    quantize = quantize and one and memory.shape[2] % ACTIVATIONS_PER_SCALE == 0 and quantizes(z)
    out, *quantized = call("delta_net", *rows, *states, *layer, quantize)
    return Operand(out, tuple(quantized))


def _reference(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, positions: Tensor, ring: Tensor, memory: Tensor, *rest: Any
) -> list[Tensor]:
    *flat, quantize = rest
    out = delta_net_reference(qkv, z, b, a, positions, ring, memory, DeltaNetLayer(*flat))
    return [out, *(quantize_activations(out) if quantize else ())]


def _delta_shape(qkv: Tensor, z: Tensor, *rest: Any) -> list[Tensor]:
    return [z.new_empty(z.shape), *(empty_quantized(z) if rest[-1] else ())]


def _delta_problem(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, positions: Tensor, ring: Tensor, memory: Tensor, *rest: Any
) -> Problem:
    from toolkit.kernels.delta_rule import DELTA_STEP, DeltaStepShape
    from toolkit.kernels.delta_rule_chunks import DELTA_CHUNKS, DeltaChunksShape

    *flat, quantize = rest
    layer = DeltaNetLayer(*flat)
    heads, _, value_dim = memory.shape
    about = (layer.key_heads, heads, layer.key_dim, value_dim, layer.conv.shape[1], layer.tiled, dtype_name(qkv.dtype))
    rows = {"qkv": qkv, "z": z, "b": b, "a": a}
    inputs = {"conv": layer.conv, "decay": layer.decay, "dt_bias": layer.dt_bias, "norm": layer.norm}
    inputs |= {"positions": positions, "ring": ring, "memory": memory}
    if qkv.shape[0] > 1:
        return DELTA_CHUNKS, DeltaChunksShape(*about, repr(layer.eps), tokens=qkv.shape[0]), {**rows, **inputs}
    one = {name: t[0] for name, t in rows.items()}
    return DELTA_STEP, DeltaStepShape(*about, repr(layer.eps), quantize), {**one, **inputs, "arrivals": counters(qkv, heads)}


define(
    "delta_net(Tensor qkv, Tensor z, Tensor b, Tensor a, Tensor positions, Tensor(a!) ring, Tensor(b!) memory, "
    "Tensor conv, Tensor decay, Tensor dt_bias, Tensor norm, int key_heads, int key_dim, bool tiled, float eps, "
    "bool quantize) -> Tensor[]",
    _reference, _delta_shape, _delta_problem,
    lambda outputs, qkv: [
        outputs[name].view(qkv.shape[0], -1) for name in ("output", "codes", "scales", "sums") if name in outputs
    ],
)  # fmt: skip


CHUNK, CHUNK_FLOOR = 64, 38.0  # tokens whose updates are solved together, and the time of a chunk


@rule("toolkit::delta_net")
def _delta_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Sequence[Tensor]) -> list[Effect]:
    """Return one kernel for one token, three for more; the memory is read and written once.

    Several tokens are processed in chunks, one after the other.
    """
    qkv, memory, conv = args[0], args[6], args[7]
    moved = nbytes(qkv) + 2 * nbytes(out[0]) + sum(map(nbytes, out)) + nbytes(conv) + 2 * nbytes(memory)
    flops = 7.0 * qkv.shape[0] * memory.numel()
    if qkv.shape[0] == 1:
        return launches("delta_net", 1, moved, flops, floor=3.2)
    return launches("delta_net", 3, moved, flops, floor=CHUNK_FLOOR * math.ceil(qkv.shape[0] / CHUNK))
