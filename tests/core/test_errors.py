"""Errors say what was asked, what was found and what to do, and keep their numbers."""

import pickle

import pytest

import toolkit
from toolkit.core import errors
from toolkit.core.errors import ToolkitError, UnknownNameError, unknown_name

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ToolkitError)]


def test_every_error_can_be_caught_by_its_name():
    assert dir(toolkit.errors) == sorted(kind.__name__ for kind in KINDS)
    assert toolkit.errors.ModelError is errors.ModelError


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_an_error_says_asked_found_and_do(kind):
    error = kind("loading 'x'", "no such file", "Check the path", path="x", bytes=8)
    assert str(error) == "loading 'x': no such file. Check the path"
    assert (error.asked, error.found, error.do) == ("loading 'x'", "no such file", "Check the path")
    assert error.facts == {"path": "x", "bytes": 8}
    copy = pickle.loads(pickle.dumps(error))  # as it crosses from a worker process
    assert (type(copy), str(copy), copy.facts) == (kind, str(error), error.facts)
    assert kind.__doc__


def test_an_unknown_name_suggests_the_nearest_and_lists_all():
    error = unknown_name("strategy", "roundtripp", ["roundtrip", "host-sampling"])
    assert isinstance(error, UnknownNameError)
    assert 'Did you mean "roundtrip"?' in str(error)
    assert "Known: host-sampling, roundtrip" in str(error)
    assert error.facts["known"] == ["host-sampling", "roundtrip"]


def test_a_long_name_is_cut():
    assert str(unknown_name("kernel", [list(range(10**5))], ["read"])).startswith("kernel [[0, 1, ")
    assert len(str(unknown_name("kernel", "x" * 10**6, ["read"]))) < 300


@pytest.mark.parametrize(
    ("name", "near"), [("demo/qwen", "demo/qwen3"), ("qwen3", "demo/qwen3"), ("virtul:2xl4", "virtual:2xl4")]
)
def test_a_name_with_a_folder_or_kind_suggests_the_nearest(name, near):
    known = ["demo/gemma4", "demo/qwen3", "virtual:2xl4", "virtual:2xh200"]
    assert f'Did you mean "{near}"?' in str(unknown_name("name", name, known))


@pytest.mark.parametrize("name", ["foo", "demo/foo", "demo/", "virtual:2xfoo", "virtual:"])
def test_what_both_begin_with_makes_no_name_similar(name):
    known = ["loop", "step", "demo/gemma4", "demo/qwen3", "virtual:2xl4", "virtual:2xh200"]
    assert "Did you mean" not in str(unknown_name("name", name, known))


@pytest.mark.parametrize("name", ["", "zzzz", None, 7])
def test_nothing_is_suggested_where_nothing_is_near(name):
    assert "Did you mean" not in str(unknown_name("device", name, ["cuda", "cpu"]))
