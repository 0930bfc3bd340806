"""Lesson 6, "Decode faster": its questions, and the check of its exercise."""

from __future__ import annotations

from dataclasses import fields

from toolkit.decode.run import Run
from toolkit.decode.strategies import STRATEGIES, Strategy
from toolkit.ui.lessons.lesson import Lesson, Question
from toolkit.ui.lessons.steps import CHANGES

QUESTIONS = {
    "who is slower": Question(
        hint="Is the GPU idle for most of the step, or does it work? If it is idle, which side does it wait for?",
        why="The model is small, so its kernels are short. To launch a kernel, the host runs the Python code of the "
        "layer, allocates the result and calls the driver, and that takes longer than the kernel. Most of the time, "
        "the GPU waits for its next kernel.",
        choices=("the host", "the GPU"),
        answer='{"slower side": "the host"}',
    ),
    "fewer bytes": Question(
        hint="A row of logits has one float32 number for each token of the vocabulary, and a token id is one int64 number. "
        "Then compare such a copy with everything else that the host does in a step.",
        why="Far fewer bytes cross, and the step still takes as long. A small copy costs its start and its wait, not its "
        "bytes. The host launches about as many kernels as before, and the launches take the time. In a model with a "
        "large vocabulary, the bytes count: a row of logits of Gemma 4 has 1 MiB.",
        choices=CHANGES,
        answer='{"times fewer bytes": 4 * model.config.vocab_size / 8, "step": "about as long"}',
    ),
    "no wait": Question(
        hint="The first table has a column for the time in which the host waits. Hiding a wait can't save more than that.",
        why="Double buffering hides the time in which the host waits for the GPU. But here the host hardly waits: when it "
        "asks for the token, the GPU has run nearly all kernels. There is nothing to hide.",
        choices=CHANGES,
        answer='{"step": "about as long"}',
    ),
    "captured": Question(
        hint="The GPU computes the same numbers as before. The token and its position still come from the host, and are "
        "copied before the graph is launched.",
        why="A graph takes away launches, not kernels: the GPU runs the same kernels, but the host launches them all with "
        "one call. The copies are not in the graph, so there are as many as before.",
        answer='{"H2D": 2, "D2H": 1, "kernels": step_facts(roundtrip)["kernels"]}',
    ),
    "wait in a graph": Question(
        hint="What does the host do after it has launched the graph? And what does the GPU do at that time?",
        why="After one launch, the host can only wait for the token, for about as long as the kernels run. A long wait "
        "doesn't mean that waiting costs time. It means that the host is ahead, and that the GPU sets the speed.",
        choices=CHANGES,
        answer='{"host waits": "longer"}',
    ),
    "step of cuda-graph": Question(
        hint="If the GPU never waits for the host, a step takes as long as its kernels. The table above has that time.",
        why="The host launches the next graph while the GPU still runs this one, so the GPU needn't wait between two "
        "steps. A step takes as long as its kernels, plus the short pauses between the kernels of a graph.",
        within=0.2,
        answer='{"step, µs": step_facts(roundtrip_captured)["GPU works, µs"]}',
    ),
    "the loop": Question(
        hint="The GPU writes its tokens to memory of the host from inside a kernel, and that is not a copy. And who set "
        "the speed of `cuda-graph`: the host or the GPU?",
        why="The last copy is gone, and so is the host's work. The step isn't shorter: the GPU already set the speed of "
        "`cuda-graph`, and here it runs the same kernels, plus the small one that publishes the token and decides "
        "whether to go on. What the loop buys is independence: it no longer matters how slow the host is, or what "
        "else it does.",
        choices=CHANGES,
        answer='{"D2H": 0, "step": "about as long"}',
    ),
    "in vain": Question(
        hint="When the host learns the last token of the text, which step has it already launched?",
        why="`roundtrip` learns each token before it launches the next step. `cuda-graph` learns each token one step "
        "late: when the host sees that the text has ended, one more step has been launched.",
        answer='{"roundtrip": 0, "cuda-graph": 1}',
    ),
    "first step": Question(
        hint="What must happen before a graph can be launched for the first time?",
        why="A graph can be captured once its kernels are compiled. So the first step is launched kernel by kernel, as that "
        "of `roundtrip`, and the loop is captured before the second one. `cuda-graph` captures then, too. A few tokens "
        "make up for a capture, but an answer of two tokens needs no graph.",
        choices=CHANGES,
        answer='{"first step": "longer"}',
    ),
    "large model": Question(
        hint="In the shortest possible step, the GPU works all the time. The table has the time of the step and the time "
        "of its kernels.",
        why="The more bytes a step reads, the longer its kernels run, and the less the host matters. Without the host, a "
        "step takes about as long as its kernels. Capturing can't save more than that: only faster kernels or fewer "
        "bytes can.",
        within=0.1,
        answer='{"times shorter": large.loc["roundtrip", "step, µs"] / large.loc["roundtrip", "GPU works, µs"]}',
    ),
    "one cause": Question(
        hint="The field `readback` says how a token gets to the host. Section 4 changes a field with `replace`.",
        why="The host waits for each token again, and nothing else differs. The table below splits the way from a captured "
        "`roundtrip` to `cuda-graph` into two: without the uploads of token and position, and without the wait.",
        answer="""\
def waiting(strategy):
    return replace(strategy, readback="wait")""",
    ),
}

lesson = Lesson(
    "decode_faster",
    "Decode faster",
    minutes=60,
    goals=(
        "say whether the host or the GPU sets the speed of a step",
        "predict what a CUDA graph changes, and what it doesn't",
        "find the change that helps the slower side",
        "measure one cause at a time",
    ),
    questions=QUESTIONS,
)


def differs_in_waiting(strategy: Strategy, run: Run) -> dict[str, bool]:
    """Return whether `strategy` differs from "cuda-graph" in one field, and whether the host waits for the tokens of `run`."""
    given = STRATEGIES["cuda-graph"]
    names = [field.name for field in fields(Strategy) if field.name not in ("name", "crosses")]
    changed = [name for name in names if getattr(strategy, name) != getattr(given, name)]
    aside = int((run.trace.is_kind("d2h") & (run.trace["stream"] != 0)).sum())
    return {
        f"fields changed: {', '.join(changed) or 'none'}, wanted one": len(changed) == 1,
        f"copies on a second stream: {aside}, wanted 0": aside == 0,
    }
