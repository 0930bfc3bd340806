"""What all tests share: last lines that say what was not run, and how to get it."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # as tests/browser looks for them


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What is there before a module's tests stays: their garbage is looked for among what they made, not in all of PyTorch."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def empty_card():
    """The virtual H200 without what other tests left to the garbage collector and in the allocator's cache."""
    from toolkit.gpu.opening import open_device

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


def exports_cache(factory: pytest.TempPathFactory) -> Path:
    """Where all tests of a run, in all of its processes, keep the pieces of exports that they compile.

    TOOLKIT_TEST_EXPORTS names a folder that outlives the run.
    """
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    return Path(os.environ.get("TOOLKIT_TEST_EXPORTS") or root / "exports-cache")


@contextmanager
def compiling_alone(cache: Path) -> Iterator[None]:
    """No other process of this run compiles into that cache meanwhile: both would compile the same pieces."""
    import fcntl

    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "compiling", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
