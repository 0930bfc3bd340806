"""A small serving loop: the tokens stay on the GPU until a reply is complete."""

from __future__ import annotations

import torch
from model import Cache, Model


@torch.no_grad()
def reply(model: Model, prompt: list[int], number: int, device: torch.device) -> list[int]:
    """Return `number` tokens that follow the prompt, the most likely one each time."""
    tokens = torch.tensor([prompt], device=device)
    cache = Cache(1, device)
    answer = torch.empty(number, dtype=torch.long, device=device)
    for i in range(number):
        logits = model(tokens, cache)
        tokens = logits[:, -1].argmax(-1, keepdim=True)
        answer[i] = tokens[0, 0]
    return answer.tolist()


def serve(model: Model, prompts: list[list[int]], number: int, device: torch.device) -> list[list[int]]:
    """Return the replies to several prompts, one after the other."""
    replies = []
    for prompt in prompts:
        replies.append(reply(model, prompt, number, device))
    return replies
