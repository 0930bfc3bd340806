"""Measure the constants of the virtual GPU's time model: launch costs, copies, shortest kernels and rates.

    python -m toolkit.bench.primitives --out FILE.json

Takes about two minutes on a CUDA GPU. Host times are those of eager calls that don't wait for the GPU: the median over batches
of 100 calls, with a synchronize before each batch. Device times come from CUPTI. The catalogue (toolkit/gpu/catalogue.py)
quotes the results.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.bench.record import about, out_file, run_command, write_record

BATCH, REPEATS = 100, 15
SIZES = [8, 4 << 10, 64 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]


def host_ns(call: Callable[[], Any], batch: int = BATCH) -> float:
    """Return host nanoseconds per call. The device is idle at the start of each batch; no call of the batch waits for it."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        times.append((time.perf_counter_ns() - start) / batch)
    torch.cuda.synchronize()
    return statistics.median(times)


def device_events(call: Callable[[], Any], n: int = 20) -> list[dict[str, Any]]:
    """Return CUPTI's events of `n` calls, queued behind a busy kernel so that the gaps between them are the device's own."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(4_000_000)
        for _ in range(n):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return sorted((e for e in events if e.get("cat") in kinds and "spin" not in e["name"]), key=lambda e: e["ts"])


def device_ns(call: Callable[[], Any], n: int = 20) -> dict[str, float]:
    """Return device nanoseconds per call (`busy_ns`), events per call, and the median gap between events."""
    events = device_events(call, n)
    gaps = [b["ts"] - a["ts"] - a["dur"] for a, b in pairwise(events)]
    per_call = len(events) // n
    busy = [sum(e["dur"] for e in events[i : i + per_call]) for i in range(0, len(events), max(per_call, 1))]
    return {
        "busy_ns": statistics.median(busy) * 1e3 if busy else 0.0,
        "events": len(events) / n,
        "gap_ns": statistics.median(gaps) * 1e3 if gaps else 0.0,
    }


def host_costs() -> dict[str, float]:
    """Return host nanoseconds of eager calls that launch work and don't wait."""
    d = "cuda"
    x, y, v = torch.ones(64, 64, device=d), torch.ones(64, 64, device=d), torch.ones(64, device=d)
    b, w = torch.ones(1, 1, 64, device=d, dtype=torch.bfloat16), torch.ones(64, 64, device=d, dtype=torch.bfloat16)
    i, p = torch.arange(4, device=d), torch.tensor([3], device=d)
    q, k = torch.ones(1, 4, 1, 64, device=d, dtype=torch.bfloat16), torch.zeros(1, 4, 32, 64, device=d, dtype=torch.bfloat16)
    mask, m = torch.ones(1, 1, 1, 32, dtype=torch.bool, device=d), x > 0
    linear, deep = nn.Linear(64, 64, device=d), nn.Sequential(nn.Sequential(nn.Identity()))
    calls: dict[str, Callable[[], Any]] = {
        "python_call": lambda: None, "view": lambda: x.view(-1), "select": lambda: x[3], "slice": lambda: x[2:5],
        "transpose": lambda: x.t(), "reshape_view": lambda: x.reshape(4, -1), "unsqueeze_expand": lambda: v[None].expand(4, 64),
        "empty": lambda: torch.empty(64, device=d), "add": lambda: x + y, "add_scalar": lambda: x + 1,
        "add_": lambda: x.add_(0), "mul_broadcast": lambda: x * v, "compare": lambda: x > y,
        "cast": lambda: x.to(torch.bfloat16), "pow": lambda: x.pow(2), "mean": lambda: x.mean(-1, keepdim=True),
        "rsqrt": lambda: x.rsqrt(), "sum": lambda: x.sum(), "argmax": lambda: x.argmax(-1), "softmax": lambda: x.softmax(-1),
        "silu": lambda: F.silu(x), "where": lambda: torch.where(m, x, y), "masked_fill": lambda: x.masked_fill(m, 0.0),
        "cat": lambda: torch.cat([x, y]), "stack": lambda: torch.stack([x, y]), "clone": lambda: x.clone(),
        "copy_d2d": lambda: x.copy_(y), "contiguous_t": lambda: x.t().contiguous(), "zeros": lambda: torch.zeros(64, device=d),
        "arange": lambda: torch.arange(64, device=d), "full": lambda: torch.full((64,), 2.0, device=d), "matmul": lambda: x @ y,
        "linear_bf16": lambda: F.linear(b, w), "linear_bias": lambda: F.linear(x, y, v), "module_linear": lambda: linear(x),
        "module_nest": lambda: deep(x), "bmm": lambda: torch.bmm(x[None], y[None]), "embedding": lambda: F.embedding(i, x),
        "index": lambda: x[i], "index_copy": lambda: x.index_copy_(0, p, v[None]), "index_put": lambda: x.index_put_((i,), v),
        "index_select": lambda: x.index_select(0, i), "gather": lambda: x.gather(0, i[None]), "cumsum": lambda: x.cumsum(-1),
        "sdpa_decode": lambda: F.scaled_dot_product_attention(q, k, k),
        "sdpa_mask": lambda: F.scaled_dot_product_attention(q, k, k, attn_mask=mask),
        "layer_norm": lambda: F.layer_norm(x, (64,)), "rms_norm": lambda: F.rms_norm(x, (64,)), "sort": lambda: x.sort(-1),
        "topk": lambda: x.topk(5), "rand": lambda: torch.rand(64, device=d),
    }  # fmt: skip
    with torch.no_grad():
        return {name: host_ns(call) for name, call in calls.items()}


