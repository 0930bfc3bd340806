"""Tests that load folders saved by transformers, for each architecture: sharded, in half precision, the text part of multimodal
models, and with a single expert. Logits and greedy tokens equal those of transformers, with fused matrices and without.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import toolkit as tk
from tests.models import cases_gemma4, cases_qwen3, cases_qwen3_5
from toolkit.core.errors import FormatError, ModelError

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4  # of logits in fp32, in which checkpoints are loaded here; the largest difference measured is 4e-6
ONE = {"num_experts": 1, "num_experts_per_tok": 1}
PICTURES = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4}
TOWER = PICTURES | {"depth": 1, "num_heads": 2, "num_position_embeddings": 16, "out_hidden_size": 24}
SIGHT = PICTURES | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
HEARING = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [4, 4]}
SENSES = {"vision_config": SIGHT | {"position_embedding_size": 16}, "audio_config": HEARING | {"output_proj_dims": 12}}
SMALL_GEMMA = cases_gemma4.BASE | cases_gemma4.SHARED | cases_gemma4.PER_LAYER
TEXT = {"Gemma4": SMALL_GEMMA, "Qwen3_5": cases_qwen3_5.DENSE, "Qwen3_5Moe": cases_qwen3_5.MOE | ONE}


def multimodal(kind: str, **senses: Any) -> Any:
    config = getattr(transformers, f"{kind}Config")(text_config=TEXT[kind], **senses)
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config)


def text(kind: str, values: dict[str, Any], config: str) -> Any:
    return getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, config)(**values))


MODELS = {
    "gemma4": lambda: text("Gemma4", cases_gemma4.BASE | cases_gemma4.MOE | {"tie_word_embeddings": False}, "Gemma4TextConfig"),
    "gemma4 that sees and hears": lambda: multimodal("Gemma4", **SENSES),
    "qwen3": lambda: text("Qwen3", cases_qwen3.BASE | {"tie_word_embeddings": True}, "Qwen3Config"),
    "qwen3_moe of one expert": lambda: text("Qwen3Moe", cases_qwen3.MOE | ONE, "Qwen3MoeConfig"),
    "qwen3_5 that sees": lambda: multimodal("Qwen3_5", vision_config=TOWER),
    "qwen3_5_moe": lambda: text("Qwen3_5Moe", cases_qwen3_5.MOE, "Qwen3_5MoeTextConfig"),
    "qwen3_5_moe that sees, of one expert": lambda: multimodal("Qwen3_5Moe", vision_config=TOWER),
}


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "saved in bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saved_is_loaded_and_decodes_the_same(tmp_path, name, dtype):
    torch.manual_seed(0)
    theirs = MODELS[name]().eval()
    for parameter in theirs.parameters():
        parameter.add_(torch.randn(parameter.shape) * 0.1)
    theirs.to(dtype).save_pretrained(tmp_path, max_shard_size="20KB")
    theirs = type(theirs).from_pretrained(tmp_path, dtype=torch.float32).eval()  # `float` would leave their frequencies rounded
    theirs.set_experts_implementation("eager")  # their grouped matmul wants sizes divisible by 4
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ids = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
    expected = theirs(input_ids=ids).logits
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    tokens = theirs.generate(input_ids=ids[:1], attention_mask=torch.ones_like(ids[:1]), **options)[0, 12:].tolist()
    for fuse in (True, False):
        model = tk.load(tmp_path, "cpu", "float32", fuse=fuse, progress=False)
        assert (model(ids) - expected).abs().max() <= TOLERANCE
        run = tk.generate(model, ids[0].tolist(), max_new_tokens=12, eos=(), record=False, prefill_chunk=5)
        assert list(run.tokens) == tokens


@torch.no_grad()
@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0)], ids=["as MLX", "taps first"])
def test_a_convolution_whose_axes_are_in_another_order_is_refused(tmp_path, order):
    torch.manual_seed(0)
    MODELS["qwen3_5_moe"]().save_pretrained(tmp_path / "usual")
    weights, ids = load_file(tmp_path / "usual" / "model.safetensors"), torch.arange(9)[None]
    convolutions = [name for name in weights if name.endswith("conv1d.weight")]

    def changed(name, change):
        shutil.copytree(tmp_path / "usual", tmp_path / name)
        found = weights | {name: change(weights[name]).contiguous() for name in convolutions}
        save_file(found, tmp_path / name / "model.safetensors")
        return tk.load(tmp_path / name, "cpu", "float32", progress=False)

    usual = tk.load(tmp_path / "usual", "cpu", "float32", progress=False)
    assert torch.equal(changed("without the axis of one", lambda conv: conv[:, 0])(ids), usual(ids))
    with pytest.raises(FormatError, match=r"conv1d.*shape"):
        changed("other", lambda conv: conv.permute(order))


@pytest.mark.parametrize("name", ["demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe"])
def test_ids_of_another_shape_are_refused(name):
    model = tk.load(name, device="cpu", progress=False)
    assert model(torch.ones(2, 5, dtype=torch.int32)).shape == (2, 5, 768)
    whole = torch.ones(1, 5, 2, dtype=torch.long)
    for ids in (whole[0, :, 0], whole[0, 0, 0], whole, whole[:, :0, 0], whole[..., 0].float(), [[1, 2]], "The"):
        with pytest.raises(ModelError, match=r"^token ids: a .*\[B, T\]"):
            model(ids)
