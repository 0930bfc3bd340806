"""Invalid prompts, and text that appears one whole character at a time."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_models import ByteTokenizer, make
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

import toolkit as tk
from toolkit.core.errors import ModelError
from toolkit.decode.strategies import OwnLoop
from toolkit.text.prompts import TextStream, prompt_ids
from toolkit.text.tokenizer import Tokenizer

MODEL = SimpleNamespace(tokenizer=None, config=SimpleNamespace(vocab_size=256))


@pytest.mark.parametrize(
    "prompt",
    [[1, 2, 3], (1, 2, 3), [[1, 2, 3]], torch.tensor([1, 2, 3]), torch.tensor([[1, 2, 3]]), np.array([1, 2, 3]), range(1, 4)],
    ids=str,
)
def test_token_ids_in_any_form(prompt):
    assert prompt_ids(MODEL, prompt) == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("hello", "In Python, pass token ids"),
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
        (b"\1\2", "bytes"),
        (7, "int"),
        ({1: 2}, "dict"),
    ],
    ids=str,
)
def test_prompts_that_are_refused(prompt, said):
    with pytest.raises(ModelError, match=said):
        prompt_ids(MODEL, prompt)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_refused(layout):
    prompt = torch.nested.nested_tensor([torch.tensor([1]), torch.tensor([2, 3])], layout=layout)
    with pytest.raises(ModelError, match=r"a tensor of sequences \(nested\)"):
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


@pytest.mark.parametrize("data", [b"abc", "a\U0001f642".encode()[:-1], b"\xe6\x97", b"\xe6\xe6a\xe6", b""], ids=repr)
def test_rest_completes_the_text(data):
    stream = TextStream(ByteTokenizer())
    assert "".join([*map(stream.piece, data), stream.rest(), stream.rest()]) == data.decode(errors="replace")


@pytest.mark.parametrize("ending", [b"", b"\0"], ids=["length", "eos"])
@pytest.mark.parametrize("stop", [(), ("never",), ("b\ufffd",)], ids=repr)
def test_a_text_that_ends_inside_of_a_character_is_told_whole(stop, ending):
    spoken = b"ab\xe6\x97" + ending
    loop = OwnLoop("spoken", lambda ids, limit, sampling, ends, cancel: ((token, time.monotonic_ns()) for token in spoken))
    model = make(tk.device("cpu"))
    model.tokenizer = ByteTokenizer(eos_ids=(0,))
    pieces: list[str] = []
    run = tk.generate(
        model, "A", loop, max_new_tokens=len(spoken), stop=stop, on_token=lambda token, text: pieces.append(text), record=False
    )
    silent = tk.generate(model, "A", loop, max_new_tokens=len(spoken), stop=stop, record=False)
    assert "".join(pieces) == run.text == silent.text == ("a" if stop == ("b\ufffd",) else "ab\ufffd")
    assert run.tokens == silent.tokens == tuple(spoken)


BYTES = {byte: i for i, byte in enumerate([*(f"<0x{byte:02X}>" for byte in range(256)), "▁a"])}
DOG = "\U0001f436"


@pytest.mark.parametrize(
    ("spoken", "text"),
    [
        ([*(DOG * 2).encode()], DOG * 2),
        ([*(DOG * 2).encode()[:-2]], DOG + "\ufffd" * 2),
        ([*(DOG * 2).encode()[:-2], 256], DOG + "\ufffd" * 2 + " a"),
        ([256, *b"b\xf0", 256, *DOG.encode()], f" ab\ufffd a{DOG}"),
    ],
    ids=["whole", "cut off", "cut off inside", "between"],
)
@pytest.mark.parametrize("stop", [(), ("never",)], ids=repr)
def test_a_character_that_was_shown_stays_in_the_text(spoken, text, stop):
    # The decoder of byte tokens makes a whole run of them U+FFFD if one of its characters is incomplete.
    inner = Inner(models.BPE(BYTES, [], byte_fallback=True))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    loop = OwnLoop("spoken", lambda ids, limit, sampling, ends, cancel: ((token, time.monotonic_ns()) for token in spoken))
    model = make(tk.device("cpu"))
    model.tokenizer = Tokenizer(inner)
    pieces: list[str] = []
    told = tk.generate(
        model, [1], loop, max_new_tokens=len(spoken), stop=stop, on_token=lambda token, text: pieces.append(text), record=False
    )
    silent = tk.generate(model, [1], loop, max_new_tokens=len(spoken), stop=stop, record=False)
    assert "".join(pieces) == told.text == silent.text == text


def test_stream_without_a_tokenizer_is_silent():
    stream = TextStream(None)
    assert stream.piece(5) == stream.rest() == ""
