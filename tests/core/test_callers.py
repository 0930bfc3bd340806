"""Whose code a line is: the user's own, or an installed package's."""

import linecache
import subprocess
import sys
from types import SimpleNamespace

import pytest

from toolkit.core import callers


@pytest.fixture
def fresh():
    callers._installed_prefixes.cache_clear()
    yield
    callers._installed_prefixes.cache_clear()


def test_packages_in_a_folder_of_their_own_are_not_the_users_code(tmp_path, monkeypatch, fresh):
    """`pip install --target` puts packages into any folder, with the metadata that pip writes."""
    packages, project = tmp_path / "packages", tmp_path / "project"
    (packages / "some-1.0.dist-info").mkdir(parents=True)
    for folder in (packages, project):
        monkeypatch.syspath_prepend(folder)
    assert callers.is_installed(str(packages / "some" / "module.py"))
    assert not callers.is_installed(str(project / "train.py"))


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
