"""Images and video: classification, segmentation, detection, augmentation, super-resolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Block(nn.Module):
    def __init__(self, channels: int, wider: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, wider, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wider)
        self.conv2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(wider)
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y += self.skip(x)
        return F.relu(y, inplace=True)


def resnet_training(device: torch.device) -> None:
    """Train a small residual network for three steps with SGD and momentum."""
    stem = nn.Sequential(
        nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
    )
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    model = nn.Sequential(stem, _Block(16, 16), _Block(16, 32, stride=2), head).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    running = 0.0
    for _ in range(3):
        images, labels = torch.randn(8, 3, 64, 64).to(device), torch.randint(10, (8,)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        running += loss.item()


def mobilenet_inference(device: torch.device) -> None:
    """Classify a batch with depthwise separable convolutions in channels_last, and read the top five."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish()]
    for channels, wider, stride in ((16, 24, 2), (24, 40, 2), (40, 80, 1)):
        layers += [
            nn.Conv2d(channels, channels, 3, stride, 1, groups=channels), nn.BatchNorm2d(channels), nn.ReLU6(),
            nn.Conv2d(channels, wider, 1), nn.BatchNorm2d(wider), nn.Hardswish(),
        ]  # fmt: skip
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(80, 100)).eval()
    model = model.to(device, memory_format=torch.channels_last)
    with torch.inference_mode():
        for _ in range(2):
            images = torch.rand(4, 3, 96, 96).to(device).contiguous(memory_format=torch.channels_last)
            probabilities = model(images).softmax(dim=-1)
            scores, classes = probabilities.topk(5)
            list(zip(scores.tolist(), classes.tolist(), strict=True))


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.down2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.SiLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=2, dilation=2), nn.SiLU())
        self.up2 = nn.ConvTranspose2d(32, 32, 2, stride=2)
        self.up1 = nn.ConvTranspose2d(64, 16, 2, stride=2)
        self.out = nn.Conv2d(32, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.down1(x)
        b = self.down2(a)
        c = self.up2(self.middle(b))
        d = self.up1(torch.cat([c, b], dim=1))
        return self.out(torch.cat([d, a], dim=1))


def unet_segmentation(device: torch.device) -> None:
    """Train a U-Net on masks with cross-entropy and Dice loss, and compute the intersection over union."""
    model = _UNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(4, 1, 64, 64, device=device)
    masks = (torch.rand(4, 64, 64) > 0.7).long().to(device)
    for _ in range(2):
        logits = model(images)
        soft = logits.softmax(1)[:, 1]
        dice = 1 - (2 * (soft * masks).sum((1, 2)) + 1) / (soft.sum((1, 2)) + masks.sum((1, 2)) + 1)
        loss = F.cross_entropy(logits, masks) + dice.mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    predicted = model(images).argmax(1)
    intersection = ((predicted == 1) & (masks == 1)).sum()
    union = ((predicted == 1) | (masks == 1)).sum().clamp(min=1)
    float(intersection / union)


class _ViT(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 8, stride=8)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1)) * (c // 4) ** -0.5
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
        return self.head((x + self.mlp(self.norm2(x)))[:, 0])


def vit_mixup(device: torch.device) -> None:
    """Train a vision transformer with mixup, label smoothing and a cosine schedule."""
    model = _ViT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for _ in range(2):
        images, labels = torch.randn(8, 3, 32, 32, device=device), torch.randint(10, (8,), device=device)
        share = 0.3
        order = torch.randperm(8, device=device)
        mixed = share * images + (1 - share) * images[order]
        logits = model(mixed)
        loss = share * F.cross_entropy(logits, labels, label_smoothing=0.1)
        loss = loss + (1 - share) * F.cross_entropy(logits, labels[order], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def detection_boxes(device: torch.device) -> None:
    """Decode anchors, drop boxes with low scores and apply non-maximum suppression, box by box."""
    centers = torch.stack(torch.meshgrid(torch.arange(16), torch.arange(16), indexing="ij"), dim=-1).view(-1, 2) * 8.0
    anchors = torch.cat([centers - 10, centers + 10], dim=1).to(device)
    offsets, scores = torch.randn(256, 4).to(device), torch.rand(256).to(device)
    boxes = (anchors + offsets).clamp_(0, 128)
    keep = scores > 0.6
    boxes, scores = boxes[keep], scores[keep]
    order = scores.argsort(descending=True)
    kept = []
    while order.numel() > 0 and len(kept) < 10:
        best = order[0]
        kept.append(best.item())
        low = torch.maximum(boxes[best, :2], boxes[order[1:], :2])
        high = torch.minimum(boxes[best, 2:], boxes[order[1:], 2:])
        inside = (high - low).clamp(min=0).prod(dim=1)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
        overlap = inside / (areas[best] + areas[order[1:]] - inside)
        order = order[1:][overlap <= 0.5]
    boxes[kept].cpu().numpy()


def batch_augmentation(device: torch.device) -> None:
    """Augment bytes on the device: crop, flip, normalise, change brightness, erase, rotate."""
    images = torch.randint(0, 256, (16, 3, 40, 40), dtype=torch.uint8).to(device, non_blocking=True)
    top, left = (int(x) for x in torch.randint(0, 8, (2,)))
    x = images[:, :, top : top + 32, left : left + 32].float().div_(255)
    flip = torch.rand(16) < 0.5
    x[flip.to(device)] = x[flip.to(device)].flip(-1)
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(1, 3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], device=device).view(1, 3, 1, 1)
    x.sub_(mean).div_(std)
    x *= torch.empty(16, 1, 1, 1, device=device).uniform_(0.8, 1.2)
    x[:, :, 8:16, 8:16] = 0
    angle = torch.linspace(-0.3, 0.3, 16, device=device)
    rows = torch.stack(
        [torch.stack([angle.cos(), -angle.sin(), angle * 0], 1), torch.stack([angle.sin(), angle.cos(), angle * 0], 1)], 1
    )
    grid = F.affine_grid(rows, [16, 3, 32, 32], align_corners=False)
    x = F.grid_sample(x, grid, padding_mode="reflection", align_corners=False)
    x.mean().item()


def video_classification(device: torch.device) -> None:
    """Train a 3D convolutional network on short clips."""
    model = nn.Sequential(
        nn.Conv3d(3, 8, (3, 5, 5), stride=(1, 2, 2), padding=(1, 2, 2)), nn.BatchNorm3d(8), nn.ReLU(),
        nn.MaxPool3d((1, 2, 2)), nn.Conv3d(8, 16, 3, padding=1), nn.BatchNorm3d(16), nn.ReLU(),
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 5),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters())
    clips = torch.randn(2, 3, 8, 48, 48).to(device)
    labels = torch.tensor([1, 3], device=device)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(clips), labels)
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        (model(clips).argmax(1) == labels).float().mean().item()


