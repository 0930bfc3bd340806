"""Ranks that exchange tensors by the kernels of CUDA, in Triton's interpreter, through memory that their processes share."""

from __future__ import annotations

import os
import random
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from toolkit.core.distributed import gather, join


@cache
def inbox(folder: str, ranks: int) -> Any:
    """Return the inbox of this rank, and keep the memory of the others mapped."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter

    from tests.interpreter import patch_once_per_launch
    from toolkit.kernels.exchange import BLOCK_WORDS, MOST_BLOCKS, PLACES, Inbox

    patch_once_per_launch(triton.runtime.interpreter)
    shape = (PLACES, ranks, MOST_BLOCKS * BLOCK_WORDS)
    count = PLACES * ranks * shape[-1]
    maps = [torch.from_file(f"{folder}/{rank}", True, count, dtype=torch.int64) for rank in range(ranks)]
    addresses = torch.tensor([each.data_ptr() for each in maps])
    _kept.append(maps)
    rank = join(ranks).rank
    counts = torch.full((MOST_BLOCKS,), -3, dtype=torch.int32)  # so that the numbers pass through 0
    return Inbox(rank, maps[rank].view(shape), addresses, counts)


_kept: list[list[Tensor]] = []


def sums(folder: str, ranks: int, rounds: int) -> list[str]:
    """Sum and join tensors of changing sizes, with random pauses. Return the operations whose result isn't the reference's."""
    from toolkit.kernels import exchange

    box, wrong = inbox(folder, ranks), []
    gather(torch.zeros(1))  # all have mapped the memory
    pause = random.Random(box.rank)
    for number in range(rounds):
        made = torch.Generator().manual_seed(number)
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        size = (1, 700, 5, 1300)[number % 4]
        # Whole numbers: the interpreter doesn't round to the nearest bf16.
        parts = [torch.randint(-40, 40, (size,), generator=made).to(dtype) for _ in range(ranks)]
        if pause.random() < 0.5:
            time.sleep(pause.random() / 200)
        out = torch.empty(size, dtype=dtype)
        exchange.all_reduce(box, parts[box.rank], out).run()
        if not torch.equal(out, torch.stack(parts).sum(0, dtype=torch.float32).to(dtype)):
            wrong.append(f"sum {number}")
        sizes, rows = [3 + (rank + number) % 2 for rank in range(ranks)], number % 2 + 1
        parts = [torch.randn(rows, width, generator=made).to(dtype) for width in sizes]
        joined = torch.empty(rows, sum(sizes), dtype=dtype)
        exchange.all_gather(box, parts[box.rank], sizes, joined).run()
        if not torch.equal(joined, torch.cat(parts, 1)):
            wrong.append(f"gather {number}")
    return wrong
