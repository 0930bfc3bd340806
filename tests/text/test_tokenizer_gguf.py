"""Compare every supported kind of GGUF tokenizer with transformers' tokenizers, on random text."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from toolkit.core.errors import FormatError
from toolkit.text import tokenizer as tokenizers
from toolkit.text.tokenizer import Tokenizer as Ours
from toolkit.weights.gguf_files import GgufFile

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>"]
SENTENCE = (
    "the cat sat on a mat and the dog's sitting there's 12 345 we'll WE'LL don't naïve café déjà über straße "
    "не знаю 東京 日本語 हिन्दी สวัสดี مرحبا def f(x): return x**2 ... --- !!! \t tab"
)
WORDS = [word for word in SENTENCE.split(" ") if word]


@cache
def texts() -> list[str]:
    """Generate hundreds of random texts: words, whitespace, punctuation, emoji, any code point, special tokens."""
    rng = random.Random(7)
    odd = ["", " ", "  ", "\n", "\n\n\n", "\r\n", "▁", "\u00a0", "e\u0301", "🐶", "\u200d", "<0x0A>", "<bo", "'S", "٣٤", "ǅ"]

    def piece() -> str:
        kind = rng.random()
        if kind < 0.5:
            return rng.choice(WORDS) + rng.choice(["", " ", " ", "  "])
        if kind < 0.8:
            return rng.choice(odd)
        high = 0x110000 if kind < 0.85 else 0x3000
        code = rng.randrange(high)
        return "" if 0xD800 <= code < 0xE000 else chr(code)

    drawn = ["".join(piece() for _ in range(rng.randrange(1, 25))) for _ in range(400)]
    return [*odd, *WORDS, SENTENCE, "a" * 300, "\n" * 40 + " " * 40, *drawn]


@cache
def pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a character BPE with U+2581 for spaces, all 256 bytes, and the control tokens."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.train_from_iterator([SENTENCE] * 3, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    model: Any = trained.model
    state = json.loads(model.__getstate__())
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(state["vocab"], key=state["vocab"].__getitem__)]
    return {token: i for i, token in enumerate(tokens)}, [(left, right) for left, right in state["merges"]]


def fields(kind: str, vocab: dict[str, int], control: list[str], **more: Any) -> dict[str, Any]:
    """Return the GGUF metadata of a tokenizer, with token types as llama.cpp's converter sets them."""
    tokens = sorted(vocab, key=vocab.__getitem__)
    types = [3 if t in control else 6 if len(t) == 6 and t.startswith("<0x") and kind != "gpt2" else 1 for t in tokens]
    named = {
        "model": kind,
        "tokens": tokens,
        "token_type": [2 if t == "<unk>" else n for t, n in zip(tokens, types, strict=True)],
    }
    return {f"tokenizer.ggml.{name}": value for name, value in (named | more).items()}


def same(ours: Ours | None, theirs: Any, sample: list[str] | None = None) -> None:
    """Assert that `ours` encodes and decodes every text like the transformers tokenizer `theirs`."""
    assert ours is not None
    for text in texts() if sample is None else sample:
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"], repr(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False), repr(text)


def test_gemma(tmp_path: Path) -> None:
    from transformers import GemmaTokenizer

    make: Any = GemmaTokenizer  # its annotations don't know pairs
    vocab, merges = pieces()
    names = {"bos": "<bos>", "eos": "<eos>", "unknown": "<unk>", "padding": "<pad>"}
    more = {f"{name}_token_id": vocab[token] for name, token in names.items()}
    metadata = fields("gemma4", vocab, CONTROL, merges=[f"{a} {b}" for a, b in merges], scores=[0.0] * len(vocab), **more)
    metadata |= {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True}
    ours = tokenizers.from_gguf(reread(tmp_path, metadata), "x.gguf")
    theirs = make(dict(vocab), merges, mask_token=None, add_bos_token=True)
    theirs.add_special_tokens({"extra_special_tokens": ["<|turn>", "<turn|>"]})
    assert ours is not None
    same(ours, theirs)
    same(ours, theirs, ["<|turn>user\nHi there<turn|>\n<|turn>model\n"])
    assert ours.eos_ids == (vocab["<eos>"], vocab["<turn|>"])
    assert ours.specials["bos_token"] == "<bos>"


def test_a_chat_that_begins_with_the_beginning_token_gets_it_once() -> None:
    vocab, merges = pieces()
    metadata = fields("gemma4", vocab, CONTROL, merges=[f"{a} {b}" for a, b in merges], bos_token_id=vocab["<bos>"])
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{% for m in messages %}<|turn>{{ m.content }}<turn|>{% endfor %}"
    ours = tokenizers.from_gguf(metadata, "x.gguf")
    assert ours is not None
    prompt = ours.chat([{"role": "user", "content": "the cat"}])
    assert prompt == "<bos><|turn>the cat<turn|>"
    bos = vocab["<bos>"]
    assert ours.encode(prompt).count(bos) == 1
    assert ours.encode("the cat")[0] == bos
    assert ours.encode("the cat", ends=False) == ours.encode("the cat")[1:]


