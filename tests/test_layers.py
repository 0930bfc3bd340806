"""The package's shape: which file may import which, what `import toolkit` costs, and the README's tree."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "toolkit"
# A file imports only from rows above its own.
ROWS = [
    "errors", "units", "trace", "ledger", "traces", "devices", "replaying", "owners", "shortage", "accounting", "budgeting",
    "formats", "quant", "repack", "fitting", "recipes",
    "kernels", "models", "costing", "planning", "chat", "tokenizer_gguf", "tokenizer", "hf", "loading", "describing",
    "decode", "quantisation", "quantising", "exporting", "demo", "bench", "notebook", "__main__",
]  # fmt: skip
FRONT_END = ("IPython", "ipywidgets", "anywidget", "plotly", "ipykernel", "traitlets")
FILES = sorted(PACKAGE.rglob("*.py"))


def row(module: str) -> int:
    return ROWS.index(module.split(".")[1])


def imports_of(path: Path) -> list[tuple[str, bool]]:
    """(module, is it inside a function) of every import in a file, type-checking ones left out."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.extend((alias.name, inside) for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "toolkit" else [node.module]
            found.extend((name, inside) for name in whole)
        for child in ast.iter_child_nodes(node):
            visit(child, inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text()), False)
    return found


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", FILES, ids=[module_of(path) for path in FILES])
def test_imports_only_from_rows_above(path: Path) -> None:
    module = module_of(path)
    if module == "toolkit":
        pytest.skip("the package's own face names every row, and loads each on first use")
    for imported, inside in imports_of(path):
        if not imported.startswith("toolkit."):
            continue
        shows = inside and imported.startswith(("toolkit.notebook", "toolkit.traces")) and module != "toolkit.units"
        assert row(imported) <= row(module) or shows, f"{module} imports {imported}, which is in a row below"


@pytest.mark.parametrize("path", FILES, ids=[module_of(path) for path in FILES])
def test_front_end_is_imported_by_notebook_alone(path: Path) -> None:
    if "notebook" in path.relative_to(PACKAGE).parts:
        return
    used = [name for name, _ in imports_of(path) if name.split(".")[0] in FRONT_END]
    assert not used


def test_files_stay_short() -> None:
    long = {
        module_of(path): n for path in FILES if "kernels" not in path.parts and (n := len(path.read_text().splitlines())) > 450
    }
    assert not long


def test_no_module_bears_the_name_of_a_public_function() -> None:
    import toolkit

    assert not {path.stem for path in PACKAGE.iterdir()} & {name for name in toolkit.__all__ if name.islower()} - {
        "__version__"
    }


HEAVY = [
    "triton",
    "IPython",
    "ipywidgets",
    "anywidget",
    "plotly",
    "pandas",
    "gguf",
    "tokenizers",
    "transformers",
    "jinja2",
    "safetensors",
]


AFTER_TORCH = """
import os, sys, time, torch
sys.stdout.flush()
for number in range({times}):
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
        continue
    {code}
    sys.stdout.flush()
    os._exit(0)
"""


def after_torch(code: str, times: int = 1) -> list[str]:
    """What a line of Python prints in a process that has imported PyTorch and nothing else, so many processes one by one."""
    script = AFTER_TORCH.format(code=code, times=times)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


def test_import_is_free_makes_no_virtual_gpu_and_asks_no_gpu() -> None:
    code = (
        "before = set(sys.modules); t = time.perf_counter(); import toolkit;"
        f"print(time.perf_counter() - t, [m for m in {HEAVY} if m in sys.modules and m not in before]);"
        "assert not torch.cuda.is_initialized(); assert not hasattr(torch, 'vgpu');"
        "import logging; assert not logging.getLogger('toolkit').handlers"
    )
    runs = [line.split(maxsplit=1) for line in after_torch(code, times=3)]
    assert len(runs) == 3
    assert all(loaded == "[]" for _, loaded in runs), runs
    assert min(float(seconds) for seconds, _ in runs) < 0.2


def tree_of_readme() -> set[str]:
    """The paths named in the README's layout tree, a folder's with a slash at its end."""
    block = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no layout tree"
    paths, stack = set(), []
    for line in block[1].splitlines():
        match = re.match(r"( *)(\S+)", line)
        if not match:
            continue
        depth = len(match[1]) // 2
        stack = [*stack[:depth], match[2]]
        paths.add("".join(stack))
    return paths


def test_readme_tree_is_the_disk() -> None:
    named = tree_of_readme()
    missing = sorted(path for path in named if not (ROOT / path).exists())
    assert not missing, "in the README's tree, not on disk"
    tracked = subprocess.run(["git", "ls-files", "toolkit"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    modules = {path for path in tracked if path.endswith((".py", ".js")) and not path.endswith("__init__.py")}
    assert not sorted(modules - named), "on disk, not in the README's tree"


def test_public_names_all_load() -> None:
    import toolkit

    needs_lab = {"Lab"}
    for name in set(toolkit.__all__) - needs_lab:
        assert getattr(toolkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        toolkit.nonsense  # noqa: B018  # the access is the test
