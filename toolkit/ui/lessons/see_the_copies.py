"""Lesson 1, "See the copies": its questions."""

from __future__ import annotations

from toolkit.ui.lessons.lesson import Lesson, Question

QUESTIONS = {
    "one line": Question(
        hint="Which part of the line needs a number in Python? And where is the list before `y` is created?",
        why="`.item()` copies the largest number to the host, and `torch.tensor` copies the list back to the GPU: one copy "
        "each way. `torch.stack([x.max(), x.new_zeros(())])` has the same result without leaving the GPU.",
        answer='{"h2d": 1, "d2h": 1, "d2d": 0}',
    ),
    "round trip": Question(
        hint="Count what the host must know after a step, and what it sends for the next one. The position is a tensor, too.",
        why="One D2H copy reads the token (8 bytes, an int64). Two H2D copies send the token back, and its position.",
        answer='{"h2d": 2, "d2h": 1}',
    ),
    "logits": Question(
        hint="The number of tokens in the vocabulary is printed above. How many bytes does each of their numbers take?",
        why="4 bytes for each token of the vocabulary. That is little here, but Gemma 4 has 262,144 tokens: 1 MiB per step.",
        answer='{"d2h bytes": 4 * model.config.vocab_size}',
    ),
    "token": Question(
        hint="The round trip had two H2D copies. Which of them is gone? And does the host still need the token?",
        why="The token stays on the GPU. The position still comes from the host: 8 bytes per step.",
        answer='{"h2d": 1, "d2h": 1}',
    ),
    "position": Question(
        hint="The position of a step is copied from one place on the GPU to another. Which kind of copy is that?",
        why="No H2D copy is left. A D2D copy of 8 bytes replaces it: it doesn't cross between host and GPU, and the host "
        "doesn't wait for it.",
        answer='{"h2d": 0, "d2h": 1, "d2d": 1}',
    ),
    "sample": Question(
        hint="`torch.tensor(temperature, device=...)` is the copy. What happens if you divide a tensor by a Python number?",
        why="A Python number needs no tensor: `logits / temperature` passes it to the kernel as an argument.",
        answer="""\
def sample_mended(logits, temperature):
    return torch.softmax(logits / temperature, dim=-1).argmax(-1)""",
    ),
}

lesson = Lesson(
    "see_the_copies",
    "See the copies",
    minutes=40,
    goals=(
        "read a timeline: host, kernels, copies and waits",
        "say which line of a program copies, and which one waits",
        "remove the copies of a decode loop one by one",
        "write a test that fails if a copy comes back",
    ),
    questions=QUESTIONS,
)
