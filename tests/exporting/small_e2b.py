"""A small model with the parts of Gemma 4 E2B and E4B: inputs for each layer, shared keys and values, wider MLPs."""

from __future__ import annotations

from typing import Any

import torch

import toolkit as tk
from toolkit.gpu.device import Device
from toolkit.models import gemma4

KINDS = {"full": "full_attention", "sliding": "sliding_attention"}


def small_e2b(device: Device | str, layers: str, dtype: torch.dtype = torch.float32, **changed: Any) -> gemma4.Model:
    """Return the model with random weights and the tokenizer of a demo model.

    `layers` are the layers' kinds; the last ones, after "|", have no keys and values of their own.
    """
    demo = tk.load("demo/gemma4", device="cpu", progress=False)
    own, shared = (part.split() for part in layers.split("|"))
    values = {
        "model_type": "gemma4_text", "vocab_size": demo.config.vocab_size, "hidden_size": 64, "intermediate_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "sliding_window": 24,
        "layer_types": [KINDS[kind] for kind in own + shared], "num_hidden_layers": len(own + shared),
        "num_kv_shared_layers": len(shared), "hidden_size_per_layer_input": 32, "use_double_wide_mlp": True,
        "vocab_size_per_layer_input": demo.config.vocab_size, "final_logit_softcapping": 30.0, "max_position_embeddings": 1024,
    }  # fmt: skip
    model = gemma4.Model(gemma4.Config.from_hf(values | changed), tk.device(device), dtype).init_weights(3)
    model.tokenizer = demo.tokenizer
    with torch.no_grad():
        for name, parameter in model.requires_grad_(False).named_parameters():
            if parameter.ndim > 1 and name.startswith("layers"):
                parameter.mul_(20)  # so that the tokens of a text differ
    return model
