"""Packages that are traced and not compiled, so that tests of how models are split into pieces are fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from toolkit.exporting import compiling, skeleton
from toolkit.exporting.exporter import _needed
from toolkit.exporting.pieces import METHODS, Anatomy, compiled_for, least_context, traced_context
from toolkit.exporting.running import Exported, Run


def traced_package(model: Any, context: int, kv: str | None = None) -> Exported:
    """Return the package that `tk.export` would make for the CPU, but with the graphs of its pieces in place of native code."""
    shapes = skeleton.from_plain(skeleton.to_plain(model), None)
    runs: dict[str, Run] = {}
    compiled: dict[str, dict[str, str]] = {}
    with compiled_for(shapes, None):
        anatomy = Anatomy(shapes, traced_context(shapes, context), kv)
        for piece in anatomy.distinct():
            for method in (method for method in METHODS if _needed(anatomy, piece, method)):
                runs[f"{piece.name} {method}"] = _run(compiling.trace(anatomy.traceable(piece, method)))
                compiled.setdefault(piece.like, {})[method] = f"{piece.name} {method}"
    names = {id(parameter): name for name, parameter in shapes.named_parameters()}
    post, scalar = anatomy.last
    manifest = {
        "context": context, "chunk": anatomy.chunk, "kv": kv, "least": least_context(shapes), "compiled": compiled,
        "pieces": [{"weights": p.weights, "like": p.like, "layer": p.layer} for p in anatomy.pieces],
        "last": [post and names[id(post.weight)], post.eps if post else 0.0, None if scalar is None else names[id(scalar)]],
    }  # fmt: skip
    return Exported(model, Path("traced"), manifest, runs)


def _run(program: Any) -> Run:
    """Return a function that runs a traced graph without the assertions about shapes, which compiled code omits, too."""
    module = program.module()
    for node in [node for node in module.graph.nodes if node.target is torch.ops.aten._assert_scalar.default]:
        module.graph.erase_node(node)
    module.recompile()

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        made = module(*inputs)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        assert all(output.is_contiguous() for output in outputs), "compiled code assumes that inputs are contiguous"
        return outputs

    return run
