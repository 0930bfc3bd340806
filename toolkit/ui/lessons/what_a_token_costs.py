"""Lesson 2, "What a token costs": its questions, and measured rates to compare with the limits."""

from __future__ import annotations

from toolkit.ui.lessons.lesson import Lesson, Question

# tokens per second of llama.cpp with Q4_K_M on one H200, batch size 1, after 64 tokens: toolkit/bench/published.py
MEASURED = {"qwen3-8b": 264.8, "gemma4-31b": 80.9, "qwen3.5-35b-a3b": 249.8}

QUESTIONS = {
    "weights": Question(
        hint="Add up the parameters of all parts, without the embedding. Each takes 2 bytes. Divide the bytes by `2**30`.",
        why="{total:.2f} billion parameters minus {embedding:.2f} billion of the embedding, 2 bytes each, divided by `2**30`.",
        answer='{"GiB per token": 2 * (costs.parameters - costs.to_pandas()["parameters"]["embedding"]) / 2**30}',
        within=0.05,
        who="the model",
    ),
    "limit": Question(
        hint="How often per second can the memory deliver the bytes of your last answer?",
        why="1,669 GiB/s / {gib:.1f} GiB. No program can be faster, because it must read all these bytes.",
        answer='{"tok/s": 1669 / (costs.read_bytes / 2**30)}',
        within=0.05,
        who="the division",
    ),
    "bits": Question(
        hint="The bytes decide, and they are proportional to the bits of a weight. The average is between 4.5 and 6.6, and "
        "nearer to the first.",
        why="About {bits:.0f} bits per weight on average: 16 / {bits:.0f}. It is not 4 times, because scales and 6-bit "
        "matrices count, too.",
        answer='{"times": 16 / 5}',
        within=0.1,
        who="the model",
    ),
    "experts": Question(
        hint="Take the column GiB of the table: all of it but the embedding, and of `experts` only the share that is used.",
        why="Experts {experts:.1f}, attention and delta net {attention:.1f}, head {head:.1f}, and a little for the rest. The "
        "other {unread:.0f} GiB are in memory, but not read.",
        answer='{"GiB per token": (parts.drop(["embedding", "experts"]).sum() + parts["experts"] * 8 / 256) / 2**30}',
        within=0.15,
        who="the model",
    ),
    "context": Question(
        hint="Layers x 2 (a key and a value) x heads x numbers x bytes of a number. Then: how often does that fit into the "
        "bytes of the weights?",
        why="36 x 2 x 8 x 128 x 2 bytes = {found[bytes]:,} bytes. After {found[tokens]:,.0f} tokens, half of the bytes "
        "read are keys and values.",
        answer='{"bytes": 36 * 2 * 8 * 128 * 2, "tokens": 4.35 * 2**30 / (36 * 2 * 8 * 128 * 2)}',
        within=0.05,
        who="the model",
    ),
    "batch": Question(
        hint="One sequence does one operation per byte. How many operations can the GPU do in the time in which it reads a "
        "byte?",
        why="209.5 / 1.792: more than a hundred operations per byte. A single sequence leaves {unused:.0%} of them unused.",
        answer='{"sequences": 209.5 / 1.792}',
        within=0.1,
        who="the model",
    ),
}

lesson = Lesson(
    "what_a_token_costs",
    "What a token costs",
    minutes=45,
    goals=(
        "calculate the highest speed of a model on a GPU with one division",
        "say what 4-bit weights, experts and a long context do to it",
        "explain why a GPU's arithmetic hardly matters for a single sequence",
    ),
    questions=QUESTIONS,
)
