"""Gemma 4, text only: its layers, its cache, and its costs. The config is in gemma4_config.py, weight names in gemma4_names.py.

Layers with a sliding window alternate with layers that attend to all positions, and each kind has its own head sizes. Norms
precede and follow both halves of a layer, and a scalar multiplies its output. Configs may ask for values that equal the keys,
layers that share the keys and values of an earlier one, additional inputs for each layer, and experts next to the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit import ops
from toolkit.core.distributed import WHOLE, Shard
from toolkit.kernels.shared_keys import shared_weight
from toolkit.models.cache import Cache, KeysValues, Reach, Ring, State
from toolkit.models.cache_codes import every_position
from toolkit.models.costs import Cost, each, look_up, weigh
from toolkit.models.cuts import Cut, evenly, split_heads, spread
from toolkit.models.gemma4_config import FULL, SLIDING, Config, Heads
from toolkit.models.gemma4_names import SKIPPED, names_gguf, names_hf
from toolkit.models.layers import Embedding, Experts, GatedMLP, Joined, Linear, Residual, RMSNorm
from toolkit.models.model import CausalLM, length_of
from toolkit.models.places import to_dtype
from toolkit.ops import HeadLayout, Operand
from toolkit.ops.reference.attention import cached_attention, causal_attention, rope_of, rotate
from toolkit.weights.packed import PackedMatrix

if TYPE_CHECKING:
    from toolkit.gpu.device import Device

ROPE_POSITIONS = 8192  # computed at a time: the fp32 intermediates take five times the table's size in bfloat16

__all__ = ["SKIPPED", "Config", "Model", "names_gguf", "names_hf"]

ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "relu": "relu"}  # -> ops.ACTIVATIONS


@dataclass(frozen=True)
class Pass:
    """The state that the layers of one forward pass share.

    `positions` [T] are the tokens', and `tables` the rotary tables [positions, 2, head_dim] by kind of layer. Without a cache,
    `cache` is None and `reaches` (by kind) empty. `kernels` selects attention by kernels. Layers that reuse the keys and values
    of an earlier layer find them in that layer's cache state, or in `lent` by the number of that layer: without a cache, and if
    several tokens overwrite its ring. Then these are the ring's keys and values before the pass, and the new ones.
    """

    positions: Tensor
    tables: dict[str, Tensor]
    cache: Cache | None = None
    reaches: dict[str, Reach] = field(default_factory=dict)
    kernels: bool = False
    lent: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)

    @cached_property
    def ropes(self) -> dict[str, Tensor]:
        """The rotary tables [T, 2, head_dim] of the new positions."""
        if self.cache is None:
            return self.tables
        return {kind: table.index_select(0, self.positions) for kind, table in self.tables.items()}


def _heads(config: Config, kind: str, shard: Shard) -> tuple[Cut, Cut]:
    """Return the cuts of the query heads and of the KV heads of layers of this kind."""
    names = ("num_attention_heads", f"KV heads in layers of {kind}")
    return split_heads(config.num_attention_heads, config.heads(kind).kv_heads, shard, names)


class Attention(nn.Module):
    """Grouped-query attention with normalized queries, keys and values, and unscaled scores."""

    def __init__(self, config: Config, layer: int, shard: Shard) -> None:
        super().__init__()
        self.layer, self.kind, self.eps = layer, config.layer_types[layer], config.rms_norm_eps
        self.window = config.sliding_window if self.kind == SLIDING else None
        head_dim, bias = config.heads(self.kind).head_dim, config.attention_bias
        heads, kv_heads = _heads(config, self.kind, shard)
        self.source = config.source(layer)  # the layer whose keys and values this layer attends to
        self.head_dim, self.shares, self.lends = head_dim, self.source != layer, config.lends(layer)
        sizes = {"q": heads.times(head_dim)}
        if not self.shares:
            sizes["k"] = kv_heads.times(head_dim)
            if self.kind == SLIDING or not config.attention_k_eq_v:
                sizes["v"] = sizes["k"]
            self.k_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.qkv = Joined(config.hidden_size, sizes, bias=bias)
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps)
        self.o = Linear(sizes["q"], config.hidden_size, bias=bias)
        about = (heads.held, 0 if self.shares else kv_heads.held, head_dim)
        self.heads = HeadLayout(*about, values_are_keys="v" not in sizes, value_norm=True, eps=config.rms_norm_eps)

    def forward(self, x: Operand, at: Pass) -> Tensor | ops.Partial:
        kernels = at.kernels and self.heads.fits(x.plain.dtype, 1.0)
        return self.o.unsummed(self._by_kernels(x, at) if kernels else self._plain(x, at))

    def _plain(self, x: Operand, at: Pass) -> Tensor:
        heads = (*x.plain.shape[:2], -1, self.head_dim)
        query, *rest = (part.view(heads) for part in self.qkv(x))
        query = rotate(self._query_norm(query, at), at.ropes[self.kind])  # [B, T, H, D]
        new = [] if self.shares else self._keys_values(rest[0], rest[-1], at)
        if at.cache is None:
            if self.lends:
                at.lent[self.layer] = tuple(new)
            key, value = at.lent[self.source] if self.shares else new
            return causal_attention(query, key, value, 1.0, self.window)
        key, value = self._held(at, [part.transpose(1, 2) for part in new])
        return cached_attention(query, key, value, at.reaches[self.kind].mask, 1.0)

    def _query_norm(self, query: Tensor, at: Pass) -> Tensor:
        """Normalize the queries. If the cache holds a part of each key, they take over the keys' weight for the rest."""
        query = self.q_norm(query)
        key_dim = 0 if at.cache is None else self._state(at).key_dim
        return (query * shared_weight(self.k_norm.weight, key_dim)).to(query.dtype) if key_dim else query

    def _keys_values(self, key: Tensor, value: Tensor, at: Pass) -> list[Tensor]:
        """Return the new keys and values from the projections [B, T, KV heads, D] (the same tensor if K = V)."""
        value = F.rms_norm(value.float(), (self.head_dim,), None, self.eps).to(value.dtype)
        return [rotate(self.k_norm(key), at.ropes[self.kind]), value]

    def _held(self, at: Pass, new: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Append new keys and values [1, KV heads, T, D], if any, and return all, in the order of the mask of the reach."""
        state, reach = self._state(at), at.reaches[self.kind]
        if not self._lent(at):
            return state.extend(new[0], new[1], reach) if new else state.read(reach.bound)
        keys, values, key, value = self._lend(at, new)
        return torch.cat((keys[:, :, : reach.bound], key), 2), torch.cat((values[:, :, : reach.bound], value), 2)

    def _by_kernels(self, x: Operand, at: Pass) -> Operand:
        assert at.cache is not None
        quantize = ops.takes_quantized(self.o.weight)
        state, row, reach, rope = self._state(at), self.qkv.projected(x), at.reaches[self.kind], at.cache.ropes[self.kind]
        key_weight = self.q_norm.weight if self.shares else self.k_norm.weight
        if not self.shares and not self._lent(at):
            return state.attend(self.heads, row, self.q_norm.weight, key_weight, rope, reach, 1.0, quantize)
        query, *new = ops.make_heads(self.heads, row, self.q_norm.weight, key_weight, rope, reach.positions)
        if not self._lent(at):
            return state.look(query, reach, 1.0, quantize)
        keys, values, *new = self._lend(at, new)
        return ops.attend(query, keys, values, reach.positions, 1.0, reach.size or 0, reach.bound, new)

    def _state(self, at: Pass) -> KeysValues:
        state = at.cache.states[self.source] if at.cache is not None else None
        assert isinstance(state, KeysValues)
        return state

    def _lent(self, at: Pass) -> bool:
        """Whether the keys and values are in `at.lent`: several tokens overwrite a ring that other layers read, too."""
        ring = at.cache is not None and at.reaches[self.kind].size is not None
        return (self.shares or self.lends) and ring and at.positions.shape[0] > 1

    def _lend(self, at: Pass, new: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return `at.lent` of the layer that owns the ring. In that layer, fill it with copies and write `new` to the ring."""
        if not self.shares:
            ring = self._state(at)
            assert isinstance(ring, Ring)
            at.lent[self.layer] = (ring.keys.clone(), ring.values.clone(), *(part.contiguous() for part in new))
            ring.write_last(new[0], new[1], at.reaches[self.kind])
        return at.lent[self.source]


class Router(nn.Module):
    """Chooses the experts of each token and their weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.hidden, self.eps, self.top = config.hidden_size, config.rms_norm_eps, config.top_k_experts
        self.proj = Linear(config.hidden_size, config.num_experts)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))
        self.per_expert_scale = nn.Parameter(torch.ones(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, hidden] -> expert numbers [N, k] and their weights [N, k] in fp32."""
        normed = F.rms_norm(x.float(), (self.hidden,), None, self.eps).to(x.dtype)
        scores: Tensor = self.proj(normed * self.scale * self.hidden**-0.5)
        chosen, shares = ops.choose_experts(scores, len(self.per_expert_scale), self.top)
        return chosen, shares * self.per_expert_scale.index_select(0, chosen.flatten()).view(shares.shape)


class RoutedExperts(nn.Module):
    """Experts next to the MLP, with norms of their own. Their router reads the hidden state before the norm."""

    def __init__(self, config: Config, shard: Shard) -> None:
        super().__init__()
        activation = ACTIVATIONS[config.hidden_activation]
        self.router = Router(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        width = evenly(config.moe_intermediate_size, shard, "moe_intermediate_size")
        self.experts = Experts(config.num_experts, config.hidden_size, width, activation)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)  # [B * T, hidden]
        mixed = ops.all_reduce(self.experts(self.norm(rows), *self.router(rows)), self.experts.ranks)
        out: Tensor = self.post_norm(mixed)
        return out.view(x.shape)


class LayerInput(nn.Module):
    """up(activation(gate(x)) * the layer's additional input). The caller applies `norm` to the result and adds it to x."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.activation = ops.ACTIVATIONS[ACTIVATIONS[config.hidden_activation]]
        self.gate = Linear(config.hidden_size, config.hidden_size_per_layer_input)
        self.up = Linear(config.hidden_size_per_layer_input, config.hidden_size)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        out: Tensor = self.up(self.activation(self.gate(x)) * given)
        return out


class Block(nn.Module):
    """One layer: x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), times a scalar."""

    def __init__(self, config: Config, layer: int, shard: Shard) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
        self.attention_norm, self.attention, self.attention_post_norm = norm(), Attention(config, layer, shard), norm()
        activation = ACTIVATIONS[config.hidden_activation]
        self.mlp_norm, self.mlp_post_norm = norm(), norm()
        width = evenly(config.intermediate_sizes[layer], shard, "intermediate_size")
        self.mlp = GatedMLP(config.hidden_size, width, activation)
        if config.num_experts:
            self.dense_post_norm, self.routed = norm(), RoutedExperts(config, shard)
        if config.hidden_size_per_layer_input:
            self.layer_input = LayerInput(config)
        self.has_experts, self.has_input = config.num_experts > 0, config.hidden_size_per_layer_input > 0
        self.scalar = nn.Parameter(torch.ones(1))

    def forward(self, x: Residual, at: Pass, given: Tensor | None = None) -> Residual:
        """Run the layer; `given` [B, T, hidden_size_per_layer_input] is its additional input if the config has such inputs."""
        normed, x = x.normed(self.attention_norm, self.attention.qkv)
        x = x.add(self.attention(normed, at), self.attention_post_norm)
        normed, x = x.normed(self.mlp_norm, self.mlp.gate_up)
        out = self.mlp(normed)
        if self.has_experts:
            out = self.dense_post_norm(ops.whole(out)) + self.routed(x.x)
        if self.has_input:
            x = Residual(x.add(out, self.mlp_post_norm).sum())
            return x.add(self.layer_input(x.x, given), self.layer_input.norm, self.scalar)
        return x.add(out, self.mlp_post_norm, self.scalar)


class TokenEmbedding(Embedding):
    """Rows of the token table times sqrt(hidden), followed by the per-layer inputs of the token if the config has them."""

    def __init__(self, config: Config, dtype: torch.dtype, shard: Shard) -> None:
        vocab = spread(config.vocab_size, shard)
        super().__init__(vocab, config.hidden_size, dtype, _rounded(config.hidden_size**0.5, dtype))
        width = config.hidden_size_per_layer_input
        self.per_layer: Embedding | None = None
        if width:
            scale = _rounded(width**0.5, dtype)
            rows = spread(config.vocab_size_per_layer_input, shard)
            self.per_layer = Embedding(rows, config.num_hidden_layers * width, dtype, scale)

    def forward(self, ids: Tensor) -> Tensor:
        """ids of any shape -> [*ids.shape, hidden + layers * hidden_size_per_layer_input]."""
        rows = super().forward(ids)
        return rows if self.per_layer is None else torch.cat((rows, self.per_layer(ids)), -1)


def _rounded(scale: float, dtype: torch.dtype) -> float:
    """Round the scale of an embedding to the table's dtype: sqrt(5376) is 73.5 in bfloat16."""
    return torch.tensor(scale, dtype=dtype, device="cpu").item()


