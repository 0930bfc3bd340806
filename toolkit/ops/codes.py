"""Operations on caches whose keys and values are quantized to 8 or 4 bits. For the format see `toolkit.kernels.kv_codes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual.effects.effect import Effect, nbytes
from toolkit.gpu.virtual.effects.operations import rule
from toolkit.kernels.kv_codes import CodeScheme, decode, encode, find_kv_scheme, hadamard, levels, unpack_words
from toolkit.kernels.noise import INDEX, mix, shifted, signed
from toolkit.ops.attention import (
    attend,
    attention_results,
    attention_shape,
    quantizes_heads,
    results_of,
    slots_in_use,
)
from toolkit.ops.define import Problem, call, define, launches, on_gpu
from toolkit.ops.products import Operand
from toolkit.ops.reference.attention import cached_attention, hidden_slots

# Fitted to timings of twelve caches of 32,768 and 131,072 slots on an H200: within 15 %. Decoding 4-bit codes takes longer than
# reading them. The fixed time includes rotating the query and the result.
CODES_FLOOR, CODES_SHARE = 9.0, {"int8": 1.0, "k4v8": 0.9, "int4": 0.68}
PIECE = 4096  # slots that are dequantized at a time
# Of a number in a piece: codes as integers, levels and their product with the scale in fp32. Chosen to bound the virtual GPU's.
INTERMEDIATE_BYTES = 20

Held = tuple[Tensor, Tensor, Tensor, Tensor]
"""Keys, key scales, values, value scales: int16 [1, KV heads, slots, D * bits / 16] and fp16 [1, KV heads, slots]."""


@dataclass(frozen=True)
class Codebook:
    """The constants needed to read codes with head_dim D. Made on the device without a copy; the layers of a cache share one.

    `scheme` is the name of the format, and `signs` fp32 [D] are the signs of the rotation, which depend only on D. For 4-bit
    codes, `matrix` fp32 [D, D] is the rotation (x @ matrix rotates x) and `levels` fp32 [16] are the values of the codes.
    """

    scheme: str
    signs: Tensor
    matrix: Tensor | None = None
    levels: Tensor | None = None

    @classmethod
    def make(cls, scheme: CodeScheme, head_dim: int, device: torch.device) -> Codebook:
        bits = shifted(mix(torch.arange(head_dim, device=device) * signed(INDEX)), 63)
        signs = 1.0 - 2.0 * bits.float()
        if 4 not in (scheme.key_bits, scheme.value_bits):
            return cls(scheme.name, signs)
        return cls(scheme.name, signs, hadamard(torch.eye(head_dim, device=device) * signs[:, None]), levels(device))

    def tensors(self) -> list[Tensor]:
        """Return the tensors that it holds."""
        return [table for table in (self.signs, self.matrix, self.levels) if table is not None]


def codes_fit(scheme: CodeScheme, head_dim: int) -> bool:
    """Return whether the kernels support this format for heads of this size."""
    return head_dim in (32, 64, 128, 256, 512) and head_dim >= 256 // min(scheme.key_bits, scheme.value_bits)


def write_codes(key: Tensor, value: Tensor, positions: Tensor, book: Codebook, held: Held) -> None:
    """Quantize key and value [1, KV heads, T, D] and write the codes to the slots `positions` [T] of `held`."""
    operands = (key.detach(), value.detach(), positions, book.signs, *held, book.scheme)
    if on_gpu(key.detach()):
        call("write_codes", *operands)
    else:
        _write_reference(*operands)


def read_codes(held: Held, signs: Tensor, codes: str, bound: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Dequantize the first `bound` slots with PyTorch: keys and values [1, KV heads, bound, D] in `dtype`."""
    scheme = find_kv_scheme(codes)

    def back(bits: int) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda words, scales: decode(words, scales, bits, signs)

    keys, key_scales, values, value_scales = held
    of_keys = _in_pieces(keys, key_scales, bound, dtype, back(scheme.key_bits))
    return of_keys, _in_pieces(values, value_scales, bound, dtype, back(scheme.value_bits))