def waits() -> dict[str, float]:
    """Return host nanoseconds of calls that copy or wait, on an otherwise idle device."""
    d = "cuda"
    x, h, hp = torch.arange(64, device=d), torch.arange(64), torch.arange(64).pin_memory()
    one, h1, hp1 = x[:1], h[:1], hp[:1]
    event, stream = torch.cuda.Event(), torch.cuda.current_stream()
    done = torch.cuda.Event()
    done.record()
    blocking = torch.cuda.Event(blocking=True)
    bits = x > 3

    def launch_and_wait() -> None:
        x.add_(0)
        torch.cuda.synchronize()

    def event_wait() -> None:
        x.add_(0)
        blocking.record()
        blocking.synchronize()

    calls: dict[str, Callable[[], Any]] = {
        "item": lambda: one.item(),
        "item_after_kernel": lambda: one.add_(0).item(),
        "bool": lambda: bool(bits[0]),
        "tolist_8B": lambda: one.tolist(),
        "cpu_8B": lambda: one.cpu(),
        "h2d_pageable_8B": lambda: one.copy_(h1),
        "tensor_device": lambda: torch.tensor([5], device=d),
        "h2d_pinned_8B": lambda: one.copy_(hp1),
        "h2d_pinned_async_8B": lambda: one.copy_(hp1, non_blocking=True),
        "d2h_pinned_async_8B": lambda: hp1.copy_(one, non_blocking=True),
        "d2h_pageable_8B": lambda: h1.copy_(one),
        "h2d_pageable_async_8B": lambda: one.copy_(h1, non_blocking=True),
        "nonzero": lambda: bits.nonzero(),
        "mask_select": lambda: x[bits],
        "pin_memory": lambda: h1.pin_memory(),
        "event_record": lambda: event.record(),
        "event_wait_stream": lambda: stream.wait_event(event),
        "event_query": lambda: done.query(),
        "event_synchronize_done": lambda: done.synchronize(),
        "synchronize_idle": torch.cuda.synchronize,
        "stream_synchronize_idle": lambda: stream.synchronize(),
        "launch_and_synchronize": launch_and_wait,
        "launch_and_event_blocking": event_wait,
    }
    return {name: host_ns(call) for name, call in calls.items()}


