"""Tests of `tk.load`: folders and GGUF files give the logits of transformers, and failed loads free their memory."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import toolkit as tk
from tests.checkpoints import SHAPE, hf_logits, random_tensors, write_folder, write_gguf
from tests.conftest import without_permission
from toolkit.core.errors import FormatError, ModelError, ToolkitError, UnknownNameError
from toolkit.core.progress import REPORTS_PER_S
from toolkit.gpu.device import Device
from toolkit.loading.checkpoint import open_checkpoint

IDS = [3, 141, 59, 265, 35, 8, 97, 93, 238, 46, 264]
FP32_ATOL = 1e-4  # the order of summation differs from transformers; logits are of order 10
CARD = "virtual:h200"  # as in every test: one card at a time


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS], device=model.device.torch))[0].cpu()


def folder(path: Path, shards: int = 1, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    config = SHAPE | changes
    return write_folder(path, config, random_tensors(config, dtype), shards)


CONFIGS: dict[str, dict[str, Any]] = {
    "one file": {},
    "three shards": {"shards": 3},
    "tied": {"tie_word_embeddings": True},
    "bf16": {"dtype": torch.bfloat16},
    "fp16": {"dtype": torch.float16},
    "odd sizes": {"vocab_size": 301, "hidden_size": 72, "intermediate_size": 100, "num_attention_heads": 6, "head_dim": 10},
}


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("device", ["cpu", CARD])
def test_a_folder_gives_the_logits_of_transformers(tmp_path: Path, device: str, changes: dict[str, Any]) -> None:
    path = folder(tmp_path / "m", **changes)
    model = tk.load(path, device=device, dtype=torch.float32, progress=False)
    torch.testing.assert_close(logits(model), hf_logits(path, IDS), atol=FP32_ATOL, rtol=0)
    assert not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_a_gguf_gives_the_logits_of_a_folder_with_its_weights(tmp_path: Path, kind: str, tied: bool) -> None:
    config = SHAPE | {"tie_word_embeddings": tied}
    held = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), kind)
    model = tk.load(tmp_path / "m.gguf", device="cpu", dtype="float32", scheme="none", progress=False)
    twin = tk.load(write_folder(tmp_path / "twin", config, held), device="cpu", progress=False)
    assert torch.equal(logits(model), logits(twin))
    torch.testing.assert_close(logits(model), hf_logits(tmp_path / "twin", IDS), atol=FP32_ATOL, rtol=0)


def test_dtypes(tmp_path: Path) -> None:
    stored = folder(tmp_path / "m", dtype=torch.bfloat16)
    assert tk.load(stored, device="cpu", progress=False).dtype == torch.bfloat16, "by default as stored"
    for asked, dtype in {"fp16": torch.float16, "torch.float32": torch.float32, torch.bfloat16: torch.bfloat16}.items():
        model = tk.load(stored, device="cpu", dtype=asked, progress=False)
        assert {p.dtype for p in model.parameters() if p.ndim > 1} == {dtype}
    stated = folder(tmp_path / "stated", dtype=torch.bfloat16, torch_dtype="float32")
    assert tk.load(stated, device="cpu", progress=False).dtype == torch.float32, "unless the config says otherwise"
    config = dict(SHAPE)
    write_gguf(tmp_path / "q.gguf", config, random_tensors(config), "Q4_K")
    assert tk.load(tmp_path / "q.gguf", device="cpu", progress=False).dtype == torch.bfloat16
    with pytest.raises(UnknownNameError, match="float16"):
        tk.load(stored, dtype="flaot16")
    with pytest.raises(ToolkitError, match="bfloat16"):
        tk.load(stored, dtype=torch.int8)


def test_bf16_computes_on_the_cpu(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    half, full = (logits(tk.load(path, device="cpu", dtype=d, progress=False)) for d in ("bf16", "fp32"))
    assert half.dtype == torch.float32
    assert torch.cosine_similarity(half.flatten(), full.flatten(), 0) > 0.999


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=["stored fp32", "stored bf16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_tensor_crosses_once_as_it_is_stored(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    path = folder(tmp_path / "m", dtype=stored)
    gpu = tk.device(CARD)
    with gpu.record() as trace:
        model = tk.load(path, device=gpu, dtype=dtype, progress=False)
    copies = trace.to_pandas().query("kind == 'h2d'")
    assert len(copies) == len(random_tensors(SHAPE)), "a tensor crosses at once, where it is small"
    assert copies["bytes"].sum() == sum(p.numel() for p in model.parameters()) * stored.itemsize, "as it is stored"


def test_device_memory_holds_the_weights_and_no_more(tmp_path: Path) -> None:
    gpu = tk.device(CARD)
    gc.collect()
    before = gpu.memory().allocated_bytes
    gpu.reset_peak()
    model = tk.load(folder(tmp_path / "m", dtype=torch.bfloat16), device=gpu, dtype="float32", progress=False)
    memory, parameters = gpu.memory(), list(model.parameters())
    held = sum(-(-p.nbytes // 512) * 512 for p in parameters)
    assert memory.allocated_bytes - before == held
    largest = max(p.nbytes for p in parameters)
    assert memory.peak_bytes - before <= held + largest


@pytest.mark.parametrize("progress", ["yes", 3, []])
def test_progress_that_is_no_bool_and_no_function_is_refused(progress: Any) -> None:
    with pytest.raises(ToolkitError, match=r"^progress=.*: it is of type .*Give True, False, or a function"):
        tk.load("demo/qwen3", device="cpu", progress=progress)


def test_progress_is_at_most_ten_a_second_and_ends_at_all(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", num_hidden_layers=12)
    seen: list[tuple[int, int, str]] = []
    tk.load(path, device="cpu", progress=lambda *report: seen.append(report))
    done = [d for d, _, _ in seen]
    assert done[0] == 0
    assert done == sorted(done)
    total = (path / "model.safetensors").stat().st_size
    assert 0.9 * total < seen[-1][0] == seen[-1][1] < total
    assert len(seen) <= 2 + 60 * REPORTS_PER_S


def test_the_terminal_gets_one_line_and_a_file_gets_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(tmp_path / "m")
    tk.load(path, device="cpu")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    tk.load(path, device="cpu")
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert written.endswith("\n")
    assert "100 %" in written


class Cancelled(Exception):
    pass


@pytest.mark.parametrize("device", ["cpu", CARD])
def test_cancelling_gives_the_memory_back_even_while_the_traceback_lives(tmp_path: Path, device: str) -> None:
    gpu: Device = tk.device(device)
    gc.collect()
    before = gpu.memory().allocated_bytes
    held: list[int] = []

    def cancel(done: int, total: int, name: str) -> None:
        held.append(gpu.memory().allocated_bytes)
        if done == total:
            raise Cancelled

    with pytest.raises(Cancelled) as caught:
        tk.load(folder(tmp_path / "m"), device=gpu, progress=cancel)
    assert caught.tb is not None
    if device != "cpu":
        assert held[-1] > before
        assert gpu.memory().allocated_bytes == before


TOO_SMALL_A_CARD = """
import sys, toolkit as tk
gpu = tk.device("virtual:4MiB")
try:
    tk.load(sys.argv[1], device=gpu, progress=False)