def attend_codes(
    query: Tensor, held: Held, book: Codebook, positions: Tensor, scale: float, bound: int, quantize: bool = False
) -> Operand:
    """Return the attention [1, T, H * D] of query [1, T, H, D] at `positions` [T] on the codes in `held`.

    The codes must include the query's own keys and values. For one token the kernel reads codes. For several, the first `bound`
    slots are dequantized to the query's dtype first; they stay rotated, and the query and the result are rotated instead. Needs
    a GPU and a format for which `codes_fit`. `quantize` as in `attend`.
    """
    if query.shape[1] == 1:
        quantize = quantize and quantizes_heads(query)
        operands = (query, *held, book.signs, positions, scale, book.scheme, quantize, bound)
        out, *quantized = call("attention_codes", *operands)
        return Operand(out, tuple(quantized))
    scheme, (keys, key_scales, values, value_scales) = find_kv_scheme(book.scheme), held
    plain_keys = _in_pieces(keys, key_scales, bound, query.dtype, _numbers(scheme.key_bits, book))
    plain_values = _in_pieces(values, value_scales, bound, query.dtype, _numbers(scheme.value_bits, book))
    if scheme.key_bits == 4:
        assert book.matrix is not None
        query = (query.float() @ book.matrix).to(query.dtype)
    out = attend(query, plain_keys, plain_values, positions, scale).plain
    if scheme.value_bits == 4:
        assert book.matrix is not None
        out = (out.view(query.shape).float() @ book.matrix.t()).to(out.dtype).view(out.shape)
    return Operand(out)


def dequantized_bytes(tokens: int, slots: int, queries: int, keys: int, itemsize: int) -> int:
    """Return the bytes that `attend_codes` takes for several tokens: for keys and values in plain, and to rotate queries.

    A token has `queries` numbers in its queries, and a slot `keys` numbers in its keys, and as many in its values.
    """
    return keys * (2 * slots * itemsize + min(slots, PIECE) * INTERMEDIATE_BYTES) + 3 * 4 * tokens * queries


