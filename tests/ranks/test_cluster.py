"""`tk.cluster`: functions on several ranks, and what happens if one of them fails."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
import torch.distributed as dist

import toolkit as tk
from tests.tune.test_shipped import untimed
from toolkit.bench.traces import Case, record_traces
from toolkit.core.errors import CancelledError, DeviceError, ModelError, RankError, ToolkitError, UnknownNameError
from toolkit.core.extras import install_command
from toolkit.core.version import __version__
from toolkit.decode.prefix import Prefix
from toolkit.gpu.opening import open_device
from toolkit.ranks import begun, remote
from toolkit.ranks import rank as on_rank
from toolkit.ranks.cluster import Cluster, check_versions, checked
from toolkit.ranks.engines import START_S
from toolkit.ranks.rank import Failure, versions
from toolkit.ranks.waiting import error_of
from toolkit.trace.events import Trace
from toolkit.trace.join import join
from toolkit.tune import problems_of
from toolkit.ui.lessons.two_gpus import record, two_runs

WAIT_S = 5  # in a collective, for a rank that does not arrive
SOON_S = 30  # "seconds", on a machine that is busy with other tests


@pytest.fixture
def pair(clusters: list[Cluster]) -> Cluster:
    """Two ranks for all tests. After one that ends them, others may run: pytest-xdist hands tests out in any order."""
    if not clusters or clusters[-1].closed:
        clusters.append(tk.cluster("virtual:2xh200"))
    return clusters[-1]


@pytest.fixture
def impatient(pair: Cluster) -> Iterator[Cluster]:
    """The two ranks, in a group that waits for WAIT_S only: on a machine that stands still, others could be as late."""
    usual, pair.timeout_s = pair.timeout_s, WAIT_S
    pair._enter()
    yield pair
    pair.timeout_s = usual
    pair._enter()


def when(files: Iterable[Path], then: Callable[[], None]) -> None:
    """Call `then` in a thread once the ranks have made all of these files, or after SOON_S."""

    def wait() -> None:
        ends = time.monotonic() + SOON_S
        while not all(file.exists() for file in files) and time.monotonic() < ends:
            time.sleep(0.01)
        then()

    threading.Thread(target=wait, daemon=True).start()


def sums(x: torch.Tensor) -> torch.Tensor:
    print(f"first line\nrank is {dist.get_rank()}")
    y = x.to("vgpu") * (1 + dist.get_rank())
    total = y.cpu()
    dist.all_reduce(total)
    return total


def test_results_come_by_rank_and_printed_lines_with_it(pair: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    found = pair.run(sums, torch.tensor([1.0, 2.0]))
    assert [each.tolist() for each in found] == [[3.0, 6.0]] * 2
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["rank 0: first line", "rank 0: rank is 0", "rank 1: first line", "rank 1: rank is 1"]


class Card:
    """Stands for a CUDA GPU that fails, works on, or is idle."""

    name, torch = "cuda:0", torch.device("cuda")

    def __init__(self, state: str) -> None:
        self.state, self.ends = state, threading.Event()

    def sync(self) -> None:
        if self.state == "fails":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if self.state == "is still working":
            self.ends.wait(60)


@pytest.mark.parametrize(("state", "says"), [("fails", "illegal memory"), ("is still working", "is still working"), ("", "")])
def test_a_gpu_that_is_not_idle_enters_no_group(state: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_rank, "IDLE_S", 0.2 if state == "is still working" else SOON_S)
    card = Card(state)
    with pytest.raises(RankError, match=says) if says else nullcontext():
        on_rank._check_idle(card)
    card.ends.set()


def where() -> tuple[str, str, int]:
    return os.environ["RANK"], open_device("vgpu").name, os.getpid()


def test_each_rank_is_a_process_with_its_own_card(pair: Cluster) -> None:
    assert pair.run(where) == [("0", "virtual:h200", pair.pids[0]), ("1", "virtual:h200", pair.pids[1])]
    assert repr(pair) == "Cluster('virtual:h200', ranks=2, open)"


CELLS = """
import torch.distributed as dist
SCALE = 10
def helper(x):
    return SCALE * x
def of_a_notebook(x, fails=False):
    if fails and dist.get_rank() == 1:
        raise ValueError("no such token")
    dist.barrier()
    return helper(x) + dist.get_rank()
