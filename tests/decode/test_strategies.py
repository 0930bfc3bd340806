"""The strategies as data: names, nearest name, combinations that can't be."""

from __future__ import annotations

import dataclasses

import pytest

import toolkit as tk
from toolkit.core.errors import ToolkitError, UnknownNameError
from toolkit.decode.strategies import STRATEGIES, Strategy, find_strategy

NAMES = ["host-sampling", "host-embedding", "roundtrip", "token-on-device", "position-on-device", "double-buffered"]


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
    [("host", "host", "device", "overlap"), ("host-row", "host", "host", "overlap"), ("device", "host", "host", "wait")],
    ids="-".join,
)
def test_combinations_that_cannot_be(answers):
    with pytest.raises(ToolkitError, match="mine"):
        Strategy("mine", *answers, "")
