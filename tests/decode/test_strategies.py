"""The strategies as data: names, nearest name, combinations that can't be."""

from __future__ import annotations

import dataclasses

import pytest
from small_models import make

import toolkit as tk
from toolkit.core.errors import ToolkitError, UnknownNameError
from toolkit.decode.strategies import STRATEGIES, Strategy, find_strategy, strategies_of

EAGER = ["host-sampling", "host-embedding", "roundtrip", "token-on-device", "position-on-device", "double-buffered"]
NAMES = [*EAGER, "cuda-graph", "whole-loop"]


def test_presets():
    assert list(STRATEGIES) == NAMES
    assert tk.STRATEGIES is STRATEGIES
    assert all(name == strategy.name for name, strategy in STRATEGIES.items())
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRATEGIES["roundtrip"].token = "device"
    answers = [dataclasses.astuple(dataclasses.replace(s, name="", crosses="")) for s in STRATEGIES.values()]
    assert len(set(answers)) == len(NAMES)


@pytest.mark.parametrize(("typed", "nearest"), [("round-trip", "roundtrip"), ("doublebuffered", "double-buffered")])
def test_an_unknown_name_suggests_the_nearest(typed, nearest):
    with pytest.raises(UnknownNameError, match=f'Did you mean "{nearest}"'):
        find_strategy(typed)


@pytest.mark.parametrize("typed", [None, 3, [], {}], ids=repr)
def test_what_is_no_name_is_an_unknown_name(typed):
    with pytest.raises(UnknownNameError):
        find_strategy(typed)


def test_ones_own_combination():
    mine = Strategy("mine", "device", "array", "device", "overlap", "")
    assert find_strategy(mine) is mine


@pytest.mark.parametrize(
    "answers",
    [
        ("host", "host", "device", "overlap"),
        ("host-row", "host", "host", "overlap"),
        ("device", "host", "host", "wait"),
        ("device", "device", "device", "ring"),
        ("device", "device", "device", "ring", "", "step"),
        ("device", "device", "device", "wait", "", "loop"),
        ("device", "array", "device", "ring", "", "loop"),
        ("host", "device", "device", "ring", "", "loop"),
    ],
    ids="-".join,
)
def test_combinations_that_cannot_be(answers):
    with pytest.raises(ToolkitError, match="mine"):
        Strategy("mine", *answers, *([""] if len(answers) == 4 else []))


@pytest.mark.parametrize("name", ["cuda-graph", "whole-loop"])
def test_a_device_without_graphs_refuses_to_capture(name):
    model = make(tk.device("cpu"))
    assert list(strategies_of(model)) == EAGER
    with pytest.raises(ToolkitError, match=f"'{name}'.*cpu has no graphs.*double-buffered"):
        tk.generate(model, [1, 2], name)


def test_a_model_may_refuse_to_be_captured():
    model = make(tk.device("virtual:h200"))
    assert list(strategies_of(model)) == NAMES
    model.no_graphs = "it waits for the device"
    assert list(strategies_of(model)) == EAGER
    with pytest.raises(ToolkitError, match="it waits for the device"):
        tk.generate(model, [1, 2], "whole-loop")


@pytest.mark.parametrize("field", ["token", "position", "sampler", "readback", "capture"])
def test_another_value_of_a_field_is_named(field):
    with pytest.raises(UnknownNameError, match=f"strategy 'mine': {field} 'devise'.*Known: "):
        dataclasses.replace(STRATEGIES["roundtrip"], name="mine", **{field: "devise"})
