"""Files are replaced atomically, only if they are regular files, and killed processes leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import toolkit as tk
from toolkit.core.errors import ToolkitError, TraceError
from toolkit.core.files import TemporaryFolder, at_home, check_writable, open_regular, replace_text, replacing, writing

BAD_PATHS: tuple[Any, ...] = (None, 5, b"bytes", "a\0b", "half \ud800", "long" * 1000, "")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=["device", "fifo", "socket", "folder", "link to a device"])
def not_a_file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "x"
    if request.param == "device":
        return Path("/dev/null")
    if request.param == "fifo":
        os.mkfifo(path)
    elif request.param == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif request.param == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/null")
    return path


def test_what_is_not_a_regular_file_is_neither_replaced_nor_read(not_a_file: Path) -> None:
    before = os.lstat(not_a_file)
    with pytest.raises(TraceError, match=r"not a regular file\. Give the path of a regular file$"):
        replace_text(not_a_file, "text", TraceError)
    with pytest.raises(TraceError, match="not a regular file"):
        check_writable(not_a_file, TraceError)
    with pytest.raises(TraceError, match=r"asked: it is a .*, not a regular file|can't be read"):
        open_regular(not_a_file, "asked", TraceError)
    assert os.path.samestat(before, os.lstat(not_a_file))


def test_a_value_that_is_no_path_is_named() -> None:
    for value, kind in ((3, "an int"), (b"bytes", "a bytes"), (None, "a NoneType"), (object(), "an object")):
        with pytest.raises(TraceError, match=f"it is {kind}, not a path"):
            tk.open_memory(value)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", BAD_PATHS, ids=ascii)
def test_paths_that_name_no_file(path: Any) -> None:
    with pytest.raises(ToolkitError):
        replace_text(path, "text")
    with pytest.raises(TraceError):
        open_regular(path, "asked", TraceError)


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="Linux has a file that can be opened and not read")
def test_a_disk_that_fails_is_an_error_in_words() -> None:
    for read in (lambda file: file.read(), lambda file: file.read(5), lambda file: file.readline()):
        with (
            open_regular("/proc/self/mem", "asked", TraceError) as file,
            pytest.raises(TraceError, match="asked: it can't be read"),
        ):
            read(file)
    with pytest.raises(TraceError, match="it can't be read"):
        tk.open_trace("/proc/self/mem")


def test_a_home_folder_of_nobody_is_a_path_that_does_not_exist() -> None:
    assert at_home("~/x") == Path.home() / "x"
    assert at_home(Path("~nobody-of-that-name/x")) == Path("~nobody-of-that-name/x")
    with pytest.raises(ToolkitError, match="~nobody-of-that-name"):
        tk.load("~nobody-of-that-name/x")


def test_files_in_the_home_folder_are_written_and_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # on Windows
    with tk.record("cpu") as trace:
        pass
    for name, write in (("a.trace", trace.save), ("a.json", trace.to_chrome), ("a.html", trace.to_html)):
        assert write(f"~/{name}") == tmp_path / name
        assert (tmp_path / name).is_file()
    assert len(tk.open_trace("~/a.trace")) == len(tk.open_trace(Path("~/a.json"))) == len(trace)
    with tk.memory("virtual:h200") as use:
        torch.empty(8, device="vgpu")
    assert use.to_snapshot("~/a.pickle") == tmp_path / "a.pickle"
    assert tk.open_memory("~/a.pickle").peak_bytes == use.peak_bytes


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "other" / "target", tmp_path / "link"
    target.parent.mkdir()
    target.write_text("old")
    link.symlink_to("other/target")
    replace_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    link.unlink()
    link.symlink_to("other/new")
    replace_text(link, "newer")
    assert (target.parent / "new").read_text() == "newer"
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    with pytest.raises(TraceError, match="symbolic links"):
        replace_text(loop, "text", TraceError)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_modes(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        new = replace_text(tmp_path / "new", "text")
        assert stat.S_IMODE(new.stat().st_mode) == 0o666 & ~umask
        new.chmod(0o640)
        replace_text(new, "again")
        assert stat.S_IMODE(new.stat().st_mode) == 0o640
    finally:
        os.umask(old)


def test_errors_name_the_cause(tmp_path: Path) -> None:
    for path, found, do in ((tmp_path / "none" / "x", "No such file", "disk"), (tmp_path / ("x" * 300), "too long", "shorter")):
        for write in (partial(replace_text, text="text"), check_writable):
            with pytest.raises(TraceError, match=found) as caught:
                write(path, error=TraceError)
            assert do in caught.value.do
    longest = tmp_path / ("x" * 255)
    check_writable(longest, TraceError)
    assert not left(tmp_path)
    assert replace_text(longest, "text").read_text() == "text"


FULL = """
import resource, signal, sys
from pathlib import Path
from toolkit.core.errors import ToolkitError
from toolkit.core.files import replacing
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
try:
    with replacing(sys.argv[1], ToolkitError) as file:
        file.write(bytes(1 << 20))
except ToolkitError as error:
    print(error.found)
"""


def test_a_file_that_does_not_fit_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=True)
    assert "too large" in done.stdout
    assert path.read_text() == "old"
    assert left(tmp_path) == ["x"]


def test_an_interrupted_block_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as file:  # noqa: PT012
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert left(tmp_path) == ["x"]


KILLED = """
import os, sys, time
from pathlib import Path
from toolkit.core.files import TemporaryFolder, writing
folder = TemporaryFolder()
with writing(Path(sys.argv[1])) as file:
    file.write(bytes(1 << 20))
    TemporaryFolder().cleanup()  # leaves the locked ones alone
    if not os.fork():  # a child, which shares all open files
        time.sleep(60)
    print(folder.name, flush=True)
    time.sleep(60)
"""


def test_the_next_run_deletes_what_a_killed_one_left_even_if_its_child_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    name = process.stdout.readline().strip()
    (Path(name) / "inside").mkdir()
    replace_text(tmp_path / "x", "text")
    TemporaryFolder().cleanup()
    assert len(left(tmp_path)) == 4, "the files of a living process stay"
    process.send_signal(signal.SIGKILL)
    process.wait()
    try:
        replace_text(tmp_path / "x", "text")
        TemporaryFolder().cleanup()
        assert left(tmp_path) == ["x"]
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the child


def test_a_file_that_was_renamed_stays(tmp_path: Path) -> None:
    with writing(tmp_path) as file:
        file.write(b"text")
        os.replace(file.name, tmp_path / "x")
    assert left(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"text"
