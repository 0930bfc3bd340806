"""A real JupyterLab and headless Chromium for the tests of what a user sees.

One server, one browser and one tab for all tests of a process: JupyterLab stays open in it, and each test has a notebook and a
kernel of its own there. Where Chromium is missing the tests are skipped, and say how to get it.
"""

from __future__ import annotations

import contextlib
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
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.conftest import cache_of_lessons

if TYPE_CHECKING:
    from playwright.sync_api import Locator, LocatorAssertions

if hasattr(os, "sched_setaffinity"):  # Chromium, JupyterLab and a kernel work for one test at the same time: not on one core
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))

NOTEBOOK_TESTS = Path(__file__).parent.parent / "ui"
sys.path.insert(0, str(NOTEBOOK_TESTS))  # synthetic.py
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--force-color-profile=srgb",
]  # fmt: skip
HOW = "browser: not run (install chromium, e.g. `apt install chromium`, and the `test` extra)"
SIZE = {"width": 1280, "height": 900}
FAILED = pytest.StashKey[bool]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)
            if CHROMIUM is None:
                item.add_marker(pytest.mark.skip(reason=HOW))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    return report


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
        self.next_kernel: str | None = None

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

    def ask(self, path: str, method: str = "GET", body: object = None) -> object:
        """What the server's API answers."""
        data = None if body is None else json.dumps(body).encode()
        url = f"{self.url}/api/{path}?token={self.token}"
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method)) as answer:
            return json.loads(answer.read() or b"null")

    def kernels(self) -> list[dict[str, object]]:
        return self.ask("kernels")

    def get_ready(self) -> None:
        """Start the kernel of the next notebook, unless it is there."""
        if self.next_kernel is None:
            self.next_kernel = self.ask("kernels", "POST", {"name": "python3"})["id"]

    def give_kernel(self, name: str) -> None:
        """The notebook of that name, when opened, has the kernel that was got ready."""
        self.get_ready()
        kernel, self.next_kernel = {"id": self.next_kernel, "name": "python3"}, None
        self.ask("sessions", "POST", {"path": name, "name": name, "type": "notebook", "kernel": kernel})

    def stop_kernels(self) -> None:
        """All but the one that no notebook has yet."""
        for kernel in self.kernels():
            if kernel["id"] != self.next_kernel:
                self.ask(f"kernels/{kernel['id']}", "DELETE")


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
    profile = home / "ipythondir" / "profile_default"
    profile.mkdir(parents=True)
    # What is slow to import is there when a kernel begins to answer, and no name is left behind by that.
    (profile / "ipython_kernel_config.py").write_text("""c.InteractiveShellApp.exec_lines = ["assert __import__('torch')"]""")
    (home / "jupyter_config_dir").mkdir()
    shutil.copy(Path(__file__).parents[2] / "binder" / "jupyter_server_config.py", home / "jupyter_config_dir")
    port, token = _free_port(), secrets.token_hex(16)
    folders = {
        name: str(home / name.lower())
        for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    } | {"TOOLKIT_CACHE": str(cache_of_lessons(tmp_path_factory))}
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}", "--ServerApp.port_retries=0",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}", f"--LabApp.user_settings_dir={settings}",
        f"--LabApp.workspaces_dir={home / 'workspaces'}", "--LabApp.news_url=", "--LabApp.extension_manager=readonly",
        "--LabApp.expose_app_in_browser=True", "--KernelManager.shutdown_wait_time=0.2",
    ]  # fmt: skip
    with (home / "log.txt").open("wb") as log:
        server = subprocess.Popen(command, cwd=root, env={**os.environ, **folders}, stdout=log, stderr=log)
        try:
            made = Lab(f"http://127.0.0.1:{port}", token, root)
            _wait_for(made, server, home / "log.txt")
            yield made
            made.next_kernel = None
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


@pytest.fixture(scope="session")
def tab(browser: object) -> Iterator[SimpleNamespace]:
    """The one tab, and what was thrown in it. None before the first test, and after one that failed."""
    kept = SimpleNamespace(page=None, thrown=[])
    yield kept
    close(kept)


def close(tab: SimpleNamespace) -> None:
    if tab.page is not None:
        tab.page.context.close()
    tab.page = None


@pytest.fixture
def new_tab(tab: SimpleNamespace) -> None:
    """For a test that times what a user sees first: nothing was loaded in its tab before."""
    close(tab)


SLOW = "[anywidget] Failed to initialize model."


@pytest.fixture
def page(browser: object, tab: SimpleNamespace, request: pytest.FixtureRequest) -> Iterator[object]:
    """The tab; the test fails where the page threw an error that nobody caught.

    anywidget throws `SLOW` after two seconds for a widget that was closed before its module was loaded, and on a busy machine.
    Tests look at what widgets show.
    """
    tab.thrown.clear()
    if tab.page is None:
        tab.page = browser.new_context(viewport=SIZE).new_page()
        tab.page.on("pageerror", lambda error: tab.thrown.append(str(error)))
    tab.page.set_viewport_size(SIZE)
    tab.page.mouse.move(0, 0)
    yield tab.page
    if tab.thrown or request.node.stash.get(FAILED, True):
        close(tab)
    thrown = [error for error in tab.thrown if error != SLOW]
    assert not thrown, thrown


