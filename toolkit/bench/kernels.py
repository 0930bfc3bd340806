"""Compare kernel times with their hardware limit: the read bandwidth or the matmul rate measured in the same run.

    python -m toolkit.bench.kernels --out measured.json [--only int4]
    python -m toolkit.bench.kernels --table measured.json

Every problem is tuned first: each config is checked against the reference and timed as CUDA graph replays with a cold L2.
Bytes are those of the matrices as GGUF stores them. Kernels of other libraries (PyTorch's int4 matmul, gemlite,
flash-linear-attention) are timed on problems of the same size if they are installed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch

from toolkit import tune
from toolkit.bench.other_kernels import Runs, fla_step, gemlite, tinygemm
from toolkit.bench.record import about, out_file, read_record, run_command, write_record
from toolkit.core.units import bandwidth_text
from toolkit.kernels.base import Kernel, Shape
from toolkit.kernels.registry import find_kernel, find_shape
from toolkit.tune.results import Row, Tuning
from toolkit.tune.timing import captured
from toolkit.weights.schemes import find_scheme

REPLAYS = 9


@dataclass(frozen=True)
class Line:
    """A problem, by the names of its kernel and shape.

    `at_least` is the target in percent of the read bandwidth (of PyTorch's bf16 matmul rate for int4_prefill), if there is one.
    """

    kernel: str
    shape: str
    at_least: float | None = None


LINES = (
    Line("int4_matmul", "gemma4-31b gate+up", 88), Line("int4_matmul", "gemma4-31b down", 78),
    Line("int4_matmul", "gemma4-31b qkv sliding", 76), Line("int4_matmul", "gemma4-31b o sliding", 70),
    Line("int4_matmul", "gemma4-31b gate+up, x in 8 bits", 88), Line("int4_matmul", "gemma4-31b down, x in 8 bits", 78),
    Line("int4_matmul", "gemma4-31b qkv sliding, x in 8 bits", 76),
    Line("int4_matmul", "gemma4-31b o sliding, x in 8 bits", 70),
    Line("int4_matmul", "gemma4-31b lm_head", 88), Line("attention_decode", "gemma4-31b full 32k", 75),
    Line("moe_step", "qwen3.5-35b-a3b experts, q4_k", 55), Line("delta_step", "qwen3.5-35b-a3b delta net, gguf"),
    Line("int4_prefill", "gemma4-31b gate+up, 512 tokens", 55), Line("int4_prefill", "gemma4-31b gate+up, 2048 tokens", 55),
    Line("int4_prefill", "gemma4-31b down, 512 tokens", 55), Line("int4_prefill", "gemma4-31b down, 2048 tokens", 55),
)  # fmt: skip


class _Row(TypedDict):
    kernel: str
    shape: str
    at_least_percent: float | None
    us: float | None
    percent: NotRequired[float]
    others_us: NotRequired[dict[str, float | str]]
    read_bytes_per_s: NotRequired[float]


class _Record(TypedDict):
    """What --table reads of a record."""

    gpu: str | None
    read_bytes_per_s: float
    rows: list[_Row]


def graph_ns(runs: Runs) -> float:
    """Return the median time of one call in ns: replays of a CUDA graph in which `runs` take turns, after a warm-up round."""
    rounds = max(1, 32 // len(runs))
    for run in runs:
        run()
    graph = captured(lambda: _all(runs * rounds))
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e6 / (rounds * len(runs)))
    return statistics.median(times)


def _all(runs: Runs) -> None:
    for run in runs:
        run()


def matmul_flops_per_s(m: int, n: int, k: int) -> float:
    """Return the FLOP/s of PyTorch's bf16 product [m, k] x [k, n]."""
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    return 2.0 * m * n * k / graph_ns([lambda: a @ b.t()]) * 1e9


def stored_bytes(kernel: Kernel, shape: Any) -> int:
    """Return the bytes that a problem reads: its weight matrices, or all its traffic if it has none."""
    if kernel.name == "int4_matmul":
        return int(shape.n * shape.k * find_scheme(shape.scheme).bits_per_weight / 8)
    if kernel.name == "moe_step":
        bits = 2 * find_scheme(shape.scheme).bits_per_weight + find_scheme(shape.down).bits_per_weight
        return int(shape.used * shape.hidden * shape.width * bits / 8)
    return kernel.cost(shape).bytes


def best_of(kernel: Kernel, shape: Shape) -> Row | None:
    """Time all configs on this GPU now and return the fastest correct one, or None if none ran."""
    found: Tuning = tune.warm([(kernel, shape)], "cuda", progress=False, again=True)
    best = found.best(found.gpus[0])
    return best if best is not None and best.clock == "measured" else None


def measure(line: Line, read_bytes_per_s: float) -> dict[str, Any]:
    """Return one row of the table (JSON-able)."""
    kernel = find_kernel(line.kernel)
    shape: Any = find_shape(kernel, line.shape)
    best, cost = best_of(kernel, shape), kernel.cost(shape)
    row: dict[str, Any] = {"kernel": line.kernel, "shape": line.shape, "key": shape.key, "at_least_percent": line.at_least}
    if best is None or best.ns is None:
        return row | {"us": None}
    row |= {
        "us": best.ns / 1e3, "spread_us": (best.spread_ns or 0.0) / 1e3, "config": repr(best.config), "cosine": best.cosine,
        "max_error": best.max_error,
    }  # fmt: skip
    if line.kernel == "int4_prefill":
        rate = matmul_flops_per_s(shape.m, shape.n, shape.k)
        return row | {"of": "matmul", "percent": 100 * cost.flops / best.ns * 1e9 / rate, "matmul_flops_per_s": rate}
    size = stored_bytes(kernel, shape)
    row |= {"of": "bandwidth", "percent": 100 * size / best.ns * 1e9 / read_bytes_per_s, "bytes": size}
    return row | {"others_us": others(line.kernel, shape)}


def others(kernel: str, shape: Any) -> dict[str, float | str]:
    """Return times in µs of other libraries' kernels on a problem of this size, or the reason why there is no time."""
    candidates: dict[str, Callable[[], Runs]] = {}
    if kernel == "int4_matmul" and shape.scheme == "q4_k" and not shape.quantised:
        candidates = {"tinygemm": lambda: tinygemm(shape.n, shape.k), "gemlite": lambda: gemlite(shape.n, shape.k)}
    if kernel == "delta_step":
        heads = (shape.key_heads, shape.value_heads, shape.key_dim)
        candidates = {"flash-linear-attention, its step alone": lambda: fla_step(*heads)}
    found: dict[str, float | str] = {}
    for name, make in candidates.items():
        try:
            found[name] = graph_ns(make()) / 1e3
        except ImportError:
            found[name] = "not installed"
        except Exception as error:  # third-party code may raise anything; the record keeps the message
            found[name] = f"{type(error).__name__}: {error}"[:200]
        torch.cuda.empty_cache()
    return found


def bench(only: str = "", out: Path | None = None) -> dict[str, Any]:
    """Return the record of the problems whose name contains `only`, and write it to the file `out` after each of them.

    Raises DeviceError without a GPU.
    """
    record = about("cuda")
    reading = find_kernel("read")
    shape = find_shape(reading, None)
    best = best_of(reading, shape)
    assert best is not None
    assert best.ns is not None
    rate = reading.cost(shape).bytes / best.ns * 1e9
    record |= {"read_bytes_per_s": rate, "rows": []}
    for line in LINES:
        if only in f"{line.kernel} {line.shape}":
            record["rows"].append(measure(line, rate))
            if out is not None:
                write_record(record, out)
    return record


def table(record: dict[str, Any]) -> str:
    """Return the record as a Markdown table."""
    lines = [
        f"{record['gpu']}, read bandwidth {bandwidth_text(record['read_bytes_per_s'])} measured in the same run", "",
        "| kernel | problem | µs | % of the limit | at least | others, µs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in record["rows"]:
        compared = [f"{n} {v:.1f}" if isinstance(v, float) else f"{n}: {v}" for n, v in row.get("others_us", {}).items()]
        asked = "" if row["at_least_percent"] is None else f"{row['at_least_percent']:.0f}"
        of = f"of {bandwidth_text(row['read_bytes_per_s'])}" if "read_bytes_per_s" in row else row.get("of")  # of another run
        time = ("no config ran", "") if row["us"] is None else (f"{row['us']:.1f}", f"{row['percent']:.1f} ({of})")
        lines.append(f"| `{row['kernel']}` | {row['shape']} | {time[0]} | {time[1]} | {asked} | {'; '.join(compared)} |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.kernels", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="run only the problems whose name contains this")
    parser.add_argument("--out", type=out_file, help="also write the record to this JSON file")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print a record as Markdown; no GPU needed")
    options = parser.parse_args(arguments)
    known = read_record(options.table, _Record) if options.table else None
    record = known or bench(options.only, options.out)
    if options.out:
        write_record(record, options.out)
    print(table(record))
    return 0


if __name__ == "__main__":
    run_command(main)
