"""Worker processes: answers, deaths, hangs, cancelling, and what is left of them."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from toolkit.core.workers import WorkerError, WorkerPool

MODULE = """
import os, subprocess, sys, time
from toolkit.core.workers import listen

about, jobs, answer = listen()
print("this is no answer")
for job in jobs:
    if job == "child":
        answer(subprocess.Popen(["sleep", "60"]).pid)
    elif job == "sleep":
        time.sleep(60)
    elif job == "half":
        os.write(3, b'{"laun')
        os._exit(0)
    elif job == "fail":
        sys.exit("no room")
    elif job == "state":
        answer([about, os.getpid(), sys.path, dict(os.environ)])
    else:
        answer(job)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "worker_under_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(folder)
    return "worker_under_test"


def ask(worker, job):
    return worker.ask(job)


def is_gone(pid):
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "\nState:\tZ" in status.read_text()


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_every_job_is_answered_by_as_few_processes_as_needed(module):
    with WorkerPool(module, {}, 2) as pool:
        assert [pool.submit(ask, n).result(30) for n in range(5)] == list(range(5))
        assert sum(worker.process is not None for worker in pool.workers) == 1
        futures = [pool.submit(ask, n) for n in range(40)]
        assert [future.result(30) for future in futures] == list(range(40))


def test_the_environment_of_a_worker(module, tmp_path, monkeypatch):
    """It sees no GPU, inherits sys.path, and imports nothing from the working directory."""
    (tmp_path / "json.py").write_text("raise ValueError('not the module that was meant')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with WorkerPool(module, {"a": 1}, 1, {"OWN": "x"}) as pool:
        about, _, path, environment = pool.submit(ask, "state").result(30)
        assert about == {"a": 1, "folder": pool.workers[0].folder.name}
    assert set(filter(None, sys.path)) <= set(path)
    assert str(tmp_path) not in path
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert environment["OWN"] == "x"
    assert "TRITON_INTERPRET" not in environment


@pytest.mark.parametrize(
    ("job", "said"),
    [("half", "ended with status 0.*"), ("fail", "ended with status 1: no room"), ("sleep", "took more than 3 s")],
)
def test_a_worker_that_does_not_answer_is_replaced(module, job, said):
    with WorkerPool(module, {}, 1, timeout_s=None if job != "sleep" else 3.0) as pool:
        with pytest.raises(WorkerError, match=f"^{said}$"):
            pool.submit(ask, job).result(30)
        pool.workers[0]._timeout_s = None  # the next process may take longer to start
        assert pool.submit(ask, "next").result(60) == "next"


def test_a_killed_worker_is_named_by_its_signal(module):
    with WorkerPool(module, {}, 1) as pool:
        pid = pool.submit(ask, "state").result(30)[1]
        future = pool.submit(ask, "sleep")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="ended with signal 9"):
            future.result(30)


def test_leaving_ends_workers_their_children_and_waiting_jobs_within_seconds(module):
    with WorkerPool(module, {}, 1) as pool:
        child = pool.submit(ask, "child").result(30)
        running, waiting = pool.submit(ask, "sleep"), pool.submit(ask, "next")
        wait_until(running.running)
        process, folder = pool.workers[0].process, Path(pool.workers[0].folder.name)
        assert folder.is_dir()
        began = time.monotonic()
    assert time.monotonic() - began < 30  # the job takes 60 s
    assert process.returncode == -signal.SIGTERM
    wait_until(lambda: is_gone(child))  # the system may take a moment to remove it
    assert not folder.exists()
    with pytest.raises(WorkerError):
        running.result(0)
    with pytest.raises(CancelledError):
        waiting.result(0)


def test_workers_end_with_a_process_that_was_killed(module):
    code = f"""
import json, sys, time
sys.path[:] = {sys.path!r}
from toolkit.core.workers import WorkerPool
pool = WorkerPool("{module}", {{}}, 1)
child = pool.submit(lambda worker: worker.ask("child")).result()
pool.submit(lambda worker: worker.ask("sleep"))
print(json.dumps([pool.workers[0].process.pid, child, pool.workers[0].folder.name]), flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    worker, child, folder = json.loads(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    wait_until(lambda: is_gone(worker) and is_gone(child) and not Path(folder).exists())
