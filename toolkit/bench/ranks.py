"""Measure models over several GPUs: the rates on one and on all, the all-reduce, modelled times, and a rank that is late.

    torchrun --nproc-per-node 2 -m toolkit.bench.ranks --out FILE.json

With `--device virtual:h200` the steps of the models are modelled. With `--tune SECONDS`, the kernels of the divided models that
have no timings are tuned first, shared among the GPUs.

Rank 0 prints the results as they come and writes the record after each part.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit.bench.record import about, listed_names, out_file, run_command, write_record
from toolkit.core.distributed import Shard, gather, join, latest
from toolkit.core.errors import CancelledError
from toolkit.decode.loop import generate
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load
from toolkit.ops import exchange
from toolkit.ops.collectives import all_reduce
from toolkit.trace.events import Trace
from toolkit.tune import lookup, warm

MODELS = ("random/gemma4-31b", "random/qwen3.5-35b-a3b")
SCHEME = "q4_k_m"
FIRST = ("int4_matmul", "moe_step")  # to be tuned: they take most of a step
PROMPT = tuple(range(100, 164))
STRATEGIES = ("cuda-graph", "double-buffered", "whole-loop")
SUMS, REPLAYS = 100, 20  # all-reduces in a graph, and launches of it
LATE_SUMS = 200  # of which one waits for a rank that is late
SIZES = (2048, 5376, 16_384, 131_072, 262_144)  # bf16 values


class Bench:
    """The ranks of one benchmark. Each part returns what rank 0 writes to the record."""

    def __init__(self, device: Device, shard: Shard, tokens: int) -> None:
        self.device, self.shard, self.tokens = device, shard, tokens

    def all_reduces(self) -> dict[str, Any]:
        """Return the time of an all-reduce in a graph in µs, by size in bytes and algorithm, and a kernel of the same size."""
        links = exchange.links(self.device.torch)
        found: dict[str, Any] = {"why_not_one_shot": links.why_not, "us": {}}
        try:
            for size in SIZES:
                x = torch.ones(size, dtype=torch.bfloat16, device=self.device.torch)
                ways: dict[str, Callable[[], Tensor]] = {"kernel": lambda x=x: x * 1.0}  # type: ignore[misc]
                if links.inbox is not None:
                    ways["one-shot"] = lambda x=x: all_reduce(x, self.shard.ranks)  # type: ignore[misc]
                    ways["PyTorch one-shot"] = self._of_pytorch(x)
                ways["NCCL all-reduce"] = lambda x=x: _nccl_sum(x)  # type: ignore[misc]
                row = {}
                for name, work in ways.items():
                    row[name] = self._in_graph(work)
                found["us"][2 * size] = row
                self.say(f"all-reduce of {2 * size:,} B: {row}")
        finally:
            exchange._links = links
        return found

    def _of_pytorch(self, x: Tensor) -> Callable[[], Tensor]:
        """Return PyTorch's own one-shot all-reduce of a symmetric tensor, for comparison."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        group = dist.distributed_c10d._get_default_group().group_name
        held = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p((x.numel(),), (1,), x.dtype, x.device)
        symmetric.rendezvous(held, group)
        held.copy_(x)
        return lambda: torch.ops.symm_mem.one_shot_all_reduce(held, "sum", group)  # type: ignore[no-any-return]

    def _in_graph(self, work: Callable[[], Tensor]) -> float:
        """Return the median time of `work` in µs, repeated in a graph."""

        def several() -> None:
            for _ in range(SUMS):
                work()

        work()
        graph, times = self.device.capture(several), []
        for _ in range(REPLAYS):
            latest(0)  # a barrier
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / SUMS)
        graph.free()
        return round(statistics.median(times[2:]), 2)

    def tune(self, names: Sequence[str], seconds: float) -> list[str]:
        """Tune the kernels of decode steps of divided models that were never timed. Returns what was tuned, on this rank."""
        for name in names:
            model = load(name, self.device, scheme=SCHEME, progress=False, tensor_parallel=self.shard.ranks)
            generate(model, PROMPT, "position-on-device", max_new_tokens=4, eos=(), record=False)
            del model
            self.empty()
        missing = [one for one in lookup.choices() if one.step in ("model", "default") and "prefill" not in one.kernel]
        pairs = sorted(((one.kernel, one.shape) for one in missing), key=lambda pair: (pair[0] not in FIRST, pair))
        mine, stop = pairs[self.shard.rank :: self.shard.ranks], threading.Event()
        self.say(f"tuning {len(pairs)} problems: {pairs}")
        timer = threading.Timer(seconds, stop.set)
        timer.start()
        with suppress(CancelledError):
            for pair in mine:
                began = time.perf_counter()
                found = warm([pair], self.device.torch, progress=False, cancel=stop)
                times = [row.ns / 1e3 for row in found.rows if row.verdict == "ok" and row.ns]
                took = time.perf_counter() - began
                print(f"rank {self.shard.rank}: {pair} {min(times, default=None)} us, in {took:.0f} s", flush=True)
        timer.cancel()
        latest(0)  # all timings are stored
        lookup.forget()
        torch._C._cuda_clearCublasWorkspaces()  # they would count as memory of the models
        return [" ".join(pair) for pair in mine]

    def empty(self) -> None:
        """Free the memory of models that are gone."""
        gc.collect()
        torch.get_device_module(self.device.torch).empty_cache()

    def model(self, name: str, ranks: int) -> dict[str, Any]:
        """Return the rates of a model on one GPU or all, its bytes, and a recorded step."""
        began = time.perf_counter()
        model = load(name, self.device, scheme=SCHEME, progress=False, tensor_parallel=ranks)
        loaded_s = time.perf_counter() - began
        run: dict[str, Any] = {"max_new_tokens": self.tokens, "eos": ()}
        generate(model, PROMPT, "cuda-graph", record=False, **run | {"max_new_tokens": 8})
        rates: dict[str, Any] = {}
        for strategy in STRATEGIES if self.device.clock == "measured" else STRATEGIES[:1]:
            try:
                times = [generate(model, PROMPT, strategy, record=False, **run).tok_per_s for _ in range(2)]
                rates[strategy] = round(max(filter(None, times)), 1)
            except Exception as error:  # the record says so, and the other strategies still run
                rates[strategy] = f"{type(error).__name__}: {error}"
        found: dict[str, Any] = {
            "model": name, "scheme": SCHEME, "ranks": ranks, "tok_per_s": rates, "loaded_s": round(loaded_s, 1),
            "weight_bytes": model.report.weight_bytes, "allocated_bytes": self.device.memory().allocated_bytes,
        }  # fmt: skip
        self.say(f"{name} on {ranks}: {rates} tok/s, loaded in {loaded_s:.1f} s")
        found |= self._recorded(model)
        return found

    def _recorded(self, model: Any) -> dict[str, Any]:
        """Return the collectives of a recorded step and their times."""
        trace = generate(model, PROMPT, "cuda-graph", max_new_tokens=12, eos=(), lines=False).trace
        mine = trace.is_kind("collective") & (trace["step"] == 8)
        kernels = trace.is_kind("kernel", "collective") & (trace["step"] == 8)
        starts = {step: trace["start_ns"][trace.is_kind("kernel", "collective") & (trace["step"] == step)].min(initial=1 << 62)
                  for step in (7, 8, 9)}  # fmt: skip
        found = {
            "step_us": (int(starts[9]) - int(starts[7])) / 2e3, "kernels": int(kernels.sum()), "collectives": int(mine.sum()),
            "collectives_us": round(float(trace["dur_ns"][mine].sum()) / 1e3, 1),
            "collective_bytes": sorted(set(trace["bytes"][mine].tolist())),
        }  # fmt: skip
        self.say(f"  recorded: {found}")
        return found

    def late(self, by_us: float, out: Path) -> dict[str, Any]:
        """Return what the traces of all ranks, which are saved next to `out`, say if the last rank is late for one sum."""
        trace = late_sums(self.device, self.shard, by_us)
        files = [out.with_name(f"{out.stem}-late-rank{rank}.npz") for rank in range(self.shard.ranks)]
        trace.save(files[self.shard.rank])
        all_slept = gather(torch.tensor(slept_us(trace), dtype=torch.float64)).tolist()  # a barrier, too: all traces are saved
        found = {"asked_us": by_us, "slept_us": all_slept} | (_joined(files) if self.shard.rank == 0 else {})
        self.say(f"{found}")
        return found

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.shard.rank == 0:
            print(text, flush=True)


