"""`%%copies` in a real IPython shell, on the virtual GPU."""

from __future__ import annotations

import pytest
from IPython.core.interactiveshell import InteractiveShell

import toolkit


@pytest.fixture(scope="module")
def shell() -> InteractiveShell:
    made = InteractiveShell.instance()
    toolkit.load_ipython_extension(made)
    made.run_cell("import torch, toolkit as tk; gpu = tk.device('virtual:h200'); x = torch.ones(4, device=gpu.torch)")
    return made


def run(shell: InteractiveShell, cell: str, capsys: pytest.CaptureFixture[str]):
    result = shell.run_cell(cell)
    return result, capsys.readouterr().out


def test_shows_copies_and_lines_and_keeps_the_cells_names(shell, capsys) -> None:
    result, out = run(shell, "%%copies\ny = torch.tensor([1, 2], device=gpu.torch)\nn = (x * 2).sum().item()", capsys)
    assert result.success
    assert "h2d_count" in out
    assert "d2h" in out
    assert "modelled" in out
    assert shell.user_ns["n"] == 8.0


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
    assert run(shell, "%%copies\nx.sum().item()", capsys)[0].success  # the recorder was given back


def test_nothing_ran(shell, capsys) -> None:
    assert "nothing was copied" in run(shell, "%%copies\n1 + 1", capsys)[1]
