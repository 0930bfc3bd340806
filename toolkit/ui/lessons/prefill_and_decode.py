"""Lesson 3, "Prefill and decode": its questions, and what it computes and measures of many tokens at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import torch

from toolkit.core.units import plural
from toolkit.decode.loop import generate
from toolkit.decode.prefix import Prefix
from toolkit.decode.run import Run
from toolkit.gpu.catalogue import CATALOGUE, GpuSpec
from toolkit.gpu.device import Device
from toolkit.models.cache import Cache
from toolkit.models.model import CausalLM
from toolkit.planning.costs import Costs
from toolkit.planning.describe import costs
from toolkit.trace.events import Trace
from toolkit.ui.lessons.chart import Chart, Line
from toolkit.ui.lessons.checks import failed
from toolkit.ui.lessons.lesson import Lesson, Question
from toolkit.ui.lessons.steps import CHANGES, prefill_us
from toolkit.ui.timeline.widget import Timeline

if TYPE_CHECKING:
    import pandas as pd

P = ParamSpec("P")
T = TypeVar("T")
Feed = Callable[[CausalLM, torch.Tensor, Cache, int], torch.Tensor]
MIB, GIB = 1 << 20, 1 << 30
AT_ONCE = (1, 16, 64, 128, 256, 512, 2048)
SAME, FOUR, ALL = FEW = ("about as long as one token", "about 4 times as long", "about 16 times as long")
PROMPT, CHUNK = 80, 32  # of the exercise "in parts": two full parts and a shorter one
# One H200, q4_k_m, a prompt of 8,192 tokens: seconds until it was processed, and then tokens per second with "cuda-graph".
# From bench/results/h200_speed_*.json.
MEASURED = {
    "qwen3-8b": (0.308535834, 500.42788224679254), "gemma4-31b": (1.212946402, 172.5051879415248),
    "qwen3.5-35b-a3b": (0.33798394, 900.7632587940169),
}  # fmt: skip
MEASURED_PROMPT = 8192

QUESTIONS = {
    "sixteen tokens": Question(
        hint="Which takes longer in a decode step: to read the weights, or to compute with them (lesson 2, section 6)? How "
        "often must the weights be read for 16 tokens that pass a layer together?",
        why="The weights are read once, for all 16 tokens, and the reading takes nearly all of the time. The arithmetic of "
        "the other 15 tokens fits into time in which the GPU would only wait for bytes.",
        answer='{"16 tokens": "about as long as one token"}',
        who="the trace",
        choices=FEW,
    ),
    "per byte": Question(
        hint="Each weight that is read is used for 2 operations per token. How many bytes does it have, with 16 bits and "
        "with 4 bits?",
        why="16 tokens x 2 operations / 2 bytes, and 16 x 2 / half a byte. With one token, it is 1 operation per byte, and "
        "with 512 tokens in 16 bits it is 512.",
        answer='{"16 bits": 16 * 2 / 2, "4 bits": 16 * 2 / 0.5}',
        who="the division",
    ),
    "crossover": Question(
        hint="With 16-bit weights, n tokens at once do n operations per byte. How many operations can the GPU do in the time "
        "in which its memory delivers one byte? Mind the units: TFLOPS are 1000 billion operations per second, and GB/s "
        "are a billion bytes per second.",
        why="L4: 121,000 / 300. H200: 989,400 / 4,800. The L4 is the slower GPU in both, but its memory is slower still, "
        "compared with its arithmetic.",
        answer='{"l4": 121e12 / 300e9, "h200": 989.4e12 / 4800e9}',
        within=0.05,
        who="the catalogue",
    ),
    "limit": Question(
        hint="A GPU reads and computes at the same time, so the longer of two times counts. Reading: layer_bytes divided by "
        "card.bandwidth_bytes_per_s, once. Arithmetic: tokens times layer_flops, divided by card.bf16_flops. `max(a, b)` is "
        "the larger of two numbers.",
        why="That is the roofline model: the time is the larger one of two limits. It is simple, and yet it tells "
        "you what to improve.",
        answer="""\
