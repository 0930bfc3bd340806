"""Apply each regression of a list to a copy of the examples, run their tests, and write what the plugin said.

    python -m tests.testing.report --list more --out tests/testing/more_regressions.json [NAME ...]

A regression counts as caught if a test of the examples exceeds a budget. It counts as blamed on the right line if, for each
budget that was exceeded, the first line that is named is one of the right ones. A harmless edit is right if it exceeds none.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.testing.more_regressions import HARMLESS, MORE
from tests.testing.regressions import REGRESSIONS, Regression, edited

LISTS = {"first": REGRESSIONS, "more": (*MORE, *HARMLESS)}
BOTH = ("test_train.py", "test_serve.py")
TESTS = {"train.py": BOTH[:1], "serve.py": BOTH[1:]}  # by the file that is edited
EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


class Collector:
    """A pytest plugin that keeps the toolkit's reports."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        if hasattr(report, "toolkit"):
            self.reports.append(report.toolkit)


def run(folder: Path, tests: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the toolkit's reports of the test modules in a folder, run in a process of its own."""
    out = folder / "reports.json"
    child = os.fork()
    if not child:
        import pytest

        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.chdir(folder)
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 1)
        collector = Collector()
        options = ["-p", "toolkit.testing.plugin", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder)]
        pytest.main([*options, *tests], plugins=[collector])
        out.write_text(json.dumps(collector.reports))
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(out.read_text())


def measure(regression: Regression | None) -> dict[str, Any]:
    """Return which budgets a regression exceeds, the line that is blamed for each, and whether it is the right one."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "examples"
        shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
        if regression is not None:
            file = folder / regression.file
            file.write_text(edited(regression, file.read_text()))
        reports = run(folder, TESTS.get(regression.file if regression else "", BOTH))
    problems = [(report["name"], problem) for report in reports for problem in report["problems"]]
    blamed = [problem["blames"][0][1] if problem["blames"] else "" for _, problem in problems]
    right = (
        regression is not None and bool(blamed) == bool(regression.right) and all(line in regression.right for line in blamed)
    )
    said = [{"test": name, "said": p["title"], "blamed": line} for (name, p), line in zip(problems, blamed, strict=True)]
    return {"tests": len(reports), "caught": bool(problems), "right": right, "problems": said}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--list", choices=LISTS, default="first")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    import toolkit as tk
    import toolkit.testing.budgets  # once, before the processes fork

    unchanged = measure(None)
    found = {}
    for regression in LISTS[options.list]:
        if options.names and regression.name not in options.names:
            continue
        result = found[regression.name] = measure(regression)
        print("caught" if result["caught"] else "missed", "right" if result["right"] else "WRONG", regression.name, flush=True)
        for problem in [] if result["right"] else result["problems"]:
            print(f"        {problem['said']}\n        {problem['blamed']}", flush=True)
    print(f"{sum(r['caught'] for r in found.values())} caught, {sum(r['right'] for r in found.values())} on the right line")
    if options.out:
        record = {"device": "virtual:h200", "toolkit": tk.__version__, "unchanged": unchanged, "regressions": found}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
