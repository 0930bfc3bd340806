"""Whose code a line is: the user's own, or an installed package's."""

import asyncio
import copy
import heapq
import linecache
import logging
import subprocess
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import toolkit as tk
from toolkit.core import callers


@pytest.fixture
def fresh():
    callers._installed_prefixes.cache_clear()
    yield
    callers._installed_prefixes.cache_clear()


@pytest.fixture
def of_a_script(monkeypatch):
    """As if a script ran: processes of pytest-xdist are started with `python -c`, whose program is "<string>"."""
    monkeypatch.setattr(sys, "argv", ["script.py"])
    callers._library_prefixes.cache_clear()
    monkeypatch.setattr(callers, "_library", {})
    yield
    callers._library_prefixes.cache_clear()


def test_packages_in_a_folder_of_their_own_are_not_the_users_code(tmp_path, monkeypatch, fresh):
    """`pip install --target` puts packages into any folder, with the metadata that pip writes. Those that import torch may be
    the cause of an operation.
    """
    packages, project = tmp_path / "packages", tmp_path / "project"
    (packages / "some-1.0.dist-info").mkdir(parents=True)
    project.mkdir()
    for folder in (packages, project):
        monkeypatch.syspath_prepend(folder)
        (folder / "train.py").write_text("import torch\n")
        (folder / "show.py").write_text("import sys  # not PyTorch\n")
    assert callers.is_installed(str(packages / "some" / "module.py"))
    assert not callers.is_installed(str(project / "train.py"))
    files = [folder / name for folder in (packages, project) for name in ("train.py", "show.py")]
    assert [callers.is_library(str(file)) for file in files] == [False, True, False, False]


def test_lines_that_only_call(tmp_path):
    text = """import sys
x = main()
if __name__ == "__main__":
    main()
    sys.exit(
        main()
    )
    raise SystemExit(main())
with scope():
    main()
"""
    script, broken = tmp_path / "script.py", tmp_path / "broken.py"
    script.write_text(text)
    broken.write_text("main(\n")
    lines = range(1, text.count("\n") + 1)
    assert [line for line in lines if callers.only_calls(str(script), line)] == [4, 5, 6, 7, 8]
    assert not any(callers.only_calls(str(file), 1) for file in (broken, tmp_path / "missing.py", "<stdin>"))


MAIN = """
import torch, toolkit as tk
def make():
    return torch.ones(1 << 20, device="vgpu")
def main():
    tk.device("virtual:8GiB")
    with tk.memory() as m:
        kept = make()
        more = [make() for _ in range(2)]
    print(m.by("line").line.tolist())
if __name__ == "__main__":
    main()
"""


def test_memory_of_a_script_with_a_main_function_has_useful_lines(tmp_path):
    (tmp_path / "train.py").write_text(MAIN)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "['train.py:9', 'train.py:8']\n"


@pytest.mark.parametrize("line", ["\N{SUPERSCRIPT TWO}", "9" * 5000, "-1", ""])
def test_a_place_without_a_line_has_no_source(line):
    assert callers.source_line(f"{__file__}:{line}") is None


@pytest.mark.parametrize("counts_before", [True, False], ids=["newer IPython", "older IPython"])
@pytest.mark.parametrize("latest", [2, 3, 4])
def test_code_that_a_magic_ran_is_of_the_cell_of_the_magic(monkeypatch, counts_before, latest):
    """Newer versions of IPython count a cell before they run it, and give such code the number of the next cell."""
    magic = "get_ipython().run_cell_magic('memory', '', 'a\\nb\\n')"
    cells = ["", "x = 1", magic, "y = 2", "z = 3"][: latest + 1]
    files = {f"<ipython-input-{i}>": (i, text) for i, text in enumerate(cells) if i}
    files["<ipython-input-inner>"] = (2 + counts_before, "a\nb")
    for name, (_, text) in files.items():
        lines = [f"{line}\n" for line in text.split("\n")]
        monkeypatch.setitem(linecache.cache, name, (len(text), None, lines, name))
    shell = SimpleNamespace(
        compile=SimpleNamespace(_filename_map={name: number for name, (number, _) in files.items()}),
        history_manager=SimpleNamespace(input_hist_parsed=cells), execution_count=latest + counts_before,
    )  # fmt: skip
    monkeypatch.setattr(callers, "ipython_shell", lambda: shell)
    callers._is_text_of.cache_clear()
    assert callers.short_path("<ipython-input-inner>") == "cell 2"
    for number in range(1, latest + 1):
        assert callers.short_path(f"<ipython-input-{number}>") == f"cell {number}"
    assert [callers.source_line(f"cell 2:{line}") for line in (1, 2, 3)] == ["a", "b", None]
    assert [callers.source_line(f"cell {i}:1") for i in range(3, latest + 1)] == cells[3:]
    del shell.compile._filename_map["<ipython-input-inner>"]  # as if the same code had run again in another cell
    assert callers.source_line("cell 2:1") is None


@dataclass
class Result:
    loss: torch.Tensor


def with_gradient(loss):
    loss.grad = loss.detach()
    return loss


def in_a_pool(loss):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(loss.cpu).result()


async def in_a_task(loss):
    return await asyncio.to_thread(loss.cpu)


AT_ONE_LINE = {
    "logging": lambda loss: logging.getLogger("test").error("loss %s", loss),
    "copy": lambda loss: copy.deepcopy(torch.nn.Parameter(loss)),
    "averages": lambda loss: AveragedModel(torch.nn.Linear(2, 2).to(loss.device)),
    "heapq": lambda loss: heapq.nlargest(1, [loss, loss + 1], key=float),
    "methods of a dataclass": lambda loss: Result(loss) == Result(loss + 1),
    "unittest": lambda loss: unittest.TestCase().assertEqual(loss, 1.0),  # noqa: PT009
    "functions that a library wraps": lambda loss: torch.nn.utils.clip_grad_norm(with_gradient(loss), 1.0),
    "code that a program writes": lambda loss: exec("float(loss)", {"loss": loss}),
}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.clip_grad_norm`")
@pytest.mark.parametrize("name", AT_ONE_LINE)
def test_libraries_that_use_what_they_are_given_are_no_cause(name, of_a_script):
    gpu = tk.device("virtual:h200")
    loss = torch.ones(1, device=gpu.torch)
    code = AT_ONE_LINE[name].__code__
    with tk.record(gpu) as trace:
        AT_ONE_LINE[name](loss)
    assert set(trace.text("where")) - {None} == {f"{callers.short_path(code.co_filename)}:{code.co_firstlineno}"}


def test_a_copy_in_a_worker_belongs_to_the_line_that_waits_for_it():
    gpu = tk.device("virtual:h200")
    loss = torch.ones(1, device=gpu.torch)
    for work in (in_a_pool, lambda loss: asyncio.run(in_a_task(loss))):
        with tk.record(gpu) as trace:
            work(loss)
        assert all("test_callers.py:" in where for where in trace.select(trace.is_kind("d2h")).text("where"))


@pytest.mark.parametrize("name", ["/tmp/ipykernel_1/7.py", "<ipython-input-3-a>", "<stdin>", "<doctest readme[2]>", "/me/x.py"])
def test_files_and_typed_in_code_are_the_users(name):
    assert not callers.is_library(name)


def test_a_program_on_the_command_line_is_the_users():
    program = """
import torch, toolkit as tk
gpu = tk.device("virtual:h200")
with tk.record(gpu) as trace:
    print("%s" % torch.ones(1, device="vgpu"))
print({*trace.select(trace.is_kind("d2h")).text("where")})
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("{'<string>:5'}\n")
