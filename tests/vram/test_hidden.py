"""Tests of memory that no variable holds: reference cycles and tracebacks have names, and nothing alive is called garbage."""

import asyncio
import gc
import subprocess
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from types import ModuleType

import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.vram import hidden
from toolkit.vram import owners as owners_module

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
    return {held.owner: held.bytes for held in hidden.listed(variables or {}) if not held.stays}


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


def task():
    async def fails():
        big = tensor()
        await asyncio.sleep(0)
        raise ValueError(big.shape)

    async def waits():
        await asyncio.create_task(fails())

    with suppress(ValueError):
        asyncio.run(waits())


def closure():
    big = tensor()

    def recursive():
        return recursive, big


def module():
    net = nn.Sequential(nn.Linear(1024, 1024, bias=False)).to("vgpu")
    net.hook = lambda: net


def nested():
    Node(deep={"all": [({"first": (tensor(),)},)]})


def graph():
    Node(loss=(tensor().requires_grad_() * 2).square().sum())


GARBAGE = pytest.mark.parametrize(
    ("make", "named"),
    [
        (nested, ["Node.deep['all'][0][0]['first'][0]"]),
        (pair, ["Node.other.data[0]"]), (around_itself, ["list[0]"]),
        (caught, ["pinned in caught() (the traceback of ValueError)"]),
        (task, ["big in fails() (the traceback of ValueError)"]),
        (closure, ["closure.<locals>.recursive (its closure): big"]), (module, ["Sequential.0.weight"]),
        (graph, ["Node.loss", "Node.loss (its graph: PowBackward0)", "Node.loss (its graph: torch::autograd::AccumulateGrad)"]),
    ],
)  # fmt: skip


@GARBAGE
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


def test_a_search_lets_no_collection_free_what_it_is_to_name(no_notebook):
    """The search creates objects itself, enough for Python to collect garbage."""
    thresholds = gc.get_threshold()
    try:
        gc.set_threshold(700)  # as Python's; making the garbage takes a third of it at most
        gc.enable()
        gc.collect()
        with tk.memory() as use:
            pair()
        assert use.by("kind").set_index("kind").loc["garbage", "end_bytes"] == 4 * MiB
        gc.collect()
        pair()
        assert owners() == {"garbage: Node.other.data[0]": 4 * MiB}
    finally:
        gc.set_threshold(*thresholds)


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
    monkeypatch.delattr(sys, "last_exc", raising=False)  # of another test
    monkeypatch.setattr(sys, "last_value", failed.pop(), raising=False)
    assert owners() == {"pinned in fails() (the traceback of ValueError)": 4 * MiB}


def test_a_group_of_errors_holds_what_its_members_hold(monkeypatch):
    def fails():
        pinned = tensor()
        raise ValueError(pinned.shape)

    def both():
        try:
            fails()
        except ValueError as error:
            raise ExceptionGroup("failed", [error]) from None

    monkeypatch.delattr(sys, "last_exc", raising=False)  # of another test
    try:
        both()
    except ExceptionGroup as group:
        group.__context__ = None
        monkeypatch.setattr(sys, "last_value", group, raising=False)
    assert owners() == {"pinned in fails() (the traceback of ValueError)": 4 * MiB}


def test_a_machine_that_stands_still_during_a_search_hides_no_garbage(monkeypatch):
    hours = iter(range(0, 10**9, 3600))
    monkeypatch.setattr(hidden, "thread_time", lambda: next(hours))
    pair()
    assert owners() == {"garbage: Node.other.data[0]": 4 * MiB}
    pair()
    monkeypatch.setattr(hidden, "_LEAST_LOOKED_AT", 0)  # as if there were very many objects
    assert owners() == {}


def test_advice_on_reference_cycles(monkeypatch):
    monkeypatch.setattr("toolkit.vram.advice.ipython_shell", lambda: None)  # other tests may have started IPython here
    pair()
    with pytest.raises(torch.OutOfMemoryError) as caught, tk.budget("32 MiB"):
        tensor(30)
    (note,) = caught.value.__notes__
    assert "held by `garbage: Node.other.data[0]`" in note
    assert "gc.collect() (reference cycles): saves 4.00 MiB, enough" in note


@contextmanager
def loading(name):
    """Hold a tensor of 2 MiB in the variable `batches` of a function on another thread."""
    begun, ends = threading.Event(), threading.Event()

    def load():
        batches = [tensor(2)]
        begun.set()
        ends.wait()
        return batches

    thread = threading.Thread(target=load, name=name)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def prefetching():
    ready = tensor()
    yield ready.shape


def test_a_generator_that_only_a_running_loop_holds_is_named():
    for _ in prefetching():
        (held,) = hidden.listed({})
        assert (held.owner, held.bytes, held.stays) == ("ready in prefetching()", 4 * MiB, True)


