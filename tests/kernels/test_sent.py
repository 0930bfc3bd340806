"""Tests of the sums of what products have sent, in one process: interpreted, or compiled if there is a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.base import Launch
from toolkit.kernels.exchange import SENT_BLOCK, Inbox, in_memory, memory_words, send, sum_of_sent, targets_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BITS = {
    torch.bfloat16: (torch.int16, (0, -0x8000, 0x3F80, -0x4080, 0x4020, 0x7F80, -0x0080, 0x7FC0, -1)),
    torch.float16: (torch.int16, (0, -0x8000, 0x3C00, -0x4400, 0x4100, 0x7C00, -0x0400, 0x7E00, -1)),
    torch.float32: (torch.int32, (0, -0x80000000, 0x3F800000, -0x40800000, 1, 0x7F800000, -0x00800000, 0x7FC00000, -1)),
}  # 0, -0, 1, -1, another number, infinity, -infinity, and two that are not numbers


@triton.jit
def _send_all(x_ptr, n, targets_ptr, counts_ptr, BLOCK: tl.constexpr, RANKS: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    targets = targets_of(targets_ptr, counts_ptr, i, i < n, x_ptr.dtype.element_ty, RANKS)
    send(tl.load(x_ptr + i, mask=i < n, other=0.0), targets, i < n)


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
            given = {"x_ptr": x, "n": n, "targets_ptr": box.sent.targets, "counts_ptr": box.sent.counts}
            Launch(_send_all, (-(-n // 256),), given, {"BLOCK": 256, "RANKS": ranks}).run()
        wanted = sum((x.float() for x in shares), torch.zeros(n, device=DEVICE)).to(dtype)
        for box, x in zip(boxes, shares, strict=True):
            out = x.clone() if number % 2 else torch.empty_like(x)
            sum_of_sent(box, out if number % 2 else x, out).run()  # in place, too
            real = ~wanted.isnan()
            assert out.isnan().equal(wanted.isnan())
            assert out[real].view(bits).equal(wanted[real].view(bits))
    assert not any(box.sent.words.any() for box in boxes)
    assert not any(each[: boxes[0].words.numel()].any() for each in memory)  # the other part is not touched
