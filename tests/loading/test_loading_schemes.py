"""Tests of how `tk.load` stores weights (packed as stored, quantized while loading, joined or separate) and is canceled."""

from __future__ import annotations

import gc
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from tests.checkpoints import SHAPE, hf_logits, random_tensors, write_folder, write_gguf
from toolkit.core.errors import CancelledError, ModelError
from toolkit.models.places import spot
from toolkit.weights.fitting import quantize_minmax
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.repacking import GGUF_KINDS
from toolkit.weights.schemes import SCHEMES

IDS = torch.tensor([[3, 141, 59, 265, 35, 8, 97]])
CARD = "virtual:h200"
FP32_ATOL = 1e-4  # the order of summation differs from transformers; logits are of order 10


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS.to(model.device.torch))[0].cpu()


def values(model: Any, name: str) -> torch.Tensor:
    place = spot(model, name)
    weight = place.weight.dequantize() if isinstance(place.weight, PackedMatrix) else place.weight.detach().float()
    return (weight if place.rows is None else weight[..., place.rows, :]).cpu()


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("device", ["cpu", CARD])
def test_every_kind_stays_packed_and_equals_transformers(tmp_path: Path, kind: str, device: str) -> None:
    held = write_gguf(tmp_path / "m.gguf", SHAPE, random_tensors(SHAPE), kind)
    model = tk.load(tmp_path / "m.gguf", device=device, dtype="float32", progress=False)
    assert set(model.report.bytes_by_kind) == {GGUF_KINDS[kind].scheme, "float32"}
    assert torch.equal(values(model, "layers.1.mlp.gate_up.up.weight"), held["model.layers.1.mlp.up_proj.weight"])
    folder = write_folder(tmp_path / "twin", SHAPE, held)
    torch.testing.assert_close(logits(model), hf_logits(folder, IDS[0].tolist()), atol=FP32_ATOL, rtol=0)


def test_a_mix_joins_what_is_held_alike(tmp_path: Path) -> None:
    held = write_gguf(tmp_path / "m.gguf", SHAPE, random_tensors(SHAPE), "Q4_K", mixed={"v_proj.weight": "Q6_K"})
    model = tk.load(tmp_path / "m.gguf", device="cpu", dtype="float32", progress=False)
    assert {str(fused) for fused in model.report.fused} == {"q+k in 2 layers", "gate+up in 2 layers"}
    assert "q+k in 2 layers" in repr(model.report)
    for part in "qkv":
        assert torch.equal(
            values(model, f"layers.1.attention.qkv.{part}.weight"), held[f"model.layers.1.self_attn.{part}_proj.weight"]
        )


@pytest.mark.parametrize("scheme", [None, "q4_k_m", "int4-g64", "int8"])
def test_joined_or_apart_weights_are_the_same_bits(tmp_path: Path, scheme: str | None) -> None:
    path = write_folder(tmp_path / "m", SHAPE, random_tensors(SHAPE))
    joined, apart = (
        tk.load(path, device="cpu", scheme=scheme, dtype="float32", fuse=fuse, progress=False) for fuse in (True, False)
    )
    assert not apart.report.fused
    assert joined.report.fused
    for name in (f"layers.{i}.{part}.weight" for i in (0, 1) for part in ("mlp.gate_up.gate", "attention.qkv.v", "mlp.down")):
        assert (values(joined, name) - values(apart, name)).abs().max() == 0.0
    torch.testing.assert_close(logits(joined), logits(apart), atol=FP32_ATOL, rtol=0)


@pytest.mark.parametrize("device", ["cpu", CARD])
@pytest.mark.parametrize("stored", ["folder", "gguf"])
def test_quantising_while_loading_is_quantising_the_whole(tmp_path: Path, stored: str, device: str) -> None:
    """Chunk boundaries don't change the result, since each row has its own groups. Packed rows are unpacked first."""
    tensors = random_tensors(SHAPE)
    if stored == "gguf":
        path = tmp_path / "m.gguf"
        tensors = write_gguf(path, SHAPE, tensors, "Q6_K")
    else:
        path = write_folder(tmp_path / "m", SHAPE, tensors)
    model = tk.load(path, device=device, scheme="int4-g64", progress=False)
    parts = quantize_minmax(tensors["model.layers.0.mlp.down_proj.weight"], SCHEMES["int4-g64"])
    packed = spot(model, "layers.0.mlp.down.weight").weight
    assert isinstance(packed, PackedMatrix)
    for name, part in packed.parts().items():
        assert torch.equal(part.cpu(), parts[name])