def _nccl_sum(x: Tensor) -> Tensor:
    import torch.distributed as dist

    dist.all_reduce(x)
    return x


def late_sums(device: Device, shard: Shard, by_us: float) -> Trace:
    """Return a recording of `LATE_SUMS` sums. The last rank is late by `by_us` for the one in the middle.

    The sums are captured in a graph, in which no host makes a rank late. Between them is a kernel of PyTorch: without it,
    many sums would begin early and wait together.
    """
    cycles = int(by_us * 1e-6 * _sleep_hz())
    x = torch.ones(5376, dtype=torch.bfloat16, device=device.torch)

    def sums() -> None:
        for i in range(LATE_SUMS):
            if i == LATE_SUMS // 2 and shard.rank == shard.ranks - 1:
                torch.cuda._sleep(cycles)
            all_reduce(x, shard.ranks)
            torch.mul(x, 1.0)

    with torch.no_grad():
        sums()
        with device.record(lines=False) as trace:
            graph = device.capture(sums)
            latest(0)  # a barrier
            graph.replay()
            device.sync()
    graph.free()
    return trace


def slept_us(trace: Trace) -> float:
    """Return how long the GPU of a trace of `late_sums` slept, in µs."""
    return sum(float(ns) for ns, name in zip(trace["dur_ns"], trace.text("name"), strict=True) if name and "spin" in name) / 1e3


