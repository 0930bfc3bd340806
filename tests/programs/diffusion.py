"""Generative models of images: diffusion, flows, autoencoders, adversarial networks."""

from __future__ import annotations

import copy
import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn


class _Denoiser(nn.Module):
    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, channels))
        self.enter = nn.Conv2d(3, channels, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(8, channels), nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.leave = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        frequencies = torch.exp(-math.log(10000) * torch.arange(16, device=x.device) / 16)
        angles = t[:, None].float() * frequencies[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        h = self.enter(x)
        r = self.conv1(F.silu(self.norm1(h))) + time[:, :, None, None]
        return self.leave(h + self.conv2(F.silu(self.norm2(r))))


def ddpm_training(device: torch.device) -> None:
    """Train a denoiser on noised images for two steps, with an exponential moving average of its weights."""
    model = _Denoiser().to(device)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, device=device), dim=0)
    for _ in range(2):
        x0 = torch.rand(8, 3, 32, 32, device=device) * 2 - 1
        t = torch.randint(0, 1000, (8,), device=device)
        noise = torch.randn_like(x0)
        a = alphas[t].view(-1, 1, 1, 1)
        loss = F.mse_loss(model(a.sqrt() * x0 + (1 - a).sqrt() * noise, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.001)


@torch.no_grad()
def ddim_sampling(device: torch.device) -> None:
    """Sample images in ten DDIM steps, clip them and return them as bytes on the host."""
    model = _Denoiser().to(device).eval()
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), dim=0).to(device)
    times = torch.linspace(999, 0, 11).long().tolist()
    x = torch.randn(4, 3, 32, 32, device=device)
    for now, after in itertools.pairwise(times):
        noise = model(x, torch.full((4,), now, device=device))
        a, b = alphas[now], alphas[after]
        clean = ((x - (1 - a).sqrt() * noise) / a.sqrt()).clamp(-1, 1)
        x = b.sqrt() * clean + (1 - b).sqrt() * noise
    ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()


def variational_autoencoder(device: torch.device) -> None:
    """Train a convolutional variational autoencoder, then decode a grid of latents."""
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.ELU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ELU(), nn.Flatten(), nn.Linear(1568, 32)
    )
    decoder = nn.Sequential(
        nn.Linear(16, 1568), nn.Unflatten(1, (32, 7, 7)), nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.ELU(),
        nn.ConvTranspose2d(16, 1, 4, 2, 1),
    )  # fmt: skip
    model = nn.ModuleList([encoder, decoder]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    images = torch.rand(16, 1, 28, 28).to(device)
    for _ in range(2):
        mean, log_variance = model[0](images).chunk(2, dim=1)
        latent = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        rebuilt = F.binary_cross_entropy_with_logits(model[1](latent), images, reduction="sum") / 16
        divergence = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(1).mean()
        optimizer.zero_grad()
        (rebuilt + divergence).backward()
        optimizer.step()
        rebuilt.item(), divergence.item()
    with torch.no_grad():
        model[1](torch.randn(9, 16, device=device)).sigmoid_().cpu()


def guided_latents(device: torch.device) -> None:
    """Denoise latents in fp16 with cross-attention to a prompt and classifier-free guidance."""
    dim = 64
    text = nn.Embedding(500, dim).to(device, torch.float16)
    enter, leave = nn.Conv2d(4, dim, 1).to(device, torch.float16), nn.Conv2d(dim, 4, 1).to(device, torch.float16)
    q, kv = nn.Linear(dim, dim).to(device, torch.float16), nn.Linear(dim, 2 * dim).to(device, torch.float16)
    prompt = torch.arange(12).view(1, 12).to(device)
    with torch.inference_mode():
        condition = torch.cat([text(torch.zeros_like(prompt)), text(prompt)])
        latents = torch.randn(1, 4, 16, 16, device=device, dtype=torch.float16)
        for sigma in torch.linspace(1, 0.1, 5).tolist():
            x = enter(torch.cat([latents] * 2) / (1 + sigma**2) ** 0.5)
            tokens = x.flatten(2).transpose(1, 2)
            keys, values = kv(condition).chunk(2, dim=-1)
            heads = [y.unflatten(-1, (4, -1)).transpose(1, 2) for y in (q(tokens), keys, values)]
            attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
            noise = leave(x + attended.transpose(1, 2).unflatten(2, (16, 16)))
            without, given = noise.chunk(2)
            latents = latents - 0.1 * sigma * (without + 7.5 * (given - without))
    latents.float().cpu()


def dcgan_training(device: torch.device) -> None:
    """Train a generator and a discriminator in turn, each with its own Adam."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    ).to(device)  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(0.2, True), nn.Conv2d(16, 32, 4, 2, 1), nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, True), nn.Conv2d(32, 1, 4, 1, 0), nn.Flatten(0),
    ).to(device)  # fmt: skip
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    for _ in range(2):
        real = torch.rand(8, 1, 16, 16).to(device)
        ones, zeros = torch.ones(8, device=device), torch.zeros(8, device=device)
        fake = generator(torch.randn(8, 16, 1, 1, device=device))
        discriminator.zero_grad()
        loss_d = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()
        generator.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()
        print(f"{loss_d.item():.3f} {loss_g.item():.3f}", end="\r")
