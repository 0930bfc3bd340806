"""Measure the overhead of `tk.memory`: a decode loop with and without it, and the start and end of a block.

    python -m toolkit.bench.memory_cost demo/qwen3 random/qwen3-8b --scheme q4_k_m --out cost.json

Runs with and without it alternate, and the fastest of each counts, since other processes disturb single runs. The overhead
grows with the depth of Python's stack, because every allocation records the whole stack.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from toolkit.bench.record import about, out_file, run_command, write_record
from toolkit.decode.loop import generate
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load
from toolkit.vram.measure import Scope

REPEATS = 7


def bench(name: str, gpu: Device, scheme: str | None, steps: int) -> dict[str, Any]:
    """Return the record of one model (JSON-able). Times are in seconds."""
    model = load(name, device=gpu, scheme=None if name.startswith("demo/") else scheme)

    def decode() -> float:
        began = time.perf_counter()
        generate(model, list(range(100, 164)), max_new_tokens=steps, eos=(), record=False)
        gpu.sync()
        return time.perf_counter() - began

    def watched(lines: bool) -> tuple[float, float, int]:
        scope, began = Scope(gpu, lines=lines), time.perf_counter()
        scope.__enter__()
        spent = time.perf_counter() - began
        loop = decode()
        began = time.perf_counter()
        use = scope.end({"model": model})
        return loop, spent + time.perf_counter() - began, len(use.ledger.rows)

    def empty() -> float:
        scope, began = Scope(gpu), time.perf_counter()
        scope.__enter__()
        scope.end({"model": model})
        return time.perf_counter() - began

    decode(), watched(True)
    runs = [(decode(), watched(True), watched(False)) for _ in range(REPEATS)]
    least = min(plain for plain, _, _ in runs)
    found: dict[str, Any] = {"model": name, "steps": steps, "events": runs[0][1][2], "plain_s": least}
    for at, key in ((1, "with_lines"), (2, "without_lines")):
        loop = min(run[at][0] for run in runs)  # type: ignore[index]
        spent = min(run[at][1] for run in runs)  # type: ignore[index]
        found[key] = {"loop_s": loop, "overhead": loop / least - 1, "begin_and_end_s": spent}
    found["empty_block_s"] = min(empty() for _ in range(REPEATS))
    return found | {"all": [[plain, with_lines[0], without[0]] for plain, with_lines, without in runs]}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.memory_cost", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=["demo/qwen3"], help="names or paths, as in tk.load (default: demo/qwen3)")
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--scheme", help="as in tk.load, except for demo models (default: as stored)")
    parser.add_argument("--steps", type=int, default=100, help="tokens to decode (default: %(default)s)")
    parser.add_argument("--out", type=out_file, help="write the record to this JSON file (default: print it)")
    options = parser.parse_args(arguments)
    gpu = open_device(options.device)
    found = [bench(name, gpu, options.scheme, options.steps) for name in options.models]
    write_record({**about(options.device), "models": found}, options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
