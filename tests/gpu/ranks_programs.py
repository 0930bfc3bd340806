"""What the ranks of `test_ranks.py` run, each in a process that torchrun starts.

    torchrun --nproc-per-node 2 -m tests.gpu.ranks_programs FOLDER DEVICE SECTION ...

Each section returns plain values, which a rank writes to FOLDER/SECTION-RANK.json. After an error, the process ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch

from tests.checkpoints import SHAPE, random_tensors, write_gguf
from toolkit import ops
from toolkit.bench.ranks import late_sums, slept_us
from toolkit.core.distributed import current, join, latest
from toolkit.decode.loop import generate
from toolkit.decode.strategies import STRATEGIES
from toolkit.exporting.loading import load_exported
from toolkit.gpu.opening import open_device
from toolkit.kernels.int4_matmul import INT4_MATMUL, MatmulShape
from toolkit.loading.loader import load
from toolkit.ops import exchange
from toolkit.ops.collectives import all_gather, all_reduce, share_of
from toolkit.ops.define import record_problems
from toolkit.trace.columns import KINDS
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import find_scheme

DEMOS = ("demo/qwen3", "demo/gemma4", "demo/qwen3.5-moe")
PROMPT = "The capital of France is"
SIZES = (1, 2, 3, 1000, 5376, 65_537, 131_072, 400_000)  # the last one goes through NCCL in all dtypes
PROMPT_IDS = (1, 2, 3)  # for a model without a tokenizer
LATE_US = 200.0


def bits(x):
    return hashlib.sha256(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def part(rank, size, dtype, seed):
    """The tensor of a rank, which the others compute, too."""
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(size, generator=made) * 3).to(dtype)


def sums(device):
    """Eager sums and joins against references, with the bits of the results."""
    shard, wrong, found = current(), [], []
    ranks = range(shard.ranks)
    for seed, (dtype, size) in enumerate((d, s) for d in exchange.DTYPES for s in SIZES):
        parts = [part(rank, size, dtype, seed) for rank in ranks]
        out = all_reduce(parts[shard.rank].to(device.torch), shard.ranks)
        wanted = torch.stack(parts).sum(0, dtype=torch.float32).to(dtype)
        if not torch.equal(out.cpu(), wanted):
            wrong.append(f"all_reduce {dtype} {size}: {(out.cpu().float() - wanted.float()).abs().max():.3g}")
        found.append(bits(out))
        sizes = [size + (rank % 2) for rank in ranks]
        for rows in (1, 3):
            parts = [part(rank, rows * sizes[rank], dtype, seed).view(rows, -1) for rank in ranks]
            for fp32 in (False, True):
                out = all_gather(parts[shard.rank].to(device.torch), sizes, fp32=fp32)
                if not torch.equal(out.cpu(), torch.cat(parts, 1).to(torch.float32 if fp32 else dtype)):
                    wrong.append(f"all_gather {dtype} {rows} x {size}, fp32={fp32}")
                found.append(bits(out))
    odd = torch.arange(10, dtype=torch.bfloat16, device=device.torch)[1:8]  # not aligned
    if not torch.equal(all_reduce(odd, shard.ranks), shard.ranks * odd):
        wrong.append("a tensor that is not aligned")
    return {"wrong": wrong, "bits": found, "why_not": exchange.links(device.torch).why_not}


def _publications(trace):
    """Return how many events there are by name and step, of those that end the steps of a loop."""
    names = [(name, int(step)) for name, step in zip(trace.text("name"), trace["step"], strict=True) if name]
    return [len(names), sum("publish" in name for name, _ in names), [step for name, step in names if "publish" in name][:8]]


def by_nccl(device):
    """The same, as if the GPUs did not reach each other; and in a graph."""
    links = exchange.links(device.torch)
    exchange._links = dataclasses.replace(links, inbox=None, why_not="a test")
    try:
        found = sums(device)
        model = load("demo/qwen3", device, progress=False, tensor_parallel=current().ranks)
        for name in ("double-buffered", "cuda-graph"):
            found[name] = generate(model, PROMPT, name, max_new_tokens=16, record=False).tokens
        try:
            found["whole-loop"] = generate(model, PROMPT, "whole-loop", max_new_tokens=16, record=False).tokens
        except Exception as error:
            found["whole-loop"] = f"{type(error).__name__}: {error}"
        return found
    finally:
        exchange._links = links


def race(device):
    """Thousands of sums and joins in a row, eagerly and in a graph, with ranks that are late in turn."""
    shard, n = current(), 5376
    ones = torch.ones(n, dtype=torch.bfloat16, device=device.torch)
    wrong = []
    with torch.no_grad():
        total = torch.zeros(n, device=device.torch)
        for i in range(2000):
            if i % 100 == 50 * (shard.rank % 2):
                torch.cuda._sleep(200_000)
            x = all_reduce(ones * (i % 7), shard.ranks)
            y = all_gather(x[: 100 + i % 5], [100 + i % 5] * shard.ranks)
            total += x.float() - shard.ranks * (i % 7) + y.float().sum() - y.numel() * shard.ranks * (i % 7)
        wrong += [f"eager: {total.abs().max().item()}"] if total.abs().max().item() else []
        value, out = torch.zeros(n, device=device.torch), torch.zeros(n, device=device.torch)

        def step():
            value.add_(1)
            x = value
            for _ in range(3):
                x = all_reduce(x, shard.ranks)
            out.copy_(all_gather(x[: n // 2], [n // 2] * shard.ranks) if shard.ranks == 2 else x)

        step()
        graph = device.capture(step)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for i in range(3000):
            if i % 200 == 100 * (shard.rank % 2):
                torch.cuda._sleep(300_000)
            graph.replay()
            if i % 500 == 0 and out.unique().tolist() != [shard.ranks**3 * (i + 2.0)]:
                wrong.append(f"graph: {out.unique()[:5].tolist()} in replay {i}")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        if out.unique().tolist() != [shard.ranks**3 * 3001.0]:
            wrong.append(f"graph: {out.unique()[:5].tolist()} at the end")
    return {"wrong": wrong, "us_per_replay": seconds / 3000 * 1e6}


def random_matrix(n, k, scheme, device):
    """A packed matrix [n, k] of this rank."""
    matrix = PackedMatrix(find_scheme(scheme), (n, k), device.torch)
    for name, made in INT4_MATMUL.inputs(MatmulShape(n, k, scheme=scheme), device.torch, current().rank).items():
        if name != "x":
            matrix.parts()[name].copy_(made)
    return matrix


def products(device):
    """Sums of products, which send their results, and norms of such sums, next to those of sums of results.

    Eagerly and in a graph, with late ranks.
    """
    shard, wrong = current(), []
    with torch.no_grad():
        matrices = {
            (n, scheme): random_matrix(n, 512, scheme, device) for n in (5, 96, 2048, 5376) for scheme in ("q4_k", "q6_k")
        }
        cases = [(m, dtype, key) for key in matrices for dtype in (torch.bfloat16, torch.float32) for m in (1, 3, 8)]
        given = [part(shard.rank, (m, 512), dtype, i).to(device.torch) for i, (m, dtype, _) in enumerate(cases)]

        weights = {
            (n, dtype): part(0, (n,), dtype, n).to(device.torch)
            for n in (5, 96, 2048, 5376)
            for dtype in (torch.bfloat16, torch.float32)
        }

        def norm_of(x, n):
            weight = weights[n, torch.float32]
            return ops.add_norm(weights[n, share_of(x).dtype].view(1, n), x, weight, 1e-6, weight if n == 96 else None)

        def all_sums():
            found = []
            for x, (m, _, key) in zip(given, cases, strict=True):
                found.append(ops.matmul_sum(x, matrices[key], shard.ranks))
                if m == 1:
                    normed, total = norm_of(ops.matmul_partial(x, matrices[key], shard.ranks), key[0])
                    found += [normed.plain, total]
            return found

        wanted, names = [], []
        for x, case in zip(given, cases, strict=True):
            wanted.append(ops.all_reduce(ops.matmul(x, matrices[case[-1]]), shard.ranks))
            names.append(f"{case}")
            if case[0] == 1:
                normed, total = norm_of(wanted[-1], case[-1][0])
                wanted += [normed.plain, total]
                names += [f"norm, {case}", f"residual, {case}"]
        for i in range(40):
            if i % 4 == 2 * (shard.rank % 2):
                torch.cuda._sleep(200_000)
            for found, right, name in zip(all_sums(), wanted, names, strict=True):
                if not torch.equal(found, right):
                    wrong.append(f"eager: {name} in round {i}")
        found = [torch.empty_like(right) for right in wanted]

        def step():
            for into, total in zip(found, all_sums(), strict=True):
                into.copy_(total)

        step()
        graph = device.capture(step)
        for i in range(200):
            if i % 20 == 10 * (shard.rank % 2):
                torch.cuda._sleep(300_000)
            graph.replay()
        torch.cuda.synchronize()
        wrong += [
            f"graph: {name}" for one, right, name in zip(found, wanted, names, strict=True) if not torch.equal(one, right)
        ]
    sent = [exchange.can_send(device.torch, n_bytes) for n_bytes in (2, exchange.SENT_BYTES, exchange.SENT_BYTES + 2)]
    return {"wrong": wrong[:9], "sent": sent, "bits": [bits(right) for right in wanted]}


def experts(device):
    """Tokens of a packed model whose products send their results, under every strategy, and of one whose products don't."""
    model = load("random/qwen3.5-35b-a3b", device, scheme="q4_k_m", progress=False, tensor_parallel=current().ranks)
    run = {"max_new_tokens": 12, "record": False, "eos": ()}
    with record_problems() as found:
        generate(model, PROMPT_IDS, "double-buffered", max_new_tokens=2, record=False)
    sent = {name: generate(model, PROMPT_IDS, name, **run).tokens for name in STRATEGIES}
    exchange.SENT_BYTES, before = 0, exchange.SENT_BYTES
    try:
        tokens = generate(model, PROMPT_IDS, "double-buffered", **run).tokens
    finally:
        exchange.SENT_BYTES = before
    return {"kernels": sorted({kernel.name for kernel, _ in found}), "sent": sent, "tokens": tokens}


