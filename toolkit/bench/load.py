"""Measure how long a model takes to load, and how much host and device memory loading takes.

    python -m toolkit.bench.load random/gemma4-31b --scheme q4_k_m --out loaded.json
    python -m toolkit.bench.load --write-gguf gemma4-31b out.gguf      # then: python -m toolkit.bench.load out.gguf

Host memory is sampled 50 times per second: the resident memory, and the part of it that is memory-mapped files, which the
operating system can reclaim. Device memory is counted by the allocator. To time a load from the page cache, read the file once
before (cat out.gguf > /dev/null).
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from toolkit.bench.record import about, out_file, process_bytes, run_command, write_record
from toolkit.bench.write_gguf import write_gguf
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load

SAMPLES_PER_S = 50


def bench(path: str, device: str, scheme: str | None, dtype: str | None, fuse: bool) -> dict[str, Any]:
    """Load once and return the record (JSON-able). Sizes are in bytes, times in seconds."""
    gpu = open_device(device)
    torch.empty(1, device=gpu.torch)  # creates the CUDA context before the clock starts
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
    """Watch host memory in a `with` block.

    After the block, the dict holds the largest increase in bytes of the resident memory, of the process's own memory, and of
    mapped files.
    """
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
    own, mapped, shared = process_bytes("RssAnon", "RssFile", "RssShmem")
    return {"resident_bytes": own + mapped + shared, "own_bytes": own + shared, "mapped_bytes": mapped}


def _requested(device: torch.device) -> int | None:
    """Return the bytes that tensors requested, before the allocator's rounding, or None if the device doesn't count them."""
    stats: Any = getattr(torch.get_device_module(device), "memory_stats", None)
    return None if stats is None or device.type == "cpu" else stats().get("requested_bytes.all.current")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="a folder, a .gguf file or random/NAME, as in tk.load")
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--scheme", help="as in tk.load (default: as stored)")
    parser.add_argument("--dtype", help="as in tk.load")
    parser.add_argument("--no-fuse", action="store_true", help="don't fuse matrices")
    parser.add_argument("--out", type=out_file, help="write the record to this JSON file (default: print it)")
    parser.add_argument("--write-gguf", nargs=2, metavar=("NAME", "OUT"), help="write a GGUF file of these shapes instead")
    parser.add_argument("--layers", type=int, help="with --write-gguf: number of layers (default: all)")
    options = parser.parse_args(arguments)
    if options.write_gguf:
        name, out = options.write_gguf
        print(f"{write_gguf(name, Path(out), options.layers):,} bytes of tensors in {out}")
        return 0
    if options.model is None:
        parser.error("the model is missing: give a folder, a .gguf file or random/NAME")
    record = bench(options.model, options.device, options.scheme, options.dtype, not options.no_fuse)
    write_record(record, options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
