"""An export under a budget as it was planned and as it went, a few times over, and the package beside the model it came from.

    python -m toolkit.bench.export random/gemma4-31b --scheme q4_k_m --context 131072 --budget 4GiB --folder made --out o.json

Every export is a process of its own that compiles all anew, so that the GPU's memory in use is that export's and nothing else
has to run on the GPU meanwhile. The last package is then loaded by another process, which decodes under every strategy: by the
compiled code, then by the model that its weights make, and says how like their logits are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import toolkit as tk
from toolkit.bench.decode_copies import about, measure
from toolkit.exporting.progress import memory_now

PROMPT = "The quick brown fox jumps over the lazy dog. "


def bench(asked: dict[str, Any], folder: Path, runs: int, decode: int) -> dict[str, Any]:
    """The record, ready for JSON: `runs` exports, then the last one's package."""
    exports = []
    for _ in range(runs):
        shutil.rmtree(folder, ignore_errors=True)
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
    """One export: what was planned and what was measured, phase by phase."""
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
        phases.append(phase if foreseen is None else phase | _foreseen(foreseen))
    return {
        "about": about(asked["device"]), "seconds": seconds, "phases": phases, "pieces": package.measured["pieces"],
        "weights_bytes": sum(entry["bytes"] for name, entry in files.items() if name.startswith("weights-")),
        "code_bytes": sum(entry["bytes"] for name, entry in files.items() if name.startswith("methods/")),
        "plan": package.manifest["plan"],
    }  # fmt: skip


def _foreseen(phase: dict[str, Any]) -> dict[str, int]:
    return {"planned_gpu_bytes": sum(phase["parts"].values()), "planned_host_bytes": phase["host_bytes"]}


def decode_both(asked: dict[str, Any]) -> dict[str, Any]:
    """Tokens, copies and times a step of the package, and of its weights' own model, under every strategy.

    After a short prompt, and, of tokens alone, after one of as many as the package takes at once: of others a model on a GPU
    forms products by the configs of that number, a package by those of its most, which sum in another order.
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


def _tokens(model: Any, prompt: list[int], strategy: str, tokens: int, **options: Any) -> list[int]:
    return list(tk.generate(model, prompt, strategy, record=False, max_new_tokens=tokens, eos=(), **options).tokens)


def likeness(exported: Any, ids: list[int], first: int) -> dict[str, dict[str, float]]:
    """How like two runs' logits are, of one token after another once the `first` were fed at once: the package's to the
    model's, and the model's to its own where the first come in two parts, which is other sums in the same numbers.

    `same`: the share of positions with the same most likely token; `different_tokens`: how many tokens that ever is; `off`:
    the difference's root mean square, over the logits'.
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


def _logits(model: Any, given: list[int], stops: list[int], exported: Any) -> torch.Tensor:
    """Logits [tokens, vocab] of the tokens after the last of `stops`, up to which the others are fed at once."""
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
    """How many are the same before the first that isn't; None where all are."""
    return next((i for i, (a, b) in enumerate(zip(tokens, own, strict=True)) if a != b), None)


def spread(exports: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The least and the most of the runs: seconds in all, and the peaks over all phases."""
    found: dict[str, list[float]] = {"seconds": [round(one["seconds"], 1) for one in exports]}
    for name in ("gpu_used_bytes", "gpu_reserved_bytes", "host_peak_bytes"):
        found[name] = [max(phase.get(name, 0) for phase in one["phases"]) for one in exports]
    return {name: [min(values), max(values)] for name, values in found.items()}


def text_of(record: dict[str, Any]) -> str:
    """A record as JSON, with a line for each point of a curve."""
    numbers = re.compile(r"\[\s+(-?[\d.e+-]+(?:,\s+-?[\d.e+-]+)*)\s+\]")
    return numbers.sub(lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", json.dumps(record, indent=1)) + "\n"


def _process(what: str, asked: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    run = [sys.executable, "-W", "ignore", "-m", "toolkit.bench.export", "--step", what, json.dumps(asked)]
    done = subprocess.run(run, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}, check=False)
    if done.returncode:
        raise SystemExit(f"{what} ended with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: list[str] | None = None) -> None:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["--step"]:
        step = {"export": export_once, "decode": decode_both}[arguments[1]]
        print(json.dumps(step(json.loads(arguments[2]))))
        return
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.export", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("model", help="what tk.load takes")
    for name, described in {
        "scheme": "how weights are held", "dtype": "what is computed in", "kv": "how keys and values are held",
        "budget": '"4 GiB"', "target": "another GPU of the catalogue", "device": "cuda or cpu",
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", default="cuda" if name == "device" else None, help=described)
    parser.add_argument("--context", type=int, default=4096, help="tokens that caches hold")
    parser.add_argument("--runs", type=int, default=3, help="exports")
    parser.add_argument("--decode", type=int, default=17, help="tokens to generate from the package (0: none)")
    parser.add_argument("--folder", type=Path, required=True, help="where the package goes; what is there is deleted")
    parser.add_argument("--out", type=Path, help="where the record goes (JSON)")
    given = vars(parser.parse_args(arguments))
    folder, runs, decode, out = (given.pop(name) for name in ("folder", "runs", "decode", "out"))
    text = text_of(bench(given, folder, runs, decode))
    if out:
        out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
