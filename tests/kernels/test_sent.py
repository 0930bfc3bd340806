"""Tests of the sums of what products have sent, in one process: interpreted, or compiled if there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels import moe
from toolkit.kernels.base import Kernel, Launch, Shape
from toolkit.kernels.exchange import (
    SENT_BLOCK,
    Inbox,
    arrived,
    in_memory,
    memory_words,
    place_of,
    send,
    sum_of_sent,
    targets_of,
)
from toolkit.kernels.moe import MOE_STEP, MoeShape
from toolkit.kernels.norms_rope import RMS_NORM, NormShape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = {
    torch.bfloat16: (torch.int16, (0, -0x8000, 0x3F80, -0x4080, 0x4020, 0x7F80, -0x0080, 0x7FC0, -1)),
    torch.float16: (torch.int16, (0, -0x8000, 0x3C00, -0x4400, 0x4100, 0x7C00, -0x0400, 0x7E00, -1)),
    torch.float32: (torch.int32, (0, -0x80000000, 0x3F800000, -0x40800000, 1, 0x7F800000, -0x00800000, 0x7FC00000, -1)),
}  # 0, -0, 1, -1, another number, infinity, -infinity, and two that are not numbers


@triton.jit
def _send_all(x_ptr, n, targets_ptr, counts_ptr, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    targets = targets_of(targets_ptr, counts_ptr, i, x_ptr.dtype.element_ty, RANKS)
    send(tl.load(x_ptr + i, mask=i < n, other=0.0), targets, i < n)


def _send(box: Inbox, x: Tensor) -> None:
    given = {"x_ptr": x, "n": x.numel(), "targets_ptr": box.sent.targets, "counts_ptr": box.sent.counts}
    Launch(_send_all, (-(-x.numel() // 256),), given, {"BLOCK": 256, "RANKS": box.ranks}).run()


def boxes_of(ranks: int) -> tuple[list[Tensor], list[Inbox]]:
    memory = [torch.zeros(memory_words(ranks), dtype=torch.int64, device=DEVICE) for _ in range(ranks)]
    addresses = torch.tensor([each.data_ptr() for each in memory], device=DEVICE)
    return memory, [in_memory(rank, own, addresses) for rank, own in enumerate(memory)]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_values_arrive_in_any_size_and_dtype(ranks: int) -> None:
    made = torch.Generator().manual_seed(ranks)
    memory, boxes = boxes_of(ranks)
    for number, n in enumerate((1, 700, SENT_BLOCK.value // 2, SENT_BLOCK.value // 4 + 1, 1500, 3, 513)):
        dtype = (*BITS,)[number % 3]
        bits, special = BITS[dtype]
        drawn = [torch.randint(len(special), (n,), generator=made) for _ in range(ranks)]
        shares = [torch.tensor(special, dtype=bits)[each].view(dtype).to(DEVICE) for each in drawn]
        for box, x in zip(boxes, shares, strict=True):
            _send(box, x)
        wanted = sum((x.float() for x in shares), torch.zeros(n, device=DEVICE)).to(dtype)
        for box, x in zip(boxes, shares, strict=True):
            out = torch.empty_like(x)
            sum_of_sent(box, out).run()
            real = ~wanted.isnan()
            assert out.isnan().equal(wanted.isnan())
            assert out[real].view(bits).equal(wanted[real].view(bits))
    assert not any(box.sent.words.any() for box in boxes)
    assert not any(each[: boxes[0].words.numel()].any() for each in memory)  # the other part is not touched


RECEIVERS = (
    (RMS_NORM, NormShape(1, 96, "add_norm", quantised=True)),
    (MOE_STEP, MoeShape(96, 64, 8, 2, scheme="int8-g32", down="int8-g32")),
    (RMS_NORM, NormShape(1, 1504, "norm_add_norm", scaled=True)),
    (RMS_NORM, NormShape(1, 96, "norm_add", dtype="float32")),
    (RMS_NORM, NormShape(1, 33, "add_norm", dtype="float16")),
)


@triton.jit
def _arrived(place, out_ptr, n, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    there = place_of(place, 0, i, out_ptr.dtype.element_ty, RANKS)
    tl.store(out_ptr + i, arrived(there, i < n, out_ptr.dtype.element_ty, RANKS))


@pytest.mark.parametrize("dtype", BITS)
def test_a_sum_is_infinite_where_a_value_is_missing(dtype: torch.dtype) -> None:
    _, boxes = boxes_of(3)
    out, n = torch.empty(32, dtype=dtype, device=DEVICE), 20
    launch = Launch(_arrived, (1,), {"place": boxes[0].sent.words, "out_ptr": out, "n": n}, {"RANKS": 3, "BLOCK": 32}, 1)
    for rank, missing in ((2, n), (0, n), (1, 5)):
        launch.run()
        assert out[:n].isinf().all()
        assert not out[n:].any()  # zeros where there is no value
        _send(boxes[rank], torch.full((n - missing % n,), -2.0, dtype=dtype, device=DEVICE))
    launch.run()
    assert out[15:n].isinf().all()
    assert out[:15].eq(-6).all()


def _run(kernel: Kernel, shape: Shape, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    outputs = kernel.outputs(shape, inputs)
    for launch in kernel.launches(shape, kernel.space(shape)[0], inputs, outputs):
        launch.run()
    return outputs


@pytest.mark.parametrize("ranks", [2, 3])
def test_norms_and_experts_receive_what_products_sent(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their results are those for the sum, bit for bit; sums alone, of several blocks, may come between them."""
    monkeypatch.setattr(moe, "SCORES", moe.RECEIVED_SCORES)  # a GPU may sum up other shapes in another order
    _, boxes = boxes_of(ranks)
    for number in range(10):
        kernel, shape = RECEIVERS[number % len(RECEIVERS)]
        inputs = kernel.inputs(shape, DEVICE, number)
        # Whole numbers: the interpreter doesn't round to the nearest bf16.
        shares = [kernel.inputs(shape, DEVICE, 9 * number + rank)["x"].mul(9).round() for rank in range(ranks)]
        for box, x in zip(boxes, shares, strict=True):
            _send(box, x)
        total = sum((x.float() for x in shares), torch.zeros_like(shares[0], dtype=torch.float32)).to(shares[0].dtype)
        wanted = _run(kernel, shape, {**inputs, "x": total})
        for box in boxes:
            found = _run(
                kernel, shape, {**inputs, "x": torch.empty_like(total), "words": box.sent.words, "counts": box.sent.counts}
            )
            names = ("output", "residual") if kernel is MOE_STEP else (*wanted,)
            assert [name for name in names if not found[name].equal(wanted[name])] == [], (number, kernel.name)
        if number % 2:
            many = torch.full((1500,), float(number), device=DEVICE)
            for box in boxes:
                _send(box, many)
            for box in boxes:
                sum_of_sent(box, out := torch.empty_like(many)).run()
                assert out.equal(many * ranks)
    assert not any(box.sent.words.any() for box in boxes)
    assert {int(count) for box in boxes for count in box.sent.counts} == {15}


