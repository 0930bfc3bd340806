"""Models of transformers over two ranks on the CPU: transformers divides them by its own plan."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import toolkit as tk
from tests.ranks import programs
from tests.ranks.pool import Ranks
from toolkit.core.distributed import Shard
from toolkit.core.errors import FormatError, ModelError, ToolkitError, UnknownNameError
from toolkit.gpu.opening import open_device
from toolkit.loading import huggingface as hf

transformers = pytest.importorskip("transformers")  # the `hf` extra

TINY = {"vocab_size": 132, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None, "bos_token_id": None}  # fmt: skip
QWEN = {**TINY, "head_dim": 8}
CONFIGS = {
    "qwen3": transformers.Qwen3Config(**QWEN),
    "llama": transformers.LlamaConfig(**TINY, tie_word_embeddings=True),
    "qwen3_moe": transformers.Qwen3MoeConfig(**QWEN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    "one_head": transformers.Qwen3Config(**{**QWEN, "num_key_value_heads": 1}),
    "odd_vocabulary": transformers.Qwen3Config(**{**QWEN, "vocab_size": 131}),
    "gpt2": transformers.GPT2Config(vocab_size=132, n_embd=32, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None),
}
PROMPT = [1, 2, 3, 4, 5]


def saved(name: str, folder: Path) -> str:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # so that the tokens vary
    model.save_pretrained(folder / name)
    return str(folder / name)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3_moe"])
def test_two_ranks_compute_what_one_does(ranks: Ranks, tmp_path: Path, name: str) -> None:
    decode = ["roundtrip", "host-embedding", "double-buffered", "hf-generate"]
    found = ranks.results(2, programs.of_transformers, saved(name, tmp_path), PROMPT, decode)
    whole = sum(parameter.nbytes for parameter in tk.load(str(tmp_path / name), "cpu", engine="hf").parameters())
    assert found[0][2] == found[1][2]
    assert all(held < 0.75 * whole and error < 1e-4 for held, error, _ in found)


def test_generating_on_a_cluster_has_the_strategies_of_the_model(tmp_path: Path) -> None:
    path = saved("qwen3", tmp_path)
    expected = tk.generate(tk.load(path, "cpu", engine="hf"), PROMPT, "hf-generate", max_new_tokens=4).tokens
    with tk.cluster("2xcpu") as two:
        model = tk.load(path, engine="hf", cluster=two)
        for name in ("hf-generate", "roundtrip"):
            assert tk.generate(model, PROMPT, name, max_new_tokens=4).tokens == expected
        compared = tk.compare(model, PROMPT, ["roundtrip", "hf-generate"], max_new_tokens=4)
        assert compared.runs["hf-generate"].tokens == expected
        with pytest.raises(UnknownNameError, match='Did you mean "hf-generate"') as failed:
            tk.generate(model, PROMPT, "hf-generat", max_new_tokens=4)
        assert failed.value.facts["known"] == sorted(model.strategies)
        with pytest.raises(UnknownNameError, match="decode strategy 3"):
            tk.generate(model, PROMPT, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("one_head", ModelError, "transformers can't divide 1 num_key_value_heads. Use fewer ranks"),
        ("gpt2", ModelError, "transformers has no plan to divide it. Load it on one GPU"),
        ("odd_vocabulary", FormatError, "must be divisible by the tensor parallel size .* Use fewer ranks"),
    ],
)
def test_what_the_plan_does_not_divide(ranks: Ranks, tmp_path: Path, name: str, kind: type[Exception], why: str) -> None:
    for error in ranks.run(2, programs.of_transformers, saved(name, tmp_path), PROMPT, []):
        assert type(error) is kind
        with pytest.raises(kind, match=why):
            raise error


@pytest.mark.parametrize(
    ("size", "why"),
    [
        (5000, "SafetensorError: .* Download or copy it again"),
        (None, "no file named model.safetensors .* Use a folder with a causal language model"),
    ],
)
def test_a_damaged_checkpoint_is_not_for_fewer_ranks(ranks: Ranks, tmp_path: Path, size: int | None, why: str) -> None:
    weights = Path(saved("qwen3", tmp_path), "model.safetensors")
    if size is None:
        weights.unlink()
    else:
        os.truncate(weights, size)
    for error in ranks.run(2, programs.of_transformers, str(weights.parent), PROMPT, []):
        with pytest.raises(FormatError, match=why):
            raise error


def test_ranks_load_the_same_model(ranks: Ranks, tmp_path: Path) -> None:
    for error in ranks.run(2, programs.of_transformers_differ, [saved("qwen3", tmp_path), saved("llama", tmp_path)]):
        assert "config of rank 1 differs from rank 0's" in str(error)


def test_what_transformers_can_not_divide_at_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pair = Shard(0, 2)
    with pytest.raises(ModelError, match="these can't exchange values of virtual GPUs"):
        hf.wrap(tmp_path, open_device("virtual:h200"), shard=pair)
    with pytest.raises(ModelError, match=r'divides weights only while it loads them. Pass its folder with engine="hf"'):
        tk.load(torch.nn.Linear(2, 2), "cpu", tensor_parallel=2)
    monkeypatch.setitem(sys.modules, "transformers.distributed.configuration_utils", None)
    with pytest.raises(ToolkitError, match=r"has no DistributedConfig. Install a newer one: .* -m pip install -e"):
        hf.wrap(tmp_path, "cpu", shard=pair)
