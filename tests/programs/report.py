"""Run the programs on a device, and compare the copies and the memory of two devices.

    python -m tests.programs.report --device cuda --out h200.json
    python -m tests.programs.report --device virtual:h200 --out virtual_h200.json
    python -m tests.programs.report --compare h200.json virtual_h200.json

Each program runs four times in a process of its own, with the same random seed. The first run loads libraries and kernels.
The second one starts with an empty cache of the allocator, and gives the peak of the allocated bytes and the bytes that are
still allocated when the program has returned, both above those before it. The last two are profiled and give the copies: by
CUPTI through `torch.profiler` on a CUDA device, by the recorder on a virtual GPU. They are marked as unstable if they differ.
Python's garbage collector is off during a run, since it would run at moments that depend on the number of Python objects. A
program that raises, crashes or takes too long is recorded with its error.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import gc
import importlib.metadata
import io
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from tests.programs import CLASSES, Program, programs

DIRECTIONS = {"HtoD": "h2d", "DtoH": "d2h", "DtoD": "d2d"}
FIGURES = ("copies", "peak", "final", *DIRECTIONS.values())
TIMEOUT_S = 60.0
MODELS = ("bert", "gpt2", "llama", "mixtral", "qwen3_moe", "t5", "vit")
# Loaded once, by the server from which each program's process is forked. None of them may initialize CUDA.
PRELOADED = [
    "torch._dynamo", "torch.distributions", "torch.profiler", "torch.nn.attention.flex_attention",
    "transformers.generation.utils", *(f"transformers.models.{m}.modeling_{m}" for m in MODELS),
    *(f"tests.programs.{name}" for name in CLASSES),
]  # fmt: skip


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _run(program: Program, device: torch.device) -> None:
    torch.manual_seed(0)
    program(device)
    torch.get_device_module(device).synchronize()


def _copies(sizes: Iterable[tuple[str, int]]) -> dict[str, list[list[int]]]:
    counted = collections.Counter(sizes)
    return {
        direction: sorted([size, n] for (d, size), n in counted.items() if d == direction) for direction in DIRECTIONS.values()
    }


def _memory(program: Program, device: torch.device) -> dict[str, Any]:
    backend = torch.get_device_module(device)
    gc.collect()
    backend.empty_cache()
    base = backend.memory_allocated()
    backend.reset_peak_memory_stats()
    with _uncollected():
        _run(program, device)
        return {"peak_bytes": backend.max_memory_allocated() - base, "final_bytes": backend.memory_allocated() - base}


def _profiled(program: Program, device: torch.device, details: bool) -> dict[str, Any]:
    """Return the copies, kernels and waits of a program that CUPTI reports."""
    from torch.profiler import ProfilerActivity, profile

    with _uncollected(), profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        _run(program, device)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(os.path.join(folder, "trace.json"))
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    copies = [(DIRECTIONS.get(e["name"].split()[1], e["name"]), e) for e in events if e.get("cat") == "gpu_memcpy"]
    found: dict[str, Any] = {
        "copies": _copies((direction, e["args"]["bytes"]) for direction, e in copies),
        "kernels": sum(e.get("cat") == "kernel" for e in events),
        "waits": sum(e.get("cat") == "cuda_runtime" and e["name"] == "cudaStreamSynchronize" for e in events),
    }
    if not found["kernels"]:
        raise RuntimeError("the profiler saw no kernel: CUPTI doesn't work in this process")
    return {**found, "copies_by_operation": _by_operation(copies, events)} if details else found


def _by_operation(copies: list[tuple[str, dict[str, Any]]], events: list[dict[str, Any]]) -> list[list[Any]]:
    """Return (operation, direction, bytes, count) of copies, with the innermost operation that launched each of them."""
    launches = {e["args"].get("correlation"): e for e in events if str(e.get("cat", "")).startswith("cuda_") and "args" in e}
    operations = [e for e in events if e.get("cat") == "cpu_op"]
    counted: collections.Counter[tuple[str, str, int]] = collections.Counter()
    for direction, copy in copies:
        launch = launches.get(copy["args"].get("correlation"))
        around = [
            e for e in operations if launch and e["tid"] == launch["tid"] and e["ts"] <= launch["ts"] <= e["ts"] + e["dur"]
        ]
        name = max(around, key=lambda e: (e["ts"], -e["dur"]))["name"] if around else ""
        counted[name, direction, copy["args"]["bytes"]] += 1
    return [[*key, n] for key, n in counted.items()]


def _touch(device: torch.device) -> None:
    torch.ones(8, device=device).sum().item()


def measure_cuda(program: Program, device: torch.device, details: bool = False) -> dict[str, Any]:
    """Return the figures of a program on a CUDA device."""
    _profiled(_touch, device, details=False)  # loads CUPTI
    _run(program, device)
    if details:
        torch.cuda.memory._record_memory_history("all", context=None)
    found = _memory(program, device)
    if details:
        signs = {"alloc": 1, "free_completed": -1}
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        found["allocations"] = [signs[e["action"]] * e["size"] for e in events if e["action"] in signs]
        torch.cuda.memory._record_memory_history(None)
    first, second = (_profiled(program, device, details) for _ in range(2))
    return {**found, **second, **({"unstable": first["copies"]} if first["copies"] != second["copies"] else {})}


def measure_virtual(program: Program, gpu: Any, details: bool = False) -> dict[str, Any]:
    """Return the figures of a program on a virtual GPU."""
    import toolkit as tk

    _run(program, gpu.torch)
    found = _memory(program, gpu.torch)
    copies = []
    for _ in range(2):
        with _uncollected(), tk.record(gpu, lines=False) as trace:
            _run(program, gpu.torch)
        sizes = {kind: trace["bytes"][trace.is_kind(kind)].tolist() for kind in DIRECTIONS.values()}
        copies.append(_copies((kind, size) for kind, found_sizes in sizes.items() for size in found_sizes))
    found |= {
        "copies": copies[1],
        "kernels": int(trace.is_kind("kernel").sum()),
        "waits": sum(name == "cudaStreamSynchronize" for name in trace.select(trace.is_kind("sync")).text("name")),
    }
    if details:
        signed = trace["bytes"].astype("int64") * (trace.is_kind("alloc").astype("int64") - trace.is_kind("free"))
        found["allocations"] = signed[signed != 0].tolist()
    return {**found, "unstable": copies[0]} if copies[0] != copies[1] else found


def measure(name: str, device: str, details: bool = False) -> dict[str, Any]:
    """Return the record of one program on a device, or {"error": ...} with the line of the program that raised.

    With `details`, the record has the allocations in order (requested bytes, negative for a free), and on CUDA the operation
    that made each copy.
    """
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            if device.startswith("cuda"):
                found = measure_cuda(programs()[name], torch.device(device), details)
            else:
                found = measure_virtual(programs()[name], _virtual(device), details)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f"{Path(f.filename).name}:{f.lineno}: {f.line}" for f in frames if Path(f.filename).stem == name.split(".")[0]]
        found = {"error": f"{type(error).__name__}: {str(error).strip()[:400]}", "line": lines[-1] if lines else ""}
    return {**found, "seconds": round(time.perf_counter() - start, 2)}


def _virtual(device: str) -> Any:
    import toolkit as tk

    return tk.device(device)


def _about(device: str) -> dict[str, Any]:
    """Return the GPU and the versions. On a CUDA device it needs only PyTorch."""
    cuda = device.startswith("cuda")
    _touch(torch.device(device) if cuda else _virtual(device).torch)
    if not cuda:
        from toolkit.gpu.virtual import cudnn
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": device,
        "gpu": torch.cuda.get_device_name(device) if cuda else _virtual(device).spec.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else cudnn.version(),  # which chooses the algorithms of convolutions
        "transformers": importlib.metadata.version("transformers"),
        "python": sys.version.split()[0],
    }


def _send(function: Callable[..., Any], arguments: tuple[Any, ...], connection: Connection) -> None:
    torch.set_num_threads(1)
    connection.send(function(*arguments))
    connection.close()


def in_process(context: Any, function: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> Any:
    """Return `function(*arguments)`, called in a new process. Raise RuntimeError if no answer comes in time."""
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(function, arguments, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_s):
            raise RuntimeError(f"no answer in {timeout_s:.0f} s")
        return receiver.recv()
    except EOFError:
        process.join(10)
        raise RuntimeError(f"the process ended with exit code {process.exitcode}") from None
    finally:
        receiver.close()
        process.kill()
        process.join()


def started(device: str) -> tuple[Any, dict[str, Any]]:
    """Return how to start processes, and the facts about the device.

    Processes are forked from a server that has imported everything. Fresh ones are started if those can't use the device.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    try:
        return context, in_process(context, _about, device)
    except (RuntimeError, OSError, EOFError) as error:
        print(f"forked processes can't use {device} ({error}): starting fresh ones, which takes longer", flush=True)
    fresh = multiprocessing.get_context("spawn")
    return fresh, in_process(fresh, _about, device)


