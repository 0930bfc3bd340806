"""Quantised weights and training: int8, fp8, fake quantisation, packed int4."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


@torch.inference_mode()
def int8_weights(device: torch.device) -> None:
    """Quantise linear layers to int8 per channel, and dequantise them when they are used."""
    layers = [nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False)]
    stored = []
    for layer in layers:
        weight = layer.weight.to(device)
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        stored.append(((weight / scale).round().clamp(-128, 127).to(torch.int8), scale.to(torch.bfloat16)))
    x = torch.randn(4, 256, device=device, dtype=torch.bfloat16)
    for weight, scale in stored:
        x = F.silu(F.linear(x, weight.to(torch.bfloat16) * scale))
    x.float().cpu()


@torch.inference_mode()
def int8_products(device: torch.device) -> None:
    """Quantise activations per row at run time, and multiply in int8 with int32 sums."""
    weight = torch.randn(128, 256).to(device)
    weight_scale = weight.abs().amax(1) / 127
    weight_int8 = (weight / weight_scale[:, None]).round().to(torch.int8)
    for _ in range(2):
        x = torch.randn(32, 256).to(device)
        scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
        x_int8 = (x / scale).round().clamp(-127, 127).to(torch.int8)
        y = torch._int_mm(x_int8, weight_int8.t()).float() * scale * weight_scale
        ((y - x @ weight.t()).norm() / y.norm()).item()


class _Float8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        scale_x, scale_w = x.abs().max().float() / 448, weight.abs().max().float() / 448
        x8, w8 = (x / scale_x).to(torch.float8_e4m3fn), (weight / scale_w).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x, weight)
        return torch._scaled_mm(x8, w8.t(), scale_a=scale_x, scale_b=scale_w, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


def fp8_training(device: torch.device) -> None:
    """Train a layer whose forward product is in fp8 and whose gradients are in bf16."""
    weight = nn.Parameter(torch.randn(128, 64, device=device, dtype=torch.bfloat16) * 0.1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    x = torch.randn(32, 64, device=device, dtype=torch.bfloat16)
    for _ in range(2):
        loss = _Float8Linear.apply(x, weight).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()


def fake_quantisation(device: torch.device) -> None:
    """Train with simulated int8 weights per channel and activations per tensor, with ranges that are observed."""
    conv, head = nn.Conv2d(3, 16, 3, padding=1).to(device), nn.Linear(16, 10).to(device)
    optimizer = torch.optim.SGD([*conv.parameters(), *head.parameters()], lr=0.01)
    low, high = torch.zeros((), device=device), torch.zeros((), device=device)
    points = torch.zeros(16, dtype=torch.int32, device=device)
    for _ in range(2):
        x = torch.randn(4, 3, 16, 16).to(device)
        scale_w = conv.weight.detach().abs().amax(dim=(1, 2, 3)) / 127
        weight = torch.fake_quantize_per_channel_affine(conv.weight, scale_w, points, 0, -128, 127)
        y = F.relu(F.conv2d(x, weight, conv.bias, padding=1))
        low, high = torch.minimum(low, y.detach().amin()), torch.maximum(high, y.detach().amax())
        scale = ((high - low) / 255).item()
        y = torch.fake_quantize_per_tensor_affine(y, scale, 0, 0, 255)
        loss = F.cross_entropy(head(y.mean((2, 3))), torch.arange(4, device=device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.inference_mode()
def packed_int4(device: torch.device) -> None:
    """Pack weights as two int4 values per byte in groups of 32, unpack them, and measure the error."""
    weight = torch.randn(128, 256).to(device)
    groups = weight.view(128, 8, 32)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((groups - low) / scale).round_().clamp_(0, 15).to(torch.uint8).view(128, 256)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    unpacked = torch.stack([packed & 15, packed >> 4], dim=-1).view(128, 8, 32)
    restored = (unpacked * scale + low).view(128, 256).half()
    x = torch.randn(1, 256, device=device, dtype=torch.float16)
    F.linear(x, restored).cpu()
    (restored.float() - weight).abs().mean().item()
