"""Figures and tables of the guides, computed from the records under toolkit/bench/results and from the package.

A guide writes `{{ memory.real_peak }}` in its text, or `{{ table_kernels }}` on a line of its own. A name that does not exist
fails the build, so that no guide repeats a measured number by hand.
"""

from __future__ import annotations

import collections
import inspect
import json
import math
import re
import statistics
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import online

import toolkit as tk
from tests.testing.more_regressions import HARMLESS
from toolkit.bench.captured_steps import compare
from toolkit.bench.published import CLAIMS, EXECUTORCH_20286, LLAMA_CPP, LLAMA_CPP_SOURCE
from toolkit.core.units import bandwidth_text, bytes_text
from toolkit.decode.loop import AHEAD
from toolkit.kernels.kv_codes import KV_SCHEMES
from toolkit.models.shapes import SHAPES
from toolkit.trace.shipped import shipped_names
from toolkit.ui.figures.kernel_table import kernel_table, step_times

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "toolkit" / "bench" / "results"
KINDS = ("h2d", "d2h", "d2d")
MiB, GiB = 1 << 20, 1 << 30
EXPORTS = ("Gemma 4 31B", "Gemma 4 31B", "Qwen3.5 35B-A3B", "Gemma 4 31B, an earlier commit")
LOADS = {
    "h200_load_gguf_gemma4-31b": "Gemma 4 31B, GGUF Q4_K_M",
    "h200_load_gguf_qwen3.5-35b-a3b": "Qwen3.5 35B-A3B, GGUF Q4_K_M",
    "h200_load_random_gemma4-31b": "`random/gemma4-31b`, `{scheme}`, drawn on the GPU",
    "h200_load_random_qwen3-8b": "`random/qwen3-8b`, bf16, drawn on the GPU",
    "h200_load_random_qwen3.5-35b-a3b": "`random/qwen3.5-35b-a3b`, `{scheme}`, drawn on the GPU",
}


def record(name: str) -> dict[str, Any]:
    """Return a record under toolkit/bench/results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(name: str) -> str:
    """Return where a record comes from: date, GPU, versions, commit, file."""
    made = record(name)
    gpu = made.get("gpu") or made.get("properties", {}).get("name") or "CPU"
    virtual = "virtual " if str(made.get("device", "")).startswith("virtual") else ""
    commit = f", commit {made['commit'][:7]}" if made.get("commit") else ""
    return f"{virtual}{gpu}, PyTorch {made['torch']}, {made['date']}{commit}: `toolkit/bench/results/{name}.json`"


def span(values: Iterable[float], digits: int = 0) -> str:
    """Return "3" or "3 to 5"."""
    ordered = sorted(values)
    low, high = (f"{value:.{digits}f}" for value in (ordered[0], ordered[-1]))
    return low if low == high else f"{low} to {high}"


def copies(model: str) -> str:
    """Return the table of copies and step times of a demo model, modelled and measured."""
    virtual, real = (record(f"{name}_decode_copies{model}")["strategies"] for name in ("virtual_h200", "h200"))
    rows = []
    for name, mine in virtual.items():
        theirs = real[name]
        crossed = [
            ", ".join(f"{one['total'][kind]['count']} ({one['total'][kind]['bytes']:,} B)" for one in (mine, theirs))
            for kind in KINDS
        ]
        steps = [mine["ms_per_step"], theirs["ms_per_step"]]
        rows.append([f"`{name}`", *crossed, *(f"{ms:.3f}" for ms in steps), f"{steps[0] / steps[1]:.2f}"])
    head = ["strategy", "H2D modelled, measured", "D2H", "D2D", "ms per step, modelled", "measured", "ratio"]
    return table(head, rows)


def captured_steps() -> dict[str, str]:
    """Return the table of captured decode steps, modelled and measured, and by how much they differ."""
    virtual, real = record("virtual_h200_captured_steps"), record("h200_captured_steps")
    steps = compare(virtual, real)
    rows = [
        [f"`{model}`", f"{prompt:,}", f"{measured_ms:.2f}", f"{modelled_ms:.2f}", f"{modelled_ms / measured_ms:.2f}"]
        for model, prompt, modelled_ms, measured_ms in steps
    ]
    head = ["model", "prompt", "ms, measured", "ms, modelled", "ratio"]
    off = [100 * abs(modelled_ms / measured_ms - 1) for _, _, modelled_ms, measured_ms in steps]
    return {"table": table(head, rows), "at_most": f"{math.ceil(max(off))}", "steps": str(len(steps))}


def step_experiments() -> str:
    """Return the table of changes that were tried in captured steps, and by how much each made the step longer."""
    rows = []
    for row in record("h200_step_experiments")["rows"]:
        cells = []
        for tokens in ("64", "8192"):
            ms, without = row["ms"][tokens], row.get("without", {}).get(tokens)
            cells.append(f"{ms:.2f} ms" + (f" ({100 * (ms / without - 1):+.1f} %)" if without else ""))
        rows.append([row["change"], *cells])
    return table(["change", "after 64 tokens", "after 8,192 tokens"], rows)


def products_send() -> str:
    """Return the table of models on two GPUs whose products send their results, and of the same models without that."""
    rates: dict[str, dict[bool, list[float]]] = {}
    for row in record("h200x2_products_send")["rows"]:
        rates.setdefault(row["model"].removeprefix("random/"), {})[row["products_send"]] = row["tok_per_s"]
    rows = [
        [model, span(each[False]), span(each[True]), f"{100 * (max(each[True]) / max(each[False]) - 1):+.1f} %"]
        for model, each in rates.items()
    ]
    return table(["model", "tok/s before", "tok/s", "gain"], rows)


def sums_received() -> str:
    """Return the table of changes that let the launches after products of several GPUs receive their results."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in record("h200x2_sums_received")["rows"]:
        found.setdefault(row["change"], {})[row["model"].removeprefix("random/")] = row["tok_per_s"]
    models = list(dict.fromkeys(model for each in found.values() for model in each))
    rows = [[change, *(span(each[model]) if model in each else "" for model in models)] for change, each in found.items()]
    return table(["change", *(f"{model}, tok/s" for model in models)], rows)


