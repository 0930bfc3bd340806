"""Count the launches of each layer in a decode step of real models, by running them on the virtual H200 without values."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import toolkit as tk
from toolkit.kernels.base import Kernel, Launch, Shape
from toolkit.models.layers import Residual
from toolkit.models.model import CausalLM
from toolkit.ops.define import record_problems
from toolkit.trace.columns import KINDS
from toolkit.tune.lookup import choose

QUANTIZED = ["packed_matmul_part", "packed_matmul"]  # a launch that quantizes the input of a product, and the product
V_APART = ["packed_matmul", "packed_matmul"]  # q4_k_m gives v 6 bits in some layers, where q, k and v can't be merged
ATTENTION = ["qk_norm_rope", "attention_part", "attention"]
GATED = ["gate_heads", "packed_matmul"]
MLP = ["rms_norm", "packed_matmul", *QUANTIZED]
MOE = ["moe_part", "moe_part", "moe"]  # norm and router, and two products
DENSE = [
    ["rms_norm", *V_APART, *ATTENTION, "packed_matmul", *MLP],
    ["rms_norm", "packed_matmul", *ATTENTION, "packed_matmul", *MLP],
]
HYBRID = [
    ["rms_norm", "packed_matmul", "delta_net", "packed_matmul", *MOE],
    ["rms_norm", *V_APART, *ATTENTION, *GATED, *MOE],
    ["rms_norm", "packed_matmul", *ATTENTION, *GATED, *MOE],
]


def kernels_of(trace: tk.Trace) -> list[str]:
    """Return the names of a trace's kernels. It must have no copies, memsets or waits."""
    kinds = [KINDS[kind] for kind in trace["kind"]]
    assert set(kinds) <= {"kernel", "launch", "alloc", "free"}
    return [str(name) for kind, name in zip(kinds, trace.text("name"), strict=True) if kind == "kernel"]


def launched(problems: Sequence[tuple[Kernel, Shape]]) -> int:
    """Return the number of launches on an H200."""
    found: list[Launch] = []
    for kernel, shape in problems:
        inputs = kernel.inputs(shape, "meta")
        found += kernel.launches(shape, choose(kernel, shape, "h200").config, inputs, kernel.outputs(shape, inputs))
    return len(found)


def layers_of(model: CausalLM) -> list[list[str]]:
    """Run one decode step. Return the names of the kernels of each layer, of which operations launch as many."""
    found, device = [], model.device
    with torch.no_grad():
        cache = model.new_cache(4096)
        positions = torch.zeros(1, dtype=torch.int64, device=device.torch)
        x = torch.zeros(1, 1, model.config.hidden_size, dtype=model.dtype, device=device.torch)
        at, residual = model.passing(x, cache, model.reaches(positions, cache, 1)), Residual(x, torch.zeros_like(x))
        for layer in range(len(model.layers)):
            with record_problems() as problems:
                model.run_layer(layer, residual, at)
            with tk.record(device) as trace:
                residual = model.run_layer(layer, residual, at)
            found.append(kernels_of(trace))
            assert len(found[-1]) == launched(problems)
    return found


@pytest.mark.parametrize(
    ("name", "kinds", "counts"),
    [("qwen3-8b", DENSE, [18, 18]), ("gemma4-31b", DENSE, [27, 33]), ("qwen3.5-35b-a3b", HYBRID, [30, 6, 4])],
)
def test_launches_of_a_decode_step(name: str, kinds: list[list[str]], counts: list[int]) -> None:
    model = tk.load(f"random/{name}", device="virtual:h200", scheme="q4_k_m", progress=False)
    found = layers_of(model)
    assert [found.count(kind) for kind in kinds] == counts
    assert sum(counts) == len(found)
