"""A real JupyterLab and headless Chromium for the tests of what a user sees.

One server and one browser for all of them. Where Chromium is missing the tests are skipped, and say how to get it.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

NOTEBOOK_TESTS = Path(__file__).parent.parent / "notebook"
sys.path.insert(0, str(NOTEBOOK_TESTS))  # synthetic.py
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--force-color-profile=srgb",
]  # fmt: skip
HOW = "browser: not run (install chromium, e.g. `apt install chromium`, and the `test` extra)"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason=HOW))


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    api = pytest.importorskip("playwright.sync_api", reason=HOW)
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


class Lab:
    """A running JupyterLab: where it is, and the folder it serves."""

    def __init__(self, url: str, token: str, root: Path) -> None:
        self.url, self.token, self.root = url, token, root

    def write(self, name: str, *cells: str) -> str:
        """Write a notebook of these code cells; returns the address that opens it alone."""
        made = [
            {"cell_type": "code", "id": f"c{i}", "execution_count": None, "metadata": {}, "outputs": [], "source": source}
            for i, source in enumerate(cells)
        ]
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        (self.root / name).write_text(json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
        return self.address(name)

    def address(self, name: str) -> str:
        return f"{self.url}/lab/tree/{name}?token={self.token}&reset"

    def kernels(self) -> list[dict[str, object]]:
        with urllib.request.urlopen(f"{self.url}/api/kernels?token={self.token}") as answer:
            return json.load(answer)

    def stop_kernels(self) -> None:
        for kernel in self.kernels():
            request = urllib.request.Request(f"{self.url}/api/kernels/{kernel['id']}?token={self.token}", method="DELETE")
            urllib.request.urlopen(request).close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    if CHROMIUM is None:
        pytest.skip(HOW)
    pytest.importorskip("jupyterlab", reason=HOW)
    home = tmp_path_factory.mktemp("jupyter")
    root, settings = home / "root", home / "settings"
    root.mkdir()
    _settings(settings, "@jupyterlab/apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False})
    _settings(settings, "@jupyter-widgets/jupyterlab-manager/plugin", {"saveState": True})
    port, token = _free_port(), secrets.token_hex(16)
    folders = {
        name: str(home / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}", f"--LabApp.user_settings_dir={settings}",
        f"--LabApp.workspaces_dir={home / 'workspaces'}", "--LabApp.news_url=", "--LabApp.extension_manager=readonly",
        "--LabApp.expose_app_in_browser=True",
    ]  # fmt: skip
    with (home / "log.txt").open("wb") as log:
        server = subprocess.Popen(command, cwd=root, env={**os.environ, **folders}, stdout=log, stderr=log)
        try:
            made = Lab(f"http://127.0.0.1:{port}", token, root)
            _wait_for(made, server, home / "log.txt")
            yield made
            made.stop_kernels()
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()


def _settings(folder: Path, plugin: str, values: dict[str, object]) -> None:
    path = folder / f"{plugin}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


def _wait_for(made: Lab, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(240):
        try:
            made.kernels()
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, log.read_text()[-3000:]
            time.sleep(0.25)
        else:
            return
    raise AssertionError(f"JupyterLab didn't start in a minute:\n{log.read_text()[-3000:]}")


@pytest.fixture
def page(browser: object) -> Iterator[object]:
    """A fresh page; the test fails where the page threw an error that nobody caught."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened, thrown = context.new_page(), []
    opened.on("pageerror", lambda error: thrown.append(str(error)))
    yield opened
    context.close()
    assert not thrown, thrown


@pytest.fixture
def notebook(lab: Lab, page: object) -> Iterator[Callable[..., object]]:
    """`notebook(cell, ...)` opens JupyterLab on a new notebook of these cells and runs them all; returns the page."""
    names = []

    def start(*cells: str, run: bool = True, dark: bool = False) -> object:
        names.append(f"test{secrets.token_hex(4)}.ipynb")
        page.goto(lab.write(names[-1], *cells))
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.notebook_name = names[-1]
        if dark:
            command(page, "apputils:change-theme", {"theme": "JupyterLab Dark"})
        if run:
            run_all(page)
        return page

    yield start
    lab.stop_kernels()


def command(page: object, name: str, args: dict[str, object] | None = None) -> None:
    """Run one of JupyterLab's commands, as its menus do."""
    page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args || {}); }", [name, args])


def ready(page: object) -> None:
    """Wait until the notebook has a kernel that answers."""
    asked = """() => { const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
      const kernel = session?.session?.kernel;
      return session?.isReady && kernel?.connectionStatus === "connected" && kernel.status === "idle" }"""
    page.wait_for_function(asked, timeout=60_000)


def run_all(page: object, timeout_s: float = 60) -> None:
    """Run every cell and wait until each has its number."""
    ready(page)
    command(page, "notebook:run-all-cells")
    done = "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].every((p) => /[0-9]/.test(p.textContent))"
    page.wait_for_function(done, timeout=timeout_s * 1000)
