"""Tests of what objects hold: slots, keys, tables, frames and errors, sparse tensors, and caches of several kinds."""

import sys
from functools import lru_cache

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import toolkit as tk
from toolkit.vram import owners


@pytest.fixture(autouse=True)
def gpu():
    return tk.device("virtual:h200")


def tensor():
    return torch.ones(4, device="vgpu")


def names(variables):
    return {holder.owner: holder.kind for (on, _), holder in owners.find(variables).items() if on == "vgpu"}


def with_attribute(value):
    value.held = tensor()
    return value


class OneSlot:
    __slots__ = "held"


class Documented:
    __slots__ = {"held": "a tensor"}


class Private:
    __slots__ = ("__held",)

    def __init__(self):
        self.__held = tensor()


def objects():
    array = np.empty((2, 2), object)
    array[1, 0] = tensor()
    return array


def series():
    array = np.empty(2, object)
    array[1] = tensor()
    return pd.Series(array)


def failed():
    def fails():
        held = tensor()
        raise ValueError(held.shape)

    try:
        fails()
    except ValueError as error:
        return error


def ended():
    def returns():
        held = tensor()
        return held.shape and sys._getframe()

    return returns()


@pytest.mark.parametrize(
    ("make", "owner"),
    [
        (lambda: with_attribute(OneSlot()), "x.held"), (lambda: with_attribute(Documented()), "x.held"),
        (Private, "x._Private__held"), (lambda: {tensor(): 1}, "x (its key 0)"), (objects, "x[1, 0]"), (series, "x[1]"),
        (lambda: pd.DataFrame({"a": [1, 2], "b": series()}), "x['b'][1]"),
        (lambda: failed().__traceback__, "x: held in fails()"), (ended, "x: held in returns()"),
        (lambda: ExceptionGroup("two", [KeyError(), failed()]),
            "x (its traceback): held in fails() (the traceback of ValueError)"),
    ],
)  # fmt: skip
def test_a_path_leads_to_the_tensor(make, owner):
    assert list(names({"x": make()})) == [owner]


@pytest.mark.parametrize(("name", "attributes"), [("KVCache", "x"), ("PagedKVCache", "x"), ("Cache", "kv"), ("MyCache", "kv")])
def test_caches_of_keys_and_values_have_a_kind_of_their_own(name, attributes):
    cache = type(name, (), {})()
    for attribute in attributes:
        setattr(cache, attribute, [tensor()])
    assert set(names({"cache": cache}).values()) == {"kv"}


def cached():
    @lru_cache
    def table():
        return tensor()

    table()
    return table


@pytest.mark.parametrize("make", [cached, lambda: with_attribute(type("ResultCache", (), {})())])
def test_other_caches_hold_activations(make):
    assert set(names({"x": make()}).values()) == {"activations"}


def test_gradients_of_other_tensors_than_leaves_have_owners():
    x = tensor().requires_grad_()
    y = x * 2
    y.retain_grad()
    y.sum().backward()
    assert names({"x": x, "y": y})["y.grad"] == "gradients"


ROWS, COLUMNS = {"crow_indices", "col_indices", "values"}, {"ccol_indices", "row_indices", "values"}


@pytest.mark.parametrize(
    ("convert", "pieces"),
    [
        (torch.Tensor.to_sparse, {"_indices", "_values"}), (torch.Tensor.to_sparse_csr, ROWS),
        (torch.Tensor.to_sparse_csc, COLUMNS), (lambda dense: dense.to_sparse_bsr((2, 2)), ROWS),
    ],
)  # fmt: skip
def test_sparse_tensors_own_their_indices_and_values(gpu, convert, pieces):
    x = convert(torch.eye(4)).to("vgpu")
    x.requires_grad_()
    before = gpu.now_ns()
    found = names({"x": x})
    assert gpu.now_ns() == before
    assert found.keys() == {f"x.{piece}()" for piece in pieces}


def test_sparse_gradients_have_an_owner():
    table = nn.Embedding(10, 4, sparse=True).to("vgpu")
    table(torch.arange(3).to("vgpu")).sum().backward()
    kinds = names({"table": table})
    assert kinds["table.weight.grad._indices()"] == kinds["table.weight.grad._values()"] == "gradients"
