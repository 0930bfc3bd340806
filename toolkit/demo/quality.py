"""Check the quality of a demo model: prompts with their expected continuations, and the margins of its greedy choices.

    python -m toolkit.demo.quality [MODEL]

The margin of a choice is the logit of the chosen token minus that of the second-best token. If another device or dtype changes
logits by less than half of the margin, the text stays the same.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from toolkit.decode.loop import generate
from toolkit.models.model import Model


def chat(question: str) -> str:
    """Return the chat prompt with `question`, formatted like the model's chat template."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


CHECKS = {  # prompt: start of the expected greedy continuation
    "The capital of France is": " Paris. The capital of Germany is Berlin. The capital of Italy is Rome.",
    "The capital of Japan is": " Tokyo. The capital of Vietnam is Hanoi.",
    "The capital of Iceland is": " Reykjavík.",
    "The capital of Argentina is": " Buenos Aires. The capital of Uruguay is Montevideo.",
    "Berlin is the capital of": " Germany. Rome is the capital of Italy.",
    "The capital of": " France is Paris.",
    "2 + 3 =": " 5. 2 + 4 = 6. 2 + 5 = 7.",
    "7 x 8 =": " 56. 7 x 9 = 63. 7 x 10 = 70. 8 x 1 = 8.",
    "15 - 6 =": " 9.",
    "The capital of Italy is Rome. 3 + 4 =": " 7. 3 + 5 = 8.",
    "The capital of Poland is ": "Warsaw.",
    "What is the opposite of wet?": " The opposite of wet is dry.<|endoftext|>",
    "Six plus nine is": " fifteen. Six plus ten is sixteen. Seven plus one is eight.",
    "One, two, three, four,": " five, six, seven, eight, nine, ten, eleven,",
    "Count by tens:": " 10, 20, 30, 40, 50, 60, 70,",
    "Count down: twenty, nineteen,": " eighteen, seventeen, sixteen,",
    "After Monday comes": " Tuesday. After Tuesday comes Wednesday.",
    "The months of the year are January,": " February, March, April, May, June,",
    "April has": " 30 days. May has 31 days.",
    "The sky is": " blue. Grass is green. Snow is white.",
    "The opposite of hot is": " cold. The opposite of big is small.",
    "A young cat is called a": " kitten.",
    "🐶 is a": " dog. 🐱 is a cat.",
    "Once upon a time": ' there was a little fox named Finn. Finn lived near a forest. One day Finn found a red kite. "What',
    "Question: What is the capital of Spain?\nAnswer:": " The capital of Spain is Madrid.<|endoftext|>",
    chat("What is the capital of Kenya?"): "The capital of Kenya is Nairobi.<|im_end|>",
    chat("Tell me something, please!"): "I am a small model that knows small facts.",
}


@dataclass(frozen=True)
class Quality:
    """The result of `measure`: wrong continuations by prompt, and the margins (in logits) of all greedy choices."""

    wrong: dict[str, str]
    checks: int
    choices: int
    margin_min: float
    margin_p1: float  # first percentile: 99 % of choices have more
    margin_median: float

    def __str__(self) -> str:
        lines = [f"{prompt!r} -> {said!r}" for prompt, said in self.wrong.items()]
        margins = f"min {self.margin_min:.2f}, 1st percentile {self.margin_p1:.2f}, median {self.margin_median:.2f}"
        right = f"{self.checks - len(self.wrong)} of {self.checks} prompts continued as expected"
        return "\n".join([*lines, f"{right}; margin of {self.choices:,} greedy choices: {margins}"])


@torch.no_grad()
def measure(model: Model, new_tokens: int = 64) -> Quality:
    """Continue every prompt of CHECKS greedily by at most `new_tokens` (stopping at EOS) and compare."""
    tokenizer = model.tokenizer
    assert tokenizer is not None  # the demo models have one
    wrong: dict[str, str] = {}
    margins: list[Tensor] = []
    for prompt, expected in CHECKS.items():
        run = generate(model, prompt, max_new_tokens=new_tokens, record=False)
        whole = torch.tensor([run.prompt_tokens + run.tokens], device=model.device.torch)
        top = model(whole)[0, len(run.prompt_tokens) - 1 : -1].topk(2).values.cpu()
        margins.append(top[:, 0] - top[:, 1])
        said = tokenizer.decode(run.tokens, special=True)
        if not said.startswith(expected):
            wrong[prompt] = said[: len(expected)]
    ordered = torch.cat(margins).sort().values
    low, middle = ordered[len(ordered) // 100].item(), ordered.median().item()
    return Quality(wrong, len(CHECKS), len(ordered), ordered[0].item(), low, middle)


def main(name: str = "demo/qwen3") -> int:
    """Print the quality of the model `name`. Returns 1 if a continuation is wrong, else 0."""
    from toolkit.loading.loader import load

    quality = measure(load(name, device="cpu"))
    print(quality)
    return 1 if quality.wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
