"""Small models for the decode tests, and a tokenizer whose tokens are bytes."""

from __future__ import annotations

from toolkit.models.qwen3 import Config, Model

SMALL = Config(97, 32, 48, 2, 4, 2, 8, max_position_embeddings=640)
ODD = Config(61, 30, 22, 3, 5, 1, 6, max_position_embeddings=300, tie_word_embeddings=True)


def make(device, config=SMALL, seed=1, dtype=None) -> Model:
    """Return a model with weights large enough that its greedy tokens vary."""
    model = Model(config, device, *([] if dtype is None else [dtype])).init_weights(seed)
    for name, parameter in model.requires_grad_(False).named_parameters():
        if parameter.ndim > 1:
            parameter.mul_(40 if name.startswith("layers") else 2)
    return model


class ByteTokenizer:
    """Token i is byte i; `eos_ids` as given."""

    def __init__(self, eos_ids=()) -> None:
        self.eos_ids = eos_ids

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids) -> str:
        return bytes(ids).decode(errors="replace")
