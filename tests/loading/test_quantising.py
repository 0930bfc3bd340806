"""Tests of `tk.quantize` on every architecture: shared tensors, the report, and cleanup after failures."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import toolkit as tk
from tests.host_memory import HostPeak
from toolkit.core.errors import ModelError, UnknownNameError
from toolkit.loading.quantization import pack_weight, quantize
from toolkit.models import ARCHITECTURES
from toolkit.models.layers import Joined, RMSNorm
from toolkit.models.places import spot
from toolkit.weights.fitting import quantize_minmax
from toolkit.weights.packed import PackedMatrix, dequantize
from toolkit.weights.schemes import SCHEMES

CPU = SimpleNamespace(torch=torch.device("cpu"), name="cpu")
SIZES: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "head_dim": 64, "intermediate_size": 512,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": False},
    "gemma4_text": SIZES | {
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "global_head_dim": 128, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "sliding_window": 8,
        "hidden_size_per_layer_input": 0, "tie_word_embeddings": True,
    },
    "qwen3_5_moe": SIZES | {
        "num_hidden_layers": 4, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 64, "tie_word_embeddings": False,
    },
}  # fmt: skip


def build(kind: str, device: Any = CPU, dtype: torch.dtype = torch.float32, join: bool = True, **values: Any) -> Any:
    architecture = ARCHITECTURES[kind]
    config = architecture.Config.from_hf({"model_type": kind} | MODELS[kind] | values)
    model = architecture.Model(config, device, dtype).init_weights(3).requires_grad_(False)
    for part in list(model.modules()) if join else ():
        if isinstance(part, Joined):
            part.join()
    return model


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("scheme", "method"), [("int4-g64", "hqq"), ("int4-g128", "min-max"), ("q4_k_m", "min-max"), ("int8", "min-max")]
)
@pytest.mark.parametrize("kind", MODELS)
def test_every_architecture(kind: str, scheme: str, method: str) -> None:
    model = build(kind)
    before = held(model)
    new = quantize(model, scheme, method, progress=False)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    report = new.quantization
    assert new.quantization is new.quantisation is report
    assert not hasattr(model, "quantisation")
    assert {m.why for m in report.left} <= {"always plain"}
    assert sum(isinstance(module, PackedMatrix) for module in new.modules()) <= len(report.quantised)
    for matrix in report.quantised:
        place = spot(new, matrix.name)
        assert isinstance(place.weight, PackedMatrix)
        assert place.weight.scheme.name == matrix.scheme
        few = 1.0 if matrix.weights <= 1024 else 0.0  # only 8 groups: their random ranges shift the SNR by 0.3 dB (sigma)
        expected = 43 if matrix.scheme.startswith("int8") else 34 if matrix.scheme == "q6_k" else 19.5
        assert matrix.snr_db > expected - few
        assert 0 < matrix.max_abs_error < 0.02
    assert report.lowest_cosine <= report.cosine <= 1 + 1e-9
    assert report.cosine > (0.98 if scheme == "int8" else 0.5)  # random weights amplify errors in routing and logits
    size = sum(p.nbytes for module in new.modules() if isinstance(module, PackedMatrix) for p in module.parameters())
    assert size == report.bytes_after - sum(m.weights * m.was_bits / 8 for m in report.left)
    old = {id(parameter) for parameter in model.parameters()}
    norms = [module.weight for module in new.modules() if isinstance(module, RMSNorm)]
    assert norms
    assert all(id(weight) in old for weight in norms)
    plain = build(kind, join=False)  # the same values, held plain
    for matrix in report.quantised:
        place, there = spot(plain, matrix.name), spot(new, matrix.name)
        values = there.weight.dequantize()
        place.weight.copy_(values if there.rows is None else values[..., there.rows, :])
    ids = torch.tensor([report.ids])
    expected = plain(ids)
    assert torch.allclose(new(ids), expected, atol=1e-4)
    assert torch.cosine_similarity(expected, model(ids), dim=-1).mean() == pytest.approx(report.cosine, abs=1e-4)


@pytest.mark.parametrize(("kind", "scheme"), [("qwen3", "q4_k_m"), ("gemma4_text", "int4-g32"), ("qwen3_5_moe", "int8-g128")])
def test_on_the_virtual_gpu_it_is_the_same_to_the_bit(kind: str, scheme: str) -> None:
    gpu = tk.device("virtual:h200")
    fewer = {"num_hidden_layers": 1} if kind == "qwen3" else {}
    here, there = (quantize(build(kind, device, **fewer), scheme, progress=False) for device in (CPU, gpu))
    assert {p.device.type for p in there.parameters()} == {"vgpu"}
    for name, parameter in here.named_parameters():
        assert torch.equal(parameter, there.get_parameter(name).cpu()), name
    assert here.quantisation.to_pandas().equals(there.quantisation.to_pandas())


def test_joined_matrices_are_quantised_one_by_one_and_joined_where_they_agree() -> None:
    model = build("qwen3", num_hidden_layers=8)
    new = quantize(model, "q4_k_m", progress=False)
    groups = [layer.attention.qkv.groups for layer in new.layers]
    wide = [(("q", "k"), ("v",)), (("q", "k", "v"),)]
    assert set(groups) == set(wide)
    assert groups[0] == wide[0]  # the first eighth of the layers holds its values in six bits
    assert all(layer.mlp.gate_up.groups == (("gate", "up"),) for layer in new.layers)
    apart = quantize(build("qwen3", num_hidden_layers=8, join=False), "q4_k_m", progress=False)
    assert apart.layers[3].mlp.gate_up.groups == (("gate",), ("up",))
    ids = torch.arange(9)[None]
    assert torch.allclose(new(ids), apart(ids), atol=1e-5)
    place, other = spot(new, "layers.3.mlp.gate_up.up.weight"), spot(apart, "layers.3.mlp.gate_up.up.weight")
    assert torch.equal(place.weight.dequantize()[place.rows], other.weight.dequantize())
    assert [m.name for m in new.quantisation.matrices] == [m.name for m in apart.quantisation.matrices]


def test_rows_that_do_not_divide_stay_plain_and_are_named() -> None:
    model = build("qwen3", intermediate_size=328)
    new = quantize(model, "int4-g128", progress=False)
    left = {m.name: m.why for m in new.quantisation.left}
    assert left == {f"layers.{i}.mlp.down.weight": "rows of 328 are not a multiple of 32" for i in range(2)}
    assert new.unquantized == {"rows of 328 are not a multiple of 32": tuple(left)}
    assert new.layers[0].mlp.down.weight is model.layers[0].mlp.down.weight
    assert "layers.0.mlp.down.weight" in repr(new.quantisation)


def test_smaller_groups_where_larger_do_not_divide_the_rows() -> None:
    new = quantize(build("qwen3", intermediate_size=320), "int4-g128", progress=False)
    assert not new.quantisation.left
    assert new.layers[0].mlp.down.weight.scheme.name == "int4-g64"


def test_tied_tables_stay_tied_and_routers_plain() -> None:
    gemma = quantize(build("gemma4_text"), "q4_k_m", progress=False)
    assert gemma.head is None
    assert gemma.embed.weight.scheme.name == "q6_k"
    qwen = quantize(build("qwen3_5_moe"), "q4_k_m", progress=False).quantisation
    assert {m.name.split(".", 2)[2] for m in qwen.left} == {"moe.gates.router.weight", "moe.gates.shared.weight"}


def test_quantising_again() -> None:
    """Matrices already in the scheme are shared; others are compared with their current values, not the original weights."""
    model = build("qwen3")
    once = quantize(model, "int8", progress=False)
    with pytest.raises(ModelError, match="already in this scheme"):
        quantize(once, "int8", progress=False)
    twice = quantize(once, "int4-g32", progress=False)
    row = next(m for m in twice.quantisation.matrices if m.name == "layers.1.mlp.down.weight")
    assert (row.was, row.scheme) == ("int8-g32", "int4-g32")
    values = once.layers[1].mlp.down.weight.dequantize()
    back = dequantize(SCHEMES["int4-g32"], quantize_minmax(values, SCHEMES["int4-g32"]))
    assert torch.equal(twice.layers[1].mlp.down.weight.dequantize(), back)
    mixed = quantize(quantize(model, "q4_k_m", progress=False), "q6_k", progress=False)
    shared = [m.name for m in mixed.quantisation.left]
    assert "head.weight" in shared
    assert mixed.quantisation.left[0].bits_per_weight == SCHEMES["q6_k"].bits_per_weight


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_weights_that_are_no_numbers_are_refused_by_name_and_nothing_is_left(bad: float) -> None:
    gpu = tk.device("virtual:h200")
    model = build("qwen3", gpu)
    model.layers[1].mlp.down.weight[3, 7] = bad
    gc.collect()
    before = gpu.memory().allocated_bytes
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down\.weight: the values include NaN") as error:
        quantize(model, "int4-g32", progress=False)
    assert gpu.memory().allocated_bytes == before
    del error


def test_interrupted_it_gives_back_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = tk.device("virtual:h200")
    model = build("gemma4_text", gpu)
    gc.collect()
    before, seen = gpu.memory().allocated_bytes, []

    def stop(done: int, total: int, name: str) -> None:
        seen.append((done, total, name))
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.core.progress.REPORTS_PER_S", 1e9)
    with pytest.raises(KeyboardInterrupt) as error:
        quantize(model, "int4-g32", progress=stop)
    assert seen[0][0] < seen[0][1]
    assert gpu.memory().allocated_bytes == before
    del error
    assert model(torch.arange(4, device="vgpu")[None]).shape == (1, 4, 300)


def test_progress_ends_with_all_of_it() -> None:
    seen: list[tuple[int, int, str]] = []
    quantize(build("qwen3"), "int4-g32", progress=lambda *told: seen.append(told))
    assert seen[-1][0] == seen[-1][1]


def test_numbers_too_small_for_fp16_scales_stay_plain() -> None:
    model = build("qwen3")
    model.layers[0].mlp.down.weight *= 1e-7
    new = quantize(model, "int4-g32", progress=False)
    (left,) = new.quantisation.left
    assert left.name == "layers.0.mlp.down.weight"
    assert "too small" in left.why


def test_what_is_not_known_or_not_ours_is_refused() -> None:
    model = build("qwen3")
    for scheme in ("int4-g33", ["int4-g32"], 5):
        with pytest.raises(UnknownNameError, match="int4-g32"):
            quantize(model, scheme, progress=False)  # type: ignore[arg-type]
    for method in ("hq", ["hqq"], 5):
        with pytest.raises(UnknownNameError, match="hqq"):
            quantize(model, "int4-g32", method=method, progress=False)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="none of the toolkit's layers"):
        quantize(torch.nn.Linear(3, 3), "int4-g32", progress=False)
    with pytest.raises(ModelError, match="rows of 40 are not a multiple"):
        quantize(build("qwen3", hidden_size=40, head_dim=10, intermediate_size=24), "int4-g128", progress=False)
    with pytest.raises(ModelError, match="without a tokenizer"):
        quantize(model, "int4-g32", progress=False, prompt="a text")


def test_the_report() -> None:
    new = quantize(build("qwen3"), "int4", "hqq", progress=False, prompt=[1, 2, 3])
    report = new.quantisation
    table = report.to_pandas()
    assert list(table.columns[:4]) == ["name", "shape", "weights", "was"]
    assert len(table) == 2 * 7 + 2
    assert report.ids == (1, 2, 3)
    assert report.bits_per_weight == pytest.approx(8 * report.bytes_after / table.weights.sum())
    assert "int4 (hqq)" in repr(report)
    assert "3 tokens" in repr(report)
    html = report._repr_html_()
    assert html.count("<tr>") == 1 + len(table)
    assert "<script" not in html


@pytest.mark.parametrize("shape", [(70, 512), (3, 40, 256)], ids=["matrix", "stack"])
def test_pieces_do_not_change_what_is_packed(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)), requires_grad=False)
    with torch.no_grad():
        whole, snr, worst = pack_weight(weight, SCHEMES["q4_k"], quantize_minmax, "w")
        monkeypatch.setattr("toolkit.loading.quantization.CHUNK_WEIGHTS", 7 * 512)
        cut, cut_snr, cut_worst = pack_weight(weight, SCHEMES["q4_k"], quantize_minmax, "w")
    assert all(torch.equal(part, cut.parts()[name]) for name, part in whole.parts().items())
    error = whole.dequantize() - weight
    assert snr == pytest.approx(float(10 * torch.log10(weight.square().sum() / error.square().sum())), abs=1e-3)
    assert (snr, worst) == (pytest.approx(cut_snr), cut_worst)
    assert worst == float(error.abs().max())


def test_sizes_only_says_nothing_about_values() -> None:
    gpu = tk.device("virtual:h200")
    with gpu.sizes_only():
        new = quantize(build("qwen3", gpu, num_hidden_layers=1), "int4-g32", progress=False)
        assert all(m.snr_db != m.snr_db for m in new.quantisation.quantised)  # nan
    assert new.quantisation.bits_per_weight < 6
    assert new.quantisation.cosine != new.quantisation.cosine
    for text in (repr(new.quantisation), new.quantisation._repr_html_()):
        assert "nan" not in text
        assert "no values, so the errors are unknown" in text


def test_a_quantized_model_has_activations_of_its_own() -> None:
    """Their size may have been computed for the other model, which needs more because its functions are not fused."""
    model = tk.load("demo/qwen3", device="cpu", progress=False)
    before = tk.quantize(model, "int4", progress=False).token_bytes
    assert before < model.token_bytes
    assert tk.quantize(model, "int4", progress=False).token_bytes == before


def test_a_model_loaded_as_sizes_only_needs_no_memory_here() -> None:
    """The quantized matrices hold no values either, even if `quantize` runs outside of the `sizes_only` block."""
    gpu = tk.device("virtual:h200")
    config = ARCHITECTURES["qwen3"].Config.from_hf(
        {"model_type": "qwen3"} | SIZES | {"num_hidden_layers": 1, "vocab_size": 400_000, "hidden_size": 2048}
    )
    with gpu.sizes_only():
        model = ARCHITECTURES["qwen3"].Model(config, gpu, torch.bfloat16).to_empty(device=gpu.torch).requires_grad_(False)
    model.report = SimpleNamespace(sizes_only=True)
    host = HostPeak()
    new = quantize(model, "int4-g128", progress=False)
    assert host.grown_bytes() < 200e6
    assert new.quantisation.bytes_before > 3e9
    assert new.quantisation.bits_per_weight == 4.25
