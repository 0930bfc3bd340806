"""The number of prompt tokens that a model processes at once by default, chosen from the model's sizes and the GPU's memory.

More tokens at once fill more tiles of the prompt kernels and need fewer launches per token, and take more memory. The result
depends on nothing that changes from run to run, such as free memory: other chunks round sums differently.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.core.distributed import WHOLE, gather
from toolkit.ops.define import GPUS

if TYPE_CHECKING:
    from toolkit.models.model import Model

# On a GPU with little memory; on the CPU, where attention holds the scores of all heads; and in models of transformers.
LEAST = 512
# Tokens/s of prompts of 8,192 tokens on an H200 (q4_k_m), with 512, 2,048, 4,096 and 8,192 at once: Qwen3-8B 21,600, 23,200,
# 22,600 and 22,200; Gemma 4 31B 5,450, 6,040, 6,030 and 6,000; Qwen3.5-35B-A3B 12,100, 20,500, 21,800 and 22,500. The experts
# of a mixture get few rows each (64 of 2,048, with 8 of 256 experts per token), but 2,048 more tokens take 0.3 GB.
MOST = 2048
SHARE = 40  # the activations take at most this part of the GPU's memory: 1/40


def chunk_for(token_bytes: int, memory_bytes: int) -> int:
    """Return the tokens to process at once on a GPU with `memory_bytes`, if the activations of one take `token_bytes`.

    The result is a power of two, and so a multiple of the kernels' tiles.
    """
    chunk = MOST
    while chunk > LEAST and chunk * token_bytes * SHARE > memory_bytes:
        chunk //= 2
    return chunk


def chunk_of(model: Model) -> int:
    """Return the tokens that a loaded model processes at once on its device, unless the user chooses another number.

    All ranks of a divided model must call it. They process as few as the rank whose activations are the largest.
    """
    device, token_bytes = model.device, getattr(model, "token_bytes", None)
    if device.torch.type not in GPUS or token_bytes is None:
        return LEAST
    memory_bytes = device.memory().total_bytes if device.spec is None else device.spec.memory_bytes
    chunk = min(chunk_for(token_bytes, memory_bytes), getattr(model, "chunk", MOST))  # packages were compiled for a chunk
    return chunk if getattr(model, "shard", WHOLE) == WHOLE else int(gather(torch.tensor(chunk, device="cpu")).min())