def seen(page: object) -> str:
    """What a test that failed had before it: the kernel's state, the outputs' text and the values of their fields; a picture,
    where those are kept."""
    if folder := os.environ.get("TOOLKIT_SHOTS"):
        page.screenshot(path=f"{folder}/failed-{secrets.token_hex(4)}.png")
    asked = """() => { const session = window.jupyterapp?.shell?.currentWidget?.sessionContext;
      const kernel = session?.session?.kernel;
      const outputs = [...document.querySelectorAll(".jp-OutputArea-output, .jp-Dialog")].map((one) => one.innerText);
      const fields = [...document.querySelectorAll(".jp-OutputArea-output :is(input, select, textarea)")];
      const values = fields.map((one) => one.value).join(" | "), connection = kernel?.connectionStatus;
      return [location.pathname, session?.isReady, kernel?.status, connection, values, ...outputs].join("\\n") }"""
    return page.evaluate(asked)[:3000]


@pytest.fixture
def opened(lab: Lab, page: object, request: pytest.FixtureRequest) -> Iterator[Callable[..., object]]:
    """`opened(name)` opens JupyterLab on a notebook of the server's folder; returns the page.

    While the test looks at it, the next one's kernel starts. Not if it is `timed`.
    """

    def start(name: str, timed: bool = False) -> object:
        lab.give_kernel(name)
        if page.url.startswith(lab.url):
            command(page, "docmanager:open", {"path": name})
        else:
            page.goto(lab.address(name))
        page.wait_for_function("(path) => window.jupyterapp?.shell.currentWidget?.context?.path === path", arg=name)
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.notebook_name = name
        if not timed:
            lab.get_ready()
        return page

    yield start
    if request.node.stash.get(FAILED, True):
        print(seen(page))
    page.evaluate("() => [...window.jupyterapp?.shell.widgets('main') ?? []].forEach((w) => w.context && w.dispose())")
    lab.stop_kernels()


@pytest.fixture
def notebook(lab: Lab, opened: Callable[..., object]) -> Callable[..., object]:
    """`notebook(cell, ...)` opens JupyterLab on a new notebook of these cells and runs them all; returns the page."""

    def start(*cells: str, run: bool = True, dark: bool = False, timed: bool = False) -> object:
        name = f"test{secrets.token_hex(4)}.ipynb"
        lab.write(name, *cells)
        page = opened(name, timed)
        if dark:
            command(page, "apputils:change-theme", {"theme": "JupyterLab Dark"})
        if run:
            run_all(page)
        return page

    return start


def command(page: object, name: str, args: dict[str, object] | None = None) -> None:
    """Run one of JupyterLab's commands, as its menus do."""
    page.evaluate("([name, args]) => { window.jupyterapp.commands.execute(name, args || {}); }", [name, args])


def ready(page: object) -> None:
    """Wait until the notebook has a kernel that answers."""
    asked = """() => { const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
      const kernel = session?.session?.kernel;
      return session?.isReady && kernel?.connectionStatus === "connected" && kernel.status === "idle" }"""
    page.wait_for_function(asked, timeout=60_000)


def subshell(page: object) -> None:
    """Wait until the kernel has the thread to which JupyterLab sends the messages of widgets, at most ten seconds."""
    asked = """() => { const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
      const started = [...kernel._comms.values()].map((comm) => comm.subshellStarted);
      const late = new Promise((next) => setTimeout(next, 10_000));
      return Promise.race([Promise.all(started), late]).then(() => null) }"""
    page.evaluate(asked)


def reopen(page: object, lab: Lab, shown: str) -> None:
    """Open the page's saved notebook with a new kernel, which has heard of nothing in it, and wait for `shown`.

    Once more where JupyterLab's widgets weren't restored: a kernel that connects before its session is ready has ipywidgets 8
    restore twice, and the round that leaves out what the notebook holds may end first. Then no widget of any kind is shown.
    """
    from playwright.sync_api import TimeoutError as TooLate

    page.goto("about:blank")
    lab.stop_kernels()
    page.goto(lab.address(page.notebook_name))
    try:
        ready(page)
        page.wait_for_selector(shown, timeout=30_000)
    except TooLate:
        text = " ".join(page.locator(".jp-OutputArea-output").all_inner_texts())
        if "Loading widget" not in text and "model not found" not in text:
            raise
        page.reload()
        ready(page)
        page.wait_for_selector(shown, timeout=30_000)


def expect(found: Locator, message: str | None = None) -> LocatorAssertions:
    """Playwright's `expect`, with the patience that a busy machine needs."""
    from playwright.sync_api import expect as waiting

    waiting.set_options(timeout=30_000)
    return waiting(found, message)


def saved(page: object, lab: Lab) -> dict:
    """Save the page's notebook with its widgets; what is in its file then."""
    command(page, "docmanager:save")
    for _ in range(100):
        page.wait_for_timeout(100)
        with contextlib.suppress(json.JSONDecodeError):  # read while it was being written
            found = json.loads((lab.root / page.notebook_name).read_text())
            if "widgets" in found["metadata"]:
                return found
    raise AssertionError("The notebook wasn't saved with its widgets in ten seconds.")


def run_all(page: object, timeout_s: float = 60) -> None:
    """Run every cell and wait until each has its number."""
    ready(page)
    command(page, "notebook:run-all-cells")
    done = "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputArea-prompt')].every((p) => /[0-9]/.test(p.textContent))"
    page.wait_for_function(done, timeout=timeout_s * 1000)