def super_resolution(device: torch.device) -> None:
    """Train an upscaler with PixelShuffle, and report its peak signal-to-noise ratio and structural similarity."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2), nn.PReLU(), nn.Conv2d(32, 12, 3, padding=1, padding_mode="reflect"), nn.PixelShuffle(2)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sharp = torch.rand(4, 3, 48, 48, device=device)
    coarse = F.interpolate(sharp, scale_factor=0.5, mode="bicubic", align_corners=False, antialias=True)
    for _ in range(2):
        out = model(coarse) + F.interpolate(coarse, scale_factor=2, mode="bilinear")
        loss = F.l1_loss(out, sharp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        psnr = -10 * torch.log10(F.mse_loss(out, sharp))
        mu1, mu2 = F.avg_pool2d(out, 7, 1), F.avg_pool2d(sharp, 7, 1)
        cross = F.avg_pool2d(out * sharp, 7, 1) - mu1 * mu2
        var1, var2 = F.avg_pool2d(out**2, 7, 1) - mu1**2, F.avg_pool2d(sharp**2, 7, 1) - mu2**2
        ssim = ((2 * mu1 * mu2 + 1e-4) * (2 * cross + 9e-4) / ((mu1**2 + mu2**2 + 1e-4) * (var1 + var2 + 9e-4))).mean()
    print(f"{psnr.item():.2f} {ssim.item():.3f}", end="\r")
