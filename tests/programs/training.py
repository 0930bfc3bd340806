"""Training steps: mixed precision, optimizers, schedules, checkpointing, averages, gradients per sample."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


def _mlp(dim: int = 64, out: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(dim, 128), nn.LayerNorm(128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, out))


def _batch(device: torch.device, rows: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 64).to(device), torch.randint(0, 10, (rows,)).to(device)


def fp16_scaler(device: torch.device) -> None:
    """Train in fp16 with a gradient scaler, unscaled clipping and a learning rate by step."""
    model = _mlp().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    scaler = torch.amp.GradScaler(device.type)
    for _ in range(3):
        x, y = _batch(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    scaler.get_scale()


def fused_adam(device: torch.device) -> None:
    """Train with the fused AdamW, a one-cycle schedule and gradients that accumulate over two batches."""
    model = _mlp().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, amsgrad=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10)
    total = torch.zeros((), device=device)
    for step in range(4):
        x, y = _batch(device)
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        total += loss.detach()
        if step % 2 == 1:
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    total.item()


def sgd_groups(device: torch.device) -> None:
    """Train with Nesterov momentum and weight decay for matrices only, then with foreach RMSprop."""
    model = _mlp().to(device)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    first = torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True)
    second = torch.optim.RMSprop(model.parameters(), lr=1e-3, momentum=0.5, centered=True, foreach=True)
    for optimizer in (first, first, second, second):
        x, y = _batch(device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()


def adafactor_bf16(device: torch.device) -> None:
    """Train bf16 weights with Adafactor, and watch the norm of the update."""
    model = _mlp().to(device, torch.bfloat16)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    for _ in range(2):
        x, y = _batch(device)
        before = [p.detach().clone() for p in model.parameters()]
        loss = F.cross_entropy(model(x.bfloat16()).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        moved = torch.stack(
            [(p.detach() - old).float().norm() for p, old in zip(model.parameters(), before, strict=True)]
        ).norm()
        moved.item()


def activation_checkpointing(device: torch.device) -> None:
    """Train a stack of blocks whose activations are recomputed in the backward pass."""
    blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 64)) for _ in range(4))
    head = nn.Linear(64, 10)
    model = nn.ModuleList([blocks, head]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        x, y = _batch(device, 256)
        for block in model[0]:
            x = x + checkpoint(block, x, use_reentrant=False)
        loss = F.cross_entropy(model[1](x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    loss.item()


def weight_averaging(device: torch.device) -> None:
    """Average weights over three steps, and update the batch norm of the average."""
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01)
    batches = [_batch(device) for _ in range(3)]
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(model)
        schedule.step()
    torch.optim.swa_utils.update_bn((x for x, _ in batches), average, device=device)
    with torch.no_grad():
        average.eval()(batches[0][0]).argmax(1).cpu()


def gradients_per_sample(device: torch.device) -> None:
    """Clip the gradient of each sample with torch.func, add noise and step, as in private training."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    x, y = _batch(device, 16)

    def loss_of(weights: dict[str, torch.Tensor], sample: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        logits = torch.func.functional_call(model, weights, (sample.unsqueeze(0),))
        return F.cross_entropy(logits, label.unsqueeze(0))

    gradients = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))(parameters, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients.values()]).norm(dim=0)
    share = (1.0 / (norms + 1e-6)).clamp(max=1.0)
    for name, gradient in gradients.items():
        clipped = torch.einsum("b,b...->...", share, gradient) / 16
        parameters[name] = parameters[name] - 0.1 * (clipped + 0.01 * torch.randn_like(clipped))
    model.load_state_dict(parameters)
    norms.mean().item()


def lbfgs_closure(device: torch.device) -> None:
    """Fit a curve with L-BFGS, whose closure is evaluated several times per step."""
    x = torch.linspace(-1, 1, 50).unsqueeze(1).to(device)
    y = torch.sin(3 * x)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, history_size=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure).item()
