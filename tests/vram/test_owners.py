"""Tests of finding the owners of tensors: paths through all kinds of objects, and objects that resist inspection."""

import gc
import time
from collections import UserDict, defaultdict, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import toolkit as tk
from toolkit.vram import owners


@pytest.fixture(autouse=True)
def gpu():
    gpu = tk.device("virtual:h200")
    gc.collect()
    return gpu


def tensor():
    return torch.ones(4, device="vgpu")


def names(variables):
    return {holder.owner: holder.kind for (on, _), holder in owners.find(variables).items() if on == "vgpu"}


@dataclass
class Batch:
    ids: torch.Tensor


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class DynamicCache:
    def __init__(self):
        self.layers = [tensor()]


def closing():
    held = tensor()
    return lambda: held


def paused():
    held = tensor()
    yield held.shape


def started():
    generator = paused()
    next(generator)
    return generator


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (tensor, "x"), (lambda: [None, tensor()], "x[1]"), (lambda: {"a": {"b": tensor()}}, "x['a']['b']"),
        (lambda: Batch(tensor()), "x.ids"), (lambda: Slots(tensor()), "x.held"), (lambda: deque([tensor()]), "x[0]"),
        (lambda: defaultdict(list, k=[tensor()]), "x['k'][0]"), (lambda: UserDict(k=tensor()), "x['k']"),
        (closing, "x (its closure): held"), (started, "x (paused): held"),
        (lambda: partial(print, tensor()), "x (its argument 0)"),
        (lambda: nn.ParameterDict({"w": nn.Parameter(tensor())}), "x.w"),
    ],
)  # fmt: skip
def test_a_path_leads_to_the_tensor(make, owner):
    assert list(names({"x": make()})) == [owner]


def test_kinds_come_from_who_holds():
    net = nn.Linear(4, 4).to("vgpu")
    net(tensor().view(1, 4)).sum().backward()
    optimiser = torch.optim.Adam(net.parameters())
    optimiser.step()
    found = names({"net": net, "optimiser": optimiser, "cache": DynamicCache()})
    assert found["net.weight"] == "weights"
    assert found["net.weight.grad"] == "gradients"
    assert found["optimiser.state[0].exp_avg"] == "optimizer"
    assert found["cache.layers[0]"] == "kv"


@pytest.mark.parametrize("first", ["loss", "net", "optimiser", "trainer", "saved", "shared"])
def test_weights_belong_to_their_module_whatever_else_reaches_them(first):
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).to("vgpu")
    optimiser = torch.optim.Adam(net.parameters())
    for _ in range(2):
        loss = net(torch.ones(3, 4, device="vgpu")).sum()
        loss.backward()
        optimiser.step()
    states = [value for state in optimiser.state.values() for value in state.values()]
    shared = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters()), *states]
    trainer = SimpleNamespace(optimiser=optimiser, net=net)
    held = {"loss": loss, "net": net, "optimiser": optimiser, "saved": net.state_dict(), "shared": shared, "trainer": trainer}
    found = names({first: held[first], **held})
    weights = {f"net.{name}" for name, _ in (*net.named_parameters(), *net.named_buffers())}
    assert {owner for owner, kind in found.items() if kind == "weights"} == weights
    assert {owner for owner, kind in found.items() if kind == "gradients"} == {
        f"net.{n}.grad" for n, _ in net.named_parameters()
    }
    assert all(owner.startswith("optimiser.state") for owner, kind in found.items() if kind == "optimizer")
    with tk.memory() as use:
        pass
    assert "weights" in set(use.by("kind")["kind"])


def test_a_graph_holds_the_weights_of_a_module_that_is_gone():
    net = nn.Linear(4, 4).to("vgpu")
    loss = net(torch.ones(3, 4, device="vgpu")).sum()
    loss.backward()
    del net
    found = names({"loss": loss})
    assert found["loss (its graph: torch::autograd::AccumulateGrad)"] == "weights"
    assert "gradients" in found.values()


def test_an_optimiser_holds_the_parameters_it_was_made_of():
    optimiser = torch.optim.AdamW(nn.Linear(4, 4).to("vgpu").parameters())
    assert names({"optimiser": optimiser})["optimiser.param_groups[...]['params'][0]"] == "weights"


