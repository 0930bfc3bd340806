"""Tests of the Lab's Tune panel without a browser or a compiler: lists, exploring, canceling, errors."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from tuned import every_verdict

from toolkit.core.errors import CancelledError, DeviceError
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.ui.lab import tune_panel as module
from toolkit.ui.lab.app import Lab

KERNELS = {name: SimpleNamespace(known={f"{name} large": 1, f"{name} small": 2}) for name in ("a_matmul", "a_norm")}


class Explorer:
    """A fake `tk.tune.explore` that advances step by step, or waits until it is canceled."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, tuple[str, ...]]] = []
        self.waits = False
        self.under_way = threading.Event()

    def __call__(self, kernel, shape, gpus, progress, cancel):
        self.asked.append((kernel, shape, tuple(gpus)))
        progress(1, 12, "block=<64> for sm_90")
        self.under_way.set()
        if self.waits:
            assert cancel.wait(10)
            raise CancelledError("Compiling", "it was cancelled", "Results so far are stored; run it again to resume")
        progress(12, 12, "")
        return every_verdict()


@pytest.fixture
def explorer(monkeypatch: pytest.MonkeyPatch) -> Explorer:
    made = Explorer()
    monkeypatch.setattr(module.tune, "kernels", lambda: KERNELS)
    monkeypatch.setattr(module.tune, "explore", made)
    return made


@pytest.fixture
def app(explorer: Explorer) -> Lab:
    lab = Lab()
    assert lab.tune.explore_button.disabled
    lab.tune.list_button.click()
    assert lab.wait(10)
    return lab


def test_kernels_shapes_and_gpus_are_offered(app: Lab) -> None:
    panel = app.tune
    assert panel.kernel_field.options == ("a_matmul", "a_norm")
    assert panel.shape_field.options == ("a_matmul large", "a_matmul small")
    assert panel.shape_field.value == "a_matmul large"
    panel.kernel_field.value = "a_norm"
    assert panel.shape_field.options == ("a_norm large", "a_norm small")
    assert panel.shape_field.value == "a_norm large"
    assert set(panel.gpus_field.value) < set(CATALOGUE) == set(panel.gpus_field.options)
    assert not panel.explore_button.disabled
    assert app.work.cancel_button.disabled


def test_listing_again_keeps_what_was_chosen(app: Lab) -> None:
    panel = app.tune
    panel.kernel_field.value = "a_norm"
    panel.shape_field.value = "a_norm small"
    panel.list_button.click()
    assert app.wait(10)
    assert (panel.kernel_field.value, panel.shape_field.value) == ("a_norm", "a_norm small")


def test_exploring_shows_the_table(app: Lab, explorer: Explorer) -> None:
    panel = app.tune
    panel.gpus_field.value = ("l4", "h200")
    panel.shape_field.value = "a_matmul small"
    panel.explore_button.click()
    assert app.wait(10)
    assert explorer.asked == [("a_matmul", "a_matmul small", ("l4", "h200"))]
    assert 'class="tk-tuning"' in panel.view.value
    assert panel.tuning is not None
    assert "Done in" in panel.status.value
    panel.kernel_field.value = "a_norm"
    assert "<b>a_matmul</b>, a_matmul small" in panel.status.value
    assert app.work.bar.value == 1.0
    assert app.work.bar.layout.display == "none"


def test_cancelling_keeps_what_was_compiled(app: Lab, explorer: Explorer) -> None:
    explorer.waits, panel = True, app.tune
    panel.explore()
    assert explorer.under_way.wait(10)
    assert "&lt;64&gt;" in panel.status.value
    assert panel.explore_button.disabled
    assert app.loading.load_button.disabled
    app.work.cancel_button.click()
    assert app.wait(10)
    assert "Cancelled. Results so far are stored" in panel.status.value
    assert app.error is None
    assert not panel.explore_button.disabled


def test_errors_are_told_in_the_panel(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    app.tune.gpus_field.value = ()
    app.tune.explore()
    assert app.wait(10)
    assert "no GPU is chosen" in app.tune.status.value

    def absent() -> None:
        raise DeviceError("the kernels", "Triton isn't installed", "On Linux: pip install triton")

    monkeypatch.setattr(module.tune, "kernels", absent)
    fresh = Lab()
    fresh.tune.explore()  # in a cell; its button is disabled
    assert fresh.wait(10)
    assert "no kernel is chosen" in fresh.tune.status.value
    fresh.tune.list_kernels()
    assert fresh.wait(10)
    assert "pip install triton" in fresh.tune.status.value
    assert fresh.tune.explore_button.disabled
    assert fresh.loading.status.value.startswith("Nothing is loaded.")