RANK_RUNS = {
    "untuned": "no shapes of divided models have timings of their own",
    "": "12 of 27 shapes have timings, alone; products and experts have none",
    "ahead": "norms load a part of the next matrix",
    "in_step": "Gemma 4 31B is tuned in a step",
    "new_kernels": "kernels of experts and delta nets have fewer instructions",
    "sent": "products send their results to the other GPU",
    "received": "norms and experts receive the results; delta nets return 8 bits",
    "tuned": "delta nets of 16 heads are tuned in a step; the launch that joins the logits converts them",
}


def rank_runs() -> str:
    """Return the table of runs of the benchmark of two H200s, each after another change."""
    rows = []
    for name, change in RANK_RUNS.items():
        models = record(f"h200x2_ranks_{name}".rstrip("_"))["models"]
        rates = {(row["model"], row["ranks"]): row["tok_per_s"]["cuda-graph"] for row in models}
        cells = [
            f"{rates[model, 2]:,.0f}" + (f" ({rates[model, 2] / rates[model, 1]:.2f}x)" if (model, 1) in rates else "")
            for model in dict.fromkeys(model for model, _ in rates)
        ]
        rows.append([change, *cells])
    return table(["new in this run", "Gemma 4 31B, tok/s", "Qwen3.5-35B-A3B, tok/s"], rows)


def carveouts() -> tuple[str, str]:
    """Return the tables of steps whose attention, or one of whose products, prefers a share of shared memory."""
    made = record("h200_carveouts")
    shares: dict[int, list[str]] = {}
    for row in made["attention_by_share"]:
        shares.setdefault(row["share"], []).append(f"{row['ms']:.2f} ms ({100 * (row['ms'] / row['without'] - 1):+.1f} %)")
    products: dict[tuple[str, str], list[str]] = {}
    for row in made["products"]:
        name = row["model"].removeprefix("random/"), row["product"]
        products.setdefault(name, []).append(f"{100 * (row['ms'] / row['without'] - 1):+.1f} %")
    tokens = list(dict.fromkeys(row["prompt"] for row in made["attention_by_share"]))
    order = sorted(range(len(tokens)), key=tokens.__getitem__)
    rows = [[f"{share} %", *(cells[i] for i in order)] for share, cells in sorted(shares.items())]
    asked = [f"{share} %" for share in dict.fromkeys(row["share"] for row in made["products"])]
    return (
        table(["preferred", *(f"after {tokens[i]:,} tokens" for i in order)], rows),
        table(["model", "product", *asked], [[*name, *cells] for name, cells in products.items()]),
    )


def prompt_lengths() -> str:
    """Return the table of first tokens by the length of the prompt, before tiles ended otherwise and since."""
    rows = [
        [row["model"].removeprefix("random/"), f"{row['tokens']:,}", f"{row['before_ms']:.1f}", f"{row['ms']:.1f}"]
        for row in record("h200_prompt_lengths")["rows"]
    ]
    return table(["model", "prompt, tokens", "before, ms", "now, ms"], rows)


