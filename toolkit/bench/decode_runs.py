"""Measure one decode strategy at one context: rates, the host's time per step, and what a step launches.

`timed` and `host_time` don't record. Call them before anything in the process has been recorded, because CUPTI stays attached
after a recording and slows down every later launch.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Sequence
from typing import Any

import torch

from toolkit.bench.captured_steps import WARM_UP_S
from toolkit.bench.step_breakdown import FIRST_STEADY
from toolkit.core.errors import ToolkitError
from toolkit.decode.compare import WARM_UP_TOKENS, decode_steps
from toolkit.decode.loop import check_token, generate
from toolkit.decode.prefix import Prefix
from toolkit.decode.sampling import Sampling
from toolkit.decode.step import Fallback, Step
from toolkit.decode.strategies import STRATEGIES, Strategy, check_capture, find_strategy, strategies_of
from toolkit.models.model import Model
from toolkit.trace.columns import COPY_KINDS
from toolkit.trace.events import Trace

FEW_TOKENS = 3
ENOUGH_S = 2.0
PROBED_STEPS = 8
RECORDED_TOKENS = 12
FEWEST_TOKENS = max(WARM_UP_TOKENS, FEW_TOKENS, PROBED_STEPS + 1, RECORDED_TOKENS)  # for which a cache needs room
ERRORS = (ToolkitError, torch.OutOfMemoryError)  # of a strategy or a context that the device or the model can't do


def prefilled(model: Model, ids: Sequence[int], context: int, kv: str | None, chunk: int) -> tuple[Prefix, float]:
    """Return a prefix of `ids` and the seconds that the prefill took."""
    device = model.device
    device.sync()
    begin = device.now_ns()
    prefix = Prefix(model, ids, context, kv=kv, chunk=chunk)
    device.sync()
    return prefix, (device.now_ns() - begin) / 1e9


def timed(prefix: Prefix, ids: Sequence[int], name: str, tokens: int, repeats: int) -> dict[str, Any]:
    """Return the tokens per second of `repeats` runs: all of them, their median, and (largest - smallest) / median.

    `ids` is the prompt, which continues the prefix. On a measured clock, runs of at least a second warm up first. `peak_bytes`
    is the peak of the device memory in these runs, without the copies that only the prefix needs.
    """
    device = prefix.model.device

    def run(n: int) -> float:
        options: dict[str, Any] = {"max_new_tokens": n, "eos": (), "prefix": prefix, "record": False}
        return generate(prefix.model, ids, name, **options).tok_per_s or float("nan")

    if device.clock == "measured":
        run(WARM_UP_TOKENS)  # compiles kernels
        warm = device.now_ns() + WARM_UP_S * 1e9
        while device.now_ns() < warm:
            run(tokens)
    device.reset_peak()
    rates = [run(tokens) for _ in range(repeats)]
    middle = statistics.median(rates)
    return {
        "tok_per_s": middle, "spread": (max(rates) - min(rates)) / middle, "tok_per_s_all": rates,
        "peak_bytes": device.memory().peak_bytes - (prefix.kept_bytes or 0),
    }  # fmt: skip


def first_token(model: Model, ids: Sequence[int], name: str, repeats: int, **options: Any) -> list[float]:
    """Return the seconds from the call of `generate` until the host knows the first token, of `repeats` runs.

    On a measured clock, a run warms up first: it compiles kernels, and the allocator takes its memory. More runs follow until
    all took ENOUGH_S together: of three short prompts, the median varied from 25 to 39 ms between strategies that feed a prompt
    alike (Gemma 4 31B on an H200, 64 tokens).
    """
    device = model.device

    def run() -> float:
        known_ns: list[int] = []
        device.sync()
        begin = device.now_ns()
        generate(
            model, ids, name, max_new_tokens=FEW_TOKENS, eos=(), record=False,
            on_token=lambda token, text: known_ns.append(device.now_ns()), **options,
        )  # fmt: skip
        return (known_ns[0] - begin) / 1e9

    enough: float = device.now_ns()
    if device.clock == "measured":
        run()
        enough = device.now_ns() + ENOUGH_S * 1e9
    taken = [run() for _ in range(repeats)]
    while device.now_ns() < enough:
        taken.append(run())
    return taken


def host_time(prefix: Prefix, ids: Sequence[int], name: str, chunk: int) -> dict[str, Any]:
    """Return the time of the host to launch a step while the device is idle, in µs, and the nodes of a captured step.

    For a loop, it is the time of the only launch until the host knows the first token, divided by the steps that it launched.
    """
    strategy, device = STRATEGIES[name], prefix.model.device
    taken: list[float] = []
    with prefix.in_use() as cache, torch.no_grad():
        step = Step(prefix.model, strategy, Sampling(), cache, ids, PROBED_STEPS + 1, Fallback(False))
        try:
            token = step.prefill(chunk, threading.Event())
            assert token is not None
            if strategy.capture == "loop":
                step.run(1, None)
                assert step.loop is not None
                device.sync()
                begin = device.now_ns()
                for _, known_ns in step.loop.run(PROBED_STEPS, (), lambda: False):
                    taken = taken or [(known_ns - begin) / (PROBED_STEPS - 1)]
            else:
                taken = _launches(step, check_token(int(token.item()), 0))
            nodes = step.nodes
        finally:
            step.free()
    return {"host_us_per_step": statistics.median(taken) / 1e3, "nodes": nodes}


def _launches(step: Step, known: int) -> list[float]:
    """Return the time in ns that each steady step takes on the host. `known` is the first token."""
    taken, device = [], step.device
    for number in range(1, PROBED_STEPS + 1):
        device.sync()
        begin = device.now_ns()
        step.start(number, known)
        if number >= FIRST_STEADY:
            taken.append(float(device.now_ns() - begin))
        known = check_token(int(step.finish(number % step.slots).item()), number)
    return taken


def recorded(prefix: Prefix, ids: Sequence[int], name: str) -> tuple[dict[str, Any], Trace]:
    """Return what a steady step launches and copies, and for how long the host waits in it; and the trace of the run."""
    options: dict[str, Any] = {"max_new_tokens": RECORDED_TOKENS, "eos": (), "prefix": prefix, "lines": False}
    trace = generate(prefix.model, ids, name, **options).trace
    steps = decode_steps(trace)
    if STRATEGIES[name].capture == "loop":  # which begins with step 2; CUPTI may report only that one
        looped = steps[steps["step"] > 1]
        chosen = looped[looped["kernels"] == looped["kernels"].max()].head(1)
    else:
        chosen = steps[steps["step"] >= FIRST_STEADY]
    copies = {
        kind: {"count": float(chosen[f"{kind}_count"].mean()), "bytes": float(chosen[f"{kind}_bytes"].mean())}
        for kind in COPY_KINDS
    }
    found = {
        "kernels_per_step": float(chosen["kernels"].mean()), "copies_per_step": copies,
        "host_wait_us_per_step": float(chosen["host_wait_us"].mean()),
    }  # fmt: skip
    return found, trace


def whole_copies(model: Model, ids: Sequence[int], name: str, decode: int) -> dict[str, Any]:
    """Return the count and bytes of the copies in each direction of one generation with `decode` steps after the prefill."""
    trace = generate(model, ids, name, max_new_tokens=decode + 1, eos=(), lines=False).trace
    found = {kind: trace["bytes"][trace.is_kind(kind)] for kind in COPY_KINDS}
    return {kind: {"count": len(sizes), "bytes": int(sizes.sum())} for kind, sizes in found.items()}


def names_of(model: Model, asked: Sequence[str]) -> list[str]:
    """Return the strategies called `asked`, or every strategy for ["all"], that can decode `model`.

    Raises UnknownNameError for an unknown name, and ToolkitError for one that the model or the device can't do.
    """
    if list(asked) == ["all"]:
        return [name for name, strategy in strategies_of(model).items() if isinstance(strategy, Strategy)]
    chosen = [find_strategy(name) for name in asked]
    for strategy in chosen:
        if isinstance(strategy, Strategy):
            check_capture(model, strategy)
    return [strategy.name for strategy in chosen]
