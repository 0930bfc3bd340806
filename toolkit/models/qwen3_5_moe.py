"""Qwen3.5, dense and with experts: its layers, its cache, and its costs. The config is in qwen3_5_config.py.

Typically three of four layers are gated delta nets, a recurrent memory of fixed size behind a short convolution; the fourth is
grouped-query attention whose output is scaled by a sigmoid gate. Either is followed by a gated MLP, or by a mixture of experts
with one expert that every token shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from toolkit import ops
from toolkit.core.distributed import WHOLE, Shard
from toolkit.models.cache import Cache, KeysValues, Reach, Recurrent, State
from toolkit.models.cache_codes import every_position
from toolkit.models.costs import Cost, each, look_up, weigh
from toolkit.models.cuts import Cut, as_cut, end_to_end, evenly, split_heads
from toolkit.models.layers import Embedding, Experts, GatedMLP, Joined, Linear, Residual, RMSNorm
from toolkit.models.model import CausalLM, length_of
from toolkit.models.names import SKIPPED
from toolkit.models.places import assign, held_of, to_dtype
from toolkit.models.qwen3_5_config import Config, names_gguf, names_hf
from toolkit.ops import HeadLayout, Operand
from toolkit.ops.reference.attention import cached_attention, causal_attention
from toolkit.ops.reference.delta_rule import DeltaNetLayer, convolve, mix

if TYPE_CHECKING:
    from toolkit.gpu.device import Device

__all__ = ["SKIPPED", "Config", "Model", "names_gguf", "names_hf"]


@dataclass(frozen=True)
class At:
    """The cache of a forward pass, and the `Reach` of its tokens."""

    cache: Cache
    reach: Reach

    @cached_property
    def rope(self) -> Tensor:
        """The rotary table of the new positions."""
        return self.cache.ropes["full"].index_select(0, self.reach.positions)


def _heads(config: Config, shard: Shard) -> tuple[Cut, Cut]:
    """Return the cuts of the query heads and of the KV heads of attention layers."""
    names = ("num_attention_heads", "num_key_value_heads")
    return split_heads(config.num_attention_heads, config.num_key_value_heads, shard, names)


def _delta_heads(config: Config, shard: Shard) -> tuple[Cut, Cut, Cut]:
    """Return the cuts of the value heads, of the key heads, and of the channels of the convolution, of delta nets."""
    c, names = config, ("linear_num_value_heads", "linear_num_key_heads")
    values, keys = split_heads(c.linear_num_value_heads, c.linear_num_key_heads, shard, names, c.tiled)
    key_size = keys.times(c.linear_key_head_dim)
    return values, keys, end_to_end(key_size, key_size, values.times(c.linear_value_head_dim))


class DeltaNet(nn.Module):
    """The gated delta net: a short causal convolution of queries, keys and values, then the delta rule, then a gated norm.

    It computes in fp32 from the convolution to the norm. `conv` [channels, taps], `decay` (negative: -exp(A_log)) and `dt_bias`
    [value heads] stay fp32. The state consists of "conv", a ring of the last inputs [taps, channels], and "memory" [value
    heads, Dk, Dv].
    """

    KEEPS_FP32 = ("conv", "decay", "dt_bias")
    INITIAL = {"conv": (-0.5, 0.5), "decay": (-16.0, -0.01)}  # noqa: RUF012 - the range of random ones; never changed

    def __init__(self, config: Config, layer: int, shard: Shard) -> None:
        super().__init__()
        self.layer, self.config = layer, config
        heads, keys, channels = _delta_heads(config, shard)
        taps, value_size = config.linear_conv_kernel_dim, heads.times(config.linear_value_head_dim)
        self.inputs = Joined(config.hidden_size, {"qkv": channels, "z": value_size, "b": heads, "a": heads})
        self.conv = nn.Parameter(torch.empty(channels.held, taps))
        self.decay = nn.Parameter(torch.empty(heads.held))
        self.dt_bias = nn.Parameter(torch.empty(heads.held))
        self.cuts = {"conv": (channels, as_cut(taps)), "decay": (heads,), "dt_bias": (heads,)}
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out = Linear(value_size, config.hidden_size)
        self.key_heads = keys.held

    def forward(self, x: Operand, at: At | None) -> Tensor | ops.Partial:
        c, norm = self.config, self.norm
        heads = (self.key_heads, c.linear_key_head_dim, c.tiled)
        layer = DeltaNetLayer(self.conv, self.decay, self.dt_bias, norm.weight, *heads, norm.eps)
        qkv, z, b, a = self.inputs(x)
        if at is None:
            before = qkv.new_zeros(len(qkv), self.conv.shape[1] - 1, qkv.shape[-1])
            found = Operand(mix(convolve(torch.cat((before, qkv), 1), self.conv), z, b, a, layer).to(qkv.dtype))
        else:
            state = at.cache.states[self.layer]
            assert isinstance(state, Recurrent)
            held = (at.reach.positions, state.states["conv"], state.states["memory"])
            found = ops.delta_net(qkv[0], z[0], b[0], a[0], *held, layer, ops.takes_quantized(self.out.weight))
            found = Operand(found.plain[None], tuple(part[None] for part in found.quantized))
        return self.out.unsummed(found)


class Attention(nn.Module):
    """Grouped-query attention with normalized, partly rotated query and key heads, and a sigmoid gate on its output.

    The matrix "q" returns the query of each head, followed by its gate.
    """

    def __init__(self, config: Config, layer: int, shard: Shard) -> None:
        super().__init__()
        self.layer, self.head_dim, self.rope = layer, config.head_dim, config.rope
        self.scale = config.head_dim**-0.5
        heads, kv_heads = _heads(config, shard)
        sizes = {"q": heads.times(2 * self.head_dim), "k": kv_heads.times(self.head_dim), "v": kv_heads.times(self.head_dim)}
        self.qkv = Joined(config.hidden_size, sizes, bias=config.attention_bias)
        self.o = Linear(heads.times(self.head_dim), config.hidden_size, bias=config.attention_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.heads = HeadLayout(heads.held, kv_heads.held, config.head_dim, gated=True, eps=config.rms_norm_eps)

    def forward(self, x: Operand, at: At | None, rope: Tensor | None) -> Tensor | ops.Partial:
        """x holds [B, T, hidden]. Without a cache (`at`), `rope` is the rotary table of the sequence."""
        qkv = self.qkv.projected(x)
        row = qkv.row
        if at is None:
            assert rope is not None
            mixed = causal_attention(*self._heads(qkv.whole(), rope), self.scale)
        else:
            state = at.cache.states[self.layer]
            assert isinstance(state, KeysValues)
            if ops.on_gpu(row, self.q_norm.weight) and self.heads.fits(row.dtype, self.scale):
                norms = (self.q_norm.weight, self.k_norm.weight)
                mixed = state.attend(self.heads, qkv, *norms, at.cache.ropes["full"], at.reach, self.scale).plain
            else:
                query, key, value = self._heads(qkv.whole(), at.rope)
                seen = state.extend(key.transpose(1, 2), value.transpose(1, 2), at.reach)
                mixed = cached_attention(query, *seen, at.reach.mask, self.scale)
        gated = ops.gate_heads(mixed.view(*row.shape[:2], -1), row, self.heads.heads, ops.takes_quantized(self.o.weight))
        return self.o.unsummed(gated)

    def _heads(self, row: Tensor, rope: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [B, T, H, D], key and value [B, T, KV, D] from projections [B, T, width]; query and key are rotated."""
        heads, kv = self.heads.heads, self.heads.kv_heads
        both, key, value = row.view(*row.shape[:2], -1, self.head_dim).split((2 * heads, kv, kv), 2)
        query = both.unflatten(2, (-1, 2))[:, :, :, 0]
        return self.rope.turn(self.q_norm(query), rope), self.rope.turn(self.k_norm(key), rope), value


