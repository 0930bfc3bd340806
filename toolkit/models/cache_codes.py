"""Keys and values quantized to 8 or 4 bits, for layers that keep every position.

These are the layers whose memory and reads grow with the context: all layers of Qwen3 without a window, the full layers of
Gemma 4 (10 of 60 in the 31B), and the attention layers of Qwen3.5 (one in four). Sliding windows are small and keep the model's
dtype, as do recurrent states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from toolkit import ops
from toolkit.core.errors import ModelError, unknown_name
from toolkit.kernels.kv_codes import KV_SCHEMES, CodeScheme, find_kv_scheme
from toolkit.models.cache import KeysValues, Reach
from toolkit.ops import Codebook, HeadLayout, Operand, Projected


class CodedKeysValues(KeysValues):
    """Keys and values of `context` positions in the format of `kernels.kv_codes`: int16 words, and one fp16 scale per head.

    New tokens attend to codes, also of themselves, so the result does not depend on the chunks of a prompt. For several tokens
    on a GPU, and in plain PyTorch, the codes of one layer are dequantized temporarily. The layers of a cache share `book`.
    """

    def __init__(
        self, scheme: CodeScheme, book: Codebook, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.book, self.dtype, self.kv_heads, self.head_dim = book, dtype, kv_heads, head_dim
        size = (1, kv_heads, context)
        self.keys = torch.zeros(*size, head_dim * scheme.key_bits // 16, dtype=torch.int16, device=device)
        self.values = torch.zeros(*size, head_dim * scheme.value_bits // 16, dtype=torch.int16, device=device)
        self.key_scales = torch.zeros(size, dtype=torch.float16, device=device)
        self.value_scales = torch.zeros(size, dtype=torch.float16, device=device)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Quantize `key` and `value` [1, KV heads, T, head_dim] and write the codes to `slots` [T]."""
        ops.write_codes(key, value, slots, self.book, self._held)

    def read(self, bound: int) -> tuple[Tensor, Tensor]:
        """Dequantize the first `bound` slots: [1, KV heads, bound, head_dim] each, in the model's dtype."""
        return ops.read_codes(self._held, self.book.signs, self.book.scheme, bound, self.dtype)

    def attend(
        self, heads: HeadLayout, row: Projected, q_weight: Tensor, k_weight: Tensor, rope: Tensor, reach: Reach, scale: float,
        quantize: bool = False,
    ) -> Operand:  # fmt: skip
        query, key, value = ops.make_heads(heads, row, q_weight, k_weight, rope, reach.positions)
        self.write(key, value, reach.slots)
        return self.look(query, reach, scale, quantize)

    def look(self, query: Tensor, reach: Reach, scale: float, quantize: bool = False) -> Operand:
        return ops.attend_codes(query, self._held, self.book, reach.positions, scale, reach.bound, quantize)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held

    @property
    def _held(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.key_scales, self.values, self.value_scales


def every_position(
    kv: str | None, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype, device: torch.device, key_dim: int = 0
) -> Callable[[], KeysValues]:
    """Return a function that creates the state of a layer that keeps every position, in the format `kv` or plain for None.

    `key_dim` is that of plain keys (see `KeysValues`); quantized keys are stored whole. All layers of a cache use the same
    function, since they share a codebook. Raises UnknownNameError for an unknown `kv` and ModelError for heads that the kernels
    don't support.
    """
    if kv is None:
        return partial(KeysValues, kv_heads, context, head_dim, dtype, device, key_dim)
    scheme = check_kv(kv)
    if not ops.codes_fit(scheme, head_dim):
        fitting = [name for name, other in KV_SCHEMES.items() if ops.codes_fit(other, head_dim)]
        do = f"Choose kv={fitting[0]!r}, or leave out kv=" if fitting else "Leave out kv="
        least = 256 // min(scheme.key_bits, scheme.value_bits)
        found = f"head_dim is {head_dim}, but {kv} needs a power of two from {least} to 512"
        raise ModelError(f"a cache with kv={kv!r}", found, do, head_dim=head_dim)
    return partial(CodedKeysValues, scheme, Codebook.make(scheme, head_dim, device), kv_heads, context, head_dim, dtype, device)


def check_kv(kv: object) -> CodeScheme:
    """Return the scheme named `kv`. Raises UnknownNameError if there is none."""
    if not isinstance(kv, str):
        raise unknown_name("KV scheme", kv, KV_SCHEMES)
    return find_kv_scheme(kv)