def packages(device):
    """Tokens of the packages in PACKAGES, and of the model that they were exported from, under every strategy."""
    made = load_exported(os.environ["PACKAGES"], trust=True, progress=False, tensor_parallel=current().ranks)
    model = load("demo/qwen3", device, progress=False, tensor_parallel=current().ranks)
    run = {"max_new_tokens": 40, "record": False, "eos": ()}
    return {name: [generate(each, PROMPT, name, **run).tokens for each in (made, model)] for name in STRATEGIES}


def tokens(device):
    """Tokens of one GPU and of all, under every strategy."""
    shard, found = current(), {}
    for path in DEMOS:
        for dtype in ("float32",):
            models = [load(path, device, dtype=dtype, progress=False, tensor_parallel=n) for n in (1, shard.ranks)]
            for options in ({}, {"temperature": 0.9, "seed": 11, "top_p": 0.95}):
                names = ("cuda-graph", "whole-loop") if options else STRATEGIES
                run = {"max_new_tokens": 40, "record": False, "eos": (), **options}
                wanted = generate(models[0], PROMPT, "double-buffered", **run).tokens
                for name in names:
                    began = time.perf_counter()
                    ours = generate(models[1], PROMPT, name, **run).tokens
                    title = f"{path} {dtype} {name} {'sampled' if options else 'greedy'}"
                    found[title] = ours == wanted
                    if shard.rank == 0:
                        print(f"  {title}: {ours == wanted} in {time.perf_counter() - began:.1f} s", flush=True)
    return found