class SparseMLP(nn.Module):
    """A mixture of experts, and one expert that all tokens share, behind a sigmoid gate of its own.

    It also computes the norm before it, so that for one token norm and router are one launch.
    """

    def __init__(self, config: Config, shard: Shard) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.top_k = config.num_experts_per_tok
        self.gates = Joined(hidden, {"router": config.num_experts, "shared": 1})
        width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        self.experts = Experts(config.num_experts, hidden, evenly(width, shard, "moe_intermediate_size"))
        self.shared = GatedMLP(hidden, evenly(shared, shard, "shared_expert_intermediate_size"), partial=True)

    def forward(self, x: Residual, norm: RMSNorm) -> Residual:
        step = self.experts.step(x, norm, self.gates.whole(), self.top_k, self.shared)
        if step is not None:
            return step
        normed, x = x.normed(norm)
        rows = normed.plain.flatten(0, 1)
        chosen, weights, gate = ops.choose_experts(self.gates.row(rows), self.experts.count, self.top_k)
        routed = self.experts(rows, chosen, weights)
        out = ops.all_reduce(torch.addcmul(routed, ops.whole(self.shared(rows)), gate), self.experts.ranks)
        return x.add(out.view(x.x.shape))


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: Config, layer: int, shard: Shard) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.layer_types[layer] == "linear":
            self.delta = DeltaNet(config, layer, shard)
        else:
            self.attention = Attention(config, layer, shard)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.num_experts:
            self.moe = SparseMLP(config, shard)
        else:
            self.mlp = GatedMLP(config.hidden_size, evenly(config.intermediate_size, shard, "intermediate_size"))

    def forward(self, x: Residual, at: At | None, rope: Tensor | None = None) -> Residual:
        if hasattr(self, "delta"):
            normed, x = x.normed(self.mixer_norm, self.delta.inputs)
            x = x.add(self.delta(normed, at))
        else:
            normed, x = x.normed(self.mixer_norm, self.attention.qkv)
            x = x.add(self.attention(normed, at, rope))
        if hasattr(self, "moe"):
            return self.moe(x, self.mlp_norm)  # type: ignore[no-any-return]
        normed, x = x.normed(self.mlp_norm, self.mlp.gate_up)
        return x.add(self.mlp(normed))


