"""Measure what convolutions allocate on a CUDA GPU, and compare it with the rules of the virtual GPU.

    python -m tests.golden.convolutions measure OUT.gz [SECONDS [SEED]]
    python -m tests.golden.convolutions check OUT.json [MEASURED.gz]

The convolutions are those of `tests/programs`, their neighbours that differ in one field, and random ones, in random order.
`measure` needs only PyTorch. It calls the forward pass and the gradients of input and weight one by one, twice, since cuDNN's
plans are cached after the first call. It writes a line for each convolution, with the sizes that the second call of each pass
requested, in order (negative for a free). It stops after SECONDS. Another SEED draws other sizes. `h200_convolutions.gz` is
what an H200 did.

`check` compares the convolutions of that file, or of another one, with the rules, and writes how many workspaces are equal.
"""

from __future__ import annotations

import datetime
import gzip
import importlib
import json
import math
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PASSES = ("forward", "input", "weight")
WITH_CONVOLUTIONS = {
    "vision": (
        "resnet_training", "mobilenet_inference", "unet_segmentation", "vit_mixup",
        "video_classification", "super_resolution"),
    "audio": ("ctc_training", "wavenet_generation", "keyword_spotting", "vocoder_training"),
    "diffusion": ("ddpm_training", "variational_autoencoder", "guided_latents", "dcgan_training"),
    "quantised": ("fake_quantisation",),
}  # fmt: skip
MARK = 1_000_003  # bytes: an allocation of this size separates calls
CHUNK = 40  # convolutions that are measured at a time
MEASURED = Path(__file__).parent / "h200_convolutions.gz"
MOST_BYTES, MOST_OPERATIONS = 24 << 20, 4e10


@dataclass(frozen=True)
class Case:
    """A convolution. `x` is the shape of the input; `w` that of the weight."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    dtype: str = "float32"
    channels_last: bool = False
    tf32: bool = True  # torch.backends.cudnn.allow_tf32, whose default is True
    origin: str = ""  # "program", "neighbour" or "random"

    def options(self) -> tuple[Any, ...]:
        zeros = self.output_padding or (0,) * len(self.stride)
        return (
            list(self.stride),
            list(self.padding),
            list(self.dilation),
            self.transposed,
            list(zeros),
            self.groups,
        )

    def output(self) -> tuple[int, ...]:
        """Return the shape of the output; sizes below 1 mean that the case is invalid."""
        zeros = self.output_padding or (0,) * len(self.stride)
        sizes = []
        for n, k, s, p, d, o in zip(self.x[2:], self.w[2:], self.stride, self.padding, self.dilation, zeros, strict=True):
            if self.transposed:
                sizes.append((n - 1) * s - 2 * p + d * (k - 1) + o + 1)
            else:
                sizes.append((n + 2 * p - d * (k - 1) - 1) // s + 1)
        return (self.x[0], self.w[1] * self.groups if self.transposed else self.w[0], *sizes)

    def is_valid(self) -> bool:
        channels, out = self.x[1], self.output()
        wanted = self.w[0] if self.transposed else self.w[1] * self.groups
        fits = channels == wanted and min(out[2:]) > 0 and channels % self.groups == 0 and out[1] % self.groups == 0
        most = 4 * max(math.prod(self.x), math.prod(self.w), math.prod(out))
        operations = 2 * math.prod(self.w) * self.x[0] * math.prod((self.x if self.transposed else out)[2:])
        return fits and most <= MOST_BYTES and operations <= MOST_OPERATIONS


# ------------------------------------------------------------------------------------------------------------ which cases


class _Convolutions(TorchDispatchMode):
    """Notes every convolution that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: dict[Case, None] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.name() in ("aten::conv1d", "aten::conv2d", "aten::conv3d"):  # whole under torch.inference_mode
            with self:
                return function.decompose(*args, **(kwargs or {}))
        if function in (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default):
            x, w, _, stride, padding, dilation, transposed, zeros, groups = args[:9]
            last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
            dtype = str(x.dtype).removeprefix("torch.")
            lists = (tuple(int(n) for n in pair) for pair in (stride, padding, dilation))
            case = Case(tuple(x.shape), tuple(w.shape), *lists, transposed, tuple(zeros), groups, dtype, last, origin="program")
            self.cases[case] = None
        return function(*args, **(kwargs or {}))


