"""The pytest plugin: budgets for copies and memory in tests, on any machine.

    @pytest.mark.copies(h2d=0, d2h=1)        # limits: h2d, d2h, d2d, pageable, waits; per="step"
    @pytest.mark.peak_memory("2 GiB")
    def test_decode(toolkit_gpu): ...

A mark without limits compares the test with its baseline, which `pytest --copies-update` stores. pytest loads this module in
every run, so it imports nothing but pytest: PyTorch is imported by the first test that has a mark or uses a fixture.
"""

from __future__ import annotations

import linecache
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from toolkit.core.errors import ToolkitError
from toolkit.core.units import plural

if TYPE_CHECKING:
    from toolkit.gpu.device import Device
    from toolkit.testing.budgets import Budget, Problem
    from toolkit.testing.measure import Lines, Measured, Recorder

DEFAULT = "virtual:h200"
MARKS = ("copies", "peak_memory")
_GPU_HELP = f"device of tests with budgets: virtual:NAME or cuda, after an equals sign (default: {DEFAULT})"


# ---- options


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("toolkit", "copies and memory (decode-toolkit)")
    group.addoption("--toolkit-gpu", metavar="DEVICE", help=f"the same as --gpu. {_GPU_HELP}")
    group.addoption("--copies-update", action="store_true", help="store what tests copy and hold as their baselines")


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Iterator[None]:
    """Add --gpu last: a project that has an option of this name keeps it, and uses --toolkit-gpu for ours."""
    yield
    try:
        _, unknown = parser.parse_known_and_unknown_args([f"--gpu={DEFAULT}"])
    except pytest.UsageError:  # theirs takes no value
        return
    if unknown:
        parser.getgroup("toolkit").addoption("--gpu", dest="toolkit_gpu", metavar="DEVICE", help=_GPU_HELP)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "copies(h2d, d2h, d2d, pageable, waits, per='test'): the most copies between host and GPU that the test may make; "
        "without limits, those of its baseline",
    )
    config.addinivalue_line(
        "markers",
        "peak_memory(size): the most GPU memory that the test may hold, such as '2 GiB'; without a size, its baseline",
    )
    config.pluginmanager.register(_Session(config), "toolkit-session")
    if config.getoption("toolkit_gpu"):
        try:
            _gpu(config)
        except ToolkitError as error:
            raise pytest.UsageError(f"--gpu: {error}") from None


_GPU = pytest.StashKey["Device"]()


def _gpu(config: pytest.Config) -> Device:
    """Return the device that --gpu selects."""
    from toolkit.core.errors import DeviceError
    from toolkit.gpu.opening import open_device

    if _GPU not in config.stash:
        name = config.getoption("toolkit_gpu") or DEFAULT
        if name.partition(":")[0] not in ("virtual", "cuda"):
            raise DeviceError(
                f"device {name!r}", "tests with budgets need a GPU", 'Give "cuda", or a virtual one: "virtual:h200"'
            )
        config.stash[_GPU] = open_device(name)
        linecache.checkcache()  # an earlier session of this process may have read other sources
    return config.stash[_GPU]


# ---- fixtures


@pytest.fixture(scope="session")
def toolkit_gpu(request: pytest.FixtureRequest) -> Device:
    """The device that --gpu selects. Tests put their tensors on `toolkit_gpu.torch`."""
    return _gpu(request.config)


@pytest.fixture
def toolkit_trace(request: pytest.FixtureRequest) -> Recorder:
    """Record a part of a test: `with toolkit_trace as trace:`. The marks of the test then apply to this part only."""
    test = request.node.stash.get(_TEST, None)
    if test is not None:
        return test.recorder
    from toolkit.testing.measure import Recorder

    return Recorder(_gpu(request.config))


# ---- a test


_TEST = pytest.StashKey["_Test"]()


