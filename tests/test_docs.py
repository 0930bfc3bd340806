"""The README and the pages under docs/: names and paths exist, snippets run, and figures agree with their sources.

Executed pages and links between pages are checked by `make docs`, where warnings are errors.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [path for path in PAGES if "_build" not in path.parts]
IDS = [str(path.relative_to(ROOT)) for path in PAGES]
FOLDERS = "toolkit|tests|docs|notebooks|binder"


@pytest.fixture(scope="module")
def substitutions() -> dict[str, Any]:
    """The figures and tables that the guides name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
        import figures

        return figures.substitutions()


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_public_names_exist(path: Path) -> None:
    for name in re.findall(r"\btk\.([A-Za-z_][\w.]*)", path.read_text()):
        found: Any = tk
        for part in name.rstrip(".").split("."):
            found = getattr(found, part, None)
            assert found is not None, f"tk.{name} does not exist"


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_paths_exist(path: Path) -> None:
    text = path.read_text()
    named = re.findall(rf"`((?:{FOLDERS})/[\w./-]*)`", text)
    linked = [link for link in re.findall(r"\]\(([^)#:]+)\)", text) if path.parent == ROOT]
    modules = [name.replace(".", "/") for name in re.findall(r"python -m ((?:toolkit|tests)[\w.]*)", text)]
    missing = [name for name in [*named, *linked] if not (ROOT / name).exists() and not name.endswith("GPU.json")]
    missing += [name for name in modules if not (ROOT / f"{name}.py").exists() and not (ROOT / name / "__main__.py").exists()]
    assert not [name for name in missing if not name.startswith("docs/_build")]


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_python_blocks_compile(path: Path) -> None:
    for block in re.findall(r"```(?:python|\{code-cell\} python)\n(.*?)```", path.read_text(), re.DOTALL):
        compile(re.sub(r"\A(:\w+:.*\n)+", "", block), str(path), "exec")  # without the options of a cell


@pytest.mark.parametrize("path", PAGES, ids=IDS)
def test_figures_exist(path: Path, substitutions: dict[str, Any]) -> None:
    for name in re.findall(r"\{\{ ([\w.]+) \}\}", path.read_text()):
        found: Any = substitutions
        for part in name.split("."):
            assert part in found, f"{{{{ {name} }}}} does not exist"
            found = found[part]
        assert isinstance(found, str)
        assert found


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_readme_snippets_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        exec(block, {})
    assert (tmp_path / "run.html").exists()


def test_counts_of_golden_programs_are_those_of_the_guides() -> None:
    from tests.golden.replay import programs
    from tests.golden.test_allocator import MEASURED
    from tests.golden.test_golden import DEVIATIONS, PEAK_OF

    more, known = len(programs()) - 25, len(programs()) - len(PEAK_OF)
    assert not (DEVIATIONS.keys() | PEAK_OF.keys()) & set(list(programs())[:25])
    memory, virtual = ((ROOT / "docs" / "guides" / f"{name}.md").read_text() for name in ("memory", "virtual_gpu"))
    words = {2: "two"}
    assert f"all but {words[len(DEVIATIONS.keys() - {'quantile'})]} of {len(programs())} small programs" in virtual
    assert f"in {known} of these {len(programs())} programs" in virtual
    assert f"for {more - len(PEAK_OF)} of the other {more}" in memory.replace("\n", " ").replace("  ", " ")
    for text in (memory, virtual):
        assert f"{len(MEASURED['runs'])} random runs" in text


def test_the_docstring_of_generate_says_how_far_a_loop_runs_ahead() -> None:
    from toolkit.decode.loop import AHEAD

    assert (tk.generate.__doc__ or "").count(f"{AHEAD} ") == 2


def test_every_timeline_of_a_page_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of each kind: anywidget makes a class for each widget, so the second one is not of the first one's class."""
    formatters = pytest.importorskip("IPython.core.formatters")
    pytest.importorskip("anywidget")
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    import kernel_startup

    shown = formatters.DisplayFormatter()
    kernel_startup.register(shown.mimebundle_formatter)
    gpu = tk.device("virtual:h200")
    with tk.memory(gpu) as use, tk.record(gpu) as trace:
        torch.ones(1024, device=gpu.torch).cpu()
    for widget in (trace.timeline(), trace.timeline(), trace.timeline(trace), use.timeline(), use.timeline()):
        assert shown.format(widget)[0]["text/html"].startswith('<iframe class="tk-frame"')


def test_arguments_in_docstrings_become_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    import docstrings

    given = ["Args:", "    h2d, d2h: The `number` of", "        copies.", "    per: One of two.", "", "Then:", "", "    x = 1"]
    found = [line for line in docstrings.converted(given) if line]
    assert found[1:3] == ["- ``h2d, d2h``: The ``number`` of copies.", "- ``per``: One of two."]
    assert found[-2:] == [".. code-block:: text", "    x = 1"]


def test_the_binder_badge_needs_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs"), *sys.path])
    import online

    there = {"urls": {"Repository": "https://github.com/team/toolkit.git"}}
    assert "mybinder.org/v2/gh/team/toolkit/HEAD?urlpath=lab/tree/notebooks/00_course.ipynb" in online.links(there)
    assert "git+https://github.com/team/toolkit" in online.links(there)
    assert (ROOT / online.FIRST).exists()
    assert "mybinder" not in online.links({})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (online.badge(project) in (ROOT / "README.md").read_text()) or not online.badge(project)


def test_binder_installs_what_the_lessons_need() -> None:
    """The rest comes from pyproject.toml. Triton compiles kernels for the lessons, also without a GPU."""
    wanted = (ROOT / "binder" / "requirements.txt").read_text()
    assert "triton" in wanted
    assert "+cpu" in wanted
    assert "-e '.[lab]'" in (ROOT / "binder" / "postBuild").read_text()


def test_the_picture_shows_what_its_traces_say() -> None:
    first, second = (tk.open_trace(f"h200/qwen3/{name}") for name in ("roundtrip", "cuda-graph"))
    said = repr(first.timeline(second)).splitlines()[0].rpartition(" (step ")[0].split("; ")[1:]
    assert len(said) == 4
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md"):
        picture = next(line for line in page.read_text().splitlines() if line.startswith("!["))
        assert all(part in picture for part in said)
    assert (ROOT / "notebooks" / "timeline.png").stat().st_size < 250_000
