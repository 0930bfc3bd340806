"""Tests of preferring a share of shared memory, with a driver that only writes down what it is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from toolkit.core.errors import DeviceError
from toolkit.gpu.cuda import carveout
from toolkit.gpu.cuda.carveout import prefer_shared


class Compiled:
    """One of Triton's compiled kernels."""

    function = 17


class Driver:
    """Stands for `cuda.bindings.driver`: `asked` has the shares, and `error` is what CUDA returns."""

    CUfunction = int
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout")

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int]] = []
        self.error = 0

    def cuFuncSetAttribute(self, *asked: Any) -> tuple[int]:
        self.asked.append(asked)  # type: ignore[arg-type]
        return (self.error,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(carveout, "bindings", lambda name: {"driver": made}[name])
    return made


def test_cuda_is_asked_only_when_the_share_changes(driver: Driver) -> None:
    kernel, other = Compiled(), Compiled()
    for share in (-1, 50, 50, 0, -1, -1):
        prefer_shared(kernel, share)
    prefer_shared(other, 50)
    assert driver.asked == [(17, "carveout", share) for share in (50, 0, -1, 50)]


def test_without_cuda_bindings_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise DeviceError("capturing a graph", "the package cuda-bindings isn't installed", "Install it")

    monkeypatch.setattr(carveout, "bindings", missing)
    prefer_shared(Compiled(), 50)


def test_a_share_that_cuda_refuses_is_an_error_each_time(driver: Driver) -> None:
    kernel, driver.error = Compiled(), 1
    for _ in range(2):
        with pytest.raises(DeviceError, match="preferring 101 % of shared memory: CUDA says 1"):
            prefer_shared(kernel, 101)
    assert len(driver.asked) == 2