class _Test:
    """A test that has a budget: what it is compared with, its recorder, and what was found."""

    def __init__(self, item: pytest.Item) -> None:
        from toolkit.testing import baselines, budgets
        from toolkit.testing.measure import Lines, Recorder

        marks = [_mark(item, name) for name in MARKS]
        self.budget: Budget = budgets.parse(*((mark.args, mark.kwargs) if mark else None for mark in marks))
        gpu = _gpu(item.config)
        self.device = gpu.name if gpu.torch.type == "vgpu" or gpu.spec is None else gpu.spec.name
        self.update: bool = item.config.getoption("copies_update")
        self.name = item.nodeid.partition("::")[2]
        self.lines: Lines = Lines(item.path.parent)
        stored = baselines.read(baselines.path_of(item.path))
        self.before: Measured | None = stored.get(self.name, {}).get(self.device)
        limit = self.budget.peak_bytes
        if limit is None and self.before is not None:
            limit = self.before.get("peak_bytes")
        self.recorder: Recorder = Recorder(gpu, self.budget.memory, limit)
        self.found: Measured | None = None
        self.problems: list[Problem] = []

    def check(self) -> None:
        """Compare what was recorded with the budget, and fail the test if it is broken."""
        from toolkit.testing import budgets
        from toolkit.testing.measure import measured

        blocks = self.recorder.blocks
        if not blocks:
            why = "the test has a budget and uses toolkit_trace, but recorded nothing: put its work into `with toolkit_trace:`"
            pytest.fail(why, pytrace=False)
        self.found = measured(blocks, self.lines, self.budget.copies is not None, self.budget.memory)
        with _failing():
            self.problems = list(budgets.check(self.budget, blocks, self.found, self.before, self.lines, self.update))
        if self.problems:
            pytest.fail("\n\n".join(map(str, self.problems)), pytrace=False)

    def report(self, module: Path) -> dict[str, Any]:
        """Return what the summary and the baselines need, as plain data: it may come from another process."""
        problems = [{"title": p.title, "blames": [list(blame) for blame in p.blames]} for p in self.problems]
        more = self.found is not None and self.before is not None and not self.problems and _less(self.found, self.before)
        known = {"module": str(module), "name": self.name, "device": self.device}
        return {**known, "found": self.found, "problems": problems, "less": more}


@contextmanager
def _failing() -> Iterator[None]:
    """Fail the test with the text of a ToolkitError, and without the error itself, whose text pytest would print once more."""
    try:
        yield
    except ToolkitError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def _less(found: Measured, before: Measured) -> bool:
    """Return whether a test copies less or holds less than in its baseline, and nothing more."""
    from toolkit.testing.measure import totals

    pairs: list[tuple[int, int]] = []  # a number now and in the baseline
    if "copies" in found and "copies" in before:
        now, then = totals(found["copies"]), totals(before["copies"])
        pairs += [pair for kind in now.keys() & then.keys() for pair in zip(now[kind], then[kind], strict=True)]
    if "peak_bytes" in found and "peak_bytes" in before:
        pairs.append((found["peak_bytes"], before["peak_bytes"]))
    return all(n <= old for n, old in pairs) and any(n < old for n, old in pairs)


def _mark(item: pytest.Item, name: str) -> pytest.Mark | None:
    """Return the mark that counts. A test's own one has priority over that of its class, its module or a conftest.

    Raises ToolkitError if the test itself has several, because pytest gives only one of them.
    """
    owners = getattr(item, "obj", None), getattr(item, "callspec", None)
    own = [*getattr(owners[0], "pytestmark", ()), *getattr(owners[1], "marks", ())]
    if sum(mark.name == name for mark in own) > 1:
        raise ToolkitError(f"@pytest.mark.{name}", "the test has it more than once", "Put all limits into one mark")
    return item.get_closest_marker(name)


def _marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in MARKS)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _marked(item):
        return
    with _failing():
        item.stash[_TEST] = _Test(item)
    from toolkit.gpu import allocation_scopes

    allocation_scopes.keep()  # allocations of fixtures get lines, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if _TEST in item.stash:
            from toolkit.gpu import allocation_scopes

            allocation_scopes.release()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    test = item.stash.get(_TEST, None)
    if test is None:
        return (yield)
    if "toolkit_trace" in getattr(item, "fixturenames", ()):
        result = yield
    else:
        with test.recorder:
            result = yield
    test.check()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: Any = yield
    test = item.stash.get(_TEST, None)
    if test is not None and call.when == "call":
        report.toolkit = test.report(item.path)  # pytest-xdist sends attributes of a report to the main process
    return report


