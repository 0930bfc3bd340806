"""Models that several virtual GPUs divide: real arithmetic, and modelled times that all ranks share at a collective."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import programs
from tests.ranks.pool import Ranks
from toolkit.core.distributed import Shard
from toolkit.core.errors import ModelError
from toolkit.decode.strategies import STRATEGIES
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.virtual.effects.effect import collective, duration_ns
from toolkit.loading.checkpoint import open_checkpoint
from toolkit.loading.layout import lay_out
from toolkit.planning.describe import plan
from toolkit.weights.recipes import recipe

RUN = {"prompt": "The capital of France is", "max_new_tokens": 4}
GPU = "virtual:h200"


def test_tokens_of_every_strategy_are_those_of_one_device(ranks: Ranks) -> None:
    drawn = RUN | {"temperature": 0.9, "seed": 5, "stop": "\n"}
    greedy, other = programs.texts("demo/qwen3", GPU, 1, [RUN, drawn])
    runs = [*(RUN | {"decode": name} for name in STRATEGIES), drawn | {"decode": "whole-loop"}]
    wanted = [greedy] * len(STRATEGIES) + [other]
    assert ranks.results(2, programs.texts, "demo/qwen3", GPU, 2, runs) == [wanted] * 2


@pytest.mark.parametrize("path", ["demo/gemma4", "demo/qwen3.5-moe"])
def test_tokens_on_four_gpus_are_those_of_one(ranks: Ranks, path: str) -> None:
    wanted = programs.texts(path, GPU, 1, [RUN])
    assert ranks.results(4, programs.texts, path, GPU, 4, [RUN | {"decode": "cuda-graph"}]) == [wanted] * 4


def test_a_decode_step_has_two_sums_per_layer_and_the_copies_of_one_gpu(ranks: Ranks) -> None:
    (alone,) = ranks.results(1, programs.steps, "demo/qwen3", 1)
    pair = ranks.results(2, programs.steps, "demo/qwen3", 2)
    assert not alone["collectives"]
    for rank, found in enumerate(pair):
        assert found["copies"] == alone["copies"]
        layers, hidden, vocab = 3, 256, 768
        sums = [("all_reduce", 4 * hidden, "one-shot", 2)] * (1 + 2 * layers)  # the first is the embedding
        assert found["collectives"] == [*sums, ("all_gather", 4 * vocab, "one-shot", 2)]
        assert found["numbers"] == pair[0]["numbers"]
        assert found["meta"] == (rank, 2, {"0": [0, 1]})
        assert found["ranks"] == {rank}
    assert pair[0]["ends_ns"] == pair[1]["ends_ns"]


def test_the_others_wait_for_the_last_rank(ranks: Ranks) -> None:
    found = ranks.results(4, programs.one_late, 2, 200_000)
    ends, took = zip(*found, strict=True)
    assert len(set(ends)) == 1  # of the collectives, on the clock that all ranks share
    least = duration_ns(collective("all_reduce", 64, 3 * 64, 4, "one-shot"), CATALOGUE["h200"])
    assert [t - least for t in took] == [200_000, 200_000, 0, 200_000]


def test_times_follow_from_the_rate_between_gpus() -> None:
    h200, l40s = CATALOGUE["h200"], CATALOGUE["l40s"]
    assert h200.source("collective_ns").how == "measured"
    assert h200.source("peer_bytes_per_s").how == "datasheet"
    assert l40s.source("peer_bytes_per_s").how == "estimated"
    small, large = (collective("all_reduce", n, n, 2, "one-shot") for n in (0, 450_000_000))
    assert duration_ns(small, h200) == h200.collective_ns
    assert duration_ns(large, h200) == pytest.approx(1e6 + h200.collective_ns)
    assert duration_ns(large, l40s) > 10 * duration_ns(large, h200)
    assert programs.algorithms() == [("one-shot", 7 << 10), ("NCCL", 7 << 20)]


@pytest.mark.parametrize("scheme", ["none", "q4_k_m"])
@pytest.mark.parametrize("name", ["gemma4-31b", "qwen3-8b", "qwen3.5-35b-a3b"])
def test_each_of_two_gpus_holds_half(name: str, scheme: str) -> None:
    options: dict[str, Any] = {"context": 32768, "scheme": scheme, "kv": None}
    whole, halves = (plan(f"random/{name}", GPU, tensor_parallel=n, **options).by_rank() for n in (1, 2))
    for part in ("weights_bytes", "state_bytes"):
        assert (halves[part] / whole[part][0]).max() <= 0.52


@pytest.mark.parametrize("count", [2, 4, 8])
def test_ranks_hold_what_their_plan_says(ranks: Ranks, count: int) -> None:
    """Weights and caches to the byte. Activations are an estimate, and scratch memory a constant."""
    found = ranks.results(count, programs.held, "random/qwen3-8b", count, 1500, 8192)
    planned = plan("random/qwen3-8b", GPU, context=8192, kv=None, tensor_parallel=count).by_rank()
    assert [(weights, cache) for weights, cache, _ in found] == [*zip(planned.weights_bytes, planned.state_bytes, strict=True)]
    for (_, _, peak), row in zip(found, planned.itertuples(), strict=True):
        assert 0 <= (row.run_bytes - row.cuda_bytes) / peak - 1 <= 0.07


def test_q4_k_blocks_of_narrow_experts_are_not_divided_by_four(empty_card: Any) -> None:
    with pytest.raises(
        ModelError, match=r"moe.shared.down.weight in q6_k over 4 ranks: each would hold 128 of its 512 columns"
    ):
        lay_out(open_checkpoint("random/qwen3.5-35b-a3b"), empty_card, torch.bfloat16, recipe("q4_k_m"), True, Shard(0, 4))


def test_sizes_only(ranks: Ranks) -> None:
    run = {"prompt": [1, 2, 3], "max_new_tokens": 3, "decode": "cuda-graph"}
    first, second = ranks.results(2, programs.texts, "random/qwen3-0.6b", GPU, 2, [run])
    assert first == second
    assert len(first[0]) == 3
