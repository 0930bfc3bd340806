"""Architectures of transformers that can't use its static cache, or only with a whole prompt."""

from __future__ import annotations

import pytest
import torch

import toolkit as tk
from toolkit.core.errors import ModelError
from toolkit.decode.prefix import Prefix
from toolkit.loading import huggingface as hf

transformers = pytest.importorskip("transformers")  # the `hf` extra

PROMPT = list(range(1, 20))
NO_ENDS = {"vocab_size": 131, "eos_token_id": None, "bos_token_id": None}
SIZES = {
    **NO_ENDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
NO_STATIC_CACHE = [
    transformers.BloomConfig(hidden_size=32, n_layer=2, n_head=4, **NO_ENDS),
    transformers.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True, **NO_ENDS),
    transformers.GPTNeoConfig(hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global", "local"], 1]], **NO_ENDS),
    transformers.DogeConfig(**SIZES, intermediate_size=48),
    transformers.MiniMaxConfig(
        **SIZES, intermediate_size=48, num_local_experts=2, layer_types=["linear_attention", "full_attention"]
    ),
    transformers.RecurrentGemmaConfig(**{**SIZES, "num_hidden_layers": 3}, lru_width=32, attention_window_size=8),
]


def reference(model, n):
    ids = torch.tensor([PROMPT])
    return tuple(model.generate(ids, max_new_tokens=n, do_sample=False, pad_token_id=0)[0, len(PROMPT) :].tolist())


@pytest.mark.parametrize("config", NO_STATIC_CACHE, ids=lambda config: config.model_type)
def test_models_that_cannot_use_a_static_cache_keep_their_own_loop(config):
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    wrapped = hf.wrap(model, "cpu")
    with pytest.raises(ModelError, match=r'(static cache|cache of its own|in its modules).*decode="hf-generate"'):
        tk.generate(wrapped, PROMPT)
    assert tk.generate(wrapped, PROMPT, "hf-generate", max_new_tokens=3).tokens == reference(model, 3)


def test_its_own_generate_needs_no_token_for_padding():
    config = transformers.CodeGenConfig(n_positions=64, n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **NO_ENDS)
    model = transformers.CodeGenForCausalLM(config).eval()
    assert tk.generate(hf.wrap(model, "cpu"), PROMPT, "hf-generate", max_new_tokens=3).tokens == reference(model, 3)


def test_a_recurrent_state_that_begins_anew_needs_the_whole_prompt_at_once():
    mamba = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
    layers = {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "intermediate_size": 48}
    model = transformers.AutoModelForCausalLM.from_config(transformers.JambaConfig(**SIZES, **mamba, **layers)).eval()
    wrapped, expected = hf.wrap(model, "cpu"), reference(model, 4)
    assert tk.generate(wrapped, PROMPT, max_new_tokens=4).tokens == expected
    assert tk.generate(wrapped, PROMPT, prefix=Prefix(wrapped, PROMPT[:-1], 40), max_new_tokens=4).tokens == expected
    for options in ({"prefill_chunk": 5}, {"prefix": Prefix(wrapped, PROMPT[:-2], 40)}):
        with pytest.raises(ModelError, match=r"feeding a prompt in parts: .* begins anew"):
            tk.generate(wrapped, PROMPT, max_new_tokens=4, **options)
