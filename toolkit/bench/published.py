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
class Counts:
    """The copies in each direction of one generation, as a pull request states them; None where it doesn't."""

    change: str
    h2d: int | None = None
    d2h: int | None = None
    d2d: int | None = None


# Gemma-4 31B, a prompt of 19 tokens, 128 decode steps, after loading
EXECUTORCH_20286 = (
    Counts("before", h2d=261, d2h=129, d2d=129),
    Counts("the token stays on the device", h2d=132, d2h=129),
    Counts("the positions are uploaded once", h2d=5, d2h=129, d2d=257),
)

# What pull requests of other projects say. None of them ran on an H200.
CLAIMS = {
    "context": (
        "executorch #20482",
        "Gemma-4 31B on an A100, CUDA graph, 4-bit cache: 44.80 tok/s at 512 tokens, 38.41 at 127K, so 86 % of it",
    ),
    "graph": ("executorch #18809", "Qwen3.5-35B-A3B on an A100: a CUDA graph decodes 1.20 times as fast"),
    "buffers": ("nkipy #46", "Qwen3: reading the token one step late overlaps the copy, with identical output"),
    "export": (
        "executorch #20480, #20482",
        "Gemma-4 31B at 128K: the peak of the GPU memory during an export falls from 36.3 to 27.0 GiB",
    ),
}
