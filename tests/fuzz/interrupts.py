"""`python -m tests.fuzz.interrupts [COUNT [KIND...]]` interrupts work at random moments and counts what arrives.

Each interrupt must arrive as a KeyboardInterrupt within a second. Afterwards no device memory is held, no scope, recording or
mode of PyTorch is open, no process or temporary folder is left, the package of an export is whole or not there, and the device
can be used and exchanged for another one.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import toolkit as tk
from toolkit.core.signals import was_raised_again
from toolkit.exporting import compiling, package
from toolkit.gpu.allocation_log import log

LATE_S = 1.0  # an interrupt that takes longer is a fault, unless the same one comes sooner when it is sent again
LOST_S = 10.0  # an interrupt that has not arrived so long after the work is a fault


@dataclass
class Tally:
    """What became of the interrupts of one kind of work."""

    kind: str
    sent: int = 0
    arrived: int = 0
    worst_s: float = 0.0
    leaked_bytes: int = 0
    faults: list[str] = field(default_factory=list)


def load() -> None:
    tk.load("demo/qwen3", device="virtual:h200", progress=False)


def generate(model: Any) -> None:
    tk.generate(model, "hello", max_new_tokens=6)


def loop(model: Any) -> None:
    tk.generate(model, "hello", "whole-loop", max_new_tokens=6, kv="int8")


def train() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 16)).to("vgpu")
    optimizer = torch.optim.Adam(net.parameters())
    with torch.enable_grad():  # an interrupt inside of PyTorch's `no_grad` may leave gradients off
        for _ in range(5):
            net(torch.randn(4, 16).pin_memory().to("vgpu")).sort()[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def scopes() -> None:
    for _ in range(10):
        with tk.memory() as outer:
            kept = [torch.ones(64, 64, device="vgpu") for _ in range(4)]
            with tk.memory():
                kept.append(kept[0] @ kept[1])
            with tk.record("virtual:h200"):
                kept[2].add_(1)
        assert outer.peak_bytes > 0


class Large(torch.autograd.Function):
    """A function whose backward pass needs more memory than any GPU has."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient.new_empty(1 << 40)


def full() -> None:
    """Run out of memory beside garbage, for which the error searches, in a backward pass and outside of one."""
    gc.disable()  # it would free the garbage before the search
    try:
        ring: list[Any] = [torch.ones(1 << 18, device="vgpu")]
        ring.append(ring)
        del ring
        with torch.enable_grad():
            loss = Large.apply(torch.ones(8, device="vgpu", requires_grad=True)).sum()
        for work in (loss.backward, lambda: torch.empty(1 << 40, device="vgpu")):
            with suppress(torch.OutOfMemoryError):
                work()
    finally:
        gc.enable()


class Export:
    """Exports of a small model into one folder. With `compiles`, the first seconds of one that finds no compiled pieces."""

    def __init__(self, compiles: bool) -> None:
        self.compiles, self.rng = compiles, random.Random(0)
        self.top = tempfile.TemporaryDirectory()
        self.folder, self.cache = Path(self.top.name) / "model", os.environ.get("TOOLKIT_CACHE", "")
        self.model = tk.load("demo/qwen3", device="cpu", progress=False)

    def __call__(self) -> None:
        if self.compiles or self.rng.random() < 0.5:
            compiling._described.clear()  # it traces
        os.environ["TOOLKIT_CACHE"] = str(Path(self.top.name) / f"cache {self.rng.random() if self.compiles else ''}")
        try:
            tk.export(self.model, self.folder, context=64, progress=False)
        finally:
            os.environ["TOOLKIT_CACHE"] = self.cache

    def left(self) -> str | None:
        """Return what is wrong with the package, if there is one."""
        try:
            manifest, _ = package.read_manifest(self.folder)
            for name, entry in manifest["files"].items():
                package.verified(self.folder, name, entry)
        except tk.ToolkitError as error:
            return None if error.found in ("the export into it was not finished", "no such folder") else str(error)
        return None


def tune() -> None:
    tk.tune.explore("int4_matmul", gpus=["h200"])


def works(kinds: list[str]) -> dict[str, Callable[[], None]]:
    """Return the work of each kind (default: all) as a function without arguments."""
    model = tk.load("demo/qwen3", device="virtual:h200", progress=False)
    every: dict[str, Callable[[], Callable[[], None]]] = {
        "load": lambda: load,
        "generate": lambda: lambda: generate(model),
        "whole-loop": lambda: lambda: loop(model),
        "memory scopes": lambda: scopes,
        "tune": lambda: tune,
        "training": lambda: train,
        "out of memory": lambda: full,
        "export": lambda: Export(compiles=False),
        "export, compiling": lambda: Export(compiles=True),
    }
    return {name: work() for name, work in every.items() if not kinds or name in kinds}


