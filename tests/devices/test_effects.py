"""Tests of the rules for effects as pure functions. Meta tensors stand for device tensors, CPU tensors for host tensors."""

import pytest
import torch

from tests.speed import is_quick
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.virtual.effects.copies import copy, one_run
from toolkit.gpu.virtual.effects.effect import Effect, duration_ns, host_ns
from toolkit.gpu.virtual.effects.lookup import decomposes, effects

aten = torch.ops.aten
H200 = CATALOGUE["h200"]


def gpu(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def kinds(effects) -> list[str]:
    return [e.kind if e.kind in ("kernel", "wait") else f"{e.kind} {e.bytes}" for e in effects]


def of(func, *args, out=None, **kwargs) -> list[str]:
    return kinds(effects(func, args, kwargs, out))


ONE_RUN = {
    "contiguous": (gpu(3, 4), gpu(3, 4), True),
    "both transposed": (gpu(3, 4).t(), gpu(3, 4).t(), True),
    "one transposed": (gpu(4, 3), gpu(3, 4).t(), False),
    "rows of a larger one": (gpu(9, 4)[2:5], gpu(3, 4), True),
    "columns of a larger one": (gpu(3, 9)[:, 2:6], gpu(3, 4), False),
    "size-one dimensions between": (gpu(1, 2, 64, 8)[:, :1, 3:4], gpu(1, 1, 1, 8), True),
    "broadcast": (gpu(3, 4), gpu(4), False),
    "broadcast of a size-one dimension": (gpu(1, 4), gpu(4), True),
    "one element": (gpu(3, 4)[1, 2], gpu(9)[4], True),
    "odd sizes, permuted alike": (gpu(3, 5, 7).permute(2, 0, 1), gpu(3, 5, 7).permute(2, 0, 1), True),
    "channels last": (gpu(2, 3, 4, 5).to(memory_format=torch.channels_last), gpu(2, 3, 4, 5), False),
}


@pytest.mark.parametrize(("target", "source", "expected"), ONE_RUN.values(), ids=list(ONE_RUN))
def test_one_run_of_memory(target: torch.Tensor, source: torch.Tensor, expected: bool):
    assert one_run(target, source) is expected


COPIES = {
    "d2d": (gpu(33), gpu(33), False, ["d2d 132"]),
    "d2d cast": (gpu(33), gpu(33, dtype=torch.long), False, ["kernel"]),
    "d2d strided": (gpu(4, 3), gpu(3, 4).t(), False, ["kernel"]),
    "nothing to copy": (gpu(0, 3), torch.ones(0, 3), False, []),
    "h2d": (gpu(33), torch.ones(33), False, ["h2d 132", "wait"]),
    "h2d without waiting": (gpu(33), torch.ones(33), True, ["h2d 132"]),
    "h2d casts on the host": (gpu(33, dtype=torch.bfloat16), torch.ones(33), False, ["h2d 66", "wait"]),
    "h2d casts on the device": (gpu(33, dtype=torch.bfloat16), torch.ones(33), True, ["h2d 132", "kernel"]),
    "h2d into a column": (gpu(33, 8)[:, 2], torch.ones(33), False, ["h2d 132", "wait", "kernel"]),
    "h2d broadcast": (gpu(33, 8), torch.ones(8), False, ["h2d 1056", "wait"]),
    "d2h": (torch.ones(33), gpu(33), False, ["d2h 132", "wait"]),
    "d2h casts on the host": (torch.ones(33), gpu(33, dtype=torch.bfloat16), False, ["d2h 66", "wait"]),
    "d2h casts on the device": (torch.ones(33), gpu(33, dtype=torch.long), True, ["kernel", "d2h 132"]),
    "d2h of a column": (torch.ones(33), gpu(33, 4)[:, 1], False, ["kernel", "d2h 132", "wait"]),
    "d2h into a column": (torch.ones(33, 4)[:, 1], gpu(33), False, ["d2h 132", "wait"]),
}


@pytest.mark.parametrize(("target", "source", "non_blocking", "expected"), COPIES.values(), ids=list(COPIES))
def test_copies(target: torch.Tensor, source: torch.Tensor, non_blocking: bool, expected: list[str]):
    assert kinds(copy(target, source, non_blocking)) == expected


def test_views_and_allocations_are_nothing():
    x = gpu(3, 4)
    assert of(aten.view.default, x, [12]) == []
    assert of(aten.empty.memory_format, [3], out=gpu(3)) == []
    assert of(aten._unsafe_view.default, x, [12], out=gpu(12)) == []


def test_an_unknown_operation_is_one_kernel_that_reads_and_writes():
    (effect,) = effects(aten.hypot.default, (gpu(5, 7), gpu(5, 7)), {}, gpu(5, 7))
    assert (effect.kind, effect.name, effect.moved_bytes) == ("kernel", "hypot", 3 * 5 * 7 * 4)


def test_an_empty_result_is_nothing():
    assert of(aten.add.Tensor, gpu(0, 3), gpu(0, 3), out=gpu(0, 3)) == []


def test_an_item_is_one_element_into_pinned_memory_and_a_wait():
    d2h, wait = effects(aten._local_scalar_dense.default, (gpu(dtype=torch.bfloat16),), {}, None)
    assert (d2h.kind, d2h.bytes, d2h.pinned, wait.kind) == ("d2h", 2, 1, "wait")


def test_host_indices_are_uploaded_then_broadcast():
    rows, columns = torch.tensor([[0], [1]]), torch.tensor([2, 3, 4])
    expected = ["h2d 16", "wait", "kernel", "h2d 24", "wait", "kernel", "kernel"]
    assert of(aten.index.Tensor, gpu(5, 6), [rows, columns], out=gpu(2, 3)) == expected


def test_a_mask_reads_a_count_back():
    got = of(aten.index.Tensor, gpu(100), [gpu(100, dtype=torch.bool)], out=gpu(7))
    assert got == ["kernel", "d2h 4", "wait", "kernel", "kernel", "kernel"]


def test_any_of_one_element_is_a_copy():
    assert of(aten.any.default, gpu(1, dtype=torch.bool), out=gpu(dtype=torch.bool)) == ["d2d 1"]
    assert of(aten.any.default, gpu(2, dtype=torch.bool), out=gpu(dtype=torch.bool)) == ["kernel"]


@pytest.mark.parametrize(("length", "copies"), [(1, 3), (33, 3), (4096, 3), (4097, 1)])
def test_sort_copies_inside(length: int, copies: int):
    out = (gpu(length), gpu(length, dtype=torch.long))
    found = effects(aten.sort.stable, (gpu(length),), {"stable": False, "dim": -1}, out)
    assert sum(e.kind == "d2d" for e in found) == copies


DECOMPOSES = {
    aten.masked_fill.Scalar: "CompositeExplicitAutograd",  # clone, masked_fill_
    aten.clone.default: "CompositeExplicitAutograd",
    aten.embedding.default: "CompositeExplicitAutograd",
    aten.softmax.int: "CompositeImplicitAutograd",
    aten.add.Tensor: None,
    aten.detach.default: None,  # a view
    aten._unsafe_view.default: None,
    aten.remainder.Scalar: None,  # only wraps the number
    aten._foreach_add_.Scalar: None,  # one kernel for many tensors
    aten._fused_rms_norm.default: None,
}


@pytest.mark.parametrize("func", DECOMPOSES, ids=str)
def test_what_cuda_has_no_kernel_for_decomposes(func):
    key = decomposes(func)
    assert (None if key is None else key.name) == DECOMPOSES[func]


def test_times_grow_with_bytes_and_flops():
    small, large = (Effect("kernel", 0, "add", moved_bytes=n) for n in (1 << 10, 1 << 30))
    assert duration_ns(small, H200) == pytest.approx(H200.kernel_floor_ns, abs=2)
    assert duration_ns(large, H200) == pytest.approx((1 << 30) / H200.reached_bandwidth_bytes_per_s * 1e9, rel=0.01)
    product = Effect("kernel", 0, "mm", flops=2 * 4096**3, moved_bytes=3 * 2 * 4096**2, peak="bf16_flops")
    assert duration_ns(product, H200) == pytest.approx(168_500, rel=0.1)  # measured on an H200


@pytest.mark.parametrize("card", CATALOGUE.values(), ids=list(CATALOGUE))
@pytest.mark.parametrize(("kind", "pinned"), [("h2d", 0), ("h2d", 1), ("d2h", 0), ("d2h", 1), ("d2d", -1), ("memset", -1)])
def test_every_card_has_times_for_every_copy(card, kind: str, pinned: int):
    effect = Effect(kind, 1 << 20, kind, pinned, moved_bytes=1 << 21, cost="launch_host_ns")
    assert duration_ns(effect, card) > 0
    assert host_ns(effect, card) > 0


def test_the_usual_rule_is_quick():
    x, y = gpu(64, 64), gpu(64, 64)

    def many():
        for _ in range(2000):
            effects(aten.add.Tensor, (x, y), {}, x)

    assert is_quick(many, 2000 * 50e-6)  # about 3 us on an idle machine; this one may be busy