class LayerInputs(nn.Module):
    """The additional input of each layer: a normalized projection of the embedding plus the token's row for the layer."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layers, self.width, self.scale = (
            config.num_hidden_layers,
            config.hidden_size_per_layer_input,
            config.hidden_size**-0.5,
        )
        self.proj = Linear(config.hidden_size, self.layers * self.width)
        self.norm = RMSNorm(self.width, config.rms_norm_eps)

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        """x [B, T, hidden], rows [B, T, layers * width] -> [B, T, width] for each layer, contiguous."""
        shape = (*x.shape[:2], self.layers, self.width)
        projected = self.norm((self.proj(x) * self.scale).view(shape))
        return ((projected + rows.view(shape)) * 2.0**-0.5).permute(2, 0, 1, 3).contiguous().unbind()


class Model(CausalLM):
    """A Gemma 4 model; see `CausalLM`."""

    config: Config
    embed: TokenEmbedding
    KEEPS_FP32 = ("rope_freqs",)

    def __init__(self, config: Config, device: Device, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE) -> None:
        super().__init__(config, device, dtype, shard)
        with torch.device("meta"):
            self.embed = TokenEmbedding(config, dtype, shard)
            self.layers = nn.ModuleList(Block(config, i, shard) for i in range(config.num_hidden_layers))
            self.layer_inputs = LayerInputs(config) if config.hidden_size_per_layer_input else None
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
            self.head = None if config.tie_word_embeddings else Linear(config.hidden_size, self.vocab)
            self.rope_freqs = nn.Parameter(torch.ones(config.full.head_dim // 2)) if config.rope_freqs_stored else None
        to_dtype(self, dtype)

    def logits(self, x: Tensor) -> Tensor:
        logits = super().logits(x)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward(self, ids: Tensor) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab], fp32."""
        slots = torch.arange(length_of(ids), device=ids.device)
        return self.logits(self._layers(self.embed(ids), Pass(slots, self._ropes(slots))))

    def make_cache(self, context: int, kv: str | None) -> Cache:
        c = self.config
        slots = torch.arange(context, device=self.device.torch)
        makers: list[Callable[[], State] | None] = []
        kv_heads = {kind: _heads(c, kind, self.shard)[1].held for kind in {FULL, *c.layer_types}}
        full = every_position(kv, kv_heads[FULL], context, c.full.head_dim, self.dtype, self.device.torch, c.key_dim)
        for layer, kind in enumerate(c.layer_types):
            like = (c.heads(kind).head_dim, self.dtype, self.device.torch)
            if layer >= c.first_shared_layer:
                makers.append(None)
            elif kind == FULL:
                makers.append(full)
            else:
                makers.append(partial(Ring, kv_heads[kind], c.sliding_window, context, *like))
        return Cache(slots, self._ropes(slots)).fill(makers)

    def reaches(self, positions: Tensor, cache: Cache, length: int) -> dict[str, Reach]:
        found = {FULL: cache.reach(positions, length)}
        if SLIDING in cache.ropes:
            found[SLIDING] = cache.ring_reach(positions, length, self.config.sliding_window)
        return found

    def passing(self, x: Tensor, cache: Cache, reaches: dict[str, Reach]) -> Pass:
        return Pass(reaches[FULL].positions, cache.ropes, cache, reaches, ops.on_gpu(x, self.norm.weight))

    def source(self, layer: int) -> int:
        return self.config.source(layer)

    def enter(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        if self.layer_inputs is None:
            return x, ()
        hidden = self.config.hidden_size
        x, rows = x[..., :hidden], x[..., hidden:]
        return x, self.layer_inputs(x, rows)

    @property
    def layer_input_size(self) -> int:
        return self.config.hidden_size_per_layer_input

    @property
    def routed_width(self) -> int:
        return self.config.top_k_experts * self.config.moe_intermediate_size

    def costs(self, length: int) -> tuple[Cost, ...]:
        """Return the cost of each part for a token that follows `length` others."""
        norms = ["attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"]
        if self.config.num_experts:
            norms += ["dense_post_norm", "routed.norm", "routed.post_norm"]
        numbered = each(self.layers, *norms)
        for layer, modules in numbered.items():
            modules.append(_alone(self.layers[layer].get_parameter("scalar")))
        found = [look_up("embedding", _alone(self.embed.weight)), *self._attention_costs(length)]
        found += [weigh("mlp", each(self.layers, "mlp")), weigh("norms", numbered), weigh("norms", self.norm)]
        if self.config.num_experts:
            share = self.config.top_k_experts / self.config.num_experts
            found.append(weigh("experts", each(self.layers, "routed.experts"), share=share))
            found.append(weigh("router", each(self.layers, "routed.router")))
        if self.embed.per_layer is not None and self.layer_inputs is not None:
            found.append(look_up("per-layer inputs", self.embed.per_layer, kind="table"))
            found.append(weigh("per-layer inputs", self.layer_inputs, kind="projection"))
            found.append(weigh("per-layer inputs", each(self.layers, "layer_input")))
        head = self.embed.weight if self.head is None else self.head.weight
        found.append(weigh("head", _alone(head), tied=self.head is None))
        return (*found, weigh("norms", _alone(self.rope_freqs), kind="rotary")) if self.rope_freqs is not None else tuple(found)

    def _attention_costs(self, length: int) -> list[Cost]:
        """Return the costs by kind of layer, separately for layers that share the keys and values of another."""
        c, found = self.config, []
        for kind, name in ((SLIDING, "sliding"), (FULL, "full")):
            layers = [i for i, one in enumerate(c.layer_types) if one == kind]
            for shares in (False, True):
                own = [i for i in layers if (i >= c.first_shared_layer) == shares]
                if not own:
                    continue
                head_dim, (heads, kv_heads) = c.heads(kind).head_dim, _heads(c, kind, self.shard)
                entries = min(length, c.sliding_window) if kind == SLIDING else length
                key_dim = c.key_dim if kind == FULL and c.key_dim else head_dim
                kv_bytes = kv_heads.held * (key_dim + head_dim) * self.dtype.itemsize  # per token
                found.append(
                    weigh(
                        "attention",
                        each(self.layers, "attention", only=own),
                        kind=f"{name}, shared" if shares else name,
                        flops=4 * heads.held * head_dim * entries,
                        state_bytes=kv_bytes * entries,
                        state_per_token_bytes=0 if shares or entries < length else kv_bytes,
                        state_held_bytes=0 if shares else None,
                    )
                )
        return found

    def _layers(self, x: Tensor, at: Pass, rope: Tensor | None = None) -> Tensor:
        """Run all layers on embedded tokens [B, T, hidden (+ per-layer inputs)] and return [B, T, hidden]."""
        x, given = self.enter(x)
        residual = Residual(x)
        for layer in range(len(self.layers)):
            residual = self.run_layer(layer, residual, at, given[layer] if given else None)
        return residual.sum()

    def _ropes(self, positions: Tensor) -> dict[str, Tensor]:
        """Return the rotary tables [T, 2, head_dim] of `positions` [T], by kind of layer."""
        found = {}
        for kind in sorted(set(self.config.layer_types)):
            frequencies = frequencies_of(self.config.heads(kind), positions.device)
            if kind == FULL and self.rope_freqs is not None:
                frequencies = frequencies / self.rope_freqs
            parts = [rope_of(some, frequencies, self.dtype) for some in positions.split(ROPE_POSITIONS)]
            found[kind] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return found


def _alone(weight: Tensor | PackedMatrix) -> nn.Module:
    """Wrap one weight in a module, so that its cost is counted separately."""
    return weight if isinstance(weight, PackedMatrix) else nn.ParameterList([weight])


def frequencies_of(heads: Heads, device: torch.device) -> Tensor:
    """Return the radians per position of each pair of a head: fp32 [head_dim / 2], zero for pairs that don't rotate."""
    pairs = torch.arange(0, 2 * heads.turning, 2, device=device, dtype=torch.float32)
    turning = 1.0 / torch.pow(heads.theta, pairs / heads.head_dim)
    still = torch.zeros(heads.head_dim // 2 - heads.turning, device=device)
    return torch.cat((turning, still)) / heads.factor
