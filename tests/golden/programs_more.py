"""More small programs with ground truth from an H200, which cover the operations that code around language models uses.

`python programs_more.py OUT.json` measures them on a CUDA machine. `programs_more.txt` has one program per line: source that
may use `d` (a device string), `torch`, `F` and the helpers below. It assigns to `out`, which stays alive until the measurement
ends. Values come from `arange`, so that results that depend on them (the entries that a mask picks) are the same everywhere.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def ramp(d: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return 0, 1, 2, ... in `shape`, created on the device."""
    n = 1
    for size in shape:
        n *= size
    return torch.arange(n, device=d).to(dtype).view(shape)


def pinned(t: torch.Tensor, d: str) -> torch.Tensor:
    """Return `t` in pinned memory, or `t` itself if `d` is the CPU."""
    return t if d == "cpu" else t.pin_memory()


def mlp(d: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a two-layer perceptron on the device."""
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(d, dtype)


def train(d: str, optimizer: Callable[..., Any], **options: Any) -> float:
    """Run two training steps, reading back each loss. Return the second loss."""
    net = mlp(d)
    opt = optimizer(net.parameters(), **options)
    losses = []
    for _ in range(2):
        loss = F.cross_entropy(net(torch.ones(4, 8, device=d)), torch.zeros(4, dtype=torch.long, device=d))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses[1]


# Programs whose values depend on random numbers, which differ between devices.
RANDOM = frozenset({
    "sgd", "sgd_momentum", "adam", "adamw", "adamw_loop", "clip_grad_norm", "r2_multinomial_big", "r2_autocast",
})  # fmt: skip
SOURCES = (Path(__file__).parent / "programs_more.txt").read_text()


def sync(d: str) -> None:
    """Wait for the device."""
    if d != "cpu":
        torch.get_device_module(d.split(":")[0]).synchronize()


def _program(name: str, source: str) -> Callable[[str], Any]:
    code = compile(source, name, "exec")

    def run(d: str) -> Any:
        scope = {"d": d, "torch": torch, "F": F, "nn": nn} | {f.__name__: f for f in (ramp, pinned, mlp, train, sync)}
        exec(code, scope)
        return scope["out"]

    return run


PROGRAMS: dict[str, Callable[[str], Any]] = {}
SOURCE: dict[str, str] = {}
for _line in SOURCES.splitlines():
    _match = re.fullmatch(r"(\w+):\s+(.*)", _line)
    if _match:
        SOURCE[_match[1]] = _match[2]
        PROGRAMS[_match[1]] = _program(*_match.groups())


def tiny_model(family: str) -> Any:
    """Return a tiny Hugging Face model with random weights, on the CPU."""
    import transformers as hf

    size = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "eos_token_id": None}
    if family == "gpt2":
        ids = {"eos_token_id": None, "bos_token_id": None}
        config = hf.GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, n_positions=512, **ids)
    elif family == "qwen3":
        config = hf.Qwen3Config(**size, intermediate_size=128, num_key_value_heads=2, head_dim=16)
    else:
        config = hf.LlamaConfig(**size, intermediate_size=128, num_key_value_heads=2)
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(config).eval()


def _generate(
    family: str, mask: bool = False, prompt: int = 8, rows: int = 1, dtype: Any = None, **options: Any
) -> Callable[[str], Any]:
    def run(d: str) -> Any:
        model = tiny_model(family).to(d, dtype)
        ids = (torch.arange(prompt * rows).view(rows, prompt) % 512).to(d)
        extra = {"attention_mask": torch.ones_like(ids)} if mask else {}
        torch.manual_seed(0)
        return model.generate(ids, **extra, max_new_tokens=6, pad_token_id=0, **options).cpu().shape[1]

    return run


HF = {
    "gpt2_greedy": _generate("gpt2", do_sample=False),
    "gpt2_mask": _generate("gpt2", mask=True, do_sample=False),
    "llama_sampling": _generate("llama", mask=True, do_sample=True, temperature=0.7, top_k=20, top_p=0.9),
    "llama_beams": _generate("llama", mask=True, do_sample=False, num_beams=3),
    "llama_batch": _generate("llama", mask=True, rows=2, do_sample=False),
    "qwen3_static": _generate("qwen3", mask=True, do_sample=False, cache_implementation="static"),
    "qwen3_static_eager": _generate("qwen3", mask=True, do_sample=False, cache_implementation="static", disable_compile=True),
    "r2_gpt2_sampling": _generate("gpt2", mask=True, do_sample=True, top_k=5),
    "r2_qwen3_long": _generate("qwen3", mask=True, prompt=33, do_sample=False),
    "r2_llama_beam_sample": _generate("llama", mask=True, rows=2, do_sample=True, num_beams=2),
    "r2_llama_bf16": _generate("llama", mask=True, do_sample=False, dtype=torch.bfloat16),
    "r2_qwen3_bf16_no_mask": _generate("qwen3", do_sample=False, dtype=torch.bfloat16),
    "r2_gpt2_returns": _generate("gpt2", mask=True, rows=2, do_sample=True, num_return_sequences=2),
    "qwen3_eos": _generate("qwen3", mask=True, do_sample=False, eos_token_id=[3, 5]),
    "qwen3_penalty": _generate("qwen3", do_sample=False, repetition_penalty=1.2, min_new_tokens=3, eos_token_id=7),
}
PROGRAMS.update({f"generate_{name}": program for name, program in HF.items()})


def device_events(trace: dict[str, Any]) -> list[tuple[str, str, int, str, str]]:
    """Return (kind, name, bytes, duration in us, aten operation) of each device event of a Kineto trace, in order."""
    events = trace["traceEvents"]
    calls = [e for e in events if str(e.get("cat", "")).startswith("cuda_")]
    launches = {e["args"]["correlation"]: e for e in calls if "correlation" in e["args"]}
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    found = []
    for e in sorted((e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"]):
        launch = launches.get(e["args"].get("correlation"))
        inside = [] if launch is None else [o for o in ops if _within(launch, o)]
        op = max(inside, key=lambda o: (o["ts"], -o["dur"]))["name"] if inside else ""
        kind = {"kernel": "kernel", "gpu_memset": "memset"}.get(e["cat"], "copy")
        name = e["name"]
        if kind == "copy":
            kind, name = name.split(" (")[0][7:], name.split("(")[1][:-1]
        found.append((kind, re.sub(r"<.*|\(.*", "", name.replace("void ", ""))[:60] if kind == "kernel" else name,
                      e["args"].get("bytes", 0), f"{e['dur']:.1f}", op))  # fmt: skip
    return found


def _within(launch: dict[str, Any], op: dict[str, Any]) -> bool:
    return op["tid"] == launch["tid"] and op["ts"] <= launch["ts"] <= op["ts"] + op["dur"]


def measure(program: Callable[[str], Any], d: str = "cuda") -> dict[str, Any]:
    """Run a program twice; return the second run's copies, kernels, memsets, waits (CUPTI) and peak of allocated memory."""
    from torch.profiler import ProfilerActivity, profile

    program(d)
    torch.cuda.synchronize()
    gc.collect()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = program(d)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    result = None
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        result = program(d)
        torch.cuda.synchronize()
    path = os.path.join(tempfile.gettempdir(), "programs_more_trace.json")
    profiler.export_chrome_trace(path)
    with open(path) as file:
        trace = json.load(file)
    events = device_events(trace)
    copies = collections.Counter((k, b, n) for k, n, b, _, _ in events if k not in ("kernel", "memset"))
    by_op = collections.Counter((op, k, n, b) for k, n, b, _, op in events)
    waits = collections.Counter(
        e["name"] for e in trace["traceEvents"] if e.get("cat") == "cuda_runtime" and "Synchronize" in e["name"]
    )
    return {
        "copies": sorted([k, b, n, count] for (k, b, n), count in copies.items()),
        "kernels": sum(k == "kernel" for k, *_ in events),
        "memsets": sum(k == "memset" for k, *_ in events),
        "syncs": dict(waits),
        "peak_allocated": peak,
        "by_op": [[*key, count] for key, count in by_op.items()],
        "value": result if isinstance(result, bool | int | float) else None,
    }


def main(path: str, pattern: str = "") -> None:
    """Measure the programs whose names match `pattern` on the first CUDA GPU, and write the results to `path`."""
    import transformers

    results: dict[str, Any] = {}
    meta = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "transformers": transformers.__version__}
    for name, program in ((n, p) for n, p in PROGRAMS.items() if re.search(pattern, n)):
        try:
            results[name] = measure(program)
        except Exception as error:
            results[name] = {"error": repr(error)[:300]}
            print(name, results[name]["error"], flush=True)
        with open(path, "w") as file:
            json.dump({**meta, "programs": results}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
