"""What all tests share: a last line that says whether the browser tests ran."""

from __future__ import annotations

import shutil

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if shutil.which("chromium") is None:
        terminalreporter.write_line(
            "browser: not run. They drive JupyterLab in Chromium: apt install chromium, then make test again"
        )
