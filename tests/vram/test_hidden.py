"""Tests of memory that no variable holds: reference cycles and tracebacks have names, and nothing alive is called garbage."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.vram import hidden

MiB = 1 << 20


@pytest.fixture(autouse=True)
def gpu():
    gpu = tk.device("virtual:h200")
    gc.collect()
    torch.vgpu.empty_cache()
    gc.disable()
    yield gpu
    gc.enable()
    gc.collect()


def tensor(mib=4):
    return torch.ones(mib << 18, device="vgpu")


def owners(variables=None):
    """Return the names of hidden memory on the GPU, and its bytes, without that of running functions."""
    return {held.owner: held.bytes for held in hidden.listed(variables or {}) if not held.runs}


class Node:
    def __init__(self, **held):
        vars(self).update(held)
        self.itself = self


def pair():
    first, second = Node(data=[tensor()]), Node()
    first.other, second.other = second, first


def around_itself():
    ring = [tensor()]
    ring.append(ring)


def caught():
    pinned = tensor()
    try:
        raise ValueError(pinned.shape)
    except ValueError as error:
        kept = error
    return kept is None


def closure():
    big = tensor()

    def recursive():
        return recursive, big


def module():
    net = nn.Sequential(nn.Linear(1024, 1024, bias=False)).to("vgpu")
    net.hook = lambda: net


def graph():
    Node(loss=(tensor().requires_grad_() * 2).square().sum())


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (pair, ["Node.other.data[0]"]), (around_itself, ["list[0]"]),
        (caught, ["pinned in caught() (the traceback of ValueError)"]),
        (closure, ["closure.<locals>.recursive (its closure): big"]), (module, ["Sequential.0.weight"]),
        (graph, ["Node.loss", "Node.loss (its graph: PowBackward0)", "Node.loss (its graph: torch::autograd::AccumulateGrad)"]),
    ],
)  # fmt: skip
def test_what_only_the_garbage_collector_can_free_is_named(gpu, make, named):
    before = gpu.memory().allocated_bytes
    make()
    held = gpu.memory().allocated_bytes - before
    assert held >= 4 * MiB
    found = owners()
    assert sorted(found) == [f"garbage: {name}" for name in named]
    assert abs(sum(found.values()) - held) < 512 * len(named)
    with tk.memory() as use:
        pass
    assert use.by("kind").set_index("kind").loc["garbage", "end_bytes"] == held
    assert hidden.release() == held
    assert owners() == {}


def test_what_a_running_function_uses_is_not_garbage():
    shared, mine = tensor(), [tensor(2)]
    net = nn.Linear(1024, 1024, bias=False).to("vgpu")
    loss = net(torch.ones(1, 1024, device="vgpu")).sum()
    Node(shared=shared, deep={"list": mine}, net=net, loss=loss, own=tensor(1))
    assert owners() == {"garbage: Node.own": MiB}
    assert owners({"shared": shared}) == {"garbage: Node.own": MiB}


def test_a_model_of_another_function_is_found_alive_at_once():
    net = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40))).to("vgpu")
    Node(own=tensor(1))
    assert owners() == {"garbage: Node.own": MiB}
    assert sum(p.nbytes for p in net.parameters()) > 10 * MiB


def test_an_error_in_a_list_holds_what_its_traceback_holds(monkeypatch):
    def fails():
        pinned = tensor()
        raise ValueError(pinned.shape)

    failed = []
    try:
        fails()
    except ValueError as error:
        failed.append(error)
    with tk.memory() as use:
        pass
    assert list(use.by("owner")["owner"]) == ["failed[0] (its traceback): pinned in fails() (the traceback of ValueError)"]
    assert owners({"failed": failed}) == {}
    monkeypatch.setattr(sys, "last_value", failed.pop(), raising=False)
    assert owners() == {"pinned in fails() (the traceback of ValueError)": 4 * MiB}


def test_advice_on_reference_cycles(monkeypatch):
    monkeypatch.setattr("toolkit.vram.advice.ipython_shell", lambda: None)  # other tests may have started IPython here
    pair()
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("32 MiB"):
        tensor(30)
    (note,) = caught.value.__notes__
    assert "held by `garbage: Node.other.data[0]`" in note
    assert "gc.collect() (reference cycles): saves 4.00 MiB, enough" in note


def test_variables_of_running_functions_have_names():
    """Those of the functions that called this code, and of other threads: in tables, `%memory hidden` and the advice."""
    begun, ends = threading.Event(), threading.Event()

    def load():
        batches = [tensor(2)]
        begun.set()
        ends.wait()
        return batches

    def outer():
        weights = {"up": tensor()}
        inner()
        return weights

    def inner():
        with tk.memory() as use:
            mine = tensor(8)
        names = {"batches in load() (thread 'loader (1)')[0]": 2 * MiB, "weights in outer()['up']": 4 * MiB}
        rows = use.by("owner")
        assert dict(zip(rows["owner"], rows["end_bytes"], strict=True)) == {"mine": 8 * MiB, **names}
        assert {held.owner: held.bytes for held in hidden.listed({"mine": mine}) if held.runs} == names
        with pytest.raises(torch.OutOfMemoryError) as error, tk.budget("16 MiB"):
            tensor(10)
        (note,) = error.value.__notes__
        assert "del weights in outer(): saves 4.00 MiB\n" in note
        assert "del batches in load() (thread 'loader (1)'): saves 2.00 MiB" in note

    thread = threading.Thread(target=load, name="loader (1)")
    thread.start()
    begun.wait()
    try:
        outer()
    finally:
        ends.set()
        thread.join()


def test_variables_of_a_thread_that_a_debugger_watches_are_left_alone():
    """Before Python 3.13, its frames can't be read while the debugger runs."""
    begun, ends, results = threading.Event(), threading.Event(), []

    def stop(frame, event, _):
        if frame.f_code.co_name == "work" and event == "line" and "x" in frame.f_locals:
            begun.set()
            ends.wait(10)
        return stop

    def work():
        x = 41
        y = 1
        return x + y

    def traced():
        sys.settrace(stop)
        results.append(work())

    thread, kept = threading.Thread(target=traced), [tensor()]
    thread.start()
    begun.wait(10)
    hidden.listed({})
    ends.set()
    thread.join()
    assert results == [42]
    assert kept
