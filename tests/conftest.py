"""Settings and fixtures that all tests share, and a summary of the tests that could not run."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# PyTorch reads it when it is imported, here and in the processes that tests start. The tests' tensors are small: with several
# threads, tests/decode takes five times as long.
os.environ["OMP_NUM_THREADS"] = "1"

# AOTInductor reads these in the processes that compile exports. The code that calls a piece's kernels is compiled without
# optimization and line numbers, which takes a third less time. The kernels themselves are compiled as ever.
os.environ |= {"AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL": "O0", "AOT_INDUCTOR_ENABLE_LINE_TABLES": "0"}

# Exports and the tuner start one process per core, each of which first imports PyTorch and its compiler for up to ten seconds.
# With one core for each process of pytest-xdist, they start only one.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})

import torch

from tests.interpreter import patch_once_per_launch

if TYPE_CHECKING:
    from toolkit.ranks.cluster import Cluster

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is imported

FIRST_PORT, PORTS = 20_000, 1_000  # per process of pytest-xdist; systems give other programs ports above these
SHOWN_S = 10  # tests that take longer are printed when they end
BROWSERS = ("chromium", "chromium-browser", "google-chrome")  # as tests/browser looks for them


@pytest.fixture(scope="session")
def own_ports() -> Iterator[None]:
    """Choose the ports of Jupyter kernels from some that no other process of pytest-xdist uses.

    A kernel opens its ports after they were found free, so kernels that start at once could be given the same ones.
    """
    from jupyter_client.connect import LocalPortCache

    first = FIRST_PORT + PORTS * int((worker or "gw0").removeprefix("gw"))
    numbers = itertools.cycle(range(first, first + PORTS))

    def free_port(self: object, ip: str) -> int:
        for port in numbers:
            with socket.socket() as found, suppress(OSError):  # which says that another program has the port
                found.bind((ip, port))
                return port
        raise AssertionError("unreachable")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalPortCache, "find_available_port", free_port)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that have slow tests, so that no process still runs one of these when the others have ended."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


class LongTests:
    """Prints each test that took longer than SHOWN_S when it ends, so that a run that is killed has shown them."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.duration > SHOWN_S:
            self.terminal.write_line(f"\n{report.duration:.0f} s {report.when} {report.nodeid}")


@pytest.hookimpl(trylast=True)  # after the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    if terminal := config.pluginmanager.getplugin("terminalreporter"):  # processes of pytest-xdist have none
        config.pluginmanager.register(LongTests(terminal))


def pytest_runtest_setup(item: pytest.Item) -> None:
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:  # imported by this test's module, or by an earlier test
        patch_once_per_launch(interpreter)


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Exempt all existing objects from garbage collection, so that collections during the module's tests are fast."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def clusters() -> Iterator[list[Cluster]]:
    """A list for the clusters that the tests of a module open. They are closed at its end."""
    opened: list[Cluster] = []
    yield opened
    for cluster in opened:
        cluster.close()


@pytest.fixture
def empty_card():
    """Return the virtual H200 after freeing the garbage of other tests and the allocator's cache."""
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
    """Return the folder in which all processes of a test run keep the compiled pieces of exports.

    Set TOOLKIT_TEST_EXPORTS to a folder to keep them between runs.
    """
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    return Path(os.environ.get("TOOLKIT_TEST_EXPORTS") or root / "exports-cache")


def cache_of_lessons(factory: pytest.TempPathFactory) -> Path:
    """Return a new cache for lessons, apart from the user's, that has the compiled pieces of `exports_cache`."""
    cache, compiled = factory.mktemp("cache"), exports_cache(factory) / "compiled"
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "compiled").symlink_to(compiled)
    return cache


@contextmanager
def compiling_alone(cache: Path) -> Iterator[None]:
    """Hold a lock on the cache, so that two processes of a run do not compile the same pieces."""
    import fcntl

    cache.mkdir(parents=True, exist_ok=True)
    with open(cache / "compiling", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def without_permission(folder: Path, monkeypatch: pytest.MonkeyPatch, mode: int = 0) -> Iterator[None]:
    """Give a folder this mode, and run the block in its parent folder; as another user if this one is root."""
    folder.chmod(mode)
    folder.parent.chmod(0o755)
    monkeypatch.chdir(folder.parent)  # its parents may be closed to other users
    root = os.geteuid() == 0
    try:
        if root:  # who may read everything
            os.seteuid(65534)
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


@pytest.fixture
def python_handles_interrupts() -> Iterator[None]:
    """A process that a shell starts in the background ignores SIGINT, and so do its children."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
