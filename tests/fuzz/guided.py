"""`python -m tests.fuzz.guided [SECONDS [KIND...]]` lets Atheris look for files that a reader does not refuse in words.

Atheris (`pip install atheris`) changes files, and keeps those that reach new code. Each kind of `KINDS` runs for SECONDS in a
process of its own, from its good file and some of its mutants. Anything but a load or a ToolkitError is a fault, and a file
that takes more than 5 s or 3 GB. The file of a fault is kept in `build/guided/KIND`.
"""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
import json
import pkgutil
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SECONDS, SLOW_S, MEMORY_MB, SEEDS = 600, 5, 3000, 300


def _saved(data: bytes, good: bytes) -> bytes:
    """A saved trace with another header: in a compressed file, nearly every change only breaks a checksum."""
    import numpy as np

    with np.load(io.BytesIO(good)) as file:
        arrays = {name: file[name] for name in file.files}
    written = io.BytesIO()
    np.savez(written, **arrays | {"header": np.frombuffer(data, np.uint8)})
    return written.getvalue()


def _saved_header(data: bytes) -> bytes:
    import numpy as np

    with np.load(io.BytesIO(data)) as file:
        return file["header"].tobytes()


def _hashed(data: bytes, good: bytes) -> bytes:
    """A manifest with the hash of what it says."""
    from toolkit.exporting.package import _text

    try:
        found = json.loads(data)
        return _text(found) if isinstance(found, dict) else data
    except (ValueError, TypeError, RecursionError):
        return data


def _fields(data: bytes, good: bytes) -> bytes:
    """The fields of a GGUF file: tests write them as JSON, which no reader of the toolkit reads."""
    try:
        return data if isinstance(json.loads(data), dict) else good
    except (ValueError, RecursionError):
        return good


# How the bytes that Atheris changes are taken out of a file, and put back.
Inner = tuple[Callable[[bytes], bytes], Callable[[bytes, bytes], bytes]]
INNER: dict[str, Inner] = {
    "trace, saved": (_saved_header, _saved),
    "trace, gzip": (gzip.decompress, lambda data, _: gzip.compress(data, 1)),
    "manifest": (lambda data: data, _hashed),
    "tokenizer in gguf": (lambda data: data, _fields),
}


def fuzz(name: str, seconds: int, out: Path) -> None:
    """Fuzz one kind. Ends the process: with status 0 if no fault was found."""
    import atheris

    with atheris.instrument_imports(include=["toolkit"]):
        import toolkit.exporting
        import toolkit.loading
        import toolkit.models
        import toolkit.text
        import toolkit.trace
        import toolkit.tune.store
        import toolkit.vram.sessions
        import toolkit.weights
        from tests.fuzz.bases import KINDS, write_good
        from tests.fuzz.boxed import load
        from toolkit.core.errors import ToolkitError

        for part in (toolkit.exporting, toolkit.loading, toolkit.models, toolkit.text, toolkit.trace, toolkit.weights):
            for found in pkgutil.walk_packages(part.__path__, part.__name__ + "."):  # readers are imported where they are used
                importlib.import_module(found.name)
    kind = next(kind for kind in KINDS if kind.name == name)
    top = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    folder, seeds = top / "good", out / "seeds"
    write_good(kind, folder)
    load(kind, folder)
    seeds.mkdir(parents=True, exist_ok=True)
    mutants = [*itertools.islice(kind.mutants(folder, random.Random(0)), 10 * SEEDS)]
    file = next(iter(mutants[0].files))
    path, good = folder / file, (folder / file).read_bytes()
    take, put = INNER.get(name, (lambda data: data, lambda data, _: data))
    for number, data in enumerate([good, *(mutant.files.get(file) or b"" for mutant in mutants[:: len(mutants) // SEEDS + 1])]):
        with suppress(Exception):  # a mutant whose inner bytes can't be taken out
            (seeds / str(number)).write_bytes(take(data))

    def one(data: bytes) -> None:
        path.write_bytes(put(data, good))
        with suppress(ToolkitError):
            load(kind, folder)

    limits = (f"-max_total_time={seconds}", f"-timeout={SLOW_S}", f"-rss_limit_mb={MEMORY_MB}", "-max_len=200000")
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={out}/", "-print_final_stats=1", str(seeds)], one)
    atheris.Fuzz()


def main(arguments: list[str]) -> int:
    from tests.fuzz.bases import KINDS

    seconds = int(arguments[0]) if arguments else SECONDS
    faults = 0
    print(f"{'kind':24}{'files':>10}{'edges':>8}{'faults':>8}")
    for kind in KINDS:
        if arguments[1:] and not any(word in kind.name for word in arguments[1:]):
            continue
        out = Path("build", "guided", re.sub(r"[^a-z0-9]+", "-", kind.name)).absolute()
        command = [sys.executable, "-m", "tests.fuzz.guided", "--one", kind.name, str(seconds), str(out)]
        said = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        files = re.findall(r"number_of_executed_units: (\d+)", said.stderr)
        edges = re.findall(r"cov: (\d+)", said.stderr)
        faults += said.returncode != 0
        print(f"{kind.name:24}{(files or ['-'])[-1]:>10}{(edges or ['-'])[-1]:>8}{int(said.returncode != 0):8}", flush=True)
        if said.returncode:
            print("    " + "\n    ".join((said.stdout + said.stderr).strip().splitlines()[-25:]))
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        fuzz(sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
    sys.exit(main(sys.argv[1:]))
