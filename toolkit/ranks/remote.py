"""A model that the ranks of a cluster hold: `tk.load(..., cluster=cluster)` returns it, `tk.generate` and `tk.compare` run it.

The functions below run on all ranks, which keep the models in `_models`, by number.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from torch import nn

from toolkit.core.distributed import current
from toolkit.core.errors import ModelError, RankError, RecorderError, brief, unknown_name
from toolkit.core.progress import check_cancel
from toolkit.core.remote import Remote
from toolkit.core.units import plural
from toolkit.decode.compare import Comparison, compare
from toolkit.decode.loop import generate
from toolkit.decode.run import Run
from toolkit.decode.strategies import STRATEGIES, OwnLoop, Strategy, strategies_of
from toolkit.gpu import allocation_scopes
from toolkit.gpu.device import recorded_for_all
from toolkit.loading.loader import load
from toolkit.loading.report import Report
from toolkit.ranks.runs import joined

if TYPE_CHECKING:
    from toolkit.ranks.cluster import Cluster

_OR_RUN = "Or give cluster.run a function that contains the block"
_numbers = count()
_models: dict[int, Any] = {}  # on a rank


class RankedModel(Remote):
    """A model divided among the ranks of a cluster. Get one from `tk.load(..., cluster=cluster)`.

    Attributes:
        cluster: The cluster.
        path: The name or path that was loaded.
        named: The path, scheme and dtype that were given, as text.
        reports: What each rank loaded, by rank.
        clock: "measured" or "modelled", the clock of its devices.
        strategies: The names of the decode strategies that can run it.
        has_tokenizer: Whether prompts can be text.
    """

    def __init__(self, cluster: Cluster, path: Any, cancel: threading.Event | None, options: dict[str, Any]) -> None:
        self._number = next(_numbers)
        self.cluster, self.path = cluster, path
        given = [f"{name}={options[name]!r}" for name in ("scheme", "dtype") if options.get(name) is not None]
        self.named = ", ".join([repr(os.fspath(path)) if isinstance(path, os.PathLike) else repr(path), *given])
        try:
            arguments = (self._number, set(cluster.handles), path, cluster.device, cluster.ranks, options)
            found: list[Loaded] = cluster.run_as(f"loading {brief(path)}", cancel, _load, *arguments)
        except BaseException:
            with suppress(RankError):  # ranks that loaded their part before another failed
                self.free()
            raise
        cluster.handles[self._number] = self
        self.reports = [each.report for each in found]
        self.clock, self.strategies, self.has_tokenizer = found[0].clock, found[0].strategies, found[0].has_tokenizer

    def __repr__(self) -> str:
        return f"RankedModel({self.path!r} on {self.cluster!r})"

    def __reduce__(self) -> Any:
        part = f"tk.load({self.named}, device={self.cluster.device!r}, tensor_parallel={self.cluster.ranks})"
        found = "it is a handle, which only works in the process that opened the cluster"
        raise ModelError(f"sending the model {brief(self.path)}", found, f"Load the rank's part inside the function: {part}")

    def generate(self, prompt: Any, decode: str | Strategy | OwnLoop, **options: Any) -> Run:
        """Generate on all ranks and return the run, whose trace has the events of all of them; see `tk.generate`.

        `on_token` is called on rank 0, in its process. `cancel` interrupts all ranks; their tokens are lost. Raises
        CancelledError, RankError if a rank fails, ModelError for a prefix, which only works in one process, and RecorderError
        inside of a block that records or measures this process only.
        """
        self._check_ready("generating")
        cancel = _event(options)
        named = isinstance(decode, str) and (decode in STRATEGIES or decode in self.strategies)
        if not named and not isinstance(decode, Strategy | OwnLoop):
            raise unknown_name("decode strategy", decode, self.strategies)
        return joined(self.cluster.run_as("generating", cancel, _generate, self._number, prompt, decode, options))

    def compare(self, prompt: Any, decode: Iterable[str | Strategy] | None, **options: Any) -> Comparison:
        """Generate with each strategy on all ranks. The table is that of rank 0; each run has the events of all ranks.

        Raises as `generate` does.
        """
        self._check_ready("comparing")
        cancel = _event(options)
        names = list(decode) if isinstance(decode, Iterable) and not isinstance(decode, str) else decode
        found: list[Comparison] = self.cluster.run_as("comparing", cancel, _compare, self._number, prompt, names, options)
        return replace(found[0], runs={label: joined([one.runs[label] for one in found]) for label in found[0].runs})

    def free(self) -> None:
        """Free the weights on all ranks.

        If a handle is garbage-collected, the next `tk.load` on the cluster frees its weights. Closing the cluster frees all.
        """
        if not self.cluster.closed:
            self.cluster.run_as(f"freeing {brief(self.path)}", None, _free, self._number)
        self.cluster.handles.pop(self._number, None)

    def _check_ready(self, doing: str) -> None:
        asked = f"{doing} with {brief(self.path)}"
        if self._number not in self.cluster.handles:
            raise ModelError(asked, "its weights were freed", "Load it again")
        check_seen(asked, f"Do it outside of that block: run.copies() and run.timeline() of a run show the ranks. {_OR_RUN}")


def load_on(cluster: Cluster, path: Any, options: dict[str, Any]) -> RankedModel:
    """Load a model onto the ranks of a cluster; see `tk.load`. Raises ModelError for what only works in one process.

    Raises RecorderError inside of a block that records or measures this process only.
    """
    if isinstance(path, nn.Module):
        asked, do = f"loading an instance of {type(path).__name__} onto a cluster", 'Pass its folder with engine="hf"'
        raise ModelError(asked, "its weights are in this process, and each rank reads its own part from files", do)
    asked = f"loading {brief(path)} onto a cluster"
    device, ranks = options.pop("device"), options.pop("tensor_parallel")
    if device != "auto" or ranks not in (1, cluster.ranks):
        found, has = f"device={brief(device)}, tensor_parallel={brief(ranks)}", plural(cluster.ranks, "rank")
        raise ModelError(asked, found, f"Leave them out: the cluster has {has} with {cluster.device}")
    if callable(options.pop("progress")):
        raise ModelError(asked, "a function of progress, which only works in one process", "Leave it out")
    check_seen(asked, f"Do it outside of that block. {_OR_RUN}")
    return RankedModel(cluster, path, _event(options), options)


def check_seen(asked: str, do: str) -> None:
    """Raise RecorderError inside of a block that records or measures this process: it would see nothing of the ranks.

    `do` says what to do inside of a block that records.
    """
    if device := recorded_for_all():
        by = "tk.record, tk.copy_budget, %%copies or a test with a budget"
        found = f"this process records {device} ({by}), and not the processes of the ranks"
        raise RecorderError(asked, found, do)
    if allocation_scopes.asked_for():
        found = "this process measures its own memory (tk.memory or %%memory), and not that of the ranks"
        raise RecorderError(
            asked, found, "Do it outside of that block, and give cluster.memory a function that contains the block"
        )


def _event(options: dict[str, Any]) -> threading.Event | None:
    """Remove the option `cancel`, which stays in this process, and return it. Raises ModelError for a prefix."""
    if options.get("prefix") is not None:
        do = "Leave it out: its cache would be in this process"
        raise ModelError("generating on a cluster", "prefix= only works in one process", do)
    cancel: threading.Event | None = options.pop("cancel", None)
    check_cancel(cancel, ModelError)
    return cancel


@dataclass(frozen=True)
class Loaded:
    """What a rank says about the model that it has loaded."""

    report: Report
    clock: str
    strategies: tuple[str, ...]
    has_tokenizer: bool


def _load(number: int, held: Set[int], path: Any, device: str, ranks: int, options: dict[str, Any]) -> Loaded:
    """Load a model. Those whose numbers are not in `held` have lost their handles, and are freed before."""
    for lost in _models.keys() - held:
        del _models[lost]
    gc.collect()
    model = _models[number] = load(path, device, tensor_parallel=ranks, progress=False, **options)
    return Loaded(model.report, model.device.clock, tuple(strategies_of(model)), model.tokenizer is not None)


def _generate(number: int, prompt: Any, decode: Any, options: dict[str, Any]) -> Run:
    return generate(_models[number], prompt, decode, **_own(options))


def _compare(number: int, prompt: Any, decode: Any, options: dict[str, Any]) -> Comparison:
    return compare(_models[number], prompt, decode, **_own(options))


def _own(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of this rank: tokens are told on rank 0 only."""
    return options if current().rank == 0 else {**options, "on_token": None}


def _free(number: int) -> None:
    _models.pop(number, None)