def least_s(tokens, card):
    reading = layer_bytes / card.bandwidth_bytes_per_s
    arithmetic = tokens * layer_flops / card.bf16_flops
    return max(reading, arithmetic)""",
    ),
    "two cards": Question(
        hint="Which of the two numbers in the table sets the time of a prompt with 4,096 tokens, and which one the time of a "
        "decode step?",
        why="A prompt needs arithmetic: {prompt[rtx-3090]:.2f} s at least on the RTX 3090, and {prompt[l4]:.2f} s on the L4. "
        "Then every token needs bandwidth: at most {rate[rtx-3090]:.0f} and {rate[l4]:.0f} tokens per second.",
        answer='{"first token sooner": "l4", "more tok/s": "rtx-3090"}',
        who="the model",
        choices=("rtx-3090", "l4"),
    ),
    "fewer bits": Question(
        hint="Fewer bits make the reading shorter. Is it the reading that takes the time here?",
        why="The arithmetic sets the limit, and it is the same for weights of any size: they are multiplied as 16-bit "
        "numbers. Four bits speed up decoding, and hardly the prompt. Unpacking the weights even adds some work: on the "
        "virtual GPU, this prompt takes {plain:.0f} ms in 16 bits and {packed:.0f} ms in q4_k_m.",
        answer='{"2,048 tokens": "about as long"}',
        who="the model",
        choices=CHANGES,
    ),
    "activations": Question(
        hint="They grow in proportion to the number of tokens that pass the layers together. Only the few bytes of the "
        "logits, which are needed for the last token, don't.",
        why="16 times as many tokens, and about 16 times as much memory: {each:.0f} KiB for each token. The logits don't grow.",
        answer='{"MiB": 16 * plan.sizes.activation_bytes(512) / 2**20}',
        within=0.05,
        who="the plan",
    ),
    "chunks": Question(
        hint="A prompt of 2,048 tokens has 64 chunks of 32, or 4 chunks of 512. Each chunk reads all weights once. What does "
        "the roofline (your `least_s`) say of one chunk?",
        why="32 tokens are below the crossover of {crossover:.0f}: each chunk takes as long as reading the weights. With 512 "
        "tokens the arithmetic takes longer, and larger chunks gain nothing more.",
        answer='{"chunks of 32": 64 * 1000 * 13.9e9 / 1792e9, "chunks of 512": 1000 * 2048 * 13.9e9 / 209.5e12}',
        within=0.05,
        who="the model",
    ),
    "in parts": Question(
        hint="`for start in range(0, n, chunk)` visits the first position of each part, and `min(start + chunk, n)` is where "
        "it stops: the last part may be shorter. A part is `ids[:, start:stop]`, and its places in the cache are "
        "`cache.slots[start:stop]`.",
        why="The keys and values of earlier parts are in the cache, so each part sees them. Only the activations of one part "
        "are in memory at a time.",
        answer="""\
