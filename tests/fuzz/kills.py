"""`python -m tests.fuzz.kills [COUNT]` kills processes while they write files, and looks at what they left.

Every kind of file that the toolkit writes is written again and again by a process that is killed with SIGKILL at a random
moment. Afterwards the file is whole or not there, and once it has been written again, its folder holds nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

import toolkit as tk
from tests.fuzz import formats
from toolkit.core.files import TemporaryFolder, writing
from toolkit.core.workers import WorkerPool
from toolkit.exporting import compiling, package, weights
from toolkit.trace.opening import open_trace
from toolkit.trace.snapshot.write import write_snapshot
from toolkit.tune import store
from toolkit.vram.measure import MemoryUse
from toolkit.vram.sessions import Session

Work = Callable[[Path], object]
TRACE = formats.recorded()
NET = torch.nn.Linear(64, 64)
TIMED = store.Tuned.from_text(json.dumps(formats.timings()), "x")


@dataclass(frozen=True)
class Writer:
    """`write` writes a file into a folder, and `check` raises if that is not whole. `keeps`: what the folder then holds."""

    name: str
    write: Work
    check: Work
    keeps: tuple[str, ...]


@dataclass
class Tally:
    """What became of the files of killed processes. `litter`: how many left more than their file, before the next one ran."""

    kills: int = 0
    litter: int = 0
    faults: list[str] = field(default_factory=list)


def _is_page(path: Path) -> None:
    assert path.read_text().rstrip().endswith("</html>")


def _export(folder: Path) -> None:
    """The files of an export, as `tk.export` writes them."""
    with package.locked(folder):
        files = {}
        for name in ("decode", "prefill"):
            data = os.urandom(1 << 16)
            name = f"methods/{name}-x-{hashlib.sha256(data).hexdigest()[:16]}.pt2"
            package.put(folder, name, data)
            files[name] = package.entry(data)
        with writing(folder) as file:
            sha256 = weights.write(NET, file, lambda *_: None)
            name = f"weights-{sha256[:16]}.safetensors"
            os.replace(file.name, folder / name)
        files[name] = {"sha256": sha256, "bytes": (folder / name).stat().st_size}
        compiled = {"x": {method.split("/")[1].split("-")[0]: method for method in files if method.startswith("methods")}}
        package.remember(package.finish(folder, formats.manifest() | {"files": files, "compiled": compiled}))


def _is_package(folder: Path) -> None:
    try:
        found, _ = package.read_manifest(folder)
    except tk.ToolkitError as error:
        if error.found in ("the export into it was not finished", "no such folder"):
            return
        raise
    for name, entry in found["files"].items():
        package.verified(folder, name, entry)


def _is_piece(folder: Path) -> None:
    for path in folder.glob("*.pt2"):
        assert path.stem == f"key-{hashlib.sha256(path.read_bytes()).hexdigest()}"


def _work(folder: Path) -> None:
    del folder
    with WorkerPool("tests.fuzz.echo", {}, 1) as pool:
        pool.submit(lambda worker: worker.ask({})).result()


def _session(folder: Path) -> None:
    session = Session(folder)
    (folder / "cells.jsonl").unlink(missing_ok=True)
    for number in range(5):
        session.add(number, "x = 1", "ok", MemoryUse(TRACE))
    assert session.problem is None


def _is_session(folder: Path) -> None:
    if (folder / "cells.jsonl").exists():
        for place, cell in enumerate(Session.open(folder).cells):
            assert cell.number == place
            assert cell.read().peak_bytes > 0


WRITERS = (
    Writer("trace", lambda p: TRACE.save(p / "x"), lambda p: open_trace(p / "x"), ("x",)),
    Writer("trace, to_chrome", lambda p: TRACE.to_chrome(p / "x.json"), lambda p: open_trace(p / "x.json"), ("x.json",)),
    Writer("trace, gzip", lambda p: TRACE.to_chrome(p / "x.json.gz"), lambda p: open_trace(p / "x.json.gz"), ("x.json.gz",)),
    Writer("trace, page", lambda p: TRACE.to_html(p / "x.html"), lambda p: _is_page(p / "x.html"), ("x.html",)),
    Writer("memory, page", lambda p: MemoryUse(TRACE).to_html(p / "x.html"), lambda p: _is_page(p / "x.html"), ("x.html",)),
    Writer("snapshot", lambda p: write_snapshot(TRACE, p / "x"), lambda p: open_trace(p / "x"), ("x",)),
    Writer("session", _session, _is_session, (*(f"{n:04}.trace" for n in range(1, 6)), "cells.jsonl")),
    Writer(
        "timings",
        lambda p: store.put_rows("h200", TIMED.device, TIMED.rows),
        lambda p: store.Tuned.from_text((p / "tuned" / "h200.json").read_text(), "x"),
        (".h200.json.lock", "h200.json", "tuned"),
    ),
    Writer("package", lambda p: _export(p / "x"), lambda p: _is_package(p / "x"), ()),
    Writer("compiled piece", lambda p: compiling._keep("key", b"x" * 100_000), lambda p: _is_piece(p / "compiled"), ()),
    Writer("temporary folder", lambda p: TemporaryFolder().cleanup(), lambda p: None, ()),
    Writer("worker processes", _work, lambda p: None, ()),
)


def _kill(writer: Writer, folder: Path, after_s: float) -> None:
    child = os.fork()
    if not child:
        while True:
            writer.write(folder)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def run(writer: Writer, count: int, top: Path, rng: random.Random) -> Tally:
    """Kill `count` processes that write into `top`."""
    tally, folder = Tally(), top / writer.name
    folder.mkdir()
    environment, temporary = os.environ.copy(), tempfile.tempdir
    os.environ |= {"TOOLKIT_CACHE": str(folder), "TMPDIR": str(folder)}
    tempfile.tempdir = str(folder)
    try:
        writer.write(folder)
        began, clean = time.perf_counter(), _files(folder)
        writer.write(folder)
        takes_s = time.perf_counter() - began
        for _ in range(count):
            _kill(writer, folder, rng.uniform(0, max(2 * takes_s, 0.02)))
            tally.kills += 1
            tally.litter += len(_files(folder)) > len(clean)
            for step in (writer.check, writer.write, writer.check):
                with suppress(FileNotFoundError):
                    try:
                        step(folder)
                    except (AssertionError, tk.ToolkitError) as error:
                        tally.faults.append(f"{type(error).__name__}: {error}")
            deadline = time.monotonic() + 60  # worker processes notice the death of the process that started them
            while len(_files(folder)) > len(clean) and time.monotonic() < deadline:
                time.sleep(0.02)
            found = _files(folder)
            if len(found) > len(clean) or not set(writer.keeps) <= set(found):
                tally.faults.append(f"after the next run: {found}")
    finally:
        os.environ.clear()
        os.environ.update(environment)
        tempfile.tempdir = temporary
    return tally


def main(arguments: list[str]) -> int:
    count, rng = int(arguments[0]) if arguments else 200, random.Random(0)
    torch.set_num_threads(1)
    print(f"{'writer':20}{'kills':>7}{'with litter':>13}{'faults':>8}")
    total = Tally()
    with tempfile.TemporaryDirectory() as top:
        for number, writer in enumerate(WRITERS):
            tally = run(writer, (count + number) // len(WRITERS), Path(top), rng)
            total.kills, total.litter = total.kills + tally.kills, total.litter + tally.litter
            total.faults += tally.faults
            print(f"{writer.name:20}{tally.kills:7}{tally.litter:13}{len(tally.faults):8}", flush=True)
            for text in tally.faults:
                print(f"    {text}")
    print(f"{total.kills} kills, {total.litter} left litter before the next run, {len(total.faults)} faults")
    return 1 if total.faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