def test_the_shortest_path_names_what_several_hold():
    shared = tensor()
    assert list(names({"deep": {"a": [shared]}, "near": [shared]})) == ["near[0]"]


def test_views_are_their_memory():
    whole = torch.ones(4, 4, device="vgpu")
    assert len(names({"whole": whole, "row": whole[1], "flat": whole.view(-1)})) == 1


class Raises:
    def __getattr__(self, name):
        raise RuntimeError(name)


class RaisingDict(dict):
    def values(self):
        raise RuntimeError("no")


class RaisingList(list):
    def __iter__(self):
        raise RuntimeError("no")


class RaisingClass:
    @property
    def __class__(self):
        raise RuntimeError("no")


class RaisingName(dict):
    def __repr__(self):
        raise RuntimeError("no")


def around_itself():
    ring = []
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    "make",
    [
        Raises, lambda: RaisingDict(a=1), lambda: RaisingList([1]), RaisingClass, lambda: {RaisingName: 1}, around_itself,
        lambda: list(range(300_000)), lambda: torch.ones(3, device="meta"), lambda: torch.eye(3).to_sparse(),
        lambda: {i: str(i) for i in range(100_000)}, lambda: [[]] * 1000, lambda: [RaisingClass(), RaisingDict(a=1)],
    ],
)  # fmt: skip
def test_values_that_do_not_want_to_be_looked_into_change_nothing(make):
    bad, kept = make(), tensor()
    with tk.memory() as use:
        more = tensor()
    assert "more" in set(use.by("owner")["owner"])
    assert names({"bad": bad, "kept": kept, "more": more}).keys() == {"kept", "more"}


def test_a_deep_graph_is_walked_once():
    net = nn.Sequential(*(layer for _ in range(40) for layer in (nn.Linear(4, 4), nn.ReLU()))).to("vgpu")
    states = [net(tensor().view(1, 4))]
    for _ in range(20):
        states.append(net(states[-1]).tanh())
    began = time.perf_counter()
    found = names({"states": states})
    assert time.perf_counter() - began < 2
    assert any("(its graph: ReluBackward0)" in owner for owner in found)


def test_a_checkpoint_is_not_computed_again():
    runs = []

    def forward(x):
        runs.append(1)
        return (x * 2).relu().pow(2).sum()

    y = checkpoint(forward, tensor().requires_grad_(), use_reentrant=False)
    with tk.memory() as use:
        pass
    assert len(runs) == 1
    assert use.kept_bytes == 0
    del y


def test_a_frames_own_dictionary_stays_as_it_is():
    x = 1
    everything = locals()
    exec("added = 2")
    with tk.memory():
        pass
    assert everything["x"] == x
    exec("assert added == 2")


def test_keys_that_are_tensors_are_not_read():
    gpu = tk.device("virtual:h200")
    table = {tensor(): tensor()}
    before = gpu.now_ns()
    assert list(names({"table": table})) == ["table[...]"]
    assert gpu.now_ns() == before


def test_weights_far_from_a_variable_belong_to_their_module():
    trainer = inner = Batch(None)
    for _ in range(4):
        inner.ids = {"parts": [Batch(None)]}
        inner = inner.ids["parts"][0]
    inner.ids = nn.Linear(4, 4).to("vgpu")
    loss = inner.ids(tensor()).sum()
    path = "trainer" + ".ids['parts'][0]" * 4 + ".ids"
    found = names({"loss": loss, "trainer": trainer})
    assert {owner: kind for owner, kind in found.items() if kind == "weights"} == {
        f"{path}.weight": "weights",
        f"{path}.bias": "weights",
    }


def test_what_a_notebooks_kernel_holds_is_not_the_variables():
    """A widget refers to its kernel, which refers to all variables and to the last error."""
    shell = type("Shell", (), {"__module__": "ipykernel.zmqshell"})()
    shell.last_execution_result = {"x": torch.ones(4)}
    widget = type("Widget", (), {})()
    widget.comm, widget.own = shell, torch.ones(8)
    assert [holder.owner for holder in owners.find({"w": widget}).values()] == ["w.own"]