def _in_pieces(
    words: Tensor, scales: Tensor, bound: int, dtype: torch.dtype, make: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Apply `make` to the words and scales of the first `bound` slots, piece by piece, and return the result in `dtype`."""
    if isinstance(bound, torch.SymInt):  # a graph for any number of slots takes them in one piece
        return make(words[:, :, :bound], scales[:, :, :bound]).to(dtype)
    if bound <= PIECE:
        return make(words[:, :, :bound], scales[:, :, :bound]).to(dtype)
    first = make(words[:, :, :PIECE], scales[:, :, :PIECE])
    found = first.new_empty(*first.shape[:2], bound, first.shape[3], dtype=dtype)
    found[:, :, :PIECE] = first
    for start in range(PIECE, bound, PIECE):
        some = slice(start, min(start + PIECE, bound))
        found[:, :, some] = make(words[:, :, some], scales[:, :, some])
    return found


def _numbers(bits: int, book: Codebook) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that multiplies codes by their scales; 4-bit codes are not rotated back."""

    def make(words: Tensor, scales: Tensor) -> Tensor:
        codes = unpack_words(words, bits)
        if bits == 4:
            assert book.levels is not None
            codes = book.levels.index_select(0, codes.flatten()).view(codes.shape)
        return codes * scales.float()[..., None]

    return make


def _write_reference(
    key: Tensor, value: Tensor, positions: Tensor, signs: Tensor, keys: Tensor, key_scales: Tensor, values: Tensor,
    value_scales: Tensor, codes: str,
) -> None:  # fmt: skip
    scheme = find_kv_scheme(codes)
    of_keys, of_values = (key, keys, key_scales, scheme.key_bits), (value, values, value_scales, scheme.value_bits)
    for new, words, scales, bits in (of_keys, of_values):
        found_words, found_scales = encode(new, bits, signs)
        words.index_copy_(2, positions, found_words)
        scales.index_copy_(2, positions, found_scales)


def _write_problem(
    key: Tensor, value: Tensor, positions: Tensor, signs: Tensor, keys: Tensor, key_scales: Tensor, values: Tensor,
    value_scales: Tensor, codes: str,
) -> Problem:  # fmt: skip
    from toolkit.kernels.kv_encode import KV_ENCODE, EncodeShape

    _, kv_heads, tokens, dim = key.shape
    shape = EncodeShape(tokens, kv_heads, dim, keys.shape[2], codes=codes, dtype=dtype_name(key.dtype))
    inputs = {"key": key, "value": value, "positions": positions, "signs": signs}
    inputs |= {"keys": keys, "key_scales": key_scales, "values": values, "value_scales": value_scales}
    return KV_ENCODE, shape, inputs


def _attention_reference(
    query: Tensor, keys: Tensor, key_scales: Tensor, values: Tensor, value_scales: Tensor, signs: Tensor, positions: Tensor,
    scale: float, codes: str, quantize: bool, bound: int,
) -> list[Tensor]:  # fmt: skip
    seen = read_codes((keys, key_scales, values, value_scales), signs, codes, bound, query.dtype)
    mask = hidden_slots(torch.arange(bound, device=keys.device), positions)
    return results_of(cached_attention(query, *seen, mask, scale), quantize)


def _attention_problem(
    query: Tensor, keys: Tensor, key_scales: Tensor, values: Tensor, value_scales: Tensor, signs: Tensor, positions: Tensor,
    scale: float, codes: str, quantize: bool, bound: int,
) -> Problem:  # fmt: skip
    from toolkit.kernels.attention_codes import ATTENTION_CODES, CodesShape

    (_, _, heads, dim), (_, kv_heads, slots, _) = query.shape, keys.shape
    about = (heads, kv_heads, dim, slots, 0, dtype_name(query.dtype), scale != 1.0)
    shape = CodesShape(*about, quantised=quantize, codes=codes)
    inputs = {"query": query, "keys": keys, "key_scales": key_scales, "values": values, "value_scales": value_scales}
    return ATTENTION_CODES, shape, {**inputs, "signs": signs, "positions": positions}


define(
    "write_codes(Tensor key, Tensor value, Tensor positions, Tensor signs, Tensor(a!) keys, Tensor(b!) key_scales, "
    "Tensor(c!) values, Tensor(d!) value_scales, str codes) -> ()",
    _write_reference, lambda *operands: None, _write_problem, lambda outputs, key: None,
)  # fmt: skip
define(
    "attention_codes(Tensor query, Tensor keys, Tensor key_scales, Tensor values, Tensor value_scales, Tensor signs, "
    "Tensor positions, float scale, str codes, bool quantize, SymInt bound) -> Tensor[]",
    _attention_reference, lambda query, *rest: attention_shape(query, rest[-2]), _attention_problem, attention_results, hints=1,
)  # fmt: skip


@rule("toolkit::write_codes")
def _write_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: None) -> list[Effect]:
    """Return one kernel that reads the new keys and values and writes their codes."""
    key = args[0]
    size = find_kv_scheme(args[8]).bytes_per_token(key.shape[3])
    return launches("kv_encode", 1, 2 * nbytes(key) + key.shape[1] * key.shape[2] * size)


@rule("toolkit::attention_codes")
def _attention_effects(args: tuple[Any, ...], kwargs: dict[str, Any], out: list[Tensor]) -> list[Effect]:
    """Return the kernels that read the codes of the slots in use."""
    query, kv_heads, slots = args[0], args[1].shape[1], slots_in_use(args[6], args[10])
    moved = 2 * nbytes(query) + kv_heads * slots * find_kv_scheme(args[8]).bytes_per_token(query.shape[3])
    flops = 4.0 * query.numel() * slots
    return launches("attention_codes", 2, moved, flops, floor=CODES_FLOOR, share=CODES_SHARE[args[8]])
