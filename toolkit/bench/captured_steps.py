"""Time one captured decode step of published models, on a real GPU or on a virtual one.

    python -m toolkit.bench.captured_steps --device cuda --out measured.json
    python -m toolkit.bench.captured_steps --device virtual:h200 --out virtual.json
    python -m toolkit.bench.captured_steps --tune
    python -m toolkit.bench.captured_steps --model random/gemma4-31b --prompts 512,130000 --kv plain,int8,k4v8,int4
    torchrun --nproc-per-node 2 -m toolkit.bench.captured_steps --model random/gemma4-31b --tune

With `--tune`, the configs that are fastest alone are tried in the step first, and the choices are stored
(`toolkit.tune.in_step`): all kernels in the steps after the shortest prompts, and attention in the others.

The models have the real shapes and random weights in q4_k_m, at batch size 1. The step embeds the token, runs the layers on a
cache with the prompt and 64 more positions, chooses the most likely token, and advances the position. With torchrun, the
models are divided among its processes, and a time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from toolkit.bench.record import about, listed_names, listed_numbers, out_file, run_command, write_record
from toolkit.core.distributed import Shard, join, latest, started
from toolkit.core.errors import DeviceError
from toolkit.gpu.device import Device
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.device import VirtualGpu
from toolkit.kernels.registry import find_kernel
from toolkit.loading.loader import load
from toolkit.models.model import Model
from toolkit.ops.zeros import COUNTERS, own_counters
from toolkit.tune.cards import find_card
from toolkit.tune.in_step import tune_in
from toolkit.tune.store import words

PROMPTS = {
    "random/qwen3-8b": (64, 8192), "random/gemma4-31b": (64, 8192, 32640), "random/qwen3.5-35b-a3b": (64, 8192, 32640),
}  # fmt: skip
SCHEME = "q4_k_m"
PLAIN = "plain"  # of keys and values: the model's dtype
MORE = 64  # positions of the cache after the prompt
REPLAYS = 50  # per timing; virtual GPUs need only one, because all are alike
TIMINGS = 5
WARM_UP_S = 1.0  # of replays before the first timing: after a pause, steps of an H200 took 2.4 % longer


def bench(
    device: str,
    prompts: Mapping[str, Sequence[int]] | None = None,
    tuned: Sequence[str] | None = None,
    kv: Sequence[str | None] = (None,),
) -> dict[str, Any]:
    """Return the record of all steps (JSON-able). `prompts` maps the names of models to the lengths of their prompts.

    Kernels with the names `tuned`, () for all, are tuned in the steps first, except with None. `kv` are the formats of keys and
    values; None is the model's dtype, and rows with another format name it.
    """
    gpu, shard, rows = open_device(device), join(started()), []
    for name, lengths in (prompts or PROMPTS).items():
        with torch.no_grad(), gpu.sizes_only() if isinstance(gpu, VirtualGpu) else nullcontext():
            model = load(name, device=gpu, scheme=SCHEME, progress=False, tensor_parallel=shard.ranks)
            if tuned is not None:
                for n, length in enumerate(sorted(lengths)):
                    _tune(gpu, shard, model, name, length, ("attention_decode",) if n else tuned)
            for n, form in ((n, form) for form in kv for n in lengths):
                named = {"model": name, "prompt": n} | ({"kv": form} if form else {})
                named |= {"ranks": shard.ranks} if shard.ranks > 1 else {}
                rows.append({**named, **_timed(gpu, model, n, shard.ranks, warm_up_s=WARM_UP_S, kv=form)})
        del model
    return {**about(device), "scheme": SCHEME, "rows": rows}


def _tune(gpu: Device, shard: Shard, model: Model, name: str, prompt: int, kernels: Sequence[str]) -> None:
    """Tune the configs of `kernels`, by default all, in the step after `prompt` tokens, and print the trials."""
    card = find_card(gpu.torch)
    if card is None or not card.present:
        raise DeviceError("tuning a step", f"{gpu.torch} has no measured times", 'Give --device "cuda"')

    def time_ms() -> float:
        return float(_timed(gpu, model, prompt, shard.ranks, timings=3, replays=15)["ms"])

    what = f"{name} on {shard.ranks} GPUs" if shard.ranks > 1 else name
    for trial in tune_in(f"a step of {what} after {prompt} tokens", time_ms, card, kernels):
        if shard.rank == 0:
            times = f"{trial.before_ms:.4f} -> {trial.ms:.4f} ms"
            note = " better" if trial.better else ""
            print(f"{times} {trial.kernel} {trial.shape}: {words(trial.config)}{note}", flush=True)


def _timed(
    gpu: Device, model: Model, prompt: int, ranks: int, timings: int = TIMINGS, replays: int = REPLAYS,
    warm_up_s: float = 0.0, kv: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Return the milliseconds of a captured step after `prompt` tokens on the slowest rank, and the nodes of its graph."""
    room = prompt + MORE
    cache = model.new_cache(room, kv)
    token, position = (torch.full((1,), value, dtype=torch.int64, device=gpu.torch) for value in (0, prompt))

    counts = torch.zeros(COUNTERS, dtype=torch.int32, device=gpu.torch)

    def step() -> None:
        with own_counters(counts):
            hidden = model.advance(model.embed(token.view(1, 1)), position, cache, room)
        token.copy_(model.logits(hidden).view(-1).argmax().view(1))
        position.add_(1)

    modelled = gpu.clock == "modelled"
    if not modelled:
        step()  # compiles the kernels
    graph = gpu.capture(step)
    times, warmed_ms = [], 0.0
    try:
        while not modelled and warmed_ms < warm_up_s * 1e3:
            position.fill_(prompt)
            warmed_ms += replays * _replay_ms(gpu, graph, replays, ranks)
        for _ in range(1 if modelled else timings):
            position.fill_(prompt)
            times.append(_replay_ms(gpu, graph, 1 if modelled else replays, ranks))
    finally:
        graph.free()
        cache.free()
    return {"ms": statistics.median(times), "nodes": graph.nodes}