def measure_all(device: str, names: list[str], jobs: int, details: bool, out: Path | None) -> dict[str, Any]:
    """Measure programs in `jobs` processes at a time, and write the record after each. Those of an existing file are kept."""
    context, about = started(device)
    old = json.loads(out.read_text())["programs"] if out and out.exists() else {}
    record: dict[str, Any] = {**about, "programs": old}
    with ThreadPoolExecutor(jobs) as pool:
        pending = {pool.submit(in_process, context, measure, name, device, details): name for name in names}
        for future in as_completed(pending):
            name = pending[future]
            try:
                found = future.result()
            except (RuntimeError, OSError, EOFError) as error:
                found = {"error": f"{error}", "line": "", "seconds": None}
            record["programs"][name] = found
            print(f"{name:40} {found['seconds']} s  {found.get('error', '')[:150]}", flush=True)
            if out:
                write(record, out)
    return record


def write(record: dict[str, Any], path: Path) -> None:
    """Write a record as JSON, with one line per program, in the order of the table."""
    head = {key: value for key, value in record.items() if key != "programs"}
    measured = [(name, record["programs"][name]) for name in programs() if name in record["programs"]]
    rows = [f"  {json.dumps(name)}: {json.dumps(found)}" for name, found in measured]
    text = json.dumps({**head, "programs": {}}, indent=1)
    path.write_text(text.removesuffix("{}\n}") + "{\n" + ",\n".join(rows) + "\n }\n}\n")