"""


@pytest.fixture
def of_a_notebook(tmp_path: Any) -> Any:
    """A function that no module has, with the other names of its notebook."""
    file, names = tmp_path / "cell.py", {"__name__": "__main__"}
    file.write_text(CELLS)
    exec(compile(CELLS, str(file), "exec"), names)
    return names["of_a_notebook"]


def test_functions_of_a_notebook_bring_the_names_that_they_use(pair: Cluster, of_a_notebook: Any) -> None:
    assert pair.run(of_a_notebook, x=2) == [20, 21]


def test_an_error_names_the_rank_and_the_line(pair: Cluster, of_a_notebook: Any) -> None:
    """Rank 0 waits in a collective, which ends long before its timeout."""
    began = time.monotonic()
    assert pair.timeout_s > 2 * SOON_S
    with pytest.raises(RankError, match=r"rank 1 raised ValueError at .*cell.py:8 \(raise .*\): no such token") as error:
        pair.run(of_a_notebook, 2, fails=True)
    assert time.monotonic() - began < SOON_S
    assert error.value.facts["rank"] == 1
    assert "Traceback" in error.value.__notes__[0]
    assert str(error.value).endswith("the cluster is still open")
    assert pair.run(of_a_notebook, 2) == [20, 21]


def too_much() -> None:
    kept = torch.zeros(1 << 20, device="vgpu")
    if dist.get_rank() == 0:
        kept = torch.cat([kept, torch.empty(1 << 40, device="vgpu")])
    dist.barrier()


def leaves() -> None:
    sys.exit("enough")


def test_keyword_arguments_of_any_name_reach_the_function(pair: Cluster) -> None:
    options = {"self": 1, "function": 2, "doing": 3, "cancel": 4}
    assert pair.run(dict, **options) == [options] * 2
    with pytest.raises(
        RankError, match=r"rank \d raised TypeError: too_much\(\) takes 0 positional arguments but 1 was given\. "
    ):
        pair.run(too_much, 1)


def keeps_a_lock() -> Any:
    return threading.Lock()


def raises_its_own_cause() -> None:
    error = ValueError("no such token")
    raise error from error


def raises_a_cause_that_nobody_raised() -> None:
    raise ValueError("no such token") from RuntimeError("inner")


def raises_half_of_a_surrogate_pair() -> None:
    raise ValueError("no such \udce4")


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (raises_its_own_cause, r"rank [01] raised ValueError at .*test_cluster.py:\d+ .*: no such token"),
        (raises_a_cause_that_nobody_raised, r"rank [01] raised ValueError at .*test_cluster.py:\d+ .*: no such token"),
        (raises_half_of_a_surrogate_pair, r"rank [01] raised ValueError at .*test_cluster.py:\d+ .*: no such \udce4"),
        (too_much, r"rank 0 raised OutOfMemoryError at .*test_cluster.py:\d+ \(kept = .*\): CUDA out of memory"),
        (leaves, r"rank [01] raised SystemExit at .*test_cluster.py:\d+ \(sys.*\): enough"),
        (keeps_a_lock, "rank [01] returned what can't be pickled: cannot pickle"),
    ],
    ids=["own-cause", "cause", "surrogate", "out-of-memory", "exit", "a-result-that-cannot-be-sent"],
)
def test_other_errors_of_a_rank(pair: Cluster, function: Any, found: str) -> None:
    with pytest.raises(RankError, match=found):
        pair.run(function)
    assert pair.run(allocated) == [0, 0]


def allocated() -> int:
    return open_device("vgpu").memory().allocated_bytes


class ReadOnRanksOnly:
    def __reduce__(self) -> Any:
        return on_a_rank, ()


def on_a_rank(*_: Any) -> Any:
    if "RANK" not in os.environ:
        raise ValueError("no rank")
    return ReadOnRanksOnly()


def test_a_result_that_only_the_ranks_can_read(pair: Cluster) -> None:
    found = r"rank 0 returned what can't be read in this process \(no rank\). Return plain values and CPU tensors"
    with pytest.raises(RankError, match=found):
        pair.run(on_a_rank)
    with pytest.raises(RankError, match=found.replace("rank 0", r"rank \d", 1)):
        list(pair.spread(on_a_rank, [1]))
    assert pair.run(allocated) == [0, 0]


def leaves_the_group(*_: Any) -> int:
    """As many programs do at their end."""
    dist.destroy_process_group()
    return 1


def enters_another_group(*_: Any) -> int:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return 1


@pytest.mark.parametrize("function", [leaves_the_group, enters_another_group])
def test_a_function_may_leave_the_group(pair: Cluster, function: Any) -> None:
    assert pair.run(function) == [1, 1]
    assert [each.tolist() for each in pair.run(sums, torch.tensor([1.0]))] == [[3.0]] * 2
    assert list(pair.spread(function, [0])) == [(0, 1)]
    assert [each.tolist() for each in pair.run(sums, torch.tensor([1.0]))] == [[3.0]] * 2


def one_never_arrives() -> None:
    while dist.get_rank() == 1:
        time.sleep(0.01)
    dist.barrier()


def test_a_rank_that_never_arrives_is_named_with_its_line(impatient: Cluster) -> None:
    with pytest.raises(RankError, match=r"rank 1 did not arrive at a collective .* at .*test_cluster.py:\d+ \((while|time)"):
        impatient.run(one_never_arrives)
    assert impatient.run(allocated) == [0, 0]


def waits_for_the_other(begins: str) -> None:
    if dist.get_rank() == 0 or begins == "the same":
        dist.all_reduce(torch.ones(1 + dist.get_rank()))
    else:
        dist.barrier()


@pytest.mark.parametrize(
    ("begins", "waits"),
    [
        ("another", r"rank 0 waited at .*:\d+ \(dist.all_reduce.*\) and rank 1 waited at .*:\d+ \(dist.barrier\(\)\)"),
        ("the same", r"ranks 0, 1 waited at .*:\d+ \(dist.all_reduce.*\)"),
    ],
)
def test_ranks_that_wait_for_each_other_are_named(impatient: Cluster, begins: str, waits: str) -> None:
    found = rf"rank [01] timed out in a collective: {waits}\. Run the same collectives on all ranks, with .* shapes"
    with pytest.raises(RankError, match=found):
        impatient.run(waits_for_the_other, begins)


def one_returns(begun: Path | None = None) -> None:
    if dist.get_rank() == 0:
        if begun is not None:
            begun.touch()
        dist.barrier()


def one_waits_by_itself() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True).wait()


@pytest.mark.parametrize(("function", "line"), [(one_returns, r"dist.barrier\(\)"), (one_waits_by_itself, ".*wait.*")])
def test_a_rank_that_returns_while_another_waits_for_it_is_named(pair: Cluster, function: Any, line: str) -> None:
    found = rf"rank 1 returned without taking part in a collective in which rank 0 waited at .*:\d+ \({line}\)\. "
    with pytest.raises(RankError, match=f"{found}Run the same collectives on all ranks.*still open") as caught:
        pair.run(function)
    assert caught.value.facts == {"rank": 1}
    assert "On rank 0:" in caught.value.__notes__[0]
    assert [each.tolist() for each in pair.run(sums, torch.tensor([1.0]))] == [[3.0]] * 2


def test_a_rank_that_waits_for_one_that_has_returned_can_be_interrupted(pair: Cluster, tmp_path: Path) -> None:
    cancel = threading.Event()
    when([tmp_path / "begun"], cancel.set)
    with pytest.raises(CancelledError, match="still open"):
        pair.run_as("waiting", cancel, one_returns, tmp_path / "begun")


def one_sleeps(begun: Path) -> None:
    if dist.get_rank() == 0:
        begun.touch()
        time.sleep(1000)


def test_an_interrupt_arrives_though_a_rank_that_has_returned_was_killed(pair: Cluster, tmp_path: Path) -> None:
    cancel = threading.Event()

    def ends_one() -> None:
        kill(pair.pids[1:])
        wait_for(pair, [0])
        cancel.set()

    when([tmp_path / "begun"], lambda: threading.Timer(1, ends_one).start())
    with pytest.raises(CancelledError, match="the cluster is closed"):
        pair.run_as("sleeping", cancel, one_sleeps, tmp_path / "begun")
    assert pair.closed


def two_work_on() -> float:
    """Rank 1 returns. The others go on among themselves, with pauses in which they look as if they waited for it."""
    x, pair = torch.ones(1), dist.new_group([0, 2])
    begun.QUIET_S = 0.5  # in this process
    if dist.get_rank() == 2:
        time.sleep(2)
        dist.send(x, 0)
        time.sleep(2)
    elif dist.get_rank() == 0:
        dist.recv(x)
    if dist.get_rank() != 1:
        dist.all_reduce(x, group=pair)
    return float(x)


def test_a_rank_may_return_before_the_others() -> None:
    with tk.cluster("cpu", 3) as cluster:
        assert cluster.run(two_work_on) == [2.0, 1.0, 2.0]
        assert cluster.run(two_work_on) == [2.0, 1.0, 2.0]  # in a new group


def measured(ranks: int = 2) -> Any:
    with tk.memory() as m:
        model = tk.load("demo/qwen3", device="virtual:h200", tensor_parallel=ranks, progress=False)
        cache = model.new_cache(512)  # noqa: F841  # alive at the end of the block
    return m


def test_memory_by_rank_kind_and_owner(pair: Cluster) -> None:
    pair.memory(measured)  # another time later: what was measured before is not mistaken for another rank's
    found = pair.memory(measured)
    sums = found.groupby(["rank", "kind"]).bytes.sum()
    planned = tk.plan("demo/qwen3", "h200", context=512, tensor_parallel=2).by_rank()
    for rank, row in zip((0, 1), planned.itertuples(), strict=True):
        assert (sums[rank, "weights"], sums[rank, "kv"]) == (row.weights_bytes, row.state_bytes)
        owners = set(found.owner[found["rank"] == rank])
        assert {"model.embed.weight", "model.layers.0.attention.o.weight", "cache.states[0].keys"} <= owners
    with pytest.raises(
        RankError, match=r"rank \d raised ToolkitError.*the memory of allocated: it returned 0, not a meas"
    ) as caught:
        pair.memory(allocated)
    assert caught.value.asked == "measuring the memory of allocated on 2 ranks"
    with pytest.raises(RankError, match="3 is not a function"):
        pair.memory(3)  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"^setting a budget on 2 ranks: rank . raised ToolkitError: a size of '8 apples'"):
        pair.budget("8 apples")
    model = tk.load("demo/qwen3", cluster=pair)
    with pytest.raises(
        RankError, match=r"already allocated\. Set a budget of at least .* MiB, or free memory first\. Then run"
    ):
        pair.budget("3 MiB")
    model.free()


def first_holds_more() -> None:
    if dist.get_rank() == 0:
        globals()["kept"] = torch.zeros(12 << 20, dtype=torch.uint8, device="vgpu")


def first_lets_go() -> None:
    globals().pop("kept", None)


def has_room_for(n_bytes: int) -> bool:
    try:
        torch.empty(n_bytes, dtype=torch.uint8, device="vgpu")
    except torch.OutOfMemoryError:
        return False
    return True


def test_a_budget_that_one_rank_refuses_changes_nothing(pair: Cluster) -> None:
    pair.budget("64 MiB")
    pair.run(first_holds_more)
    with pytest.raises(RankError, match=r"rank 0 raised BudgetError: .* already allocated"):
        pair.budget("8 MiB")
    pair.run(first_lets_go)
    assert pair.run(has_room_for, 40 << 20) == [True, True]
    assert pair.run(has_room_for, 80 << 20) == [False, False]
    pair.budget(None)
    assert pair.run(has_room_for, 80 << 20) == [True, True]


def opens_another() -> None:
    if dist.get_rank() == 1:
        open_device("virtual:h100")


def test_a_rank_that_opened_another_gpu_returns_to_that_of_the_cluster(pair: Cluster) -> None:
    pair.run(opens_another)
    first, second = pair.memory_now()
    assert first.total_bytes == second.total_bytes
    pair.run(opens_another)
    pair.budget("1 GiB")
    pair.budget(None)


def first_works_more() -> None:
    if dist.get_rank() == 0:
        torch.ones(1 << 24, device="vgpu").sum()


def test_runs_begin_at_the_same_time_on_all_ranks(pair: Cluster) -> None:
    model = tk.load("demo/qwen3", cluster=pair)
    for decode in ("roundtrip", "double-buffered", "cuda-graph"):
        pair.run(first_works_more)
        table = tk.generate(model, [1, 2, 3], decode, max_new_tokens=4).trace.ranks()
        assert table[["last_count", "wait_us"]].to_numpy().tolist() == [[0, 0], [0, 0]]
    model.free()


def test_the_recorded_runs_of_the_lesson_are_those_of_a_cluster(pair: Cluster) -> None:
    """Their times depend a little on the version of PyTorch."""
    for ours, theirs in zip(record(pair), two_runs(), strict=True):
        found, wanted = join(ours, ["rank 0", "rank 1"]).collectives(), theirs.collectives()
        same = ["step", "operation", "algorithm", "group_size", "bytes", "last_rank"]
        pd.testing.assert_frame_equal(found[same], wanted[same])
        assert found.rank0_wait_us.sum() == pytest.approx(wanted.rank0_wait_us.sum(), rel=0.1)
        assert found.rank1_wait_us.sum() == pytest.approx(wanted.rank1_wait_us.sum(), rel=0.1)


def divides(x: int) -> float:
    return 1 / x


def test_what_cannot_be_run(pair: Cluster) -> None:
    with pytest.raises(RankError, match="can't be pickled"):
        pair.run(print, threading.Lock())
    with pytest.raises(RankError, match="3 is not a function"):
        pair.run(3)  # type: ignore[arg-type]
    with pytest.raises(RankError, match="ZeroDivisionError") as caught:
        list(pair.spread(divides, [1, 0]))
    assert caught.value.__notes__[-1] == "The cluster is still open."
    for ranks in ([], [2], [-1], [True], ["0"], 1, "01", [0, None]):
        with pytest.raises(RankError, match=r"ranks=.* are not ranks of the cluster. Give a list of ranks from 0 to 1"):
            pair.spread(abs, [-1], ranks)  # type: ignore[arg-type]
    with pytest.raises(RankError, match=r"the items are 5\. Give a list of them"):
        pair.spread(abs, 5)  # type: ignore[arg-type]
    with pytest.raises(RankError, match="3 is not a function"):
        pair.spread(3, [-1])  # type: ignore[arg-type]
    with pytest.raises(RankError, match="can't be pickled"):
        pair.spread(print, [threading.Lock()])
    for some in ({0}, range(1), np.array([0, 0]), (0, 1)):
        assert list(pair.spread(abs, [-1], some)) == [(0, 1)]  # type: ignore[arg-type]


def test_a_model_on_a_cluster_is_loaded_generated_from_and_compared(pair: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    alone = tk.load("demo/qwen3", "virtual:h200", progress=False)
    model = tk.load("demo/qwen3", cluster=pair)
    assert repr(model) == "RankedModel('demo/qwen3' on Cluster('virtual:h200', ranks=2, open))"
    assert [str(report.shard) for report in model.reports] == ["rank 0 of 2", "rank 1 of 2"]
    options: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.7, "seed": 3}
    run = tk.generate(model, "The capital", "cuda-graph", on_token=lambda token, text: print(token), **options)
    assert run.tokens == tk.generate(alone, "The capital", "cuda-graph", **options).tokens
    assert run.device == "2 x virtual:h200"
    assert set(run.trace["rank"].tolist()) == {0, 1}
    assert len(run.trace.collectives()) == 4 * 8
    assert capsys.readouterr().out.splitlines() == [f"rank 0: {token}" for token in run.tokens]
    with pytest.warns(UserWarning, match="top_p=0.9 has no effect") as warned:  # in this process: ranks print no warnings
        tk.generate(model, [1, 2, 3], max_new_tokens=1, top_p=0.9)
    assert [each.filename for each in warned] == [__file__]
    table = tk.compare(model, [1, 2, 3], ["roundtrip", "whole-loop"], max_new_tokens=3).table
    assert list(table["strategy"]) == ["roundtrip", "whole-loop"]
    assert table["same_tokens"].all()
    with pytest.raises(RankError, match="UnknownNameError: decode strategy 3: no such name"):
        tk.compare(model, "The", 3)  # type: ignore[arg-type]
    with pytest.raises(ToolkitError, match="Compare models of clusters one at a time"):
        tk.compare({"ours": model}, "The")
    with pytest.raises(UnknownNameError, match="decode strategy"):
        tk.generate(model, "The", "cuda-graphs")
    model.free()
    for run in (tk.generate, tk.compare):
        with pytest.raises(ModelError, match="with 'demo/qwen3': its weights were freed"):
            run(model, "The")
    model.free()


def held() -> list[int]:
    return sorted(remote._models)


def fails_on_the_last_rank(*args: Any) -> None:
    if dist.get_rank() == 1:
        raise MemoryError("no room")
    remote._models[args[0]] = "a part"


def test_models_without_handles_are_freed(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, lost = (tk.load("demo/qwen3", cluster=pair) for _ in range(2))
    del lost
    with monkeypatch.context() as patch:
        patch.setattr(remote, "_load", fails_on_the_last_rank)
        with pytest.raises(RankError, match="no room"):
            tk.load("demo/qwen3", cluster=pair)
    another = tk.load("demo/qwen3", cluster=pair)
    assert pair.run(held) == [[kept._number, another._number]] * 2
    kept.free()
    another.free()


def test_what_only_works_in_one_process_is_refused(pair: Cluster) -> None:
    with pytest.raises(ModelError, match=r"device='cpu', tensor_parallel=1. Leave them out: the cluster has 2 ranks"):
        tk.load("demo/qwen3", "cpu", cluster=pair)
    with pytest.raises(ModelError, match="a function of progress"):
        tk.load("demo/qwen3", cluster=pair, progress=print)
    with pytest.raises(ModelError, match=r"cancel=3: not a threading.Event"):
        tk.load("demo/qwen3", cluster=pair, cancel=3)
    with pytest.raises(ModelError, match="an instance of Linear onto a cluster: its weights are in this process"):
        tk.load(torch.nn.Linear(2, 2), cluster=pair)
    with pytest.raises(ModelError, match="that is no cluster"):
        tk.load("demo/qwen3", cluster=2)
    model = tk.load("demo/qwen3", cluster=pair)
    with pytest.raises(ModelError, match="prefix= only works in one process"):
        tk.generate(model, "The", prefix=model)
    with pytest.raises(ModelError, match="its cache would be in this process"):
        Prefix(model, "The", 64)
    model.free()


def ranks_of_loaded(code: str) -> int:
    return eval(code, {"tk": tk}).report.shard.ranks  # type: ignore[no-any-return]


def test_a_function_that_uses_a_handle_says_what_to_do_instead(pair: Cluster) -> None:
    model = tk.load("demo/qwen3", dtype="bfloat16", cluster=pair)
    with pytest.raises(RankError, match=r"^running <lambda> on 2 ranks: .* the model 'demo/qwen3': it is a handle") as caught:
        pair.run(lambda: tk.generate(model, "The"))
    load = caught.value.do.partition(": ")[2]
    assert load == "tk.load('demo/qwen3', dtype='bfloat16', device='virtual:h200', tensor_parallel=2)"
    assert pair.run(ranks_of_loaded, load) == [2, 2]
    with pytest.raises(RankError, match=r"sending a cluster: only the process that opened .*such as cluster\.ranks"):
        list(pair.spread(lambda _: pair.ranks, [1]))
    model.free()


def shapes_of_a_part() -> Any:
    return tk.load("demo/qwen3", device="virtual:h200", tensor_parallel=2, progress=False).kernel_shapes()


def untimed_half(model: str) -> list[tuple[str, str, str]]:
    return untimed(tk.load(f"random/{model}", device="virtual:h200", scheme="q4_k_m", tensor_parallel=2, progress=False))


@pytest.mark.parametrize("model", ["gemma4-31b", "qwen3.5-35b-a3b"])
def test_kernels_of_half_a_model_that_take_longest_were_timed(model: str, pair: Cluster) -> None:
    assert pair.run(untimed_half, model) == [[], []]


def test_what_needs_the_weights_in_this_process_says_what_to_give_instead(pair: Cluster, tmp_path: Path) -> None:
    model = tk.load("demo/qwen3", dtype="bfloat16", cluster=pair)
    for call in (tk.plan, tk.costs):
        with pytest.raises(ModelError, match=r"the ranks of a cluster hold its weights\. Give its name") as caught:
            call(model)
        assert "'demo/qwen3', dtype='bfloat16'" in caught.value.do
        eval(caught.value.do.partition(": ")[2])
    for options in ({}, {"tensor_parallel": 2}):
        with pytest.raises(
            ModelError, match="exporting a model on a cluster: the ranks of a cluster hold its weights"
        ) as caught:
            tk.export(model, tmp_path, **options)
        assert caught.value.do.endswith("tk.export('demo/qwen3', dtype='bfloat16', tensor_parallel=2, path=FOLDER)")
    with pytest.raises(ModelError, match=r"tuning for a model on a cluster: the ranks of .* in a function for cluster\.run"):
        tk.tune.warm(model, cluster=pair)
    pairs = pair.run(shapes_of_a_part)[0]
    assert problems_of(pairs) == pairs
    model.free()


def test_an_error_of_the_toolkit_on_a_rank_keeps_its_advice(pair: Cluster) -> None:
    with pytest.raises(RankError) as caught:
        tk.load("demo/gemma5", cluster=pair)
    assert caught.value.asked == "loading 'demo/gemma5' on 2 ranks"
    assert re.fullmatch("rank [01] raised UnknownNameError: .*no such name", caught.value.found)
    assert 'Did you mean "demo/gemma4"' in caught.value.do
    assert caught.value.do.endswith(". Then run again: the cluster is still open")


@pytest.mark.parametrize(
    ("do", "told"),
    [
        ("Use a smaller one", "Use a smaller one. Then run again"),
        ("Use a smaller one.", "Use a smaller one. Then run again"),
        ("Use 1, 2, 4, 8, ...", "Use 1, 2, 4, 8, ... Then run again"),
    ],
)
def test_the_advice_of_a_rank_ends_with_one_full_stop(do: str, told: str) -> None:
    assert error_of("running f", 1, Failure("raised ToolkitError", "too large", do=do)).do == told


def kept_group() -> Any:
    import torch._dynamo

    return torch.distributed.nn.functional.broadcast.__defaults__


def test_the_compiler_does_not_keep_the_group(pair: Cluster) -> None:
    """A rank that fails must leave the group, or the others would wait for it."""
    assert pair.run(kept_group) == [(None,)] * 2


def test_a_divided_model_has_a_trace_of_all_ranks(pair: Cluster, tmp_path: Path) -> None:
    case = Case("demo/qwen3", None, ("cuda-graph",), prompt=19, tokens=12, steps=2)
    (file,) = record_traces("virtual:h200", tmp_path, [case], pair)
    assert file == tmp_path / "2xh200" / "qwen3" / "cuda-graph.trace"
    trace = Trace.load(file)
    assert (trace["start_ns"].min(), set(trace["step"].tolist()), len(trace.ranks())) == (0, {5, 6}, 2)
    assert trace.collectives()["step"].tolist() == [5] * 8 + [6] * 8


def test_cancel_interrupts_all_ranks(pair: Cluster, tmp_path: Path) -> None:
    model, event, begun = tk.load("demo/qwen3", cluster=pair), threading.Event(), tmp_path / "begun"
    when([begun], event.set)
    options: dict[str, Any] = {"on_token": lambda token, text: begun.touch(), "max_new_tokens": 2000}
    with pytest.raises(CancelledError, match=r"generating on 2 ranks: it was cancelled. .*: the cluster is still open"):
        tk.generate(model, "The capital of France is", cancel=event, **options)
    assert len(tk.generate(model, "The", max_new_tokens=2).tokens) == 2
    model.free()
    with pytest.raises(CancelledError, match="loading 'demo/qwen3' on 2 ranks"):
        tk.load("demo/qwen3", cluster=pair, cancel=event)
    assert not any(pair.run(held))


def stops_between_two_collectives() -> None:
    """As an interrupt does, which stops ranks at different places."""
    open_device("vgpu").machine.collectives += dist.get_rank()
    raise ValueError("stopped")


def test_collectives_match_after_a_function_that_failed(pair: Cluster) -> None:
    with pytest.raises(RankError, match="stopped"):
        pair.run(stops_between_two_collectives)
    model = tk.load("demo/qwen3", cluster=pair)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # that of collectives that don't match
        assert len(tk.generate(model, "The", max_new_tokens=2).trace.collectives()) == 2 * 8
    model.free()


def waits_for_a_signal(begun: Path) -> None:
    """Rank 1 waits for rank 0, so it ends when rank 0 is interrupted, also without a signal of its own."""
    rank = dist.get_rank()
    begun.with_name(f"begun-{rank}").touch()
    if rank == 1:
        dist.barrier()
    time.sleep(SOON_S)


def takes_a_moment(begun: Path) -> int:
    begun.touch()
    time.sleep(1)
    return dist.get_rank()


def test_a_late_signal_stops_no_other_function(pair: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that passes a signal on is stopped until the signal is waited for, or the next function has begun."""
    event, begun, again = threading.Event(), [tmp_path / f"begun-{rank}" for rank in range(2)], tmp_path / "again"
    (late,) = [each for each in psutil.Process(pair.pids[1]).children() if "ipyparallel.engine.nanny" in each.cmdline()]
    interrupt = pair._engines.interrupt

    def resumes(ranks: Iterable[int]) -> Callable[[float], None]:
        arrived = interrupt(ranks)
        return lambda seconds: (late.resume(), arrived(seconds))[1]

    monkeypatch.setattr(pair._engines, "interrupt", resumes)
    when(begun, event.set)
    when([again], late.resume)
    late.suspend()
    try:
        with pytest.raises(CancelledError, match="the cluster is still open"):
            pair.run_as("waiting", event, waits_for_a_signal, tmp_path / "begun")
        assert pair.run(takes_a_moment, again) == [0, 1]
    finally:
        late.resume()


