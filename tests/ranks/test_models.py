"""Models that several processes divide (tensor parallel), on the CPU."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from tests.checkpoints import SHAPE, random_tensors, write_folder, write_gguf
from tests.models import cases_gemma4, cases_qwen3, cases_qwen3_5
from tests.ranks import programs
from tests.ranks.pool import TIMEOUT_S, Ranks
from toolkit.core.distributed import Shard, join
from toolkit.core.errors import ModelError, RankError
from toolkit.models.cuts import Cut, end_to_end, evenly, parts_of, split_heads, spread

NAMES = ("heads", "shared")
KINDS = {
    "Gemma4TextConfig": "gemma4_text", "Qwen3Config": "qwen3", "Qwen3MoeConfig": "qwen3_moe",
    "Qwen3_5TextConfig": "qwen3_5_text", "Qwen3_5MoeTextConfig": "qwen3_5_moe_text",
}  # fmt: skip
CASES = {
    f"{KINDS[case.config_class]}-{case.name}": case for m in (cases_qwen3, cases_qwen3_5, cases_gemma4) for case in m.CASES
}
CHOSEN = (
    "qwen3-dense_usual", "qwen3_moe-moe_usual", "qwen3_5_text-dense_tied", "qwen3_5_moe_text-moe_usual", "gemma4_text-as_31b",
    "gemma4_text-as_26b_a4b",
)  # fmt: skip
EIGHT = {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 101}


def indices(cut: Cut) -> list[int]:
    return [i for start, stop in cut.ranges for i in range(start, stop)]


@pytest.mark.parametrize("tiled", [False, True], ids=["grouped", "tiled"])
@pytest.mark.parametrize(("heads", "shared"), [(32, 8), (8, 1), (12, 3), (16, 16), (32, 2)])
def test_each_head_is_held_once_with_the_head_that_it_reads(heads: int, shared: int, tiled: bool) -> None:
    divided = 0
    for ranks in range(1, 33):
        if heads % ranks or (shared % ranks and ranks % shared):
            with pytest.raises(ModelError, match=f"{heads} heads that share {shared} shared"):
                split_heads(heads, shared, Shard(0, ranks), NAMES, tiled)
            continue
        cuts = [split_heads(heads, shared, Shard(rank, ranks), NAMES, tiled) for rank in range(ranks)]
        divided += 1
        assert sorted(i for many, _ in cuts for i in indices(many)) == list(range(heads))
        for many, few in cuts:
            assert many.held * ranks == heads
            assert few.held == max(1, shared // ranks)
            for place, head in enumerate(indices(many)):  # a rank finds the shared head as a whole model of its size does
                read = place % few.held if tiled else place // (many.held // few.held)
                assert indices(few)[read] == (head % shared if tiled else head // (heads // shared))
    assert divided > 1


def test_cuts_of_sizes() -> None:
    assert [indices(spread(5, Shard(rank, 3))) for rank in range(3)] == [[0], [1, 2], [3, 4]]
    assert parts_of(5, 3) == [1, 2, 2]
    assert indices(evenly(6, Shard(1, 3), "width").times(2)) == [4, 5, 6, 7]
    assert indices(end_to_end(spread(4, Shard(1, 2)), spread(2, Shard(1, 2)))) == [2, 3, 5]
    assert [indices(evenly(6, Shard(rank, 2, block=2), "width")) for rank in range(2)] == [[0, 1], [2, 3, 4, 5]]
    for block in (3, 4, 6):  # equal parts are whole blocks; blocks don't fit; there are too few of them
        assert indices(evenly(6, Shard(1, 2, block), "width")) == [3, 4, 5]
    with pytest.raises(ModelError, match=r"don't divide its width, 6\. Use 3 ranks"):
        evenly(6, Shard(0, 4), "width")
    with pytest.raises(ModelError, match=r"a table of 2 rows over 4 ranks: a rank would hold none\. Use at most 2 ranks"):
        spread(2, Shard(0, 4))
    with pytest.raises(ModelError, match=r"a table of 1 row over 4 ranks: a rank would hold none\. Use at most 1 rank$"):
        spread(1, Shard(0, 4))
    with pytest.raises(ModelError, match=r"don't divide its width, 5\. Use 1 rank$"):
        evenly(5, Shard(0, 2), "width")
    with pytest.raises(ModelError, match=r"can't divide 3 queries that share 3 keys\. Use 1 rank$"):
        split_heads(3, 3, Shard(0, 2), ("queries", "keys"))


def test_sums_and_parts(ranks: Ranks) -> None:
    summed = torch.tensor([10.0, 10 * 2.0**-9]).tolist()
    rows = [[0.0] * 2, [1.0] * 2, [1.0] * 2, [2.0] * 2, [3.0] * 2, [3.0] * 2]
    joined = (summed, rows, torch.tensor(rows).t().tolist(), torch.float32)
    assert ranks.results(4, programs.sums_and_parts) == [joined] * 4


@pytest.mark.parametrize("name", CHOSEN)
def test_logits_are_those_of_a_whole_model(ranks: Ranks, name: str) -> None:
    found = ranks.results(2, programs.errors_of_logits, CASES[name].values, name.partition("-")[0], 2)
    assert found[0] == found[1]  # every rank has the same logits, bit for bit
    assert max(found[0]) < 1e-4


@pytest.mark.parametrize("name", CHOSEN)
def test_logits_in_bf16_are_as_close_to_fp32_as_those_of_a_whole_model(ranks: Ranks, name: str) -> None:
    kind = name.partition("-")[0]
    whole, part, between = ranks.results(2, programs.errors_in_bf16, CASES[name].values, kind)[0]
    assert 0 < part < 2 * whole
    assert between < max(1e-2, 2 * whole)  # Gemma 4's whole model is 2e-2 from fp32


@pytest.mark.parametrize(("kind", "count", "values", "tiled"), [
    ("qwen3", 8, cases_qwen3.BASE | EIGHT, False),  # four ranks hold the same KV head
    ("qwen3_5_moe_text", 4, cases_qwen3_5.MOE | {"num_attention_heads": 8, "linear_num_value_heads": 8}, False),
    ("qwen3_5_moe_text", 4, cases_qwen3_5.MOE | {"num_attention_heads": 8, "linear_num_value_heads": 8}, True),
    ("qwen3_5_text", 2, cases_qwen3_5.DENSE | {"linear_num_value_heads": 8}, True),
    ("gemma4_text", 2, cases_gemma4.BASE | cases_gemma4.PER_LAYER | cases_gemma4.SHARED, False),
], ids=["8", "4-replicated", "4-tiled-replicated", "2-tiled", "inputs-and-shared-layers"])  # fmt: skip
def test_more_ranks_than_shared_heads(ranks: Ranks, kind: str, count: int, values: dict[str, Any], tiled: bool) -> None:
    found = ranks.results(count, programs.errors_of_logits, values, kind, count, tiled)
    assert max(found[0]) < 1e-4
    assert found == [found[0]] * count


@pytest.mark.parametrize(("kind", "values"), [
    ("qwen3", cases_qwen3.BASE | {"intermediate_size": 24}),
    ("gemma4_text", cases_gemma4.BASE | {"intermediate_size": 24}),
    ("qwen3_5_moe_text", cases_qwen3_5.MOE | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}),
], ids=["qwen3", "gemma4", "qwen3_5_moe"])  # fmt: skip
def test_blocks_of_weights_that_ranks_divide_unequally(ranks: Ranks, kind: str, values: dict[str, Any]) -> None:
    found = ranks.results(2, programs.errors_of_logits, values, kind, 2, False, 8)
    assert found[0] == found[1]
    assert max(found[0]) < 1e-4


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints of a Qwen3, in the formats of files; in GGUF, with random blocks."""
    folder = tmp_path_factory.mktemp("stored")
    config = SHAPE | {"num_attention_heads": 8, "vocab_size": 301, "num_hidden_layers": 1}
    tensors = random_tensors(config)
    write_folder(folder / "hf", config, tensors, shards=2)
    mixed = {"down_proj.weight": "Q6_K", "v_proj.weight": "Q8_0"}
    write_gguf(folder / "q4_k.gguf", config, tensors, "Q4_K", mixed=mixed)
    config = config | {"intermediate_size": 768}
    write_gguf(folder / "three_blocks.gguf", config, random_tensors(config), "Q4_K", mixed=mixed)
    return {name: str(folder / name) for name in ("hf", "q4_k.gguf", "three_blocks.gguf")}