def of_programs() -> list[Case]:
    """Return the convolutions of the programs, which run on the CPU for this."""
    with _Convolutions() as seen:
        for name, functions in WITH_CONVOLUTIONS.items():
            module = importlib.import_module(f"tests.programs.{name}")
            for function in functions:
                torch.manual_seed(0)
                getattr(module, function)(torch.device("cpu"))
    cases = [case for case in seen.cases if case.dtype in DTYPES]
    return cases + [replace(case, dtype="float16") for case in cases if case.dtype == "bfloat16"]


def neighbours(case: Case) -> Iterator[Case]:
    """Yield cases that differ from `case` in one field."""
    x, w, groups, deep = case.x, case.w, case.groups, len(case.x) > 3

    def channels(c: int, k: int) -> Case:
        if groups > 1:
            return replace(case, x=(x[0], c, *x[2:]), w=(c, 1, *w[2:]), groups=c)
        pair = (c, k) if case.transposed else (k, c)
        return replace(case, x=(x[0], c, *x[2:]), w=(*pair, *w[2:]))

    inputs, outputs = x[1], case.output()[1]
    for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        yield replace(case, x=(n, *x[1:]))
    for c in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256):
        yield channels(c, outputs)
        if groups == 1:
            yield channels(inputs, c)
    for share in (0.25, 0.5, 0.75, 1.25, 1.5, 2, 3, 4):
        yield replace(case, x=(*x[:2], *(max(1, int(n * share)) for n in x[2:])))
    for more in (-3, -2, -1, 1, 2, 3, 4, 5):
        yield replace(case, x=(*x[:-1], max(1, x[-1] + more)))
    for k in (1, 2, 3, 4, 5, 7, 9):
        same = (k // 2,) * len(case.stride)
        yield replace(case, w=(*w[:2], *(k,) * len(case.stride)), padding=same)
        yield replace(case, w=(*w[:2], *(k,) * len(case.stride)), padding=(0,) * len(case.stride))
    for s in (1, 2, 3):
        yield replace(case, stride=(s,) * len(case.stride))
    yield replace(case, dilation=(2,) * len(case.stride))
    for dtype in DTYPES:
        for last in (False, True) if deep else (False,):
            yield replace(case, dtype=dtype, channels_last=last)
    yield replace(case, tf32=False)


def drawn(rng: random.Random) -> Case:
    """Return a random case, which may be invalid."""
    dims = rng.choice((1, 1, 2, 2, 2, 2, 2, 3))
    widths = (1, 2, 3, 4, 5, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512)
    lengths = {
        1: (8, 16, 32, 50, 64, 80, 100, 128, 200, 256, 500, 512, 1000, 1024, 2048, 4096),
        2: (4, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 46, 48, 56, 64, 80, 96, 112, 128),
        3: (2, 4, 6, 8, 10, 12, 16, 20, 24, 32),
    }[dims]
    n, c, k = rng.choice((1, 1, 2, 2, 3, 4, 4, 6, 8, 8, 12, 16, 16, 32)), rng.choice(widths), rng.choice(widths)
    size = (rng.choice(lengths),) * dims if rng.random() < 0.75 else tuple(rng.choice(lengths) for _ in range(dims))
    kernel = (rng.choice((1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 7)),) * dims
    if dims > 1 and rng.random() < 0.08:
        kernel = tuple(rng.choice((1, 3, 5)) for _ in range(dims))
    stride = (rng.choice((1, 1, 1, 1, 2, 2, kernel[0])),) * dims
    dilation = (rng.choice((1,) * 9 + (2,)),) * dims
    padding = tuple(rng.choice((0, (size // 2) * d, (size // 2) * d, 1)) for size, d in zip(kernel, dilation, strict=True))
    transposed, dice = rng.random() < 0.15, rng.random()
    groups = c if dice < 0.10 else rng.choice((2, 4, 8)) if dice < 0.16 else 1
    if groups == c:
        k = c * rng.choice((1, 1, 1, 2))
    k = k if k % groups == 0 else groups * max(1, k // groups)
    w = (c, max(1, k // groups), *kernel) if transposed else (k, max(1, c // groups), *kernel)
    dtype = rng.choice(("float32",) * 6 + ("float16", "float16", "bfloat16"))
    last, tf32 = dims > 1 and rng.random() < 0.2, rng.random() > 0.05
    return Case((n, c, *size), w, stride, padding, dilation, transposed, (), groups, dtype, last, tf32, "random")


def cases(seed: int = 0, n_random: int = 12_000) -> list[Case]:
    """Return all cases: those of programs first, then their neighbours and random ones, mixed."""
    rng, first = random.Random(seed), of_programs()
    near = {replace(other, origin="neighbour"): None for case in first for other in neighbours(case)}
    own = {replace(case, origin="neighbour") for case in first}
    rest = [case for case in near if case not in own]
    while len(rest) < len(near) + n_random:
        rest.append(drawn(rng))
    rng.shuffle(rest)
    return first + list(dict.fromkeys(case for case in rest if case.is_valid()))


# --------------------------------------------------------------------------------------------------------------- on a GPU


def _calls(case: Case) -> list[Callable[[], Any]]:
    """Return functions that run the passes of the convolution on the GPU."""
    layout = torch.contiguous_format
    if case.channels_last:
        layout = torch.channels_last if len(case.x) == 4 else torch.channels_last_3d
    x, w, y = (
        torch.zeros(shape, dtype=DTYPES[case.dtype], device="cuda").contiguous(memory_format=layout)
        for shape in (case.x, case.w, case.output())
    )
    options = case.options()

    def gradient(*mask: bool) -> Any:
        return torch.ops.aten.convolution_backward(y, x, w, None, *options, list(mask))

    forward = lambda: torch.ops.aten.convolution(x, w, None, *options)  # noqa: E731
    return [forward, lambda: gradient(True, False, False), lambda: gradient(False, True, False)]


def _between_marks(events: list[dict[str, Any]]) -> list[list[int]]:
    """Return the sizes requested (negative for a free) after each mark until the next one."""
    signs, found, inside = {"alloc": 1, "free_completed": -1}, [], False
    for event in events:
        size = signs.get(event["action"], 0) * event["size"]
        if size == MARK:
            found.append([])
            inside = False
        elif size == -MARK:
            inside = True
        elif size and inside:
            found[-1].append(size)
    return found


def _mark() -> None:
    torch.empty(MARK, dtype=torch.uint8, device="cuda")


def _history(on: bool) -> None:
    torch.cuda.memory._record_memory_history("all" if on else None, context=None)


def _events() -> list[dict[str, Any]]:
    return torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]


def _sizes(chunk: list[Case]) -> Iterator[dict[str, Any]]:
    """Yield a row for each convolution."""
    calls = [(case, call) for case in chunk for call in _calls(case)]
    for _ in range(2):  # the second time, cuDNN's plans are cached
        _history(True)
        for case, call in calls:
            torch.backends.cudnn.allow_tf32 = case.tf32
            _mark()
            call()
        _mark()
        between = _between_marks(_events())[-len(calls) - 1 : -1]
        _history(False)
    usual = asdict(Case((), (), (), (), ()))
    for number, case in enumerate(chunk):
        fields = {key: value for key, value in asdict(case).items() if value != usual[key]}
        yield fields | dict(zip(PASSES, between[3 * number : 3 * number + 3], strict=True))


def _worker(todo: list[Case], out: str, end: float) -> None:
    torch.set_num_threads(1)
    with open(out, "w") as file:
        for start in range(0, len(todo), CHUNK):
            if time.time() > end:
                break
            for row in _sizes(todo[start : start + CHUNK]):
                file.write(json.dumps(row, separators=(",", ":")) + "\n")


def measure(out: str, seconds: str = "60", seed: str = "0") -> None:
    """Measure calls in several processes, and write them to `out`."""
    start, todo = time.time(), cases(int(seed))
    n_workers = max(1, min(12, (os.cpu_count() or 1) - 4))
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        parts = [os.path.join(folder, str(i)) for i in range(n_workers)]
        processes = [
            spawn.Process(target=_worker, args=(todo[i::n_workers], part, start + float(seconds)))
            for i, part in enumerate(parts)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        lines = [line for part in parts for line in Path(part).read_text().splitlines()]
    about = {
        "torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "gpu": torch.cuda.get_device_name(), "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }  # fmt: skip
    with gzip.open(out, "wt") as file:
        file.write("\n".join([json.dumps(about), *lines]) + "\n")


def measured(file: Path = MEASURED) -> tuple[dict[str, Any], list[tuple[Case, dict[str, list[int]]]]]:
    """Return the facts about the H200, and its calls: each convolution with the sizes that each pass requested."""
    with gzip.open(file, "rt") as lines:
        about, *rows = (json.loads(line) for line in lines)
    calls = []
    for row in rows:
        sizes = {which: row.pop(which) for which in PASSES}
        calls.append((Case(**{key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}), sizes))
    return about, calls


def modelled(case: Case, which: str) -> tuple[int, int]:
    """Return the bytes of the workspace of one pass on the virtual GPU, and what cuDNN says without a GPU."""
    from toolkit.gpu.virtual import cudnn
    from toolkit.gpu.virtual.scratch.convolutions import asked, call_of, workspace_bytes

    layout = torch.contiguous_format
    if case.channels_last:
        layout = torch.channels_last if len(case.x) == 4 else torch.channels_last_3d
    x, w, y = (
        torch.empty(shape, dtype=DTYPES[case.dtype], device="meta").contiguous(memory_format=layout)
        for shape in (case.x, case.w, case.output())
    )
    call = call_of(x, w, y, case.options())
    assert call is not None
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, case.tf32
    try:
        plan = cudnn.plan(asked(call, which))
        return workspace_bytes(call, which), plan.workspace_bytes if plan else 0
    finally:
        torch.backends.cudnn.allow_tf32 = before


def check(out: str, file: str = "") -> None:
    """Compare the H200's calls with the rules and with cuDNN's answers alone, and write how many workspaces are equal."""
    from toolkit.gpu.virtual import cudnn

    about, calls = measured(Path(file) if file else MEASURED)
    counted: dict[str, list[int]] = {}
    for case, sizes in calls:
        for which in PASSES:
            if len(sizes[which]) > 4:  # copies of ambiguous formats, too
                continue
            wanted = sizes[which][1] if len(sizes[which]) == 4 and sizes[which][1] > 0 else 0
            rule, alone = modelled(case, which)
            layout = "channels_last" if case.channels_last else ""
            for key in (
                "all",
                case.origin,
                which,
                f"{case.dtype} {layout}".strip(),
                "a workspace" if wanted else "no workspace",
            ):
                found = counted.setdefault(key, [0, 0, 0])
                counted[key] = [found[0] + 1, found[1] + (rule == wanted), found[2] + (alone == wanted)]
    rows = {key: dict(zip(("calls", "equal", "cudnn_alone"), found, strict=True)) for key, found in counted.items()}
    Path(out).write_text(json.dumps({**about, "cudnn_here": cudnn.version(), "counted": rows}, indent=1) + "\n")
    for key, (n, equal, alone) in counted.items():
        print(f"{key:24} {n:6} calls, equal {equal / n:.1%}, by cuDNN alone {alone / n:.1%}")


if __name__ == "__main__":
    {"measure": measure, "check": check}[sys.argv[1]](*sys.argv[2:])
