"""Tests of the memory lesson's checks: solutions are judged by measured bytes and equal results, not by their code."""

import sys

import pytest
import torch

import toolkit as tk
from toolkit.ui.lessons.memory_cell_by_cell import size
from toolkit.ui.lessons.memory_checks import held, held_within, nothing_hidden, within

MiB = 1 << 20


@pytest.fixture
def gpu():
    return tk.device("virtual:h200")


def test_less_memory_with_the_same_result_is_right(gpu):
    x = torch.ones(1 << 20, device=gpu.torch)

    def whole():
        return x.double().sum()

    def smaller():
        return sum(part.double().sum() for part in x.split(1 << 17))

    same = "the result is the same: True"
    assert within({"peak": 4 * MiB}, whole, same_as=whole()) == {
        "peak: measured 8.00 MiB, wanted at most 4.00 MiB": False,
        same: True,
    }
    assert within({"peak": 4 * MiB}, smaller, same_as=whole()) == {
        "peak: measured 1.00 MiB, wanted at most 4.00 MiB": True,
        same: True,
    }


def test_what_the_result_holds_counts_as_kept(gpu):
    def kept():
        return [torch.ones(1 << 18, device=gpu.torch) for _ in range(3)]

    expected = [one.cpu() for one in kept()]
    assert all(within({"kept": 3 * MiB}, kept, same_as=expected, device=gpu).values())
    assert within({"peak": 4 * MiB, "kept": 2 * MiB}, kept, same_as=expected, device=gpu) == {
        "peak: measured 3.00 MiB, wanted at most 4.00 MiB": True,
        "kept: measured 3.00 MiB, wanted at most 2.00 MiB": False,
        "the result is the same: True": True,
    }


@pytest.mark.parametrize(
    "result",
    [None, "two", 2, [2.0], [2.0, 4.0], [2.0, 3.0, 1.0], torch.ones(2), [torch.tensor(2.0), torch.ones(1)], float("nan")],
    ids=repr,
)
def test_another_result_is_not_right_however_small(gpu, result):
    found = within({"peak": MiB}, lambda: result, same_as=[2.0, 3.0], device=gpu)
    assert not found["the result is the same: False"]


@pytest.mark.parametrize("result", [[2, 3], (2.0, 3.0), [torch.tensor(2.0, requires_grad=True), 3.0]], ids=repr)
def test_numbers_and_tensors_of_one_value_are_the_same(gpu, result):
    assert all(within({"peak": 0}, lambda: result, same_as=[2.0, 3.0], device=gpu).values())


def test_the_learners_error_is_the_learners(gpu):
    def wrong():
        return undefined  # noqa: F821

    with pytest.raises(NameError, match="undefined"):
        within({"peak": MiB}, wrong, same_as=1, device=gpu)


def test_what_is_held_now(gpu):
    before = held(gpu)
    one = [torch.ones(1 << 18, device=gpu.torch)]
    one.append(one)  # garbage in a cycle, once `one` is gone
    assert held(gpu) == before + MiB
    assert held_within(before, gpu, above=before) == {"held: measured 1.00 MiB, wanted at most 0 B": False}
    del one
    assert held_within(before, gpu, above=before) == {"held: measured 0 B, wanted at most 0 B": True}


def test_what_an_error_holds_is_hidden(gpu, monkeypatch):
    def fails():
        pinned = torch.ones(1 << 18, device=gpu.torch)
        raise ValueError(pinned.shape)

    with pytest.raises(ValueError, match="262144") as caught:
        fails()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    assert nothing_hidden() == {"held without a variable: measured 1.00 MiB, wanted at most 0 B": False}
    monkeypatch.setattr(sys, "last_value", None)
    assert list(nothing_hidden().values()) == [True]


def test_sizes_of_the_lesson():
    assert [size(n) for n in (6144, MiB, 9 * MiB, 50 * MiB)] == ["a few KiB", "a few MiB", "a few MiB", "tens of MiB"]
