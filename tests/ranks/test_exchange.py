"""The kernels by which CUDA GPUs exchange small tensors, on ranks that share memory of the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import exchanges
from tests.ranks.pool import Ranks
from toolkit.ops import exchange
from toolkit.trace.nccl import SUM_OF_SENT


def test_limits_are_those_of_the_kernels() -> None:
    from toolkit.kernels import exchange as kernels

    assert (exchange.MOST_BYTES, exchange.DTYPES) == (kernels.MOST_BYTES, kernels.DTYPES)
    assert kernels.SENT_BYTES.value == exchange.SENT_BYTES
    assert kernels.one_shot_all_reduce_of_sent.__name__ == SUM_OF_SENT


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
def test_many_exchanges_in_a_row(ranks: Ranks, tmp_path: Path, count: int) -> None:
    assert ranks.results(count, exchanges.sums, str(tmp_path), count, 12) == [[]] * count


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs them compiled")
def test_products_send_their_results(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.results(2, exchanges.sent, str(tmp_path), 2, 5) == [[]] * 2
