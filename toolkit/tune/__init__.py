"""The public functions of the tuner, which finds the fastest config of a kernel for each GPU.

    tk.tune.explore("int4_matmul", gpus=["rtx-5090", "a100-80g", "h200"])   # one row per config and GPU; needs no GPU
    tk.tune.warm("int4_matmul")                                             # times configs on this machine's GPU
    tk.tune.choices()                                                       # the configs that models use, and why
    with tk.tune.watch() as seen: anybodys_code()                           # @triton.autotune kernels

`python -m toolkit.tune show|export|import|merge|warm` is the command line (`__main__.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from toolkit.core.errors import ToolkitError, brief
from toolkit.core.flags import flag
from toolkit.core.progress import Counter, Progress
from toolkit.core.remote import check_here
from toolkit.kernels.base import Config, Kernel, Shape
from toolkit.kernels.registry import configs_of, find_kernel, find_shape
from toolkit.kernels.registry import kernels as kernels
from toolkit.tune import fleet, lookup
from toolkit.tune.cards import find_card, find_cards
from toolkit.tune.compiling import Job, compile_configs
from toolkit.tune.lookup import choose as choose
from toolkit.tune.results import Tuning, joined
from toolkit.tune.store import words
from toolkit.tune.timing import CudaClock
from toolkit.tune.tuner import Tuner, tune_all
from toolkit.tune.watching import watch as watch

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["choices", "choose", "explore", "kernels", "warm", "watch"]

AFTER_CANCEL = "Results so far are stored; run it again to resume"
WITHOUT_GPU = "h200"  # configs are compiled for it if there is no GPU and none is named


def __dir__() -> list[str]:
    return sorted(__all__)


def explore(
    kernel: Kernel | str,
    shape: Shape | str | None = None,
    gpus: Iterable[Any] | str | None = None,
    configs: Sequence[Config] | None = None,
    progress: bool | Progress = True,
    cancel: threading.Event | None = None,
) -> Tuning:
    """Return resources, limits and time (measured or modelled) of every config of a problem on every GPU.

    `kernel` is a Kernel or its name; `shape` is a Shape, its key or its name (by default the kernel's first known shape);
    `gpus` are GPUs as `choose` takes them (by default the catalogue, and this machine's GPU); `configs` default to the kernel's
    whole space. Configs are compiled, which needs no GPU, but not timed: stored timings are shown as measured, other times are
    modelled. Raises UnknownNameError for an unknown name, DeviceError if Triton is not installed, and CancelledError.
    """
    chosen = find_kernel(kernel)
    problem, cards = find_shape(chosen, shape), find_cards(gpus)
    wanted = configs_of(chosen, problem, configs)
    steps = Counter(f"compiling {chosen.name}", progress, cancel, AFTER_CANCEL)
    # One call for all GPUs keeps every process busy until the end.
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
    cluster: fleet.Cluster | None = None,
) -> Tuning:
    """Tune for a GPU of this machine: compile, check and time every config that has no stored timing, and store the results.

    `what` is a model (any object with `kernel_shapes()`), a kernel or its name (for its known shapes), or (kernel, shape)
    pairs. `again` also repeats configs with stored timings, including those shipped with the package. Setting `cancel` raises
    CancelledError; timings so far are stored, and another call resumes. Without a CUDA GPU, or for a GPU that is not in this
    machine, configs are only compiled, and a note says so. Raises UnknownNameError for an unknown kernel, shape or GPU,
    ToolkitError for anything else that can't be tuned, and DeviceError if Triton or the GPU `device` is missing.

    With a `cluster` (`tk.cluster("cuda")`), its GPUs share the work, instead of `device`. If one of its processes ends, the
    others time its configs. Their timings are stored in one file per type of GPU.
    """
    again, problems = flag("again", again), problems_of(what)
    if cluster is not None:
        if not hasattr(cluster, "spread"):
            raise ToolkitError(f"tuning on {brief(cluster)}", "that is no cluster", "Give the result of tk.cluster(...)")
        steps = Counter("tuning on a cluster", progress, cancel, AFTER_CANCEL)
        if found := fleet.tune_on(cluster, problems, configs, steps, again):
            return joined(found)
    card = find_card(device if cluster is None else cluster.device)
    if card is None or not card.present:
        card = card or find_card(WITHOUT_GPU)
        assert card is not None
        found = tune_all(
            Tuner(card, step=Counter(f"compiling for {card.key}", progress, cancel, AFTER_CANCEL)), problems, configs
        )
        here = "this machine has no CUDA GPU"
        if torch.cuda.is_available():
            here = f'"{card.key}" is an entry of the catalogue, and "cuda" is the GPU of this machine'
        shown = f"Configs were compiled for {card.spec.name}: stored timings are shown as measured, other times are modelled"
        return joined(found, [f"Nothing was timed: {here}. {shown}."])
    clock = CudaClock()
    assert card.index is not None
    with torch.cuda.device(card.index):
        steps = Counter(f"tuning on {card.spec.name}", progress, cancel, AFTER_CANCEL)
        try:
            return joined(tune_all(Tuner(card, torch.device("cuda", card.index), clock, steps, again), problems, configs))
        finally:
            clock.release()


def problems_of(what: Any) -> list[tuple[Kernel, Shape]]:
    """Return the argument of `warm` as (kernel, shape) pairs. Raises ToolkitError if it is neither model, kernel nor pairs."""
    do = "Give (kernel, shape) pairs: those that kernel_shapes() of a rank's part returns, in a function for cluster.run"
    check_here(what, "tuning for a model on a cluster", do)
    if hasattr(what, "kernel_shapes"):
        what = what.kernel_shapes()
    if isinstance(what, Kernel | str):
        kernel = find_kernel(what)
        return [(kernel, shape) for shape in dict.fromkeys(kernel.known.values())]
    try:
        pairs = [(find_kernel(kernel), shape) for kernel, shape in what]
    except (TypeError, ValueError) as error:
        found = "not a model, a kernel or a list of (kernel, shape) pairs"
        raise ToolkitError(f"tuning {what!r:.80}", found, "Give a loaded model, a kernel or its name, or such pairs") from error
    return list(dict.fromkeys((kernel, find_shape(kernel, shape)) for kernel, shape in pairs))


def choices() -> pd.DataFrame:
    """Return one row per lookup in this process since timings were last added.

    A row has the kernel, the shape, the GPU, the config, the step of the lookup that found it, and why.
    """
    import pandas as pd

    rows = [{**asdict(one), "config": words(one.config)} for one in lookup.choices()]
    return pd.DataFrame(rows, columns=["kernel", "shape", "gpu", "step", "config", "note"])
