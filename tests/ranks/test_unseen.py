"""Blocks that record or measure this process, around work on a cluster: they would see nothing of the ranks."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

import toolkit as tk
from toolkit.core.errors import RankError, RecorderError
from toolkit.ranks.cluster import Cluster
from toolkit.ranks.remote import RankedModel
from toolkit.testing.measure import Recorder

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with tk.cluster("virtual:2xh200") as opened:
        yield opened


@pytest.fixture(scope="module")
def model(pair: Cluster) -> RankedModel:
    return tk.load("demo/qwen3", cluster=pair)


WORK: dict[str, Callable[[Any], object]] = {
    "generate": lambda model: tk.generate(model, PROMPT, max_new_tokens=2),
    "unrecorded": lambda model: tk.generate(model, PROMPT, max_new_tokens=2, record=False),
    "compare": lambda model: tk.compare(model, PROMPT, ["roundtrip"], max_new_tokens=2),
    "load": lambda model: tk.load("demo/qwen3", cluster=model.cluster),
    "run": lambda model: model.cluster.run(abs, -1),
    "spread": lambda model: list(model.cluster.spread(abs, [-1])),
}


@pytest.mark.parametrize("work", WORK.values(), ids=WORK)
@pytest.mark.parametrize(
    ("block", "found"),
    [
        (lambda gpu: tk.copy_budget(h2d=0, d2h=0, device=gpu), "this process records virtual:h200 .*function"),
        (tk.record, "this process records virtual:h200 .*Do it outside of that block.* function .*contain"),
        (lambda _: tk.record("cpu"), "this process records cpu "),
        (Recorder, "this process records virtual:h200 .*or a test with a budget"),
        (tk.memory, "this process measures its own memory .*cluster.memory a function that contains the block"),
    ],
    ids=["copy-budget", "record", "record-cpu", "test", "memory"],
)
def test_work_on_ranks_is_refused_in_a_block_of_this_process(
    model: RankedModel, work: Callable[[Any], object], block: Callable[[Any], AbstractContextManager[Any]], found: str
) -> None:
    with pytest.raises(RecorderError, match=found), block(tk.device("virtual:h200")):
        work(model)
    work(model)


def test_a_measurement_of_the_ranks_is_refused_too(pair: Cluster) -> None:
    with pytest.raises(RecorderError, match="measuring the memory of measures: this process records"), tk.record("cpu"):
        pair.memory(measures)
    with pytest.raises(RecorderError, match="measuring the memory of measures: this process measures its own"), tk.memory():
        pair.memory(measures)
    with tk.memory():
        assert len(pair.memory_now()) == 2  # says itself that it is about the ranks


def test_a_measured_function_is_a_block_too(model: RankedModel) -> None:
    with pytest.raises(RecorderError, match="this process measures its own memory"):
        tk.memory(tk.generate)(model, PROMPT)


def test_a_run_in_this_process_is_no_block(model: RankedModel) -> None:
    """Its recording has the events of its own thread only. Here, a run on the ranks begins between its tokens."""
    alone, runs = tk.load("demo/qwen3", "virtual:h200", progress=False), []
    tk.generate(alone, PROMPT, max_new_tokens=2, on_token=lambda *_: runs.append(WORK["generate"](model)))
    assert len(runs) == 2


def generates(d2h: int) -> int:
    held = tk.load("demo/qwen3", device="virtual:h200", tensor_parallel=2, progress=False)
    with tk.copy_budget(d2h=d2h):
        return len(tk.generate(held, PROMPT, "roundtrip", max_new_tokens=2).tokens)


def measures() -> Any:
    with tk.memory() as m:
        held = tk.load("demo/qwen3", device="virtual:h200", tensor_parallel=2, progress=False)
        tk.generate(held, PROMPT, max_new_tokens=2)
    return m


def test_what_the_errors_advise_works(pair: Cluster, model: RankedModel) -> None:
    run = tk.generate(model, PROMPT, "roundtrip", max_new_tokens=3)
    assert run.copies().d2h_count.sum() > 0
    assert set(run.trace["rank"].tolist()) == {0, 1}
    assert pair.run(generates, 100) == [2, 2]
    with pytest.raises(RankError, match=r"rank \d raised CopyBudgetError at .*: at most 0 D2H copies in the block: "):
        pair.run(generates, 0)
    assert set(pair.memory(measures)["rank"]) == {0, 1}


@pytest.fixture
def shell(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, model: RankedModel) -> Iterator[InteractiveShell]:
    monkeypatch.setenv("TOOLKIT_CACHE", str(tmp_path))
    made = InteractiveShell.instance()
    tk.load_ipython_extension(made)
    made.push({"tk": tk, "model": model})
    yield made
    made.run_cell("%memory off")
    for name in ("run", "model", "tk"):  # `reset` would also delete what processes of other tests need of `__main__`
        made.user_ns.pop(name, None)
    gc.collect()


CELL = "run = tk.generate(model, [1, 2, 3], max_new_tokens=2)"


@pytest.mark.parametrize("magic", ["%%copies", "%%copies --budget-d2h 0", "%%memory"])
def test_magics_show_the_error(shell: InteractiveShell, capsys: pytest.CaptureFixture[str], magic: str) -> None:
    result = shell.run_cell(f"{magic}\n{CELL}")
    out = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert isinstance(result.error_in_exec, RecorderError)
    assert out.count("RecorderError: generating with 'demo/qwen3': this process ") == 1
    assert shell.run_cell(CELL).success


def test_memory_on_refuses_nothing(shell: InteractiveShell) -> None:
    assert shell.run_cell("%memory on").success
    assert shell.run_cell(CELL).success
