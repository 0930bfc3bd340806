"""The tuner's face: which config does each GPU get, and why.

    tk.tune.explore("int4_matmul", gpus=["rtx-5090", "a100-80g", "h200"])   # a row a config and GPU; needs no GPU
    tk.tune.warm("int4_matmul")                                             # times on this machine's GPU, and keeps it
    tk.tune.choices()                                                       # what models were given, and by which step
    with tk.tune.watch() as seen: anybodys_code()                           # @triton.autotune kernels

`python -m toolkit.tune show|export|import|merge|warm` does the same from a shell (`__main__.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from toolkit.core.errors import ToolkitError
from toolkit.core.progress import Counter, Progress
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.registry import find_kernel, find_shape
from toolkit.kernels.registry import kernels as kernels
from toolkit.tune import lookup
from toolkit.tune.cards import find_card, find_cards
from toolkit.tune.compiling import Job, compile_configs
from toolkit.tune.lookup import choose as choose
from toolkit.tune.results import Tuning, joined
from toolkit.tune.store import words
from toolkit.tune.timing import CudaClock
from toolkit.tune.tuner import Tuner, configs_of, tune_all
from toolkit.tune.watching import watch as watch

if TYPE_CHECKING:
    import pandas as pd

AFTER_CANCEL = "Results so far are kept; call it again to go on"
WITHOUT_GPU = "h200"  # what is compiled for where there is no GPU and none is named


def explore(
    kernel: Kernel | str,
    shape: Shape | str | None = None,
    gpus: Iterable[Any] | str | None = None,
    configs: Sequence[Config] | None = None,
    progress: bool | Progress = True,
    cancel: threading.Event | None = None,
) -> Tuning:
    """Every config of a problem on every GPU: what it takes, whether it fits, how long it takes (measured or modelled).

    `kernel` is a name or a Kernel, `shape` one of its known names, a key, or a Shape (the first known one by default), `gpus`
    keys of the catalogue (all of it by default), `configs` the kernel's whole space by default. Compiles for GPUs that aren't
    there, and times nothing: times that are kept of a GPU are shown as measured, the others are modelled. Raises
    UnknownNameError for a name, DeviceError where there is no Triton, CancelledError.
    """
    chosen = find_kernel(kernel)
    problem, cards = find_shape(chosen, shape), find_cards(gpus)
    wanted = configs_of(chosen, problem, configs)
    steps = Counter(f"compiling {chosen.name}", progress, cancel, AFTER_CANCEL)
    # All at once, so that every process has work to the end.
    jobs = [Job(problem, config, card.spec.compute_capability) for config in wanted for card in cards]
    compiled = compile_configs(chosen, jobs, steps)
    return joined(Tuner(card).tune(chosen, problem, wanted, compiled) for card in cards)


def warm(
    what: Any,
    device: Any = "auto",
    configs: Sequence[Config] | None = None,
    progress: bool | Progress = True,
    cancel: threading.Event | None = None,
    again: bool = False,
) -> Tuning:
    """Tune for a GPU of this machine: compile, check and time every config that isn't kept yet, and keep what came of it.

    With `again` those that are kept too, also from the timings that come with the package. `what` is a model (anything with
    `kernel_shapes()`), a kernel or its name (its known shapes), or (kernel, shape) pairs. Once `cancel` is set the tuning
    ends with CancelledError; what was timed is kept, and calling it again goes on. On a GPU that isn't in this machine, or on
    the CPU, nothing can be timed: configs are only compiled, and a note says so.
    """
    problems, card = problems_of(what), find_card(device)
    if card is None or not card.present:
        card = card or find_card(WITHOUT_GPU)
        assert card is not None
        found = tune_all(
            Tuner(card, step=Counter(f"compiling for {card.key}", progress, cancel, AFTER_CANCEL)), problems, configs
        )
        here = "this machine has no CUDA GPU" if not torch.cuda.is_available() else f'{card.key} was named, not "cuda"'
        return joined(
            found, [f"Nothing was timed: {here}. Configs were compiled for {card.spec.name}, their times are modelled."]
        )
    clock = CudaClock()
    assert card.index is not None
    with torch.cuda.device(card.index):
        steps = Counter(f"tuning on {card.spec.name}", progress, cancel, AFTER_CANCEL)
        try:
            return joined(tune_all(Tuner(card, torch.device("cuda", card.index), clock, steps, again), problems, configs))
        finally:
            clock.release()


def problems_of(what: Any) -> list[tuple[Kernel, Shape]]:
    """The problems that `warm` takes, as (kernel, shape). Raises ToolkitError for something else."""
    if hasattr(what, "kernel_shapes"):
        what = what.kernel_shapes()
    if isinstance(what, Kernel | str):
        kernel = find_kernel(what)
        return [(kernel, shape) for shape in dict.fromkeys(kernel.known.values())]
    try:
        pairs = [(find_kernel(kernel), shape) for kernel, shape in what]
    except (TypeError, ValueError) as error:
        found = f"{type(what).__name__}, which has no kernel_shapes()"
        raise ToolkitError(f"tuning {what!r:.80}", found, "Give a model, a kernel, or pairs of kernel and shape") from error
    return list(dict.fromkeys((kernel, find_shape(kernel, shape)) for kernel, shape in pairs))


def choices() -> pd.DataFrame:
    """Which config each kernel was given in this process, by which step of the lookup, and why."""
    import pandas as pd

    rows = [{**asdict(one), "config": words(one.config)} for one in lookup.choices()]
    return pd.DataFrame(rows, columns=["kernel", "shape", "gpu", "step", "config", "note"])
