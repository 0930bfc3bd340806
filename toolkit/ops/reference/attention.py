"""Attention and rotary embeddings in plain PyTorch, on a whole sequence or on a cache.

These functions are the reference of the kernels. They launch few kernels per decode step and copy nothing between host and
device: they neither index with host data nor wait for the device.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.kernels.shared_keys import shared_numbers, stored_numbers


def rope_of(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rotary table [T, 2, 2 F] of `positions` [T] for `frequencies` [F] in radians per position, fp32."""
    angles = positions[:, None].float() * frequencies  # [T, F]
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table.to(dtype)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Apply a rotary embedding `rope` [T, 2, head_dim] to `x` [B, T, heads, head_dim], pairing halves as Llama does."""
    cos, sin = rope[:, 0, None], rope[:, 1, None]  # [T, 1, head_dim]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Return the causal attention [B, T, H * D] of query [B, T, H, D] on keys and values [B, T, KV heads, D].

    With a `window`, each token sees itself and the window - 1 tokens before it.
    """
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    length = q.shape[2]
    mask = None
    if window is not None and window < length:
        slots = torch.arange(length, device=q.device)
        mask = hidden_slots(slots, slots, window).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).flatten(2)


def hidden_slots(slots: Tensor, positions: Tensor, window: int | None = None) -> Tensor:
    """Return the additive mask [T, S] in fp32 for queries at `positions` [T] and slots that hold the positions `slots` [S].

    It is 0 where a query sees the slot and -inf where the slot is in the future, before the window, or empty (negative).
    """
    hidden = slots > positions[:, None]
    if window is not None:
        hidden = hidden | (slots <= positions[:, None] - window) | (slots < 0)
    return torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device).masked_fill_(hidden, -math.inf)


def cached_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return the attention [1, T, H * D] of query [1, T, H, D] on key and value [1, KV heads, S, D] with mask [T, S].

    The query heads that share a KV head form the rows of one matrix, so keys and values are never repeated; for T = 1 all
    reshapes are views, if keys are whole. Keys [1, KV heads, S, key_dim] may hold only the numbers that differ from the values
    (see `toolkit.kernels.shared_keys`). This doesn't use `scaled_dot_product_attention`, which picks a different implementation
    per device, dtype and version, some of which make copies.
    """
    _, t, heads, dim = query.shape
    kv, slots = key.shape[1:3]
    each = heads // kv
    rows = query.view(t, kv, each, dim).transpose(0, 1).reshape(kv, t * each, dim)
    scores = torch.bmm(stored_numbers(rows, key.shape[3]), key[0].transpose(1, 2))
    if key.shape[3] < dim:
        others = rows.masked_fill(~shared_numbers(dim, key.shape[3], rows.device), 0)
        scores = torch.baddbmm(scores, others, value[0].transpose(1, 2))
    scores = scores.view(kv, t, each, slots)
    weights = torch.add(mask[:, None], scores, alpha=scale).softmax(-1)
    out = torch.bmm(weights.to(value.dtype).view(kv, t * each, slots), value[0])
    return out.view(kv, t, each, dim).transpose(0, 1).reshape(1, t, heads * dim)
