"""Count the copies of every decode strategy and time its steps, on a real GPU or on a virtual one.

    python -m toolkit.bench.decode_copies --device cuda --model demo/gemma4 --out measured.json
    python -m toolkit.bench.decode_copies --device virtual:h200 --model demo/gemma4 --out virtual.json
    python -m toolkit.bench.decode_copies --table virtual.json measured.json

Run the first two commands as separate processes, because registering the virtual GPU changes how `pin_memory` works on CUDA.
The third prints both records side by side as Markdown and exits with status 1 if they differ. Counts come from recorded
runs; times come from unrecorded runs, in which the strategies take turns. End-of-text tokens are ignored, so that every run
generates the same number of tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any, TypedDict

import torch

from toolkit.bench.record import about, out_file, read_record, run_command, whole, write_record
from toolkit.core.errors import ToolkitError
from toolkit.decode.compare import decode_steps
from toolkit.decode.loop import generate
from toolkit.decode.run import Run
from toolkit.decode.strategies import Strategy, strategies_of
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load
from toolkit.models.model import Model as AnyModel
from toolkit.models.qwen3 import Config, Model
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.events import Trace

DEMO = "demo/qwen3"
# About the size of the demo model. Counts and times don't depend on the values of the weights.
RANDOM = Config(768, 256, 512, 3, 4, 2, 64, max_position_embeddings=1024, tie_word_embeddings=True)
TEXT = "The capital of France is Paris. The capital of Japan is Tokyo. The capital of Italy is Rome. "


class _Copies(TypedDict):
    count: int
    bytes: int


class _Total(TypedDict):
    h2d: _Copies
    d2h: _Copies
    d2d: _Copies


class _Strategy(TypedDict):
    tokens: list[int]
    total: _Total
    sizes: dict[str, Any]
    outside: dict[str, Any]
    ms_per_step: float | None


class _Record(TypedDict):
    """What --table reads of a record."""

    gpu: str | None
    model: str
    dtype: str
    prompt: int
    decode: int
    strategies: dict[str, _Strategy]


def open_model(name: str, device: str) -> tuple[str, Any]:
    """Load the model `name` and return (name, model).

    If the demo model's files are missing, return a random model of similar size as "random". Raises ToolkitError if any other
    model cannot be loaded.
    """
    gpu = open_device(device)
    try:
        return name, load(name, device=gpu, progress=False)
    except ToolkitError:
        if name != DEMO:
            raise
    return "random", Model(RANDOM, gpu, torch.float32).init_weights()


def measure(model: AnyModel, prompt: list[int], tokens: int, repeats: int, **options: Any) -> dict[str, Any]:
    """Return for each strategy its tokens, copies, kernels, host waits, and milliseconds per decode step.

    `options` are passed to `generate`. On a real GPU each strategy is timed `repeats` times after one warm-up round; on a
    virtual one, whose times are modelled, once.
    """
    options |= {"max_new_tokens": tokens, "eos": ()}
    names = [name for name, strategy in strategies_of(model).items() if isinstance(strategy, Strategy)]
    times: dict[str, list[float]] = {name: [] for name in names}
    warm_ups, rounds = (1, repeats) if model.device.clock == "measured" else (0, 1)
    for turn in range(warm_ups + rounds):
        for name in names:
            rate = generate(model, prompt, name, record=False, **options).tok_per_s
            if turn >= warm_ups and rate:
                times[name].append(1e3 / rate)
    out = {}
    for name in names:
        run = generate(model, prompt, name, **options)
        out[name] = {"tokens": list(run.tokens), **counts(run)}
        out[name]["ms_per_step"] = statistics.median(times[name]) if times[name] else None
        out[name]["ms_per_step_all"] = times[name]
    return out


def counts(run: Run) -> dict[str, Any]:
    """Return the copies, kernels and host waits of a run.

    `total` has the count and the bytes of each direction in the whole run; `sizes` has [bytes, count] pairs for each part of
    the run (prefill, decode), and `outside` for the copies outside of every step.
    """
    trace = run.trace
    steps = decode_steps(trace)
    parts = {mark.name: [m.step for m in trace.marks() if m.name == mark.name] for mark in trace.marks()}
    total = {}
    for kind in COPY_KINDS:
        copies = trace.select(trace.is_kind(kind))
        total[kind] = {"count": len(copies), "bytes": int(copies["bytes"].sum())}
    return {
        "total": total,
        "sizes": {part: _sizes(trace, numbers) for part, numbers in parts.items()},
        "outside": _sizes(trace, [-1]),
        "decode_steps": len(steps),
        "every_step_alike": all(steps[f"{kind}_{what}"].nunique() == 1 for kind in COPY_KINDS for what in ("count", "bytes")),
        "kernels_per_step": float(steps["kernels"].mean()),
        "host_wait_ms_per_step": float(steps["host_wait_us"].mean()) / 1e3,
    }


def _sizes(trace: Trace, steps: list[int]) -> dict[str, list[list[int]]]:
    inside = sum((trace["step"] == step for step in steps), trace["step"] < -1)
    found = {}
    for kind in COPY_KINDS:
        sizes = Counter(trace["bytes"][trace.is_kind(kind) & (inside > 0)].tolist())
        found[kind] = [[size, count] for size, count in sorted(sizes.items())]
    return found


def bench(device: str, name: str, prompt_length: int, decode: int, repeats: int) -> dict[str, Any]:
    """Return the record of `decode` steps after a prompt of `prompt_length` tokens (JSON-able)."""
    name, model = open_model(name, device)
    text = model.tokenizer.encode(TEXT) if model.tokenizer else list(range(1, 64))
    prompt = (text * (prompt_length // len(text) + 1))[:prompt_length]
    strategies = measure(model, prompt, decode + 1, repeats)
    same = len({tuple(found["tokens"]) for found in strategies.values()}) == 1
    return {
        **about(device), "model": name, "dtype": str(model.dtype), "prompt": prompt_length, "decode": decode,
        "same_tokens": same, "strategies": strategies,
    }  # fmt: skip


def table(virtual: dict[str, Any], measured: dict[str, Any]) -> tuple[str, list[str]]:
    """Return both records as a Markdown table, and the names of the entries in which they differ."""
    what = f"Prompt {measured['prompt']}, decode {measured['decode']}, {measured['model']}"
    lines = [
        f"{what}; modelled: {virtual['gpu']}, measured: {measured['gpu']}",
        "",
        "| strategy | H2D modelled, measured | D2H | D2D | ms per step: modelled | measured | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    differ = [what for what in ("model", "prompt", "decode", "dtype") if virtual[what] != measured[what]]
    for name, real in measured["strategies"].items():
        model = virtual["strategies"].get(name)
        if model is None:
            differ.append(f"{name}: only measured")
            continue
        pairs = [(model["total"][kind], real["total"][kind]) for kind in COPY_KINDS]
        cells = [f"{m['count']} ({m['bytes']:,} B), {r['count']} ({r['bytes']:,} B)" for m, r in pairs]
        m_ms, r_ms = model["ms_per_step"], real["ms_per_step"]
        cells += ["-" if ms is None else f"{ms:.3f}" for ms in (m_ms, r_ms)]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {f'{m_ms / r_ms:.2f}' if m_ms and r_ms else '-'} |")
        differ += [f"{name}: {what}" for what in ("tokens", "sizes", "outside") if model[what] != real[what]]
    return "\n".join(lines), differ


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 1 if the two records of --table differ, else 0."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.decode_copies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--out", type=out_file, help="write the record to this JSON file (default: print it)")
    parser.add_argument("--model", default=DEMO, help=f"a model name or path, as in tk.load (default: {DEMO})")
    parser.add_argument("--prompt", type=whole, default=19, help="prompt tokens (default: 19)")
    parser.add_argument("--decode", type=whole, default=128, help="decode steps (default: 128)")
    parser.add_argument("--repeats", type=whole, default=5, help="timed runs per strategy (default: 5)")
    parser.add_argument("--table", nargs=2, type=Path, metavar=("VIRTUAL", "MEASURED"), help="compare two records instead")
    options = parser.parse_args(arguments)
    if options.table:
        text, differ = table(*(read_record(path, _Record) for path in options.table))
        print(text)
        print("\nDifferent: " + ", ".join(differ) if differ else "\nThe tokens and all copies are equal.")
        return int(bool(differ))
    record = bench(options.device, options.model, options.prompt, options.decode, options.repeats)
    write_record(record, options.out)
    if options.out:
        print(json.dumps({name: found["ms_per_step"] for name, found in record["strategies"].items()}))
    return 0


if __name__ == "__main__":
    run_command(main)