def run(kind: str, work: Callable[[], None], count: int, seed: int = 0) -> Tally:
    """Interrupt `work` `count` times, at moments that are spread evenly over its duration."""
    with tempfile.TemporaryDirectory() as folder:  # other processes leave nothing in it
        before, tempfile.tempdir = tempfile.tempdir, folder
        try:
            return _run(kind, work, count, seed)
        finally:
            tempfile.tempdir = before


def _processes() -> set[int]:
    """Return the processes that this one has started, directly or not, and that have not ended."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process.pid)
    return found


def _run(kind: str, work: Callable[[], None], count: int, seed: int) -> Tally:
    others = _processes()  # of other tests in this process
    gpu, rng, tally = tk.device("virtual:h200"), random.Random(f"{kind} {seed}"), Tally(kind)
    handler, hook = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    lost: list[str] = []

    def note(dropped: sys.UnraisableHookArgs) -> None:
        if not was_raised_again(dropped):
            lost.append(f"in {dropped.object!r}: " + "".join(traceback.format_exception(dropped.exc_value)))

    sys.unraisablehook = note
    try:
        takes_s = 12.0  # of an export that compiles
        if not (isinstance(work, Export) and work.compiles):
            work()
            began = time.perf_counter()
            work()
            takes_s = time.perf_counter() - began
        gc.collect()
        held = gpu.memory().allocated_bytes
        left: tuple[int | bool, ...] = ()
        for _ in range(count):
            after_s = rng.uniform(0, takes_s)
            late_s = _one(work, after_s)
            for _ in range(2):  # a machine that stands still delays one, but not three
                if late_s is not None and late_s > LATE_S:
                    late_s = _one(work, after_s)
            _count(tally, after_s, late_s)
            gc.collect()
            if (leaked := gpu.memory().allocated_bytes - held) > 0:
                tally.leaked_bytes += leaked
                tally.faults.append(f"{leaked} bytes are left")
                held += leaked
            before, left = left, (len(log.scopes), gpu.recording is not None, gpu.machine.recording, gpu.machine.sizes_only)
            if any(left) and left != before:
                tally.faults.append("scopes, recording, the machine's and sizes_only are left: {}, {}, {}, {}".format(*left))
            if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack() or not torch.is_grad_enabled():
                tally.faults.append("a mode of PyTorch is left on")
                torch.set_grad_enabled(True)
            if started := _processes() - others:
                tally.faults.append(f"{len(started)} processes are left")
            if folders := [*Path(tempfile.gettempdir()).glob("toolkit-*")]:
                tally.faults.append(f"{len(folders)} folders are left")
            if isinstance(work, Export) and (wrong := work.left()):
                tally.faults.append(wrong)
            if float(torch.ones(3, device="vgpu").sum()) != 3.0:
                tally.faults.append("the device computes nonsense")
            tally.faults += [f"Python dropped an error {text}" for text in lost]
            lost.clear()
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook
    return tally


def _one(work: Callable[[], None], after_s: float) -> float | None:
    """Interrupt `work` after so many seconds, and return how many later that arrived; None if it never did."""
    sent: list[float] = []

    def send() -> None:
        time.sleep(after_s)
        sent.append(time.perf_counter())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=send, daemon=True)
    arrived_s = 0.0
    try:
        thread.start()
        work()
        thread.join()  # until it is sent, however late: it must not arrive outside of this block
        time.sleep(LOST_S)  # it was sent as the work ended
    except KeyboardInterrupt:
        arrived_s = time.perf_counter()
    thread.join()
    return arrived_s - sent[0] if arrived_s else None


def _count(tally: Tally, after_s: float, late_s: float | None) -> None:
    tally.sent += 1
    if late_s is None:
        tally.faults.append(f"lost, after {after_s:.4f} s")
        return
    tally.arrived += 1
    tally.worst_s = max(tally.worst_s, late_s)
    if late_s > LATE_S:
        tally.faults.append(f"it took {late_s:.2f} s to arrive")


def main(arguments: list[str]) -> int:
    count = int(arguments[0]) if arguments else 50
    print(f"{'kind':16}{'sent':>7}{'arrived':>9}{'worst s':>9}{'leaked':>9}{'faults':>8}")
    total = faults = 0
    for kind, work in works(arguments[1:]).items():
        tally = run(kind, work, count)
        total, faults = total + tally.sent, faults + len(tally.faults)
        row = f"{kind:16}{tally.sent:7}{tally.arrived:9}{tally.worst_s:9.3f}{tally.leaked_bytes:9}{len(tally.faults):8}"
        print(row, flush=True)
        for text in tally.faults:
            print(f"    {text}")
    del work  # it may hold a model
    gc.collect()
    tk.device("virtual:rtx-5090")  # raises if a tensor is left on the other device
    print(f"{total} interrupts, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