def test_launches_compile_for_gpus() -> None:
    """As compiled for an H200: the interpreter accepts more than the compiler."""
    code = """
import torch
from triton.runtime import driver

from toolkit.kernels import exchange
from toolkit.kernels.moe import MOE_STEP, MoeShape
from toolkit.kernels.norms_rope import RMS_NORM, NormShape
from toolkit.tune.compile_worker import AbsentGpu

driver.set_active(AbsentGpu(90))
box = exchange.in_memory(0, torch.empty(exchange.memory_words(2), dtype=torch.int64), torch.empty(2, dtype=torch.int64))
for dtype in exchange.DTYPES:
    x, joined = torch.empty(3, 700, dtype=dtype), torch.empty(3, 1401, dtype=dtype)
    gathers = [exchange.all_gather(box, x, (700, 701), out) for out in (joined, joined.float())]
    for launch in (exchange.all_reduce(box, x, torch.empty_like(x)), exchange.sum_of_sent(box, x), *gathers):
        print(launch.compile((9, 0)).metadata.name)
shape = NormShape(1, 5376, "norm_add", True)
inputs = RMS_NORM.inputs(shape, "meta") | {"words": box.sent.words, "counts": box.sent.counts}
(launch,) = RMS_NORM.launches(shape, RMS_NORM.space(shape)[0], inputs, RMS_NORM.outputs(shape, inputs))
print(launch.compile((9, 0)).metadata.name)
shape = MoeShape(1024, 256, 8, 2)
inputs = MOE_STEP.inputs(shape, "meta") | {"words": box.sent.words, "counts": box.sent.counts}
launch = MOE_STEP.launches(shape, MOE_STEP.space(shape)[0], inputs, MOE_STEP.outputs(shape, inputs))[0]
print(launch.compile((9, 0)).metadata.name)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.split()
    each = ["one_shot_all_reduce", "one_shot_all_reduce_of_sent", "one_shot_all_gather", "one_shot_all_gather"]
    assert found == [*each * 3, "one_shot_all_reduce_of_sent_norm_kernel", "one_shot_all_reduce_of_sent_start"]
