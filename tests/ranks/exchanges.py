"""Ranks that exchange tensors by the kernels of CUDA, in Triton's interpreter, through memory that their processes share."""

from __future__ import annotations

import os
import random
import time
from functools import cache
from typing import Any

import torch
from torch import Tensor

from toolkit.core.ranks import gather, join


@cache
def inbox(folder: str, ranks: int) -> Any:
    """Return the inbox of this rank, and keep the memory of the others mapped."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.runtime.interpreter

    from tests.interpreter import patch_once_per_launch
    from toolkit.kernels.exchange import BLOCK_WORDS, MOST_BLOCKS, PLACES, ROW_WORDS, Inbox

    patch_once_per_launch(triton.runtime.interpreter)
    rank, counts = join(ranks).rank, torch.full((MOST_BLOCKS + 1,), -3, dtype=torch.int32)  # so that they pass through 0
    held: list[Tensor] = []
    for words in (MOST_BLOCKS * BLOCK_WORDS, ROW_WORDS):
        count = PLACES * ranks * words
        maps = [torch.from_file(f"{folder}/{words}-{each}", True, count, dtype=torch.int64) for each in range(ranks)]
        held += [maps[rank].view(PLACES, ranks, words), torch.tensor([one.data_ptr() for one in maps])]
        _kept.append(maps)
    return Inbox(rank, *held[:2], counts[:-1], *held[2:], counts[-1:])


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
        wrong += [f"norm {number}: {name}" for name in _norms(box, number, dtype, made)]
    return wrong


def _norms(box: Any, number: int, dtype: torch.dtype, made: torch.Generator) -> list[str]:
    """Sum a row over the ranks in the launch of its norm. Return the results that aren't those of the norm of the sum."""
    from toolkit.kernels import exchange
    from toolkit.kernels.norms_rope import FORMS, RMS_NORM, NormShape

    form, hidden = FORMS[1 + number % 3], (64, 70, 1056)[number // 3 % 3]
    name, quantised = str(dtype).removeprefix("torch."), form != "norm_add" and hidden % 32 == 0
    shape = NormShape(1, hidden, form, form == "norm_add_norm", quantised, name)
    parts = [torch.randint(-40, 40, (1, hidden), generator=made).to(dtype) for _ in range(box.ranks)]
    inputs = RMS_NORM.inputs(shape, "cpu", number)
    wanted = RMS_NORM.run(
        shape, RMS_NORM.space(shape)[0], inputs | {"x": torch.stack(parts).sum(0, dtype=torch.float32).to(dtype)}
    )
    given = inputs | {"x": parts[box.rank]}
    outputs = RMS_NORM.outputs(shape, given)
    exchange.summed_norm(box, shape, RMS_NORM.space(shape)[0], given, outputs).run()
    found = list(outputs.items())[: RMS_NORM.results(shape)]
    return [f"{shape.key}: {name}" for (name, out), right in zip(found, wanted, strict=True) if not torch.equal(out, right)]