def is_killed() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_is_killed_ends_the_cluster(pair: Cluster) -> None:
    model = tk.load("demo/qwen3", cluster=pair)
    processes, began = psutil.Process().children(recursive=True), time.monotonic()
    assert set(pair.pids) <= {each.pid for each in processes}
    with pytest.raises(RankError, match=r"rank 1 was killed by signal 9 .*the cluster is closed"):
        pair.run(is_killed)
    assert time.monotonic() - began < SOON_S
    assert pair.closed
    assert_ended(processes)
    with pytest.raises(RankError, match=r"the cluster is closed. Open a new one: tk.cluster"):
        pair.run(allocated)
    with pytest.raises(RankError, match=r"spreading abs over 2 ranks: the cluster is closed. Open a new one"):
        pair.spread(abs, [-1])
    model.free()  # its memory is free already


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SOON_S)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    ("arguments", "error", "found"),
    [
        (("cpu",), RankError, '"2xcpu", or pass ranks=2'),
        (("virtual:h200",), RankError, '"virtual:2xh200", or pass ranks=2'),
        (("cpu", 0), RankError, "not a whole number from 1 to 64"),
        (("cpu", True), RankError, "not a whole number from 1 to 64"),
        (("virtual:l4", 0), RankError, r'Try tk.cluster\("virtual:l4", 2\)'),
        (("cpu", 10**9), RankError, "not a whole number from 1 to 64"),
        (("virtual:0xh200",), RankError, "not a whole number from 1 to 64"),
        (("virtual:2xh200", 4), RankError, "the name asks for 2 ranks"),
        (("virtual:2xh2000",), UnknownNameError, 'Did you mean "virtual:2xh200"'),
        (("virtual:2 x h200",), UnknownNameError, 'Did you mean "virtual:2xh200"'),
        (("virtual:3x H200",), UnknownNameError, 'Did you mean "virtual:3xh200"'),
        (("virtual:2x2xh200",), UnknownNameError, 'Did you mean "virtual:2xh200"'),
        (("virtual:2xcuda",), UnknownNameError, 'Did you mean "2xcuda"'),
        (("cdua", 2), UnknownNameError, 'Did you mean "cuda"'),
        (("h200", 4), UnknownNameError, 'Did you mean "virtual:h200"'),
        (("virtual:H200",), UnknownNameError, 'Did you mean "virtual:2xh200"'),
        (("2xh200",), UnknownNameError, 'Did you mean "virtual:2xh200"'),
        (("64xcuda",), DeviceError, 'Use virtual GPUs: "virtual:64xh200"'),
        (("cuda", 64), DeviceError, r"this machine has \d+ CUDA GPUs, and each rank needs one"),
    ],
    ids=str,
)
def test_bad_clusters_start_no_process(arguments: tuple[Any, ...], error: type[Exception], found: str) -> None:
    before = psutil.Process().children(recursive=True)
    with pytest.raises(error, match=found):
        tk.cluster(*arguments)
    assert set(psutil.Process().children(recursive=True)) <= set(before)  # one of an earlier test may end now


