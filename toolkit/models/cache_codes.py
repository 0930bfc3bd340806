"""Keys and values of every position in 8 or 4 bits: what a layer's state holds in place of plain numbers.

Coded are the layers that keep every position, where memory and reading grow with the context: all of Qwen3's but those with
a window, Gemma 4's full ones (10 of 60 in the 31B), Qwen3.5's attention (one layer in four). Sliding windows stay plain:
they are small, and few steps old. Recurrent states stay as they are.
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
from toolkit.ops import Codebook, HeadLayout


class CodedKeysValues(KeysValues):
    """Keys and values of `context` positions as `kernels.kv_codes` has them: int16 words, and fp16 scales by head.

    New tokens see codes too, their own included: a prompt in chunks sees what it sees at once. Several tokens on a GPU make
    plain numbers of one layer's codes for a while, and so does the plain path. The layers of a cache may share the `book`.
    """

    def __init__(
        self, scheme: CodeScheme, book: Codebook, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.book, self.dtype = book, dtype
        size = (1, kv_heads, context)
        self.keys = torch.zeros(*size, head_dim * scheme.key_bits // 16, dtype=torch.int16, device=device)
        self.values = torch.zeros(*size, head_dim * scheme.value_bits // 16, dtype=torch.int16, device=device)
        self.key_scales = torch.zeros(size, dtype=torch.float16, device=device)
        self.value_scales = torch.zeros(size, dtype=torch.float16, device=device)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Put the codes of `key` and `value` [1, KV heads, T, head_dim] into `slots` [T]."""
        ops.write_codes(key, value, slots, self.book, self._held)

    def read(self, bound: int) -> tuple[Tensor, Tensor]:
        """What the first `bound` slots stand for: [1, KV heads, bound, head_dim] each, in the model's dtype."""
        return ops.read_codes(self._held, self.book.signs, self.book.scheme, bound, self.dtype)

    def attend(
        self, heads: HeadLayout, row: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Tensor, reach: Reach, scale: float
    ) -> Tensor:
        query, key, value = ops.make_heads(heads, row, q_weight, k_weight, rope, reach.positions)
        self.write(key, value, reach.slots)
        return self.look(query, reach, scale)

    def look(self, query: Tensor, reach: Reach, scale: float) -> Tensor:
        return ops.attend_codes(query, self._held, self.book, reach.positions, scale, reach.bound)

    def tensors(self) -> tuple[Tensor, ...]:
        return self._held

    @property
    def _held(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.keys, self.key_scales, self.values, self.value_scales


def every_position(
    kv: str | None, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], KeysValues]:
    """What makes the state of a layer that keeps every position: plain, or in the codes that `kv` names.

    UnknownNameError for another name, ModelError for heads that the kernels don't take. For all layers of one cache: they
    share a codebook.
    """
    if kv is None:
        return partial(KeysValues, kv_heads, context, head_dim, dtype, device)
    scheme = check_kv(kv)
    if not ops.codes_fit(scheme, head_dim):
        fitting = [name for name, other in KV_SCHEMES.items() if ops.codes_fit(other, head_dim)]
        do = f"Choose kv={fitting[0]!r}, or leave kv= away" if fitting else "Leave kv= away"
        least = 256 // min(scheme.key_bits, scheme.value_bits)
        said = f"the model's heads have {head_dim} numbers, {kv} wants a power of two from {least} to 512"
        raise ModelError(f"a cache with kv={kv!r}", said, do, head_dim=head_dim)
    return partial(CodedKeysValues, scheme, Codebook.make(scheme, head_dim, device), kv_heads, context, head_dim, dtype, device)


def check_kv(kv: object) -> CodeScheme:
    """The scheme that `kv` names; UnknownNameError where there is none."""
    if not isinstance(kv, str):
        raise unknown_name("KV scheme", kv, KV_SCHEMES)
    return find_kv_scheme(kv)