class Model(CausalLM):
    """A Qwen3.5 model; see `CausalLM`."""

    config: Config

    def __init__(self, config: Config, device: Device, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE) -> None:
        super().__init__(config, device, dtype, shard)
        with torch.device("meta"):
            self.embed = Embedding(self.vocab, config.hidden_size, dtype)
            self.layers = nn.ModuleList(Block(config, i, shard) for i in range(config.num_hidden_layers))
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.head = None if config.tie_word_embeddings else Linear(config.hidden_size, self.vocab)
        to_dtype(self, dtype)

    def init_weights(self, seed: int = 0) -> Self:
        super().init_weights(seed)
        generator = torch.Generator().manual_seed(seed)
        for part in self.modules():
            if isinstance(part, DeltaNet):  # like trained models: memories of 1 to 100 tokens, a scale-preserving convolution
                channels, taps = (cut.size for cut in part.cuts["conv"])
                decays = torch.empty(self.config.linear_num_value_heads, device="cpu").uniform_(0.01, 16, generator=generator)
                conv = torch.empty(channels, taps, device="cpu").uniform_(-1, 1, generator=generator) * taps**-0.5
                for name, value in (("decay", -decays), ("conv", conv), ("dt_bias", torch.ones_like(decays))):
                    assign(part, name, held_of(value, part.cuts[name]).to(self.device.torch))
        return self

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab], fp32."""
        rope = self.config.rope.table(torch.arange(length_of(ids), device=ids.device), self.dtype)
        return self.logits(self._layers(self.embed(ids), None, rope))

    def make_cache(self, context: int, kv: str | None) -> Cache:
        c, device = self.config, self.device.torch
        slots = torch.arange(context, device=device)
        keys_values = every_position(kv, _heads(c, self.shard)[1].held, context, c.head_dim, self.dtype, device)
        values, _, channels = _delta_heads(c, self.shard)
        shapes = {
            "conv": ((c.linear_conv_kernel_dim, channels.held), self.dtype),
            "memory": ((values.held, c.linear_key_head_dim, c.linear_value_head_dim), torch.float32),
        }
        makers: dict[str, Callable[[], State]] = {"full": keys_values, "linear": partial(Recurrent, shapes, device)}
        return Cache(slots, {"full": c.rope.table(slots, self.dtype)}).fill([makers[kind] for kind in c.layer_types])

    def reaches(self, positions: Tensor, cache: Cache, length: int) -> dict[str, Reach]:
        return {"full": cache.reach(positions, length)}

    def passing(self, x: Tensor, cache: Cache, reaches: dict[str, Reach]) -> At:
        return At(cache, reaches["full"])

    @property
    def routed_width(self) -> int:
        return self.config.num_experts_per_tok * self.config.moe_intermediate_size

    def costs(self, length: int) -> tuple[Cost, ...]:
        """Return the cost of each part for a token that follows `length` others. The token reads only its chosen experts.

        The delta net reads and writes its whole memory for every token; its `state_bytes` count both.
        """
        c = self.config
        found = [look_up("embedding", self.embed)]
        linear = [i for i, kind in enumerate(c.layer_types) if kind == "linear"]
        full = [i for i, kind in enumerate(c.layer_types) if kind == "full"]
        if linear:
            values, _, channels = _delta_heads(c, self.shard)
            memory = values.held * c.linear_value_head_dim * c.linear_key_head_dim
            held = 4 * memory + c.linear_conv_kernel_dim * channels.held * self.dtype.itemsize
            flops = 7 * memory + 2 * c.linear_conv_kernel_dim * channels.held  # per number: decay, two reads, one correction
            modules = each(self.layers, "delta", only=linear)
            found.append(weigh("delta net", modules, flops=flops, state_bytes=held + 4 * memory, state_held_bytes=held))
        if full:
            heads, kv_heads = _heads(c, self.shard)
            kv_bytes = 2 * kv_heads.held * c.head_dim * self.dtype.itemsize  # per token and layer
            found.append(
                weigh(
                    "attention",
                    each(self.layers, "attention", only=full),
                    flops=4 * heads.held * c.head_dim * length,
                    state_bytes=kv_bytes * length,
                    state_per_token_bytes=kv_bytes,
                )
            )
        if c.num_experts:
            share = c.num_experts_per_tok / c.num_experts
            found.append(weigh("experts", each(self.layers, "moe.experts"), share=share))
            found.append(weigh("experts", each(self.layers, "moe.shared"), kind="shared"))
            found.append(weigh("router", each(self.layers, "moe.gates")))
        else:
            found.append(weigh("mlp", each(self.layers, "mlp")))
        found += [weigh("norms", each(self.layers, "mixer_norm", "mlp_norm")), weigh("norms", self.norm)]
        return (*found, weigh("head", self.embed, tied=True) if self.head is None else weigh("head", self.head))
