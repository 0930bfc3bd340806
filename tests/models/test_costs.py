"""Tests of the costs of a model's parts (bytes held, work per token), compared with counts from their weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from toolkit.models.costs import each, look_up, named_weights, weigh, weights_of
from toolkit.models.layers import Embedding, Experts, GatedMLP, Linear, RMSNorm
from toolkit.models.places import set_scheme
from toolkit.weights.schemes import SCHEMES


class Layers(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(
                nn.ModuleDict({"mlp": GatedMLP(64, 96), "norm": RMSNorm(64, 1e-6)}) for _ in range(layers)
            )


@pytest.fixture
def model() -> Layers:
    return Layers()


def test_layers_are_counted_by_number(model: Layers) -> None:
    cost = weigh("mlp", each(model.layers, "mlp", only={0, 2}))
    assert cost.layers == (0, 2)
    assert cost.parameters == 2 * 3 * 64 * 96
    assert cost.weight_bytes == cost.read_bytes == 4 * cost.parameters
    assert cost.flops == 2 * cost.parameters
    assert weigh("norms", each(model.layers, "norm", "mlp")).parameters == 3 * (64 + 3 * 64 * 96)


def test_a_layers_own_figures_are_those_of_one_layer(model: Layers) -> None:
    cost = weigh("mlp", each(model.layers, "norm"), flops=5, state_bytes=7, state_per_token_bytes=11)
    assert (cost.flops, cost.state_bytes, cost.state_per_token_bytes) == (2 * 3 * 64 + 15, 21, 33)
    assert cost.state_held_bytes == 21  # as much as is read, unless said otherwise
    assert weigh("mlp", each(model.layers, "norm"), state_bytes=7, state_held_bytes=0).state_held_bytes == 0
    assert weigh("mlp", each(model.layers, "norm", only=())).flops == 0


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "int4-g32", "int8-g32"])
def test_packed_weights_cost_what_they_hold(name: str) -> None:
    linear = nn.ModuleDict({"a": Linear(512, 24)}).to("meta")
    set_scheme(linear, "a.weight", SCHEMES[name])
    cost = weigh("mlp", linear)
    assert cost.parameters == 512 * 24
    assert cost.weight_bytes == 512 * 24 * SCHEMES[name].bits_per_weight / 8


@pytest.mark.parametrize("scheme", [None, "q4_0"], ids=["plain", "packed"])
def test_joined_or_not_is_the_same(model: Layers, scheme: str | None) -> None:
    if scheme:
        for name, _ in list(model.named_parameters()):
            if "mlp" in name:
                set_scheme(model, name, SCHEMES[scheme])
    before = weigh("mlp", each(model.layers, "mlp"))
    assert all(layer["mlp"].gate_up.join() for layer in model.layers)
    assert weigh("mlp", each(model.layers, "mlp")) == before


def test_only_the_chosen_experts_are_read() -> None:
    with torch.device("meta"):
        experts = Experts(12, 64, 32)
    cost = weigh("experts", experts, share=5 / 12)
    assert cost.weight_bytes == 12 * 3 * 64 * 32 * 4
    assert cost.read_bytes == 5 * 3 * 64 * 32 * 4
    assert cost.flops == 2 * 5 * 3 * 64 * 32


@pytest.mark.parametrize("scheme", [None, "q6_k"], ids=["plain", "packed"])
def test_an_embedding_is_read_a_row(scheme: str | None) -> None:
    with torch.device("meta"):
        held = nn.ModuleDict({"embed": Embedding(1001, 256, torch.float32)})
    if scheme:
        set_scheme(held, "embed.weight", SCHEMES[scheme])
    cost, head = look_up("embedding", held["embed"]), weigh("head", held["embed"], tied=True)
    assert cost.parameters == 1001 * 256
    assert cost.read_bytes * 1001 == cost.weight_bytes
    assert cost.flops == 0
    assert (head.parameters, head.weight_bytes, head.read_bytes) == (0, 0, cost.weight_bytes)


def test_a_shared_weight_is_counted_once() -> None:
    twins = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    twins[1].weight = twins[0].weight
    assert len(weights_of(twins)) == 1
    assert [name for name, _ in named_weights(twins)] == ["0.weight", "1.weight"]  # but both names are told


def test_buffers_are_held_too() -> None:
    norm = nn.BatchNorm1d(3)
    assert dict(named_weights(norm)).keys() == {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
