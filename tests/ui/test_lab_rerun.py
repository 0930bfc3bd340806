"""Tests of a Lab whose cell runs again, in the kernel of a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.manager import start_new_kernel

SOON_S = 150  # on a machine that is busy with other tests


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    manager, client = start_new_kernel(kernel_name="python3")
    yield client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def run(client: Any, code: str, cell: str | None) -> str:
    """Run a cell as JupyterLab does, which sends its id, and return what it printed."""
    content = {"code": code, "silent": False, "store_history": True, "user_expressions": {}, "allow_stdin": False}
    message = client.session.msg(
        "execute_request", {**content, "stop_on_error": True}, metadata={"cellId": cell} if cell else {}
    )
    client.shell_channel.send(message)
    printed = []
    while True:
        said = client.get_iopub_msg(timeout=SOON_S)
        if said["parent_header"].get("msg_id") != message["header"]["msg_id"]:
            continue
        if said["msg_type"] == "stream":
            printed.append(said["content"]["text"])
        if said["msg_type"] == "status" and said["content"]["execution_state"] == "idle":
            break
    while (reply := client.get_shell_msg(timeout=SOON_S))["parent_header"].get("msg_id") != message["header"]["msg_id"]:
        pass
    assert reply["content"]["status"] == "ok", reply["content"]
    return "".join(printed)


WATCH = """
import gc, weakref
import toolkit as tk
from toolkit.ui.lab import app
gpu = tk.device("virtual:h200")
made = []

class Watched(app.Lab):
    def __init__(self):
        super().__init__()
        seen.append(weakref.ref(self))

tk.Lab = Watched
seen = []

def states():
    gc.collect()
    return [ref() is not None and (ref().comm is not None, ref().model is not None) for ref in seen]

def held():
    gc.collect()
    return gpu.memory().allocated_bytes
"""
MAKE = "lab = tk.Lab()\nlab"
LOAD = "lab.load()\nprint(lab.wait(100), lab.error)"


@pytest.fixture
def cells(client: Any) -> Any:
    run(client, "%reset -f", None)
    run(client, WATCH, None)
    return lambda code, cell=None: run(client, code, cell)


@pytest.mark.timeout(600)
def test_a_lab_replaces_that_of_the_last_run_of_its_cell(cells: Any) -> None:
    cells(MAKE, "a")
    assert cells(LOAD, "b") == "True None\n"
    assert int(cells("print(held())", "c")) > 1 << 20
    cells(MAKE, "a")
    assert cells("print(states()[0] in (False, (False, False)), states()[1], held())", "c") == "True (True, False) 0\n"
    assert cells(LOAD, "b") == "True None\n"  # the new one works
    cells(MAKE, "other")  # another cell: its Lab stands next to the first
    assert cells("print(states()[1:])", "c") == "[(True, True), (True, False)]\n"


@pytest.mark.timeout(600)
def test_a_lab_in_a_cell_of_its_own_is_replaced(cells: Any) -> None:
    """Out[] and _ hold the old Lab, but no longer its model."""
    cells("tk.Lab()", "a")
    cells("lab = seen[0]()\n" + LOAD + "\ndel lab", "b")
    cells("tk.Lab()", "a")
    assert cells("print(states(), held())", "c") == "[(False, False), (True, False)] 0\n"


@pytest.mark.timeout(600)
def test_a_lab_that_is_still_in_use_stays(cells: Any) -> None:
    cells(MAKE, "a")
    cells("first = lab", "b")
    cells(MAKE, "a")  # `first` has the old one
    cells("lab", "b")
    cells(MAKE, "a")  # the output of cell b has the old one
    cells("box = {'labs': [lab]}", "b")
    cells(MAKE, "a")  # a list has the old one
    cells("labs = [tk.Lab(), tk.Lab()]", "d")  # one run of a cell makes two
    cells(MAKE)  # a front end without ids of cells
    cells(MAKE)
    assert cells("print([comm for comm, _ in states()])", "c") == f"{[True] * 8}\n"
