"""Kernels of other libraries, for comparison with ours on problems of the same size, if they are installed.

Each function creates a problem with random weights and returns one call for each of several copies. Together the copies are
larger than an L2 cache, so that a call never finds its weights there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GROUP = 32
COPIES_BYTES = 200_000_000  # larger than twice the L2 of any card

Runs = list[Callable[[], Any]]


def copies(nbytes: float) -> int:
    """Return how many copies of a problem of `nbytes` should take turns."""
    return max(2, min(64, -(-COPIES_BYTES // int(nbytes))))


def tinygemm(n: int, k: int) -> Runs:
    """Return calls of PyTorch's int4 matmul (`_weight_int4pack_mm`): x [1, k] in bf16, weights [n, k], groups of 32."""

    def one() -> Callable[[], Any]:
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        packed = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        scales = torch.rand(k // GROUP, n, 2, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(1, k, dtype=torch.bfloat16, device="cuda")
        return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)

    return [one() for _ in range(copies(n * k * 0.625))]


def gemlite(n: int, k: int) -> Runs:
    """Return calls of gemlite's weight-only int4 matmul in bf16, groups of 32, set up by its helper for HQQ weights."""
    from gemlite.helper import A16W4_HQQ_INT

    def one() -> Callable[[], Any]:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scales, zeros = (torch.rand(n * k // GROUP, 1, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        linear = A16W4_HQQ_INT(device="cuda:0", dtype=torch.bfloat16).from_weights(codes, scales, zeros)
        x = torch.randn(1, k, dtype=torch.bfloat16, device="cuda")
        return lambda: linear(x)

    return [one() for _ in range(copies(n * k * 0.625))]


def fla_step(key_heads: int, value_heads: int, dim: int) -> Runs:
    """Return calls of flash-linear-attention's recurrent gated delta rule, one step, without convolution, gates or norm."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def one() -> Callable[[], Any]:
        def random(*size: int) -> Tensor:
            return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

        q, k, v = (random(1, 1, heads, dim) for heads in (key_heads, key_heads, value_heads))
        g, beta = -torch.rand(1, 1, value_heads, device="cuda"), torch.rand(1, 1, value_heads, device="cuda")
        state = torch.randn(1, value_heads, dim, dim, device="cuda")
        return lambda: fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )

    return [one() for _ in range(copies(8.0 * value_heads * dim * dim))]