def first_runs() -> str:
    """Return the table of the first generation of a process, before kernels were compiled ahead and since."""
    found = {(row["model"], row["kernel_cache"], row["commit"]): row["runs"][0] for row in record("h200_first_runs")["rows"]}
    rows = []
    for model, cache, commit in found:
        if commit == "e74fb72":
            cells = [found[model, cache, each] for each in ("4b480df", commit)]
            seconds = [f"{cell['first_ms'] / 1000:.1f}, {cell['all_ms'] / 1000:.1f}" for cell in cells]
            rows.append([model.removeprefix("random/"), cache, *seconds])
    return table(["model", "Triton's cache", "before, s", "compiled ahead, s"], rows)


def kernels() -> str:
    """Return the table of kernels against their hardware limit."""
    rows, made = [], record("h200_kernels")
    for row in made["rows"]:
        others = "; ".join(f"{name} {us:.1f}" for name, us in row.get("others_us", {}).items())
        aim = row["at_least_percent"] or "-"
        limit = "read bandwidth" if row["of"] == "bandwidth" else "bf16 matmul rate"
        sizes = dict(part.split("=") for part in row["key"].split())
        problem = f"{row['shape']} ({sizes['n']} × {sizes['k']}, {sizes['scheme']})" if "n" in sizes else row["shape"]
        found = f"{row['us']:.1f}", limit, f"{row['percent']:.1f}", aim, others or "-", row.get("date", made["date"])
        rows.append([f"`{row['kernel']}`", problem, *found])
    return table(["kernel", "problem", "µs", "limit", "% of the limit", "aim, %", "other libraries, µs", "measured"], rows)


def read_rates_8_bits() -> str:
    """Return the slowest and the fastest read bandwidth that rows with "x in 8 bits" are compared with."""
    rates = [row["read_bytes_per_s"] for row in record("h200_kernels")["rows"] if "x in 8 bits" in row["shape"]]
    return f"{min(rates) / 1e9:,.0f} to {bandwidth_text(max(rates))}"


def quantized_caches() -> dict[str, str]:
    """Return the times of attention on quantized caches of 131,072 slots in a layer of Gemma 4 31B, and captured steps."""
    tuned = json.loads((ROOT / "toolkit" / "tune" / "tuned" / "h200.json").read_text(encoding="utf-8"))["kernels"]
    rate, slots, kv_heads, head_dim, key_dim = speed_records()[0]["read_bytes_per_s"], 131_072, 4, 512, 128
    found = {"plain_us": f"{1e6 * slots * kv_heads * (head_dim + key_dim) * 2 / rate:.0f}"}
    for name, scheme in KV_SCHEMES.items():
        sizes = f"heads=32 kv_heads={kv_heads} head_dim={head_dim} slots={slots} window=0 dtype=bfloat16 scaled=False key_dim=0"
        rows = tuned["attention_codes"][f"{sizes} quantised=True codes={name}"].values()
        us = min(row["us"] for row in rows if row["verdict"] == "ok")
        share = slots * kv_heads * scheme.bytes_per_token(head_dim) / us * 1e6 / rate
        found |= {f"{name}_us": f"{us:.0f}", f"{name}_percent": f"{100 * share:.0f}"}
    steps = {(row.get("kv", "plain"), row["prompt"]): row["ms"] for row in record("h200_quantized_caches")["rows"]}
    found |= {f"{kv}_{prompt}_ms": f"{ms:.2f}" for (kv, prompt), ms in steps.items()}
    return found | {"int4_kept": f"{100 * steps['int4', 512] / steps['int4', 130_000]:.0f}"}


def shared_keys() -> str:
    """Return the table of captured steps with caches of whole keys, and of keys of which a cache holds a part."""
    rows = []
    for gpu in ("h200", "h100"):
        made = record(f"{gpu}_shared_keys")
        found: dict[int, dict[str, list[float]]] = {}
        for row in made["rows"]:
            found.setdefault(row["prompt"], {}).setdefault(row["keys"], []).append(row["ms"])
        for prompt, ms in found.items():
            whole, part = (statistics.median(ms[keys]) for keys in ("whole", "in part"))
            rows.append([made["gpu"], f"{prompt:,}", f"{whole:.2f} ms", f"{part:.2f} ms", f"{100 * (part / whole - 1):+.1f} %"])
    return table(["GPU", "tokens before", "whole keys", "a quarter of each key", "difference"], rows)


def loads() -> str:
    """Return the table of loading times and memory."""
    rows = []
    for name, title in LOADS.items():
        made = record(name)
        size = f" ({bytes_text(made['stored_bytes'])})" if made["stored_bytes"] else ""
        cells = [bytes_text(made[name]) for name in ("allocated_bytes", "peak_above_weights_bytes")]
        rows.append([title.format(**made) + size, f"{made['seconds']:.1f} s", *cells, bytes_text(made["host"]["own_bytes"])])
    return table(["model", "time", "weights on the GPU", "GPU peak above the weights", "host memory, no mapped files"], rows)


