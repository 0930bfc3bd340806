"""Compare exports under a memory budget with their plan, and the exported package with the model that it came from.

    python -m toolkit.bench.export random/gemma4-31b --scheme q4_k_m --context 131072 --budget 4GiB --folder made --out o.json

Every export runs in a process of its own with empty caches, so that it compiles everything and the GPU memory in use is its
own; nothing else should run on the GPU meanwhile. Another process then loads the last package, decodes with every strategy,
once by the compiled code and once by the model with the same weights, and compares their logits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import toolkit as tk
from toolkit.bench.decode_copies import measure
from toolkit.bench.record import about, out_file, run_command, write_record
from toolkit.core.files import at_home
from toolkit.exporting.progress import memory_now
from toolkit.exporting.running import Exported
from toolkit.models.model import Model

PROMPT = "The quick brown fox jumps over the lazy dog. "


def bench(asked: dict[str, Any], folder: Path, runs: int, decode: int) -> dict[str, Any]:
    """Return the record of `runs` exports and of the last package (JSON-able). `decode` is the number of tokens to generate.

    Each run deletes the package that the previous run wrote into `folder`.
    """
    exports = []
    for run in range(runs):
        if run:
            shutil.rmtree(folder)  # the package of the previous run
        with tempfile.TemporaryDirectory() as fresh:
            caches = dict.fromkeys(("TOOLKIT_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR"), fresh)
            exports.append(_process("export", asked | {"folder": str(folder)}, caches))
    found = exports[-1].pop("about") | {"asked": asked}
    for one in exports[:-1]:
        del one["about"]
    found |= {"spread": spread(exports), "exports": exports}
    if decode:
        found["package"] = _process("decode", {"folder": str(folder), "device": asked["device"], "decode": decode}, {})
    return found


def export_once(asked: dict[str, Any]) -> dict[str, Any]:
    """Export once and return the planned and the measured memory of each phase."""
    began = time.perf_counter()
    told: set[tuple[str, str]] = set()

    def tell(phase: str, share: float, what: str) -> None:
        if (phase, what) not in told:
            told.add((phase, what))
            print(f"{time.perf_counter() - began:7.1f} s  {phase} {what}", file=sys.stderr, flush=True)

    names = ("device", "target", "budget", "context", "kv", "scheme", "dtype")
    package = tk.export(asked["model"], asked["folder"], **{name: asked[name] for name in names}, progress=tell)
    seconds = time.perf_counter() - began
    files = package.manifest["files"]
    planned = {phase["name"]: phase for phase in package.manifest["plan"]["export"]}
    phases: list[dict[str, Any]] = []
    for phase in package.measured["phases"]:
        foreseen = planned.get(phase["phase"])
        if foreseen is not None:
            phase = phase | {"planned_gpu_bytes": sum(foreseen["parts"].values()), "planned_host_bytes": foreseen["host_bytes"]}
        phases.append(phase)
    return {
        "about": about(asked["device"]), "seconds": seconds, "phases": phases, "pieces": package.measured["pieces"],
        "weights_bytes": sum(entry["bytes"] for name, entry in files.items() if name.startswith("weights-")),
        "code_bytes": sum(entry["bytes"] for name, entry in files.items() if name.startswith("methods/")),
        "plan": package.manifest["plan"],
    }  # fmt: skip


def decode_both(asked: dict[str, Any]) -> dict[str, Any]:
    """Return tokens, copies and times per step of the package and of the model with its weights, for every strategy.

    Both start from a short prompt. Tokens are also compared after a prompt as long as the package's chunk: at other prompt
    lengths the model and the package use different kernel configs, so sums differ in the last bits.
    """
    began = time.perf_counter()
    exported = tk.load_exported(asked["folder"], asked["device"], trust=True, progress=False)
    loaded = time.perf_counter() - began
    prompt = exported.tokenizer.encode(PROMPT) if exported.tokenizer else list(range(100, 164))
    whole = (prompt * (exported.chunk // len(prompt) + 1))[: exported.chunk]
    options = {"context": exported.context, "kv": exported.kv}
    package = measure(exported, prompt, asked["decode"], 1, **options)
    model = measure(exported.inner, prompt, asked["decode"], 1, **options)
    rows = {}
    for name, found in package.items():
        own = model[name]
        after = [_tokens(each, whole, name, asked["decode"], **options) for each in (exported, exported.inner)]
        rows[name] = {
            "same_tokens": found["tokens"] == own["tokens"],
            "tokens_until_another": _until_another(found["tokens"], own["tokens"]),
            "same_tokens_after_a_whole_chunk": after[0] == after[1],
            "same_copies": [found["sizes"], found["outside"]] == [own["sizes"], own["outside"]],
            "ms_per_step": found["ms_per_step"],
            "model_ms_per_step": own["ms_per_step"],
            "kernels_per_step": found["kernels_per_step"],
            "model_kernels_per_step": own["kernels_per_step"],
            "copies": found["total"],
        }
    used = memory_now(exported.device.torch if exported.device.torch.type == "cuda" else None)[1]
    return {
        "load_s": loaded, "prompt_tokens": len(prompt), "chunk": exported.chunk, "steps": asked["decode"] - 1,
        "used_bytes_at_the_end": used, "strategies": rows,
        "likeness": likeness(exported, prompt * 2, len(prompt)),
        "likeness_after_a_whole_chunk": likeness(exported, whole + prompt, len(whole)),
    }  # fmt: skip


def _tokens(model: Model, prompt: list[int], strategy: str, tokens: int, **options: Any) -> list[int]:
    return list(tk.generate(model, prompt, strategy, record=False, max_new_tokens=tokens, eos=(), **options).tokens)


def likeness(exported: Exported, ids: list[int], first: int) -> dict[str, dict[str, float]]:
    """Return how close logits are to the model's, for tokens fed one by one after the `first` tokens were fed at once.

    "package" compares the package. "model in other parts" compares the model with itself when the first tokens are fed in two
    parts, which changes only the order of sums: the difference to expect from rounding. `same` is the share of positions with
    the same most likely token, `different_tokens` the number of distinct most likely tokens, and `off` the root mean square of
    the difference divided by that of the model's logits.
    """
    of_model = _logits(exported.inner, ids, [first], exported)
    others = {"package": _logits(exported, ids, [first], exported)}
    others["model in other parts"] = _logits(exported.inner, ids, [first // 2, first], exported)
    found = {}
    for name, logits in others.items():
        off = (logits - of_model).square().mean().sqrt() / of_model.square().mean().sqrt()
        best = logits.argmax(-1)
        same = (best == of_model.argmax(-1)).float().mean()
        found[name] = {"same": float(same), "different_tokens": len(best.unique()), "off": float(off)}
    return found


def _logits(model: Model, given: list[int], stops: list[int], exported: Exported) -> torch.Tensor:
    """Return logits [tokens, vocab] of the tokens from the last of `stops` on, fed one by one.

    The tokens before are fed in chunks that end at each of `stops`.
    """
    ids = torch.tensor([given], device=exported.device.torch)
    positions = torch.arange(len(given), device=exported.device.torch)
    cache, starts, found = model.new_cache(exported.context, exported.kv), [0, *stops, *range(stops[-1] + 1, len(given))], []
    with torch.no_grad():
        for start, stop in zip(starts, [*starts[1:], len(given)], strict=True):
            x = model.advance(model.embed(ids[:, start:stop]), positions[start:stop], cache, stop)
            if start >= stops[-1]:
                found.append(model.logits(x)[0, -1])
    return torch.stack(found)


def _until_another(tokens: list[int], own: list[int]) -> int | None:
    """Return the number of equal tokens before the first difference, or None if all are equal."""
    return next((i for i, (a, b) in enumerate(zip(tokens, own, strict=True)) if a != b), None)


def spread(exports: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return [least, most] over the runs of the seconds and of the peaks over all phases."""
    found: dict[str, list[float]] = {"seconds": [round(one["seconds"], 1) for one in exports]}
    for name in ("gpu_used_bytes", "gpu_reserved_bytes", "host_peak_bytes"):
        found[name] = [max(phase.get(name, 0) for phase in one["phases"]) for one in exports]
    return {name: [min(values), max(values)] for name, values in found.items()}


