"""Invalid prompts, and text that appears one whole character at a time."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import ByteTokenizer

from toolkit.core.errors import ModelError
from toolkit.text.prompts import TextStream, prompt_ids

MODEL = SimpleNamespace(tokenizer=None, config=SimpleNamespace(vocab_size=256))


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3], (1, 2, 3), [[1, 2, 3]], torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]]), np.array([1, 2, 3])],
    ids=str,
)
def test_token_ids_in_any_form(prompt):
    assert prompt_ids(MODEL, prompt) == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("hello", "Pass token ids"),
        ([], "no tokens"),
        ([[]], "no tokens"),
        (torch.empty(0, dtype=torch.int64), "no tokens"),
        ([[1, 2], [3, 4]], "batch of 2"),
        (["a text", "another"], "a list of texts or chat messages"),
        ([{"role": "user", "content": "a text"}], "a list of texts or chat messages"),
        (torch.ones(3, 4, dtype=torch.int64), "batch of 3"),
        ([1, 256], "0 to 255"),
        ([-1], "0 to 255"),
        ([1.0], "0 to 255"),
        ([True], "0 to 255"),
        (["a"], "a list of texts"),
        (torch.ones(2, 2, 2, dtype=torch.int64), "batch of 2"),
        (torch.ones(1, 2, 2, dtype=torch.int64), "0 to 255"),
        (torch.tensor(5), "int|Tensor"),
        (None, "NoneType"),
        (7, "int"),
        ({1: 2}, "dict"),
    ],
    ids=str,
)
def test_prompts_that_are_refused(prompt, said):
    with pytest.raises(ModelError, match=said):
        prompt_ids(MODEL, prompt)


def test_text_goes_through_the_tokenizer():
    model = SimpleNamespace(tokenizer=ByteTokenizer(), config=MODEL.config)
    assert prompt_ids(model, "ab") == [97, 98]
    with pytest.raises(ModelError, match="no tokens"):
        prompt_ids(model, "")


@pytest.mark.parametrize("text", ["plain", "naïve café", "日本語", "a🙂b", "🙂🙂"])
def test_stream_shows_whole_characters(text):
    stream = TextStream(ByteTokenizer())
    pieces = [stream.piece(b) for b in text.encode()]
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces)
    assert [piece for piece in pieces if piece] == list(text)


def test_stream_without_a_tokenizer_is_silent():
    assert TextStream(None).piece(5) == ""