def exports() -> str:
    """Return the table of exports: memory and seconds per phase."""
    rows = []
    for title, made in zip(EXPORTS, record("h200_export")["exports"], strict=True):
        runs, spread = made["exports"], made["spread"]
        host, weights = spread["host_peak_bytes"], runs[0]["weights_bytes"]
        seconds = {name: [] for name in ("load", "trace", "compile", "weights")}
        for run in runs:
            found = {name: [p["seconds"] for p in run["phases"] if p["phase"].startswith(name)] for name in seconds}
            for name, values in found.items():
                seconds[name] += [sum(values)] if values else []
        phases = ", ".join(f"{name} {span(values)}" if values else f"{name} in compile" for name, values in seconds.items())
        rows.append([
            title, made["asked"]["kv"] or "bf16", len(runs), f"{max(spread['gpu_used_bytes']) / MiB:.0f} MiB",
            f"{max(spread['gpu_reserved_bytes']) / MiB:.0f} MiB", f"{span((n / GiB for n in host), 1)} GiB",
            f"{max(host) / weights:.2f}", phases,
        ])  # fmt: skip
    head = ["model", "cache", "runs", "GPU peak", "of it PyTorch's", "host peak", "host peak / weights", "seconds per phase"]
    return table(head, rows)


def package_steps() -> str:
    """Return the table of a package's and its model's time per decode step."""
    rows = []
    for title, made in zip(EXPORTS, record("h200_export")["exports"], strict=True):
        for name, found in made.get("package", {}).get("strategies", {}).items():
            times = f"{found['ms_per_step']:.1f}", f"{found['model_ms_per_step']:.1f}"
            same = "yes" if found["same_tokens"] else f"no, from token {found['tokens_until_another'] + 1} on"
            rows.append(
                [title, made["asked"]["kv"] or "bf16", f"`{name}`", *times, same, "yes" if found["same_copies"] else "no"]
            )
    return table(["model", "cache", "strategy", "package, ms", "model, ms", "same tokens", "same copies"], rows)


def speed_records() -> list[dict[str, Any]]:
    """Return the records of decode speed, by model and with those of real GPUs last."""
    found = [record(path.stem) for path in sorted(RESULTS.glob("*_speed_*.json"))]
    return sorted(found, key=lambda made: (made["model"], made["kv"] or "", made["clock"] == "measured"))


def speeds() -> str:
    """Return the table of tokens per second, next to llama.cpp's."""
    names = ("roundtrip", "double-buffered", "cuda-graph", "whole-loop")
    rows = {}
    for made in speed_records():
        others = LLAMA_CPP.get(made["model"], {}) if made["scheme"] == "q4_k_m" else {}
        for row in made["rows"]:
            if "strategies" not in row:
                continue
            found, context = row["strategies"], row["context"]
            nearest = min(others, key=lambda each: abs(each - context), default=0)
            rates = [_rate(found.get(name, {})) for name in names]
            share = max(one["bandwidth_percent"] for one in found.values() if "tok_per_s" in one)
            rows[made["model"], made["kv"] or "", context, made["clock"]] = [
                _short(made), f"{context:,}", made["clock"], *rates,
                f"{others[nearest]:.1f}" if nearest and abs(nearest - context) < 200 else "-",
                f"{row['limit_tok_per_s']:.0f}", f"{share:.0f} %",
            ]  # fmt: skip
    head = ["model", "context", "times", *(f"`{name}`" for name in names), "llama.cpp", "limit", "best"]
    return table(head, (rows[key] for key in sorted(rows)))


def prefills() -> str:
    """Return the table of measured prefills, and of the times until the first token."""
    names, rows = ("roundtrip", "cuda-graph", "whole-loop"), []
    for made in speed_records():
        for row in made["rows"] if made["clock"] == "measured" else ():
            if "prefill" not in row:
                continue
            found = row.get("strategies", {})
            firsts = [f"{1e3 * found[name]['first_token_s']:,.1f}" if name in found else "-" for name in names]
            rows.append((made["model"], made["kv"] or "", row["context"], _short(made), row["prefill"], firsts))
    head = ["model", "prompt", "prefill, tok/s", *(f"first token, `{name}`, ms" for name in names)]
    ordered = sorted(rows, key=lambda row: row[:3])
    return table(head, ([name, f"{n:,}", f"{made['tok_per_s']:,.0f}", *firsts] for _, _, n, name, made, firsts in ordered))


