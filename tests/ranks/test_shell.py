"""Commands by torchrun: `python -m toolkit run`, also on two nodes, which are two agents on the loopback, and a benchmark."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import toolkit as tk
from toolkit.__main__ import main
from toolkit.bench.captured_steps import bench

RUN = ("run", "demo/qwen3", "The capital of France is", "--max-new-tokens", "5")
LIMIT_S = 120


def torchrun(
    nodes: int, per_node: int, arguments: Sequence[str], module: str = "toolkit", folders: Sequence[Path | None] = (None, None)
) -> list[subprocess.Popen[str]]:  # fmt: skip
    """Start an agent per node, each of which starts `per_node` ranks. `folders` are the current folders of the nodes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command += ["--nnodes", str(nodes), "--nproc-per-node", str(per_node)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [*command, "--node-rank", str(node), "-m", module, *arguments], env=environment, text=True, cwd=folders[node],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for node in range(nodes)
    ]  # fmt: skip


def printed(agents: list[subprocess.Popen[str]]) -> list[str]:
    """Wait for the agents and return what each printed."""
    found = [agent.communicate(timeout=LIMIT_S) for agent in agents]
    assert [agent.returncode for agent in agents] == [0] * len(agents), found[0][1]
    return [out for out, _ in found]


def test_ranks_of_torchrun_write_one_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.npz"
    one_node = torchrun(1, 2, [*RUN, "--device", "virtual:h200", "--strategy", "cuda-graph", "--save", str(file)])
    (out,) = printed(one_node)
    assert out.startswith(" Paris.")
    assert "Run(cuda-graph on 2 x virtual:h200, 5 tokens" in out  # once
    trace = tk.open_trace(file)
    assert set(trace["rank"].tolist()) == {0, 1}
    assert len(trace.collectives()) == 5 * 8
    assert trace.meta["run"]["tokens"]
    assert main([*RUN, "--device", "cpu"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == out.splitlines()[0]


def test_a_captured_step_of_a_divided_model(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    arguments = ["--model", "random/qwen3-8b", "--prompts", "8", "--device", "virtual:h200", "--out", str(file)]
    printed(torchrun(1, 2, arguments, "toolkit.bench.captured_steps"))
    (both,) = json.loads(file.read_text())["rows"]
    (alone,) = bench("virtual:h200", {"random/qwen3-8b": (8,)})["rows"]
    assert both["ranks"] == 2
    assert alone["ms"] / 2 < both["ms"] < alone["ms"]


def test_two_nodes(tmp_path: Path) -> None:
    """Only node 0 writes, so the other one has no folder for the file."""
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in (folders[0] / "runs", folders[1]):
        folder.mkdir(parents=True)
    arguments = [*RUN, "--device", "cpu", "--strategy", "double-buffered", "--tensor-parallel", "2", "--save", "runs/run.npz"]
    first, second = printed(torchrun(2, 1, arguments, folders=folders))
    assert first.startswith(" Paris.")
    assert not second
    assert tk.open_trace(folders[0] / "runs" / "run.npz").meta["world_size"] == 2


def test_a_file_that_rank_0_cannot_write_ends_all_ranks(tmp_path: Path) -> None:
    (agent,) = torchrun(1, 2, [*RUN, "--device", "cpu", "--save", str(tmp_path / "none" / "run.npz")])
    out, errors = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode != 0
    assert not out
    assert "\nToolkitError: writing" in f"\n{errors}"


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert main([*RUN, "--device", "cpu", "--tensor-parallel", "2"]) == 1
    said = capsys.readouterr().err
    assert "this process belongs to no group. Start one process per rank, with tk.cluster(DEVICE, 2) or torchrun -" in said
    for path, found in ((tmp_path / "none" / "run.npz", "Check that the folder exists"), (tmp_path, "it is a folder")):
        assert main([*RUN, "--device", "cpu", "--save", str(path)]) == 1
        printed = capsys.readouterr()
        assert found in printed.err
        assert not printed.out
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*RUN, "--device", "cpu", "--tensor-parallel", "1"]) == 1
    assert "torchrun started 2. Leave out --tensor-parallel" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("WORLD_SIZE", "abc", "the environment variable WORLD_SIZE is 'abc', not a whole number of at least 1"),
        ("WORLD_SIZE", "0", "the environment variable WORLD_SIZE is '0', not a whole number of at least 1"),
        ("WORLD_SIZE", "", "the environment variable WORLD_SIZE is '', not a whole number of at least 1"),
        ("RANK", "abc", "the environment variable RANK is 'abc', not a whole number of at least 0"),
        ("RANK", "-1", "the environment variable RANK is '-1', not a whole number of at least 0"),
        ("RANK", "2", "RANK is 2, and WORLD_SIZE is 2. Number the processes from 0"),
        ("MASTER_PORT", "abc", "Check MASTER_ADDR and MASTER_PORT"),
    ],
)
def test_wrong_variables_of_a_launcher_are_named(
    name: str, text: str, found: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(other, value)
    monkeypatch.setenv(name, text)
    assert main([*RUN, "--device", "cpu"]) == 1
    assert found in capsys.readouterr().err
