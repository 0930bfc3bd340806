"""A model that the ranks of a cluster hold: `tk.load(..., cluster=cluster)` returns it, `tk.generate` and `tk.compare` run it.

The functions below run on all ranks, which keep the models in `_models`, by number.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Set
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

from toolkit.core.errors import ModelError, RankError, brief
from toolkit.core.ranks import current
from toolkit.decode.compare import Comparison, compare
from toolkit.decode.loop import generate
from toolkit.decode.run import Run
from toolkit.decode.strategies import OwnLoop, Strategy, find_strategy
from toolkit.loading.loader import load
from toolkit.loading.report import Report
from toolkit.models.model import Remote
from toolkit.ranks.runs import joined

if TYPE_CHECKING:
    from toolkit.ranks.cluster import Cluster

_numbers = count()
_models: dict[int, Any] = {}  # on a rank
LOCAL = {
    "cancel": "Interrupt the cell instead, which stops all ranks",
    "prefix": "Leave it out: its cache would be in this process",
}  # options of `generate` that can't cross


class RankedModel(Remote):
    """A model divided among the ranks of a cluster. Get one from `tk.load(..., cluster=cluster)`.

    Attributes:
        cluster: The cluster.
        path: The name or path that was loaded.
        reports: What each rank loaded, by rank.
    """

    def __init__(self, cluster: Cluster, path: Any, options: dict[str, Any]) -> None:
        self._number = next(_numbers)
        self.cluster, self.path = cluster, path
        try:
            self.reports: list[Report] = cluster.run(
                _load, self._number, set(cluster.handles), path, cluster.device, cluster.ranks, options
            )
        except BaseException:
            if not cluster.closed:
                with suppress(RankError):  # ranks that loaded their part before another failed
                    self.free()
            raise
        cluster.handles[self._number] = self

    def __repr__(self) -> str:
        return f"RankedModel({self.path!r} on {self.cluster!r})"

    def generate(self, prompt: Any, decode: str | Strategy | OwnLoop, **options: Any) -> Run:
        """Generate on all ranks and return the run, whose trace has the events of all of them; see `tk.generate`.

        `on_token` is called on rank 0, in its process. Raises RankError if a rank fails, and ModelError for an option that only
        works in this process.
        """
        _check("generating", options)
        find_strategy(decode)
        return joined(self.cluster.run(_generate, self._number, prompt, decode, options))

    def compare(self, prompt: Any, decode: Iterable[str | Strategy] | None, **options: Any) -> Comparison:
        """Generate with each strategy on all ranks. The table is that of rank 0; each run has the events of all ranks."""
        _check("comparing", options)
        names = decode if decode is None or isinstance(decode, str | Strategy) else list(decode)
        found: list[Comparison] = self.cluster.run(_compare, self._number, prompt, names, options)
        return replace(found[0], runs={label: joined([one.runs[label] for one in found]) for label in found[0].runs})

    def free(self) -> None:
        """Free the weights on all ranks. The next `tk.load` on the cluster frees those of lost handles, and closing it all."""
        self.cluster.run(_free, self._number)


def load_on(cluster: Cluster, path: Any, options: dict[str, Any]) -> RankedModel:
    """Load a model onto the ranks of a cluster; see `tk.load`. Raises ModelError for options that only work in one process."""
    asked = f"loading {brief(path)} onto a cluster"
    device, ranks = options.pop("device"), options.pop("tensor_parallel")
    if device != "auto" or ranks not in (1, cluster.ranks):
        found = f"device={brief(device)}, tensor_parallel={brief(ranks)}"
        raise ModelError(asked, found, f"Leave them out: the cluster has {cluster.ranks} ranks with {cluster.device}")
    if options["engine"] == "hf":
        raise ModelError(asked, 'engine="hf" models are not divided', "Leave out engine")
    if callable(options.pop("progress")) or options.pop("cancel") is not None:
        raise ModelError(asked, "a function of progress or an event to cancel", "Leave them out; interrupt the cell to stop")
    return RankedModel(cluster, path, options)


def _check(asked: str, options: dict[str, Any]) -> None:
    for name, do in LOCAL.items():
        if options.get(name) is not None:
            raise ModelError(f"{asked} on a cluster", f"{name}= only works in one process", do)


def _load(number: int, held: Set[int], path: Any, device: str, ranks: int, options: dict[str, Any]) -> Report:
    """Load a model. Those whose numbers are not in `held` have lost their handles, and are freed before."""
    for lost in _models.keys() - held:
        del _models[lost]
    gc.collect()
    _models[number] = load(path, device, tensor_parallel=ranks, progress=False, **options)
    report: Report = _models[number].report
    return report


def _generate(number: int, prompt: Any, decode: Any, options: dict[str, Any]) -> Run:
    return generate(_models[number], prompt, decode, **_own(options))


def _compare(number: int, prompt: Any, decode: Any, options: dict[str, Any]) -> Comparison:
    return compare(_models[number], prompt, decode, **_own(options))


def _own(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of this rank: tokens are told on rank 0 only."""
    return options if current().rank == 0 else {**options, "on_token": None}


def _free(number: int) -> None:
    _models.pop(number, None)
