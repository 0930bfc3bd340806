"""Lesson 11, "Two GPUs": its questions, recorded runs on two virtual GPUs, and tables of their collectives.

The runs ship with the package, in the folder `recorded`, so that the lesson needs no further processes and little memory.
`record(cluster)` makes them. A test compares them with new ones. The step of two real GPUs is one of the shipped traces.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from toolkit.core.distributed import Shard, current
from toolkit.core.units import MiB
from toolkit.decode.loop import generate
from toolkit.gpu.catalogue import CATALOGUE
from toolkit.gpu.virtual.device import VirtualGpu
from toolkit.gpu.virtual.effects.effect import collective, duration_ns
from toolkit.loading.loader import load
from toolkit.planning.costs import costs_of
from toolkit.planning.describe import describe, plan
from toolkit.ranks.cluster import Cluster, cluster
from toolkit.trace.events import Trace
from toolkit.trace.join import join
from toolkit.ui.lessons.lesson import Lesson, Question

if TYPE_CHECKING:
    import pandas as pd

MODEL, LARGE, CARD = "demo/qwen3", "random/qwen3-8b", "h200"
HALF, ALL = "half", "all of it"
GPUS = ("GPU 0", "GPU 1")
STEP = 4  # a decode step in the middle of the recorded runs
RUNS = ("even", "late")
LATE, LATE_NS = 1, 200_000  # in the run "late", the host of this rank is later by this time at every token
TOKENS = 8
PAIR = "2xh200/gemma4-31b/cuda-graph"  # the shipped trace of two real GPUs
PAIR_STEP = 6  # the step that its timeline opens on
PAIR_TOK_PER_S = {"alone": 181.2, "both": 286.9}  # of this model on one H200 and on two: bench/results/h200x2_ranks_tuned.json
FOLDER = Path(__file__).parent / "recorded"

QUESTIONS = {
    "halves": Question(
        hint="Both GPUs compute different attention heads, with their own keys and values. But which of them chooses the next "
        "token?",
        why="Weights and keys and values are divided. Logits are not: each GPU gets all of them, and both choose the same "
        "token. So nobody has to send the token.",
        answer=f'{{"weights": "{HALF}", "keys and values": "{HALF}", "logits": "{ALL}"}}',
        who="the plan",
        choices=(HALF, ALL),
    ),
    "sums": Question(
        hint="Each layer has two parts whose results must be added up. And what does a GPU do with a token whose embedding is "
        "in the other GPU's half of the table?",
        why="Two per layer, after the attention and after the MLP, and one for the embedding: the GPU that doesn't have the "
        "row adds zeros. The last collective, an all-gather, joins the two halves of the logits.",
        answer='{"all-reduces": 2 * layers + 1}',
    ),
    "bytes": Question(
        hint="What is added up is one vector per token: the hidden state. Section 2 prints how many numbers it has.",
        why="Every all-reduce carries the hidden state of one token. Neither the length of the text nor the number of weights "
        "matters.",
        answer='{"one all-reduce": 4 * hidden, "all of a token": (2 * layers + 1) * 4 * hidden}',
    ),
    "large": Question(
        hint="Count as above. This model computes in bfloat16: 2 bytes per number.",
        why="{found[KiB]:.0f} KiB per token, while each GPU reads {read_gib:.1f} GiB of weights from its own memory. What "
        "crosses between the GPUs is {share:.4%} of that.",
        answer='{"KiB": (2 * 36 + 1) * 4096 * 2 / 1024}',
        within=0.02,
        who="the model",
    ),
    "latency": Question(
        hint="The first number: bytes / rate. The second one: how many all-reduces, and how long does one take?",
        why="The bytes take next to no time. The exchange itself takes it: each all-reduce waits until both GPUs have written, "
        "and then reads. So tensor parallelism needs a fast link for its latency, more than for its bandwidth.",
        answer='{"bytes alone, µs": n_bytes / rate * 1e6, "all-reduces, µs": (2 * 36 + 1) * each_us}',
        within=0.1,
        who="the catalogue",
    ),
    "late": Question(
        hint="A collective ends on both GPUs at the same time. It begins on a GPU when that GPU arrives. Which one waited?",
        why="The GPU that arrives first waits, so its collective is long. The late GPU has the short one. In a profile, a "
        "long collective is a sign of somebody else's problem.",
        answer='{"late": "GPU 1"}',
        choices=GPUS,
    ),
    "wait": Question(
        hint="Compare the first collective on both GPUs.",
        why="The host of GPU 1 loses {late_us:.0f} µs at every token, but in this step, {hidden_us:.0f} µs of that are hidden: "
        "the strategy launches a step while the last one still runs. Only the rest makes GPU 0 wait, at the first sum. After "
        "it, both go on together.",
        answer='{"wait, µs": float(times["GPU 0"].iloc[0] - times["GPU 1"].iloc[0])}',
        within=0.01,
    ),
    "find": Question(
        hint="Sum the columns. The smaller sum is that of the late GPU. If both are about equal, nobody is late.",
        why="`trace.ranks()` does this for any number of GPUs, and `trace.collectives()` for each collective. Real clocks "
        "differ between hosts, so the toolkit first aligns them on the ends of the collectives, and shows the error that "
        "remains.",
        answer="""\
