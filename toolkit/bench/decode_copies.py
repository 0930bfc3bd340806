"""Counts what every decode strategy copies, and times its steps: on a real GPU, or on a virtual one.

    python -m toolkit.bench.decode_copies --device cuda --model demo/gemma4 --out measured.json
    python -m toolkit.bench.decode_copies --device virtual:h200 --model demo/gemma4 --out virtual.json
    python -m toolkit.bench.decode_copies --table virtual.json measured.json

The first two run in processes of their own (registering the virtual GPU changes what pinning means on CUDA); the third
prints the two side by side as Markdown and fails where they differ. Counts come from recorded runs, times from
unrecorded ones, the strategies taking turns. The end of text is ignored, so that every run makes all its tokens.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from toolkit.core.errors import ToolkitError
from toolkit.core.version import __version__
from toolkit.decode.compare import decode_steps
from toolkit.decode.loop import generate
from toolkit.decode.run import Run
from toolkit.decode.strategies import STRATEGIES
from toolkit.gpu.opening import open_device
from toolkit.loading.loader import load
from toolkit.models.qwen3 import Config, Model
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.events import Trace

DEMO = "demo/qwen3"
RANDOM = Config(
    768, 256, 512, 3, 4, 2, 64, max_position_embeddings=1024, tie_word_embeddings=True
)  # about the demo's shape; weights don't matter
TEXT = "The capital of France is Paris. The capital of Japan is Tokyo. The capital of Italy is Rome. "


def open_model(name: str, device: str) -> tuple[str, Any]:
    """The demo model, or a random one of its kind where the demo isn't there; a path of your own must be there."""
    gpu = open_device(device)
    try:
        return name, load(name, device=gpu, progress=False)
    except ToolkitError:
        if name != DEMO:
            raise
    return "random", Model(RANDOM, gpu, torch.float32).init_weights()


def measure(model: Any, prompt: list[int], tokens: int, repeats: int, **options: Any) -> dict[str, Any]:
    """Per strategy: tokens, copies of every step, kernels, waits, and milliseconds per decode step. `options`: `generate`'s."""
    options |= {"max_new_tokens": tokens, "eos": ()}
    times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    if model.device.clock == "measured":
        for turn in range(repeats + 1):  # the first warms up
            for name in STRATEGIES:
                rate = generate(model, prompt, name, record=False, **options).tok_per_s
                if turn and rate:
                    times[name].append(1e3 / rate)
    out = {}
    for name in STRATEGIES:
        run = generate(model, prompt, name, **options)
        if model.device.clock != "measured" and run.tok_per_s:
            times[name].append(1e3 / run.tok_per_s)
        out[name] = {"tokens": list(run.tokens), **counts(run)}
        out[name]["ms_per_step"] = statistics.median(times[name]) if times[name] else None
        out[name]["ms_per_step_all"] = times[name]
    return out


def counts(run: Run) -> dict[str, Any]:
    """`total`: count and bytes per direction of the whole run; `sizes`: [bytes, count] pairs of each part of it."""
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
        "host_wait_ms_per_step": float(steps["host_wait_s"].mean()) * 1e3,
    }


def _sizes(trace: Trace, steps: list[int]) -> dict[str, list[list[int]]]:
    inside = sum((trace["step"] == step for step in steps), trace["step"] < -1)
    found = {}
    for kind in COPY_KINDS:
        sizes = Counter(trace["bytes"][trace.is_kind(kind) & (inside > 0)].tolist())
        found[kind] = [[size, count] for size, count in sorted(sizes.items())]
    return found


def about(device: str) -> dict[str, Any]:
    """Where and with what this ran."""
    gpu = open_device(device)
    folder = Path(__file__).parent
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": gpu.name,
        "gpu": torch.cuda.get_device_name(gpu.torch) if gpu.torch.type == "cuda" else gpu.spec.name if gpu.spec else None,
        "clock": gpu.clock,
        "toolkit": __version__,
        "commit": git.stdout.strip() or None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def bench(device: str, name: str, prompt_length: int, decode: int, repeats: int) -> dict[str, Any]:
    """The whole record, ready for JSON: `decode` steps after a prompt of `prompt_length` tokens."""
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
    """Both records as a Markdown table, and in words where they differ."""
    what = f"Prompt {measured['prompt']}, decode {measured['decode']}, {measured['model']}"
    lines = [
        f"{what}; modelled: {virtual['gpu']}, measured: {measured['gpu']}",
        "",
        "| strategy | H2D modelled, measured | D2H | D2D | ms a step: modelled | measured | ratio |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    differ = [what for what in ("model", "prompt", "decode", "dtype") if virtual[what] != measured[what]]
    for name, real in measured["strategies"].items():
        model = virtual["strategies"][name]
        pairs = [(model["total"][kind], real["total"][kind]) for kind in COPY_KINDS]
        cells = [f"{m['count']} ({m['bytes']:,} B), {r['count']} ({r['bytes']:,} B)" for m, r in pairs]
        m_ms, r_ms = model["ms_per_step"], real["ms_per_step"]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {m_ms:.3f} | {r_ms:.3f} | {m_ms / r_ms:.2f} |")
        differ += [f"{name}: {what}" for what in ("tokens", "sizes", "outside") if model[what] != real[what]]
    return "\n".join(lines), differ


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 where the two records of --table differ."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.decode_copies", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--out", type=Path, help="the JSON file to write (default: print it)")
    parser.add_argument("--model", default=DEMO, help=f"what tk.load takes (default: {DEMO})")
    parser.add_argument("--prompt", type=int, default=19, help="prompt tokens (default: 19)")
    parser.add_argument("--decode", type=int, default=128, help="decode steps (default: 128)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs per strategy (default: 5)")
    parser.add_argument("--table", nargs=2, type=Path, metavar=("VIRTUAL", "MEASURED"), help="compare two records instead")
    options = parser.parse_args(arguments)
    if options.table:
        text, differ = table(*(json.loads(path.read_text()) for path in options.table))
        print(text)
        print("\nDiffer: " + ", ".join(differ) if differ else "\nTokens and every copy are the same.")
        return int(bool(differ))
    record = bench(options.device, options.model, options.prompt, options.decode, options.repeats)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps({name: found["ms_per_step"] for name, found in record["strategies"].items()}))
    else:
        print(json.dumps(record, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
