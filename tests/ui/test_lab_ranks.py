"""The Lab on a cluster of two virtual GPUs, without a browser: loading, generating, planning, cancelling, failing, closing."""

from __future__ import annotations

import html
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from html import unescape
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from toolkit.core.errors import ModelError, RankError
from toolkit.core.extras import install_command
from toolkit.ui.lab.app import Lab
from toolkit.ui.lab.load_panel import _source
from toolkit.ui.lab.plan_panel import ranks_of, target_of

SOON_S = 150  # on a machine that is busy with other tests, where a cluster has taken 30 s to open


@pytest.fixture(scope="module")
def app() -> Iterator[Lab]:
    lab = Lab(device="virtual:2xh200")
    lab.decoding.tokens_field.value = 4
    yield lab
    lab.close()


def done(app: Lab) -> Lab:
    assert app.wait(SOON_S)
    return app


@pytest.fixture
def loaded(app: Lab) -> Lab:
    """The Lab with a model, as most tests leave it. But pytest-xdist hands tests out in any order."""
    if app.model is None:
        app.load()
        assert done(app).error is None
    return app


@pytest.fixture
def compared(loaded: Lab) -> Lab:
    """The Lab with two runs."""
    if len(loaded.runs) < 2:
        loaded.generate()
        assert done(loaded).error is None
    return loaded


