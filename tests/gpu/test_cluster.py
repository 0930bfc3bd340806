"""`tk.cluster("cuda")` with one rank: processes, models, memory and tuning on a CUDA GPU. test_ranks.py has two GPUs."""

import gc

import psutil
import pytest
import torch

import toolkit as tk
from toolkit.core.errors import DeviceError, RankError
from toolkit.kernels.norms_rope import NormShape
from toolkit.kernels.registry import find_kernel
from toolkit.tune.cards import find_card

pytest.importorskip("ipyparallel", reason="a cluster needs the extra `ranks`")

PROMPT = "The capital of France is"
MiB = 1 << 20


@pytest.fixture(scope="module")
def alone():
    with tk.cluster("cuda", ranks=1) as opened:
        yield opened


def allocated():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # 32 MiB per stream, which stay with the process
    return torch.cuda.current_device(), torch.cuda.memory_allocated()


def test_a_function_runs_on_the_gpu_of_its_rank(alone):
    assert alone.run(allocated) == [(0, 0)]
    assert repr(alone) == "Cluster('cuda', ranks=1, open)"


@pytest.mark.parametrize("decode", ["roundtrip", "cuda-graph", "whole-loop"])
def test_a_model_of_the_cluster_generates_what_a_model_of_this_process_does(alone, gpu, decode):
    ours = tk.generate(tk.load("demo/qwen3", device=gpu, progress=False), PROMPT, decode, max_new_tokens=24)
    model = tk.load("demo/qwen3", cluster=alone, progress=False)
    theirs = tk.generate(model, PROMPT, decode, max_new_tokens=24)
    assert theirs.tokens == ours.tokens
    assert theirs.clock == "measured"
    counts = ["h2d_count", "h2d_bytes", "d2h_count", "d2h_bytes", "d2d_count", "d2d_bytes"]
    assert theirs.copies()[counts].sum().to_dict() == ours.copies()[counts].sum().to_dict()
    model.free()
    assert alone.run(allocated)[0][1] < MiB


def too_much():
    return [torch.empty(1 << 40, device="cuda") for _ in range(2)]


def test_a_rank_without_enough_memory_is_named_and_frees_what_it_held(alone):
    with pytest.raises(RankError, match=r"rank 0 raised OutOfMemoryError at .*test_cluster.py:\d+") as error:
        alone.run(too_much)
    assert str(error.value).endswith("the cluster is still open")
    assert alone.run(allocated)[0][1] < MiB


def measured():
    with tk.memory() as m:
        model = tk.load("demo/qwen3", device="cuda", progress=False)
        tk.generate(model, PROMPT, max_new_tokens=8, record=False)
    return m


def test_memory_by_rank(alone):
    held = alone.memory(measured)
    assert set(held["rank"]) == {0}
    assert held.loc[held["kind"] == "weights", "bytes"].sum() > MiB


def test_tuning_stores_times_of_this_gpu(alone, tmp_path, monkeypatch):
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    problem = (find_kernel("rms_norm"), NormShape(3, 520))
    table = tk.tune.warm([problem], progress=False, cluster=alone)
    assert {(row.verdict, row.clock) for row in table.rows} == {("ok", "measured")}
    assert len(table.rows) == len(problem[0].space(problem[1]))
    assert (tmp_path / "tuned" / f"{find_card('cuda').key}.json").exists()


def test_more_ranks_than_gpus_are_refused():
    count = torch.cuda.device_count()
    with pytest.raises(DeviceError, match=f"this machine has {count} CUDA GPUs?, and each rank needs one"):
        tk.cluster("cuda", ranks=count + 1)


def test_closing_ends_the_process():
    with tk.cluster("cuda", ranks=1) as opened:
        tk.load("demo/qwen3", cluster=opened, progress=False)
        (pid,) = opened.pids
        assert psutil.pid_exists(pid)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
