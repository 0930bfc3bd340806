"""Lesson 9, "Export under a budget": its questions, and rehearsals of exports."""

from __future__ import annotations

from dataclasses import astuple

import torch

from toolkit.gpu.virtual.device import VirtualGpu
from toolkit.planning.plans import Levers, Plan
from toolkit.ui.lessons.lesson import Lesson, Question
from toolkit.vram.budget import Budget, budget
from toolkit.vram.measure import memory

QUESTIONS = {
    "weights": Question(
        hint="Multiply the number of weights by the bits of a weight. A byte has 8 bits, and a GiB has 2**30 bytes.",
        why="Weights x bits / 8 bytes. Nothing of that is needed to compile: packages of other tools have the weights inside, "
        "and so their exports need a GPU on which the whole model fits.",
        answer='{"GiB of weights": weights * (8 * costs.weight_bytes / weights) / 8 / 2**30}',
        within=0.05,
        who="the plan",
    ),
    "inputs": Question(
        hint="Copy the two lines of Layer.forward, with `weight` and `seen` in place of `self.weight` and `self.seen`. "
        "Nothing is left for __init__ to do.",
        why="The graph knows shapes and dtypes of its inputs, and no value of them. `tk.export` calls every layer in this way.",
        answer="""\
class Step(nn.Module):
    def forward(self, x, at, weight, seen):
        seen[at] = x
        return torch.tanh(x @ weight.T) + seen.sum(0)""",
    ),
    "state": Question(
        hint="For each layer, count the numbers: a key and a value for each token that it sees and each head. Then 2 bytes for "
        "each number, and twice the total.",
        why="2 copies of (10 x 4 x (128 + 512) x 131,072 + 50 x 2 x 16 x 256 x 1,024) numbers of 2 bytes. The rest are tables "
        "of sines and cosines, which also grow with the context.",
        answer='{"GiB of state": 2 * 2 * (10 * 4 * (128 + 512) * 131_072 + 50 * 2 * 16 * 256 * 1024) / GiB}',
        within=0.1,
        who="the plan",
    ),
    "table": Question(
        hint="Rows x numbers in a row x bytes of a number. bfloat16 has 16 bits.",
        why="`tk.export` reads embeddings outside its graphs, multiplies packed matrices directly, and doesn't let the "
        "compiler time kernels: configs come from the tuner's files (lesson 7).",
        answer='{"GiB of table": 262_144 * 5376 * 2 / GiB}',
        within=0.05,
        who="the plan",
    ),
    "few levers": Question(
        hint="Which two of the answers above were the largest? Everything else of the picture in section 1 must fit.",
        why="The weights and the two copies of the state are most of the memory. Without them, the compiler's own copies fit.",
        answer="""\
my_levers = Levers(
    weights_as_inputs=True, state_as_inputs=True, tables_outside=False, tiled_dequantization=False
)""",
    ),
    "smallest budget": Question(
        hint="Which memory of the model is on the GPU while it is compiled, if all levers are used? What is left?",
        why="The context and one block. It doesn't depend on the model, because nothing of the model is on the GPU while it is "
        "compiled.",
        answer='{"MiB": 518 + 2}',
        who="the plan",
    ),
    "pieces": Question(
        hint="Layers of one kind are compiled once, but for two methods. And what is compiled besides layers?",
        why="One layer with two methods, and the head. The 60 layers of the 31B model are of 4 kinds: 9 pieces.",
        answer='{"pieces": 2 + 1}',
        who="the package",
    ),
    "longer": Question(
        hint="The cache has the size of the context. Is the cache inside the graphs?",
        why="The cache is an input, and the graphs accept caches of any length, so the new package takes all pieces from the "
        "old one.",
        answer='{"compiled": 0}',
        who="the package",
    ),
}

lesson = Lesson(
    "export_under_a_budget",
    "Export under a budget",
    minutes=45,
    goals=(
        "say which memory a compiler uses, and which of it is needed",
        "predict the memory of an export from the shapes of a model",
        "write a module whose graph contains no weights",
        "export a model within a budget, and check the package",
    ),
    questions=QUESTIONS,
)


def rehearse(plan: Plan, gpu: VirtualGpu) -> int:
    """Allocate the memory of each phase of an export, except that of the CUDA context, and return the peak in bytes.

    The memory has sizes and no values. Raises torch.OutOfMemoryError if it doesn't fit.
    """
    with gpu.sizes_only(), memory(gpu) as use:
        for phase in plan.export:
            parts = (n for part, n in phase.parts.items() if part != "CUDA")
            held = [torch.empty(n, dtype=torch.uint8, device=gpu.torch) for n in parts]
            del held
    return use.peak_bytes


def fits(plan: Plan, gpu: VirtualGpu, limit: str) -> bool:
    """Return whether a rehearsal of the plan fits into a budget such as "8 GiB"."""
    limited = budget(limit, gpu)
    assert isinstance(limited, Budget)  # None only removes a limit
    try:
        with limited:
            rehearse(plan, gpu)
    except torch.OutOfMemoryError:
        return False
    return True


def levers_used(levers: Levers) -> int:
    """Return how many of the levers are on."""
    return sum(astuple(levers))


def bytes_in(graph: torch.export.ExportedProgram) -> int:
    """Return the bytes of all tensors that an exported graph contains."""
    tensors = [*graph.state_dict.values(), *graph.constants.values()]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
