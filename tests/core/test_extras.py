"""Messages name the command that installs an extra, from where this copy of the toolkit came from."""

import json
import shlex
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from toolkit.core import extras
from toolkit.core.extras import install_command

PIP = [sys.executable, "-m", "pip", "install"]


def test_a_clone_is_installed_from_its_folder():
    root = Path(__file__).parents[2]
    assert shlex.split(install_command("ranks")) == [*PIP, "-e", f"{root}[ranks]"]


@pytest.mark.parametrize(
    ("written", "address"),
    [
        ({"url": "file:///home/me/my%20clone", "dir_info": {}}, "file:///home/me/my%20clone"),
        ({"url": "https://git.org/tk", "vcs_info": {"vcs": "git", "commit_id": "12ab"}}, "git+https://git.org/tk@12ab"),
    ],
)
def test_a_copy_is_installed_from_its_address(monkeypatch, tmp_path, written, address):
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    monkeypatch.setattr(extras.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda _: json.dumps(written)))
    assert shlex.split(install_command("lab")) == [*PIP, f"decode-toolkit[lab] @ {address}"]


@pytest.mark.parametrize("written", [None, "{", "{}"])
def test_without_an_address_a_clone_is_needed(monkeypatch, tmp_path, written):
    monkeypatch.setattr(extras, "CLONE", tmp_path)
    monkeypatch.setattr(extras.metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda _: written))
    assert install_command("hf") == "pip install -e '.[hf]', in a clone of the toolkit's repository"


def test_extras_in_messages_exist():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["name"] == extras.NAME
    assert {"lab", "hf", "ranks"} <= project["optional-dependencies"].keys()
