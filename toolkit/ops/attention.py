"""Operations that write query, key and value heads to a cache, and attention on that cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes, values_of
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.kernels.shared_keys import shared_weight, stored_numbers
from toolkit.ops.define import Problem, call, define, launches
from toolkit.ops.products import Operand
from toolkit.ops.reference.attention import cached_attention, hidden_slots, rotate
from toolkit.weights.packed import ACTIVATIONS_PER_SCALE, empty_quantized, quantize_activations


@dataclass(frozen=True)
class HeadLayout:
    """The layout of the heads in one row of a projection: queries (each followed by its gate if `gated`), keys, values.

    With `values_are_keys`, one projection provides both keys and values. With `value_norm`, values are normalized too, without
    a weight. `kv_heads` 0 means queries only. `eps` belongs to the norms.
    """

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False
    values_are_keys: bool = False
    value_norm: bool = False
    eps: float = 1e-6

    def fits(self, dtype: torch.dtype, scale: float) -> bool:
        """Return whether the kernels support these heads."""
        whole = self.head_dim in (16, 32, 64, 128, 256, 512) and dtype in (torch.bfloat16, torch.float16, torch.float32)
        return whole and (scale == 1.0 or math.isclose(scale, self.head_dim**-0.5))


class Projected(NamedTuple):
    """The projections of T tokens: `row` [1, T, width] as in a `HeadLayout`, and `value` [1, T, KV heads * D] if the row ends
    with the keys.
    """

    row: Tensor
    value: Tensor | None = None

    def whole(self) -> Tensor:
        """Return the rows with their values."""
        return self.row if self.value is None else torch.cat((self.row, self.value), -1)


def write_heads(
    layout: HeadLayout, qkv: Projected, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor, keys: Tensor,
    values: Tensor,
) -> Tensor:  # fmt: skip
    """Normalize and rotate the heads of `qkv` and write keys and values [1, KV heads, slots, D] in place.

    Returns the query [1, T, H, D]. A token is written to slot position % slots, which for a cache of all positions is the
    position itself. Keys [1, KV heads, slots, key_dim] hold only the numbers that differ from the values; for the others, the
    keys' weight multiplies the query (see `toolkit.kernels.shared_keys`). `rope` [positions, 2, rotated dims] is the whole
    table; `positions` [T] is int64. Needs a GPU and heads for which `HeadLayout.fits`.
    """
    flags = (layout.heads, layout.gated, layout.values_are_keys, layout.value_norm, layout.eps)
    return call("write_heads", *qkv, q_weight, k_weight, rope, positions, keys, values, *flags)  # type: ignore[no-any-return]


def make_heads(
    layout: HeadLayout, qkv: Projected, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor
) -> Sequence[Tensor]:
    """Normalize and rotate heads without a cache: query [1, T, H, D], and keys and values [1, KV heads, T, D], if any."""
    flags = (layout.heads, layout.kv_heads, layout.gated, layout.values_are_keys, layout.value_norm, layout.eps)
    return call("make_heads", *qkv, q_weight, k_weight, rope, positions, *flags)  # type: ignore[no-any-return]


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    return F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)


def _turned(x: Tensor, rope: Tensor) -> Tensor:
    width = rope.shape[-1]
    return rotate(x, rope) if width == x.shape[-1] else torch.cat((rotate(x[..., :width], rope), x[..., width:]), -1)


def _make_heads_reference(
    qkv: Tensor, value: Tensor | None, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor, heads: int,
    kv_heads: int, gated: bool, values_are_keys: bool, value_norm: bool, eps: float,
) -> list[Tensor]:  # fmt: skip
    parts = [heads * (1 + gated), kv_heads, 0 if values_are_keys else kv_heads]
    rows = Projected(qkv, value).whole()
    query, key, value = rows.view(1, qkv.shape[1], -1, q_weight.shape[0]).split(parts, 2)
    turns = rope.index_select(0, positions)
    found = [_turned(_normed(query.unflatten(2, (-1, 1 + gated))[:, :, :, 0], q_weight, eps), turns)]
    if kv_heads:
        value = key if values_are_keys else value
        key = _turned(_normed(key, k_weight, eps), turns)
        value = _normed(value, None, eps) if value_norm else value
        found += [key.transpose(1, 2).contiguous(), value.transpose(1, 2).clone(memory_format=torch.contiguous_format)]
    return found


def _make_heads_shape(
    qkv: Tensor, value: Tensor | None, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor, heads: int,
    kv_heads: int, *flags: Any,
) -> list[Tensor]:  # fmt: skip
    t, dim = qkv.shape[1], q_weight.shape[0]
    return [qkv.new_empty(1, t, heads, dim), *(qkv.new_empty(1, kv_heads, t, dim) for _ in range(2 * (kv_heads > 0)))]


def _write_heads_reference(
    qkv: Tensor, value: Tensor | None, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor, keys: Tensor,
    values: Tensor, heads: int, *flags: Any,
) -> Tensor:  # fmt: skip
    key_dim = keys.shape[3]
    if key_dim < q_weight.shape[0]:
        q_weight = q_weight * shared_weight(k_weight, key_dim)
    query, *new = _make_heads_reference(qkv, value, q_weight, k_weight, rope, positions, heads, keys.shape[1], *flags)
    slots = positions % keys.shape[2]
    keys.index_copy_(2, slots, stored_numbers(new[0], key_dim))
    values.index_copy_(2, slots, new[1])
    return query


def _write_heads_shape(
    qkv: Tensor, value: Tensor | None, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor, keys: Tensor,
    values: Tensor, heads: int, *flags: Any,
) -> Tensor:  # fmt: skip
    return qkv.new_empty(1, qkv.shape[1], heads, q_weight.shape[0])


def _heads_problem(
    qkv: Tensor, value: Tensor | None, inputs: dict[str, Tensor], cache: str, slots: int, heads: int, kv_heads: int,
    gated: bool, values_are_keys: bool, value_norm: bool, eps: float,
) -> Problem:  # fmt: skip
    from toolkit.kernels.norms_rope import QK_NORM_ROPE, HeadsShape

    rope, dim = inputs["rope"], inputs["q_weight"].shape[0]
    shape = HeadsShape(
        qkv.shape[1], heads, kv_heads, dim, rope.shape[-1], slots, rope.shape[0], gated,
        "keys" if values_are_keys else "own", value_norm, cache, dtype_name(qkv.dtype), repr(eps), value is not None,
        _key_dim(inputs.get("keys"), dim),
    )  # fmt: skip
    rows = {"qkv": qkv.view(qkv.shape[1:])} | ({} if value is None else {"value": value.view(value.shape[1:])})
    return QK_NORM_ROPE, shape, {**rows, **inputs}


def _key_dim(keys: Tensor | None, head_dim: int) -> int:
    """Return how many numbers of each key a cache holds, or 0 if it holds all."""
    return 0 if keys is None or keys.shape[3] == head_dim else keys.shape[3]


def _make_heads_problem(
    qkv: Tensor, value: Tensor | None, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor, heads: int,
    kv_heads: int, *flags: Any,
) -> Problem:  # fmt: skip
    inputs = {"q_weight": q_weight, "k_weight": k_weight, "rope": rope, "at": positions}
    return _heads_problem(qkv, value, inputs, "none", qkv.shape[1], heads, kv_heads, *flags)


def _write_heads_problem(
    qkv: Tensor, value: Tensor | None, q_weight: Tensor, k_weight: Tensor, rope: Tensor, positions: Tensor, keys: Tensor,
    values: Tensor, heads: int, *flags: Any,
) -> Problem:  # fmt: skip
    inputs = {"q_weight": q_weight, "k_weight": k_weight, "rope": rope, "at": positions}
    inputs |= {"keys": keys, "values": values}
    slots = keys.shape[2]
    cache = "linear" if slots == rope.shape[0] else "ring"
    return _heads_problem(qkv, value, inputs, cache, slots, heads, keys.shape[1], *flags)


_ROW = "Tensor qkv, Tensor? value, Tensor q_weight, Tensor k_weight, Tensor rope, Tensor positions"
_FLAGS = "bool gated, bool values_are_keys, bool value_norm, float eps"
define(
    f"make_heads({_ROW}, int heads, int kv_heads, {_FLAGS}) -> Tensor[]",
    _make_heads_reference, _make_heads_shape, _make_heads_problem,
    lambda outputs, qkv: [outputs["query"][None], *(outputs[n] for n in ("keys", "values") if outputs[n].numel())],
)  # fmt: skip
define(
    f"write_heads({_ROW}, Tensor(a!) keys, Tensor(b!) values, int heads, {_FLAGS}) -> Tensor",
    _write_heads_reference, _write_heads_shape, _write_heads_problem, lambda outputs, qkv: outputs["query"][None],
)  # fmt: skip


@rule("toolkit::write_heads", "toolkit::make_heads")
def _heads_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> list[Effect]:
    """Return one kernel that reads qkv and writes as many numbers: the queries, keys and values."""
    moved = 2 * (nbytes(args[0]) + (0 if args[1] is None else nbytes(args[1])))
    return launches("qk_norm_rope", 1, moved, floor=0.85, share=0.75)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, scale: float, window: int = 0, bound: int | None = None,
    new: Sequence[Tensor] | None = None, quantize: bool = False,
) -> Operand:  # fmt: skip
    """Return the attention [1, T, H * D] of query [1, T, H, D] on keys and values [1, KV heads, slots, D].

    `positions` [T] are the query's. Keys may hold only some numbers, as in `write_heads`. With a `window`, the slots are
    a ring of at most that size. `new` holds keys and values [1, KV heads, T, D] of several tokens that are not in the ring yet.
    `bound` is an upper bound on the number of slots in use; kernels derive the exact number from the positions. With
    `quantize`, the result for one token is quantized too if packed products would do so (see `toolkit.ops.matmul`). Needs a GPU
    and heads for which `HeadLayout.fits`.
    """
    own = (None, None) if new is None else tuple(new)
    limit = keys.shape[2] if bound is None else bound
    quantize = quantize and quantizes_heads(query)
    out, *quantized = call("attention", query, keys, values, positions, *own, scale, window, quantize, limit)
    return Operand(out, tuple(quantized))


def quantizes_heads(query: Tensor) -> bool:
    """Return whether the attention of query [1, T, H, D] can be quantized: of one token in bf16, each head by itself."""
    return query.shape[1] == 1 and query.dtype == torch.bfloat16 and query.shape[3] % ACTIVATIONS_PER_SCALE == 0


def _attention_reference(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, new_keys: Tensor | None, new_values: Tensor | None,
    scale: float, window: int, quantize: bool, bound: int,
) -> list[Tensor]:  # fmt: skip
    size, bound = keys.shape[2], min(bound, keys.shape[2])
    slots = torch.arange(bound, device=keys.device)
    keys, values = keys[:, :, :bound], values[:, :, :bound]
    if window:
        last = positions[:1] - int(new_keys is not None)  # the newest position in the ring
        slots = last - (last - slots) % size
    if new_keys is not None and new_values is not None:
        slots = torch.cat((slots, positions))
        keys, values = torch.cat((keys, new_keys), 2), torch.cat((values, new_values), 2)
    return results_of(cached_attention(query, keys, values, hidden_slots(slots, positions, window or None), scale), quantize)


def results_of(out: Tensor, quantize: bool) -> list[Tensor]:
    """Return what an operation with the attention `out` [1, T, H * D] returns."""
    return [out, *(quantize_activations(out) if quantize else ())]


def attention_shape(query: Tensor, quantize: bool) -> list[Tensor]:
    """Return the results of a cached attention, uninitialized."""
    out = query.new_empty(1, query.shape[1], query.shape[2] * query.shape[3])
    return [out, *(empty_quantized(out) if quantize else ())]


def attention_results(outputs: dict[str, Tensor], query: Tensor) -> list[Tensor]:
    """Return the results among the outputs of a kernel."""
    return [outputs[name] for name in ("output", "codes", "scales", "sums") if name in outputs]


def _attention_problem(
    query: Tensor, keys: Tensor, values: Tensor, positions: Tensor, new_keys: Tensor | None, new_values: Tensor | None,
    scale: float, window: int, quantize: bool, bound: int,
) -> Problem:  # fmt: skip
    from toolkit.kernels.attention import ATTENTION_DECODE, DecodeShape
    from toolkit.kernels.attention_prefill import ATTENTION_PREFILL, PrefillShape

    _, tokens, heads, dim = query.shape
    inputs = {"query": query, "keys": keys, "values": values, "positions": positions}
    if tokens == 1 and keys.shape[2] <= window:
        window = 0  # one token sees the whole ring
    about = (heads, keys.shape[1], dim, keys.shape[2], window, dtype_name(query.dtype), scale != 1.0, _key_dim(keys, dim))
    if tokens == 1:
        return ATTENTION_DECODE, DecodeShape(*about, quantised=quantize), inputs
    if new_keys is not None and new_values is not None:
        inputs |= {"new_keys": new_keys, "new_values": new_values}
    return ATTENTION_PREFILL, PrefillShape(*about, tokens=tokens, ring=new_keys is not None), inputs


define(
    "attention(Tensor query, Tensor keys, Tensor values, Tensor positions, Tensor? new_keys, Tensor? new_values, "
    "float scale, int window, bool quantize, SymInt bound) -> Tensor[]",
    _attention_reference, lambda query, *rest: attention_shape(query, rest[-2]), _attention_problem, attention_results, hints=1,
)  # fmt: skip


DECODE_FLOOR = 5.0  # blocks read parts of the slots, before another launch combines their results


def slots_in_use(positions: Tensor, bound: int) -> int:
    """Return how many slots attention reads on the virtual GPU: those up to the last of `positions`, at most `bound`.

    The kernels read the positions on the device. A captured step has the `bound` of the whole cache.
    """
    values = values_of(positions)
    return bound if values is None else min(bound, int(values[-1]) + 1)


@rule("toolkit::attention")
def _attention_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: list[Tensor]) -> list[Effect]:
    """Return the kernels that read the slots in use: one for several tokens, slower if a slot has more than 512 numbers."""
    (query, keys, values, positions, new_keys), bound = args[:5], min(args[9], args[1].shape[2])
    slots = slots_in_use(positions, bound) if new_keys is None else bound + query.shape[1]
    moved = 2 * nbytes(query) + slots * (nbytes(keys) + nbytes(values)) // keys.shape[2]
    stored, dim = keys.shape[3], values.shape[3]
    products = stored + dim + (dim if stored < dim else 0)  # values that stand for keys take part in the scores, too
    flops = 2.0 * query.shape[1] * query.shape[2] * slots * products
    if query.shape[1] > 1:
        return launches("attention", 1, moved, flops, share=0.47 * min(1.0, 512 / (stored + dim)))
    return launches("attention", 2, moved, flops, floor=DECODE_FLOOR)
