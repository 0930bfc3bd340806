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
    from toolkit.kernels.exchange import in_memory, memory_words

    patch_once_per_launch(triton.runtime.interpreter)
    maps = [torch.from_file(f"{folder}/{rank}", True, memory_words(ranks), dtype=torch.int64) for rank in range(ranks)]
    _kept.append(maps)
    rank = join(ranks).rank
    found = in_memory(rank, maps[rank], torch.tensor([each.data_ptr() for each in maps]))
    found.counts.fill_(-3)  # so that the numbers pass through 0
    return found


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
        sizes, rows = [3 * (rank + number) % 5 for rank in range(ranks)], number % 2 + 1
        parts = [torch.randn(rows, width, generator=made).to(dtype) for width in sizes]
        for wanted in (dtype, torch.float32):
            joined = torch.empty(rows, sum(sizes), dtype=wanted)
            exchange.all_gather(box, parts[box.rank], sizes, joined).run()
            if not torch.equal(joined, torch.cat(parts, 1).to(wanted)):
                wrong.append(f"gather {number} in {wanted}")
    return wrong


def sent(folder: str, ranks: int, rounds: int) -> list[str]:
    """Sum what products send, with random pauses. Return the products whose sum isn't that of their results, bit for bit.

    Of two sums of single rows, one is computed by a norm or by experts.
    """
    box, wrong = inbox(folder, ranks), []
    from toolkit.kernels import exchange
    from toolkit.kernels.int4_matmul import INT4_MATMUL, MatmulShape
    from toolkit.kernels.moe import MOE_STEP, MoeShape
    from toolkit.kernels.norms_rope import RMS_NORM, NormShape

    problems = (
        (INT4_MATMUL, MatmulShape(n=70, k=256, m=3)),
        (MOE_STEP, MoeShape(96, 64, 8, 2, scheme="int8-g32", down="int8-g32")),
        (INT4_MATMUL, MatmulShape(n=36, k=256, m=8, activations="bf16", out="fp32")),  # two blocks of the sum
        (INT4_MATMUL, MatmulShape(n=5, k=256, quantised=True)),
    )
    gather(torch.zeros(1))  # all have mapped the memory
    pause, done = random.Random(box.rank), []
    for number in range(rounds):
        kernel, shape = problems[number % 4]
        result = "out" if kernel is INT4_MATMUL else "output"
        inputs = kernel.inputs(shape, "cpu", ranks * number + box.rank)
        own = run(kernel, shape, inputs)[result]
        if pause.random() < 0.5:
            time.sleep(pause.random() / 200)
        sum_of = run(kernel, shape, inputs | {"targets": box.sent.targets, "counts": box.sent.counts})[result]
        receiver = None
        if own.numel() == own.shape[-1] and number % 8 < 4:
            if kernel is MOE_STEP and number % 16 < 8:
                receiver = MOE_STEP, shape, MOE_STEP.inputs(shape, "cpu", number), ("output", "residual")
            else:
                form = ("add_norm", "norm_add_norm")[number // 8 % 2]
                norm = NormShape(1, own.numel(), form, dtype=str(own.dtype).removeprefix("torch."))
                receiver = RMS_NORM, norm, RMS_NORM.inputs(norm, "cpu", number), ("out", "residual")
            by, other, given, names = receiver
            made = run(by, other, given | {"x": own.view(given["x"].shape), "words": box.sent.words, "counts": box.sent.counts})
            found = [made[name] for name in names]
        else:
            exchange.sum_of_sent(box, sum_of).run()
            found = [sum_of]
        done.append((f"{kernel.name} {number}", own, found, receiver))
    for name, own, found, receiver in done:
        total = torch.empty_like(own)
        exchange.all_reduce(box, own, total).run()
        wanted = [total]
        if torch.equal(total, own):
            wrong.append(f"{name} is its own sum")
        if receiver is not None:
            by, other, given, names = receiver
            made = run(by, other, given | {"x": total.view(given["x"].shape)})
            wanted = [made[name] for name in names]
        if not all(map(torch.equal, found, wanted)):
            wrong.append(name)
    return wrong


def run(kernel: Any, shape: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Run a kernel with its last config, and return its outputs."""
    outputs: dict[str, Tensor] = kernel.outputs(shape, inputs)
    for launch in kernel.launches(shape, kernel.space(shape)[-1], inputs, outputs):
        launch.run()
    return outputs