def narrow(folder: Path, hidden: int, ffn: int) -> Path:
    config = SHAPE | {"hidden_size": hidden, "intermediate_size": ffn, "head_dim": hidden // 4}
    return write_folder(folder, config, random_tensors(config))


def test_what_a_scheme_can_not_hold_is_named(tmp_path: Path) -> None:
    path, told = narrow(tmp_path / "m", 72, 192), "not quantized: 14 matrices, rows of 72 are not a multiple of 32"
    model = tk.load(path, device="cpu", scheme="int4-g128", progress=False)
    assert set(model.report.bytes_by_kind) == {"float32", "int4-g64"}
    assert told in repr(model.report)
    for plan in (tk.plan(path, "h200", scheme="int4-g128"), tk.plan(model, "h200")):
        assert told in repr(plan)
        assert told[1:] in plan._repr_html_()
    whole = tk.load("demo/qwen3", device="cpu", scheme="int4", progress=False)
    assert "not quantized" not in repr(whole.report) + repr(tk.plan(whole, "h200"))


@pytest.mark.parametrize("ask", [partial(tk.load, device=CARD, progress=False), tk.plan, tk.costs])
def test_a_scheme_that_can_hold_nothing_is_refused(tmp_path: Path, ask: Any) -> None:
    path = narrow(tmp_path / "m", 72, 100)
    with pytest.raises(ModelError, match=r"nothing to quantize: rows of 100 are not a multiple of 32; rows of 72 .* of 32"):
        ask(path, scheme="int4")


def test_a_scheme_that_can_hold_nothing_is_not_proposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = narrow(tmp_path / "m", 72, 100)
    monkeypatch.setattr("toolkit.loading.room.free_bytes", lambda device: 1000)
    with pytest.raises(tk.errors.DeviceError, match="use a larger card"):
        tk.load(path, device=CARD, progress=False)


@pytest.mark.parametrize("bad", [float("nan"), 1e6])
def test_values_that_can_not_be_quantized_are_refused_by_name(tmp_path: Path, bad: float) -> None:
    tensors = random_tensors(SHAPE)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 7] = bad
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        tk.load(write_folder(tmp_path / "m", SHAPE, tensors), device="cpu", scheme="int4", progress=False)


def stop_by_event(done: int, cancel: threading.Event) -> None:
    if done:
        cancel.set()


def stop_by_interrupt(done: int, cancel: threading.Event) -> None:
    if done:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stop", "error"), [(stop_by_event, CancelledError), (stop_by_interrupt, KeyboardInterrupt)], ids=["event", "interrupt"]
)
def test_ending_early_leaves_the_device_empty(tmp_path: Path, stop: Any, error: type[BaseException]) -> None:
    gpu, cancel = tk.device(CARD), threading.Event()
    path = write_folder(tmp_path / "m", SHAPE, random_tensors(SHAPE))
    gc.collect()
    before = gpu.memory().allocated_bytes
    with pytest.raises(error) as caught:
        tk.load(path, device=gpu, scheme="int4", cancel=cancel, progress=lambda done, total, name: stop(done, cancel))
    assert caught.tb is not None
    assert gpu.memory().allocated_bytes == before


def test_a_file_cut_while_loading(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", SHAPE, random_tensors(SHAPE)) / "model.safetensors"

    def cut(done: int, total: int, name: str) -> None:
        with open(path, "r+b") as file:
            file.truncate(4096)

    with pytest.raises(tk.ToolkitError, match="cut"):
        tk.load(path.parent, device=CARD, progress=cut)


def test_skipped_tensors_are_counted(tmp_path: Path) -> None:
    config = SHAPE | {"tie_word_embeddings": True}
    tensors = random_tensors(config)
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    report = tk.load(write_folder(tmp_path / "m", config, twice), device="cpu", progress=False).report
    assert report.skipped == ("lm_head.weight",)
    assert "; 1 stored tensor skipped" in repr(report)
    assert report.weight_bytes == sum(t.nbytes for t in tensors.values())