def feed(model, ids, cache, chunk):
    n = ids.shape[1]
    for start in range(0, n, chunk):
        stop = min(start + chunk, n)
        hidden = model.advance(model.embed(ids[:, start:stop]), cache.slots[start:stop], cache, stop)
    return hidden[:, -1:]""",
    ),
    "shares": Question(
        hint="Prompt: tokens per second x operations per token = operations per second. Decoding: tokens per second x bytes "
        "per token = bytes per second. Divide each by the figure in the datasheet, in the same units.",
        why="{row[prompt, tok/s]:,.0f} tok/s x {flops:.1f} billion operations = {reached:.0f} TFLOPS, and "
        "{row[generated, tok/s]:.0f} tok/s x {row[GiB per generated token]:.2f} GiB = {delivered:,.0f} GiB/s. Neither phase "
        "reaches its limit, and the two limits differ.",
        answer='{"% of arithmetic": 25_713 * 16.3e9 / 989.4e12 * 100, "% of bandwidth": 503 * 5.48 / 4470 * 100}',
        within=0.05,
        who="the record",
    ),
}

lesson = Lesson(
    "prefill_and_decode",
    "Prefill and decode",
    minutes=45,
    goals=(
        "explain why a prompt token costs much less than a generated one",
        "calculate from how many tokens on a GPU computes instead of waiting for its memory",
        "say which figure of a GPU decides when the first token arrives, and which one how fast the text follows",
        "choose a chunk size, and feed a prompt in chunks yourself",
    ),
    questions=QUESTIONS,
)


@dataclass(frozen=True)
class Layers:
    """All layers of a model, without embedding and head: bytes of weights that a pass reads, and operations per token."""

    read_bytes: int
    flops: int


def layers_of(about: Costs) -> Layers:
    """Return what the layers cost. A prompt needs the head only for its last token, so it is left out."""
    parts = [part for part in about.parts if part.part not in ("embedding", "head")]
    return Layers(sum(part.read_bytes for part in parts), sum(part.flops for part in parts))


def least_of(layers: Layers, tokens: int, card: GpuSpec) -> float:
    """Return the least time in seconds in which `tokens` can pass the layers together, by bandwidth and arithmetic."""
    return max(layers.read_bytes / card.bandwidth_bytes_per_s, tokens * layers.flops / card.bf16_flops)


def operations_per_byte(tokens: int, bits: float = 16) -> float:
    """Return the arithmetic intensity of a matrix product: 2 operations per token and weight, for each byte of the weights."""
    return 2 * tokens / (bits / 8)


def crossover(card: GpuSpec, bits: float = 16) -> float:
    """Return from how many tokens at once the arithmetic of a matrix product takes longer than reading its weights."""
    return card.bf16_flops / card.bandwidth_bytes_per_s / operations_per_byte(1, bits)


def cards_table(*names: str) -> pd.DataFrame:
    """Return the arithmetic and the bandwidth of GPUs of the catalogue, one row per GPU."""
    import pandas as pd

    cards = [CATALOGUE[name] for name in names]
    rates = {
        "TFLOPS": [card.bf16_flops / 1e12 for card in cards],
        "GB/s": [round(card.bandwidth_bytes_per_s / 1e9) for card in cards],
    }
    return pd.DataFrame(rates, index=list(names))


def roofs(layers: Layers, *names: str, most: int = 600) -> Chart:
    """Return a chart of the operations per second that 1 to `most` tokens at once can reach on each GPU, in TFLOPS."""
    lines = []
    for card in (CATALOGUE[name] for name in names):
        knee = card.bf16_flops / layers.flops * layers.read_bytes / card.bandwidth_bytes_per_s
        tokens = [1.0, knee, float(most)]
        lines.append(Line(card.key, tokens, [n * layers.flops / least_of(layers, n, card) / 1e12 for n in tokens]))  # type: ignore[arg-type]
    return Chart(tuple(lines), "tokens at once", "TFLOPS at most")


def prefill_beside_decode(run: Run | Trace, step: int = 2) -> Timeline:
    """Return a timeline of the prefill of a run or a shipped trace above a decode step. Both begin at 0 of the axis."""
    trace = run if isinstance(run, Trace) else run.trace
    tokens = run.meta["prompt_tokens"] if isinstance(run, Trace) else len(run.prompt_tokens)
    parts = [trace.select(trace["step"] == number) for number in (0, step)]
    return Timeline(*parts, titles=(f"prefill, {tokens} tokens", "decode step, 1 token"))


def prefill_ms(model: CausalLM, tokens: int, chunk: int | None = None) -> float:
    """Return the modelled time in ms of a prompt of that many tokens on the model's virtual GPU, `chunk` tokens at a time."""
    run = generate(model, [1] * tokens, "roundtrip", max_new_tokens=2, prefill_chunk=chunk, lines=False)
    return prefill_us(run) / 1e3


def few(times: float) -> str:
    """Return how many times as long as one token 16 tokens take, in the words of `FEW`."""
    return SAME if times < 1.25 else FOUR if times < 8 else ALL


def at_once(model: CausalLM, known: Mapping[int, float]) -> pd.DataFrame:
    """Return the modelled times of prompts of different lengths, each processed at once. `known` has those in ms by length."""
    import pandas as pd

    times = {tokens: known[tokens] if tokens in known else prefill_ms(model, tokens) for tokens in AT_ONCE}
    table = pd.DataFrame({"ms": times}).rename_axis("tokens at once")
    table["ms per token"] = table["ms"] / table.index
    return table.round({"ms": 1, "ms per token": 3})


def beside(least_s: Callable[[int, GpuSpec], float], card: GpuSpec, table: pd.DataFrame, most: int = 512) -> Chart:
    """Return a chart of the least times that a function computes, and of the modelled times in the table of `at_once`."""
    shown = table.loc[:most, "ms"]
    tokens = list(range(1, most + 1))
    return Chart(
        (
            Line("your limit", [float(n) for n in tokens], [1e3 * least_s(n, card) for n in tokens]),
            Line("virtual GPU", [float(n) for n in shown.index], shown.tolist(), dots=True),
        ),
        "tokens at once",
        "ms",
    )


