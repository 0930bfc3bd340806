"""Compile the kernels of a run before it begins, several at once.

Triton compiles a kernel when it is launched for the first time: one after the other, for up to several seconds each. A model
needs dozens of kernels, and prompts of other lengths may need others. `compile_ahead` finds the kernels without launching them,
and compiles them in threads. Triton's compiler releases Python's lock for most of its time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch

from toolkit.core.distributed import WHOLE
from toolkit.core.workers import processors
from toolkit.decode.step import altered
from toolkit.kernels.base import Kernel, Launch, Shape, current_capability
from toolkit.models.model import CausalLM, Model
from toolkit.ops.define import on_gpu

MOST_THREADS = 16
CACHE_SIZES = ("slots", "context", "positions")  # fields of shapes that depend on the size of the cache

_done: WeakKeyDictionary[CausalLM, set[tuple[Any, ...]]] = WeakKeyDictionary()


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
        done = _done.setdefault(model, set())
        for tokens in {min(prompt, chunk), prompt % chunk} - {0}:
            about = (*_kinds_of(tokens), *_kinds_of(context), kv)
            if about not in done:
                compile_launches(_launches(_problems(model, tokens, context, kv), model.device.torch))
                done.add(about)


def _kinds_of(length: int) -> tuple[int, bool]:
    """Return what kernels may depend on: most spaces of configs change at powers of two, and Triton favors multiples of 16."""
    return math.ceil(math.log2(length)), length % 16 == 0


def _problems(model: CausalLM, tokens: int, context: int, kv: str | None) -> list[tuple[Kernel, Shape]]:
    """Return the (kernel, shape) of feeding `tokens` tokens and of decoding one more with a cache for `context` tokens."""
    window = max(getattr(module, "window", None) or 0 for module in model.modules())
    slots = min(context, max(window, tokens) + 1)  # kernels for a longer cache have the same programs, maybe other configs
    try:
        found = model.kernel_shapes(slots, tokens, kv)
    except torch.OutOfMemoryError:
        return []
    longer = [(kernel, _longer(shape, slots, context)) for kernel, shape in found]
    return longer[::-1]  # some kernels of decode steps take longest, so they begin first


def _longer(shape: Shape, slots: int, context: int) -> Shape:
    """Return the shape with a cache for `context` tokens in place of one for `slots`."""
    sizes = {name: context for name in CACHE_SIZES if getattr(shape, name, None) == slots}
    return replace(shape, **sizes)  # type: ignore[arg-type]


def _launches(problems: Iterable[tuple[Kernel, Shape]], device: torch.device) -> Iterator[Launch]:
    """Yield the launches of each problem on `device`, with tensors on "meta"."""
    from toolkit.tune.lookup import choose

    for kernel, shape in problems:
        inputs = kernel.inputs(shape, "meta")
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
