"""Where the time of one decode step goes, kernel by kernel, and how far each kernel is from the bandwidth of the GPU.

`expected_launches` runs one step launch by launch and notes which kernels each operation launches and how many bytes it has to
move. `breakdown` divides the time of a recorded step among these operations. Kernels may overlap, and a kernel may start early
and wait for the one before it. So a kernel gets the time from the end of the kernels before it to its own end, and all parts
add up to the step.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.decode.loop import check_token
from toolkit.decode.prefix import Prefix
from toolkit.decode.sampling import Sampling
from toolkit.decode.step import Fallback, Step
from toolkit.decode.strategies import STRATEGIES
from toolkit.gpu.device import Device
from toolkit.gpu.virtual.effects.lookup import effects
from toolkit.kernels.base import Kernel, Shape
from toolkit.ops.define import problem_of
from toolkit.trace.columns import KINDS
from toolkit.trace.events import Trace
from toolkit.tune.lookup import choose

FIRST_STEADY = 4  # the first decode step after all captures
_OTHER = ""  # the name of every launch of PyTorch's own kernels: their names differ between GPUs and versions


class Expected(NamedTuple):
    """An operation of a step: its label, the names of the kernels that it launches, and the bytes that it must move."""

    label: str
    kernels: tuple[str, ...]
    bytes: int


def expected_launches(prefix: Prefix, ids: Sequence[int], name: str, chunk: int) -> list[Expected]:
    """Return the operations of a decode step of the strategy `name`, in order. `ids` is the prompt, which continues the prefix.

    The step runs once, launch by launch. It is empty on the CPU.
    """
    device = prefix.model.device
    if device.torch.type == "cpu":
        return []
    strategy = STRATEGIES["double-buffered" if STRATEGIES[name].capture == "loop" else name]
    with prefix.in_use() as cache, torch.no_grad():
        step = Step(prefix.model, strategy, Sampling(), cache, ids, 2, Fallback(False))
        try:
            token = step.prefill(chunk, threading.Event())
            assert token is not None
            known = check_token(int(token.item()), 0)
            with _Operations(device) as noted:
                step.start(1, known)
        finally:
            step.free()
    return noted.expected()


class _Operations(TorchDispatchMode):
    """Notes the operations that run in the block."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self._found: list[tuple[str | tuple[Kernel, Shape], tuple[str, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        out = func(*args, **(kwargs or {}))
        launched = [effect for effect in effects(func, args, kwargs or {}, out) if effect.kind in ("kernel", "memset", "d2d")]
        if func.namespace == "toolkit":
            kernel, shape = problem_of(func._schema.name.partition("::")[2], args)
            modelled = self._device.clock == "modelled"
            names = tuple(effect.name for effect in launched) if modelled else self._names(kernel, shape)
            self._found.append(((kernel, shape), names, kernel.cost(shape).bytes))
        elif launched:
            moved = sum(effect.moved_bytes for effect in launched)
            self._found.append((func._schema.name.partition("::")[2], (_OTHER,) * len(launched), moved))
        return out

    def _names(self, kernel: Kernel, shape: Shape) -> tuple[str, ...]:
        """Return the names of the kernels that an operation launches on this GPU."""
        inputs = kernel.inputs(shape, "meta")
        config = choose(kernel, shape, self._device.torch).config
        launches = kernel.launches(shape, config, inputs, kernel.outputs(shape, inputs))
        return tuple(launch.function.__name__ for launch in launches if 0 not in launch.grid)

    def expected(self) -> list[Expected]:
        """Return the operations with labels."""
        labels = _labels([what for what, _, _ in self._found if not isinstance(what, str)])
        return [Expected(what if isinstance(what, str) else labels[what], names, size) for what, names, size in self._found]


