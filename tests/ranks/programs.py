"""The programs that the ranks of the tests run. Each returns plain values, which the tests compare."""

from __future__ import annotations

import dataclasses
import gc
import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from toolkit.core.distributed import WHOLE, Shard, check_same, gather, join, latest
from toolkit.decode.loop import generate
from toolkit.exporting import compiling
from toolkit.exporting.exporter import export
from toolkit.exporting.loading import load_exported
from toolkit.gpu.opening import open_device
from toolkit.gpu.virtual.effects.operations import RULES
from toolkit.loading.loader import load
from toolkit.models import ARCHITECTURES
from toolkit.models.chunks import chunk_of
from toolkit.models.places import spot
from toolkit.ops.collectives import all_gather, all_reduce
from toolkit.trace.columns import KINDS
from toolkit.weights.packed import PackedMatrix


def errors_of_logits(values: dict[str, Any], kind: str, ranks: int, tiled: bool = False, block: int = 1) -> list[float]:
    """Return the relative errors of a divided model's logits against those of a whole one with the same weights.

    They are those of a prompt without a cache, of the embedding on the host, of a prompt in two parts with a cache, and of a
    decode step.
    """
    config = ARCHITECTURES[kind].Config.from_hf({"model_type": kind} | values)
    if tiled:
        config = dataclasses.replace(config, tiled=True)
    ids, found = _prompt(config), []
    with torch.no_grad():
        for shard in (WHOLE, dataclasses.replace(join(ranks), block=block)):
            model = _random(kind, config, torch.float32, shard, 6.0)
            cache, logits = model.new_cache(16), [model(ids), model.embed.on_host()(ids)]
            for start, stop in ((0, 5), (5, 12), (12, 13)):
                x = model.advance(model.embed(ids[:, start:stop]), torch.arange(start, stop), cache, stop)
                logits.append(model.logits(x))
            found.append(logits)
    return [relative(ours, whole) for whole, ours in zip(*found, strict=True)]


def errors_in_bf16(values: dict[str, Any], kind: str) -> tuple[float, float, float]:
    """Return the relative errors of logits in bf16: whole against fp32, in two parts against fp32, in parts against whole."""
    config = ARCHITECTURES[kind].Config.from_hf({"model_type": kind} | values)
    ids = _prompt(config)
    with torch.no_grad():
        exact = _random(kind, config, torch.float32, WHOLE)
        for parameter in exact.parameters():
            parameter.copy_(parameter.bfloat16())
        wanted, whole, part = (
            model(ids)
            for model in (
                exact,
                _random(kind, config, torch.bfloat16, WHOLE),
                _random(kind, config, torch.bfloat16, join(2)),
            )
        )
    return relative(whole, wanted), relative(part, wanted), relative(part, whole)


def _prompt(config: Any) -> Tensor:
    return torch.randint(0, config.vocab_size, (1, 13), generator=torch.Generator().manual_seed(3))