def test_without_gpus_virtual_ones_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, advised in ((("cuda",), 2), (("cuda", 3), 3), (("2xcuda",), 2)):
        with pytest.raises(DeviceError, match=f'has 0 CUDA GPUs.* Use virtual GPUs: "virtual:{advised}xh200"'):
            checked(*arguments)
    with pytest.raises(RankError, match=r'Try tk.cluster\("virtual:h200", 2\)'):
        checked("0xcuda")


@pytest.mark.parametrize("option", ["timeout_s", "silent_s"])
def test_bad_times(option: str) -> None:
    with pytest.raises(RankError, match=f"{option}=0 is not a number of seconds"):
        tk.cluster("cpu", 2, **{option: 0})


@pytest.mark.parametrize("package", ["ipyparallel", "cloudpickle"])
def test_without_its_packages(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(RankError, match=rf"{package} is not installed.*{re.escape(install_command('ranks'))}"):
        tk.cluster("cpu", 2)


def test_processes_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RankError, match=r"a cluster of 2 ranks: its processes can't be started .*stopped with 1"):
        tk.cluster("cpu", 2)


@pytest.mark.usefixtures("python_handles_interrupts")
@pytest.mark.parametrize("process", ["controller", "engine"])
def test_an_interrupt_while_a_process_starts_leaves_none(process: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ipyparallel.cluster import launcher

    started: list[psutil.Process] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(command, **options)
        started.append(psutil.Process(made.pid))
        if process in command:
            signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(launcher, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        tk.cluster("cpu", 2)
    assert len(started) == (1 if process == "controller" else 3)
    assert_ended(started)


@pytest.mark.usefixtures("python_handles_interrupts")
def test_an_interrupt_while_the_controller_starts_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ipyparallel.cluster import launcher

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(command, **options)
        threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()  # it takes longer to write its files
        return made

    monkeypatch.setattr(launcher, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        tk.cluster("cpu", 2)
    gc.collect()
    assert "Task was destroyed" not in caplog.text


def in_a_loop(function: Callable[[], None]) -> None:
    """Call a function as a notebook calls a cell: while an event loop runs."""

    async def cell() -> None:
        function()

    asyncio.run(cell())


@pytest.mark.parametrize("run", [lambda function: function(), in_a_loop], ids=["script", "notebook"])
def test_an_engine_that_ends_while_the_cluster_opens_is_noticed(
    run: Callable[[Callable[[], None]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ipyparallel.cluster import launcher

    engines: list[int] = []

    def start(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        made = subprocess.Popen(command, **options)
        if "engine" in command:
            engines.append(made.pid)
            if len(engines) == 2:
                made.kill()
        return made

    monkeypatch.setattr(launcher, "Popen", start)
    began = time.monotonic()
    with pytest.raises(RankError, match=r"its processes can't be started \(one was killed by signal 9 \(SIGKILL"):
        run(lambda: tk.cluster("cpu", 2).close())
    assert time.monotonic() - began < START_S / 2


def test_without_a_temporary_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "deleted"))
    with pytest.raises(RankError, match=r"a cluster of 2 ranks: its temporary folder can't be made .*set TMPDIR"):
        tk.cluster("cpu", 2)


@pytest.mark.parametrize(("name", "ours"), [("toolkit", __version__), ("torch", torch.__version__)])
def test_ranks_of_other_versions(name: str, ours: str) -> None:
    check_versions("a cluster", [versions(), versions()])
    with pytest.raises(RankError, match=rf"rank 1 has {name} 0.1, and this process has {ours.replace('+', '.')}"):
        check_versions("a cluster", [versions(), versions() | {name: "0.1"}])


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def fails(*_: Any) -> None:
    raise ValueError("out of luck")


def spreads_failure(cluster: Cluster) -> None:
    list(cluster.spread(fails, [1]))


def runs_failure(cluster: Cluster) -> None:
    cluster.run(fails)


@pytest.mark.parametrize("works", [runs_failure, spreads_failure])
def test_an_interrupt_after_a_failure_closes_the_cluster(
    works: Callable[[Cluster], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise some ranks would wait for the others in a group that these have not entered."""
    with tk.cluster("cpu", 1) as alone:
        monkeypatch.setattr(alone, "_enter", interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:
            works(alone)
        assert caught.value.__notes__ == ["The cluster is closed."]
        assert alone.closed


def test_spread_work_whose_ranks_enter_no_group_closes_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RankError("entering a group", "rank 0 failed", "Open the cluster again")

    with tk.cluster("cpu", 1) as alone:
        monkeypatch.setattr(alone, "_enter", lost)
        with pytest.raises(RankError, match=r"rank 0 raised ValueError.*out of luck"):
            spreads_failure(alone)
        assert alone.closed


def starts_a_process(own_session: bool) -> int:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=own_session).pid


def test_all_processes_end_with_the_cluster() -> None:
    with tk.cluster("cpu", 1) as alone:
        started = [psutil.Process(alone.run(starts_a_process, own_session)[0]) for own_session in (False, True)]
        (watcher,) = [each for each in psutil.Process(alone.pids[0]).children() if "ipyparallel.engine.nanny" in each.cmdline()]
        watcher.suspend()  # it would end by itself, a few seconds after the rank
    assert_ended([*started, watcher])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_leaves_the_cluster_alone() -> None:
    with tk.cluster("cpu", 1) as alone:
        child = os.fork()
        if child == 0:
            try:
                with pytest.raises(RankError, match="from which this one was forked, has opened the cluster"):
                    alone.run(abs, -1)
                alone.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert alone.run(abs, -1) == [1]


def runs(cluster: Cluster) -> None:
    cluster.run(time.sleep, 60)


def spreads(cluster: Cluster) -> None:
    list(cluster.spread(time.sleep, [60, 60]))


def sleeps(begun: Path) -> None:
    begun.touch()
    time.sleep(1000)


@pytest.mark.usefixtures("python_handles_interrupts")
@pytest.mark.parametrize(
    "works",
    [lambda pair, file: pair.run(sleeps, file), lambda pair, file: list(pair.spread(sleeps, [file]))],
    ids=["run", "spread"],
)
def test_a_second_interrupt_waits_until_the_ranks_have_recovered(
    works: Callable[[Cluster, Path], object], pair: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = pair._engines.interrupt

    def again(ranks: Iterable[int]) -> Callable[[float], None]:
        signal.raise_signal(signal.SIGINT)
        return interrupt(ranks)

    monkeypatch.setattr(pair._engines, "interrupt", again)
    when([tmp_path / "begun"], lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as caught:
        works(pair, tmp_path / "begun")
    assert caught.value.__notes__ == ["The cluster is still open."]
    assert [each.tolist() for each in pair.run(sums, torch.tensor([1.0]))] == [[3.0]] * 2


def spreads_short_items(cluster: Cluster) -> None:
    list(cluster.spread(time.sleep, [0.001] * 10_000))


@pytest.mark.parametrize("works", [runs, spreads, spreads_short_items])
def test_another_thread_may_close_the_cluster(works: Callable[[Cluster], None]) -> None:
    def close() -> None:
        while not alone._lock.locked():  # on a busy machine, the work begins late
            time.sleep(0.01)
        time.sleep(0.5)
        alone.close()

    with tk.cluster("cpu", 1) as alone:
        threading.Thread(target=close, daemon=True).start()
        with pytest.raises(RankError, match="the cluster was closed by another thread"):
            works(alone)


@pytest.mark.parametrize(("works", "sends"), [(runs, "submit"), (spreads, "submit_to_any")])
def test_another_thread_may_close_the_cluster_just_before_a_function_is_sent(
    works: Callable[[Cluster], None], sends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tk.cluster("cpu", 1) as alone:
        send = getattr(alone._engines, sends)

        def closes_first(*args: Any) -> Any:
            closing = threading.Thread(target=alone.close)
            closing.start()
            closing.join()
            return send(*args)

        monkeypatch.setattr(alone._engines, sends, closes_first)
        with pytest.raises(RankError, match="the cluster was closed by another thread"):
            works(alone)


def test_all_ranks_may_be_killed_while_they_spread_work() -> None:
    with tk.cluster("cpu", 2) as two:
        threading.Timer(0.5, kill, [two.pids]).start()
        with pytest.raises(RankError, match=r"all processes have ended while they worked on items? 0.*: rank 0 was killed"):
            spreads(two)
        assert two.closed


def ends_on_item_3(item: int) -> int:
    if item == 3:
        os._exit(1)
    return item


def test_an_item_that_ends_all_processes_is_named() -> None:
    found = "all processes have ended while they worked on item 3: rank 0 ended with status 1, rank 1 ended with status 1"
    with tk.cluster("cpu", 2) as two:
        with pytest.raises(RankError, match=f"{found}. Leave item 3 out, .* Open a new cluster"):
            list(two.spread(ends_on_item_3, [0, 1, 2, 3]))
        assert two.closed


def test_all_ranks_may_be_killed_before_a_cell_runs() -> None:
    def cell() -> None:
        with tk.cluster("cpu", 2) as two:
            kill(two.pids)
            wait_for(two, [])
            with pytest.raises(RankError, match="rank 0 was killed by signal 9"):
                runs(two)
            assert two.closed

    in_a_loop(cell)


def test_a_rank_may_end_just_before_an_item_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with tk.cluster("cpu", 2) as two:
        kill(two.pids[1:])
        wait_for(two, [0])
        found, known = two._engines.alive_ranks, [[0, 1]]
        monkeypatch.setattr(two._engines, "alive_ranks", lambda ranks: known.pop() if known else found(ranks))
        assert sorted(two.spread(abs, [-1, -2])) == [(0, 1), (1, 2)]


def kill(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def wait_for(cluster: Cluster, ranks: list[int]) -> None:
    """Wait until the cluster knows that the processes of the other ranks have ended."""
    deadline = time.monotonic() + SOON_S
    while cluster._engines.alive_ranks(range(cluster.ranks)) != ranks and time.monotonic() < deadline:
        time.sleep(0.05)


@pytest.mark.parametrize("works", [runs, spreads])
def test_a_controller_that_is_killed_leaves_no_process(works: Callable[[Cluster], None]) -> None:
    before = psutil.Process().children(recursive=True)
    with tk.cluster("cpu", 1) as alone:
        started = [each for each in psutil.Process().children(recursive=True) if each not in before]
        os.kill(alone._engines._cluster.controller.process.pid, signal.SIGKILL)
        with pytest.raises(RankError, match="ipyparallel's controller has ended"):
            works(alone)
        assert alone.closed
    assert_ended(started)
