"""The kernels' benchmark without a GPU: its problems exist, its bytes are GGUF's, its table says what it has."""

from __future__ import annotations

import pytest

from toolkit.bench.kernels import LINES, Line, stored_bytes, table
from toolkit.kernels.registry import find_kernel, find_shape


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.kernel} {line.shape}")
def test_every_problem_is_known(line: Line) -> None:
    kernel = find_kernel(line.kernel)
    shape = find_shape(kernel, line.shape)
    assert stored_bytes(kernel, shape) <= kernel.cost(shape).bytes
    assert kernel.known[line.shape] == shape


def test_bytes_are_those_of_gguf() -> None:
    """Q4_K blocks hold 256 weights in 144 B, Q6_K's in 210 (ggml-common.h)."""
    matmul, experts = find_kernel("int4_matmul"), find_kernel("moe_step")
    assert stored_bytes(matmul, find_shape(matmul, "gemma4-31b gate+up")) == 43008 * 5376 // 256 * 144
    assert stored_bytes(matmul, find_shape(matmul, "gemma4-31b lm_head")) == 262144 * 5376 // 256 * 210
    assert stored_bytes(experts, find_shape(experts, "qwen3.5-35b-a3b experts, q4_k")) == 9 * 3 * 2048 * 512 // 256 * 144


def test_the_table_names_what_is_missing() -> None:
    rows = [
        {"kernel": "a", "shape": "s", "at_least_percent": 88, "us": 35.04, "percent": 87.94, "of": "bandwidth",
         "others_us": {"tinygemm": 77.02, "gemlite": "not installed"}},
        {"kernel": "b", "shape": "t", "at_least_percent": None, "us": None},
    ]  # fmt: skip
    lines = table({"gpu": "NVIDIA H200", "read_bytes_per_s": 4.48e12, "rows": rows}).splitlines()
    assert lines[0] == "NVIDIA H200, read bandwidth 4,480 GB/s (4,172 GiB/s) measured in the same run"
    assert lines[-2] == "| `a` | s | 35.0 | 87.9 (bandwidth) | 88 | tinygemm 77.0; gemlite: not installed |"
    assert lines[-1] == "| `b` | t | no config ran |  |  |  |"
