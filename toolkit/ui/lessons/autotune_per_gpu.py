"""Lesson 7, "Why each GPU gets its own config": its questions, and what it finds out about configs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from toolkit import tune
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.kernels.base import Config, Kernel
from toolkit.tune.gate import Gate
from toolkit.tune.results import Row, Tuning
from toolkit.tune.store import SHIPPED, Tuned
from toolkit.ui.lessons.chart import Chart, Line
from toolkit.ui.lessons.lesson import Lesson, Question

if TYPE_CHECKING:
    import pandas as pd

# the attention of one token in Qwen3-8B after 8,192 tokens
TIMED = (
    "attention_decode",
    "heads=32 kv_heads=8 head_dim=128 slots=8192 window=0 dtype=bfloat16 scaled=True key_dim=0 quantised=True",
)
SMALL = "l4"  # the GPU of the exercise "for all": two blocks are to fit into one of its SMs
STAGES = 4

QUESTIONS = {
    "one pair": Question(
        hint="A tile of a has block_m x block_k numbers, and a tile of b has block_k x block_n. How many bytes does a number "
        "have?",
        why="Two tiles of 128 x 64 numbers, 2 bytes each: 32 KiB.",
        answer='{"bytes": 2 * (128 * 64 + 64 * 128)}',
        who="the arithmetic",
    ),
    "in shared memory": Question(
        hint="How many pairs of tiles does the text say are in shared memory, with stages=4? Multiply that by your "
        "last answer.",
        why="3 and 4 pairs of 32 KiB. (A B200 adds a few bytes for the barriers of its accumulator memory.)",
        answer='{"a100-80g": 3 * 2 * (128 * 64 + 64 * 128), "h200": 4 * 2 * (128 * 64 + 64 * 128)}',
        who="the compiler",
    ),
    "too large": Question(
        hint="With stages=5, how many pairs of 32 KiB are that on the H200 and the B200, and on the other seven? Compare both "
        "with the table.",
        why="4 pairs of 32 KiB are more than the 99 KiB of capabilities 8.6, 8.9 and 12.0. The compiler's reason: it {reason}.",
        answer='{"GPUs": 6}',
        who="the compiler",
    ),
    "for all": Question(
        hint="The size of a pair of tiles has three numbers in it, and two of them are given. Half of the third one takes half "
        "of the memory.",
        why="With half of block_k, each pair of tiles has half the size. The price is twice as many steps, each with less "
        "arithmetic to hide the next loads behind. Only a measurement shows whether that is faster.",
        answer="my_config = Config(block_m=128, block_n=128, block_k=32, warps=8, stages=4)",
        who="the compiler",
    ),
    "another winner": Question(
        hint="Find the fastest config in each column, and then two times in the column of the RTX 5090: of its own fastest "
        "config, and of the H200's. How much larger is the second one?",
        why="H200: {theirs}\nRTX 5090: {mine}",
        answer='{"% longer": 100 * (row(found, "rtx-5090", found.best("h200").config).ns / found.best("rtx-5090").ns - 1)}',
        within=0.05,
        who="the model",
    ),
    "wrong configs": Question(
        hint="How many steps does a config make along k = 96, and how much of k do they cover? Try 96 // 32 and 96 // 64.",
        why="96 is three steps of 32, but one and a half steps of 64: 96 // 64 omits a third of the sum.\n{reasons}",
        answer='{"wrong configs": 3}',
        who="the gate",
    ),
    "repair": Question(
        hint="The division must round up. The masks take care of the part of the last step that lies outside. In Python, "
        "-(-a // b) rounds up.",
        why="All configs agree with the reference now. The values outside of the matrix are loaded as 0, and add nothing.",
        answer="""\
class Repaired(Product):
    def steps(self, k, block_k):
        return -(-k // block_k)""",
    ),
    "calls": Question(
        hint="A choice is kept for each value of the key. How many different values of n are there?",
        why="n is in the key: each new value is a new problem, even if the old choice is good enough. If a length grows by one "
        "with every token, such a kernel never stops tuning.",
        answer='{"tuned": 2, "found again": 3}',
        who="the watch",
    ),
}

