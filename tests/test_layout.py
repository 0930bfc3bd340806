"""The layout of the package: which file may import which, and the cost of `import toolkit`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.speed import within

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "toolkit"
# From the bottom up: a file imports only from its own package and from packages to the left.
PACKAGES = (
    "core", "trace", "gpu", "weights", "text", "kernels", "tune", "ops", "models", "decode", "loading", "vram", "planning",
    "exporting", "ranks", "testing", "ui", "demo", "bench",
)  # fmt: skip
FRONT_END = ("IPython", "ipywidgets", "anywidget", "plotly", "ipykernel", "traitlets")
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
EXEMPT = {"toolkit"} | {module for module in MODULES if module.endswith("__main__")}


@cache
def imports_of(module: str) -> set[str]:
    """The modules that a module imports, in functions too; imports under `if TYPE_CHECKING` are left out."""
    found: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found.update(name if name in MODULES else node.module for name in names)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(MODULES[module].read_text()))
    return found


def test_every_folder_is_in_the_order() -> None:
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == set(PACKAGES)


@pytest.mark.parametrize("module", sorted(MODULES.keys() - EXEMPT))
def test_imports_go_one_way(module: str) -> None:
    allowed = PACKAGES[: PACKAGES.index(module.split(".")[1]) + 1]
    upwards = [name for name in imports_of(module) if name.startswith("toolkit.") and name.split(".")[1] not in allowed]
    assert not upwards, f"{module} imports from packages above its own"
    if not module.startswith("toolkit.bench"):  # benchmarks measure what users call
        assert "toolkit" not in imports_of(module), f"{module} imports toolkit itself, which is above all packages"


def test_no_imports_in_circles() -> None:
    left = {module: {name for name in imports_of(module) if name in MODULES} - {module} for module in MODULES.keys() - EXEMPT}
    while free := [module for module, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert not left, "these files import each other, or depend on files that do"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_only_ui_imports_the_front_end(module: str) -> None:
    if not module.startswith("toolkit.ui"):
        assert not [name for name in imports_of(module) if name.split(".")[0] in FRONT_END]


def test_every_renderer_exists() -> None:
    import importlib

    from toolkit.core import display

    importlib.import_module("toolkit.ui.renderers")
    assert display._renderers
    for (type_name, _), renderer in display._renderers.items():
        kind_module, _, kind = type_name.rpartition(".")
        module, _, function = renderer.partition(":")
        assert isinstance(getattr(importlib.import_module(kind_module), kind), type)
        assert callable(getattr(importlib.import_module(module), function))


def test_tests_mirror_the_package() -> None:
    """gpu: needs CUDA; devices: the tests of toolkit/gpu that need no GPU."""
    others = {"gpu", "devices", "browser", "fuzz", "golden", "programs"}
    folders = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert folders - others <= set(PACKAGES)
    assert others <= folders


def test_a_wheel_contains_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    distribution = setuptools.Distribution({"script_name": "setup.py"})
    distribution.parse_config_files()
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    wheel = {Path(path).relative_to(build.build_lib) for path in build.get_outputs(include_bytecode=False)}
    files = (path.relative_to(ROOT) for path in PACKAGE.rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert wheel == set(files)
    assert Path("toolkit/py.typed") in wheel


def test_files_stay_short() -> None:
    long = {
        module_of(path): n for path in FILES if "kernels" not in path.parts and (n := len(path.read_text().splitlines())) > 450
    }
    assert not long


def test_no_module_bears_the_name_of_a_public_function() -> None:
    import toolkit

    functions = {name for name in toolkit.__all__ if callable(getattr(toolkit, name))}
    assert not {path.stem for path in PACKAGE.iterdir()} & functions


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
    assert within(min(float(seconds) for seconds, _ in runs), 0.2)


def test_readme_tree_lists_the_packages() -> None:
    block = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block, "README.md has no layout tree"
    assert re.findall(r"^ {4}(\w+)/", block[1], re.MULTILINE) == list(PACKAGES)
    assert len(block[1].splitlines()) < 30


def test_public_names_all_load() -> None:
    import toolkit

    needs_lab = {"Lab"}
    for name in set(toolkit.__all__) - needs_lab:
        assert getattr(toolkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        toolkit.nonsense  # noqa: B018  # the access is the test


@pytest.mark.parametrize("name", ["toolkit", "toolkit.tune", "toolkit.ops", "toolkit.core.errors"])
def test_only_public_names_are_listed(name: str) -> None:
    import importlib

    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, each) for each in dir(module) if each != "Lab")
