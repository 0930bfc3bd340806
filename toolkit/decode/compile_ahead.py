"""Compile the kernels of a run before it begins, several at once.

Triton compiles a kernel when it is launched for the first time: one after the other, for up to several seconds each. A model
needs dozens of kernels, and prompts of other lengths may need others. `compile_ahead` finds the kernels without launching them,
and compiles them in threads. Triton's compiler releases Python's lock for most of its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from toolkit.core.distributed import WHOLE
from toolkit.core.workers import processors
from toolkit.decode.step import altered
from toolkit.kernels.base import Launch, current_capability
from toolkit.models.cache import BOUND_MULTIPLE
from toolkit.models.model import CausalLM, Model
from toolkit.models.problems import problems_of, samples
from toolkit.ops.define import Problem, on_gpu

MOST_THREADS = 16
CACHE_SIZES = ("slots", "context", "positions")  # fields of shapes that depend on the size of the cache


@dataclass(frozen=True)
class _Known:
    """The layers of a model that use all kernels, and for which numbers they were compiled."""

    layers: list[int]
    done: set[tuple[Any, ...]] = field(default_factory=set)


_known: WeakKeyDictionary[CausalLM, _Known] = WeakKeyDictionary()


def compile_ahead(model: Model, prompt: int, chunk: int, context: int, kv: str | None) -> None:
    """Compile the kernels of a run on CUDA: of feeding `prompt` tokens, `chunk` at a time, and of decoding in a cache.

    The cache is for `context` tokens in the format `kv`. Nothing happens if this process has done it for the model and similar
    numbers. Some kernels are left out, and are compiled when they are launched: those of filters in sampling; of models that
    run code of others, or that are divided among ranks; and all inside a recording, which would show the operations of PyTorch
    that run here. As much memory is used as by feeding the prompt with a short cache. If there isn't enough, nothing is
    compiled.
    """
    on_cuda = isinstance(model, CausalLM) and model.device.torch.type == "cuda"
    if not on_cuda or model.device.recording is not None or context < 2:
        return
    assert isinstance(model, CausalLM)
    with torch.no_grad(), torch.cuda.device(model.device.torch):
        if model.shard != WHOLE or altered(model) or not on_gpu(*model.parameters()):
            return
        known = _known.get(model) or _known.setdefault(model, _Known(samples(model)))
        parts = [*{min(prompt, chunk), prompt % chunk} - {0}, *([1] if context > prompt else [])]
        asked = {(*_kinds_of(tokens), *_kinds_of(context), kv): tokens for tokens in parts}
        missing = {about: tokens for about, tokens in asked.items() if about not in known.done}
        if missing:
            compile_launches(_launches(_problems(model, known.layers, [*missing.values()], context, kv), model.device.torch))
            known.done.update(missing)


def _kinds_of(length: int) -> tuple[int, bool]:
    """Return what kernels may depend on: most spaces of configs change at powers of two, and Triton favors multiples of 16."""
    return math.ceil(math.log2(length)), length % 16 == 0


def _problems(model: CausalLM, layers: Sequence[int], parts: Sequence[int], context: int, kv: str | None) -> list[Problem]:
    """Return (kernel, shape, inputs) of feeding `parts`, numbers of tokens, with a cache for `context` tokens."""
    window = max(getattr(module, "window", None) or 0 for layer in layers for module in model.layers[layer].modules())
    read = -(-max(window, sum(parts)) // BOUND_MULTIPLE) * BOUND_MULTIPLE  # the most slots that an operation reads
    slots = min(context, read + 1)  # kernels for a longer cache have the same programs, maybe other configs
    try:
        found = problems_of(model, layers, parts, slots, kv)
    except torch.OutOfMemoryError:
        return []
    return [
        _longer(problem, slots, context) for problem in reversed(found)
    ]  # some kernels of decode steps take longest, so they begin first


def _longer(problem: Problem, slots: int, context: int) -> Problem:
    """Return the problem with a cache for `context` tokens in place of one for `slots`."""
    kernel, shape, _ = problem
    sizes = {name: context for name in CACHE_SIZES if getattr(shape, name, None) == slots != context}
    if not sizes:
        return problem
    shape = replace(shape, **sizes)  # type: ignore[arg-type]
    return kernel, shape, kernel.inputs(shape, "meta")


def _launches(problems: Iterable[Problem], device: torch.device) -> Iterator[Launch]:
    """Yield the launches of each problem on `device`, with tensors on "meta"."""
    from toolkit.tune.lookup import choose

    for kernel, shape, inputs in problems:
        yield from kernel.launches(shape, choose(kernel, shape, device).config, inputs, kernel.outputs(shape, inputs))


def compile_launches(launches: Iterable[Launch]) -> None:
    """Compile the kernels of launches for the current GPU, several at once.

    A kernel that can't be compiled is left out: it raises when it is launched. After an interrupt, compilers that run already
    go on in the background.
    """
    capability, device = current_capability(), torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def compile_one(launch: Launch) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread starts with GPU 0 as its current device
        compiled = launch.compile(capability)
        if device is not None:
            compiled.run  # noqa: B018 - Triton then loads the kernel, and compiles what starts it

    distinct = {_program(launch): launch for launch in launches if 0 not in launch.grid}
    running: list[Future[None]] = []
    pool = ThreadPoolExecutor(min(processors(), MOST_THREADS), "compile")
    try:
        for number, launch in enumerate(distinct.values()):
            running.append(pool.submit(compile_one, launch))
            if not number:
                wait(running)  # it hashes Triton's files, which threads at once would all do
        wait(running)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _program(launch: Launch) -> tuple[Any, ...]:
    """Return what the code of a launch depends on."""
    arguments = tuple((name, _kind(value)) for name, value in launch.arguments.items())
    options = (launch.warps, launch.stages, launch.early, launch.registers)
    return launch.function, arguments, tuple(launch.constants.items()), options


def _kind(value: Any) -> Any:
    """Return the type of an argument. Triton compiles integers apart if they are 1, or multiples of 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)
