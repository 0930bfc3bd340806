"""Tests of the pytest plugin: runs of pytest inside this process, on the virtual H200."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
import weakref
from pathlib import Path

import pytest
import torch

from tests.conftest import without_permission
from tests.testing.more_regressions import HARMLESS, MORE
from tests.testing.regressions import REGRESSIONS, edited
from tests.testing.report import EXAMPLES
from toolkit.core.errors import FormatError
from toolkit.gpu.allocation_log import log
from toolkit.gpu.opening import open_device
from toolkit.testing import baselines
from toolkit.testing.measure import Recorder
from toolkit.testing.plugin import _less

pytest_plugins = ["pytester"]
ROOT = Path(__file__).parents[2]
LOOP = """
import pytest, torch

def loop(device, steps=3):
    total = torch.zeros((), device=device)
    for _ in range(steps):
        total += torch.ones(1024, device=device).sum()
    return total.item()
"""


@pytest.fixture(scope="module", autouse=True)
def imported():
    """Import before pytester is set up what can be imported only once: it forgets the modules that its tests import.

    The virtual GPU and the operators of torch.distributed can't be registered again. Optimizers import torch._dynamo.
    """
    for name in (
        "pandas",
        "torch._dynamo",
        "torch.distributed._functional_collectives",
        "toolkit.testing.baselines",
        "toolkit.testing.budgets",
    ):
        importlib.import_module(name)
    open_device("virtual:h200")


@pytest.fixture
def run(pytester, monkeypatch):
    """Run the plugin on a test module, `LOOP` followed by a text, and return the result."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(text: str | None, *options: str, python: bool = False):
        if text is not None:
            pytester.makepyfile(test_somebodys_loop=LOOP + text)
        args = ("-p", "toolkit.testing.plugin", "-p", "no:cacheprovider", *options)
        return pytester.runpytest_subprocess(*args) if python else pytester.runpytest_inprocess(*args)

    return run


def stored(pytester) -> dict:
    return json.loads((pytester.path / "toolkit_baselines" / "test_somebodys_loop.json").read_text())["tests"]


def test_limits_hold_and_break_on_a_named_line(run):
    found = run("""
@pytest.mark.copies(h2d=0, d2h=1, pageable=0, waits=1)
@pytest.mark.peak_memory("1 MiB")
def test_holds(toolkit_gpu):
    assert loop(toolkit_gpu.torch) == 3072

@pytest.mark.copies(d2h=1)
@pytest.mark.peak_memory("4 KiB")
def test_breaks(toolkit_gpu):
    loop(toolkit_gpu.torch)
    for i in range(2):
        torch.ones(1, device=toolkit_gpu.torch).item()

@pytest.mark.xfail
@pytest.mark.copies(d2h=0)
def test_breaks_as_expected(toolkit_gpu):
    loop(toolkit_gpu.torch)
""")
    found.assert_outcomes(passed=1, failed=1, xfailed=1)
    found.stdout.no_fnmatch_line("*test_breaks_as_expected*")
    found.stdout.fnmatch_lines([
        "*copies: 3 D2H copies, 1 allowed",
        "> test_somebodys_loop.py:*: torch.ones(1, device=toolkit_gpu.torch).item()",
        "*2 D2H copies (8 B)*",
        "*peak memory: 5.00 KiB, 4.00 KiB allowed",
        "> test_somebodys_loop.py:*: total += torch.ones(1024, device=device).sum()",
        "*= copies and memory =*",
        "test_somebodys_loop.py::test_breaks: copies: 3 D2H copies, 1 allowed",
    ])  # fmt: skip


