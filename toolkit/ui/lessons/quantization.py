"""Lesson 8, "Quantization": its questions, and what it measures of rounded weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from toolkit.models.model import CausalLM
from toolkit.text.prompts import prompt_ids
from toolkit.ui.lessons.chart import Chart, Line
from toolkit.ui.lessons.lesson import Lesson, Question

if TYPE_CHECKING:
    import pandas as pd

GROUP = 32
LEAST_DB = 20.0  # of the exercise: evenly spaced values from minimum to maximum reach more
KINDS = ("embedding", "attention", "mlp")
TEXTS = {  # how the demo models continue these prompts
    "The capital of France is": " Paris. The capital of Germany is Berlin. The capital of Italy is Rome.",
    "7 x 8 =": " 56. 7 x 9 = 63. 7 x 10 = 70. 8 x 1 = 8.",
    "One, two, three, four,": " five, six, seven, eight, nine, ten, eleven,",
    "The months of the year are January,": " February, March, April, May, June,",
    "After Monday comes": " Tuesday. After Tuesday comes Wednesday.",
}


QUESTIONS = {
    "step": Question(
        hint="16 values have 15 gaps between them. The first value is the smallest weight, and the last one the largest.",
        why="(largest - smallest) / 15. A weight is stored as the number of its value, 0 to 15, which needs 4 bits.",
        answer='{"step": (float(group.max()) - float(group.min())) / 15}',
        within=0.02,
        who="the group",
    ),
    "round": Question(
        hint="For each group: low = smallest weight, step = (largest - low) / (2**bits - 1). The code of a weight is "
        "((weight - low) / step).round(), and its value is code * step + low. `amin(-1, keepdim=True)` is the minimum of "
        "each group.",
        why="That is all of it: `tk.quantize` does the same, and packs two codes into each byte.",
        answer="""\
def round_groups(groups, bits):
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    codes = ((groups - low) / step).round()
    return codes * step + low""",
    ),
    "bits per weight": Question(
        hint="A group of 32 weights has 32 codes, one scale and one offset. How many bits is that, divided by 32?",
        why="4 + 2 x 16 / 32 and 4 + 2 x 16 / 128. Scales of small groups take as much memory as a fifth bit.",
        answer='{"groups of 32": 4 + 2 * 16 / 32, "groups of 128": 4 + 2 * 16 / 128}',
        who="tk.quantize",
    ),
    "speed": Question(
        hint="The bytes per token set the limit (lesson 2). How many times fewer bits does a weight have?",
        why="16 / 4.25 = 3.8 times fewer bytes, and 3.8 times as many tokens. Scales of larger groups would save a little "
        "more.",
        answer='{"tok/s": 16 / 4.25 * plain}',
        within=0.05,
        who="the model",
    ),
    "one more bit": Question(
        hint="With one more bit there are twice as many values, so the step and the error are half as large. How much is "
        "that in dB?",
        why="Half the error is 6 dB more, for each bit.",
        answer='{"SNR, dB": four + 6}',
        within=0.05,
        who="the measurement",
    ),
    "fewest bits": Question(
        hint="The model is small, but very sure of its facts. How much error do 3 bits have, compared with 4? And 2 bits?",
        why="The loss is {loss[8]} with 8 bits, {loss[4]} with 4, {loss[3]} with 3, {loss[2]} with 2 and {loss[1]} with 1. "
        "The most probable token stays the same for a long time, and then everything breaks: look at the loss, and not only "
        "at texts.",
        answer='{"bits": 3}',
        who="the model",
    ),
    "least harm": Question(
        hint="Many small errors partly cancel each other. Which kind has most of the weights? And which one is used twice, "
        "as a table at the beginning and as the head at the end?",
        why="The losses with 2 bits: embedding {loss[embedding]}, attention {loss[attention]}, mlp {loss[mlp]}. The "
        "matrices of the MLP have {share:.0%} of the weights, and do the least harm here.",
        answer='{"kind": "mlp"}',
        who="the model",
        choices=KINDS,
    ),
    "recipe": Question(
        hint="Section 7 says which kind can have 2 bits. It has most of the weights, so the others may have more bits.",
        why="A recipe with different bits is better than the same bits for all. `q4_k_m` in GGUF files is such a recipe.",
        answer='my_bits = {"embedding": 4, "attention": 3, "mlp": 2}',
    ),
}

lesson = Lesson(
    "quantization",
    "Quantization",
    minutes=40,
    goals=(
        "round weights to 4 bits by hand, and say what is stored",
        "compute bits per weight, bytes per token and the highest speed of a scheme",
        "measure the error of weights and the loss of a model",
        "choose bits for each kind of matrix",
    ),
    questions=QUESTIONS,
)


def rounded(weights: torch.Tensor, bits: int, group: int = GROUP) -> torch.Tensor:
    """Round weights [..., n * group] to 2**bits values per group, evenly spaced from the group's minimum to its maximum."""
    groups = weights.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
    return (((groups - low) / step).round() * step + low).flatten(-2)