LOADED = [
    ("hf", {}), ("hf", {"scheme": "q4_k_m"}), ("hf", {"scheme": "int8", "fuse": False}), ("q4_k.gguf", {}),
    ("q4_k.gguf", {"scheme": "none", "dtype": "bfloat16"}), ("q4_k.gguf", {"scheme": "int4"}), ("demo/qwen3", {}),
    ("demo/gemma4", {"scheme": "int4"}), ("demo/qwen3.5-moe", {}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "options"), LOADED, ids=str)
def test_ranks_hold_their_part_of_the_loaded_whole(
    ranks: Ranks, stored: dict[str, str], path: str, options: dict[str, Any]
) -> None:
    for wrong, share in ranks.results(2, programs.differences, stored.get(path, path), 2, options):
        assert not wrong
        assert share < 0.52


def test_rows_of_three_blocks_are_divided_between_blocks(ranks: Ranks, stored: dict[str, str]) -> None:
    shares = []
    for wrong, share in ranks.results(2, programs.differences, stored["three_blocks.gguf"], 2, {}):
        assert not wrong
        shares.append(share)
    assert shares[0] < 0.5 < shares[1] < 0.6
    planned = tk.plan(stored["three_blocks.gguf"], "h200", tensor_parallel=2).by_rank()
    assert planned.weights_bytes[0] < planned.weights_bytes[1]