def steps(device):
    """The copies and collectives of every step of two strategies, and the peaks of memory."""
    shard, found = current(), {}
    for path in ("demo/qwen3", "demo/gemma4"):
        before = device.memory().allocated_bytes
        model = load(path, device, dtype="bfloat16", progress=False, tensor_parallel=shard.ranks)
        loaded = device.memory().allocated_bytes - before
        for name in ("position-on-device", "double-buffered", "cuda-graph"):
            run = {"max_new_tokens": 9, "eos": ()}
            generate(model, PROMPT, name, record=False, **run)
            device.sync()
            device.reset_peak()
            held = device.memory().allocated_bytes
            # A recorded run has no tape, whose memory a virtual GPU doesn't model.
            trace = generate(model, PROMPT, name, **run).trace
            peak = device.memory().peak_bytes - held
            found[f"{path} {name}"] = {"peak": peak, "held": loaded, "meta": trace.meta.get("groups"), **_events(trace)}
    return found


def _events(trace):
    """Return the copies of each step, and the collectives in order."""
    kinds, step = [KINDS[kind] for kind in trace["kind"]], trace["step"].tolist()
    copies = [(step[i], kind, int(trace["bytes"][i])) for i, kind in enumerate(kinds) if kind in ("h2d", "d2h", "d2d")]
    rows = [i for i, kind in enumerate(kinds) if kind == "collective"]
    texts = [trace.text(name) for name in ("operation", "algorithm", "group")]
    first = trace["seq"][rows].min(initial=1 << 62)  # virtual GPUs count from their start on
    numbers = [trace["bytes"].tolist(), trace["group_size"].tolist(), (trace["seq"] - first).tolist()]
    numbers += [trace["step"].tolist(), trace["rank"].tolist()]
    return {
        "copies": sorted(copies),
        "collectives": [[column[i] for column in (*texts, *numbers)] for i in rows],
        "us": [int(trace["dur_ns"][i]) / 1000 for i in rows][-20:],
    }


