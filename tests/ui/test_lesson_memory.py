"""Tests of the memory lesson's checks: solutions are judged by measured bytes and equal results, not by their code."""

import sys

import pytest
import torch

import toolkit as tk
from toolkit.ui.lessons.memory_checks import check_held, check_hidden, check_memory, held

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

    judged = [check_memory(run, {"peak": 4 * MiB}, same_as=whole(), hint="in parts", why="parts") for run in (whole, smaller)]
    assert [verdict.right for verdict in judged] == [False, True]
    assert "wrong: peak - measured 8.00 MiB, allowed 4.00 MiB" in repr(judged[0])
    assert repr(judged[0]).endswith("Hint: in parts")
    assert "right: peak - measured 1.00 MiB, allowed 4.00 MiB" in repr(judged[1])
    assert repr(judged[1]).endswith("\nparts")


def test_what_the_result_holds_counts_as_kept(gpu):
    def kept():
        return [torch.ones(1 << 18, device=gpu.torch) for _ in range(3)]

    expected = [one.cpu() for one in kept()]
    assert check_memory(kept, {"kept": 3 * MiB}, same_as=expected, device=gpu).right
    verdict = check_memory(kept, {"peak": 4 * MiB, "kept": 2 * MiB}, same_as=expected, device=gpu)
    assert repr(verdict).splitlines() == [
        "right: peak - measured 3.00 MiB, allowed 4.00 MiB",
        "wrong: kept - measured 3.00 MiB, allowed 2.00 MiB",
    ]


@pytest.mark.parametrize(
    "result",
    [None, "two", 2, [2.0], [2.0, 4.0], [2.0, 3.0, 1.0], torch.ones(2), [torch.tensor(2.0), torch.ones(1)], float("nan")],
    ids=repr,
)
def test_another_result_is_not_right_however_small(gpu, result):
    verdict = check_memory(lambda: result, {"peak": MiB}, same_as=[2.0, 3.0], device=gpu, hint="compare", why="because")
    assert not verdict.right
    assert "wrong: the result" in repr(verdict)
    assert "because" not in repr(verdict)


@pytest.mark.parametrize("result", [[2, 3], (2.0, 3.0), [torch.tensor(2.0, requires_grad=True), 3.0]], ids=repr)
def test_numbers_and_tensors_of_one_value_are_the_same(gpu, result):
    assert check_memory(lambda: result, {"peak": 0}, same_as=[2.0, 3.0], device=gpu).right


def test_the_learners_error_is_the_learners(gpu):
    def wrong():
        return undefined  # noqa: F821

    with pytest.raises(NameError, match="undefined"):
        check_memory(wrong, {"peak": MiB}, same_as=1, device=gpu)


def test_what_is_held_now(gpu):
    before = held(gpu)
    one = [torch.ones(1 << 18, device=gpu.torch)]
    one.append(one)  # garbage in a cycle, once `one` is gone
    assert held(gpu) == before + MiB
    assert not check_held(gpu, before, hint="let go").right
    del one
    verdict = check_held(gpu, before, hint="let go", why="gone")
    assert verdict.right
    assert repr(verdict).endswith("gone")


def test_what_an_error_holds_is_hidden(gpu, monkeypatch):
    def fails():
        pinned = torch.ones(1 << 18, device=gpu.torch)
        raise ValueError(pinned.shape)

    with pytest.raises(ValueError, match="262144") as caught:
        fails()
    monkeypatch.setattr(sys, "last_value", caught.value, raising=False)
    assert "wrong: held without a variable - measured 1.00 MiB, allowed 0 B" in repr(check_hidden(hint="release"))
    monkeypatch.setattr(sys, "last_value", None)
    assert check_hidden(why="gone").right