def begins(begun: Path, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Say on a rank that a function begins, and call it."""
    begun.with_name(f"begun-{dist.get_rank()}").touch()
    return function(*args, **options)


def wait_until_both_have_begun(folder: Path) -> None:
    """Wait for both ranks: a rank that has not begun can't be interrupted."""
    ends = time.monotonic() + SOON_S
    while len(list(folder.iterdir())) < 2:
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_start_opens_a_cluster_and_compares(app: Lab) -> None:
    app.decoding.tokens_field.value = 4
    app.loading.start_button.click()
    assert done(app).error is None
    assert app.cluster is not None
    assert app.cluster.ranks == 2
    assert "demo/qwen3</b> is on <b>2 x virtual:h200" in app.loading.status.value
    assert "demo/qwen3 on 2 x virtual:h200" in app.state.value
    assert app.loading.model_view.value.count("float32</td>") == 2
    assert list(app.runs) == ["roundtrip", "double-buffered"]
    for entry in app.history.entries.values():
        assert sorted(set(entry.trace["rank"])) == [0, 1]
        assert entry.setup == "cluster = tk.cluster('virtual:2xh200')\nmodel = tk.load('demo/qwen3', cluster=cluster)"
    assert app.decoding.table.value.count("2 x virtual:h200") == 2
    assert app.decoding.output.value.count("Paris") == 2
    assert len(app.decoding.timeline_box.children) == 1
    assert "<b>2 x virtual:h200</b> now, by rank" in app.memory.now.value
    assert "in the processes of the ranks" in app.memory.note.value
    assert app.loading.close_button.layout.display == ""


def test_the_code_does_the_same(compared: Lab) -> None:
    app = compared
    shown: list[object] = []
    scope = {"display": shown.append}
    exec(dict(app.decoding.code.snippets)["Generate"], scope)
    assert {name: run.tokens for name, run in shown[0].runs.items()} == {n: run.tokens for n, run in app.runs.items()}
    scope["cluster"].close()


def test_the_plan_follows_the_cluster(app: Lab) -> None:
    assert (app.plan.target_field.value, app.plan.ranks_field.value) == ("h200", 2)
    assert (target_of("2xcuda"), ranks_of("2xcuda")) == ("cuda", 2)
    assert (target_of("virtual:8GiB"), ranks_of("virtual:8GiB"), ranks_of("virtual:99xh200")) == ("virtual:8GiB", 1, 64)
    assert "tensor_parallel=2" in dict(app.plan.code.snippets)["Plan"]
    assert _source("virtual:h200", "demo/qwen3", None) == "model = tk.load('demo/qwen3', device='virtual:h200')"


def test_errors_of_ranks_keep_the_cluster(loaded: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    app = loaded
    pids, model = app.cluster.pids, app.model
    app.loading.scheme_field.value = "q4_k_m"
    app.load()
    assert isinstance(done(app).error, ModelError)
    assert "128 of its 256 columns" in app.loading.status.value
    assert app.model is model, "what the ranks can't divide is refused before"
    monkeypatch.setattr("toolkit.ui.lab.load_panel._check_load", lambda *_: None)
    app.load()
    assert isinstance(done(app).error, RankError)
    assert "128 of its 256 columns" in app.loading.status.value
    assert "Use fewer ranks" in app.loading.status.value
    assert app.model is None
    app.loading.scheme_field.value = ""
    app.load()
    assert done(app).error is None
    assert app.cluster.pids == pids
    app.memory.set_button.click()
    assert 'lab.cluster.budget("8 GiB")' in unescape(done(app).memory.budget_status.value)
    app.cluster.budget("8 GiB")
    with pytest.raises(RankError, match="a budget of 1 B"):
        app.cluster.budget(1)
    app.cluster.budget(None)


def test_cancel_interrupts_the_ranks(compared: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app, run_as = compared, compared.cluster.run_as

    def run_as_told(doing: str, cancel: threading.Event | None, function: Any, *args: Any, **options: Any) -> list[Any]:
        return run_as(doing, cancel, begins, tmp_path / "begun", function, *args, **options)

    monkeypatch.setattr(app.cluster, "run_as", run_as_told)
    app.decoding.tokens_field.value = 2000
    try:
        app.generate()
        wait_until_both_have_begun(tmp_path)
        app.cancel()
        assert done(app).error is None
    finally:
        app.decoding.tokens_field.value = 4
    assert "Cancelled. Start it again: the cluster is still open" in app.decoding.status.value


def test_cancel_ends_a_look_at_ranks_that_do_not_answer(loaded: Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    app, cluster, begun = loaded, loaded.cluster, tmp_path / "begun"
    memory_now = cluster.memory_now

    def silent(cancel: threading.Event | None = None) -> object:
        if cancel is None:
            return memory_now()
        return cluster.run_as("sleeping", cancel, begins, begun, time.sleep, 2 * SOON_S)

    monkeypatch.setattr(cluster, "memory_now", silent)
    app.memory.refresh_button.click()
    wait_until_both_have_begun(tmp_path)
    assert not app.work.cancel_button.disabled
    app.work.cancel_button.click()
    assert done(app).error is None
    assert "Cancelled. Start it again: the cluster is still open" in app.memory.budget_status.value
    assert "now, by rank" in app.memory.now.value
    monkeypatch.undo()
    app.memory.refresh_button.click()
    assert done(app).memory.budget_status.value == ""


def test_a_killed_rank_closes_the_cluster(loaded: Lab) -> None:
    app = loaded
    os.kill(app.cluster.pids[1], signal.SIGKILL)
    app.generate()
    assert "rank 1 was killed by signal 9" in str(done(app).error)
    assert "rank 1 was killed" in app.decoding.status.value
    assert "Press Load to open a new one" in app.loading.status.value
    assert (app.cluster, app.model, app.loading.close_button.layout.display) == (None, None, "none")
    assert "no model is loaded" in app.state.value


def test_looking_again_finds_a_rank_that_has_ended(app: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    app.decoding.tokens_field.value = 2
    app.generate()
    cluster = done(app).cluster
    assert "lab.model" in app.decoding.status.value
    entered, leave = threading.Event(), threading.Event()
    memory_now = cluster.memory_now

    def late(cancel: threading.Event | None = None) -> object:
        entered.set()
        assert leave.wait(SOON_S)
        return memory_now(cancel)

    app.loading.model_field.value = "demo/gemma4"  # for the next load
    assert "demo/qwen3" in app.decoding.code.snippets[0][1]
    monkeypatch.setattr(cluster, "memory_now", late)
    app.memory.refresh_button.click()  # returns at once, although the ranks answer late
    assert entered.wait(SOON_S)
    assert app.busy
    assert app.memory.refresh_button.disabled
    os.kill(cluster.pids[1], signal.SIGKILL)
    leave.set()
    assert "rank 1 was killed by signal 9" in done(app).memory.budget_status.value
    assert "Press Load to open a new one" in app.loading.status.value
    assert (app.cluster, app.model) == (None, None)
    assert not app.memory.refresh_button.disabled
    assert "No model is loaded. Generate loads <b>demo/gemma4</b>" in app.decoding.status.value
    assert len(app.runs) == 2  # they stay
    assert "demo/gemma4" in app.decoding.code.snippets[0][1]
    app.loading.model_field.value = "demo/qwen3"


def test_another_lab_and_close_end_the_processes(app: Lab) -> None:
    app.load()
    first = done(app).cluster
    other = Lab(device="2xcpu")
    other.load()
    assert done(other).error is None
    assert first.closed
    assert "another Lab" in app.loading.status.value
    processes = [psutil.Process(pid) for pid in other.cluster.pids]
    other.close()
    assert not psutil.wait_procs(processes, timeout=SOON_S)[1]


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(device="2xcuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    lab.load()
    assert "this machine has 0 CUDA GPUs" in done(lab).loading.status.value
    assert "Choose &quot;virtual:2xh200&quot;" in lab.loading.status.value
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    lab.loading.device_field.value = "virtual:2xh200"
    lab.load()
    assert "ipyparallel is not installed" in done(lab).loading.status.value
    assert html.escape(install_command("ranks")) in lab.loading.status.value
