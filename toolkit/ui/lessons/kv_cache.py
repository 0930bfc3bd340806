"""Lesson 4, "The KV cache": its questions, and what it measures of caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from toolkit.gpu.catalogue import CATALOGUE
from toolkit.models.model import Model
from toolkit.planning.costs import Costs
from toolkit.planning.describe import describe, plan
from toolkit.text.prompts import prompt_ids
from toolkit.ui.lessons.chart import Chart, Line
from toolkit.ui.lessons.lesson import Lesson, Question

if TYPE_CHECKING:
    import pandas as pd

GIB = 1 << 30
KV = ("plain", "int8", "k4v8", "int4")

QUESTIONS = {
    "per token": Question(
        hint="For each layer and each head there is a key and a value, and each of them has `head_dim` numbers.",
        why="2 (key and value) x layers x heads x head_dim x 4 bytes. Nothing in it depends on what the token is.",
        answer='{"bytes per token": 2 * 3 * 2 * 64 * 4}',
        who="the cache",
    ),
    "window": Question(
        hint="Compute both kinds of layers separately. How many tokens does each of them keep, and how many numbers of each?",
        why="Three layers keep 64 tokens, however long the text is, and one layer keeps all 1,024. So only one layer in "
        "four still grows.",
        answer='{"bytes": 3 * (2 * 2 * 64 * 4) * 64 + (1 * (32 + 128) * 4) * 1024}',
        who="the cache",
    ),
    "crossing": Question(
        hint="Read it off the picture: find the place where two lines cross. Which line is below the other one on its right?",
        why="Each of Gemma's tokens needs more at first, because it has 60 layers. After its window of 1,024 tokens, only "
        "10 layers grow, and Qwen3 overtakes it.",
        answer='{"tokens": 8_700}',
        within=0.25,
        who="the model",
    ),
    "4 bits": Question(
        hint="4 bits are half a byte. How many numbers does a token have in all heads and layers, and how many scales?",
        why="768 codes of half a byte, and 12 scales of 2 bytes. Scales are the reason why it is not an eighth of 32 bits.",
        answer='{"bytes per token": 2 * 3 * 2 * (64 // 2 + 2)}',
        who="the cache",
    ),
    "which format": Question(
        hint="Divide the free memory by the KiB per token of each format: that is the longest context. Which is the first "
        "one with 90,000 tokens?",
        why="Plain numbers and 8 bits are too large. 4-bit keys and 8-bit values fit, and lose less than 4 bits for both.",
        answer='{"kv": "k4v8"}',
        who="the plan",
        choices=KV,
    ),
    "pages": Question(
        hint="Each chat rounds its own length up to whole pages: -(-length // PAGE) is the division that rounds up.",
        why="{unused} places for tokens stay empty, in the last page of each chat. A reserved context for each chat would "
        "have {reserved:,} places.",
        answer='{"pages": sum(-(-length // PAGE) for length in lengths)}',
        who="the allocator",
    ),
    "paged": Question(
        hint="Position p of a chat is in its page number p // PAGE, in row p % PAGE. `pool[pages]` with a list of page "
        "numbers returns these pages: [pages, PAGE, width].",
        why="A chat's rows may be anywhere in the pool, and nothing moves when it grows or ends. Real kernels don't copy "
        "the pages together as `read` does: they get the list of pages, and read the rows where they are.",
        answer="""\
