"""Figures of other engines that the reports and the documentation show next to the toolkit's own, with their sources."""

from __future__ import annotations

from dataclasses import dataclass

LLAMA_CPP_SOURCE = (
    "llama.cpp: measured with llama-bench (tg128 at a depth of 0, 8,192 or 32,768 tokens, flash attention) on one NVIDIA H200, "
    "GGUF files in Q4_K_M with the real shapes and random weights. The rate at depth 0 is drawn at 64 tokens, the mean of the "
    "context while 128 tokens are generated."
)
# tokens per second of llama.cpp by model and context
LLAMA_CPP: dict[str, dict[int, float]] = {
    "random/qwen3-8b": {64: 264.8, 8192: 231.4},
    "random/gemma4-31b": {64: 80.9, 8192: 78.3, 32768: 75.4},
    "random/qwen3.5-35b-a3b": {64: 249.8, 8192: 246.7, 32768: 235.8},
}


@dataclass(frozen=True)
class Claim:
    """What a pull request of another project says about copies: the counts of each direction in one generation, if stated."""

    change: str
    h2d: int | None = None
    d2h: int | None = None
    d2d: int | None = None


# pytorch/executorch pull request 20286: Gemma-4 31B, a prompt of 19 tokens, 128 decode steps, after loading
EXECUTORCH_20286 = (
    Claim("before", h2d=261, d2h=129, d2d=129),
    Claim("token kept on the device as int64", h2d=132, d2h=129),
    Claim("position array uploaded once", h2d=5, d2h=129, d2d=257),
)
