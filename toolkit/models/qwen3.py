"""Qwen3, dense and with experts: its layers, its cache, and its costs. The config is in qwen3_config.py.

Grouped-query attention over all positions or a sliding window, with an RMSNorm on each query and key head before the rotary
embedding; then a SiLU-gated MLP or a mixture of experts. Norms precede both halves of a layer, and there are no biases unless
the config has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from toolkit import ops
from toolkit.core.distributed import WHOLE, Shard
from toolkit.models.cache import Cache, KeysValues, Reach, Ring, State
from toolkit.models.cache_codes import every_position
from toolkit.models.costs import Cost, each, look_up, weigh
from toolkit.models.cuts import Cut, evenly, split_heads
from toolkit.models.layers import Embedding, Experts, GatedMLP, Joined, Linear, Residual, RMSNorm
from toolkit.models.model import CausalLM, length_of
from toolkit.models.names import SKIPPED
from toolkit.models.places import to_dtype
from toolkit.models.qwen3_config import Config, names_gguf, names_hf
from toolkit.ops import HeadLayout, Operand
from toolkit.ops.reference.attention import cached_attention, causal_attention

if TYPE_CHECKING:
    from toolkit.gpu.device import Device

__all__ = ["SKIPPED", "Config", "Model", "names_gguf", "names_hf"]


@dataclass(frozen=True)
class At:
    """The cache of a forward pass, and the `Reach` of its tokens in layers with all positions and with a window."""

    cache: Cache
    full: Reach
    window: Reach | None

    @cached_property
    def rope(self) -> Tensor:
        """The rotary table of the new positions."""
        return self.cache.ropes["full"].index_select(0, self.full.positions)


def _heads(config: Config, shard: Shard) -> tuple[Cut, Cut]:
    """Return the cuts of the query heads and of the KV heads."""
    names = ("num_attention_heads", "num_key_value_heads")
    return split_heads(config.num_attention_heads, config.num_key_value_heads, shard, names)


class Attention(nn.Module):
    """Grouped-query attention with normalized query and key heads, on the sequence itself or on a cache."""

    def __init__(self, config: Config, layer: int, shard: Shard) -> None:
        super().__init__()
        self.layer, self.head_dim, self.scale = layer, config.head_dim, config.head_dim**-0.5
        self.rope, self.window = config.rope, config.sliding_window if layer in config.windowed else None
        heads, kv_heads = _heads(config, shard)
        width, kv_width = heads.times(config.head_dim), kv_heads.times(config.head_dim)
        self.qkv = Joined(config.hidden_size, {"q": width, "k": kv_width, "v": kv_width}, bias=config.attention_bias)
        self.o = Linear(width, config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.heads = HeadLayout(heads.held, kv_heads.held, config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Operand, at: At | None, rope: Tensor | None) -> Tensor | ops.Partial:
        """x holds [B, T, hidden]. Without a cache (`at`), `rope` is the rotary table of the sequence."""
        if at is None:
            assert rope is not None
            query, key, value = self._heads(x, rope)
            mixed: Tensor | Operand = causal_attention(query, key, value, self.scale, self.window)
        else:
            state, reach = at.cache.states[self.layer], at.full if self.window is None else at.window
            assert isinstance(state, KeysValues)
            assert reach is not None
            if ops.on_gpu(x.plain, self.q_norm.weight) and self.heads.fits(x.plain.dtype, self.scale):
                norms = (self.q_norm.weight, self.k_norm.weight)
                given = (self.heads, self.qkv.projected(x), *norms, at.cache.ropes["full"], reach, self.scale)
                mixed = state.attend(*given, ops.takes_quantized(self.o.weight))
            else:
                query, key, value = self._heads(x, at.rope)
                seen = state.extend(key.transpose(1, 2), value.transpose(1, 2), reach)
                mixed = cached_attention(query, *seen, reach.mask, self.scale)
        return self.o.unsummed(mixed)

    def _heads(self, x: Operand, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [B, T, H, D], normalized and rotated, key [B, T, KV, D] likewise, and value [B, T, KV, D]."""
        heads = (*x.plain.shape[:2], -1, self.head_dim)
        query, key, value = (part.view(heads) for part in self.qkv(x))
        return self.rope.turn(self.q_norm(query), rope), self.rope.turn(self.k_norm(key), rope), value


class SparseMLP(nn.Module):
    """A mixture of experts, weighted by a softmax over all experts; the chosen experts' weights may be scaled to sum to one.

    It also computes the norm before it, so that for one token norm and router are one launch.
    """

    def __init__(self, config: Config, shard: Shard) -> None:
        super().__init__()
        self.top_k, self.scaled = config.num_experts_per_tok, config.norm_topk_prob
        self.router = Linear(config.hidden_size, config.num_experts)
        width = evenly(config.moe_intermediate_size, shard, "moe_intermediate_size")
        self.experts = Experts(config.num_experts, config.hidden_size, width)

    def forward(self, x: Residual, norm: RMSNorm) -> Residual:
        step = self.experts.step(x, norm, self.router.weight, self.top_k) if self.scaled else None
        if step is not None:
            return step
        normed, x = x.normed(norm)
        rows = normed.plain.flatten(0, 1)
        chosen, weights = ops.choose_experts(self.router(rows), self.experts.count, self.top_k, over_all=not self.scaled)
        out = ops.all_reduce(self.experts(rows, chosen, weights), self.experts.ranks)
        return x.add(out.view(x.x.shape))


