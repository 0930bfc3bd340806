"""A small training loop that copies each batch to the GPU once and reads one number back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from model import CONTEXT, VOCABULARY, Model
from torch import Tensor

Batch = tuple[Tensor, Tensor]


def batches(number: int, seed: int = 0) -> list[Batch]:
    """Return batches of tokens [B, T + 1] and of their weights [B, T], in pinned memory."""
    random = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(number):
        tokens = torch.randint(VOCABULARY, (4, CONTEXT + 1), generator=random)
        weights = torch.rand(4, CONTEXT, generator=random)
        made.append((tokens.pin_memory(), weights.pin_memory()))
    return made


def loss_of(model: Model, tokens: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted mean of the cross entropy of each next token."""
    logits = model(tokens[:, :-1])
    losses = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    return (losses * weights.flatten()).mean()


def train(model: Model, data: list[Batch], device: torch.device) -> float:
    """Train for one epoch and return the mean loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    total = torch.zeros((), device=device)
    for tokens, weights in data:
        tokens = tokens.to(device, non_blocking=True)
        weights = weights.to(device, non_blocking=True)
        loss = loss_of(model, tokens, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += loss.detach()
    return (total / len(data)).item()


@torch.no_grad()
def evaluate(model: Model, data: list[Batch], device: torch.device) -> float:
    """Return the share of tokens that the model predicts."""
    right = torch.zeros((), device=device)
    for tokens, _ in data:
        tokens = tokens.to(device, non_blocking=True)
        logits = model(tokens[:, :-1])
        right += (logits.argmax(-1) == tokens[:, 1:]).float().mean()
    return (right / len(data)).item()