def write(pool, pages, position, row):
    pool[pages[position // PAGE], position % PAGE] = row


def read(pool, pages, length):
    return pool[pages].flatten(0, 1)[:length]""",
    ),
}

lesson = Lesson(
    "kv_cache",
    "The KV cache",
    minutes=40,
    goals=(
        "compute how much memory a token of any model needs",
        "say what a sliding window changes, and from which length on",
        "choose a format for keys and values, and know what it loses",
        "explain and write a paged cache",
    ),
    questions=QUESTIONS,
)


def growth(models: Mapping[str, Costs]) -> Chart:
    """Return a chart of the GiB of keys, values and states after different numbers of tokens, up to 32,768."""
    lines = []
    for name, costs in models.items():
        held = costs.contexts()["state_held_bytes"].loc[:32768] / GIB
        lines.append(Line(name, [float(at) for at in held.index], held.tolist()))
    return Chart(tuple(lines), "tokens", "GiB")


def crossing(first: Costs, second: Costs) -> float:
    """Return after how many tokens the cache of `second` becomes larger than that of `first`."""
    gap = first.contexts()["state_held_bytes"] - second.contexts()["state_held_bytes"]
    after = gap[gap < 0].index[0]
    before = gap[gap > 0].loc[:after].index[-1]  # both grow linearly in between
    return float(before + (after - before) * gap[before] / (gap[before] - gap[after]))


def cache_bytes(model: Model, context: int, kv: str | None = None) -> int:
    """Return the bytes of keys and values in a new cache for `context` tokens."""
    states = model.new_cache(context, kv).states
    return sum(tensor.nbytes for state in states if state is not None for tensor in state.tensors())


@torch.inference_mode()
def logits_with(model: Model, text: str, kv: str | None) -> torch.Tensor:
    """Return the logits [T, vocabulary] of a text on the CPU, with the keys and values of its tokens in the format `kv`."""
    ids = torch.tensor([prompt_ids(model, text)], device=model.device.torch)
    length = ids.shape[1]
    cache = model.new_cache(length, kv)
    hidden = model.advance(model.embed(ids), cache.slots[:length], cache, length)
    return model.logits(hidden)[0].float().cpu()


def losses(model: Model, text: str, formats: Sequence[str] = KV) -> list[dict[str, object]]:
    """Return one row per format: bytes per token, the largest change of a logit, and the share of unchanged predictions."""
    plain = logits_with(model, text, None)
    rows: list[dict[str, object]] = []
    for name in formats:
        kv = None if name == "plain" else name
        changed = logits_with(model, text, kv)
        same = (changed.argmax(-1) == plain.argmax(-1)).float().mean().item()
        rows.append({
            "kv": name, "bytes per token": cache_bytes(model, 1024, kv) // 1024,
            "largest change of a logit": round((changed - plain).abs().max().item(), 2),
            "same next token, %": round(100 * same),
        })  # fmt: skip
    return rows


def longest_contexts(model: str, card: str) -> pd.DataFrame:
    """Return one row per format with the memory that is free for a context, the KiB per token, and the longest context."""
    import pandas as pd

    shapes, rows = describe(model, "q4_k_m"), {}
    for name in KV:
        kv = None if name == "plain" else name
        short, long = (plan(shapes, card, context=n, kv=kv) for n in (40_960, 81_920))
        per_token = (long.run_bytes - short.run_bytes) / 40_960
        fits = long.fits_on([CATALOGUE[card]])[0]
        free = fits["memory_bytes"] - (short.run_bytes - 40_960 * per_token)
        rows[name] = {
            "free GiB": round(free / GIB, 2), "KiB per token": round(per_token / 1024, 1),
            "longest context": fits["longest_context"],
        }  # fmt: skip
    return pd.DataFrame(rows).T


def layer_kinds(model: Model) -> pd.DataFrame:
    """Return one column per kind of attention layer of a Gemma 4: how many layers, their heads, and what their caches keep."""
    import pandas as pd

    config: Any = model.config
    columns = {}
    for kind, heads in (("sliding_attention", config.sliding), ("full_attention", config.full)):
        columns[kind] = {
            "layers": config.layer_types.count(kind), "heads of keys and values": heads.kv_heads,
            "numbers of a key": heads.head_dim, "numbers of a value": heads.head_dim, "tokens kept": config.sliding_window,
        }  # fmt: skip
    columns["full_attention"] |= {"numbers of a key": config.key_dim or config.full.head_dim, "tokens kept": "all"}
    return pd.DataFrame(columns)
