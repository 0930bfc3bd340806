"""How many prompt tokens are processed at once: depends on the model's sizes and the GPU's memory alone."""

import pytest
import torch

import toolkit as tk
from toolkit.models.chunks import LEAST, MOST, SHARE, chunk_for, chunk_of


@pytest.mark.parametrize(
    ("gib", "chunk"), [(0.25, 512), (1, 512), (3.9, 512), (4, 1024), (7.9, 1024), (8, 2048), (141, 2048)], ids=str
)
def test_activations_take_a_small_part_of_the_memory(gib, chunk):
    token_bytes = (8 << 30) // (2048 * SHARE)  # 2,048 tokens take this share of 8 GiB
    assert chunk_for(token_bytes, int(gib * 2**30)) == chunk
    assert chunk == LEAST or chunk * token_bytes * SHARE <= gib * 2**30
    assert MOST % chunk == 0


@pytest.mark.parametrize(("gpu", "chunk"), [("virtual:12GiB", 1024), ("rtx-4090", 2048), ("h200", 2048), ("cpu", 512)])
def test_plans_count_as_many(gpu, chunk):
    plan = tk.plan("random/gemma4-31b", gpu, scheme="q4_k_m", context=4096, kv=None)
    assert plan.chunk == chunk
    assert tk.plan("random/gemma4-31b", gpu, scheme="q4_k_m", context=chunk, kv=None).chunk == chunk
    if gpu != "cpu":
        assert plan.run[1].parts["activations"] == plan.sizes.activation_bytes(chunk)


@pytest.mark.parametrize("device", ["cpu", "virtual:h200"])
def test_a_run_says_how_many(device):
    model = tk.load("demo/qwen3", device=device, progress=False)
    chunk = LEAST if device == "cpu" else MOST
    assert chunk_of(model) == tk.plan(model, device).chunk == chunk
    for asked, used in ((None, chunk), (2, 2)):
        assert tk.generate(model, [1, 2, 3], max_new_tokens=1, record=False, prefill_chunk=asked).prefill_chunk == used


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3-8b", "gemma4-31b", "qwen3.5-35b-a3b"])
def test_the_estimate_is_right_within_a_factor_of_two(name):
    """The virtual GPU allocates what a GPU does."""
    model = tk.load(f"random/{name}", device="virtual:h200", scheme="q4_k_m", progress=False)
    cache, device = model.new_cache(MOST), model.device
    ids = torch.zeros(1, MOST, dtype=torch.int64, device=device.torch)
    device.reset_peak()
    before = device.memory().allocated_bytes
    model.advance(model.embed(ids), cache.slots, cache, MOST)
    assert 0.5 < (device.memory().peak_bytes - before) / (MOST * model.token_bytes) < 2
    cache.free()
