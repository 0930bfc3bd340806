"""Compile the kernels of a run before it begins, several at once.

Triton compiles a kernel when it is launched for the first time: one after the other, for up to several seconds each. A model
needs dozens of kernels, and prompts of other lengths may need others. `compile_ahead` finds the kernels without launching them,
and compiles them in threads. Triton's compiler releases Python's lock for most of its time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import cache
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
from toolkit.ops.define import Problem, direct, on_gpu
from toolkit.ops.products import DECODED

MOST_THREADS = 16
POLL_S = 0.1  # between looks at `cancel`
CACHE_SIZES = ("slots", "context", "positions")  # fields of shapes that depend on the size of the cache
STEP, MOST_STEPPED = 64, 512  # configs of prompts were timed, and change, at multiples of STEP up to MOST_STEPPED

_done: WeakKeyDictionary[CausalLM, set[tuple[Any, ...]]] = WeakKeyDictionary()  # what `_kinds` returned
_samples: WeakKeyDictionary[CausalLM, tuple[list[int], list[int]]] = WeakKeyDictionary()  # ids of layers; their `samples`
_compiled: set[tuple[Any, ...]] = set()  # what `_program` returned, with the GPU
_failures: list[str] = []
_one_at_a_time = threading.Lock()
_left: list[Future[None]] = []  # what an interrupted call may still compile


def compile_ahead(
    model: Model, prompt: int, chunk: int, context: int, kv: str | None, decodes: bool, cancel: threading.Event | None = None
) -> None:
    """Compile the kernels of a run on CUDA: of feeding `prompt` tokens, `chunk` at a time, and of decoding if it `decodes`.

    The cache is for `context` tokens in the format `kv`. Nothing happens if this process has done it for the model and similar
    numbers. Some kernels are left out, and are compiled when they are launched: those of filters in sampling; of models that
    run code of others, or that are divided among ranks; and all of a run that a recording, a profiler or a mode of PyTorch
    observes, since operations of PyTorch run here. As much memory is used as by feeding the prompt to a few layers, with a
    short cache. If anything goes wrong, the run compiles by itself (see `failures`). Raises RecorderError if another thread
    records a run of its own, as the run would.
    """
    if not _supported(model):
        return
    assert isinstance(model, CausalLM)
    _watch_lookup()
    parts = [*{min(prompt, chunk), prompt % chunk} - {0}, *([1] if decodes and context > prompt else [])]
    asked = {_kinds(tokens, context, kv): tokens for tokens in parts}
    done = _done.setdefault(model, set())
    missing = {kinds: tokens for kinds, tokens in asked.items() if kinds not in done}
    if not missing or prompt > context:
        return
    autocast = torch.autocast(model.device.torch.type, enabled=False)  # as `generate` does
    with model.device.unrecorded(), torch.no_grad(), autocast, _current(model.device.torch):
        first = next(model.parameters())
        if altered(model) or not on_gpu(first) or not direct(first):
            return
        try:
            launches = list(_launches(_problems(model, [*missing.values()], context, kv), model.device.torch))
        except Exception as error:  # whatever it is: the run doesn't need this, and raises it if it is an error of the run
            if (text := f"{type(error).__name__}: {error}") not in _failures:
                _failures.append(text)
            return
        if compile_launches(launches, cancel):
            done.update(missing)


def failures() -> list[str]:
    """Return the errors that kept `compile_ahead` from finding kernels in this process."""
    return list(_failures)


def _supported(model: Model) -> bool:
    on_cuda = isinstance(model, CausalLM) and model.device.torch.type == "cuda" and model.shard == WHOLE
    return on_cuda and model.device.recording is None


def _current(device: torch.device) -> torch.cuda.device:
    """Return a context in which `device` is the current GPU."""
    return torch.cuda.device(device)


def _kinds(tokens: int, context: int, kv: str | None) -> tuple[Any, ...]:
    """Return what programs and configs depend on. Triton favors multiples of 16, and some kernels full tiles of tokens."""
    if tokens <= DECODED:
        length = tokens
    else:
        length = DECODED + (-(-tokens // STEP) if tokens <= MOST_STEPPED else MOST_STEPPED + math.ceil(2 * math.log2(tokens)))
    return length, tokens % 16 == 0, tokens % STEP == 0, math.ceil(math.log2(context)), context % 16 == 0, kv


@cache
def _watch_lookup() -> None:
    """Forget what was done when other configs may be chosen."""
    from toolkit.tune.lookup import when_forgotten

    when_forgotten(_done.clear)


def _problems(model: CausalLM, parts: Sequence[int], context: int, kv: str | None) -> list[Problem]:
    """Return (kernel, shape, inputs) of feeding `parts`, numbers of tokens, with a cache for `context` tokens."""
    ids = [*map(id, model.layers)]
    if (known := _samples.get(model)) is None or known[0] != ids:
        known = _samples[model] = ids, samples(model)
    layers = known[1]
    windows = [getattr(module, "window", None) or 0 for layer in layers for module in model.layers[layer].modules()]
    read = -(-max([*windows, sum(parts)]) // BOUND_MULTIPLE) * BOUND_MULTIPLE  # the most slots that an operation reads
    slots = min(context, read + 1)  # kernels for a longer cache have the same programs, maybe other configs
    found = problems_of(model, layers, parts, slots, kv)
    # Some kernels of decode steps take longest to compile, so they begin first.
    return [_longer(problem, slots, context) for problem in reversed(found)]


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


def compile_launches(launches: Iterable[Launch], cancel: threading.Event | None = None) -> bool:
    """Compile and load the kernels of launches for the current GPU, several at once. Return whether all were looked at.

    What this process has compiled before is left out. A kernel that can't be compiled is left out, too: it raises when it is
    launched. After an interrupt, or once `cancel` is set, compilers that run already go on in the background, and the next call
    waits for them.
    """
    capability, device = current_capability(), torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def compile_one(launch: Launch) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread starts with GPU 0 as its current device
        compiled = launch.compile(capability)
        if device is not None:
            _load(compiled)
        _compiled.add((device, *_program(launch)))

    distinct = {(device, *_program(launch)): launch for launch in launches if 0 not in launch.grid}
    pool = ThreadPoolExecutor(min(processors(), MOST_THREADS), "compile")
    with _one_at_a_time:
        try:
            if not _ended(cancel):
                return False
            missing = [launch for program, launch in distinct.items() if program not in _compiled]
            for number, launch in enumerate(missing):
                _left.append(pool.submit(compile_one, launch))
                if not number and not _ended(cancel):  # it hashes Triton's files, which threads at once would all do
                    return False
            return _ended(cancel)
        except RuntimeError:  # no thread can be started: Python is about to exit, or the system allows no more
            return False
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _ended(cancel: threading.Event | None) -> bool:
    """Wait until nothing is left to compile. Return False as soon as `cancel` is set."""
    while not (cancel is not None and cancel.is_set()):
        if not wait([one for one in _left if not one.cancelled()], POLL_S).not_done:
            _left.clear()
            return True
    return False


def _load(compiled: Any) -> None:
    """Load a compiled kernel and compile what starts it, as Triton does when the kernel is first launched."""
    try:
        compiled.run  # noqa: B018
    except BaseException:
        compiled._run = None  # Triton sets it before it loads the kernel, and would then launch none
        raise


def _program(launch: Launch) -> tuple[Any, ...]:
    """Return what the code of a launch depends on."""
    plain = launch.function.do_not_specialize
    arguments = tuple((name, _kind(value, name in plain)) for name, value in launch.arguments.items())
    options = (launch.warps, launch.stages, launch.early, launch.registers)
    return launch.function, arguments, tuple(launch.constants.items()), options


def _kind(value: Any, plain: bool) -> Any:
    """Return the type of an argument. Unless `plain`, Triton compiles integers apart if they are 1, or multiples of 16."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if isinstance(value, int):
        return (value.bit_length() > 31, *(() if plain else (value == 1, value % 16 == 0)))
    return type(value)