def test_a_baseline_fails_when_a_copy_is_added(run, pytester):
    text = """
@pytest.mark.copies
@pytest.mark.peak_memory
@pytest.mark.parametrize("steps", [2, 3])
def test_loop(toolkit_gpu, steps):
    loop(toolkit_gpu.torch, steps)
"""
    run(text).stdout.fnmatch_lines(["copies: no baseline (0 H2D copies, 1 D2H copy*", "*pytest --copies-update"])
    run(text, "--copies-update").assert_outcomes(passed=2)
    run(text).assert_outcomes(passed=2)
    (pytester.path / "test_somebodys_loop.py").write_text(
        "\n\n" + (LOOP + text).replace("    return total.item()", "    total.item()\n    return total.item()")
    )
    found = run(None)
    found.assert_outcomes(failed=2)
    found.stdout.fnmatch_lines([
        "copies: 2 D2H copies, 1 in the baseline; 2 waits, 1 in the baseline",
        "> test_somebodys_loop.py:*: total.item()", "*1 D2H copy (4 B), 0 in the baseline; 1 wait, 0 in the baseline",
        "If this is intended: pytest --copies-update",
    ])  # fmt: skip
    run(None, "--copies-update").assert_outcomes(passed=2)
    assert stored(pytester)["test_loop[3]"]["virtual:h200"]["copies"]["d2h"] == {
        "test_somebodys_loop.py: return total.item()": [1, 4], "test_somebodys_loop.py: total.item()": [1, 4],
    }  # fmt: skip
    run(text).stdout.fnmatch_lines(["baselines: 2 tests copy less, or hold less, than their baselines (*"])


TRAINING = """
def train(device):
    weight = torch.ones(1024, device=device, requires_grad=True)
    optimizer, total = torch.optim.SGD([weight], lr=0.1), 0.0
    for _ in range(4):
        loss = (weight * weight.exp().sin().cos().exp().sin()).sum()
        loss.backward()
        optimizer.step()
        total = total + loss.detach()
    return total

def smaller_than_the_peak(device, n):
    torch.ones(1 << 16, device=device)
    return torch.ones(n, device=device)

@pytest.mark.peak_memory
def test_train(toolkit_gpu):
    train(toolkit_gpu.torch)

@pytest.mark.peak_memory
def test_small(toolkit_gpu):
    smaller_than_the_peak(toolkit_gpu.torch, 1024)
"""
CHANGES = {  # an edit, and what the plugin says of it
    (".detach()", ""): ["autograd graphs: * nodes of earlier steps are kept, 0 in the baseline", "> *: total = total + loss"],
    ("backward()", "backward(retain_graph=True)"): [
        "peak memory: *", "> *: loss.backward(retain_graph=True)", "*kept by the graph of `loss`*, although a backward*",
    ],
    ("1024)\n", "2048)\n"): [
        "memory by line: 8.00 KiB at a time, 4.00 KiB in the baseline; the peak is as before",
        "> *: return torch.ones(n, device=device)",
    ],
    ("    optimizer, total", "\n    optimizer, total"): [],
}  # fmt: skip


def test_what_a_peak_does_not_show_is_caught(run, pytester):
    run(TRAINING, "--copies-update").assert_outcomes(passed=2)
    for change, said in CHANGES.items():
        found = run(TRAINING.replace(*change))
        found.assert_outcomes(passed=1 if said else 2, failed=1 if said else 0)
        found.stdout.fnmatch_lines(said)
    file = pytester.path / "toolkit_baselines" / "test_somebodys_loop.json"
    file.write_text(file.read_text().replace('"kept_nodes": 0,', ""))  # a baseline of an earlier version
    run(TRAINING.replace(".detach()", "")).assert_outcomes(passed=2)


def test_a_line_that_runs_more_often_but_holds_no_more_is_not_to_blame(run, pytester):
    text = """
def load(device, n, wider):
    for _ in range(n):
        batch = torch.ones(1 << 18, device=device)
        batch = batch.double() if wider else batch

@pytest.mark.peak_memory
def test_loading(toolkit_gpu):
    load(toolkit_gpu.torch, 2, wider=False)
"""
    run(text, "--copies-update").assert_outcomes(passed=1)
    found = run(text.replace("2, wider=False", "4, wider=True"))
    found.stdout.fnmatch_lines(["peak memory: *", "> test_somebodys_loop.py:*: batch = batch.double() if wider else batch"])


@pytest.mark.parametrize(
    ("found", "less"),
    [
        ({"copies": {"d2h": {"a": (1, 4)}}, "peak_bytes": 8}, True),
        ({"copies": {"d2h": {"a": (2, 8)}}, "peak_bytes": 7}, True),
        ({"copies": {"d2h": {"a": (2, 8)}}, "peak_bytes": 8}, False),
        ({"copies": {"d2h": {"a": (1, 9)}}, "peak_bytes": 7}, False),  # fewer copies and a lower peak, but more bytes
        ({"copies": {"d2h": {"a": (1, 4)}}, "peak_bytes": 9}, False),
        ({"copies": {"d2h": {"a": (2, 8)}}}, False),  # the test no longer has the mark for memory
    ],
)
def test_less_than_a_baseline_is_nothing_more_than_it(found, less):
    assert _less(found, {"copies": {"d2h": {"a": (2, 8)}}, "peak_bytes": 8}) is less


