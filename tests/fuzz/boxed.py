"""Loads mutants in a process of its own, watched: what it opens and starts, how long it takes, how much memory it wants."""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.fuzz.bases import Kind, write_good
from tests.host_memory import HostPeak
from tests.models.parity import value_of
from toolkit.core.errors import ToolkitError

SHARED_MEMORY = "/dev/shm"  # a disk would take longer to write the mutants than it takes to load them
SECONDS, MEMORY = 5.0, 1 << 30  # that a mutant may take, and how much more than the process has when it starts
FORBIDDEN = (
    "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect", "pickle.find_class",
    "os.remove", "os.rename", "os.mkdir", "os.chmod", "shutil.rmtree",
)  # fmt: skip
IDS = torch.tensor([[1, 2, 3]])


@dataclass
class Tally:
    """What became of the mutants of one kind. `faults`: (mutant, what went wrong)."""

    kind: str
    mutants: int = 0
    refused: int = 0
    loaded: int = 0
    changed: int = 0  # loaded with another config or other values, as the file says
    worst_seconds: float = 0.0
    peak_mb: float = 0.0
    faults: list[tuple[str, str]] = field(default_factory=list)


class Slow(BaseException):
    """Not an Exception: nothing in between may take it for its own."""


class Watch:
    """What the process opens and starts while `on`, outside of `allowed`."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed, self.on, self.seen = allowed, False, []  # type: tuple[str, ...], bool, list[str]
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open" and isinstance(args[0], str | bytes):
            path = os.path.abspath(os.fsdecode(args[0]))
            if not path.startswith(self.allowed):
                self.seen.append(f"opened {path}")
        elif event in FORBIDDEN:
            self.seen.append(f"{event} {args!r:.80}")


def load(kind: Kind, folder: Path, **options: Any) -> Any:
    """What is loaded from a mutant: a model, or the tokenizer in a GGUF's metadata."""
    if kind.load is not None:
        return kind.load(folder / kind.given)
    if kind.given == "metadata.json":
        from toolkit.text import tokenizer

        found = tokenizer.from_gguf(json.loads((folder / kind.given).read_text()), "x.gguf")
        return None if found is None else (found.decode(found.encode("the \n 日 <|im_end|>")), found.eos_ids)
    import toolkit

    return toolkit.load(folder / kind.given, "cpu", progress=False, **options)


def values(model: Any) -> list[bytes]:
    return [p.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]


class Judge:
    """Says whether a loaded mutant is right: the same as the good checkpoint, or as different as the files are."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.good = load(kind, folder)
        self.model = hasattr(self.good, "config")
        self.values = values(self.good) if self.model else []
        with torch.no_grad():
            self.logits: Any = self.good(IDS) if self.model else None

    @torch.no_grad()
    def __call__(self, found: Any) -> bool:
        """True where it is the same. AssertionError where it is wrong."""
        if not self.model:
            return bool(found == self.good)
        same = found.config == self.good.config and values(found) == self.values
        logits = found(IDS)
        if same:
            assert torch.equal(logits, self.logits), "same config and weights, other logits"
        elif self.kind.reference is not None:
            plain = load(self.kind, self.folder, fuse=False, scheme="none", dtype=torch.float32)
            self.compare(plain, self.kind.reference(self.folder))
        return same

    def compare(self, model: Any, stored: dict[str, torch.Tensor]) -> None:
        """Every weight is what the format's own package reads."""
        from toolkit.models import ARCHITECTURES

        names = ARCHITECTURES["qwen3"]
        sources = (names.names_gguf if "gguf" in self.kind.name else names.names_hf)(model.config, set(stored))
        held = dict(model.named_parameters())
        for name, source in sources.items():
            got, wanted = held[name].float(), value_of(source, stored).float()
            assert torch.equal(got.isnan(), wanted.isnan()), f"{name} isn't a number elsewhere than the reference's"
            assert torch.equal(got.nan_to_num(), wanted.nan_to_num()), f"{name} differs from the reference's"


