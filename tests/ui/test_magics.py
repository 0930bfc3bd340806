"""Tests of `%%copies` in a real IPython shell, on the virtual GPU."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator

import pytest
from IPython.core.interactiveshell import InteractiveShell

import toolkit


@pytest.fixture(scope="module")
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell.instance()
    toolkit.load_ipython_extension(made)
    made.run_cell("import torch, toolkit as tk; gpu = tk.device('virtual:h200'); x = torch.ones(4, device=gpu.torch)")
    yield made
    made.reset()  # frees the tensors that the cells left on the card
    sys.modules["__main__"].__dict__.setdefault("__spec__", None)  # `reset` deletes it, and multiprocessing reads it
    gc.collect()


def run(shell: InteractiveShell, cell: str, capsys: pytest.CaptureFixture[str]):
    result = shell.run_cell(cell)
    return result, capsys.readouterr().out


def test_shows_copies_and_lines_and_keeps_the_cells_names(shell, capsys) -> None:
    result, out = run(shell, "%%copies\ny = torch.tensor([1, 2], device=gpu.torch)\nn = (x * 2).sum().item()", capsys)
    assert result.success
    head, row = (line.split() for line in out.splitlines()[:2])
    assert {"h2d_count", "d2h_count", "d2d_count", "host_wait_us"} < {*head}, "a terminal shows all columns"
    assert len(row) == len(head) + 1
    assert row[-1] == "modelled"
    assert shell.user_ns["n"] == 8.0


def test_the_display_of_the_result_is_not_counted(shell, capsys) -> None:
    result, out = run(shell, "%%copies --budget-d2h 0\nx * 3", capsys)
    assert result.success
    assert out.index("tensor([3., 3., 3., 3.]") < out.index("launches") < out.index("copies that display the cell's result")
    assert "d2h  modelled" not in out
    assert shell.user_ns["_"].tolist() == [3.0] * 4
    inner = "get_ipython().run_cell_magic('copies', '', 'x * 4')"
    assert "tensor([4., 4., 4., 4.]" in run(shell, f"%%copies --budget-d2h 0\n{inner}", capsys)[1]
    assert "copies that display" not in run(shell, "%%copies\nx.shape", capsys)[1]
    assert "tensor([5." in run(shell, "x * 5", capsys)[1]  # the next cell displays its result as before
    result, out = run(shell, "%%copies\nx[5]", capsys)
    assert not result.success
    assert "tensor([6." in run(shell, "x * 6", capsys)[1]


@pytest.mark.parametrize("magic", ["%%copies", "%%memory"])
def test_a_semicolon_at_the_end_keeps_the_result_from_being_displayed(shell, capsys, magic) -> None:
    out = run(shell, f"{magic}\nx * 7;", capsys)[1]
    assert "tensor(" not in out
    assert "copies that display" not in out
    assert "tensor([8." in run(shell, f"{magic}\nx * 7;\nx * 8", capsys)[1]
    assert "it's done" in run(shell, f'{magic}\n!echo "it\'s done"', capsys)[1]
    for broken in ("y = (1,", "s = '''abc", "if x:\n        y\n    z"):
        result, out = run(shell, f"{magic}\n{broken}", capsys)
        assert not result.success
        assert "TokenError" not in out


@pytest.mark.parametrize("show", ["print", "display"])
def test_what_the_cell_itself_prints_is_counted_at_its_line(shell, capsys, show) -> None:
    out = run(shell, f"%%copies\ny = x * 2\n{show}(y)", capsys)[1]
    assert re.search(r"cell \d+:2 +d2h", out)
    assert "copies that display" not in out


def test_multi_line_strings_survive(shell, capsys) -> None:
    run(shell, '%%copies\ntext = """a\n  b\'\'\'\n"""', capsys)
    assert shell.user_ns["text"] == "a\n  b'''\n"


def test_a_budget_names_the_line_after_the_tables(shell, capsys) -> None:
    result, out = run(shell, "%%copies --budget-d2h 0\nx.sum().item()", capsys)
    assert type(result.error_in_exec).__name__ == "CopyBudgetError"
    assert "h2d_count" in out
    assert "Traceback" not in out
    ok, _ = run(shell, "%%copies --budget-d2h 1 --budget-h2d 0\nx.sum().item()", capsys)
    assert ok.success


@pytest.mark.parametrize(
    ("line", "said"),
    [("--device virtual:nothing", "Known:"), ("--nonsense", "unrecognized"), ("--budget-h2d many", "invalid int"),
     ("--device 'open", "quotation")],
)  # fmt: skip
def test_wrong_options_say_what_is_wrong(shell, capsys, line: str, said: str) -> None:
    result = shell.run_cell(f"%%copies {line}\nran_anyway = True")
    captured = capsys.readouterr()
    assert not result.success
    assert said in captured.out + captured.err
    assert "Traceback" not in captured.out
    assert "ran_anyway" not in shell.user_ns


def test_an_error_of_the_cell_is_shown_once_and_stops(shell, capsys) -> None:
    result, out = run(shell, "%%copies\n1 / 0", capsys)
    assert isinstance(result.error_in_exec, ZeroDivisionError)
    assert out.count("division by zero") == 1
    assert "Nothing ran on the device" not in out
    assert "launches" in run(shell, "%%copies\nx * 2\n1 / 0", capsys)[1]  # what ran before the error is shown
    assert run(shell, "%%copies\nx.sum().item()", capsys)[0].success  # the recorder was given back


def test_nothing_ran(shell, capsys) -> None:
    assert "nothing was copied" in run(shell, "%%copies\n1 + 1", capsys)[1]


def test_await_is_refused_by_its_name(shell, capsys) -> None:
    shell.run_cell("%%copies\nimport asyncio\nawait asyncio.sleep(0)\nawaited = True")
    said = capsys.readouterr()
    assert "await" in said.out + said.err
    assert "tk.record" in said.out + said.err
    assert "awaited" not in shell.user_ns


def test_a_syntax_error_is_shown_once(shell, capsys) -> None:
    result = shell.run_cell("%%copies\n1 +\n")
    said = capsys.readouterr()
    assert not result.success
    assert (said.out + said.err).count("invalid syntax") == 1
    assert "Nothing ran on the device" not in said.out
    assert "Traceback" not in said.out + said.err


def test_inside_a_recording_the_cell_runs_and_the_recording_has_its_events(shell, capsys) -> None:
    result, out = run(shell, "%%copies\nget_ipython().run_cell_magic('copies', '', 'inner = x.sum().item()')", capsys)
    assert result.success
    assert "being recorded" in out
    assert "d2h" in out
    assert shell.user_ns["inner"] == 4.0


def test_a_line_is_named_by_the_cell_that_ran_it_last(shell) -> None:
    record = "with tk.record(gpu) as trace:\n    x.sum().item()"
    for _ in range(2):  # the same text twice: the same file name for Python, another cell for people
        number = len(shell.history_manager.input_hist_parsed)
        shell.run_cell(record, store_history=True)
        rows = shell.user_ns["trace"].to_pandas().query("kind == 'd2h'")
        assert rows["where"].tolist() == [f"cell {number}:2"]
        assert rows["cell"].tolist() == [number]


def test_a_magic_names_its_own_cell(shell, capsys) -> None:
    number = len(shell.history_manager.input_hist_parsed)
    shell.run_cell("%%copies\nx.sum().item()", store_history=True)
    assert f"cell {number}:1" in capsys.readouterr().out