def test_memory_that_an_earlier_failed_test_held_does_not_count():
    gpu, held = open_device("virtual:h200"), []

    def fails():
        x = torch.ones(1024, device=gpu.torch)
        held.append(weakref.ref(x))
        raise KeyError("mine")

    try:
        fails()
    except KeyError as error:  # as pytest does
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.last_exc = error
    assert held[0]() is not None
    with Recorder(gpu, memory=True):
        assert held[0]() is None


@pytest.mark.parametrize(
    ("keep", "line", "did"),
    [
        ("kept.append(x)", "kept.append(x)", "64.0 MiB kept by elements of `kept`"),
        ("lists['x'].append(x)", "lists['x'].append(x)", "64.0 MiB kept by elements of `lists`"),
        ("torch.kept = x", "x = torch.ones(16 << 20, device=toolkit_gpu.torch)", "64.0 MiB held before the test"),
    ],
)
def test_memory_of_earlier_tests_is_named_as_that(run, keep, line, did):
    found = run(f"""
from collections import defaultdict

kept, lists = [], defaultdict(list)

def test_first(toolkit_gpu):
    x = torch.ones(16 << 20, device=toolkit_gpu.torch)
    {keep}

@pytest.mark.peak_memory("10 MiB")
def test_second(toolkit_gpu):
    y = torch.ones(8, device=toolkit_gpu.torch)
    kept.clear()
    lists.clear()
    vars(torch).pop("kept", None)
""")
    found.assert_outcomes(passed=1, failed=1)
    text = found.stdout.str()
    assert "peak memory: 64.0 MiB, 10.0 MiB allowed\n> test_somebodys_loop.py:" in text
    assert f": {line}\n      {did}\n" in text


def test_lines_are_not_recorded_after_a_teardown_that_raises(run):
    before = log.keepers
    found = run("""
@pytest.fixture
def raises():
    yield
    raise KeyError("mine")

@pytest.mark.copies(h2d=0)
def test_it(raises): pass
""")
    found.assert_outcomes(passed=1, errors=1)
    assert log.keepers == before


def test_only_what_toolkit_trace_records_counts(run):
    found = run("""
@pytest.mark.copies(h2d=0, d2h=1, per="step")
def test_part(toolkit_gpu, toolkit_trace):
    x = torch.ones(4).to(toolkit_gpu.torch)
    with toolkit_trace as trace:
        for i in range(2):
            with toolkit_gpu.step(i, "decode"):
                x.sum().item()
    assert trace.copies()["d2h_count"].sum() == 2

@pytest.mark.copies(h2d=0)
def test_nothing_recorded(toolkit_trace):
    pass

def test_without_a_mark(toolkit_gpu, toolkit_trace):
    with toolkit_trace as trace:
        loop(toolkit_gpu.torch)
    assert len(trace)

@pytest.mark.copies(h2d=0)
def test_that_raises(toolkit_gpu):
    torch.ones(4).to(toolkit_gpu.torch)
    raise KeyError("mine")
""")
    found.assert_outcomes(passed=2, failed=2)
    found.stdout.fnmatch_lines(["*but recorded nothing*", "*KeyError: 'mine'"])
    found.stdout.no_fnmatch_line("*H2D copies*")


WRONG = {
    "copies(0, 1)": "@pytest.mark.copies: 2 arguments without a name. Name them: *",
    "copies(htod=1)": '*no such name. Did you mean "h2d"?*',
    "copies(h2d=-1)": "a copy budget of h2d=-1: *",
    "copies(h2d=1, per='stpe')": '*Did you mean "step"?*',
    "copies(per='step')": "*no limit. Give one, such as d2h=1",
    "copies(h2d=1, per='step')": '*the block has no steps. Mark them *, or leave out per="step"',
    "copies(h2d=0)\n@pytest.mark.copies(d2h=0)": "@pytest.mark.copies: the test has it more than once. *",
    "parametrize('n', [pytest.param(0, marks=pytest.mark.peak_memory(8))])\n@pytest.mark.peak_memory(9)\n"
    "@pytest.mark.usefixtures('n')": "@pytest.mark.peak_memory: the test has it more than once. *",
    "peak_memory('2 gibberish')": "a size of '2 gibberish': not a number of bytes*",
    "peak_memory('1 GiB', '2 GiB')": "@pytest.mark.peak_memory: 2 arguments*",
}