lesson = Lesson(
    "autotune_per_gpu",
    "Why each GPU gets its own config",
    minutes=45,
    goals=(
        "calculate the shared memory of a config, and say on which GPUs it can't be launched",
        "choose a config that runs on all of them",
        "say what the winner of one GPU costs on another",
        "find configs with wrong results before they are timed",
    ),
    questions=QUESTIONS,
)


def timed_configs(kernel: str = TIMED[0], shape: str = TIMED[1]) -> Chart:
    """Return a chart of the times of all configs of one problem, which were measured on an H200 and ship with the package."""
    records = Tuned.from_text((SHIPPED / "h200.json").read_text(encoding="utf-8"), "h200.json").configs(kernel, shape)
    times = sorted(record.us for record in records.values() if record.us is not None)
    return Chart(
        (Line("a config", [float(n) for n in range(1, len(times) + 1)], times, dots=True),),
        "configs, from the fastest to the slowest",
        "µs on an H200",
    )


def row(found: Tuning, gpu: str, config: Config) -> Row:
    """Return the row of one config on one GPU."""
    return next(one for one in found.of(gpu) if one.config == config)


def times_us(found: Tuning, *gpus: str) -> pd.DataFrame:
    """Return the times in µs of each config on some GPUs, or why there is none ("excluded"), one row per config."""
    import pandas as pd

    def shown(each: Row) -> float | str:
        return round(each.ns / 1e3, 1) if each.usable and each.ns is not None else each.verdict

    return pd.DataFrame({gpu: {repr(each.config): shown(each) for each in found.of(gpu)} for gpu in gpus})


def for_all(kernel: Kernel, config: Config, gpus: Iterable[str]) -> dict[str, bool]:
    """Compile a config of the lesson's kernel for all GPUs, and check its tile, its stages, and its shared memory."""
    rows = tune.explore(kernel, "prompt", gpus=gpus, configs=[config], progress=False).rows
    if missing := [name for name in ("block_m", "block_n", "block_k") if name not in config.to_dict()]:
        return {f"numbers that the kernel needs and the config lacks: {', '.join(missing)}, wanted none": False}
    fit = [each for each in rows if each.usable]
    shared = next(each.shared_bytes for each in rows if each.gpu == SMALL) or 0
    most = CATALOGUE[SMALL].smem_per_sm_bytes // 2
    tile = (config["block_m"], config["block_n"])
    return {
        f"tile: {tile[0]} x {tile[1]}, wanted 128 x 128": tile == (128, 128),
        f"stages: {config.stages}, wanted {STAGES}": config.stages == STAGES,
        f"GPUs on which it can be launched: {len(fit)}, wanted {len(rows)}": len(fit) == len(rows),
        f"shared memory on the L4: {shared:,} B, wanted at most {most:,}": 0 < shared <= most,
    }


def reasons(kernel: Kernel, configs: Sequence[Config]) -> dict[str, str]:
    """Return for each config the reason why its result is wrong for the sizes "small", or "" if it is right.

    Without a GPU, Triton's interpreter runs the kernel.
    """
    gate = Gate(kernel, kernel.known["small"], "cuda" if torch.cuda.is_available() else "cpu", seed=1)
    return {repr(config): gate.check(config).reason for config in configs}


def repaired(kernel: Kernel, configs: Sequence[Config]) -> dict[str, bool]:
    """Check that no config of the kernel has a wrong result."""
    return {f"{config}: {why or 'agrees with the reference'}": why == "" for config, why in reasons(kernel, configs).items()}


def stopwatch(run: Callable[[], Any], quantiles: object = None) -> list[float]:
    """Time a call in ms on the CPU, for Triton's tuner, which has a function of its own on a GPU."""
    began = time.perf_counter()
    run()
    return [1000 * (time.perf_counter() - began)] * 3