def snr_db(weights: torch.Tensor, other: torch.Tensor) -> float:
    """Return the signal-to-noise ratio in dB: 10 log10 of the power of `weights` over the power of the difference."""
    return float(10 * torch.log10(weights.double().square().sum() / (weights.double() - other.double()).square().sum()))


def matrices(model: CausalLM) -> dict[str, list[torch.Tensor]]:
    """Return the matrices of a plain model by kind: "embedding", "attention" and "mlp"."""
    found: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            found["embedding" if "embed" in name else "attention" if "attention" in name else "mlp"].append(weight.data)
    return found


@contextmanager
def in_bits(model: CausalLM, bits: Mapping[str, int], group: int = GROUP) -> Iterator[None]:
    """Round the matrices of each kind in `bits` to that many bits while the block runs."""
    held = [(weight, weight.clone(), bits[kind]) for kind, of in matrices(model).items() if kind in bits for weight in of]
    try:
        for weight, plain, n in held:
            weight.copy_(rounded(plain, n, group))
        yield
    finally:
        for weight, plain, _ in held:
            weight.copy_(plain)


@torch.inference_mode()
def quality(model: CausalLM) -> dict[str, float]:
    """Return how well a demo model continues the prompts: the mean loss (cross entropy, in nats), and how many are right.

    The loss is 0 if the model is sure of every right token. A prompt is right if each of its tokens is the most probable one.
    """
    first = [prompt_ids(model, prompt) for prompt in TEXTS]
    whole = [[*ids, *prompt_ids(model, text)] for ids, text in zip(first, TEXTS.values(), strict=True)]
    longest = max(map(len, whole))
    batch = torch.tensor([ids + [0] * (longest - len(ids)) for ids in whole], device=model.device.torch)
    losses, right = [], 0
    for logits, begin, ids in zip(model(batch).float(), first, whole, strict=True):
        given, wanted = logits[len(begin) - 1 : len(ids) - 1], torch.tensor(ids[len(begin) :], device=logits.device)
        losses.append(F.cross_entropy(given, wanted, reduction="none"))
        right += bool((given.argmax(-1) == wanted).all())
    return {"loss": round(float(torch.cat(losses).mean()), 4), "prompts right": right}


def average_bits(model: CausalLM, bits: Mapping[str, int]) -> float:
    """Return the mean bits of a weight's code if the matrices of each kind have so many."""
    sizes = {kind: sum(weight.numel() for weight in of) for kind, of in matrices(model).items()}
    return sum(sizes[kind] * bits[kind] for kind in KINDS) / sum(sizes.values())


def by_bits(model: CausalLM, choices: Sequence[int] = (8, 4, 3, 2, 1)) -> pd.DataFrame:
    """Return the quality of the model with all matrices rounded, one row per number of bits."""
    import pandas as pd

    rows = {}
    for bits in choices:
        with in_bits(model, dict.fromkeys(KINDS, bits)):
            rows[bits] = quality(model)
    return pd.DataFrame(rows).T.astype({"prompts right": int}).rename_axis("bits")


def by_kind(model: CausalLM, bits: int) -> pd.DataFrame:
    """Return the quality of the model with the matrices of one kind rounded, one row per kind."""
    import pandas as pd

    rows = {}
    for kind, of in matrices(model).items():
        with in_bits(model, {kind: bits}):
            rows[kind] = {"weights": sum(weight.numel() for weight in of), **quality(model)}
    return pd.DataFrame(rows).T.astype({"weights": int, "prompts right": int})


def by_group(weights: torch.Tensor, groups: Sequence[int] = (32, 64, 128, 256)) -> pd.DataFrame:
    """Return bits per weight and the SNR of 4-bit codes for groups of different sizes, with and without an outlier.

    A group has a scale and an offset of 16 bits each. The outlier is one weight in each row, ten times the largest one.
    """
    import pandas as pd

    spoiled = weights.clone()
    spoiled[:, 0] = 10 * weights.abs().amax()
    rows = {}
    for group in groups:
        others = rounded(spoiled, 4, group)[:, 1:]
        rows[group] = {
            "bits per weight": 4 + 2 * 16 / group, "SNR, dB": round(snr_db(weights, rounded(weights, 4, group)), 1),
            "SNR with an outlier, dB": round(snr_db(spoiled[:, 1:], others), 1),
        }  # fmt: skip
    return pd.DataFrame(rows).T.rename_axis("group")


def staircase(weights: torch.Tensor, bits: int = 4) -> Chart:
    """Return a chart of a group of weights: their values before and after rounding to `bits` bits, and its steps."""
    plain, _ = weights.float().sort()
    after = rounded(plain, bits, len(plain))
    steps = torch.linspace(float(plain[0]), float(plain[-1]), 2**bits)
    edges = (steps[1:] + steps[:-1]) / 2  # a weight gets the value of the nearer step
    across = torch.cat([steps[:1], edges.repeat_interleave(2), steps[-1:]])
    ends = [float(plain[0]), float(plain[-1])]
    lines = (
        Line("as trained", ends, ends), Line(f"{bits} bits", across.tolist(), steps.repeat_interleave(2).tolist()),
        Line("the weights", plain.tolist(), after.tolist(), dots=True),
    )  # fmt: skip
    return Chart(lines, "value of the weight", "stored")