def _sleep_hz() -> float:
    """Return the cycles of `torch.cuda._sleep` per second."""
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return 1e7 / (min(times) * 1e-3)


def _joined(traces: list[Path]) -> dict[str, Any]:
    from toolkit.trace.opening import open_trace

    trace = open_trace(traces)
    table = trace.collectives().iloc[1:]  # for the first one, ranks wait for the hosts of others
    worst = table.loc[table["rank0_wait_us"].idxmax()]
    others = table.drop(worst.name)
    return {
        "last_rank": int(worst["last_rank"]), "seq": int(worst["seq"]), "wait_us": round(float(worst["rank0_wait_us"]), 1),
        "other_waits_us": round(float(others["rank0_wait_us"].median()), 2), "clocks": trace.meta.get("clocks"),
        "notes": trace.meta.get("notes"),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="torchrun -m toolkit.bench.ranks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=out_file, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--models", type=listed_names, default=",".join(MODELS))
    parser.add_argument("--tune", type=float, metavar="SECONDS", default=0.0)
    parser.add_argument("--late-us", type=float, default=200.0)
    options = parser.parse_args()
    if "WORLD_SIZE" not in os.environ:
        parser.error("there are no ranks: start it with torchrun --nproc-per-node 2 -m toolkit.bench.ranks")
    device, shard = open_device(options.device), join(int(os.environ["WORLD_SIZE"]))
    measured = device.clock == "measured"
    if measured:
        torch.cuda.set_device(device.torch)
    bench = Bench(device, shard, options.tokens)
    record = {**about(device.name), "ranks": shard.ranks, "models": []}

    def save() -> None:
        if shard.rank == 0:
            write_record(record, options.out)

    if measured:
        record["all_reduce"] = bench.all_reduces()
        save()
    if options.tune:
        bench.tune(options.models, options.tune)
    for name in options.models:
        for ranks in (shard.ranks, 1):
            record["models"].append(bench.model(name, ranks))
            bench.empty()
            save()
    if measured:
        record["late"] = bench.late(options.late_us, options.out)
    save()
    latest(0)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    run_command(main)
