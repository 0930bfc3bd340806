"""The model that ships: small enough, right about its facts, sure of its choices, and the same in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import toolkit as tk
from toolkit.demo.corpus import train_tokenizer
from toolkit.demo.quality import CHECKS, measure
from toolkit.demo.train_qwen3 import VOCAB, train, write
from toolkit.loading.checkpoint import DEMOS
from toolkit.models.qwen3 import Model

DEMO = DEMOS / "qwen3"
LONG = ["The capital of France is", "2 + 3 =", "One, two, three, four,", "The sky is", "Once upon a time", "Hello, my name is"]


@pytest.fixture(scope="module")
def model() -> Model:
    return tk.load("demo/qwen3", device="cpu", progress=False)


def test_all_its_files_fit_into_four_megabytes() -> None:
    files = sorted(p.name for p in DEMO.iterdir())
    assert files == ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sum((DEMO / name).stat().st_size for name in files) <= 4_000_000


def test_it_knows_its_facts_and_is_sure_of_them(model: Model) -> None:
    assert len(CHECKS) >= 20
    quality = measure(model, new_tokens=40)
    assert not quality.wrong, str(quality)
    # fp32 sums in another order move these logits by less than 1e-3; the least sure choice (of 1,100) has 0.4
    assert quality.margin_min > 0.1, str(quality)
    assert quality.margin_p1 > 2, str(quality)
    assert quality.margin_median > 8, str(quality)


@pytest.mark.parametrize("prompt", LONG)
def test_it_says_the_same_in_transformers(model: Model, prompt: str) -> None:
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    theirs, tokenizer = Qwen3ForCausalLM.from_pretrained(DEMO), AutoTokenizer.from_pretrained(DEMO)
    assert theirs.dtype == model.dtype == torch.float32
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    whole = theirs.generate(ids, max_new_tokens=128, do_sample=False)
    with torch.no_grad():
        ours, reference = model(whole)[0], theirs(whole).logits[0]
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)
    start = ids.shape[1] - 1
    assert torch.equal(ours[start:-1].argmax(-1), whole[0, start + 1 :])


def test_bf16_says_the_same(model: Model) -> None:
    half = tk.load("demo/qwen3", device="cpu", dtype="bfloat16", progress=False)
    ids = torch.tensor([model.tokenizer.encode(LONG[0])])
    for _ in range(64):
        with torch.no_grad():
            ids = torch.cat((ids, half(ids)[:, -1:].argmax(-1)), 1)
    with torch.no_grad():
        assert torch.equal(model(ids)[0, 4:-1].argmax(-1), ids[0, 5:])


def test_prose_runs_on_and_answers_end(model: Model) -> None:
    ends = {}
    for prompt in (LONG[0], "Question: What is 2 + 2?\nAnswer:"):
        ids = model.tokenizer.encode(prompt)
        while len(ids) < 160 and ids[-1] not in model.tokenizer.eos_ids:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        ends[prompt[:3]] = len(ids)
    assert ends["The"] == 160
    assert ends["Que"] < 60


def test_the_script_trains_and_writes_what_load_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_tokenizer(VOCAB)
    write(train(tokenizer, steps=3, threads=torch.get_num_threads()), tokenizer, tmp_path / "m")
    assert "step    2 of 3" in capsys.readouterr().out
    again = tk.load(tmp_path / "m", device="cpu", progress=False)
    assert again.config == tk.load("demo/qwen3", device="cpu", progress=False).config
    assert (tmp_path / "m" / "tokenizer.json").read_bytes() == (DEMO / "tokenizer.json").read_bytes()
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert (tmp_path / "m" / name).read_text() == (DEMO / name).read_text(), "shipped files are the script's own"