def _process(what: str, asked: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    run = [sys.executable, "-W", "ignore", "-m", "toolkit.bench.export", "--step", what, json.dumps(asked)]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"{what} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _new_folder(text: str) -> Path:
    folder = at_home(text).resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise argparse.ArgumentTypeError(f"{text!r} exists and is not an empty folder. Choose a new or an empty folder")
    return folder


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, or with `--step` one step of it in a process of its own."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--step"]:
        step = {"export": export_once, "decode": decode_both}[arguments[1]]
        print(json.dumps(step(json.loads(arguments[2]))))
        return
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.export", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="a model name or path, as in tk.load")
    for name, described in {
        "scheme": "quantization scheme of the weights", "dtype": "dtype of the computation", "kv": "format of keys and values",
        "budget": 'memory budget, such as "4 GiB"', "target": "export for this GPU of the catalogue", "device": "cuda or cpu",
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", default="cuda" if name == "device" else None, help=described)
    parser.add_argument("--context", type=int, default=4096, help="positions that the cache holds")
    parser.add_argument("--runs", type=int, default=3, help="number of exports")
    parser.add_argument("--decode", type=int, default=17, help="tokens to generate from the package (0: none)")
    parser.add_argument("--folder", type=_new_folder, required=True, help="folder of the package, which must be new or empty")
    parser.add_argument("--out", type=out_file, help="write the record to this JSON file (default: print it)")
    given = vars(parser.parse_args(arguments))
    folder, runs, decode, out = (given.pop(name) for name in ("folder", "runs", "decode", "out"))
    write_record(bench(given, folder, runs, decode), out)


if __name__ == "__main__":
    run_command(main)
