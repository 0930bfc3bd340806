"""`python -m tests.fuzz.interrupts [COUNT [KIND...]]` interrupts work at random moments and counts what arrives.

Each interrupt must arrive as a KeyboardInterrupt within a second. Afterwards no device memory is held, no scope or recording is
open, and the device can be used and exchanged for another one.
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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import toolkit as tk
from toolkit.gpu.allocation_log import log

LATE_S = 1.0  # an interrupt that takes longer is a fault


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


def export() -> None:
    model = tk.load("demo/qwen3", device="cpu", progress=False)
    with tempfile.TemporaryDirectory() as folder:
        tk.export(model, Path(folder) / "model", context=64, progress=False)


def tune() -> None:
    tk.tune.explore("int4_matmul", gpus=["h200"])


def works(kinds: list[str]) -> dict[str, Callable[[], None]]:
    """Return the work of each kind (default: all) as a function without arguments."""
    model = tk.load("demo/qwen3", device="virtual:h200", progress=False)
    every: dict[str, Callable[[], None]] = {
        "load": load, "generate": lambda: generate(model), "whole-loop": lambda: loop(model), "memory scopes": scopes,
        "tune": tune, "export": export, "training": train,
    }  # fmt: skip
    return {name: work for name, work in every.items() if not kinds or name in kinds}


def run(kind: str, work: Callable[[], None], count: int, seed: int = 0) -> Tally:
    """Interrupt `work` `count` times, at moments that are spread evenly over its duration."""
    gpu, rng, tally = tk.device("virtual:h200"), random.Random(f"{kind} {seed}"), Tally(kind)
    handler, hook = signal.signal(signal.SIGINT, signal.default_int_handler), sys.unraisablehook
    lost: list[str] = []
    sys.unraisablehook = lambda unraisable: lost.append(repr(unraisable.exc_value))
    try:
        work()
        began = time.perf_counter()
        work()
        takes_s = time.perf_counter() - began
        gc.collect()
        held = gpu.memory().allocated_bytes
        for _ in range(count):
            _one(work, rng.uniform(0, takes_s), tally)
            gc.collect()
            if (leaked := gpu.memory().allocated_bytes - held) > 0:
                tally.leaked_bytes += leaked
                tally.faults.append(f"{leaked} bytes are left")
                held += leaked
            if log.scopes or gpu.recording is not None or gpu.machine.recording or gpu.machine.sizes_only:
                tally.faults.append("a scope or a recording is left open")
            if float(torch.ones(3, device="vgpu").sum()) != 3.0:
                tally.faults.append("the device computes nonsense")
            tally.faults += [f"Python dropped {text}" for text in lost]
            lost.clear()
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook
    return tally


def _one(work: Callable[[], None], after_s: float, tally: Tally) -> None:
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
        while not sent:
            time.sleep(0.001)
        time.sleep(0.05)  # it was sent as the work ended
    except KeyboardInterrupt:
        arrived_s = time.perf_counter()
    thread.join()
    tally.sent += 1
    if not arrived_s:
        tally.faults.append(f"lost, after {after_s:.4f} s")
        return
    tally.arrived += 1
    tally.worst_s = max(tally.worst_s, arrived_s - sent[0])
    if arrived_s - sent[0] > LATE_S:
        tally.faults.append(f"it took {arrived_s - sent[0]:.2f} s to arrive")


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
    gc.collect()
    tk.device("virtual:rtx-5090")  # raises if a tensor is left on the other device
    print(f"{total} interrupts, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