def attempt(kind: Kind, folder: Path, judge: Judge, watch: Watch) -> str:
    """ "refused", "same", "changed", or what went wrong."""
    watch.seen.clear()
    try:
        signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
        watch.on = True
        found = load(kind, folder)
        watch.on = False
        verdict = "same" if judge(found) else "changed"
    except ToolkitError as error:
        watch.on = False
        verdict = "refused" if error.found and error.do else "an error without words"
    except Slow:
        verdict = "no end in 10 s"
    except BaseException as error:
        verdict = f"{type(error).__name__}: {error!s:.300}"
    finally:
        watch.on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "; ".join(watch.seen[:3]) or verdict


def _child(kind: Kind, folder: Path, wire: Connection, every: int) -> None:
    """The watched process: says what it will load, then what became of it. None at the end; a text if it fails itself."""
    try:
        _load_all(kind, folder, wire, every)
        wire.send(None)
    except BaseException:
        wire.send(traceback.format_exc())


def _load_all(kind: Kind, folder: Path, wire: Connection, every: int) -> None:
    torch.set_num_threads(1)
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)  # native code says there that it panics

    def stop(*_: object) -> None:
        raise Slow

    signal.signal(signal.SIGALRM, stop)
    judge = Judge(kind, folder)
    own = (
        str(folder.resolve()),
        str(folder),
        sys.prefix,
        sys.base_prefix,
        str(Path(__file__).parents[2] / "toolkit"),
        "/proc",
        "/dev/null",
        "/sys",
    )
    watch = Watch(own)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    gc.freeze()
    host = HostPeak()
    for mutant in itertools.islice(kind.mutants(folder, random.Random(f"mutants of {kind.name}")), 0, None, every):
        kept = {name: (folder / name).read_bytes() for name in mutant.files}
        wire.send((mutant.says, None))
        for name, content in mutant.files.items():
            (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
        began = time.perf_counter()
        verdict = attempt(kind, folder, judge, watch)
        seconds = time.perf_counter() - began
        for name, content in kept.items():
            (folder / name).write_bytes(content)
        peak = host.grown_bytes() / (1 << 20)
        wire.send((mutant.says, (verdict, seconds, peak)))


def run(kind: Kind, every: int = 1) -> Tally:
    """Load every mutant of `kind`, or one of `every`, each boxed in, and count what became of them."""
    tally = Tally(kind.name)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if os.path.isdir(SHARED_MEMORY) else None) as place:
        folder = Path(place) / "root" / "model"
        write_good(kind, folder)
        context = multiprocessing.get_context("fork")
        near, far = context.Pipe()
        child = context.Process(target=_child, args=(kind, folder, far, every), daemon=True)
        child.start()
        far.close()
        says = "before the first mutant"
        try:
            while True:
                if not near.poll(60):
                    tally.faults.append((says, "it hangs in native code"))
                    break
                message = near.recv()
                if message is None:
                    break
                if isinstance(message, str):
                    raise RuntimeError(message)
                says, outcome = message
                if outcome is not None:
                    _count(tally, says, *outcome)
        except EOFError:
            child.join()
            tally.faults.append((says, f"the process ended with {child.exitcode}"))
        finally:
            child.kill()
            child.join()
    return tally


def _count(tally: Tally, says: str, verdict: str, seconds: float, peak: float) -> None:
    tally.mutants += 1
    tally.worst_seconds, tally.peak_mb = max(tally.worst_seconds, seconds), max(tally.peak_mb, peak)
    if verdict == "refused":
        tally.refused += 1
    elif verdict in ("same", "changed"):
        tally.loaded += 1
        tally.changed += verdict == "changed"
    else:
        tally.faults.append((says, verdict))
    if seconds > SECONDS:
        tally.faults.append((says, f"it took {seconds:.1f} s"))
