# No `from __future__ import annotations`: shapes are also defined where annotations are types, as in a notebook's cell.
"""Tests of configs and shapes as data: they round-trip through their repr and through files."""

import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from toolkit.core.errors import ToolkitError
from toolkit.kernels.base import Config, Launch, Shape, config_grid
from toolkit.tune.store import from_words, words


@dataclass(frozen=True)
class Rows(Shape):
    """Sizes of three kinds."""

    n: int
    scheme: str = "q4_k"
    gated: bool = False


@dataclass(frozen=True)
class Later(Shape):
    """The same shape with annotations as strings."""

    n: "int"
    scheme: "str" = "q4_k"
    gated: "bool" = False


@pytest.mark.parametrize("kind", [Rows, Later])
@pytest.mark.parametrize("values", [(43008,), (1, "int4-g64", True)], ids=str)
def test_a_shape_is_its_key(kind, values):
    shape = kind(*values)
    again = kind.from_key(shape.key)
    assert again == shape
    assert [type(value) for value in vars(again).values()] == [int, str, bool]


@pytest.mark.parametrize("key", ["n=1 scheme=q4_k", "n=1 scheme=q4_k gated=True more=2", "n=one scheme=q4_k gated=True", "n",
                                 "n=1 scheme=q4_k gated=true", "n=1 scheme=q4_k gated=1"])  # fmt: skip
def test_a_key_of_something_else_is_refused(key):
    with pytest.raises(ValueError, match=r"."):
        Rows.from_key(key)


def test_a_config_is_pasted_and_kept_as_it_is():
    config = Config(block_n=64, split=2, warps=8, stages=3)
    assert eval(repr(config), {"Config": Config}) == config
    assert Config(**config.to_dict()) == config
    assert (config["block_n"], config["split"], config.warps, config.stages) == (64, 2, 8, 3)


def test_a_config_names_a_carveout_only_if_it_has_one():
    config = Config(block_n=64, warps=8, stages=3)
    half = config.prefer(50)
    assert (config.carveout, half.carveout) == (-1, 50)
    assert "carveout" not in config.to_dict()
    assert eval(repr(half), {"Config": Config}) == half == from_words(words(half)) != config
    assert half.prefer(-1) == config
    with pytest.raises(KeyError):
        config["block_m"]


def test_a_config_holds_whole_numbers():
    config = Config(fused=True, block=np.int64(64), warps=np.int32(8))
    assert repr(config) == "Config(fused=1, block=64, warps=8, stages=1)"
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    for value in ("fast", 0.5, None):
        with pytest.raises(TypeError):
            Config(mode=value)


@pytest.mark.parametrize(
    "wrong", [{"carveout": 500}, {"carveout": -2}, {"stages": -1}, {"warps": 3}, {"warps": 0}, {"warps": 64}], ids=str
)
def test_a_config_that_no_gpu_accepts_is_refused_when_it_is_made(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ToolkitError, match=rf"^Config\({name}={value}\): .+ Give "):
        Config(block=64, **wrong)
    if name == "carveout":
        with pytest.raises(ToolkitError, match="carveout"):
            Config(block=64).prefer(value)


def test_a_grid_has_the_default_first_and_each_once():
    found = config_grid(Config(block=64, warps=8), warps=(4, 8), block=(32, 64))
    assert found[0] == Config(block=64, warps=8)
    assert len(found) == len(set(found)) == 4
    assert len(config_grid(Config(block=64, stages=2), block=(128,))) == 2


def test_a_limit_of_registers_is_an_option_of_triton():
    launch = Launch(None, (1,), {}, warps=8, stages=2)
    assert launch.options((9, 0)) == {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": True}
    assert replace(launch, registers=128).options((8, 0)) == {**launch.options((8, 0)), "maxnreg": 128}


def test_a_launch_returns_a_kernel_that_was_compiled_in_the_background():
    class Function:
        """Stands for a `triton.jit` function whose compiled kernel another thread makes."""

        def __getitem__(self, grid):
            assert grid == (3,)
            return lambda **_: SimpleNamespace(result=lambda: "compiled")

    assert Launch(Function(), (3,), {}).run() == "compiled"
