"""Tests of the copies and the memory of `serve.py`."""

from __future__ import annotations

import pytest
import torch
from model import Model
from serve import reply, serve


@pytest.fixture(scope="module")
def model(toolkit_gpu):
    torch.manual_seed(0)
    return Model().to(toolkit_gpu.torch)


@pytest.mark.copies(h2d=1, d2h=1)
def test_a_reply_uploads_its_prompt_and_is_read_once(model, toolkit_gpu):
    assert len(reply(model, [1, 2, 3], 8, toolkit_gpu.torch)) == 8


@pytest.mark.copies
@pytest.mark.peak_memory
def test_serving_copies_and_holds_no_more_than_before(model, toolkit_gpu):
    serve(model, [[1, 2, 3], [4, 5], [6, 7, 8, 9]], 16, toolkit_gpu.torch)
