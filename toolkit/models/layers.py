"""What the models share: norm, rotary embedding, attention, gated MLP, and putting weights into a model built on "meta".

Plain PyTorch, the same on every device, chosen so that a decode step launches few kernels and copies nothing: no
operation here indexes with host data, waits, or makes a contiguous clone.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Linear(nn.Linear):
    """x @ weight.T (+ bias), the bias added by a kernel of its own: one row through `addmm` copies the bias first on CUDA."""

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        return out if self.bias is None else out + self.bias


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.gate = Linear(hidden, width, bias=False)
        self.up = Linear(hidden, width, bias=False)
        self.down = Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def rope_table(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> Tensor:
    """The rotary table [T, 2, head_dim] of `positions` [T], made where they are: cosines, and sines signed for `rotate`.

    Angles in fp32, as transformers computes them, then cast to `dtype`.
    """
    half = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / torch.pow(theta, half / head_dim)
    angles = positions[:, None].float() * frequencies  # [T, head_dim / 2]
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    return table.to(dtype)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding of `x` [B, T, heads, head_dim] with `rope` [T, 2, head_dim]: halves paired, as Qwen, Llama, NeoX."""
    cos, sin = rope[:, 0, None], rope[:, 1, None]  # [T, 1, head_dim]
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attention of a whole sequence on itself: [B, T, H, D] with keys and values [B, T, KV heads, D] -> [B, T, H * D]."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2).flatten(2)


def hidden_slots(slots: Tensor, positions: Tensor) -> Tensor:
    """The additive mask [T, S] in fp32: 0 where slot <= position, -inf where the slot lies in the future or is unwritten."""
    future = slots > positions[:, None]
    return torch.zeros(future.shape, dtype=torch.float32, device=future.device).masked_fill_(future, -math.inf)


def cached_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of new tokens on a cache: query [1, T, H, D], key and value [1, KV heads, S, D], mask [T, S] -> [1, T, H * D].

    The query heads that share a KV head are packed as rows of one matrix, so that keys and values are never repeated;
    at T = 1 all reshapes are views. Written out rather than left to `scaled_dot_product_attention`, which picks another
    implementation per device, dtype and version, some of which copy.
    """
    _, t, heads, dim = query.shape
    kv = key.shape[1]
    rows = query.view(t, kv, heads // kv, dim).transpose(0, 1).reshape(kv, -1, dim)  # [KV, T * G, D]
    scores = torch.bmm(rows, key[0].transpose(1, 2)).view(kv, t, heads // kv, -1)  # [KV, T, G, S]
    weights = torch.add(mask[:, None], scores, alpha=scale).softmax(-1)
    out = torch.bmm(weights.to(value.dtype).view(kv, -1, weights.shape[-1]), value[0])  # [KV, T * G, D]
    return out.view(kv, t, heads // kv, dim).transpose(0, 1).reshape(1, t, heads * dim)


def assign(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put `tensor` (already on its device, in its dtype) where the parameter called `name` is, without a copy."""
    owner, _, leaf = name.rpartition(".")
    old = module.get_parameter(name)
    setattr(module.get_submodule(owner), leaf, nn.Parameter(tensor, requires_grad=old.requires_grad))


def initialise(module: nn.Module, device: torch.device, dtype: torch.dtype, seed: int, std: float = 0.02) -> None:
    """Give every parameter a value: norms one, biases zero, the rest normal with `std`, drawn on the CPU from `seed`.

    The same seed gives the same weights on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, old in list(module.named_parameters()):
        if old.ndim > 1:
            value = torch.randn(old.shape, generator=generator) * std
        else:
            value = torch.zeros(old.shape) if name.endswith("bias") else torch.ones(old.shape)
        assign(module, name, value.to(device, dtype))