def _replay_ms(gpu: Device, graph: Any, replays: int, ranks: int) -> float:
    """Return the milliseconds of one replay, on all ranks the same: those of the slowest one. They begin together."""
    gpu.sync()
    if ranks > 1:
        latest(0)  # a barrier
    start = gpu.now_ns()
    for _ in range(replays):
        graph.replay()
    gpu.sync()
    took_ns = gpu.now_ns() - start
    return (latest(took_ns) if ranks > 1 else took_ns) / replays / 1e6


def compare(modelled: dict[str, Any], measured: dict[str, Any]) -> list[tuple[str, int, float, float]]:
    """Return (model, prompt, modelled ms, measured ms) for each step of `measured` that `modelled` has, too.

    Steps with other formats of keys and values, or on other numbers of GPUs, are other steps.
    """
    times = {_step(row): row["ms"] for row in modelled["rows"]}
    both = [row for row in measured["rows"] if _step(row) in times]
    return [(row["model"], row["prompt"], times[_step(row)], row["ms"]) for row in both]


def _step(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["model"], row["prompt"], row.get("kv"), row.get("ranks", 1)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m toolkit.bench.captured_steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda", help='"cuda" (default), "virtual:h200"...')
    parser.add_argument("--model", choices=list(PROMPTS), help="only this one")
    parser.add_argument(
        "--prompts", type=listed_numbers, help="numbers of prompt tokens, separated by commas (default: those of the records)"
    )
    parser.add_argument(
        "--kv", type=listed_names, default=PLAIN, help=f'formats of the cache, separated by commas: "{PLAIN}", "int8"...'
    )
    parser.add_argument("--tune", action="store_true", help="tune the kernels in the steps first")
    parser.add_argument("--kernels", type=listed_names, help="with --tune: only these, separated by commas")
    parser.add_argument("--out", type=out_file, help="write the record to this JSON file (default: print it)")
    options = parser.parse_args(arguments)
    prompts = {name: options.prompts or lengths for name, lengths in PROMPTS.items() if options.model in (None, name)}
    kv = [None if name == PLAIN else name for name in options.kv]
    kernels = [find_kernel(name).name for name in options.kernels or ()]
    if kernels and not options.tune:
        parser.error("--kernels needs --tune")
    tuned = kernels if options.tune else None
    record = bench(options.device, prompts, tuned, kv)
    if join(started()).rank == 0:
        write_record(record, options.out)
    return 0


if __name__ == "__main__":
    run_command(main)
