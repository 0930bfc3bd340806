"""Tests of the exchange of CUDA that need no GPU: its launches are replaced."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.ops import Partial, collectives, exchange


def test_without_memory_for_an_operation_what_was_sent_is_taken_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a later operation would take it."""
    ran: list[Tensor] = []

    def no_memory(inbox: Sequence[Tensor]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(collectives, "_launches_directly", lambda share: True)
    monkeypatch.setattr(exchange, "all_reduce_sent", lambda share, ranks: ran.append(share))
    monkeypatch.setattr(exchange, "announce", lambda share, ranks: None)
    x = torch.ones(1, 5)
    partial = Partial(x, 2, True, (torch.zeros(1), torch.zeros(1)))
    with pytest.raises(torch.OutOfMemoryError):
        partial.taken_by(no_memory)
    assert list(map(id, ran)) == [id(x)]
    assert partial.sum() is x
    assert len(ran) == 1, "it is taken once"

    partial = Partial(x, 2, True, (torch.zeros(1), torch.zeros(1)))
    assert partial.taken_by(lambda inbox: len(inbox)) == 2
    assert not partial.is_received
    with pytest.raises(ModelError, match="received it"):
        partial.sum()
    assert len(ran) == 1
