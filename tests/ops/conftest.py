"""Speeds up the interpreter in tests of operations, whose kernels `tests/kernels` checks one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def no_overflow_checks() -> Iterator[None]:
    """Leave out the interpreter's checks of integers for overflow, which take 40 % of the time of small kernels."""
    if torch.cuda.is_available():
        yield
        return
    builder = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    before = builder.options
    builder.options = replace(before, sanitize_overflow=False)
    yield
    builder.options = before