def test_many_variables_of_this_thread_hide_none_of_another(monkeypatch):
    monkeypatch.setattr(owners_module, "MOST", 2000)

    def search():
        many = [[number] for number in range(3000)]
        return {held.owner for held in hidden.listed({}) if held.stays and many}

    with loading("loader"):
        assert search() == {"batches in load() (thread 'loader')[0]"}


def test_variables_of_running_functions_have_names():
    """Those of the functions that called this code, and of other threads: in tables, `%memory hidden` and the advice."""

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
        assert {held.owner: held.bytes for held in hidden.listed({"mine": mine}) if held.stays} == names
        with pytest.raises(torch.OutOfMemoryError) as error, tk.budget("16 MiB"):
            tensor(10)
        (note,) = error.value.__notes__
        assert "del weights in outer(): saves 4.00 MiB\n" in note
        assert "del batches in load() (thread 'loader (1)'): saves 2.00 MiB" in note

    with loading("loader (1)"):
        outer()


def test_a_machine_that_stands_still_during_a_walk_hides_nothing_near(monkeypatch):
    times = iter(range(1000))
    monkeypatch.setattr(owners_module, "thread_time", lambda: next(times))
    many, far = [object() for _ in range(1000)], [[[i]] for i in range(10_000)]
    found = owners_module.find({"many": many, "near": [tensor()], "far": far})
    assert [holder.owner for holder in found.values()] == ["near[0]"]
    assert next(times) < 10


def test_variables_of_the_users_modules_have_names(monkeypatch, tmp_path):
    helper = ModuleType("helper")
    helper.__file__, helper._CACHE, helper.Model = str(tmp_path / "helper.py"), {"a": tensor()}, type("Model", (), {})
    helper.Model.__module__, helper.Model.shared = "helper", tensor(2)
    monkeypatch.setitem(sys.modules, "helper", helper)
    with tk.memory() as use:
        pass
    rows = use.by("owner")
    names = {"helper._CACHE['a']": 4 * MiB, "helper.Model.shared": 2 * MiB}
    assert dict(zip(rows["owner"], rows["end_bytes"], strict=True)) == names
    assert hidden.listed({}) == []
    with pytest.raises(torch.OutOfMemoryError) as error, tk.budget("16 MiB"):
        tensor(15)
    assert "held by `helper._CACHE['a']`" in error.value.__notes__[0]
    assert "release" not in error.value.__notes__[0]


def test_variables_of_a_thread_that_a_debugger_watches_are_left_alone():
    """Before Python 3.13, its frames can't be read while the debugger runs."""
    begun, ends, results = threading.Event(), threading.Event(), []

    def stop(frame, event, _):
        if frame.f_code.co_name == "work" and event == "line" and "x" in frame.f_locals:
            begun.set()
            ends.wait(60)
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
    assert begun.wait(60)
    hidden.listed({})
    ends.set()
    thread.join()
    assert results == [42]
    assert kept


# ---- errors outside of memory scopes

NAMED = "No variable holds this memory, which gc.collect() frees:\n"


@pytest.fixture
def no_notebook(monkeypatch):
    monkeypatch.setattr(hidden, "ipython_shell", lambda: None)  # other tests may have started IPython here


def refused(make=None):
    """Return the message of the error of an operation that does not fit on the GPU. It is in no cycle with this frame."""
    try:
        with tk.device("vgpu").sizes_only():
            (make or (lambda: torch.empty(1 << 40, dtype=torch.uint8, device="vgpu")))()
    except torch.OutOfMemoryError as error:
        return str(error)


@GARBAGE
def test_an_out_of_memory_error_names_garbage(gpu, no_notebook, make, named):
    before = gpu.memory().allocated_bytes
    make()
    held = gpu.memory().allocated_bytes - before
    rows = refused().split(NAMED)[1].splitlines()
    assert sorted(row.split("garbage: ")[1].split(", allocated in ")[0] for row in rows) == sorted(named)
    assert sum("tests/vram/test_hidden.py line" in row for row in rows if "KiB" not in row and " 512 B" not in row)
    assert gpu.memory().allocated_bytes - before == held
    gc.collect()
    assert gpu.memory().allocated_bytes == before  # the search kept nothing alive
    assert NAMED not in refused()


def test_errors_in_several_threads_at_once_name_garbage(gpu, no_notebook):
    """Each search made lists of objects that the others took for references to the garbage, and each took much longer."""
    Node(data=tensor())
    texts, together = [], threading.Barrier(3)

    def search():
        for _ in range(2):
            together.wait()
            texts.append(refused())

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [text.count("garbage: ") for text in texts] == [1] * 6


