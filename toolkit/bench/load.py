"""How long a model takes to load, and what it takes of both memories: for the figures in the README, and for yours.

    python -m toolkit.bench.load random/gemma4-31b --scheme q4_k_m --out loaded.json
    python -m toolkit.bench.load --write-gguf gemma4-31b out.gguf      # then: python -m toolkit.bench.load out.gguf

Host memory is sampled 50 times a second: what is resident, and what of it is files mapped into memory, which the system
takes back at will. Device memory is the allocator's own account. Read the file once before (cat out.gguf > /dev/null)
to time a load from the page cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from toolkit.bench.decode_copies import about
from toolkit.bench.write_gguf import write_gguf
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load

SAMPLES_PER_S = 50


def bench(path: str, device: str, scheme: str | None, dtype: str | None, fuse: bool) -> dict[str, Any]:
    """Load once, and the record of it, ready for JSON. Bytes are bytes, times seconds."""
    gpu = open_device(device)
    torch.empty(1, device=gpu.torch)  # the context, before the clock runs
    gpu.sync()
    before = gpu.memory().allocated_bytes
    gpu.reset_peak()
    with host_memory() as host:
        began = time.perf_counter()
        model = load(path, device=gpu, scheme=scheme, dtype=dtype, fuse=fuse)
        seconds = time.perf_counter() - began
    memory, report = gpu.memory(), model.report
    return {
        **about(device), "model": Path(path).name if os.path.exists(path) else path, "scheme": scheme,
        "computes_in": str(model.dtype), "fuse": fuse, "seconds": seconds,
        "stored_bytes": report.stored_bytes, "stored_bytes_per_s": report.stored_bytes / seconds,
        "weight_bytes": report.weight_bytes, "bytes_by_kind": dict(report.bytes_by_kind),
        "rounded_bytes": report.allocated_bytes, "allocated_bytes": memory.allocated_bytes - before,
        "peak_bytes": memory.peak_bytes - before, "peak_above_weights_bytes": memory.peak_bytes - memory.allocated_bytes,
        "requested_bytes": _requested(gpu.torch), "largest_tensor_bytes": max(p.nbytes for p in model.parameters()),
        "host": host, "fused": [str(fused) for fused in report.fused], "skipped": len(report.skipped),
    }  # fmt: skip


@contextmanager
def host_memory() -> Iterator[dict[str, int]]:
    """Inside, host memory is watched; then the dict says by how much it rose at most: all of it, and without mapped files."""
    start, found, done = _host(), {"resident_bytes": 0, "own_bytes": 0, "mapped_bytes": 0}, threading.Event()

    def sample() -> None:
        now = _host()
        for name, value in now.items():
            found[name] = max(found[name], value - start[name])

    def watch() -> None:
        while not done.wait(1 / SAMPLES_PER_S):
            sample()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        sample()


def _host() -> dict[str, int]:
    """Resident memory of this process: all, its own, and that of mapped files; zeros where the system doesn't tell."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        own, mapped, shared = (int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile", "RssShmem"))
        return {"resident_bytes": own + mapped + shared, "own_bytes": own + shared, "mapped_bytes": mapped}
    return {"resident_bytes": 0, "own_bytes": 0, "mapped_bytes": 0}


def _requested(device: torch.device) -> int | None:
    """Bytes that tensors asked for, before the allocator rounds them, where the device counts them."""
    stats: Any = getattr(torch.get_device_module(device), "memory_stats", None)
    return None if stats is None or device.type == "cpu" else stats().get("requested_bytes.all.current")


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="what tk.load takes: a folder, a .gguf file, random/NAME")
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--scheme", help="as in tk.load (default: as stored)")
    parser.add_argument("--dtype", help="as in tk.load")
    parser.add_argument("--no-fuse", action="store_true", help="keep matrices apart")
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: print it)")
    parser.add_argument("--write-gguf", nargs=2, metavar=("NAME", "OUT"), help="write a GGUF of these shapes instead")
    parser.add_argument("--layers", type=int, help="with --write-gguf: only so many")
    options = parser.parse_args(arguments)
    if options.write_gguf:
        name, out = options.write_gguf
        print(f"{write_gguf(name, Path(out), options.layers):,} bytes of tensors in {out}")
        return 0
    if options.model is None:
        parser.error("which model?")
    record = bench(options.model, options.device, options.scheme, options.dtype, not options.no_fuse)
    text = json.dumps(record, indent=1) + "\n"
    if options.out:
        options.out.write_text(text)
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
