"""The models that ship: small enough, right about their facts, sure of their choices, and the same in transformers."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.demo.corpus import train_tokenizer
from toolkit.demo.miniatures import MINIATURES
from toolkit.demo.quality import CHECKS, measure
from toolkit.demo.train import checkpoint, train, write
from toolkit.loading.checkpoint import DEMOS

LONG = ["The capital of France is", "One, two, three, four,", "Once upon a time", "Hello, my name is"]
demos = pytest.mark.parametrize("name", MINIATURES)


@cache
def model_of(name: str) -> Any:
    return tk.load(f"demo/{name}", device="cpu", progress=False)


def test_every_demo_has_its_miniature() -> None:
    assert {path.parent.name for path in DEMOS.glob("*/config.json")} == set(MINIATURES)


@demos
def test_all_its_files_fit_into_four_megabytes(name: str) -> None:
    files = sorted(p.name for p in (DEMOS / name).iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sum((DEMOS / name / file).stat().st_size for file in files) <= 4_000_000


@demos
def test_it_knows_its_facts_and_is_sure_of_them(name: str) -> None:
    assert len(CHECKS) >= 20
    quality = measure(model_of(name), new_tokens=40)
    assert not quality.wrong, str(quality)
    # fp32 sums in another order move these logits by less than 1e-3; the least sure choices have 0.4, 0.7 and 0.9
    assert quality.margin_min > 0.1, str(quality)
    assert quality.margin_p1 > 2, str(quality)
    assert quality.margin_median > 8, str(quality)


@demos
def test_it_says_the_same_in_transformers(name: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = model_of(name)
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(DEMOS / name), AutoTokenizer.from_pretrained(DEMOS / name)
    assert type(theirs).__name__ == MINIATURES[name].architecture
    assert theirs.dtype == model.dtype == torch.float32
    for prompt in LONG:
        ids = tokenizer(prompt).input_ids
        run = tk.generate(model, prompt, max_new_tokens=128, eos=(), record=False)
        assert run.prompt_tokens == tuple(ids)
        whole = torch.tensor([run.prompt_tokens + run.tokens])
        with torch.no_grad():
            ours, reference = model(whole)[0], theirs(whole).logits[0]
        torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)
        assert tuple(reference[len(ids) - 1 : -1].argmax(-1).tolist()) == run.tokens


@demos
def test_bf16_says_the_same(name: str) -> None:
    half = tk.load(f"demo/{name}", device="cpu", dtype="bfloat16", progress=False)
    runs = {tk.generate(model, LONG[0], max_new_tokens=64, record=False).tokens for model in (half, model_of(name))}
    assert len(runs) == 1


@demos
def test_prose_runs_on_and_answers_end(name: str) -> None:
    model = model_of(name)
    prose = tk.generate(model, LONG[0], max_new_tokens=155, record=False)
    assert prose.stop_reason == "length"
    question = tk.generate(model, "Question: What is 2 + 2?\nAnswer:", max_new_tokens=60, record=False)
    assert question.stop_reason == "eos"
    assert question.text == " 2 + 2 = 4."


def test_demos_share_their_tokenizer() -> None:
    assert len({(DEMOS / name / "tokenizer.json").read_bytes() for name in MINIATURES}) == 1


@demos
def test_the_shipped_texts_are_the_scripts_own(name: str, tmp_path: Path) -> None:
    mini, model = MINIATURES[name], model_of(name)
    write(model, mini, train_tokenizer(mini.shape["vocab_size"]), tmp_path)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / file).read_text() == (DEMOS / name / file).read_text()
    again = tk.load(tmp_path, device="cpu", progress=False)
    ids = torch.tensor([model.tokenizer.encode("The capital of Japan is")])
    with torch.no_grad():
        # norms stored less one and exp(A_log) come back as the nearest fp32, then bf16
        torch.testing.assert_close(again(ids), model(ids), atol=1e-3, rtol=0)


@demos
def test_the_script_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mini = MINIATURES[name]
    short = type(mini)(mini.architecture, mini.shape, steps=1, start=mini.start)
    model = train(short)
    assert "step    0 of 1" in capsys.readouterr().out
    written = checkpoint(model, short)
    assert all(tensor.isfinite().all() for tensor in written.values())
    assert sum(tensor.numel() for tensor in written.values()) * 2 < 4_000_000