def test_an_out_of_memory_error_calls_nothing_garbage_that_is_alive(gpu, no_notebook):
    class Net(nn.Module):
        def forward(self, x):
            return refused(lambda: x.sin().expand(1 << 20, -1).clone())

    kept, net = tensor(), Net()
    Node(shared=kept)
    assert NAMED not in str(net(torch.ones(1 << 20, device="vgpu")))
    assert NAMED not in refused(lambda: torch.cat([tensor(), tensor(2).expand(1 << 19, -1).reshape(-1)]))


def test_an_error_in_a_backward_pass_names_garbage(gpu, no_notebook):
    class Large(torch.autograd.Function):
        @staticmethod
        def forward(_, x):
            return x.clone()

        @staticmethod
        def backward(_, gradient):
            return gradient.new_empty(1 << 40)

    caught()
    x = tensor().requires_grad_()
    rows = refused(Large.apply(x).sum().backward).split(NAMED)[1].splitlines()
    assert [row.split(" (")[0] for row in rows] == ["   4.00 MiB  garbage: pinned in caught()"]


def test_an_error_is_searched_for_once_and_without_the_collector(gpu, monkeypatch):
    calls = []

    def releasable():
        calls.append(gc.isenabled())
        return "gc.collect()", []

    monkeypatch.setattr(hidden, "releasable", releasable)
    gc.enable()
    assert "Tried to allocate 4.00 TiB" in refused(lambda: torch.randn(1 << 20, 1 << 20, device="vgpu"))
    assert calls == [False]
    assert gc.isenabled()


def test_an_interrupt_of_the_search_arrives_and_keeps_nothing(gpu, monkeypatch):
    def search():
        found = gc.get_objects()
        raise KeyboardInterrupt(len(found))

    monkeypatch.setattr(hidden, "releasable", search)
    with gpu.sizes_only(), pytest.raises(KeyboardInterrupt) as stop:
        torch.empty(1 << 40, dtype=torch.uint8, device="vgpu")
    assert "search" not in [frame.name for frame in traceback.extract_tb(stop.value.__traceback__)]
    assert tensor().sum().item() == MiB

    monkeypatch.setattr(hidden, "releasable", lambda: 1 / 0)
    assert "Tried to allocate 1.00 TiB" in refused()


def test_more_owners_than_five_are_summed_up(gpu, no_notebook):
    for n in range(1, 9):
        Node(**{f"t{n}": tensor(n)})
    rows = refused().split(NAMED)[1].splitlines()
    assert [row.split(", alloc")[0] for row in rows[:5]] == [f"   {n}.00 MiB  garbage: Node.t{n}" for n in range(8, 3, -1)]
    assert rows[5:] == ["   6.00 MiB  3 more"]


def test_other_refusals_for_lack_of_memory_name_garbage(gpu, no_notebook):
    Node(own=tensor(16))
    said = "gc.collect() frees memory that no variable holds: 16.0 MiB garbage: Node.own, allocated in tests/"
    with gpu.sizes_only():
        kept = torch.empty(100 << 30, dtype=torch.uint8, device="vgpu")
    for refusal in (
        lambda: tk.budget("4 MiB"), lambda: tk.load("random/qwen3-32b", device=gpu), lambda: tk.device("virtual:8GiB"),
    ):  # fmt: skip
        with pytest.raises(tk.ToolkitError) as error:
            refusal()
        assert said in str(error.value)
    del kept


SCRIPT = """
import gc, sys, torch, toolkit as tk
tk.device("virtual:1GiB")
class Node: pass
def cycle():
    node = Node()
    node.itself, node.data = node, torch.ones(100 << 18, device="vgpu")
gc.disable()
cycle()
assert "toolkit.vram.hidden" not in sys.modules
torch.ones(1 << 29, device="vgpu")
"""


def test_a_script_that_imports_only_toolkit_names_garbage(tmp_path):
    (tmp_path / "user.py").write_text(SCRIPT)
    ended = subprocess.run([sys.executable, tmp_path / "user.py"], cwd=tmp_path, capture_output=True, text=True)
    assert f"{NAMED}    100 MiB  garbage: Node.data, allocated in user.py line" in ended.stderr


@pytest.fixture
def kept(request):
    request.session.of_another_test = [tensor(2)]
    yield [tensor()]
    del request.session.of_another_test


@pytest.mark.usefixtures("kept")
def test_a_fixture_is_a_variable_of_its_test_and_other_tests_are_not_searched():
    (held,) = hidden.listed({})
    assert held.owner == "kept in test_a_fixture_is_a_variable_of_its_test_and_other_tests_are_not_searched()[0]"
    assert (held.bytes, held.stays) == (4 * MiB, True)
