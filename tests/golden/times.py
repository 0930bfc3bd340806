"""Time per generated token of warm, unmodified generate() of tiny models, and of the toolkit's decode strategies.

`python -m tests.golden.times cuda OUT.json` measures on a GPU. `python -m tests.golden.times virtual:h200` reads the modelled
clock, and prints the ratio to `h200_times.json`. `python_host_ns` of the catalogue was fitted to these measurements, so the
ratios show how well one constant fits all of them, not how well it predicts other programs.
"""

from __future__ import annotations

import json
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import toolkit as tk
from tests.golden.programs_more import tiny_model

MEASURED = Path(__file__).parent / "h200_times.json"
TOKENS = 48


def per_token_ns(gpu: Any, run: Callable[[], Any], repeats: int) -> float:
    """Return ns per token on the device's host clock: the median of `repeats` runs of TOKENS tokens after a warm-up."""
    times = []
    for _ in range(repeats + 1):
        gpu.sync()
        start = gpu.now_ns()
        run()
        gpu.sync()
        times.append((gpu.now_ns() - start) / TOKENS)
    return statistics.median(times[1:])


def hugging_face(gpu: Any, family: str) -> Callable[[], Any]:
    """Return the time of generate() of a tiny random model, which is Python, launches and waits, with little compute."""
    model = tiny_model(family).to(gpu.torch)
    ids = torch.arange(8)[None].to(gpu.torch)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": TOKENS, "pad_token_id": 0, "do_sample": False}
    return lambda: model.generate(ids, **options)


def strategy(gpu: Any, name: str, dtype: torch.dtype) -> Callable[[], Any]:
    """Return the time of the demo model with a decode strategy, without recording."""
    model = tk.load("demo/qwen3", device=gpu, dtype=dtype, progress=False)
    prompt = model.tokenizer.encode("The capital of France is")
    return lambda: tk.generate(model, prompt, decode=name, max_new_tokens=TOKENS, record=False)


def main(device: str, path: str = "") -> None:
    """Measure, then write the results or compare them."""
    gpu = tk.device(device)
    repeats = 5 if device.startswith("cuda") else 1
    result = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in ("llama", "qwen3", "gpt2"):
            result[f"generate_{family}"] = per_token_ns(gpu, hugging_face(gpu, family), repeats)
        for name in tk.STRATEGIES:
            try:
                result[name] = per_token_ns(gpu, strategy(gpu, name, torch.float32), repeats)
            except Exception as error:
                print(name, repr(error)[:300])
    if path:
        facts = {"device": device, "torch": torch.__version__, "per_token_ns": result}
        Path(path).write_text(json.dumps(facts, indent=1) + "\n")
        return
    measured = json.loads(MEASURED.read_text())["per_token_ns"]
    for name, ns in result.items():
        real = measured.get(name, float("nan"))
        print(f"{name:24} modelled {ns / 1e3:8.1f} us  measured {real / 1e3:8.1f} us  ratio {ns / real:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
