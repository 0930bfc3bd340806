"""The tuner on a real GPU: what was predicted of each config is what is launched; tuning picks, keeps, and isn't done twice."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tune"))
from toy import LEAVES_OUT, TOY, ToyShape, toy_config

from toolkit import tune
from toolkit.kernels.base import Config
from toolkit.kernels.registry import find_kernel
from toolkit.tune import store
from toolkit.tune.cards import find_card
from toolkit.tune.compiling import Job, compile_configs
from toolkit.tune.limits import obstacle
from toolkit.tune.timing import CudaClock

SHAPE = ToyShape(1024, 1024, 1024)
ODD = ToyShape(1000, 24, 333)
TILES = [
    Config(block_m=m, block_n=n, block_k=k, fault=0, warps=warps, stages=stages)
    for m, n in ((16, 64), (128, 128))
    for k in (32, 128)
    for warps in (4, 8)
    for stages in (1, 3, 5)
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "SHIPPED", tmp_path / "shipped")


def problems():
    yield pytest.param(TOY, SHAPE, TILES, id="toy")
    yield pytest.param(TOY, ODD, TILES[::3], id="toy, sizes that divide by nothing")
    for name in ("attention_decode", "int4_matmul", "delta_step"):
        kernel = find_kernel(name)
        shape = next(iter(kernel.known.values()))
        yield pytest.param(kernel, shape, list(kernel.space(shape))[:16], id=name)


@pytest.mark.parametrize(("kernel", "shape", "configs"), list(problems()))
def test_predicted_is_launched(kernel, shape, configs):
    card = find_card("cuda")
    jobs = {config: Job(shape, config, card.spec.compute_capability) for config in configs}
    found = compile_configs(kernel, jobs.values())
    inputs = kernel.inputs(shape, "cuda")
    launched = 0
    for config, job in jobs.items():
        if obstacle(found[job], card.spec):
            with pytest.raises(Exception, match=r".+"):
                kernel.run(shape, config, inputs)
            continue
        outputs = kernel.outputs(shape, inputs)
        compiled = [launch.run() for launch in kernel.launches(shape, config, inputs, outputs) if 0 not in launch.grid]
        uses = found[job].launches
        assert [one.metadata.shared for one in compiled] == [use.shared_bytes for use in uses], config
        assert [one.n_regs for one in compiled] == [use.registers for use in uses], config
        launched += 1
    assert launched


def test_tuning_finds_keeps_and_is_not_done_twice(monkeypatch):
    configs = [*TILES[:6], toy_config(fault=LEAVES_OUT), toy_config(256, warps=8, stages=5, block_k=128)]
    monkeypatch.setattr(type(TOY), "space", lambda kernel, shape: configs)
    table = tune.warm([(TOY, SHAPE)], "cuda", configs, progress=False)
    verdicts = [row.verdict for row in table.rows]
    assert set(verdicts[:6]) <= {"ok", "slow"}
    assert verdicts[6:] == ["wrong", "excluded"]
    assert "of shared memory" in table.rows[7].reason
    best = table.best(table.gpus[0])
    assert best.clock == "measured"
    assert best.spread_ns < 0.2 * best.ns
    assert best.ns > 0.9 * max(best.compute_ns, SHAPE.m * SHAPE.n * 2 / 1e4)
    choice = tune.choose(TOY, SHAPE, torch.device("cuda"))
    assert (choice.step, choice.config) == ("this device", best.config)

    def never(*_):
        raise AssertionError("timed again")

    monkeypatch.setattr(CudaClock, "__call__", never)
    assert tune.warm([(TOY, SHAPE)], "cuda", configs, progress=False).rows == table.rows


def test_timing_changes_no_inputs():
    """A step of the delta net writes its memory in place: configs that are checked after one that was timed are right too."""
    kernel = find_kernel("delta_step")
    shape = next(iter(kernel.known.values()))
    rows = tune.warm([(kernel, shape)], "cuda", list(kernel.space(shape))[:3], progress=False).rows
    assert {row.verdict for row in rows} <= {"ok", "slow"}