def _random(kind: str, config: Any, dtype: torch.dtype, shard: Shard, factor: float = 1.0) -> Any:
    """Return a random model, whose matrices are multiplied by `factor`."""
    model = ARCHITECTURES[kind].Model(config, open_device("cpu"), dtype, shard).init_weights(1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(factor)
    return model


def relative(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return ((found - wanted).norm() / wanted.norm()).item()


def differences(path: str, ranks: int, options: dict[str, Any]) -> tuple[list[str], float]:
    """Load a model whole and divided. Return the weights that aren't the whole's, cut; and the share of the bytes."""
    whole, part = (
        load(path, "cpu", progress=False, **options),
        load(path, "cpu", progress=False, tensor_parallel=ranks, **options),
    )
    names = ARCHITECTURES[_kind(whole)].names_hf(whole.config)
    wrong = [name for name in names if not _same(whole, part, name)]
    return wrong, part.report.weight_bytes / whole.report.weight_bytes


def _kind(model: Any) -> str:
    return type(model).__module__.rpartition(".")[2]


def _same(whole: Any, part: Any, name: str) -> bool:
    ours, theirs = spot(part, name), spot(whole, name)
    if isinstance(ours.weight, PackedMatrix):
        assert ours.weight.scheme == theirs.weight.scheme
    values = [_values(place.weight, place.rows) for place in (theirs, ours)]
    for dim, cut in zip(range(-len(ours.cuts), 0), ours.cuts, strict=True):
        picked = [i for start, stop in cut.ranges for i in range(start, stop)]
        values[0] = values[0].index_select(dim, torch.tensor(picked))
    return torch.equal(*values)


def _values(weight: Tensor | PackedMatrix, rows: slice | None) -> Tensor:
    values = weight.dequantize() if isinstance(weight, PackedMatrix) else weight
    return values if rows is None else values[rows] if values.ndim == 1 else values[..., rows, :]


def texts(path: str, device: str, ranks: int, runs: list[dict[str, Any]], **options: Any) -> list[tuple[int, ...]]:
    """Return the tokens of some runs of `generate`."""
    model = load(path, device, progress=False, tensor_parallel=ranks, **options)
    return [generate(model, lines=False, **run).tokens for run in runs]


def of_transformers(path: str, ids: list[int], decode: list[str]) -> tuple[int, float, list[tuple[int, ...]]]:
    """Return the weights that this rank holds in bytes, the largest error of its logits, and the tokens of some strategies."""
    part, whole = (load(path, "cpu", engine="hf", tensor_parallel=ranks) for ranks in (2, 1))
    with torch.no_grad():
        error = (part(torch.tensor([ids])) - whole(torch.tensor([ids]))).abs().max().item()
    tokens = [generate(part, ids, one, max_new_tokens=8).tokens for one in decode]
    assert all(each == generate(whole, ids, "hf-generate", max_new_tokens=8).tokens for each in tokens)
    return part.report.weight_bytes, error, tokens


def of_transformers_differ(paths: list[str]) -> None:
    """Load another model on each rank."""
    load(paths[join(2).rank], "cpu", engine="hf", tensor_parallel=2)


def chunk(path: str, device: str, ranks: int) -> int:
    """Return how many tokens of a prompt this rank processes at once."""
    return chunk_of(load(path, device, progress=False, tensor_parallel=ranks))


def sums_and_parts() -> tuple[list[Any], list[Any], list[Any], torch.dtype]:
    """Return a sum over the ranks, tensors of different sizes joined along both dimensions, and the dtype of the last one."""
    shard = join(4)
    x = torch.tensor([1.0, 2.0**-9]).bfloat16() * (1 + shard.rank)
    rows = torch.full((shard.rank % 2 + 1, 2), float(shard.rank), dtype=torch.float16)
    sizes = [1, 2, 1, 2]
    last = all_gather(rows.t(), sizes, fp32=True)
    return all_reduce(x, 4).tolist(), all_gather(rows, sizes, 0).tolist(), last.tolist(), last.dtype


def gradient() -> None:
    all_reduce(torch.ones(2, requires_grad=True), join(2).ranks)


def fail_on(rank: int, how: str) -> None:
    """Fail on one rank, in one way, while the others wait for it."""
    shard = join(4)
    gather(torch.zeros(3))
    if shard.rank == rank:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("out of luck")
    gather(torch.zeros(3))


def differ() -> None:
    shard = join(2)
    check_same(shard, "a test", same=1, prompt=[shard.rank])


def generate_differently(how: str) -> None:
    rank = join(2).rank
    more = {"cancel": threading.Event()} if how == "cancel" else {"max_new_tokens": 3 + rank}
    generate(load("demo/qwen3", "cpu", progress=False, tensor_parallel=2), "The", **more)


def export_part(folder: str) -> None:
    export(load("demo/qwen3", "cpu", progress=False, tensor_parallel=2), folder)


def loads_packages(folder: str) -> tuple[float, str]:
    """Load this rank's package, without its code. Return the error of its logits, and the number of ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "load_piece", lambda data, device: None)
        made = load_exported(folder, trust=True, progress=False, tensor_parallel=2)
    model = load("demo/qwen3", "cpu", progress=False, tensor_parallel=2)
    with torch.no_grad():
        return (made(_prompt(model.config)) - model(_prompt(model.config))).abs().max().item(), str(made.shard.ranks)


def loads_package(folder: str) -> None:
    load_exported(folder, trust=True, progress=False, tensor_parallel=2)


def traced_tokens(path: str) -> tuple[Any, Any]:
    """Return the tokens of this rank's part, and those of its traced pieces."""
    from tests.exporting.traced import traced_package

    model = load(path, "cpu", progress=False, tensor_parallel=2)
    run: dict[str, Any] = {"prompt": list(range(5, 45)), "max_new_tokens": 4, "record": False}
    return generate(model, **run).tokens, generate(traced_package(model, 64), **run).tokens


def load_with(path: str, ranks: int, options: dict[str, Any]) -> str:
    return repr(load(path, "cpu", progress=False, tensor_parallel=ranks, **options).report)


def from_environment(port: int, ranks: int, order: list[int]) -> Shard:
    """Start the group from the variables that torchrun sets. `order` has the ids of the processes, by rank."""
    rank = order.index(os.getpid())
    set_by_torchrun = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in set_by_torchrun.items()}
    try:
        return join(ranks)
    finally:
        for name in set_by_torchrun:
            del os.environ[name]


def process_id() -> int:
    return os.getpid()


def steps(path: str, ranks: int) -> dict[str, Any]:
    """Return the copies and collectives of decode step 2 on virtual GPUs, and when they end in the recording."""
    model = load(path, "virtual:h200", progress=False, tensor_parallel=ranks)
    trace = generate(model, "The capital of France is", "position-on-device", max_new_tokens=4, lines=False).trace
    step = trace["step"] == 2
    kinds, columns = [KINDS[kind] for kind in trace["kind"]], ("operation", "bytes", "algorithm", "group_size")
    mine = [i for i in range(len(trace)) if step[i] and kinds[i] == "collective"]
    texts = {name: trace.text(name) if name in ("operation", "algorithm") else trace[name].tolist() for name in columns}
    return {
        "copies": [
            (kinds[i], int(trace["bytes"][i])) for i in range(len(trace)) if step[i] and kinds[i] in ("h2d", "d2h", "d2d")
        ],
        "collectives": [tuple(texts[name][i] for name in columns) for i in mine],
        "numbers": trace["seq"][mine].tolist(),
        "ends_ns": [int(trace["start_ns"][i] + trace["dur_ns"][i]) for i in mine],
        "meta": tuple(trace.meta.get(name) for name in ("rank", "world_size", "groups")),
        "ranks": set(trace["rank"].tolist()),
    }


def held(path: str, ranks: int, tokens: int, context: int) -> tuple[int, int, int]:
    """Return the bytes of the weights, of a cache, and at the peak of a prompt, on an empty virtual GPU."""
    gpu = open_device("virtual:h200")
    card = torch.get_device_module(gpu.torch)
    gc.collect()
    card.empty_cache()
    empty = gpu.memory().allocated_bytes
    model = load(path, gpu, progress=False, tensor_parallel=ranks)
    loaded = gpu.memory().allocated_bytes
    cache = model.new_cache(context)
    filled = gpu.memory().allocated_bytes
    card.reset_peak_memory_stats()
    with torch.no_grad(), gpu.sizes_only():
        ids, positions = (torch.arange(tokens, device=gpu.torch) for _ in range(2))
        model.logits(model.advance(model.embed(ids[None]), positions, cache, tokens)[:, -1:])
    return loaded - empty, filled - loaded, gpu.memory().peak_bytes - empty


def one_late(late: int, by_ns: int) -> tuple[int, int]:
    """Return the end and the duration of a collective to which one rank comes late."""
    shard, gpu = join(4), open_device("virtual:h200")
    x = torch.ones(16, device=gpu.torch)
    all_reduce(x, shard.ranks)
    gpu.sync()
    gpu.machine.poll(latest(gpu.now_ns()))  # from here on, all hosts have the same time
    origin = gpu.now_ns()
    with gpu.record(lines=False) as trace:
        if shard.rank == late:
            gpu.machine.spend(by_ns)
        total = all_reduce(x, shard.ranks)
    assert total.tolist() == [4.0] * 16
    (i,) = (i for i, kind in enumerate(trace["kind"]) if KINDS[kind] == "collective")
    start, took = int(trace["start_ns"][i]), int(trace["dur_ns"][i])
    return origin + start + took, took


def algorithms() -> list[tuple[str, int]]:
    """Return how small and large tensors are summed over eight ranks, and the bytes that each rank receives."""
    found = []
    for size in (1 << 10, 1 << 20):
        x = torch.empty(size // 2, dtype=torch.bfloat16)
        effect = RULES["toolkit::all_reduce"]((x, 8), {}, x)[0]
        found.append((effect.algorithm, effect.moved_bytes))
    return found
