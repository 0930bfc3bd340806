"""Packages of models whose layers have inputs of their own and share keys and values, as in Gemma 4 E2B and E4B."""

from __future__ import annotations

import pytest

import toolkit as tk
from tests.exporting.small_e2b import small_e2b
from tests.exporting.traced import traced_package
from toolkit.exporting.pieces import Anatomy, compiled_for

CONTEXT = 128


def check(package, model, lengths, chunk=CONTEXT, strategies=("double-buffered",)):
    """Check that the package generates the model's tokens."""
    for length in lengths:
        ids = [7 * i % 97 for i in range(length)]
        for strategy in strategies:
            asked = {"max_new_tokens": 12, "record": False, "eos": (), "prefill_chunk": chunk, "decode": strategy}
            tokens = tk.generate(package, ids, **asked).tokens
            assert tokens == tk.generate(model, ids, **asked, kv=package.kv).tokens, (length, strategy)
            assert len(set(tokens)) > 3


def test_layers_that_lend_keys_and_values_are_pieces_of_their_own():
    """Layers 0 and 1 lend nothing. Layers 2 and 3 lend to 4 to 7, which are of two kinds."""
    model = small_e2b("cpu", "full sliding full sliding | full sliding sliding full")
    with compiled_for(model, None):
        likes = [piece.like for piece in Anatomy(model, CONTEXT).pieces]
    assert [likes.index(like) for like in likes] == [0, 1, 2, 3, 4, 5, 5, 4, 8]


def test_pieces_compute_what_the_model_computes():
    """The prompts fill the rings of 24 slots, or overwrite them, in one part or several."""
    model = small_e2b("cpu", "sliding full sliding | sliding full")
    package = traced_package(model, CONTEXT)
    check(package, model, (1, 23, 24, 100))
    check(package, model, (100,), chunk=30)
    check(package, model, (5,), strategies=("host-sampling", "host-embedding", "position-on-device"))


def test_pieces_of_a_context_that_a_window_holds():
    """The model writes to its rings as to other caches then. The pieces are those of longer contexts."""
    model = small_e2b("cpu", "sliding full sliding | sliding full")
    check(traced_package(model, 24), model, (1, 9))


def test_pieces_with_a_quantized_cache():
    model = small_e2b("cpu", "sliding full | sliding full")
    check(traced_package(model, CONTEXT, "int8"), model, (40,))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_compiled_package(tmp_path):
    """A ring of 8 slots is too small for parts of a prompt, so only the method "decode" is compiled.

    Each piece takes many seconds to compile, so there are three layers: a ring, one that lends, one that borrows.
    """
    model = small_e2b("cpu", "sliding full | full", sliding_window=8)
    made = tk.export(model, tmp_path / "out", context=CONTEXT, progress=False).load()
    check(made, model, (5, 24), strategies=("double-buffered", "roundtrip"))
    assert made.tokenizer is not None