def late_gpu(times):
    first, second = times["GPU 0"].sum(), times["GPU 1"].sum()
    if abs(first - second) < 1:
        return None
    return 0 if first < second else 1""",
    ),
    "eight": Question(
        hint="With eight GPUs, each reads an eighth of the bytes. The all-reduces stay nearly as they are. Tokens/s is one "
        "second divided by the time of both.",
        why="Eight GPUs are only {times:.1f} times as fast as one. The more GPUs, the more of a step is spent in the exchange. "
        "A larger model divides better: it has more bytes to read for each all-reduce.",
        answer='{"tokens/s": 1e6 / (table.reading_us[1] / 8 + table.summing_us[2])}',
        within=0.1,
        who="the table",
    ),
    "real": Question(
        hint="How many collectives are there, how much time does one add, and how long is the step? Use the printed times, not "
        "those of the timeline.",
        why="A GPU alone needs the norms, too, so the exchange takes less than this share. Two H200s decode this model "
        "{times:.2f} times as fast as one ({both:.0f} and {alone:.0f} tok/s without recording). It is not twice as fast "
        "because of the exchange, and because norms and other small kernels take as long on half of a model as on all of it.",
        answer='{"% of the step": 100 * len(times_us) * times_us.mean() / step_us}',
        within=0.1,
    ),
}

lesson = Lesson(
    "two_gpus",
    "Two GPUs",
    minutes=30,
    goals=(
        "say what each GPU holds if two divide a model",
        "predict what crosses between them for every token, and what that costs",
        "find the GPU for which the others wait",
        "estimate how much faster more GPUs are",
        "say how much of a real step the exchange takes at most",
    ),
    questions=QUESTIONS,
)


def two_runs(live: bool = False) -> tuple[Trace, Trace]:
    """Return a run in which both GPUs keep pace, and one in which the host of one GPU is late at every token.

    `live` records them now, with one process per GPU. It needs the extra `ranks`; otherwise a RankError says
    how to install it.
    """
    if live:
        with cluster(f"virtual:2x{CARD}") as opened:
            even, late = record(opened)
    else:
        even, late = ([Trace.load(FOLDER / f"two_gpus-{name}-{rank}.trace") for rank in (0, 1)] for name in RUNS)
    return join(even, GPUS), join(late, GPUS)


def record(two: Cluster) -> tuple[list[Trace], list[Trace]]:
    """Record both runs on a cluster of two virtual GPUs, and return the traces of the ranks."""
    even, late = (two.run(_recorded, delay_ns) for delay_ns in (0, LATE_NS))
    return even, late


def _recorded(delay_ns: int) -> Trace:
    model = load(MODEL, f"virtual:{CARD}", tensor_parallel=current().ranks, progress=False)
    gpu = model.device
    assert isinstance(gpu, VirtualGpu)

    def busy(token: int, text: str) -> None:
        if current().rank == LATE:
            gpu.machine.spend(delay_ns)

    trace: Trace = generate(
        model, "The capital of France is", "cuda-graph", max_new_tokens=TOKENS, on_token=busy, lines=False
    ).trace
    return trace


def held(gpus: int) -> pd.Series:
    """Return what the first of `gpus` GPUs holds of the large model, in MiB, with a context of 4,096 tokens."""
    row = plan(LARGE, CARD, context=4096, kv=None, tensor_parallel=gpus).by_rank().loc[0]
    names = {"weights": "weights_bytes", "keys and values": "state_bytes", "logits": "logits_bytes"}
    return (row[[*names.values()]] / MiB).set_axis([*names]).round(1).rename("MiB")


def compared(one: pd.Series, two: pd.Series) -> dict[str, str]:
    """Return "half" or "all of it" for each part that a GPU holds if there are two."""
    return {name: HALF if two[name] < 0.75 * one[name] else ALL for name in one.index}


def sums(trace: Trace) -> pd.DataFrame:
    """Return the all-reduces of one decode step."""
    table = trace.collectives()
    return table[(table.step == STEP) & (table.operation == "all_reduce")]


def times_of(trace: Trace) -> pd.DataFrame:
    """Return how long each collective of one step takes on each GPU, in µs: from the arrival of that GPU to the end."""
    table = trace.collectives()
    table = table[table.step == STEP].reset_index(drop=True)
    took = {name: table.dur_us - (table[f"rank{1 - rank}_wait_us"]) for rank, name in enumerate(GPUS)}
    return table[["operation"]].assign(**{name: each.round(1) for name, each in took.items()})


def exchanged(name: str) -> tuple[int, int]:
    """Return how many all-reduces a token needs in the model, and the bytes of one of them."""
    model = describe(name)
    return 2 * model.config.num_hidden_layers + 1, model.config.hidden_size * model.dtype.itemsize


def sum_us(gpus: int = 2, n_bytes: int = 0) -> float:
    """Return the modelled time of one small all-reduce in µs."""
    effect = collective("all_reduce", n_bytes, (gpus - 1) * n_bytes, gpus, "one-shot")
    return duration_ns(effect, CATALOGUE[CARD]) / 1e3


def real_times(trace: Trace) -> tuple[NDArray[np.float64], float]:
    """Return how long each collective of a step of the real pair takes on GPU 0, and all kernels together, in µs.

    Kernels may begin early and wait for those before them, so each one counts from the end of those before it.
    """
    mine = trace.select(trace.is_kind("kernel", "collective") & (trace["rank"] == 0) & (trace["step"] == PAIR_STEP))
    ends = np.maximum.accumulate(mine["start_ns"] + mine["dur_ns"])
    took_us = np.diff(ends, prepend=mine["start_ns"][0]) / 1e3
    return took_us[mine.is_kind("collective")], float(took_us.sum())


def real_facts() -> dict[str, float]:
    """Return the rates of this model on one real GPU and on two, in tok/s, and how many times as fast two are."""
    return PAIR_TOK_PER_S | {"times": PAIR_TOK_PER_S["both"] / PAIR_TOK_PER_S["alone"]}


def scaling(name: str = LARGE, gpus: tuple[int, ...] = (1, 2, 4, 8)) -> pd.DataFrame:
    """Return one row per number of GPUs: the modelled time for reading a rank's bytes, for its all-reduces, and tokens/s.

    Other parts of a step, such as launches and small kernels, are left out, so tokens/s is an upper bound.
    """
    import pandas as pd

    count, n_bytes = exchanged(name)
    rows = []
    for number in gpus:
        costs = costs_of(describe(name, shard=Shard(0, number)), 0)
        reading_us = 1e6 * costs.token_bytes / CATALOGUE[CARD].reached_bandwidth_bytes_per_s
        summing_us = count * sum_us(number, n_bytes) if number > 1 else 0.0
        rows.append({
            "gpus": number, "reading_us": reading_us, "sums": count if number > 1 else 0, "summing_us": summing_us,
            "tokens_per_s": 1e6 / (reading_us + summing_us),
        })  # fmt: skip
    return pd.DataFrame(rows).set_index("gpus").round(1)