# ---- the session


class _Session:
    """Collects the reports of all processes; writes baselines and the summary."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.worker = hasattr(config, "workerinput")
        self.reports: list[dict[str, Any]] = []
        self.items: list[pytest.Item] = []  # also those that are deselected later
        self.collected: dict[str, list[str]] = {}  # test module -> names of its tests that have a budget
        self.obsolete: list[str] = []
        self.wrote = 0
        self.unwritten: list[str] = []  # why baselines could not be written

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.items.append(item)

    def pytest_collection_finish(self) -> None:
        """Note the tests that have a budget, now that every conftest has added its marks."""
        for item in self.items:
            names = self.collected.setdefault(str(item.path), [])
            if _marked(item):
                names.append(item.nodeid.partition("::")[2])
        self.items.clear()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "toolkit"):
            self.reports.append({**report.toolkit, "nodeid": report.nodeid, "passed": report.passed, "failed": report.failed})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.collected |= getattr(node, "workeroutput", {}).get("toolkit", {})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.worker:
            self.config.workeroutput["toolkit"] = self.collected  # type: ignore[attr-defined]
        elif self._files() or self.reports:
            self._baselines()
            if self.unwritten and session.exitstatus == pytest.ExitCode.OK:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _files(self) -> dict[Path, Path]:
        """Return the files of baselines next to collected modules, with the module of each."""
        folders = {Path(module).parent for module in self.collected}
        return {
            file: folder / f"{file.stem}.py"
            for folder in sorted(folders)
            for file in sorted(folder.glob("toolkit_baselines/*.json"))
        }

    def _baselines(self) -> None:
        """Store what tests did if --copies-update is given. Find baselines of tests that no longer exist."""
        from toolkit.testing import baselines

        update = self.config.getoption("copies_update")
        passed = [r for r in self.reports if r["passed"] and r["found"]] if update else []
        files = self._files() | {baselines.path_of(Path(r["module"])): Path(r["module"]) for r in passed}
        some_only = any("::" in arg for arg in self.config.args) or self.config.getoption("lf", False)
        for file, module in files.items():
            try:
                stored = baselines.read(file)
            except ToolkitError:  # its tests have failed with this error
                continue
            known = self.collected.get(str(module), [])
            exists = module.exists() and (some_only or str(module) not in self.collected)
            old = [] if exists else [name for name in stored if name not in known]
            kept = {name: devices for name, devices in stored.items() if name not in old}
            for r in passed:
                if Path(r["module"]) == module:
                    kept.setdefault(r["name"], {})[r["device"]] = r["found"]
            if update:
                try:
                    self.wrote += baselines.write(file, kept)
                except ToolkitError as error:
                    self.unwritten.append(str(error))
            path = Path(os.path.relpath(module, self.config.rootpath)).as_posix()
            self.obsolete += [] if update else [f"{path}::{name}" for name in old]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        broken = [(r, problem) for r in self.reports if r["failed"] for problem in r["problems"]]  # not those of xfail
        less = [r["nodeid"] for r in self.reports if r["less"]] if not self.wrote else []
        if not (broken or less or self.obsolete or self.wrote or self.unwritten):
            return
        terminalreporter.write_sep("=", "copies and memory")
        for r, problem in broken:
            terminalreporter.write_line(f"{r['nodeid']}: {problem['title']}", red=True)
            for line, source, did in problem["blames"][:1]:
                terminalreporter.write_line(f"  {line}: {source}".rstrip(": "))
                terminalreporter.write_line(f"    {did}")
        for why in self.unwritten:
            terminalreporter.write_line(f"baselines: {why}", red=True)
        if self.wrote:
            terminalreporter.write_line(f"baselines: wrote {plural(self.wrote, 'file')}")
        for names, one, several in (
            (less, "test copies less, or holds less, than its baseline", "tests copy less, or hold less, than their baselines"),
            (self.obsolete, "test no longer exists", "tests no longer exist"),
        ):
            if names:
                what = one if len(names) == 1 else several
                listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
                terminalreporter.write_line(f"baselines: {len(names)} {what} ({listed}). Update: pytest --copies-update")
