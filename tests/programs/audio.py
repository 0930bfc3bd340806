"""Audio: features, recognition, generation, vocoders."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def log_mel_features(device: torch.device) -> None:
    """Compute normalised log-mel features of a batch of two seconds of audio."""
    audio = torch.randn(4, 32000).to(device)
    window = torch.hann_window(400, device=device)
    spectrum = torch.stft(audio, n_fft=512, hop_length=160, win_length=400, window=window, return_complex=True)
    power = spectrum.abs().pow(2)
    mels = torch.linspace(0, 2840, 82)
    points = (700 * (10 ** (mels / 2595) - 1)).unsqueeze(1)
    frequencies = torch.linspace(0, 8000, 257).unsqueeze(0)
    up = (frequencies - points[:-2]) / (points[1:-1] - points[:-2])
    down = (points[2:] - frequencies) / (points[2:] - points[1:-1])
    bank = torch.minimum(up, down).clamp(min=0).to(device)
    features = torch.matmul(bank, power).clamp(min=1e-10).log10()
    features = torch.maximum(features, features.amax(dim=(1, 2), keepdim=True) - 8.0)
    features = (features - features.mean(-1, keepdim=True)) / (features.std(-1, keepdim=True) + 1e-5)
    features.cpu()


def ctc_training(device: torch.device) -> None:
    """Train a convolutional speech recogniser with CTC, and decode greedily."""
    model = nn.Sequential(
        nn.Conv1d(40, 64, 5, stride=2, padding=2), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 64, 5, padding=2), nn.ReLU(),
        nn.Conv1d(64, 29, 1),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    features = torch.randn(4, 40, 100).to(device)
    targets = torch.randint(1, 29, (4, 12)).to(device)
    input_lengths = torch.full((4,), 50, dtype=torch.long)
    target_lengths = torch.tensor([12, 10, 8, 12])
    for _ in range(2):
        log_probs = model(features).permute(2, 0, 1).log_softmax(dim=-1)
        loss = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    best = log_probs.argmax(-1).t().tolist()
    [[t for i, t in enumerate(row) if t and (i == 0 or row[i - 1] != t)] for row in best]


def wavenet_generation(device: torch.device) -> None:
    """Generate samples one by one with dilated causal convolutions with gates."""
    embed = nn.Conv1d(1, 16, 1).to(device)
    layers = nn.ModuleList(nn.Conv1d(16, 32, 2, dilation=2**i) for i in range(5)).to(device)
    out = nn.Conv1d(16, 64, 1).to(device)
    audio = torch.zeros(2, 1, 64, device=device)
    with torch.no_grad():
        for _ in range(8):
            x = embed(audio)
            skips = torch.zeros_like(x)
            for i, layer in enumerate(layers):
                y = layer(F.pad(x, (2**i, 0)))
                a, b = y.chunk(2, dim=1)
                y = torch.tanh(a) * torch.sigmoid(b)
                skips += y
                x = x + y
            logits = out(F.relu(skips))[:, :, -1]
            sample = torch.multinomial(logits.softmax(-1), 1).float() / 32 - 1
            audio = torch.roll(audio, -1, dims=-1)
            audio[:, 0, -1:] = sample
    audio.squeeze(1).cpu().numpy()


def griffin_lim(device: torch.device) -> None:
    """Reconstruct audio from magnitudes with eight iterations of Griffin-Lim."""
    window = torch.hann_window(256, device=device)
    audio = torch.sin(torch.arange(8000, device=device) * 0.05).unsqueeze(0)
    magnitude = torch.stft(audio, 256, 64, window=window, return_complex=True).abs()
    angles = torch.exp(2j * torch.pi * torch.rand_like(magnitude))
    previous = torch.zeros_like(angles)
    for _ in range(8):
        wave = torch.istft(magnitude * angles, 256, 64, window=window, length=8000)
        rebuilt = torch.stft(wave, 256, 64, window=window, return_complex=True)
        angles = rebuilt - 0.99 / 1.99 * previous
        angles = angles / (angles.abs() + 1e-16)
        previous = rebuilt
    torch.view_as_real(previous).norm().item()


def keyword_spotting(device: torch.device) -> None:
    """Train a separable convolutional network in fp16 on spectrograms with time and frequency masks."""
    model = nn.Sequential(
        nn.Conv1d(40, 40, 9, padding=4, groups=40), nn.Conv1d(40, 64, 1), nn.BatchNorm1d(64), nn.ReLU(),
        nn.AvgPool1d(4), nn.AdaptiveMaxPool1d(1), nn.Flatten(), nn.Linear(64, 12),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(device.type)
    for step in range(2):
        spectrogram = torch.randn(16, 40, 96, device=device)
        spectrogram[:, 5 * step : 5 * step + 8, :] = 0
        spectrogram[:, :, 20:30] = 0
        labels = torch.arange(16, device=device) % 12
        with torch.autocast(device.type, dtype=torch.float16):
            loss = F.cross_entropy(model(spectrogram), labels)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def vocoder_training(device: torch.device) -> None:
    """Train transposed 1D convolutions with weight norm on a spectral loss of two resolutions."""
    norm = torch.nn.utils.parametrizations.weight_norm
    model = nn.Sequential(
        norm(nn.Conv1d(20, 32, 7, padding=3)), nn.LeakyReLU(0.1), norm(nn.ConvTranspose1d(32, 16, 8, 4, padding=2)),
        nn.LeakyReLU(0.1), norm(nn.ConvTranspose1d(16, 8, 8, 4, padding=2)), nn.Conv1d(8, 1, 7, padding=3), nn.Tanh(),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.8, 0.99))
    mel, audio = torch.randn(2, 20, 64, device=device), torch.randn(2, 1024, device=device)
    made = model(mel).squeeze(1)
    loss = F.l1_loss(made, audio)
    for size in (128, 256):
        window = torch.hann_window(size, device=device)
        a = torch.stft(made, size, size // 4, window=window, return_complex=True).abs().clamp(min=1e-5)
        b = torch.stft(audio, size, size // 4, window=window, return_complex=True).abs().clamp(min=1e-5)
        loss = loss + (a - b).norm() / b.norm() + F.l1_loss(a.log(), b.log())
    loss.backward()
    optimizer.step()
    loss.item()
