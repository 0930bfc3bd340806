"""Kinds of attention: causal, masked, grouped queries, flexible, linear."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def causal_bf16_training(device: torch.device) -> None:
    """Train a causal self-attention block in bf16 with rotary positions."""
    dim, heads, length = 128, 4, 64
    qkv = nn.Linear(dim, 3 * dim, bias=False).to(device, torch.bfloat16)
    out = nn.Linear(dim, dim, bias=False).to(device, torch.bfloat16)
    optimizer = torch.optim.SGD([*qkv.parameters(), *out.parameters()], lr=0.1)
    x = torch.randn(2, length, dim, device=device, dtype=torch.bfloat16)
    angles = torch.outer(torch.arange(length, device=device), 10000 ** (-torch.arange(0, 16, device=device) / 16))
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    for _ in range(2):
        q, k, v = (y.view(2, length, heads, -1).transpose(1, 2) for y in qkv(x).chunk(3, dim=-1))
        q, k = (torch.cat([a * cos - b * sin, a * sin + b * cos], -1) for a, b in (q.chunk(2, -1), k.chunk(2, -1)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        loss = out(y.transpose(1, 2).flatten(2)).float().pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()


def masked_fp32_training(device: torch.device) -> None:
    """Differentiate attention in fp32 with a boolean mask of sliding windows and with an additive bias."""
    window = (torch.arange(48)[:, None] - torch.arange(48)[None]).abs() <= 8
    bias = nn.Parameter(torch.zeros(4, 48, 48, device=device))
    q, k, v = (torch.randn(2, 4, 48, 32, device=device, requires_grad=True) for _ in range(3))
    windowed = F.scaled_dot_product_attention(q, k, v, attn_mask=window.to(device))
    biased = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.unsqueeze(0).expand(2, -1, -1, -1))
    loss = (windowed - biased).square().sum()
    loss.backward()
    torch.stack([q.grad.norm(), k.grad.norm(), v.grad.norm(), bias.grad.norm()]).tolist()


@torch.inference_mode()
def grouped_queries(device: torch.device) -> None:
    """Run attention in fp16 with fewer heads of keys and values, once with `enable_gqa` and once repeated."""
    x = torch.randn(2, 40, 256).to(device, torch.float16)
    wq, wk = nn.Linear(256, 256).to(device, torch.float16), nn.Linear(256, 64).to(device, torch.float16)
    wv = nn.Linear(256, 64).to(device, torch.float16)
    q = wq(x).unflatten(-1, (8, 32)).transpose(1, 2)
    k, v = (w(x).unflatten(-1, (2, 32)).transpose(1, 2) for w in (wk, wv))
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    b = F.scaled_dot_product_attention(q, k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=1), is_causal=True)
    (a - b).abs().max().item()


def flex_alibi(device: torch.device) -> None:
    """Run `flex_attention` eagerly with linear biases and a mask of blocks by document."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    documents = torch.tensor([0] * 50 + [1] * 78, device=device)
    slopes = torch.tensor([0.5, 0.25], device=device)

    def same_document(b, h, q, kv):
        return (documents[q] == documents[kv]) & (q >= kv)

    def alibi(score, b, h, q, kv):
        return score - slopes[h] * (q - kv)

    q, k, v = (torch.randn(1, 2, 128, 32, device=device) for _ in range(3))
    mask = create_block_mask(same_document, None, None, 128, 128, device=device)
    y = flex_attention(q, k, v, score_mod=alibi, block_mask=mask)
    y.norm().item()


def linear_attention(device: torch.device) -> None:
    """Train causal linear attention, whose state is a cumulative sum of outer products."""
    project = nn.Linear(32, 96).to(device)
    optimizer = torch.optim.Adam(project.parameters(), lr=1e-3)
    x = torch.randn(2, 64, 32, device=device)
    for _ in range(2):
        q, k, v = (y.unflatten(-1, (4, 8)) for y in project(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(dim=1)
        total = torch.einsum("bthk,bthk->bth", q, k.cumsum(dim=1))
        y = torch.einsum("bthk,bthkv->bthv", q, state) / total.unsqueeze(-1)
        loss = F.mse_loss(y.flatten(2)[:, :-1], x[:, 1:])
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
