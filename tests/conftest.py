"""What all tests share: last lines that say what was not run, and how to get it."""

from __future__ import annotations

import gc
import shutil

import pytest
import torch

BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # as tests/browser looks for them


@pytest.fixture
def empty_card():
    """The virtual H200 without what other tests left to the garbage collector and in the allocator's cache."""
    from toolkit.devices.base import open_device

    gc.collect()
    gpu = open_device("virtual:h200")
    torch.get_device_module(gpu.torch).empty_cache()
    return gpu


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not torch.cuda.is_available():
        terminalreporter.write_line("gpu: not run. The tests in tests/gpu need a CUDA GPU")
    if not shutil.which("g++"):
        terminalreporter.write_line("exports: not run. They are compiled with g++: apt install g++, then make test again")
    if not any(map(shutil.which, BROWSERS)):
        terminalreporter.write_line(
            "browser: not run. They drive JupyterLab in Chromium: apt install chromium, then make test again"
        )
