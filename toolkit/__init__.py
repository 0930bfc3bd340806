"""Decode Toolkit: where did my GPU memory go, and what is being copied at every token?

    import toolkit as tk
    gpu   = tk.device("virtual:rtx-5090")          # a GPU that isn't there; or "cuda"
    model = tk.load("demo/qwen3", device=gpu)
    run   = tk.generate(model, "The capital of France is", decode="double-buffered")
    run.copies()                                   # what crossed between host and GPU, a row a step

Importing this costs nothing: every name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "device": "toolkit.devices.base:open_device",
    "record": "toolkit.devices.base:record",
    "load": "toolkit.loading:load",
    "costs": "toolkit.describing:costs",
    "plan": "toolkit.describing:plan",
    "quantize": "toolkit.quantising:quantize",
    "generate": "toolkit.decode.loop:generate",
    "export": "toolkit.exporting:export",
    "load_exported": "toolkit.exporting:load_exported",
    "compare": "toolkit.decode.compare:compare",
    "copy_budget": "toolkit.decode.compare:copy_budget",
    "open_trace": "toolkit.traces:open_trace",
    "memory": "toolkit.accounting:memory",
    "open_memory": "toolkit.accounting:open_memory",
    "budget": "toolkit.budgeting:budget",
    "STRATEGIES": "toolkit.decode.strategies:STRATEGIES",
    "tune": "toolkit.kernels.tune",
    "GPUS": "toolkit.devices.spec:CATALOGUE",
    "Lab": "toolkit.notebook.lab:Lab",
    "Trace": "toolkit.trace:Trace",
    "ToolkitError": "toolkit.errors:ToolkitError",
    "CopyBudgetError": "toolkit.errors:CopyBudgetError",
    "BudgetError": "toolkit.errors:BudgetError",
    "PackageError": "toolkit.errors:PackageError",
}

__all__ = ["__version__", "load_ipython_extension", *_PUBLIC]

if TYPE_CHECKING:
    from toolkit.accounting import memory as memory
    from toolkit.accounting import open_memory as open_memory
    from toolkit.budgeting import budget as budget
    from toolkit.decode.compare import compare as compare
    from toolkit.decode.compare import copy_budget as copy_budget
    from toolkit.decode.loop import generate as generate
    from toolkit.decode.strategies import STRATEGIES as STRATEGIES
    from toolkit.describing import costs as costs
    from toolkit.describing import plan as plan
    from toolkit.devices.base import open_device as device
    from toolkit.devices.base import record as record
    from toolkit.devices.spec import CATALOGUE as GPUS
    from toolkit.errors import BudgetError as BudgetError
    from toolkit.errors import CopyBudgetError as CopyBudgetError
    from toolkit.errors import PackageError as PackageError
    from toolkit.errors import ToolkitError as ToolkitError
    from toolkit.exporting import export as export
    from toolkit.exporting import load_exported as load_exported
    from toolkit.kernels import tune as tune
    from toolkit.loading import load as load
    from toolkit.notebook.lab import Lab as Lab
    from toolkit.quantising import quantize as quantize
    from toolkit.trace import Trace as Trace
    from toolkit.traces import open_trace as open_trace

    __all__ += ["GPUS", "device"]  # renamed, so not re-exported by the form above


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'toolkit' has no attribute {name!r}")
    path, _, attribute = _PUBLIC[name].partition(":")
    module = importlib.import_module(path)
    value = globals()[name] = getattr(module, attribute) if attribute else module
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext toolkit`: registers the magics."""
    from toolkit.notebook.magics import register

    register(shell)
