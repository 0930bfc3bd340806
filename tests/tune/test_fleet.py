"""Tests of tuning on a cluster: its processes share the configs, and those of a process that ends are timed by others."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from toy import FAULTY, MEDIUM, ODD, OVERSIZED, SMALL, TOY, fresh_cache

import toolkit as tk
from toolkit import tune
from toolkit.core.errors import CancelledError, RankError
from toolkit.core.progress import Counter
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.kernels.base import Config, Kernel, Shape, Tensors
from toolkit.ranks.cluster import Cluster
from toolkit.tune import fleet, lookup, store
from toolkit.tune.cards import Card
from toolkit.tune.store import DeviceFacts, read_tuned, words
from toolkit.tune.timing import Timing
from toolkit.tune.tuner import Tuner

H200 = Card("h200", CATALOGUE["h200"], DeviceFacts("NVIDIA H200", "9.0", 132, 1, 1980, 3201), index=0)
RIGHT = [SMALL, MEDIUM, OVERSIZED]


def opened() -> Cluster:
    """Open a cluster while the port that torchrun uses is taken: all ports are chosen by the system."""
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        with suppress(OSError):  # another program has it
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        return tk.cluster("virtual:3xh200", silent_s=3)


@pytest.fixture
def some(clusters: list[Cluster]) -> Cluster:
    """The cluster of the test before, perhaps without some of its processes."""
    if not clusters or clusters[-1].closed:
        clusters.append(opened())
    return clusters[-1]


@pytest.fixture
def three(clusters: list[Cluster], some: Cluster) -> Cluster:
    """Three ranks for all tests, opened again after tests that end some: pytest-xdist hands tests out in any order."""
    if len(some._engines.alive_ranks(range(3))) < 3:
        some.close()
        clusters.append(opened())
    return clusters[-1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(fleet, "PART", 1)
    lookup.forget()
    return fresh_cache(tmp_path, monkeypatch)


def clock(kernel: Kernel, shape: Shape, config: Config, inputs: Tensors, best_ns: float) -> Timing:
    """Note who timed which config, and take as many µs as its block has rows. Processes that time MEDIUM may end."""
    folder = Path(os.environ["TOOLKIT_CACHE"])
    with open(folder / "timed", "a") as file:
        file.write(f"{os.getpid()} {words(config)}\n")
    for name in ("SIGKILL", "SIGSTOP"):
        if config == MEDIUM and (folder / name).exists():
            (folder / name).unlink()
            os.kill(os.getpid(), getattr(signal, name))
    return Timing(1e3 * config["block_m"], 100.0, cold=True)


def with_clock() -> Tuner:
    return Tuner(H200, torch.device("cpu"), clock)


def timed(folder: Path) -> list[tuple[int, str]]:
    lines = (folder / "timed").read_text().splitlines()
    return [(int(process), config) for process, _, config in (line.partition(" ") for line in lines)]


def tuned(cluster: Cluster, configs: list[Config], steps: Counter | None = None, again: bool = False) -> tk.tune.Tuning:
    steps = steps or Counter("tuning", False, None, "")
    return tune.joined(fleet.tune_on(cluster, [(TOY, ODD)], configs, steps, again, with_clock))


def test_without_gpus_nothing_is_timed(three: Cluster) -> None:
    table = tune.warm([(TOY, ODD)], configs=[SMALL], progress=False, cluster=three)
    assert [row.clock for row in table.rows] == ["modelled"]
    assert "Nothing was timed" in table.notes[0]


def test_processes_share_the_configs_and_the_file(three: Cluster, folder: Path) -> None:
    heard: list[tuple[int, int]] = []
    steps = Counter("tuning", lambda done, total, what: heard.append((done, total)), None, "")
    table = tuned(three, [*RIGHT, *FAULTY], steps)
    assert [row.verdict for row in table.rows] == ["ok", "ok", "ok", "wrong", "wrong", "failed"]
    assert [row.ns for row in table.rows[:3]] == [16e3, 32e3, 128e3]
    assert sorted(config for _, config in timed(folder)) == sorted(map(words, RIGHT))
    assert {process for process, _ in timed(folder)} <= set(three.pids)
    assert heard[-1] == (6, 6)
    kept = read_tuned("h200", H200.facts)
    assert kept is not None
    assert len(kept.rows) == 6
    assert tuned(three, [*RIGHT, *FAULTY]).rows == table.rows
    assert len(timed(folder)) == 3  # the second call has timed nothing
    tuned(three, [SMALL], again=True)
    assert len(timed(folder)) == 4


def test_a_cancelled_call_leaves_the_cluster_open(three: Cluster) -> None:
    def stop(done: int, total: int, what: str) -> None:
        if what.startswith("timing"):
            raise CancelledError("tuning", "it was cancelled", "Call it again")

    with pytest.raises(CancelledError):
        tuned(three, RIGHT, stop)  # type: ignore[arg-type]
    assert three.run(os.getpid) == three.pids
    assert [(row.verdict, row.reason) for row in tuned(three, RIGHT).rows] == [("ok", "")] * 3


def test_configs_of_processes_that_end_are_timed_by_another(three: Cluster, folder: Path) -> None:
    """One is killed, and another one stopped: it counts as dead, as it doesn't answer."""
    (folder / "SIGKILL").touch()
    (folder / "SIGSTOP").touch()
    table = tuned(three, RIGHT)
    assert [row.verdict for row in table.rows] == ["ok"] * 3
    processes = [process for process, config in timed(folder) if config == words(MEDIUM)]
    assert sorted(processes) == sorted(three.pids)
    kept = read_tuned("h200", H200.facts)
    assert kept is not None
    assert set(kept.configs("toy_matmul", ODD.key)) == set(map(words, RIGHT))


def test_a_cluster_without_some_of_its_processes_runs_nothing(some: Cluster) -> None:
    processes = psutil.Process().children(recursive=True)
    with suppress(ProcessLookupError):  # the test before may have ended it
        os.kill(some.pids[1], signal.SIGKILL)
    with pytest.raises(RankError, match=r"rank \d (was killed by signal 9|has not answered for 3 s)"):
        some.run(os.getpid)
    some.close()
    _, alive = psutil.wait_procs([each for each in processes if each.pid in some.pids], timeout=60)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]