except tk.ToolkitError as error:
    print(type(error).__name__, error.facts["needed_bytes"], gpu.memory().allocated_bytes, error.do)
"""


def test_weights_that_do_not_fit_say_how_much_they_need(tmp_path: Path) -> None:
    """Runs in a separate process because it needs another card."""
    command = [sys.executable, "-c", TOO_SMALL_A_CARD, str(folder(tmp_path / "m"))]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    kind, needed, allocated, *_ = said.split()
    weights = [t.nbytes for t in random_tensors(SHAPE).values()]
    assert (kind, allocated) == ("DeviceError", "0"), said
    assert sum(weights) <= int(needed) <= sum(weights) + 512 * len(weights), "each rounded up by the allocator"
    assert "bfloat16" in said


def test_segments_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Runs in a separate process because it needs another card, in which the weights fit, but not 20 MiB."""
    code = TOO_SMALL_A_CARD.replace("virtual:4MiB", "virtual:9.5MiB").replace("error.do", "error.found")
    command = [sys.executable, "-c", code, "demo/qwen3"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    assert "has 9.50 MiB of 9.50 MiB free, but the allocator takes memory in segments: 20 MiB at a time" in said


def test_a_model_does_not_change_with_its_file(tmp_path: Path) -> None:
    path = folder(tmp_path / "m")
    model = tk.load(path, device="cpu", progress=False)
    before = logits(model)
    with open(path / "model.safetensors", "r+b") as file:
        file.seek(4096)
        file.write(bytes(1 << 20))
    assert torch.equal(logits(model), before)


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
HEADS: dict[
    str, tuple[Callable[[dict[str, torch.Tensor]], object], bool]
] = {  # a change of the tensors, and whether it is tied
    "a copy": (lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}), True),
    "in place of the embedding": (lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}), True),
    "of other values": (lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].flip(0)}), False),
    "of other values at its end": (lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone().triu(-298)}), False),
}