def _labels(problems: Sequence[tuple[Kernel, Shape]]) -> dict[tuple[Kernel, Shape], str]:
    """Return "rms_norm" or, if a kernel has several shapes, "int4_matmul n=4096 k=12288": the fewest fields that differ."""
    shapes: dict[Kernel, list[Shape]] = {}
    for kernel, shape in dict.fromkeys(problems):
        shapes.setdefault(kernel, []).append(shape)
    labels: dict[tuple[Kernel, Shape], str] = {}
    for kernel, each in shapes.items():
        parts: list[tuple[str, ...]] = [(kernel.name,)] * len(each)
        for field in fields(each[0]):
            finer = [(*part, f"{field.name}={getattr(shape, field.name)}") for part, shape in zip(parts, each, strict=True)]
            if len(set(finer)) > len(set(parts)):
                parts = finer
        labels |= {(kernel, shape): " ".join(part) for shape, part in zip(each, parts, strict=True)}
    return labels


def breakdown(trace: Trace, expected: Sequence[Expected] = ()) -> dict[str, Any] | None:
    """Return where the time of a recorded step goes; None if no steady step with kernels was recorded.

    A step lasts from the end of the last kernel of the step before to that of its own last kernel. The step of median length is
    taken. In the result, `step_us` is its length, and `gap_us` the time in it without any kernel. A row of `kernels` has
    `count` launches, which ran for `us` after the kernels before them had ended, and the gaps right before them (`gap_us`): all
    `us` and `gap_us` add up to the step. `bytes` is what the launches have to read and write, None if that isn't known. Kernels
    whose count isn't the expected one are shown by their own names, without bytes.
    """
    work = trace.select(trace.is_kind("kernel", "memset", "d2d") & (trace["step"] >= FIRST_STEADY - 1))
    busiest = np.bincount(work["stream"] + 1).argmax() - 1 if len(work) else 0
    work = work.select(work["stream"] == busiest)
    ends_ns = work["start_ns"] + work["dur_ns"]
    ended = {int(step): int(ends_ns[work["step"] == step].max()) for step in np.unique(work["step"])}
    lengths = {step: ended[step] - ended[step - 1] for step in ended if step - 1 in ended}
    if not lengths:
        return None
    step = sorted(lengths, key=lengths.__getitem__)[len(lengths) // 2]
    chosen = work.select(work["step"] == step)
    names = [name or KINDS[kind] for name, kind in zip(chosen.text("name"), chosen["kind"].tolist(), strict=True)]
    labels, sizes = _matched(names, expected)
    counts, ran_ns, gap_ns = Counter(labels), Counter[str](), Counter[str]()
    covered = ended[step - 1]
    for label, start, length in zip(labels, chosen["start_ns"].tolist(), chosen["dur_ns"].tolist(), strict=True):
        gap_ns[label] += max(0, start - covered)
        ran_ns[label] += max(0, start + length - max(start, covered))
        covered = max(covered, start + length)
    rows = [
        {"name": label, "count": counts[label], "us": ns / 1e3, "gap_us": gap_ns[label] / 1e3, "bytes": sizes.get(label)}
        for label, ns in ran_ns.most_common()
    ]
    return {"step_us": lengths[step] / 1e3, "gap_us": gap_ns.total() / 1e3, "kernels": rows}


def _matched(names: Sequence[str], expected: Sequence[Expected]) -> tuple[list[str], dict[str, int]]:
    """Return the label of each launch of a step, and the bytes of each label. Launches of a name are in the expected order."""
    due: dict[str, deque[str]] = defaultdict(deque)
    for one in expected:
        for name in one.kernels:
            due[name].append(one.label)
    known = [name if name in due else _OTHER for name in names]
    counts = Counter(known)
    odd = {name for name in due if counts[name] != len(due[name])}
    unknown = {label for name in odd for label in due[name]}
    sizes: Counter[str] = Counter()
    for one in expected:
        if one.label not in unknown:
            sizes[one.label] += one.bytes
    found = [due[key].popleft() if key in due and key not in odd else name for name, key in zip(names, known, strict=True)]
    return found, dict(sizes)
