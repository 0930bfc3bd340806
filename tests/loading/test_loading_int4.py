"""Tests of loading GPTQ, AWQ and HQQ folders: packed as stored, dequantized, or in another scheme."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from tests.checkpoints import SHAPE, hf_logits, random_tensors, write_folder, write_gguf
from tests.int4_folders import write_int4_folder
from toolkit.models.places import spot
from toolkit.weights.fitting import quantize_minmax
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.recipes import recipe
from toolkit.weights.repacking import GGUF_KINDS
from toolkit.weights.schemes import SCHEMES

IDS = torch.tensor([[3, 141, 59, 265, 35, 8, 97]])
CARD = "virtual:h200"
FP32_ATOL = 1e-4  # the order of summation differs from transformers; logits are of order 10


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS.to(model.device.torch))[0].cpu()


@pytest.mark.parametrize("device", ["cpu", CARD])
@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_stays_packed_and_equals_transformers(tmp_path: Path, method: str, device: str) -> None:
    held = write_int4_folder(tmp_path / "m", method, SHAPE)
    write_folder(tmp_path / "twin", SHAPE, held)
    expected = hf_logits(tmp_path / "twin", IDS[0].tolist())
    for options in ({}, {"fuse": False}, {"scheme": "none"}):
        model = tk.load(tmp_path / "m", device=device, dtype="float32", progress=False, **options)
        assert ("int4-g64" in model.report.bytes_by_kind) == ("scheme" not in options)
        assert bool(model.report.fused) == ("fuse" not in options)
        torch.testing.assert_close(logits(model), expected, atol=FP32_ATOL, rtol=0)
        assert len(tk.generate(model, IDS[0].tolist(), max_new_tokens=3).tokens) == 3


@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_the_default_device_of_the_process_changes_nothing(tmp_path: Path, method: str) -> None:
    write_int4_folder(tmp_path / "m", method, SHAPE)
    usual = tk.load(tmp_path / "m", device="cpu", progress=False)
    with torch.device("vgpu"):
        model = tk.load(tmp_path / "m", device="cpu", progress=False)
    weights = zip(usual.parameters(), model.parameters(), strict=True)
    assert all(x.device == y.device and torch.equal(x, y) for x, y in weights)


@pytest.mark.parametrize("source", ["bfloat16", "Q4_K", "gptq"])
def test_converting_takes_no_more_of_the_card_than_the_largest_tensor(tmp_path: Path, source: str) -> None:
    """The joined gate and up matrix is the largest tensor; the others are minimal, to keep the test quick."""
    gpu, small = tk.device(CARD), {"vocab_size": 256, "num_hidden_layers": 1, "num_key_value_heads": 1}
    wide = SHAPE | small | {"hidden_size": 256, "intermediate_size": 1024}
    if source in GGUF_KINDS:
        path = tmp_path / "m.gguf"
        write_gguf(path, wide, random_tensors(wide), source)
    elif source == "bfloat16":
        path = write_folder(tmp_path / "m", wide, {name: tensor.bfloat16() for name, tensor in random_tensors(wide).items()})
    else:
        write_int4_folder(path := tmp_path / "m", source, wide)
    for options in ({}, {"scheme": "none"}, {"scheme": "q6_k"}):
        gc.collect()
        gpu.reset_peak()
        model = tk.load(path, device=gpu, progress=False, **options)
        memory = gpu.memory()
        assert memory.peak_bytes - memory.allocated_bytes <= max(p.nbytes for p in model.parameters()), options
        del model


@pytest.mark.parametrize("scheme", ["q4_k_m", "int8", "int4-g32"])
@pytest.mark.parametrize("method", ["gptq", "awq", "hqq"])
def test_in_another_scheme_it_is_quantised_again(tmp_path: Path, method: str, scheme: str) -> None:
    held = write_int4_folder(tmp_path / "m", method, SHAPE)
    model = tk.load(tmp_path / "m", device="cpu", scheme=scheme, progress=False)
    chosen = recipe(scheme).scheme_for("layers.0.mlp.down.weight", (256, 512), 2)
    assert chosen is not None
    packed = spot(model, "layers.0.mlp.down.weight").weight
    assert isinstance(packed, PackedMatrix)
    assert packed.scheme is SCHEMES[chosen.name]
    parts = quantize_minmax(held["model.layers.0.mlp.down_proj.weight"], chosen)
    assert all(torch.equal(part, parts[name]) for name, part in packed.parts().items())