def differences(real: dict[str, Any] | None, virtual: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the differences of two measurements of one program as (figure, sentence), empty if they are equal."""
    if real is None or virtual is None:
        return [("error", "not measured " + ("there" if real is None else "here"))]
    errors = [f"raises {where}: {r['error']}" for where, r in (("there", real), ("here", virtual)) if "error" in r]
    if errors:
        return [("error", "; ".join(errors).replace("\n", " "))]
    found = []
    for direction in DIRECTIONS.values():
        there, here = (dict(map(tuple, r["copies"][direction])) for r in (real, virtual))
        for size in sorted(there.keys() | here.keys()):
            if there.get(size, 0) != here.get(size, 0):
                found.append((direction, f"{direction} of {size:,} B: {there.get(size, 0)} there, {here.get(size, 0)} here"))
    for figure in ("peak", "final"):
        there, here = real[f"{figure}_bytes"], virtual[f"{figure}_bytes"]
        if there != here:
            found.append((figure, f"{figure}: {there:,} B there, {here:,} B here"))
    return found


def compare(real: dict[str, Any], virtual: dict[str, Any]) -> list[str]:
    """Return a table of two records: program, class, whether the copies and the peak are equal, and the first difference.

    A program that raises on either side, or was not measured there, has neither. The last line counts the equal programs.
    """
    lines = [f"{'program':28} {'class':14} copies peak  first difference"]
    equal: collections.Counter[str] = collections.Counter()
    names = list(real["programs"] | virtual["programs"])
    for name in names:
        found = differences(real["programs"].get(name), virtual["programs"].get(name))
        differing = {figure for figure, _ in found}
        if differing & set(DIRECTIONS.values()):
            differing.add("copies")
        same = [] if "error" in differing else [figure for figure in FIGURES if figure not in differing]
        equal.update(same)
        group, program = name.split(".")
        words = ["yes" if figure in same else "no" for figure in ("copies", "peak")]
        lines.append(f"{program:28} {group:14} {words[0]:6} {words[1]:5} {found[0][1][:160] if found else ''}".rstrip())
    counts = ", ".join(f"{figure} {equal[figure]}" for figure in FIGURES)
    return [*lines, f"of {len(names)} programs, equal: {counts}"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help='programs or classes, such as "vision" (default: all)')
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--out", type=Path, help="write the record to this JSON file; the programs in it that don't run stay")
    parser.add_argument(
        "--jobs", type=int, default=min(os.cpu_count() or 1, 12), help="processes at a time (default: %(default)s)"
    )
    parser.add_argument("--details", action="store_true", help="record the allocations, and on CUDA the operation of each copy")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("REAL", "VIRTUAL"), help="compare two records instead")
    options = parser.parse_args(arguments)
    if options.compare:
        print("\n".join(compare(*(json.loads(path.read_text()) for path in options.compare))))
        return 0
    names = [name for name in programs() if not options.names or {name, name.split(".")[0]} & set(options.names)]
    if not names:
        parser.error(f"no program or class is named {', '.join(options.names)}")
    start = time.perf_counter()
    record = measure_all(options.device, names, options.jobs, options.details, options.out)
    raised = [name for name in names if "error" in record["programs"][name]]
    print(f"{len(names)} programs in {time.perf_counter() - start:.0f} s, {len(raised)} raised: {', '.join(raised) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