def limits(least_s: Callable[[int, GpuSpec], float], layers: Layers) -> dict[str, bool]:
    """Check a function that computes the least time of tokens that pass the layers together."""
    found = {}
    for name, tokens in (("rtx-5090", 1), ("rtx-5090", 1000), ("l4", 100), ("h200", 1000)):
        wanted, card = least_of(layers, tokens, CATALOGUE[name]), CATALOGUE[name]
        try:
            said = float(least_s(tokens, card))
        except Exception as error:
            return failed(least_s, error)
        about = f"{plural(tokens, 'token')} on {name}"
        found[f"{about}: {1e3 * said:,.2f} ms, wanted {1e3 * wanted:,.2f}"] = abs(said - wanted) <= 0.01 * wanted
    return found


def chunk_table(model: CausalLM, tokens: int, chunks: Sequence[int]) -> pd.DataFrame:
    """Return time and memory of one prompt in chunks of different sizes on the model's virtual GPU.

    The memory is the peak while text is generated, without the weights. It includes the keys and values of the prompt.
    """
    import pandas as pd

    rows = {}
    for chunk in chunks:
        ms, peak = _with_peak(model.device, prefill_ms, model, tokens, chunk)
        rows[chunk] = {"ms": round(ms, 1), "peak MiB": round(peak / MIB)}
    return pd.DataFrame(rows).T.astype({"peak MiB": int}).rename_axis("chunk")


@torch.no_grad()
def fed_in_parts(feed: Feed, model: CausalLM) -> dict[str, bool]:
    """Check a function that feeds a prompt in parts: its result, the memory of its activations, and its kernels.

    The toolkit's own `Prefix`, which feeds as many tokens at a time, is measured in the same way.
    """
    device = model.device
    torch.manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, PROMPT)).to(device.torch)
    before = device.memory().allocated_bytes
    cache = model.new_cache(PROMPT)
    cache_bytes = device.memory().allocated_bytes - before
    whole = model.advance(model.embed(ids), cache.slots[:PROMPT], cache, PROMPT)[:, -1:].cpu()
    cache.free()
    with device.record(lines=False) as ours:
        _, peak = _with_peak(device, lambda: Prefix(model, ids[0].tolist(), PROMPT, chunk=CHUNK).free())
    most, kernels = 1.25 * (peak - cache_bytes), int(ours.is_kind("kernel").sum())

    cache = model.new_cache(PROMPT)
    try:
        with device.record(lines=False) as yours:
            hidden, peak = _with_peak(device, feed, model, ids, cache, CHUNK)
    except Exception as error:
        return failed(feed, error)
    finally:
        cache.free()
    launched = int(yours.is_kind("kernel").sum())
    same = isinstance(hidden, torch.Tensor) and hidden.shape == whole.shape and torch.allclose(hidden.cpu(), whole, atol=1e-3)
    return {
        "the result of the last token is the same as at once": bool(same),
        f"memory of the activations: {peak / MIB:.2f} MiB, wanted at most {most / MIB:.2f}": peak <= most,
        f"kernels: {launched}, wanted at most {kernels}": launched <= kernels,
    }


def _with_peak(device: Device, run: Callable[P, T], *args: P.args, **options: P.kwargs) -> tuple[T, int]:
    """Return the result of `run`, and how many bytes more than before are allocated at its peak."""
    before = device.memory().allocated_bytes
    device.reset_peak()
    result = run(*args, **options)
    return result, device.memory().peak_bytes - before


def prompt_flops(name: str, tokens: int) -> float:
    """Return the mean operations per token of a prompt of so many tokens, without the head: each attends to those before it."""
    halfway = layers_of(costs(name, context=tokens // 2))
    return float(halfway.flops)


def measured(about: Mapping[str, Costs]) -> pd.DataFrame:
    """Return what was measured on an H200 with a prompt of 8,192 tokens in q4_k_m, one row per model.

    `about` has the costs of each model with as many tokens before.
    """
    import pandas as pd

    rows = {}
    for name, (seconds, rate) in MEASURED.items():
        prompt_rate = MEASURED_PROMPT / seconds
        rows[name] = {
            "prompt, s": round(seconds, 3), "prompt, tok/s": round(prompt_rate), "generated, tok/s": round(rate),
            "times cheaper": round(prompt_rate / rate, 1), "GiB per generated token": round(about[name].token_bytes / GIB, 2),
        }  # fmt: skip
    return pd.DataFrame(rows).T.astype({"prompt, tok/s": int, "generated, tok/s": int})
