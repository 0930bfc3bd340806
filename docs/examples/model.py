"""A small language model with a preallocated cache of keys and values, used by `train.py` and `serve.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, DIM, HEADS, LAYERS, CONTEXT = 512, 64, 4, 2, 64


class Cache:
    """Keys and values of every layer, [layers, 2, B, heads, context, head_dim], and the number of positions in use."""

    def __init__(self, batch: int, device: torch.device) -> None:
        shape = (LAYERS, 2, batch, HEADS, CONTEXT, DIM // HEADS)
        self.memory = torch.zeros(shape, device=device, dtype=torch.bfloat16)
        self.used = 0

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store keys and values [B, heads, T, head_dim], and return those of all positions so far."""
        end = self.used + keys.shape[2]
        self.memory[layer, 0, :, :, self.used : end] = keys
        self.memory[layer, 1, :, :, self.used : end] = values
        held = self.memory[layer, :, :, :, :end].to(keys.dtype)
        return held[0], held[1]


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, DIM))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, DIM), nn.Embedding(CONTEXT, DIM)
        self.blocks = nn.ModuleList(Block(layer) for layer in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        """Return the logits [B, T, vocabulary] of tokens [B, T]; with a cache, only of the last position."""
        begin = 0 if cache is None else cache.used
        places = torch.arange(begin, begin + tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x, cache)
        if cache is not None:
            cache.used += tokens.shape[1]
            x = x[:, -1:]
        return self.head(self.norm(x))
