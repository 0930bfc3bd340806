"""Tests of the exchange of CUDA that need no GPU: its launches are replaced."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.kernels import exchange as kernels
from toolkit.ops import exchange


def test_without_memory_for_a_sum_what_was_sent_is_taken_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a later sum would take it."""
    ran: list[tuple[Tensor, Tensor]] = []

    def no_memory(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def sum_of_sent(inbox: Any, x: Tensor, out: Tensor) -> Any:
        return SimpleNamespace(run=lambda: ran.append((x, out)))

    monkeypatch.setattr(exchange, "links", lambda device: SimpleNamespace(inbox=SimpleNamespace(rank=0)))
    monkeypatch.setattr(exchange, "_run", lambda launch, note, key: launch.run())
    monkeypatch.setattr(kernels, "sum_of_sent", sum_of_sent)
    monkeypatch.setattr(torch, "empty_like", no_memory)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    x = torch.ones(5)
    for sent in (False, True):
        with pytest.raises(torch.OutOfMemoryError):
            exchange.all_reduce(x, 2, sent)
    assert ran == [(x, x)]
