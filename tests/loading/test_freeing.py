"""A model is freed with its last variable: no reference cycle keeps its memory until a garbage collection."""

from __future__ import annotations

import gc

import pytest

import toolkit as tk

MODELS = ("demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe", "random/qwen3-0.6b")


@pytest.fixture
def gpu():
    gpu = tk.device("virtual:h200")
    gc.collect()
    gc.disable()
    yield gpu
    gc.enable()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("decode", [None, "double-buffered", "cuda-graph", "whole-loop"])
def test_deleting_a_model_frees_its_memory(gpu, name, decode):
    tk.load(name, device=gpu, progress=False)
    gc.collect()  # imports during the first load make cycles with frames, which hold the variables of their callers
    before = gpu.memory().allocated_bytes
    model = tk.load(name, device=gpu, progress=False)
    if decode is not None:
        tk.generate(model, [1, 2, 3], decode, max_new_tokens=3)
    assert gpu.memory().allocated_bytes > before
    del model
    assert gpu.memory().allocated_bytes == before


def test_deleting_a_model_of_transformers_frees_its_memory(gpu):
    pytest.importorskip("transformers")
    before = gpu.memory().allocated_bytes
    model = tk.load("demo/qwen3", device=gpu, engine="hf", progress=False)
    tk.generate(model, [1, 2, 3], max_new_tokens=2)
    del model
    assert gpu.memory().allocated_bytes == before
