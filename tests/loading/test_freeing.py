"""A model is freed with its last variable: no reference cycle keeps its memory until a garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys

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


FIRST = """
import gc, sys
import toolkit as tk
gpu = tk.device("virtual:h200")
gc.collect()
gc.disable()
model = tk.load("random/qwen3-0.6b", device=gpu, progress=False)
del model
print(gpu.memory().allocated_bytes, "torch._dynamo" in sys.modules)
model = tk.load("random/qwen3-0.6b", device=gpu, progress=False)
run = tk.generate(model, [1, 2, 3], max_new_tokens=2)
del model
print(gpu.memory().allocated_bytes, "torch._dynamo" in sys.modules)
"""


def test_the_first_models_of_a_process_are_freed():
    """Steps without values import PyTorch's compiler, which makes cycles with the frames of its callers. Loading doesn't."""
    said = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, timeout=120).stdout
    assert said.split() == ["0", "False", "0", "True"]
