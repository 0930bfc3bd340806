"""Kills exports at random moments and looks at what they left: `python -m tests.exporting.kill 20 FOLDER`.

PyTorch is imported once, here; each export is a fork of this process, killed with SIGKILL after a random time. After every
kill the folder holds the package that was there before (context 64 or 128, whole, by its hashes) or none. Prints a line a kill.

A quarter of the exports trace and compile. The others find all pieces in the cache and do not trace again, because this process
has exported the same model: tracing would take most of their time and writes no file. So the kills come while files are read
and written.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

import toolkit as tk
from toolkit.core.errors import PackageError
from toolkit.exporting import compiling, package
from toolkit.exporting.pieces import Anatomy


def attempt(model: object, folder: Path, context: int, seconds: float) -> str:
    """One export in a process of its own; "killed" or "finished"."""
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        tk.export(model, folder, context=context, progress=False)
        os._exit(0)
    os.setpgid(child, child)  # in both processes, so that the group exists whichever of them runs first
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert status == 0, "an export failed by itself"
            return "finished"
        time.sleep(0.002)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "killed"


def state(folder: Path) -> int | None:
    """The context of the whole package in the folder, None where there is none. Anything else raises."""
    try:
        manifest, _ = package.read_manifest(folder)
    except PackageError as error:
        if error.found in ("the export into it was not finished", "no such folder"):
            return None
        raise
    for name, entry in manifest["files"].items():
        package.verified(folder, name, entry)
    return int(manifest["context"])


def main(kills: int, folder: Path) -> None:
    torch.set_num_threads(1)
    rng, model = random.Random(0), tk.load("demo/qwen3", device="cpu", progress=False)
    anatomy = Anatomy(model, 64)
    for piece in anatomy.distinct():  # the forks then find everything imported that tracing needs
        compiling.trace(anatomy.traceable(piece, "decode"))
    for _ in range(kills // 4):  # while its pieces are compiled for the first time
        one(model, folder, 64, rng.uniform(0.0, 6.0))
    one(model, folder, 64, 600.0)
    contexts, killed = [128, 64], kills // 4
    for context in contexts:
        tk.export(model, folder.with_name("traced"), context=context, progress=False)
    began = time.monotonic()
    one(model, folder, contexts[0], 600.0)
    whole = time.monotonic() - began  # with all pieces from the cache
    while killed < kills:
        contexts.reverse()
        killed += one(model, folder, contexts[0], rng.uniform(0.0, whole)) == "killed"
    tk.export(model, folder, context=contexts[0], progress=False)
    left = sorted(path.name for path in folder.rglob("*") if path.suffix in (".tmp", ".partial"))
    assert not left, left
    options = {"max_new_tokens": 16, "record": False, "eos": ()}
    again = tk.generate(tk.load_exported(folder), "The capital of France is", **options)
    same = again.tokens == tk.generate(model, "The capital of France is", **options).tokens
    print(json.dumps({"kills": killed, "same_tokens": same}))
    assert same


def one(model: object, folder: Path, context: int, seconds: float) -> str:
    """An attempt, and what it left: all of the new package, or what was there before."""
    before, how = state(folder), attempt(model, folder, context, seconds)
    after = state(folder)
    print(json.dumps({"after_s": round(seconds, 3), "how": how, "before": before, "after": after}), flush=True)
    assert after in ({context} if how == "finished" else {before, context}), (how, before, after)
    return how


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
