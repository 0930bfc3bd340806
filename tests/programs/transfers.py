"""Transfers between host and device: data loaders, prefetching, offloading, checkpoints, metrics."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset


def pinned_loader(device: torch.device) -> None:
    """Train on a data loader that pins its batches, with copies that don't block."""
    data = TensorDataset(torch.randn(40, 20), torch.randint(0, 4, (40,)))
    loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=device.type != "cpu")
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    torch.stack(losses).mean().item()


class _Pairs(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor | int]:
        return {"image": torch.full((3, 8, 8), index / 24), "label": index % 3}


@torch.no_grad()
def pageable_loader(device: torch.device) -> None:
    """Evaluate on a data loader of dictionaries in pageable memory, and gather the predictions on the host."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).to(device).eval()
    correct, predictions = 0, []
    for batch in DataLoader(_Pairs(), batch_size=10):
        batch = {name: value.to(device) for name, value in batch.items()}
        predicted = model(batch["image"]).argmax(dim=1)
        correct += (predicted == batch["label"]).sum().item()
        predictions.append(predicted.cpu())
    torch.cat(predictions).numpy()


def prefetch_stream(device: torch.device) -> None:
    """Copy the next batch on a side stream while the current one is computed, and time the loop with events."""
    batches = [torch.randn(64, 128) for _ in range(4)]
    if device.type == "cpu":
        return
    backend = torch.get_device_module(device)
    side, events = backend.Stream(), [backend.Event(enable_timing=True) for _ in range(2)]
    weight = torch.randn(128, 128, device=device)
    batches = [batch.pin_memory() for batch in batches]

    def upload(batch: torch.Tensor) -> torch.Tensor:
        with backend.stream(side):
            return batch.to(device, non_blocking=True)

    events[0].record()
    following, results = upload(batches[0]), []
    for i in range(4):
        backend.current_stream().wait_stream(side)
        current = following
        current.record_stream(backend.current_stream())
        if i + 1 < 4:
            following = upload(batches[i + 1])
        results.append((current @ weight).relu_().sum())
    events[1].record()
    backend.synchronize()
    events[0].elapsed_time(events[1])
    torch.stack(results).tolist()


@torch.no_grad()
def layer_offloading(device: torch.device) -> None:
    """Run a stack of layers whose weights stay in host memory, and move one layer at a time."""
    layers = [nn.Linear(128, 128) for _ in range(4)]
    x = torch.randn(8, 128).to(device)
    for layer in layers:
        layer.to(device)
        x = F.gelu(layer(x))
        layer.to("cpu")
    hidden = torch.empty(8, 128, pin_memory=device.type != "cpu")
    hidden.copy_(x, non_blocking=True)
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()
    float(hidden.abs().sum())


def save_and_resume(device: torch.device) -> None:
    """Train, save the model and its optimizer, and continue from the checkpoint in a new model."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 32, device=device)).square().mean().backward()
        optimizer.step()

    model = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    resumed = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)).to(device)
    resumed.load_state_dict(loaded["model"])
    optimizer = torch.optim.AdamW(resumed.parameters())
    optimizer.load_state_dict(loaded["optimizer"])
    step(resumed, optimizer)


def metrics(device: torch.device) -> None:
    """Compute metrics of a classifier that read sizes and values back: confusion, precision, calibration, errors."""
    logits, labels = torch.randn(200, 5).to(device), torch.randint(0, 5, (200,)).to(device)
    predicted = logits.argmax(1)
    confusion = torch.bincount(labels * 5 + predicted, minlength=25).view(5, 5)
    precision = confusion.diag() / confusion.sum(0).clamp(min=1)
    for name, value in enumerate(precision):
        print(name, f"{value:.2f}", end="\r")
    wrong = torch.nonzero(predicted != labels).squeeze(1)
    wrong[:5].tolist()
    confidence = logits.softmax(-1).amax(-1)
    bins = torch.bucketize(confidence, torch.linspace(0, 1, 11, device=device)[1:-1])
    for b in torch.unique(bins):
        chosen = bins == b
        abs(confidence[chosen].mean().item() - (predicted == labels)[chosen].float().mean().item())
    torch.masked_select(confidence, predicted == labels).median().item()
    classes, counts = torch.unique(predicted, return_counts=True)
    dict(zip(classes.cpu().numpy(), counts.cpu().numpy(), strict=True))