def test_ranks_feed_a_prompt_in_the_same_parts(ranks: Ranks, stored: dict[str, str]) -> None:
    """The activations of the rank with two of three blocks are larger, so that it would feed fewer tokens at a time."""
    path, gpu = stored["three_blocks.gguf"], "virtual:400MiB"
    assert ranks.results(2, programs.chunk, path, gpu, 2) == [1024] * 2
    assert tk.plan(path, gpu, context=64, tensor_parallel=2).chunk == 1024


@pytest.mark.parametrize(("path", "count"), [("demo/qwen3", 4), ("demo/gemma4", 2), ("demo/qwen3.5-moe", 2)])
def test_tokens_are_those_of_one_process(ranks: Ranks, path: str, count: int) -> None:
    run = {"prompt": "The capital of France is", "max_new_tokens": 6}
    runs = [run | {"decode": name} for name in ("host-sampling", "host-embedding", "double-buffered")]
    runs.append(run | {"temperature": 0.9, "seed": 5, "top_p": 0.9, "stop": "\n"})
    wanted = programs.texts(path, "cpu", 1, runs)
    assert ranks.results(count, programs.texts, path, "cpu", count, runs) == [wanted] * count


def test_what_can_not_be_divided_is_named(ranks: Ranks, stored: dict[str, str]) -> None:
    def error(count: int, path: str, **options: Any) -> str:
        found = ranks.run(count, programs.load_with, path, count, options)
        assert {type(one) for one in found} == {ModelError}
        return str(found[0])

    assert "4 num_attention_heads that share 2 num_key_value_heads. Use 4 ranks" in error(8, "demo/qwen3")
    uneven = error(4, stored["q4_k.gguf"])
    assert "layers.0.attention.o.weight in Q4_K over 4 ranks" in uneven
    assert "128 of its 512 columns, which come in blocks of 256" in uneven
    assert "32 columns, which come in blocks of 32" in error(2, "demo/qwen3.5-moe", scheme="int4")


def test_a_group_is_checked(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"belongs to no group\. Start .* with tk.cluster\(DEVICE, 2\) or torchrun"):
        tk.load("demo/qwen3", "cpu", tensor_parallel=2)
    with pytest.raises(RankError, match="not a whole number"):
        tk.load("demo/qwen3", "cpu", tensor_parallel=0)
    with pytest.raises(RankError, match="this process belongs to no group"):
        tk.load("demo/qwen3", "cpu", engine="hf", tensor_parallel=2)
    for count in (1, 2):
        (error, *_) = ranks.run(count, programs.load_with, "demo/qwen3", 4, {})
        do = f"Give {count} rank{'s' if count > 1 else ''}, or start 4 processes"
        assert f"the number of processes is {count}. {do}" in str(error)
    for error in ranks.run(2, programs.differ):
        assert isinstance(error, RankError)
        assert "prompt of rank 1 differs from rank 0's" in str(error)
    assert all("no gradient" in str(error) for error in ranks.run(2, programs.gradient))
    assert join(1) == Shard()


def test_runs_that_ranks_can_not_do_together_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    assert all(
        "max_new_tokens of rank 1 differs" in str(error) for error in ranks.run(2, programs.generate_differently, "limit")
    )
    assert all("would stop at different steps" in str(error) for error in ranks.run(2, programs.generate_differently, "cancel"))
    assert all("holds rank" in str(error) for error in ranks.run(2, programs.export_part, str(tmp_path)))


def test_a_group_starts_from_the_variables_of_torchrun(ranks: Ranks) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    order = ranks.run(2, programs.process_id, grouped=False)
    assert ranks.run(2, programs.from_environment, port, 2, order, grouped=False) == [Shard(0, 2), Shard(1, 2)]


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_ranks_end_with_the_one_that_fails(ranks: Ranks, how: str) -> None:
    began = time.monotonic()
    found = ranks.run(4, programs.fail_on, 2, how)
    assert time.monotonic() - began < TIMEOUT_S / 2  # not by the timeout
    waiting = [found[rank] for rank in (0, 1, 3)]
    assert {type(error) for error in waiting} == {RankError}
    if how == "raise":
        assert isinstance(found[2], ValueError)
        assert all("rank 2 failed with ValueError: out of luck" in str(error) for error in waiting)
    else:
        assert all("another rank has ended" in str(error) for error in waiting)
