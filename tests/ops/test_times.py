"""Virtual GPUs take as long for the package's kernels as the timings of the real GPUs say that ship with it.

The rules of `toolkit/ops` hold a fixed time and a share of the bandwidth or of the arithmetic rate for each kernel. If a test
here fails because a kernel was timed again, fit the figures of its rule to the new timings.
"""

from __future__ import annotations

import gc
from collections import defaultdict

import pytest
import torch

import toolkit as tk
from toolkit.ops.define import record_problems
from toolkit.trace.events import Trace
from toolkit.tune.cards import find_card
from toolkit.tune.lookup import SWITCHED, timed
from toolkit.tune.store import read_tuned

EFFECTS = {  # names of kernels, and what the rules call them
    "int4_matmul": "packed_matmul", "int4_prefill": "packed_matmul", "moe_step": "moe", "moe_prefill": "experts",
    "delta_step": "delta_net", "delta_chunks": "delta_net", "attention_decode": "attention",
    "attention_prefill": "attention", "rms_norm": "rms_norm", "qk_norm_rope": "qk_norm_rope",
    "gate_heads": "gate_heads", "expert_choice": "choose_experts",
}  # fmt: skip
SMALL = {"rms_norm", "qk_norm_rope", "gate_heads", "choose_experts"}  # under a twentieth of a step
GPUS = ("h100", "h200")
CONTEXTS = {"random/qwen3-8b": 8192, "random/gemma4-31b": 32768, "random/qwen3.5-35b-a3b": 32768}  # of shipped timings


def modelled_us(trace: Trace, gap_ns: float) -> dict[str, float]:
    """Return the time of each operation in a graph, which includes the gaps between its nodes."""
    found: dict[str, float] = defaultdict(float)
    for name, ns in zip(trace.text("name"), trace["dur_ns"].tolist(), strict=True):
        found[str(name).removesuffix("_part")] += (ns + gap_ns) / 1e3
    return found


def both_us(name: str, tokens: int, context: int, key: str) -> dict[str, tuple[float, float]]:
    """Return the (modelled, shipped) time per operation of a step with `tokens` tokens at the end of `context`.

    Operations of which the GPU has no timings with the current code are left out.
    """
    gpu, card = tk.device(f"virtual:{key}"), find_card(key)
    kept = read_tuned(card.key, card.facts)
    with gpu.sizes_only(), torch.no_grad():
        model = tk.load(name, device=gpu, scheme="q4_k_m", progress=False)
        cache = model.new_cache(context)
        ids = torch.zeros(1, tokens, dtype=torch.int64, device=gpu.torch)
        positions = torch.arange(context - tokens, context, device=gpu.torch)
        with record_problems() as problems, gpu.record(lines=False) as trace:
            hidden = model.advance(model.embed(ids), positions, cache, context)
            model.logits(hidden[:, -1:])
    del model, cache, hidden
    gc.collect()
    shipped: dict[str, list[float]] = defaultdict(list)
    out_of_date: set[str] = set()
    for kernel, shape in problems:
        near = timed(kernel, shape, kept)
        if near and (near[0].far <= SWITCHED or kernel.name == "qk_norm_rope"):  # whose cache's length doesn't matter
            shipped[kernel.name].append(near[0].us)
        elif timed(kernel, shape, kept, earlier=True):
            out_of_date.add(EFFECTS[kernel.name])
        else:  # the first norm of a step, the head of a prompt's last token, lookups, and choices on an H100 were not timed
            assert kernel.name in ("rms_norm", "embed_rows", "int4_matmul", "expert_choice"), shape.key
    modelled = modelled_us(trace, gpu.spec.graph_node_ns - gpu.spec.kernel_floor_ns)
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kernel_name, times in shipped.items():
        effect = EFFECTS[kernel_name]
        found[effect][0] = modelled[effect]
        found[effect][1] += sum(times)
    return {effect: (mine, theirs) for effect, (mine, theirs) in found.items() if effect not in out_of_date}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_decoding_takes_as_long_as_the_shipped_timings(name: str, gpu: str) -> None:
    found = both_us(name, 1, CONTEXTS[name], gpu)
    assert len(found) >= 3
    for effect, (mine, theirs) in found.items():
        assert mine == pytest.approx(theirs, rel=0.35 if effect in SMALL else 0.1), effect
    assert sum(mine for mine, _ in found.values()) == pytest.approx(sum(theirs for _, theirs in found.values()), rel=0.05)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_prompts_take_as_long_as_the_shipped_timings(name: str, gpu: str) -> None:
    """Norms read what the kernel before them has just written, but their timings are with a cold L2."""
    found = both_us(name, 512, 4096, gpu)
    for effect, (mine, theirs) in found.items():
        if effect not in SMALL:
            assert mine == pytest.approx(theirs, rel=0.1), effect
    assert sum(mine for mine, _ in found.values()) == pytest.approx(sum(theirs for _, theirs in found.values()), rel=0.05)
