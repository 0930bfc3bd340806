"""Fourier transforms: filters, neural operators, long convolutions, mixing, registration."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def lowpass_filter(device: torch.device) -> None:
    """Remove high frequencies of a batch of signals."""
    time = torch.linspace(0, 1, 2000, device=device)
    signal = torch.sin(2 * torch.pi * 5 * time) + 0.5 * torch.randn(8, 2000, device=device)
    spectrum = torch.fft.rfft(signal)
    frequencies = torch.fft.rfftfreq(2000, d=1 / 2000, device=device)
    spectrum[:, frequencies > 20] = 0
    clean = torch.fft.irfft(spectrum, n=2000)
    peak = spectrum.abs()[:, 1:].argmax(dim=1) + 1
    peak.tolist()
    ((clean - signal) ** 2).mean().item()


class _Spectral(nn.Module):
    def __init__(self, channels: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(torch.randn(channels, channels, modes, modes, dtype=torch.cfloat) / channels)
        self.local = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], self.weight)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.local(x))


def fourier_neural_operator(device: torch.device) -> None:
    """Train a Fourier neural operator in two dimensions for two steps."""
    model = nn.Sequential(nn.Conv2d(1, 12, 1), _Spectral(12, 6), _Spectral(12, 6), nn.Conv2d(12, 1, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(4, 1, 32, 32).to(device), torch.randn(4, 1, 32, 32).to(device)
    for _ in range(2):
        optimizer.zero_grad()
        out = model(x)
        loss = ((out - y).flatten(1).norm(dim=1) / y.flatten(1).norm(dim=1)).mean()
        loss.backward()
        optimizer.step()
        loss.item()


def long_convolution(device: torch.device) -> None:
    """Train a long convolution that is computed with FFTs of twice the length, as in state-space models."""
    length, dim = 256, 32
    kernel = nn.Parameter(torch.randn(dim, length, device=device) * 0.02)
    skip = nn.Parameter(torch.ones(dim, device=device))
    mix = nn.Linear(dim, 2 * dim).to(device)
    optimizer = torch.optim.AdamW([kernel, skip, *mix.parameters()], lr=1e-3)
    u = torch.randn(4, length, dim, device=device)
    decay = torch.exp(-torch.arange(length, device=device) / 50)
    for _ in range(2):
        x = u.transpose(1, 2)
        kf = torch.fft.rfft(kernel * decay, n=2 * length)
        xf = torch.fft.rfft(x, n=2 * length)
        y = torch.fft.irfft(xf * kf, n=2 * length)[..., :length] + x * skip.unsqueeze(-1)
        y = F.glu(mix(F.gelu(y).transpose(1, 2)), dim=-1)
        loss = F.mse_loss(y[:, :-1], u[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def fnet_mixing(device: torch.device) -> None:
    """Train a block that mixes tokens with a 2D Fourier transform instead of attention."""
    embedding = nn.Embedding(100, 64).to(device)
    norm1, norm2 = nn.LayerNorm(64).to(device), nn.LayerNorm(64).to(device)
    mlp = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.Dropout(0.1)).to(device)
    head = nn.Linear(64, 100).to(device)
    parameters = [p for m in (embedding, norm1, norm2, mlp, head) for p in m.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    ids = torch.randint(0, 100, (4, 48)).to(device)
    x = embedding(ids)
    x = norm1(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
    x = norm2(x + mlp(x))
    loss = F.cross_entropy(head(x).view(-1, 100), ids.view(-1))
    loss.backward()
    optimizer.step()
    loss.item()


def phase_correlation(device: torch.device) -> None:
    """Find by how much images are shifted, and average the aligned images."""
    image = torch.rand(64, 64).to(device)
    shifts = [(3, 5), (-7, 2), (10, -12)]
    moved = torch.stack([torch.roll(image, s, (0, 1)) for s in shifts]) + 0.05 * torch.randn(3, 64, 64, device=device)
    product = torch.fft.fft2(moved) * torch.fft.fft2(image).conj()
    correlation = torch.fft.ifft2(product / product.abs().clamp(min=1e-8)).real
    centered = torch.fft.fftshift(correlation, dim=(-2, -1))
    best = centered.flatten(1).argmax(dim=1)
    found = torch.stack([best // 64 - 32, best % 64 - 32], dim=1).cpu()
    aligned = [torch.roll(m, (-int(y), -int(x)), (0, 1)) for m, (y, x) in zip(moved, found, strict=True)]
    torch.stack(aligned).mean(0).sub_(image).abs_().max().item()