def test_wrong_marks_fail_their_test(run):
    found = run("".join(f"\n@pytest.mark.{mark}\ndef test_{i}(): pass\n" for i, mark in enumerate(WRONG)))
    found.assert_outcomes(errors=len(WRONG) - 1, failed=1)
    for said in WRONG.values():
        found.stdout.fnmatch_lines([said])


def test_the_mark_of_a_test_has_priority_over_others(run, pytester):
    pytester.makeconftest("""
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.copies(h2d=0))
""")
    found = run("""
@pytest.mark.copies(h2d=0)
class TestOnes:
    @pytest.mark.copies(h2d=1)
    def test_a_copy(self, toolkit_gpu): torch.ones(4).to(toolkit_gpu.torch)

    def test_others(self, toolkit_gpu): torch.ones(4).to(toolkit_gpu.torch)

@pytest.mark.parametrize("n", [0, pytest.param(1, marks=pytest.mark.copies(h2d=1))])
def test_copies(toolkit_gpu, n):
    for _ in range(n): torch.ones(4).to(toolkit_gpu.torch)
""")
    found.assert_outcomes(passed=3, failed=1)


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("virtual:h20", "*--gpu: virtual GPU 'h20': no such name. Did you mean*"),
        ("cpu", "*--gpu: device 'cpu': tests with budgets need a GPU*"),
        ("cuda", "*--gpu: device 'cuda*"),
    ],
)
def test_a_gpu_that_does_not_exist(run, gpu, said):
    if gpu == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    found = run("\ndef test_it(): pass\n", "--gpu", gpu)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([said])


def test_an_option_of_the_project_with_the_same_name_wins(run, pytester):
    pytester.makeconftest("def pytest_addoption(parser): parser.addoption('--gpu', type=int, default=7)")
    found = run("\ndef test_it(request, toolkit_gpu): assert request.config.getoption('--gpu') == 3\n", "--gpu=3")
    found.assert_outcomes(passed=1)
    assert run(None, "--toolkit-gpu", "virtual:h20").ret == pytest.ExitCode.USAGE_ERROR


def test_damaged_and_obsolete_baselines(run, pytester):
    text = "\n@pytest.mark.copies\ndef test_{}(toolkit_gpu): loop(toolkit_gpu.torch)\n"
    run(text.format("a") + text.format("b"), "--copies-update").assert_outcomes(passed=2)
    found = run(text.format("a"), "-k", "nothing")
    found.stdout.fnmatch_lines(["baselines: 1 test no longer exists (test_somebodys_loop.py::test_b)*"])
    run(None, "test_somebodys_loop.py::test_a").stdout.no_fnmatch_line("*no longer exist*")
    run(None, "--copies-update").assert_outcomes(passed=1)
    assert list(stored(pytester)) == ["test_a"]
    file = pytester.path / "toolkit_baselines" / "test_somebodys_loop.json"
    damages = {
        file.read_text()[:40]: "*it is damaged*",
        '{"format": "x", "version": 1, "tests": {}}': "*not a file of baselines*",
        '{"format": "toolkit-baselines", "version": 9, "tests": {}}': "*Upgrade the toolkit*",
    }
    for damage, said in damages.items():
        file.write_text(damage)
        for option in ((), ("--copies-update",)):
            found = run(None, *option)
            found.assert_outcomes(errors=1)
            found.stdout.fnmatch_lines([said])
        assert file.read_text() == damage


def test_baselines_in_a_folder_without_permission(tmp_path, monkeypatch):
    closed = tmp_path / "toolkit_baselines"
    closed.mkdir()
    assert baselines.read(closed / "test_a.json") == {}
    with without_permission(closed, monkeypatch), pytest.raises(FormatError, match="it can't be read"):
        baselines.read(Path("toolkit_baselines", "test_a.json"))