def _short(made: dict[str, Any]) -> str:
    """Return the name of a record's model, without "random/", and its cache."""
    return str(made["model"]).removeprefix("random/") + (f", {made['kv']} cache" if made["kv"] else "")


def _rate(found: dict[str, Any]) -> str:
    """Return a strategy's rate, with the slowest and the fastest run if they differ by more than 10 %."""
    if "tok_per_s" not in found:
        return "-"
    runs = f" ({span(found['tok_per_s_all'], 1)})" if found["spread"] > 0.1 else ""
    return f"{found['tok_per_s']:.1f}{runs}"


def step_breakdowns() -> str:
    """Return where the time of one captured step goes, a table per model: measured, or modelled if nothing was measured."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for path in sorted(RESULTS.glob("*_steps_*.json"), reverse=True):  # those of the virtual GPU come first
        made = record(path.stem)
        found[made["model"]] = path.stem, made
    parts = []
    for model, (name, made) in sorted(found.items()):
        head, rows = kernel_table(made)
        steps = [
            f"After {row['context']:,} tokens, a step takes {step_times(row['breakdown'])}."
            for row in made["rows"] if "kernels" in row.get("breakdown", {})
        ]  # fmt: skip
        parts.append(f"`{model}`, {made['clock']} ({provenance(name)}). {' '.join(steps)}\n\n{table(head, rows)}")
    return "\n\n".join(parts)


def traces() -> str:
    """Return the table of the traces that ship with the package."""
    found: dict[tuple[str, str], list[str]] = {}
    for name in shipped_names():
        gpu, model, strategy = name.split("/")
        found.setdefault((gpu, model), []).append(strategy)
    rows = []
    for (gpu, model), names in found.items():
        meta = tk.open_trace(f"{gpu}/{model}/{names[0]}").meta
        made = f"{meta['gpu']}, PyTorch {meta['torch']}, {meta['date']}"
        rows.append([f"`{gpu}/{model}`", f"`{meta['model']}`", ", ".join(f"`{name}`" for name in names), made])
    return table(["name", "model", "strategies", "recorded"], rows)


def launches() -> dict[str, str]:
    """Return a table of steps that are launched kernel by kernel, and how far all modelled rates without graphs are off."""
    name, rows, off = "double-buffered", [], []
    for short in ("qwen3-8b", "gemma4-31b", "qwen3.5-35b-a3b"):
        virtual, real = (
            {row["context"]: row for row in record(f"{gpu}_speed_{short}")["rows"]} for gpu in ("virtual_h200", "h200")
        )
        for context, row in real.items():
            if name not in row["strategies"]:  # only those with graphs were measured
                continue
            both = [one["strategies"][name] for one in (row, virtual[context])]
            host = (f"{found['host_us_per_step']:,.0f}" for found in both)
            rows.append([f"`random/{short}`", f"{context:,}", f"{both[1]['kernels_per_step']:.0f}", *host, *map(_rate, both)])
            for each, found in row["strategies"].items():
                if tk.STRATEGIES[each].capture == "none":
                    ratio = virtual[context]["strategies"][each]["tok_per_s"] / found["tok_per_s"]
                    off.append(abs(ratio - 1))
    head = ["model", "context", "launches", "host µs per step, measured", "modelled", "tok/s, measured", "modelled"]
    return {"table": table(head, rows), "count": f"{len(off)}", "near": f"{sum(by <= 0.25 for by in off)}"}


def copies_claimed() -> str:
    """Return the copies of one generation that executorch states, and those of the toolkit's strategies."""
    rows = [
        [f"executorch: {one.change}", *("-" if n is None else n for n in (one.h2d, one.d2h, one.d2d))]
        for one in EXECUTORCH_20286
    ]
    made = record("h200_steps_qwen3-8b")["generation"]
    assert (made["prompt"], made["decode"]) == (19, 128), "the page says so"
    rows += [
        [f"`{name}`", *(f"{one[kind]['count']} ({one[kind]['bytes']:,} B)" for kind in ("h2d", "d2h", "d2d"))]
        for name, one in made["copies"].items()
    ]
    return table(["", "H2D", "D2H", "D2D"], rows)


def claims() -> str:
    """Return what other projects state, and the toolkit's own figures."""
    ours = {
        "context": _by_context(), "graph": _ratio("qwen3.5", "cuda-graph", "double-buffered"),
        "buffers": _ratio("qwen3-8b", "double-buffered", "position-on-device"), "export": _export_peak(),
    }  # fmt: skip
    return table(["pull request", "what it states", "here"], ([*CLAIMS[key], said] for key, said in ours.items()))


