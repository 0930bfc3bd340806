"""Mixtures of experts: grouped products, loops over experts, capacities, permutations, Hugging Face models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def _route(x: torch.Tensor, router: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights, chosen = (x @ router).float().softmax(-1).topk(k, dim=-1)
    return weights / weights.sum(-1, keepdim=True), chosen


@torch.no_grad()
def grouped_products(device: torch.device) -> None:
    """Compute a layer of eight experts in bf16 with grouped matrix products."""
    tokens, dim, hidden, experts = 64, 64, 128, 8
    x = torch.randn(tokens, dim).to(device, torch.bfloat16)
    router = torch.randn(dim, experts).to(device, torch.bfloat16)
    up = torch.randn(experts, dim, hidden, device=device, dtype=torch.bfloat16) * 0.1
    down = torch.randn(experts, hidden, dim, device=device, dtype=torch.bfloat16) * 0.1
    weights, chosen = _route(x, router, 2)
    order = chosen.flatten().argsort(stable=True)
    offsets = torch.bincount(chosen.flatten(), minlength=experts).cumsum(0).to(torch.int32)
    rows = x[order // 2]
    out = F.grouped_mm(F.silu(F.grouped_mm(rows, up, offs=offsets)), down, offs=offsets)
    out = out * weights.flatten()[order].unsqueeze(1).to(out.dtype)
    y = torch.zeros_like(x).index_add_(0, order // 2, out)
    y.float().norm().item()


def grouped_training(device: torch.device) -> None:
    """Train two matrices per expert through grouped matrix products in bf16."""
    tokens, dim, hidden, experts = 128, 32, 64, 4
    up = nn.Parameter(torch.randn(experts, dim, hidden, device=device, dtype=torch.bfloat16) * 0.1)
    down = nn.Parameter(torch.randn(experts, hidden, dim, device=device, dtype=torch.bfloat16) * 0.1)
    optimizer = torch.optim.SGD([up, down], lr=0.1)
    x = torch.randn(tokens, dim).to(device, torch.bfloat16)
    expert = torch.randint(0, experts, (tokens,)).sort().values
    offsets = torch.bincount(expert, minlength=experts).cumsum(0).to(device, torch.int32)
    for _ in range(2):
        hidden_rows = F.relu(F.grouped_mm(x, up, offs=offsets)).square()
        loss = F.mse_loss(F.grouped_mm(hidden_rows, down, offs=offsets).float(), x.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()


def expert_loop(device: torch.device) -> None:
    """Train experts in a loop that finds each expert's tokens with `torch.where`."""
    router, experts = nn.Linear(32, 6, bias=False), nn.ModuleList(nn.Linear(32, 32) for _ in range(6))
    model = nn.ModuleList([router, experts]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(48, 32).to(device)
    weights, chosen = model[0](x).softmax(dim=-1).topk(2, dim=-1)
    y = torch.zeros_like(x)
    mask = F.one_hot(chosen, num_classes=6).permute(2, 1, 0)
    for i, expert in enumerate(model[1]):
        slot, token = torch.where(mask[i])
        if token.numel() == 0:
            continue
        y.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
    loss = (y - x).pow(2).mean()
    loss.backward()
    optimizer.step()
    loss.item()


def capacity_routing(device: torch.device) -> None:
    """Train a switch layer that dispatches with one-hot products, up to a capacity, with a balancing loss."""
    tokens, dim, experts, capacity = 64, 32, 4, 20
    router = nn.Linear(dim, experts).to(device)
    weight = nn.Parameter(torch.randn(experts, dim, dim, device=device) * 0.1)
    optimizer = torch.optim.Adam([*router.parameters(), weight])
    x = torch.randn(tokens, dim, device=device)
    gates = router(x).softmax(-1)
    expert = F.one_hot(gates.argmax(-1), experts).float()
    position = (expert.cumsum(0) - 1) * expert
    expert = expert * (position < capacity)
    dispatch = torch.einsum("te,tec->tec", expert, F.one_hot(position.long(), tokens)[..., :capacity].float())
    inputs = torch.einsum("tec,td->ecd", dispatch, x)
    outputs = torch.bmm(inputs, weight)
    combined = torch.einsum("tec,ecd->td", dispatch * gates.unsqueeze(-1), outputs)
    balance = experts * (expert.mean(0) * gates.mean(0)).sum()
    loss = F.mse_loss(combined, x) + 0.01 * balance
    loss.backward()
    optimizer.step()


@torch.inference_mode()
def token_permutation(device: torch.device) -> None:
    """Sort tokens by expert, read the counts back, run each expert on its slice, and restore the order."""
    experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(5)).to(device)
    router = torch.randn(64, 5).to(device)
    for _ in range(2):
        x = torch.randn(40, 64).to(device)
        expert = (x @ router).argmax(dim=-1)
        order = expert.argsort()
        counts = torch.bincount(expert, minlength=5).tolist()
        parts = [model(part) for model, part in zip(experts, x[order].split(counts), strict=True)]
        y = torch.empty_like(x)
        y[order] = torch.cat(parts)
    y.sum().item()


def mixtral_training(device: torch.device) -> None:
    """Train a small Mixtral for two steps with its auxiliary loss."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=256, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, output_router_logits=True,
    )  # fmt: skip
    model = MixtralForCausalLM(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 256, (2, 24)).to(device)
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


def qwen3_moe_generation(device: torch.device) -> None:
    """Generate eight tokens with a small Qwen3 mixture of experts in bf16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2, head_dim=16,
        num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, eos_token_id=None,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).to(device, torch.bfloat16).eval()
    ids = torch.arange(10).view(1, 10).to(device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, pad_token_id=0)
    out[0, 10:].tolist()
