"""The demo's text: true, deterministic, and learnt only where it can be known."""

from __future__ import annotations

import random
import re

import pytest

from toolkit.demo import facts
from toolkit.demo.corpus import NOT_LEARNT, Corpus, train_tokenizer


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(train_tokenizer(768), random.Random(7))


def test_the_tokenizer_is_the_same_every_time() -> None:
    assert train_tokenizer(400).to_str() == train_tokenizer(400).to_str()
    assert train_tokenizer(400).get_vocab_size() == 400


def test_sums_are_right() -> None:
    sums = [re.fullmatch(r"(\d+) ([-+x]) (\d+) = (\d+)\.", s) for ring in facts.rings() for s in ring.sentences]
    found = [(int(m[1]), m[2], int(m[3]), int(m[4])) for m in sums if m]
    assert len(found) == 300
    for a, sign, b, result in found:
        assert {"+": a + b, "-": a - b, "x": a * b}[sign] == result


@pytest.mark.parametrize(
    ("n", "word"), [(0, "zero"), (13, "thirteen"), (20, "twenty"), (47, "forty-seven"), (100, "one hundred")]
)
def test_numbers_in_words(n: int, word: str) -> None:
    assert facts.number(n) == word


def test_a_ring_goes_round() -> None:
    ring = facts.Ring("abc", ("A.", "B.", "C."))
    texts = {ring.document(random.Random(seed), 20)[:8] for seed in range(40)}
    assert texts == {"A. B. C.", "B. C. A.", "C. A. B."}


@pytest.mark.parametrize("length", [17, 193, 1025])
def test_rows_have_their_length_and_labels_are_the_ids(corpus: Corpus, length: int) -> None:
    for _ in range(60):
        ids, labels = corpus.row(length)
        assert len(ids) == len(labels) == length
        assert all(label in (NOT_LEARNT, token) for token, label in zip(ids, labels, strict=True))


def test_a_row_is_drawn_from_the_seed_alone(corpus: Corpus) -> None:
    again = [Corpus(corpus.tokenizer, random.Random(3)).row(200) for _ in range(2)]
    assert again[0] == again[1]


def test_single_facts_are_learnt_from_where_they_are_known(corpus: Corpus) -> None:
    sentence = "The capital of France is Paris."
    known = corpus.known_from[sentence]
    assert sentence[:known] == "The capital of Fr", "one letter past Finland"
    for other in corpus.known_from:
        assert other == sentence or not other.startswith(sentence[:known])
