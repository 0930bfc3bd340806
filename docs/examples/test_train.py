"""Tests of the copies and the memory of `train.py`. They need no GPU. Install the toolkit and pytest, and run `pytest`."""

from __future__ import annotations

import pytest
import torch
from model import Model
from train import batches, evaluate, train


@pytest.fixture
def model(toolkit_gpu):
    torch.manual_seed(0)
    return Model().to(toolkit_gpu.torch)


@pytest.mark.copies(h2d=8, d2h=1, pageable=0, waits=1)
def test_each_batch_is_uploaded_once_and_one_loss_is_read(model, toolkit_gpu):
    train(model, batches(4), toolkit_gpu.torch)


@pytest.mark.copies
@pytest.mark.peak_memory
def test_training_copies_and_holds_no_more_than_before(model, toolkit_gpu):
    train(model, batches(4), toolkit_gpu.torch)


@pytest.mark.copies(h2d=4, d2h=1)
@pytest.mark.peak_memory("2.5 MiB")
def test_evaluation_keeps_no_graph(model, toolkit_gpu, toolkit_trace):
    data = batches(4)
    with toolkit_trace as trace:
        evaluate(model, data, toolkit_gpu.torch)
    assert trace.copies()["kernels"].sum() > 0