def test_obsolete_baselines_in_folders_are_told_apart(run, pytester):
    for folder in ("a", "b"):
        (pytester.mkdir(folder) / f"test_{folder}.py").write_text("def test_else(): pass")
        (pytester.mkdir(f"{folder}/toolkit_baselines") / f"test_{folder}.json").write_text(
            '{"format": "toolkit-baselines", "version": 1, "tests": {"test_it": {}}}'
        )
    run(None).stdout.fnmatch_lines(["baselines: 2 tests no longer exist (a/test_a.py::test_it, b/test_b.py::test_it)*"])


MARKING = """
import pytest

def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.copies)
"""


def test_baselines_that_can_not_be_written(run, pytester):
    (pytester.path / "toolkit_baselines").write_text("a file instead of a folder")
    found = run("\n@pytest.mark.copies\ndef test_a(toolkit_gpu): loop(toolkit_gpu.torch)\n", "--copies-update")
    found.assert_outcomes(passed=1)
    assert found.ret == pytest.ExitCode.TESTS_FAILED
    found.stdout.fnmatch_lines(["baselines: writing the baselines */toolkit_baselines/test_somebodys_loop.json: *"])


def test_marks_that_a_conftest_adds_keep_their_baselines(run, pytester):
    pytester.makeconftest(MARKING)
    run("\ndef test_a(toolkit_gpu): loop(toolkit_gpu.torch)\n", "--copies-update").assert_outcomes(passed=1)
    run(None, "-k", "nothing").stdout.no_fnmatch_line("*no longer exist*")
    run(None, "--copies-update").assert_outcomes(passed=1)
    assert list(stored(pytester)) == ["test_a"]


PLAIN = """
import sys

def test_it(request):
    assert any(line.startswith("copies(h2d") for line in request.config.getini("markers"))
    assert not {"torch", "numpy", "msgspec"} & set(sys.modules)
"""


def test_it_costs_nothing_where_it_is_not_used(pytester):
    pytester.makepyfile(test_plain=PLAIN)
    pytester.path.joinpath("decode_toolkit-0.dist-info").mkdir()
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    lines = "\n".join(f"{name} = {module}" for name, module in points.items())
    (pytester.path / "decode_toolkit-0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: decode-toolkit\nVersion: 0\n"
    )
    (pytester.path / "decode_toolkit-0.dist-info" / "entry_points.txt").write_text(f"[pytest11]\n{lines}\n")
    environment = {**os.environ, "PYTHONPATH": f"{pytester.path}{os.pathsep}{ROOT}"}
    environment.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
    command = [sys.executable, "-m", "pytest", "test_plain.py"]
    plain = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=pytester.path)
    assert plain.returncode == 0, plain.stdout


def test_an_example_keeps_to_its_baselines_in_a_process_of_xdist(run, pytester):
    shutil.copytree(EXAMPLES, pytester.path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    files = sorted((pytester.path / "toolkit_baselines").iterdir())
    before = [file.read_text() for file in files]
    file = json.loads(before[0])
    del file["tests"]["test_a_reply_uploads_its_prompt_and_is_read_once"]
    files[0].write_text(json.dumps(file))
    found = run(None, "-p", "xdist", "-n", "1", "--copies-update", "test_serve.py")
    found.assert_outcomes(passed=2)
    found.stdout.fnmatch_lines(["baselines: wrote 1 file"])
    assert [file.read_text() for file in files] == before


@pytest.mark.parametrize(("file", "edits"), [("regressions", REGRESSIONS), ("more_regressions", (*MORE, *HARMLESS))])
def test_the_record_of_the_regressions_is_complete(file, edits):
    record = json.loads((ROOT / "tests" / "testing" / f"{file}.json").read_text())
    assert list(record["regressions"]) == [regression.name for regression in edits]
    assert record["unchanged"]["problems"] == []
    for regression in edits:
        found, text = record["regressions"][regression.name], (EXAMPLES / regression.file).read_text()
        lines = [line.strip() for line in edited(regression, text).splitlines()]
        assert set(regression.right) <= set(lines)
        blamed = [problem["blamed"] for problem in found["problems"]]
        assert found["caught"] == bool(blamed)
        assert found["right"] == (bool(blamed) == bool(regression.right) and set(blamed) <= set(regression.right))