@pytest.mark.parametrize(("change", "tied"), HEADS.values(), ids=HEADS)
def test_a_stored_head_of_a_tied_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., object], tied: bool
) -> None:
    monkeypatch.setattr("toolkit.loading.checkpoint._COMPARED_BYTES", 10_000)
    config = SHAPE | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    change(tensors)
    path = write_folder(tmp_path / "m", config, tensors)
    model = tk.load(path, device="cpu", progress=False)
    assert model.config.tie_word_embeddings == tied
    assert model.report.skipped == ((HEAD,) if tied and EMBEDDING in tensors else ())
    torch.testing.assert_close(logits(model), hf_logits(path, IDS), atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize(
    ("stated", "ends"),
    [({"eos_token_id": [7, 9]}, (7, 9)), ({"eos_token_id": 0}, (0,)), ({"eos_token_id": []}, (5,)), ({}, (5,)), (None, (5,))],
)
def test_ends_of_the_generation_config_replace_those_of_the_config(
    tmp_path: Path, stated: dict[str, Any] | None, ends: tuple[int, ...]
) -> None:
    path = write_folder(tmp_path / "m", SHAPE | {"eos_token_id": 5}, random_tensors(SHAPE))
    if stated is not None:
        (path / "generation_config.json").write_text(json.dumps(stated))
    ours, theirs = (tk.load(path, device="cpu", engine=engine, progress=False) for engine in (None, "hf"))
    assert ours.config.eos_token_ids == ends == theirs.config.eos_token_ids
    first = tk.generate(ours, IDS, max_new_tokens=9, eos=()).tokens
    (path / "config.json").write_text(json.dumps(SHAPE | {"eos_token_id": first[1]}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [first[4]]}))
    for engine in (None, "hf"):
        found = tk.generate(tk.load(path, device="cpu", engine=engine, progress=False), IDS, max_new_tokens=9).tokens
        assert found == first[: first.index(first[4]) + 1]


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    assert tk.load(tmp_path / "link", device="cpu", progress=False).tokenizer is None


