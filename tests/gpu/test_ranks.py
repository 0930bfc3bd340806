"""A model over the CUDA GPUs of this machine, by torchrun: results, races, traces and memory, next to those of virtual GPUs."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

import toolkit as tk
from tests.gpu.ranks_programs import LATE_US, SECTIONS
from toolkit.bench.ranks import LATE_SUMS

RANKS = 1 << (max(2, torch.cuda.device_count()).bit_length() - 1)  # the GPUs, or the next power of two below
LIMIT_S = 400  # for all sections together; on two H200s, 60 s with compiled kernels, and up to three times as much without

pytestmark = pytest.mark.timeout(LIMIT_S + 100)  # the first test's fixture runs all sections


def torchrun(*arguments, seconds):
    """Run a module on all ranks, and show what it prints. Returns whether it ended with success."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(port), "-m", *arguments]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stdout=sys.stderr, start_new_session=True)
    try:
        return process.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        if process.poll() is None:
            os.killpg(process.pid, 15)
            process.wait()


def run_sections(folder, device, sections, seconds):
    """Run the sections, and after one that fails those that follow it. Returns the results of all ranks by section."""
    ends, left = time.monotonic() + seconds, list(sections)
    while left and time.monotonic() < ends:
        torchrun("tests.gpu.ranks_programs", str(folder), device, *left, seconds=ends - time.monotonic())
        done = [section for section in left if all((folder / f"{section}-{rank}.json").exists() for rank in range(RANKS))]
        failed = next((section for section in left if section not in done), None)
        left = [] if failed is None else left[left.index(failed) + 1 :]
    found = {}
    for section in sections:
        files = [folder / f"{section}-{rank}.json" for rank in range(RANKS)]
        found[section] = [json.loads(file.read_text()) if file.exists() else {"error": "no result"} for file in files]
        print(section, json.dumps(found[section])[:3000], file=sys.stderr, flush=True)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda")


@pytest.fixture(scope="module")
def real(folder):
    return run_sections(folder, "cuda", SECTIONS, LIMIT_S)


@pytest.fixture(scope="module")
def virtual(tmp_path_factory):
    return run_sections(tmp_path_factory.mktemp("virtual"), "virtual:h200", ["steps"], 60)["steps"]


def results(found, section):
    for rank, one in enumerate(found[section]):
        assert "error" not in one, f"rank {rank}: {one['error']}"
    return found[section]


@pytest.mark.parametrize("section", ["sums", "by_nccl"])
def test_sums_are_those_of_the_reference_and_the_same_on_all_ranks(real, section):
    found = results(real, section)
    assert [one["wrong"] for one in found] == [[]] * RANKS
    assert all(one["bits"] == found[0]["bits"] for one in found)
    assert bool(found[0]["why_not"]) == (section == "by_nccl")


def test_many_in_a_row(real):
    assert [one["wrong"] for one in results(real, "race")] == [[]] * RANKS


def test_products_send_their_results(real):
    found = results(real, "products")
    assert [one["wrong"] for one in found] == [[]] * RANKS
    assert [one["sent"] for one in found] == [[True, True, False]] * RANKS
    assert all(one["bits"] == found[0]["bits"] for one in found)


def test_experts_send_their_results(real):
    for one in results(real, "experts"):
        assert {"int4_matmul", "moe_step"} <= set(one["kernels"])
        assert one["sent"] == dict.fromkeys(tk.STRATEGIES, one["tokens"])


def test_tokens_are_those_of_one_gpu(real):
    for rank, one in enumerate(results(real, "tokens")):
        assert all(one.values()), (rank, [title for title, same in one.items() if not same])


def test_tokens_by_nccl(real):
    found = results(real, "by_nccl")
    for one in found:
        assert one["double-buffered"] == one["cuda-graph"] == found[0]["cuda-graph"]
    assert "NCCL" in found[0]["whole-loop"]  # refused


def test_steps_are_those_of_virtual_gpus(real, virtual):
    for rank, (ours, modelled) in enumerate(zip(results(real, "steps"), virtual, strict=True)):
        assert ours.keys() == modelled.keys()
        for title in ours:
            for name in ("copies", "collectives", "meta"):
                assert ours[title][name] == modelled[title][name], (rank, title, name)


def test_memory_is_that_of_virtual_gpus(real, virtual):
    for rank, (ours, modelled) in enumerate(zip(results(real, "steps"), virtual, strict=True)):
        for title in ours:
            assert (ours[title]["held"], ours[title]["peak"]) == (modelled[title]["held"], modelled[title]["peak"]), (
                rank,
                title,
            )


def test_a_late_rank_is_found(real, folder):
    found = results(real, "late")
    trace = tk.open_trace([folder / f"late-rank{rank}.npz" for rank in range(RANKS)])
    table = trace.collectives()
    assert len(table) == LATE_SUMS
    worst = table.loc[table["rank0_wait_us"][1:].idxmax()]  # before the first one, ranks wait for the hosts of others
    assert worst["seq"] == LATE_SUMS // 2
    assert worst["last_rank"] == RANKS - 1
    assert worst["rank0_wait_us"] == pytest.approx(found[-1]["slept_us"], abs=10)
    assert found[-1]["slept_us"] == pytest.approx(LATE_US, rel=0.05)


def test_blocks_of_weights_that_ranks_divide_unequally(real):
    found = results(real, "uneven")
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 1e-2)):
        assert sorted(one[dtype]["columns"] for one in found) == [256] * (RANKS - 1) + [512]
        for one in found:
            assert one[dtype]["error"] < limit
            assert one[dtype]["tokens"] == [one[dtype]["tokens"][0]] * len(tk.STRATEGIES)
    assert all(one["float32"]["tokens"][0] == one["float32"]["of_one"] for one in found)


def test_a_whole_loop(real):
    found = results(real, "loop")
    assert {(row[2], row[4]) for row in found[0]["collectives"]} == {("0", RANKS)}
    assert min(row[3] for row in found[0]["collectives"]) > 0
    assert all([row[:7] for row in one["collectives"]] == [row[:7] for row in found[0]["collectives"]] for one in found)
    assert all("stop" in one["refused"] for one in found)


def test_packages_of_a_divided_model(tmp_path, monkeypatch):
    monkeypatch.setenv("PACKAGES", str(tmp_path / "packages"))
    options = {"device": "cuda", "context": 128, "progress": False}
    tk.export("demo/qwen3", tmp_path / "packages", budget="2 GiB", tensor_parallel=RANKS, **options)
    for found in results(run_sections(tmp_path, "cuda", ["packages"], 120), "packages"):
        assert len(found) == len(tk.STRATEGIES)
        for name, (ours, wanted) in found.items():
            assert ours == wanted, name
