"""What the tests of exports share: one cache of compiled pieces for all workers, and one package of each demo model."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import toolkit as tk
from tests.conftest import compiling_alone, exports_cache

CONTEXT = 512
collect_ignore_glob = [] if shutil.which("g++") else ["test_*.py"]  # tests/conftest.py says so at the end


WAITS_S = 600  # for a package that another worker compiles, on a machine that is busy


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(WAITS_S))


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
    """Pieces are compiled once for all tests, in a folder of this run."""
    before = os.environ.get("TOOLKIT_CACHE")
    cache = exports_cache(tmp_path_factory)
    cache.mkdir(parents=True, exist_ok=True)
    os.environ["TOOLKIT_CACHE"] = str(cache)
    yield
    if before is None:
        del os.environ["TOOLKIT_CACHE"]
    else:
        os.environ["TOOLKIT_CACHE"] = before


@pytest.fixture(scope="session")
def demo():
    return tk.load("demo/qwen3", device="cpu", progress=False)


@pytest.fixture(scope="session")
def model(demo, exported):
    """demo/qwen3, whose pieces are compiled by now, so that no test compiles what another one is compiling."""
    return demo


@pytest.fixture(scope="session")
def exported(demo, compiled, tmp_path_factory):
    """A package of demo/qwen3. Not to be changed: `package` is a copy. One worker compiles it, the others wait for that."""
    with compiling_alone(Path(os.environ["TOOLKIT_CACHE"])):
        return tk.export(demo, tmp_path_factory.mktemp("package") / "qwen3", context=CONTEXT, progress=False)


@pytest.fixture
def package(exported, tmp_path):
    """A copy of it, trusted, to be damaged at will."""
    return shutil.copytree(exported.path, tmp_path / "package")