def _speed_of(model: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the GPU and the rows of a model's records: of the measured ones, if there are any."""
    made = [one for one in speed_records() if model in one["model"] and one["kv"] is None]
    clock = made[-1]["clock"]
    where = f"{'virtual ' if clock == 'modelled' else ''}H200, {clock}"
    return where, [row for one in made if one["clock"] == clock for row in one["rows"] if "strategies" in row]


def _by_context() -> str:
    made = record("h200_speed_gemma4-31b_int4")
    first, last = (row["strategies"]["cuda-graph"]["tok_per_s"] for row in made["rows"])
    contexts = [f"{row['context']:,}" for row in made["rows"]]
    return (
        f"`cuda-graph`, {made['kv']} cache: {first:.1f} tok/s at {contexts[0]} tokens, {last:.1f} at {contexts[1]}, so "
        f"{100 * last / first:.0f} % of it (H200, measured)"
    )


def _ratio(model: str, new: str, old: str) -> str:
    where, rows = _speed_of(model)
    both = [row["strategies"] for row in rows if {new, old} <= row["strategies"].keys()]
    runs = [[found[name]["tok_per_s_all"] for name in (new, old)] for found in both]
    times = [ratio for fast, slow in runs for ratio in (min(fast) / max(slow), max(fast) / min(slow))]
    return f"`{new}` is {span(times, 2)} times as fast as `{old}` (slowest and fastest runs; {where})"


def _export_peak() -> str:
    made = record("h200_export")["exports"][0]
    return f"{max(made['spread']['gpu_used_bytes']) / MiB:.0f} MiB, with a bf16 cache (H200, measured)"


def memory_cost() -> str:
    """Return the table of the time that measuring memory adds to a decode loop."""
    rows = []
    for made in record("h200_memory_cost")["models"]:
        shares = [f"{100 * made[which]['overhead']:.1f} %" for which in ("with_lines", "without_lines")]
        rows.append([f"`{made['model']}`", f"{made['plain_s']:.2f} s", *shares, f"{1000 * made['empty_block_s']:.1f} ms"])
    return table(
        ["model, 40 steps", "without measuring", "with lines", "`lines=False`", "begin and end of an empty block"], rows
    )


def strategies() -> str:
    """Return the table of decode strategies."""
    return table(["strategy", "copies per decode step"], ([f"`{name}`", one.crosses] for name, one in tk.STRATEGIES.items()))


def strategy_fields() -> str:
    """Return the table of the fields of the decode strategies."""
    names = ("token", "position", "sampler", "readback", "capture")
    rows = ([f"`{name}`", *(f"`{getattr(one, field)}`" for field in names)] for name, one in tk.STRATEGIES.items())
    return table(["strategy", *(f"`{name}`" for name in names)], rows)


def gpus() -> str:
    """Return the table of the GPU catalogue."""
    rows = [
        [f"`{key}`", card.name, "{}.{}".format(*card.compute_capability), f"{card.memory_bytes / 2**30:.1f}",
         bandwidth_text(card.bandwidth_bytes_per_s), card.sms, f"{card.bf16_flops / 1e12:,.0f}"]
        for key, card in tk.GPUS.items()
    ]  # fmt: skip
    return table(["key", "name", "capability", "memory, GiB", "bandwidth", "SMs", "bf16 TFLOPS, dense"], rows)


def packages() -> str:
    """Return the table of packages, from the tree in the README."""
    tree = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree, "README.md has no layout tree"
    rows = re.findall(r"^ {4}(\w+)/ +(.*)$", tree[1], re.MULTILINE)
    return table(["package", "purpose"], ([f"`toolkit/{name}`", purpose] for name, purpose in rows))


def magics() -> dict[str, str]:
    """Return the help texts of the magics."""
    from toolkit.ui.magics import copies as copy_magics
    from toolkit.ui.magics import memory as memory_magics

    texts = {
        "magic_copies": copy_magics.CopyMagics.copies.__doc__, "magic_memory": memory_magics.USAGE,
        "magic_memory_cell": memory_magics.MemoryMagics.memory.__doc__,
    }  # fmt: skip
    return {name: f"```text\n{inspect.cleandoc(text or '')}\n```" for name, text in texts.items()}


def memory_figures() -> dict[str, str]:
    """Return the figures of Gemma 4 31B's memory on a real and on the virtual H200."""
    real, virtual, cells = record("h200_memory"), record("virtual_h200_memory"), record("h200_memory_cells")
    assert real["load"]["peak_bytes"] == virtual["load"]["peak_bytes"], "the guide says that loading is equal to the byte"
    assert not cells["unequal_blocks"], "the guide says that all blocks are equal"
    return {
        "real_peak": f"{real['peak_bytes'] / GiB:.2f} GiB", "virtual_peak": f"{virtual['peak_bytes'] / GiB:.2f} GiB",
        "off": f"{100 * (virtual['peak_bytes'] / real['peak_bytes'] - 1):.2f} %",
        "weights": f"{real['load']['peak_bytes'] / GiB:.2f} GiB", "prompt": f"{real['prompt_tokens']:,}",
        "steps": str(real["steps"]), "cells": str(cells["cells"]), "blocks": str(cells["blocks"]),
    }  # fmt: skip


def plan_figures() -> dict[str, str]:
    """Return the plan of the run that `memory_figures` measured, without CUDA's context."""
    real = record("h200_memory")
    plan = tk.plan(real["model"], "h200", context=real["context"], scheme=real["scheme"])
    weights, cuda = (plan.run[0].parts[part] for part in ("weights", "CUDA"))
    return {"weights": f"{weights / GiB:.2f} GiB", "peak": f"{(plan.run_bytes - cuda) / GiB:.2f} GiB"}


def snapshot_figures() -> dict[str, str]:
    """Return the figures of opening a snapshot of 1 GiB."""
    made = record("snapshot_1gib")
    return {
        "size": f"{made['file_bytes'] / GiB:.2f} GiB", "seconds": f"{made['seconds']:.0f}", "rows": f"{made['rows']:,}",
        "peak": f"{made['peak_bytes'] / GiB:.1f} GiB", "cpus": str(made["cpus"]),
    }  # fmt: skip


def export_figures() -> dict[str, str]:
    """Return the figures of exports that the guide's prose gives."""
    gemma, _, qwen, _ = (made.get("package", {}) for made in record("h200_export")["exports"])
    runs = [made["exports"] for made in record("h200_export")["exports"]]
    hosts = [made[0] for made in runs]
    traced = [
        max(phase["host_peak_bytes"] for run in made for phase in run["phases"] if phase["phase"] == "trace")
        for made in (runs[0], runs[2])
    ]
    return {
        "gemma_load": f"{gemma['load_s']:.0f}", "qwen_load": f"{qwen['load_s']:.0f}",
        "qwen_another": str(qwen["strategies"]["roundtrip"]["tokens_until_another"] + 1),
        "qwen_off": f"{100 * qwen['likeness']['package']['off']:.0f} %",
        "qwen_own_off": f"{100 * qwen['likeness']['model in other parts']['off']:.0f} %",
        "gemma_host": f"{max(p['planned_host_bytes'] for p in hosts[0]['phases']) / GiB:.1f} GiB",
        "qwen_host": f"{max(p['planned_host_bytes'] for p in hosts[2]['phases']) / GiB:.1f} GiB",
        "traced": " and ".join(f"{n_bytes / GiB:.1f}" for n_bytes in traced),
        "read_ms": f"{1000 * hosts[0]['weights_bytes'] / record('h200_kernels')['read_bytes_per_s']:.1f}",
    }  # fmt: skip


def program_figures() -> dict[str, Any]:
    """Compare the records of the programs in tests/programs: a real H200, and virtual ones before and after."""
    folder = ROOT / "tests" / "programs"
    names = ("h200", "virtual_h200_before", "virtual_h200", "virtual_h200_without_cudnn")
    real, before, after, without = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    calls = json.loads((ROOT / "tests" / "golden" / "h200_convolutions.json").read_text())
    whole, drawn = calls["counted"]["all"], calls["counted"]["random"]
    figures = ("copies", "peak_bytes")

    def equal_in(virtual: dict[str, Any], figure: str) -> collections.Counter[str]:
        names = [name for name, found in real["programs"].items() if virtual["programs"][name].get(figure) == found[figure]]
        return collections.Counter(name.split(".")[0] for name in names)

    equal = {(when, f): equal_in(record, f) for when, record in (("before", before), ("after", after)) for f in figures}
    classes = collections.Counter(name.split(".")[0] for name in real["programs"])
    cells = [(when, figure) for figure in figures for when in ("before", "after")]
    rows = [[name, count, *(equal[cell][name] for cell in cells)] for name, count in classes.items()]
    rows.append(["**all**", classes.total(), *(equal[cell].total() for cell in cells)])
    return {
        "copies": str(equal["after", "copies"].total()), "copies_before": str(equal["before", "copies"].total()),
        "peak": str(equal["after", "peak_bytes"].total()), "peak_before": str(equal["before", "peak_bytes"].total()),
        "torch": real["torch"].split("+")[0], "torch_here": after["torch"].split("+")[0], "date": real["date"],
        "peak_without_cudnn": str(equal_in(without, "peak_bytes").total()), "calls": f"{whole['calls']:,}",
        "workspaces": f"{100 * whole['equal'] / whole['calls']:.1f} %",
        "by_cudnn": f"{100 * whole['cudnn_alone'] / whole['calls']:.1f} %",
        "drawn": f"{drawn['calls']:,}", "drawn_equal": f"{100 * drawn['equal'] / drawn['calls']:.1f} %",
        "table": table(["class", "programs", "same copies before", "after", "same peak before", "after"], rows),
    }  # fmt: skip


def regression_figures() -> dict[str, Any]:
    """Return what the pytest plugin caught of the edits in tests/testing with its earlier and present rules, and as tables."""

    def results(name: str) -> dict[str, Any]:
        text = (ROOT / "tests" / "testing" / f"{name}.json").read_text(encoding="utf-8")
        return dict(json.loads(text)["regressions"])

    def counts(found: dict[str, Any], names: list[str]) -> dict[str, str]:
        return {"number": str(len(names))} | {key: str(sum(found[name][key] for name in names)) for key in ("caught", "right")}

    harmless = [edit.name for edit in HARMLESS]
    made: dict[str, Any] = {"first": counts(results("regressions_first"), list(results("regressions_first")))}
    for key, file in (("seen", "regressions"), ("more", "more_regressions")):
        before, after = results(f"{file}_before"), results(file)
        names = [name for name in after if name not in harmless]
        words = [
            ["yes" if run[name][k] else "**no**" for run in (before, after) for k in ("caught", "right")] for name in names
        ]
        made[key] = {
            "before": counts(before, names), "after": counts(after, names),
            "table": table(
                ["regression of the examples", "caught before", "right line before", "caught", "right line"],
                [[name, *row] for name, row in zip(names, words, strict=True)],
            ),
        }  # fmt: skip
    made["harmless"] = counts(results("more_regressions"), harmless)
    return made


def substitutions() -> dict[str, Any]:
    """Return what the guides may name between double braces."""
    ratios = {}
    for key, suffix in (("qwen3", ""), ("gemma4", "_gemma4"), ("qwen35", "_qwen3.5-moe")):
        virtual, real = (record(f"{name}_decode_copies{suffix}")["strategies"] for name in ("virtual_h200", "h200"))
        ratios[key] = span((100 * (one["ms_per_step"] / real[name]["ms_per_step"] - 1) for name, one in virtual.items()))
    read_rate = record("h200_kernels")["read_bytes_per_s"]
    waits = [
        record(f"{name}_decode_copies")["strategies"]["roundtrip"]["host_wait_ms_per_step"] for name in ("virtual_h200", "h200")
    ]
    return {
        "table_copies": copies(""), "table_copies_gemma4": copies("_gemma4"), "table_copies_qwen35": copies("_qwen3.5-moe"),
        "table_kernels": kernels(), "codes": quantized_caches(), "table_loads": loads(), "table_exports": exports(),
        "table_package_steps": package_steps(),
        "table_memory_cost": memory_cost(), "table_strategies": strategies(), "table_gpus": gpus(),
        "random_models": ", ".join(f"`{name}`" for name in SHAPES),
        "table_packages": packages(), "table_strategy_fields": strategy_fields(), "ahead": str(AHEAD),
        "memory": memory_figures(), "captured": captured_steps(),
        "table_speeds": speeds(), "table_prefills": prefills(), "table_steps": step_breakdowns(), "table_traces": traces(),
        "table_step_experiments": step_experiments(), "table_prompt_lengths": prompt_lengths(),
        "table_products_send": products_send(),
        "table_sums_received": sums_received(), "table_rank_runs": rank_runs(),
        "table_shared_keys": shared_keys(),
        **dict(zip(("table_carveouts", "table_product_carveouts"), carveouts(), strict=True)),
        "table_first_runs": first_runs(),
        "launches": launches(),
        "table_copies_claimed": copies_claimed(),
        "table_claims": claims(), "llama_cpp": LLAMA_CPP_SOURCE,
        "speed_rate": bandwidth_text(speed_records()[0]["read_bytes_per_s"]),
        "programs": program_figures(), "regressions": regression_figures(),
        "plan": plan_figures(), "snapshot": snapshot_figures(), "exports": export_figures(), "ratios": ratios,
        "waits": {"modelled": f"{1000 * waits[0]:.1f}", "measured": f"{1000 * waits[1]:.1f}"},
        "read_rate": bandwidth_text(read_rate),
        "limit_higher": f"{100 * (read_rate / speed_records()[0]['read_bytes_per_s'] - 1):.0f} %",
        "read_rates_8_bits": read_rates_8_bits(),
        "online": online.links(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]),
        **magics(),
        "made": {path.stem.replace(".", "_").replace("-", "_"): provenance(path.stem) for path in RESULTS.glob("*.json")},
    }  # fmt: skip
