"""Decode Toolkit: see where GPU memory goes, and what is copied between host and GPU at every token.

    import toolkit as tk
    gpu   = tk.device("virtual:rtx-5090")          # a simulated GPU; or "cuda"
    model = tk.load("demo/qwen3", device=gpu)
    run   = tk.generate(model, "The capital of France is", decode="double-buffered")
    run.copies()                                   # copies between host and GPU, one row per step

Importing the package is fast, because each name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from toolkit.core.signals import signals_deferred
from toolkit.core.version import __version__ as __version__

_PUBLIC = {
    "device": "toolkit.gpu.opening:open_device",
    "record": "toolkit.gpu.opening:record",
    "load": "toolkit.loading.loader:load",
    "costs": "toolkit.planning.describe:costs",
    "plan": "toolkit.planning.describe:plan",
    "quantize": "toolkit.loading.quantization:quantize",
    "generate": "toolkit.decode.loop:generate",
    "export": "toolkit.exporting.exporter:export",
    "load_exported": "toolkit.exporting.exporter:load_exported",
    "compare": "toolkit.decode.compare:compare",
    "copy_budget": "toolkit.decode.copy_budget:copy_budget",
    "open_trace": "toolkit.trace.opening:open_trace",
    "memory": "toolkit.vram.measure:memory",
    "open_memory": "toolkit.vram.measure:open_memory",
    "budget": "toolkit.vram.budget:budget",
    "STRATEGIES": "toolkit.decode.strategies:STRATEGIES",
    "tune": "toolkit.tune",
    "GPUS": "toolkit.gpu.catalogue:CATALOGUE",
    "cluster": "toolkit.ranks.cluster:cluster",
    "Lab": "toolkit.ui.lab.app:Lab",
    "Trace": "toolkit.trace.events:Trace",
    "errors": "toolkit.core.errors",
    "ToolkitError": "toolkit.core.errors:ToolkitError",
    "CopyBudgetError": "toolkit.core.errors:CopyBudgetError",
    "BudgetError": "toolkit.core.errors:BudgetError",
    "PackageError": "toolkit.core.errors:PackageError",
    "RankError": "toolkit.core.errors:RankError",
}

__all__ = ["__version__", "load_ipython_extension", *_PUBLIC]

if TYPE_CHECKING:
    from toolkit import tune as tune
    from toolkit.core import errors as errors
    from toolkit.core.errors import BudgetError as BudgetError
    from toolkit.core.errors import CopyBudgetError as CopyBudgetError
    from toolkit.core.errors import PackageError as PackageError
    from toolkit.core.errors import RankError as RankError
    from toolkit.core.errors import ToolkitError as ToolkitError
    from toolkit.decode.compare import compare as compare
    from toolkit.decode.copy_budget import copy_budget as copy_budget
    from toolkit.decode.loop import generate as generate
    from toolkit.decode.strategies import STRATEGIES as STRATEGIES
    from toolkit.exporting.exporter import export as export
    from toolkit.exporting.exporter import load_exported as load_exported
    from toolkit.gpu.catalogue import CATALOGUE as GPUS
    from toolkit.gpu.opening import open_device as device
    from toolkit.gpu.opening import record as record
    from toolkit.loading.loader import load as load
    from toolkit.loading.quantization import quantize as quantize
    from toolkit.planning.describe import costs as costs
    from toolkit.planning.describe import plan as plan
    from toolkit.ranks.cluster import cluster as cluster
    from toolkit.trace.events import Trace as Trace
    from toolkit.trace.opening import open_trace as open_trace
    from toolkit.ui.lab.app import Lab as Lab
    from toolkit.vram.budget import budget as budget
    from toolkit.vram.measure import memory as memory
    from toolkit.vram.measure import open_memory as open_memory

    __all__ += ["GPUS", "device"]  # renamed, so not re-exported by the form above


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    path, _, attribute = _PUBLIC[name].partition(":")
    with signals_deferred:  # PyTorch can't be imported again after an import that was interrupted
        module = _lab(path) if name == "Lab" else importlib.import_module(path)
    value = globals()[name] = getattr(module, attribute) if attribute else module
    return value


def _lab(path: str) -> Any:
    from toolkit.core.display import import_ui

    return import_ui(path, "tk.Lab")


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics. IPython calls this for `%load_ext toolkit`."""
    with signals_deferred:  # as in `__getattr__`
        from toolkit.ui.magics.copies import register

    register(shell)