def reread(folder: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """Write `metadata` with the gguf package and read it back."""
    writer = gguf.GGUFWriter(folder / "x.gguf", "test")
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        part()
    return GgufFile(folder / "x.gguf").metadata


def greedy(text: str, vocab: dict[str, int], scores: list[float]) -> list[int]:
    """Reference implementation of SentencePiece's BPE: merge the adjacent pair with the best score, the leftmost if tied."""
    parts = list(("▁" + text.replace(" ", "▁")) if text else "")
    while True:
        joined = [(scores[vocab[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in vocab]
        if not joined:
            break
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [vocab[part]] if part in vocab else [vocab[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_with_scores(tmp_path: Path, prefix: bool) -> None:
    from transformers import LlamaTokenizer

    vocab, merges = pieces()
    rank = {a + b: i for i, (a, b) in reversed(list(enumerate(merges)))}
    scores = [-float(rank.get(token, len(merges) + i)) for token, i in vocab.items()]
    more = {"scores": scores, "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3, "add_space_prefix": prefix}
    ours = tokenizers.from_gguf(reread(tmp_path, fields("llama", vocab, CONTROL, **more)), "x.gguf")
    assert ours is not None
    theirs = LlamaTokenizer(
        dict(vocab),
        merges,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        add_prefix_space=prefix,
        add_bos_token=True,
    )
    plain = [t for t in texts() if "<0x" not in t]
    same(ours, theirs, [t for t in plain if not t.startswith((" ", "▁"))])  # transformers takes a leading space for the prefix
    if prefix:
        assert all(ours.encode(text, ends=False) == greedy(text, vocab, scores) for text in plain if len(text) < 100)


@pytest.mark.parametrize(("pre", "bos"), [("qwen35", False), ("qwen2", False), ("llama-bpe", True), ("default", False)])
def test_byte_level_by_its_cut(tmp_path: Path, pre: str, bos: bool) -> None:
    from transformers import Qwen2Tokenizer
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator([SENTENCE] * 3, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet))
    state: Any = json.loads(trained.to_str())["model"]
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = state["vocab"] | {token: len(state["vocab"]) + i for i, token in enumerate(control)}
    merges = [tuple(merge) for merge in state["merges"]]
    more = {"merges": [" ".join(merge) for merge in merges], "pre": pre, "eos_token_id": vocab["<|im_end|>"]}
    more |= {"bos_token_id": vocab["<|endoftext|>"]}
    ours = tokenizers.from_gguf(reread(tmp_path, fields("gpt2", vocab, control, **more)), "x.gguf")
    assert ours is not None
    assert ours.eos_ids == (vocab["<|im_end|>"], vocab["<|endoftext|>"])
    assert (ours.encode("a")[0] == vocab["<|endoftext|>"]) == bos
    assert all(ours.decode(ours.encode(t)) == t for t in texts() if pre in ("llama-bpe", "default"))
    if pre in ("qwen2", "qwen35"):
        kind: Any = Qwen2Tokenizer if pre == "qwen2" else Qwen3_5Tokenizer
        same(ours, kind(dict(vocab), merges))
    else:  # three digits go together, as in no cut of the Qwen family
        split: Any = ours._inner.pre_tokenizer
        assert [piece for piece, _ in split.pre_tokenize_str("1234")] == ["123", "4"]


def test_pieces_too_long_to_be_cut_in_every_place_are_refused() -> None:
    vocab, _ = pieces()
    longer = dict(vocab) | {"a" * 2000: len(vocab)}
    with pytest.raises(FormatError, match="more than 1,024 characters"):
        tokenizers.from_gguf(fields("llama", longer, CONTROL, scores=[0.0] * len(longer)), "x.gguf")


def test_pieces_that_imply_too_many_merges_are_refused() -> None:
    vocab, _ = pieces()
    for longest, refused in ((64, False), (1024, True)):
        runs = dict(vocab) | {"~" * n: len(vocab) + n - 1 for n in range(1, longest + 1)}
        metadata = fields("llama", runs, CONTROL, scores=[-float(i) for i in range(len(runs))])
        with pytest.raises(FormatError, match="more than 32 times the characters") if refused else nullcontext():
            assert tokenizers.from_gguf(metadata, "x.gguf") is not None


def test_scores_that_are_no_numbers_are_refused() -> None:
    vocab, _ = pieces()
    with pytest.raises(FormatError, match="scores"):
        tokenizers.from_gguf(fields("llama", vocab, CONTROL, scores=[float("nan")] * len(vocab)), "x.gguf")
