"""Tests of finding the owners of tensors: paths through all kinds of objects, and objects that resist inspection."""

import gc
import re
import threading
from collections import UserDict, defaultdict, deque
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import toolkit as tk
from tests.speed import is_quick
from toolkit.vram import hidden, owners


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


def delegating():
    yield from paused()


def looping():
    for shape in paused():
        yield len(shape)


def started(make=paused):
    generator = make()
    next(generator)
    return generator


class Logger:
    def __init__(self):
        self.kept = [tensor()]

    def hook(self, *args):
        pass


def hooked(on, register):
    getattr(on, register)(Logger().hook)
    return on


def on_cpu():
    return torch.ones(3, requires_grad=True)


def function():
    def kept(*, held=tensor()):  # noqa: B008 - is what the test is about
        return held

    return kept


def with_attribute(value):
    value.held = tensor()
    return value


def cached():
    found = lru_cache(lambda i: [i, tensor()])
    found(1)
    return found


async def waits():
    held = tensor()
    await Suspends()
    return held


async def awaits():
    await waits()


async def yields():
    held = tensor()
    yield held.shape


class Suspends:
    def __await__(self):
        yield


def suspended(coroutine):
    coroutine.send(None)
    return coroutine


def suspended_generator():
    generator = yields()
    with pytest.raises(StopIteration):
        generator.asend(None).send(None)
    return generator


def context_variable():
    held = tensor()
    return ContextVar("variable", default=held)


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.kept = [tensor()]
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def optimizer():
    return torch.optim.SGD([on_cpu()])


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (tensor, "x"), (lambda: [None, tensor()], "x[1]"), (lambda: {"a": {"b": tensor()}}, "x['a']['b']"),
        (lambda: Batch(tensor()), "x.ids"), (lambda: Slots(tensor()), "x.held"), (lambda: deque([tensor()]), "x[0]"),
        (lambda: defaultdict(list, k=[tensor()]), "x['k'][0]"), (lambda: UserDict(k=tensor()), "x['k']"),
        (closing, "x (its closure): held"), (started, "x (paused): held"),
        (lambda: started(delegating), "x (paused) (paused): held"), (lambda: started(looping), "x (paused) (paused): held"),
        (lambda: suspended(awaits()), "x (paused) (paused): held"), (lambda: ValueError(tensor()), "x.args[0]"),
        (lambda: partial(print, tensor()), "x (its argument 0)"),
        (lambda: nn.ParameterDict({"w": nn.Parameter(tensor())}), "x.w"),
        (lambda: nn.Sequential(hooked(nn.ReLU(), "register_forward_hook")), "x.0._forward_hooks[i].__self__.kept[0]"),
        (lambda: hooked(nn.ReLU(), "register_full_backward_hook"), "x._backward_hooks[i].__self__.kept[0]"),
        (lambda: hooked(on_cpu(), "register_hook"), "x._backward_hooks[i].__self__.kept[0]"),
        (lambda: hooked(on_cpu(), "register_post_accumulate_grad_hook"), "x._post_accumulate_grad_hooks[i].__self__.kept[0]"),
        (lambda: hooked(optimizer(), "register_step_post_hook"), "x._optimizer_step_post_hooks[i].__self__.kept[0]"),
        (lambda: Logger().hook, "x.__self__.kept[0]"), (lambda: [tensor()].append, "x (inside)[0]"),
        (lambda: iter([tensor()]), "x (inside)[0]"), (cached, "x (inside)[1]"),
        (function, "x (its default held)"), (lambda: with_attribute(lambda: None), "x.held"),
        (lambda: with_attribute(on_cpu()), "x.held"), (lambda: with_attribute(type("Kept", (dict,), {})()), "x.held"),
        (lambda: with_attribute(type("Kept", (list,), {})()), "x.held"),
        (lambda: with_attribute(type("Kept", (), {"__module__": "__main__"})), "x.held"),
        (lambda: suspended(waits()), "x (paused): held"), (suspended_generator, "x (paused): held"),
        (lambda: with_attribute(threading.local()), "x (inside)[...]['held']"), (context_variable, "x (its value)"),
        (lambda: Keeps.apply(on_cpu()), "x (its graph: KeepsBackward)"),
    ],
)  # fmt: skip
def test_a_path_leads_to_the_tensor(make, owner):
    assert [re.sub(r"hooks\[\d+\]", "hooks[i]", name) for name in names({"x": make()})] == [owner]


def test_names_with_an_underscore_are_variables_too():
    assert names({"_cache": {"a": tensor()}, "__builtins__": {"b": tensor()}}).keys() == {"_cache['a']"}


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


def test_large_containers_hide_nothing_and_wait_for_everything_else(monkeypatch):
    rows = [{"ids": [1, 2, 3], "more": {"labels": [4, 5, 6]}} for _ in range(100_000)]
    deep = {"a": {"b": {"c": {"d": tensor()}}}}
    losses = [torch.ones((), device="vgpu") for _ in range(1500)]
    assert is_quick(lambda: hidden.find({"rows": rows, "losses": losses, "deep": deep}), 0.3)
    monkeypatch.setattr(owners, "MOST", 20_000)
    limit = owners.Limit()
    found = owners.find({"rows": rows, "losses": losses, "deep": deep}, limit)
    assert {holder.owner for holder in found.values()} == {"deep['a']['b']['c']['d']", *(f"losses[{i}]" for i in range(1500))}
    assert limit.reached


def test_a_measurement_says_that_a_search_ended_early(monkeypatch):
    variables = {"many": [{"a": [[number]]} for number in range(3000)] + [{"a": torch.ones(1 << 20, device="vgpu")}]}
    exec("with tk.memory() as inner: pass", {"tk": tk, **variables}, names := {})
    assert "many[3000]['a']" in set(names["inner"].by("owner")["owner"])
    assert "owners not found" not in names["inner"].line()
    monkeypatch.setattr(owners, "MOST", 2000)
    exec("with tk.memory() as inner: pass", {"tk": tk, **variables}, names)
    del variables
    assert "owners not found: there are more objects than a search looks at" in names["inner"].line()


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
    found = names({"states": states})
    assert is_quick(lambda: names({"states": states}), 2)
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
    assert names({"table": table}).keys() == {"table[...]", "table (its key 0)"}
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