def late(device):
    """A recording of sums, before one of which one rank is late. Each rank saves its trace."""
    shard = current()
    trace = late_sums(device, shard, LATE_US)
    trace.save(Path(sys.argv[1]) / f"late-rank{shard.rank}.npz")
    return {"slept_us": slept_us(trace), "collectives": int(trace.is_kind("collective").sum())}


def uneven(device):
    """Logits and tokens of a model whose rows have one packed block more than there are ranks, and those of one GPU."""
    shard, found = current(), {}
    path = Path(sys.argv[1]) / "blocks.gguf"
    if shard.rank == 0:
        n = shard.ranks
        sizes = {"num_attention_heads": 4 * n, "num_key_value_heads": n, "intermediate_size": 256 * (n + 1)}
        config = SHAPE | {"vocab_size": 301, **sizes}
        write_gguf(path, config, random_tensors(config), "Q4_K", mixed={"down_proj.weight": "Q6_K", "v_proj.weight": "Q8_0"})
    latest(0)  # a barrier
    for dtype in ("float32", "bfloat16"):
        whole, part = (load(path, device, dtype=dtype, progress=False, tensor_parallel=n) for n in (1, shard.ranks))
        ids = torch.randint(0, 301, (1, 20), generator=torch.Generator().manual_seed(1)).to(device.torch)
        with torch.no_grad():
            wanted, ours = whole(ids).float(), part(ids).float()
        run = {"max_new_tokens": 24, "eos": (), "record": False}
        found[dtype] = {
            "columns": part.layers[0].mlp.down.weight.shape[1],
            "error": ((wanted - ours).norm() / wanted.norm()).item(),
            "tokens": [generate(part, PROMPT_IDS, name, **run).tokens for name in STRATEGIES],
            "of_one": generate(whole, PROMPT_IDS, "cuda-graph", **run).tokens,
        }
    return found


def loop(device):
    """A whole loop is recorded, and one with a stop string is refused."""
    shard = current()
    model = load("demo/qwen3", device, progress=False, tensor_parallel=shard.ranks)
    trace = generate(model, PROMPT, "whole-loop", max_new_tokens=24, eos=(), lines=False).trace
    try:
        generate(model, PROMPT, "whole-loop", max_new_tokens=24, stop="\n")
        refused = ""
    except Exception as error:
        refused = str(error)
    events = _events(trace)
    return {"refused": refused, "count": len(events["collectives"]), "publish": _publications(trace), **events}


SECTIONS = {f.__name__: f for f in (sums, race, products, experts, tokens, steps, late, uneven, loop, by_nccl)}
MORE = {"packages": packages}  # needs packages


def main():
    folder, name, *sections = sys.argv[1:]
    device = open_device(name)
    shard = join(int(os.environ["WORLD_SIZE"]))
    if device.torch.type == "cuda":
        torch.cuda.set_device(device.torch)
    for section in sections:
        began = time.perf_counter()
        file = Path(folder) / f"{section}-{shard.rank}.json"
        try:
            file.write_text(json.dumps((SECTIONS | MORE)[section](device), default=str))
        except BaseException:
            file.write_text(json.dumps({"error": traceback.format_exc()}))
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # other ranks may wait for this one, also on its GPU
        print(f"rank {shard.rank} {name} {section}: {time.perf_counter() - began:.1f} s", flush=True)
    latest(0)  # a barrier: all have ended
    os._exit(0)


if __name__ == "__main__":
    main()