class Block(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, layer: int, shard: Shard) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, shard)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if layer in config.sparse:
            self.moe = SparseMLP(config, shard)
        else:
            self.mlp = GatedMLP(config.hidden_size, evenly(config.intermediate_size, shard, "intermediate_size"))

    def forward(self, x: Residual, at: At | None, rope: Tensor | None = None) -> Residual:
        normed, x = x.normed(self.attention_norm, self.attention.qkv)
        x = x.add(self.attention(normed, at, rope))
        if hasattr(self, "moe"):
            return self.moe(x, self.mlp_norm)  # type: ignore[no-any-return]
        normed, x = x.normed(self.mlp_norm, self.mlp.gate_up)
        return x.add(self.mlp(normed))


class Model(CausalLM):
    """A Qwen3 model; see `CausalLM`."""

    config: Config

    def __init__(self, config: Config, device: Device, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE) -> None:
        super().__init__(config, device, dtype, shard)
        with torch.device("meta"):
            self.embed = Embedding(self.vocab, config.hidden_size, dtype)
            self.layers = nn.ModuleList(Block(config, i, shard) for i in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.head = None if config.tie_word_embeddings else Linear(config.hidden_size, self.vocab)
        to_dtype(self, dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab], fp32."""
        slots = torch.arange(length_of(ids), device=ids.device)
        return self.logits(self._layers(self.embed(ids), None, self.config.rope.table(slots, self.dtype)))

    def make_cache(self, context: int, kv: str | None) -> Cache:
        c = self.config
        slots = torch.arange(context, device=self.device.torch)
        like = (c.head_dim, self.dtype, self.device.torch)
        kv_heads = _heads(c, self.shard)[1].held
        makers: list[Callable[[], State] | None] = [every_position(kv, kv_heads, context, *like)]
        makers *= c.num_hidden_layers
        for layer in c.windowed:
            assert c.sliding_window is not None
            makers[layer] = partial(Ring, kv_heads, c.sliding_window, context, *like)
        return Cache(slots, {"full": c.rope.table(slots, self.dtype)}).fill(makers)

    def reaches(self, positions: Tensor, cache: Cache, length: int) -> dict[str, Reach]:
        found, window = {"full": cache.reach(positions, length)}, self.config.sliding_window
        return found if window is None else {**found, "sliding": cache.ring_reach(positions, length, window)}

    def passing(self, x: Tensor, cache: Cache, reaches: dict[str, Reach]) -> At:
        return At(cache, reaches["full"], reaches.get("sliding"))

    @property
    def routed_width(self) -> int:
        return self.config.num_experts_per_tok * self.config.moe_intermediate_size

    def costs(self, length: int) -> tuple[Cost, ...]:
        """Return the cost of each part for a token that follows `length` others. The token reads only its chosen experts."""
        c, layers = self.config, range(self.config.num_hidden_layers)
        found = [look_up("embedding", self.embed)]
        for kind, own in (("full", set(layers) - set(c.windowed)), ("sliding", set(c.windowed))):
            if own:
                found.append(self._attention_cost(kind if c.windowed else "", own, length))
        if len(c.sparse) < c.num_hidden_layers:
            found.append(weigh("mlp", each(self.layers, "mlp", only=set(layers) - set(c.sparse))))
        if c.sparse:
            share = c.num_experts_per_tok / c.num_experts
            found.append(weigh("experts", each(self.layers, "moe.experts", only=c.sparse), share=share))
            found.append(weigh("router", each(self.layers, "moe.router", only=c.sparse)))
        found += [weigh("norms", each(self.layers, "attention_norm", "mlp_norm")), weigh("norms", self.norm)]
        return (*found, weigh("head", self.embed, tied=True) if self.head is None else weigh("head", self.head))

    def _attention_cost(self, kind: str, layers: set[int], length: int) -> Cost:
        c = self.config
        entries = min(length, c.sliding_window or length) if kind == "sliding" else length
        heads, kv_heads = _heads(c, self.shard)
        kv_bytes = 2 * kv_heads.held * c.head_dim * self.dtype.itemsize  # per token and layer
        return weigh(
            "attention",
            each(self.layers, "attention", only=layers),
            kind=kind,
            flops=4 * heads.held * c.head_dim * entries,
            state_bytes=kv_bytes * entries,
            state_per_token_bytes=kv_bytes if entries == length else 0,
        )
