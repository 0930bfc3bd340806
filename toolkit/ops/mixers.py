"""What stands between the matrices of a gated delta net."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.ops.define import Problem, aligned, call, counters, define, dtype_name, launches, on_gpu
from toolkit.ops.reference.delta_rule import delta_net as plain_delta_net


def delta_net(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, conv: Tensor, decay: Tensor, dt_bias: Tensor, norm: Tensor, positions: Tensor,
    ring: Tensor, memory: Tensor, key_heads: int, key_dim: int, tiled: bool, eps: float,
) -> Tensor:  # fmt: skip
    """Convolution, gated delta rule and gated norm of T tokens, after those that `ring` and `memory` hold, which are written.

    qkv [T, channels], z [T, value heads * Dv], b and a [T, value heads] as the input matrices give them; conv [channels,
    taps], decay and dt_bias [value heads] and norm [Dv] in fp32; positions [T] int64; ring [taps, channels]; memory
    [value heads, Dk, Dv] in fp32. Returns [T, value heads * Dv] in the dtype of qkv. `tiled`: value head j reads key
    head j modulo their number; else neighbours share one.
    """
    given = (qkv, z, b, a, conv, decay, dt_bias, norm, positions, ring, memory)
    about = (key_heads, key_dim, tiled, eps)
    # Of several tokens the kernels take factors of 10 bits, as tensor cores do: finer than bf16, coarser than fp32.
    rough = qkv.shape[0] > 1 and qkv.dtype == torch.float32
    if rough or key_dim > 256 or memory.shape[2] > 256 or not on_gpu(*given):
        return plain_delta_net(*given, *about)
    return call("delta_net", *map(aligned, given[:4]), *given[4:], *about)  # type: ignore[no-any-return]


def _delta_shape(qkv: Tensor, z: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(z)


def _delta_problem(
    qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, conv: Tensor, decay: Tensor, dt_bias: Tensor, norm: Tensor, positions: Tensor,
    ring: Tensor, memory: Tensor, key_heads: int, key_dim: int, tiled: bool, eps: float,
) -> Problem:  # fmt: skip
    from toolkit.kernels.delta_rule import DELTA_STEP, DeltaShape
    from toolkit.kernels.delta_rule_chunks import DELTA_CHUNKS, DeltaChunksShape

    heads, _, value_dim = memory.shape
    about = (key_heads, heads, key_dim, value_dim, conv.shape[1], tiled, dtype_name(qkv.dtype), repr(eps))
    rows = {"qkv": qkv, "z": z, "b": b, "a": a}
    inputs = {"conv": conv, "decay": decay, "dt_bias": dt_bias, "norm": norm, "positions": positions}
    inputs |= {"ring": ring, "memory": memory}
    if qkv.shape[0] > 1:
        return DELTA_CHUNKS, DeltaChunksShape(*about, tokens=qkv.shape[0]), {**rows, **inputs}
    one = {name: t[0] for name, t in rows.items()}
    return DELTA_STEP, DeltaShape(*about), {**one, **inputs, "arrivals": counters(qkv, heads)}


define(
    "delta_net(Tensor qkv, Tensor z, Tensor b, Tensor a, Tensor conv, Tensor decay, Tensor dt_bias, Tensor norm, "
    "Tensor positions, Tensor(a!) ring, Tensor(b!) memory, int key_heads, int key_dim, bool tiled, float eps) -> Tensor",
    plain_delta_net, _delta_shape, _delta_problem, lambda outputs, qkv: outputs["output"].view(qkv.shape[0], -1),
)  # fmt: skip


@rule("toolkit::delta_net")
def _delta_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """One kernel for one token, three for more; the memory is read and written once."""
    qkv, conv, memory = args[0], args[4], args[10]
    moved = nbytes(qkv) + 3 * nbytes(out) + nbytes(conv) + 2 * nbytes(memory)
    return launches("delta_net", 1 if qkv.shape[0] == 1 else 3, moved)
