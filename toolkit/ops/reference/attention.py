"""Attention and rotary embedding in plain PyTorch, on a sequence itself or on a cache: the reference of their kernels.

Chosen so that a decode step launches few kernels and copies nothing: no operation here indexes with host data, waits, or
makes a contiguous clone. It knows no model and no cache.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def rope_of(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Tensor:
    """The rotary table [T, 2, 2 F] of `positions` [T] for any `frequencies` [F] (radians a position, fp32)."""
    angles = positions[:, None].float() * frequencies  # [T, F]
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table.to(dtype)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of `x` [B, T, heads, head_dim] with `rope` [T, 2, head_dim]: halves paired, as Qwen, Llama, NeoX."""
    cos, sin = rope[:, 0, None], rope[:, 1, None]  # [T, 1, head_dim]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Attention of a whole sequence on itself: [B, T, H, D] with keys and values [B, T, KV heads, D] -> [B, T, H * D].

    `window`: each token sees itself and the window - 1 before it.
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
    """The additive mask [T, S] in fp32 of `positions` [T] on what stands at `slots` [S] (positions too; negative: nothing).

    0 where a token sees the slot, -inf where that lies in its future, before its window, or holds nothing.
    """
    hidden = slots > positions[:, None]
    if window is not None:
        hidden = hidden | (slots <= positions[:, None] - window) | (slots < 0)
    return torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device).masked_fill_(hidden, -math.inf)


def cached_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of new tokens on a cache: query [1, T, H, D], key and value [1, KV heads, S, D], mask [T, S] -> [1, T, H * D].

    The query heads that share a KV head are packed as rows of one matrix, so that keys and values are never repeated;
    at T = 1 all reshapes are views. Written out rather than left to `scaled_dot_product_attention`, which picks another
    implementation per device, dtype and version, some of which copy.
    """
    _, t, heads, dim = query.shape
    kv, slots = key.shape[1:3]
    each = heads // kv
    rows = query.view(t, kv, each, dim).transpose(0, 1).reshape(kv, t * each, dim)
    scores = torch.bmm(rows, key[0].transpose(1, 2)).view(kv, t, each, slots)
    weights = torch.add(mask[:, None], scores, alpha=scale).softmax(-1)
    out = torch.bmm(weights.to(value.dtype).view(kv, t * each, slots), value[0])
    return out.view(kv, t, each, dim).transpose(0, 1).reshape(1, t, heads * dim)
