"""A cluster in the kernel of a notebook: its functions, an interrupt, and the end of the kernel."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

SOON_S = 150  # on a machine that is busy with other tests, where a cluster has taken 30 s to open

OPEN = """
import time
import torch.distributed as dist
import toolkit as tk
cluster = tk.cluster("cpu", ranks=2)
"""
FUNCTION = """
def waits(file):
    print("waits")
    open(f"{file}-{dist.get_rank()}", "w").close()
    if dist.get_rank() == 0:
        dist.barrier()  # until rank 1 has left the group
    time.sleep(1000)
"""
FAILS = """
def fails():
    if dist.get_rank() == 1:
        1 / 0
    dist.barrier()
cluster.run(fails)
"""


@pytest.fixture
def kernel(own_ports: None) -> Iterator[Any]:
    manager, client = start_new_kernel(kernel_name="python3")
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client: Any, code: str) -> tuple[str, str]:
    """Return what a cell printed, and its error."""
    printed: list[str] = []

    def show(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    reply = client.execute_interactive(code, timeout=SOON_S, output_hook=show, stop_on_error=False)["content"]
    return "".join(printed), "" if reply["status"] == "ok" else reply["evalue"]


@pytest.mark.timeout(600)
def test_a_cluster_in_a_notebook(kernel: Any, tmp_path: Path) -> None:
    manager, client = kernel
    assert run(client, OPEN) == ("", "")
    assert run(client, FUNCTION) == ("", "")
    _, error = run(client, FAILS)
    assert "rank 1 raised ZeroDivisionError at cell 3:3 (1 / 0): division by zero" in error

    client.execute(f"cluster.run(waits, {str(tmp_path / 'started')!r})", stop_on_error=False)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 2)
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=SOON_S)["content"]
    assert reply["ename"] == "KeyboardInterrupt"
    assert run(client, "print(cluster.run(dist.get_rank), cluster.closed)") == ("[0, 1] False\n", "")

    processes = psutil.Process(manager.provisioner.pid).children(recursive=True)
    assert len(processes) > 4
    suspend_watchers(processes)
    psutil.Process(manager.provisioner.pid).kill()
    _, alive = psutil.wait_procs(processes, timeout=SOON_S)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def suspend_watchers(processes: list[psutil.Process]) -> None:
    """Stop the processes of ipyparallel that would end by themselves, a few seconds after the ranks that they watch."""
    watchers = [each for each in processes if "ipyparallel.engine.nanny" in each.cmdline()]
    assert len(watchers) == 2
    for each in watchers:
        each.suspend()


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
