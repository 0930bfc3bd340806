"""Tests of model costs (bytes, operations, limits) against hand calculations and published measurements."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.speed import within
from toolkit.core.errors import ModelError
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.models import gemma4, qwen3
from toolkit.models.costs import Cost
from toolkit.planning.costs import LENGTHS, Costs, costs_of, label, period, runs

H200 = CATALOGUE["h200"]
EIGHT_B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip


def qwen(**changed: object) -> qwen3.Model:
    return qwen3.Model(qwen3.Config.from_hf(EIGHT_B | changed), None, torch.bfloat16)


@pytest.fixture(scope="module")
def eight_b() -> Costs:
    return costs_of(qwen(), context=1000)


def test_the_published_number_of_parameters(eight_b: Costs) -> None:
    assert eight_b.parameters == 8_190_735_360  # as its model card's files add up to
    assert sum(parameters for parameters, _ in eight_b.by_kind().values()) == eight_b.parameters


def test_sums_made_by_hand(eight_b: Costs) -> None:
    matrices = 36 * (4096 * (32 + 8 + 8 + 32) * 128 + 3 * 4096 * 12288) + 151936 * 4096
    norms = 36 * (2 * 4096 + 2 * 128) + 4096
    assert eight_b.read_bytes == 2 * matrices + 4 * norms + 2 * 4096
    assert eight_b.state_per_token_bytes == 36 * 2 * 8 * 128 * 2 == 147_456
    assert eight_b.state_bytes == eight_b.state_held_bytes == 1000 * 147_456
    assert eight_b.flops == 2 * (matrices + norms) + 36 * 4 * 32 * 128 * 1000
    assert eight_b.token_bytes == eight_b.read_bytes + eight_b.state_bytes
    assert eight_b.fixed_state_bytes == 0
    assert eight_b.weight_bytes == 2 * (matrices + 151936 * 4096) + 4 * norms


def test_tied_embeddings_are_held_once_and_read_whole() -> None:
    tied = costs_of(qwen(tie_word_embeddings=True), context=0)
    untied = costs_of(qwen(), context=0)
    table = 151936 * 4096
    assert untied.weight_bytes - tied.weight_bytes == 2 * table
    assert untied.read_bytes == tied.read_bytes


def test_limits_are_the_bandwidth_over_the_bytes(eight_b: Costs) -> None:
    bound = eight_b.bound(H200)
    assert bound.limit == "bandwidth"
    assert bound.tok_per_s == pytest.approx(4.8e12 / eight_b.token_bytes)
    assert bound.reached_tok_per_s == pytest.approx(4.22e12 / eight_b.token_bytes)
    table = eight_b.gpus()
    assert table.index[0] == "b200"
    assert set(table.index) == set(CATALOGUE)
    assert table["tok_per_s_reachable"].is_monotonic_decreasing
    assert table.loc["h200", "how"] == "measured"
    assert table.loc["l4", "how"] == "estimated"


def test_arithmetic_may_be_the_limit(eight_b: Costs) -> None:
    slow = replace(H200, bf16_flops=1e12)
    bound = eight_b.bound(slow)
    assert bound.limit == "arithmetic"
    assert bound.tok_per_s == bound.reached_tok_per_s == pytest.approx(1e12 / eight_b.flops)
    single = costs_of(qwen3.Model(qwen3.Config.from_hf(EIGHT_B), None, torch.float32), context=0)
    assert single.bound(slow).limit == "bandwidth"  # fp32 runs at its own rate


@pytest.mark.parametrize("card", ["l4", "rtx-5090", "h200"])
@pytest.mark.parametrize("window", [None, 1024], ids=["full", "sliding"])
def test_the_longest_context_is_the_longest(card: str, window: int | None) -> None:
    model = qwen(max_position_embeddings=131072) if window is None else gemma()
    costs, memory = costs_of(model), CATALOGUE[card].memory_bytes
    found = costs.longest_context(CATALOGUE[card])
    if found is None:
        assert costs.weight_bytes > memory
        return
    assert costs_of(model, found).bound(CATALOGUE[card]).fits
    assert found == LENGTHS[-1] or not costs_of(model, found + 1).bound(CATALOGUE[card]).fits


def test_no_context_fits_where_the_weights_do_not(eight_b: Costs) -> None:
    small = H200.with_memory(15 << 30)
    assert not eight_b.bound(small).fits
    assert eight_b.longest_context(small) is None
    assert eight_b.gpus([small])["longest_context"].isna().all()


def gemma() -> gemma4.Model:
    """Return a model with the shape of Gemma-4 31B, without weights."""
    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    config = gemma4.Config.from_hf({
        "model_type": "gemma4_text", "num_hidden_layers": 60, "hidden_size": 5376, "intermediate_size": 21504,
        "vocab_size": 262144, "tie_word_embeddings": True, "num_attention_heads": 32, "num_key_value_heads": 16,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True,
        "sliding_window": 1024, "layer_types": layers, "max_position_embeddings": 131072, "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0, "enable_moe_block": False, "final_logit_softcapping": 30.0,
    })  # fmt: skip
    return gemma4.Model(config, None, torch.bfloat16)


def test_windows_stop_growing() -> None:
    costs = costs_of(gemma(), context=8192)
    sliding, full = 50 * 2 * 16 * 256 * 2, 10 * (512 + 128) * 4 * 2  # bytes per token; keys are stored in part
    assert costs.fixed_state_bytes == 1024 * sliding
    assert costs.state_per_token_bytes == full
    assert costs.state_bytes == 1024 * sliding + 8192 * full
    assert period(costs.pattern()) == (*["attention (sliding) + mlp"] * 5, "attention (full) + mlp")
    assert [label(part) for part in costs.parts].count("norms") == 1  # the final one is among them


def test_sixty_layers_are_shown_at_once() -> None:
    model = gemma()
    took = []
    for _ in range(3):
        began = time.process_time()
        repr(model), model._repr_html_()
        took.append(time.process_time() - began)
    assert within(min(took), 0.6)  # twice 0.3 s: text and HTML; processor time, so that a busy machine doesn't count


def test_contexts_are_told_for_all_lengths(eight_b: Costs) -> None:
    table = eight_b.contexts()
    assert list(table.index) == [0, 512, 1000, 1024, 2048, 4096, 32768, 40960]
    assert table.loc[0, "state_bytes"] == 0
    assert table.loc[32768, "state_held_bytes"] == 32768 * 147_456
    assert (table["read_bytes"] == eight_b.read_bytes).all()
    assert list(costs_of(qwen(), 100_000).contexts().index)[-1] == 100_000


@pytest.mark.parametrize(
    ("pattern", "shortest"),
    [((), ()), (("a",), ("a",)), (("a", "a", "a"), ("a",)), (("a", "b", "a"), ("a", "b")), (("a", "b", "c"), ("a", "b", "c"))],
    ids=["empty", "one", "same", "cut off", "no repeat"],
)
def test_period(pattern: tuple[str, ...], shortest: tuple[str, ...]) -> None:
    assert period(pattern) == shortest


def test_runs() -> None:
    assert runs("aab") == [(2, "a"), (1, "b")]


class Anyones(nn.Module):
    """A module that doesn't describe its costs."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        if tied:
            self.out.weight = self.table.weight


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_of_others_is_taken_to_read_every_weight(tied: bool) -> None:
    costs = costs_of(Anyones(tied))
    layers = 3 * (64 + 8)
    assert not costs.exact
    assert costs.parameters == (1 if tied else 2) * 400 + layers
    assert costs.weight_bytes == 4 * costs.parameters
    assert costs.read_bytes == 4 * (400 + layers + (0 if tied else 8))
    assert costs.layers == 3
    assert costs.pattern() == ("weight + bias",) * 3
    assert costs.gpus()["longest_context"].isna().all()
    names = {held.where for held in costs.holdings}
    assert names == {"table", "weight", "bias"} | (set() if tied else {"out"})


def test_a_wrapped_model_is_looked_into() -> None:
    class Wrapper:
        inner = Anyones(tied=False)

    assert costs_of(Wrapper()).name == "Anyones"


@pytest.mark.parametrize("context", [-1, 1.5, "4K", True], ids=str)
def test_contexts_that_are_none(context: object) -> None:
    with pytest.raises(ModelError, match="number of tokens"):
        costs_of(qwen(num_hidden_layers=1), context)


@pytest.mark.parametrize("thing", [None, "demo/qwen3", 3], ids=str)
def test_what_is_no_model_is_refused(thing: object) -> None:
    with pytest.raises(ModelError, match="not a model"):
        costs_of(thing)


def test_same_parts_are_summed_and_kinds_kept_apart() -> None:
    costs = costs_of(gemma(), 10)
    assert all(isinstance(part, Cost) for part in costs.parts)
    names = [label(part) for part in costs.parts]
    assert len(names) == len(set(names))
    assert {"attention (sliding)", "attention (full)"} <= set(names)