@pytest.mark.parametrize("name", ["demo/qwen3", "./demo/qwen3", "random/qwen3-8b", "./random/qwen3-8b"])
def test_a_path_that_exists_is_used_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    folder(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert tk.load(name, device="cpu", progress=False).config.vocab_size == SHAPE["vocab_size"]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_safetensors_file_is_loaded_or_refused(tmp_path: Path, shards: int) -> None:
    path = folder(tmp_path, shards)
    for file in path.glob("*.safetensors"):
        assert tk.load(file, device="cpu", progress=False).config.vocab_size == SHAPE["vocab_size"]
    shutil.copy(file, path / "finetuned.safetensors")
    with pytest.raises(FormatError, match=r"finetuned\.safetensors: the weights of its folder are in model"):
        tk.load(path / "finetuned.safetensors", device="cpu")


def without(name: str) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: tensors.__delitem__(name)


def renamed(old: str, new: str) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: tensors.update({new: tensors.pop(old)})


def configured(**changes: Any) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: config.update(changes)


Q = "model.layers.1.self_attn.q_proj.weight"
BAD_CHECKPOINTS: dict[str, tuple[Callable[..., None], type[ToolkitError], str]] = {
    "tensor missing": (without(Q), FormatError, f"they lack 1 of 25 tensors: {Q}"),
    "tensor renamed": (renamed(Q, Q.replace("q_proj", "query")), FormatError, "self_attn.query"),
    "tensor unexpected": (renamed("model.norm.weight", "model.norm.weight"), FormatError, "model.extra.weight"),
    "one layer too many": (configured(num_hidden_layers=1), FormatError, "model.layers.1"),
    "one layer too few": (configured(num_hidden_layers=3), FormatError, "model.layers.2"),
    "wrong shape": (configured(intermediate_size=511), FormatError, "[512, 256]"),
    "wrong vocabulary": (configured(vocab_size=299), FormatError, "[300, 256]"),
    "integer weights": (lambda config, tensors: tensors.update({Q: tensors[Q].to(torch.int8)}), FormatError, "I8"),
    "architecture unknown": (configured(model_type="mamba", architectures=["MambaForCausalLM"]), ModelError, 'engine="hf"'),
    "architecture missing": (configured(model_type=None), ModelError, "qwen3"),
    "architecture a list": (configured(model_type=["qwen3"]), ModelError, "qwen3"),
    "config field of a text": (configured(hidden_size="256"), ModelError, "hidden_size"),
    "config field negative": (configured(num_hidden_layers=-1), ModelError, "num_hidden_layers"),
    "config field huge": (configured(num_hidden_layers=1 << 40), ModelError, "num_hidden_layers"),
    "2**31 layers": (configured(num_hidden_layers=1 << 31), ModelError, "num_hidden_layers"),
    "2**62 weights": (configured(vocab_size=1 << 31, hidden_size=1 << 31), FormatError, ""),
}


@pytest.mark.parametrize(("break_it", "kind", "says"), BAD_CHECKPOINTS.values(), ids=BAD_CHECKPOINTS)
def test_bad_checkpoints_are_refused(
    tmp_path: Path, break_it: Callable[..., None], kind: type[ToolkitError], says: str
) -> None:
    config, tensors = dict(SHAPE), random_tensors(SHAPE)
    break_it(config, tensors)
    if says == "model.extra.weight":
        tensors[says] = torch.ones(1)
    path = write_folder(tmp_path / "m", config, tensors)
    with pytest.raises(kind) as caught:
        tk.load(path, device="cpu", progress=False)
    assert says in str(caught.value)
    assert caught.value.do
    if says == "model.extra.weight":
        assert f"this architecture has no place for 1 tensor: {says}." in str(caught.value)


@pytest.mark.parametrize("whole", [True, False], ids=["next to a model", "alone"])
def test_an_adapter_that_would_not_be_applied_is_refused(tmp_path: Path, whole: bool) -> None:
    if whole:
        write_folder(tmp_path, SHAPE, random_tensors(SHAPE))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    save_file({"base_model.model.x.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(FormatError, match=r"adapter_config.json.*merge_and_unload"):
        tk.load(tmp_path, device="cpu", progress=False)


def test_a_gguf_of_an_unknown_architecture(tmp_path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "rwkv7")
    writer.add_tensor("w", np.zeros(8, np.float32))
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    with pytest.raises(ModelError, match=r"rwkv7.*Supported architectures: .*qwen3"):
        tk.load(tmp_path / "x.gguf", device="cpu")


def test_a_gguf_is_known_by_an_extension_in_capitals(tmp_path: Path) -> None:
    write_gguf(tmp_path / "MODEL.GGUF", SHAPE, random_tensors(SHAPE))
    model = tk.load(tmp_path, device="cpu", progress=False)
    assert model.report.source == str(tmp_path / "MODEL.GGUF")
    (tmp_path / "other.gguf").write_bytes((tmp_path / "MODEL.GGUF").read_bytes())
    with pytest.raises(FormatError, match=r"2 models: MODEL\.GGUF, other\.gguf"):
        tk.load(tmp_path, device="cpu")


def test_a_gguf_with_a_tensor_missing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", SHAPE, random_tensors(SHAPE))
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_q_mron.weight"))
    with pytest.raises(FormatError, match=r"attn_q_norm.*nearest name is 'blk\.1\.attn_q_mron"):
        tk.load(tmp_path / "m.gguf", device="cpu")


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    def refusal(path: Any, engine: str | None = None) -> str:
        with pytest.raises(ToolkitError) as caught:
            tk.load(path, device="cpu", progress=False, engine=engine)
        return str(caught.value)

    assert "demo/qwen3" in refusal("demo/qwen33")
    for thing in (None, 5, b"m", ["m"]):
        for engine in (None, "hf"):
            assert "not a path" in refusal(thing, engine)
    assert "random/qwen3-8b" in refusal("random/qwen3-8B")
    assert "no such file" in refusal(tmp_path / "absent")
    assert "config.json" in refusal(tmp_path)
    for name, says in {"x.bin": "pickle", "x.pt": "pickle", "x.onnx": "neither", "x.safetensors": "config.json"}.items():
        (tmp_path / name).write_bytes(b"12345678")
        assert says in refusal(tmp_path / name)
    for name in ("folder.gguf", "folder.bin", "folder.pt", "folder.ckpt"):
        (tmp_path / name).mkdir()
        assert "config.json: no such file" in refusal(tmp_path / name)
    (tmp_path / "config.json").mkdir()
    assert "not a regular file" in refusal(tmp_path)


@pytest.mark.parametrize("mode", [0o000, 0o444, 0o111], ids=oct)
@pytest.mark.parametrize("name", ["m", "m/model.safetensors"])
@pytest.mark.parametrize("engine", [None, "hf"])
def test_folders_without_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, name: str, engine: str | None
) -> None:
    path = folder(tmp_path / "m")
    tk.load(path, device="cpu", progress=False, engine=engine)  # imports what another user may be unable to
    with without_permission(path, monkeypatch, mode), pytest.raises(FormatError):
        tk.load(name, device="cpu", engine=engine)


BAD_CONFIGS = {
    "empty": b"",
    "cut off": b'{"model_type": "qwe',
    "a list": b"[1]",
    "not utf-8": b"\xff\xfe\x00",
    "deep": b"[" * 100_000,
}


@pytest.mark.parametrize("raw", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_bad_config_files_are_refused(tmp_path: Path, raw: bytes) -> None:
    path = folder(tmp_path / "m")
    (path / "config.json").write_bytes(raw)
    with pytest.raises(FormatError, match=r"config\.json"):
        tk.load(path, device="cpu")


def test_options_that_are_none_are_refused_by_name() -> None:
    with pytest.raises(UnknownNameError, match=r'Did you mean "q4_k_m"'):
        tk.load("demo/qwen3", scheme="q4_k_n")
    for scheme in (["int4"], 5):
        for function in (tk.load, tk.costs, tk.plan):
            with pytest.raises(UnknownNameError, match=r"Known: .*q4_k_m"):
                function("demo/qwen3", scheme=scheme)  # type: ignore[operator]
    with pytest.raises(UnknownNameError, match="hf"):
        tk.load("demo/qwen3", engine="hg")
    with pytest.raises(ToolkitError, match=r"threading\.Event"):
        tk.load("demo/qwen3", cancel=True)  # type: ignore[arg-type]


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "m", vocab_size=300)
    demo = open_checkpoint("demo/qwen3").path
    (path / "tokenizer.json").write_bytes((demo / "tokenizer.json").read_bytes())
    with pytest.raises(FormatError, match="768 tokens, but the model has 300"):
        tk.load(path, device="cpu")


def test_opening_reads_no_weight_and_knows_all_about_them(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folder(tmp_path / "m"))
    assert checkpoint.config.hidden_size == SHAPE["hidden_size"]
    assert json.loads((checkpoint.path / "config.json").read_text())["model_type"] == "qwen3"
    assert checkpoint.weights is not None
    assert {name for source in checkpoint.names.values() for name in source.names} == set(checkpoint.weights.stored)