def tiny_kernels() -> dict[str, dict[str, float]]:
    """Return device times and gaps of the smallest kernels and copies, which take the shortest time possible."""
    d = "cuda"
    x, y, v = torch.ones(64, 64, device=d), torch.ones(64, 64, device=d), torch.ones(64, device=d)
    long, p = torch.arange(64, device=d), torch.tensor([3], device=d)
    b, w = torch.ones(1, 64, device=d, dtype=torch.bfloat16), torch.ones(64, 64, device=d, dtype=torch.bfloat16)
    q, k = torch.ones(1, 4, 1, 64, device=d, dtype=torch.bfloat16), torch.zeros(1, 4, 256, 64, device=d, dtype=torch.bfloat16)
    hp, h = torch.arange(64).pin_memory(), torch.arange(64)
    calls: dict[str, Callable[[], Any]] = {
        "add": lambda: x + y, "add_1": lambda: v[:1] + 1, "mean": lambda: x.mean(-1), "argmax_32000": lambda: big.argmax(-1),
        "softmax": lambda: x.softmax(-1), "matmul": lambda: x @ y, "linear_bf16": lambda: F.linear(b, w),
        "cat": lambda: torch.cat([x, y]), "embedding": lambda: F.embedding(long, x),
        "index_copy": lambda: x.index_copy_(0, p, v[None]), "sdpa": lambda: F.scaled_dot_product_attention(q, k, k),
        "zero_": lambda: x.zero_(), "d2d_8B": lambda: long[:1].copy_(p), "d2d_4KB": lambda: x[:16].copy_(y[:16]),
        "h2d_pinned_8B": lambda: p.copy_(hp[:1], non_blocking=True),
        "d2h_pinned_8B": lambda: hp[:1].copy_(p, non_blocking=True), "h2d_pageable_8B": lambda: p.copy_(h[:1]),
        "d2h_pageable_8B": lambda: h[:1].copy_(p), "item": lambda: p.item(), "sort": lambda: x.sort(-1),
        "topk_50_of_32000": lambda: big.topk(50), "cumsum": lambda: x.cumsum(-1), "layer_norm": lambda: F.layer_norm(x, (64,)),
    }  # fmt: skip
    big = torch.rand(1, 32000, device=d)
    return {name: device_ns(call) for name, call in calls.items()}


def curves() -> dict[str, dict[str, list[float]]]:
    """Return nanoseconds by size in bytes, of copies (device time, and host time with the wait) and of streaming kernels."""
    out: dict[str, dict[str, list[float]]] = {}
    for n in SIZES:
        x, y = torch.zeros(n // 4, device="cuda"), torch.zeros(n // 4, device="cuda")
        h, hp = torch.zeros(n // 4), torch.zeros(n // 4).pin_memory()
        pairs = {"h2d_pinned": (x, hp), "d2h_pinned": (hp, x), "h2d_pageable": (x, h), "d2h_pageable": (h, x), "d2d": (x, y)}

        def copy(a: torch.Tensor, b: torch.Tensor) -> Callable[[], Any]:
            return lambda: a.copy_(b)

        for name, (to, source) in pairs.items():
            busy = device_ns(copy(to, source), 6)["busy_ns"]
            out.setdefault(name, {})[str(n)] = [busy, host_ns(copy(to, source), 5)]
        out.setdefault("scale_kernel", {})[str(n)] = [device_ns(lambda x=x, y=y: torch.mul(x, 2.0, out=y), 6)["busy_ns"]]  # type: ignore[misc]
        out.setdefault("sum_kernel", {})[str(n)] = [device_ns(lambda x=x: x.sum(), 6)["busy_ns"]]  # type: ignore[misc]
        out.setdefault("zero_", {})[str(n)] = [device_ns(lambda x=x: x.zero_(), 6)["busy_ns"]]  # type: ignore[misc]
    return out


def products() -> dict[str, dict[str, float]]:
    """Return device nanoseconds of matrix products, by dtype and rows x out x in."""
    out = {}
    for dtype in (torch.bfloat16, torch.float32):
        for rows, n, k in (
            (1, 128, 64),
            (1, 512, 512),
            (1, 4096, 4096),
            (1, 12288, 4096),
            (1, 4096, 12288),
            (1, 151936, 1024),
            (8, 4096, 4096),
            (32, 4096, 4096),
            (512, 4096, 4096),
            (4096, 4096, 4096),
        ):
            x, w = torch.randn(rows, k, device="cuda", dtype=dtype), torch.randn(n, k, device="cuda", dtype=dtype)
            out[f"{str(dtype)[6:]} {rows}x{n}x{k}"] = device_ns(lambda x=x, w=w: F.linear(x, w), 10)  # type: ignore[misc]
    return out


def bench() -> dict[str, Any]:
    """Return the record of everything that is measured on the first CUDA device (JSON-able)."""
    properties = torch.cuda.get_device_properties(0)
    fields = (
        "name", "total_memory", "multi_processor_count", "L2_cache_size", "shared_memory_per_block",
        "shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "regs_per_multiprocessor",
        "max_threads_per_multi_processor", "major", "minor",
    )  # fmt: skip
    return {
        **about("cuda:0"), "properties": {name: getattr(properties, name, None) for name in fields}, "host_ns": host_costs(),
        "wait_ns": waits(), "tiny_ns": tiny_kernels(), "curves_ns": curves(), "products_ns": products(),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.primitives", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", required=True, type=out_file, help="write the record to this JSON file")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("no CUDA GPU was found: run this on a machine with one")
    write_record(bench(), options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
