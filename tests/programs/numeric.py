"""Recommendation, statistics and simulation: sparse embeddings, clustering, linear algebra, differential equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def embedding_bags(device: torch.device) -> None:
    """Train a recommender with bags of categories, sparse gradients and interactions of features."""
    bags = nn.ModuleList(nn.EmbeddingBag(n, 16, mode="sum", sparse=True) for n in (1000, 200)).to(device)
    bottom, top = nn.Linear(8, 16).to(device), nn.Linear(3, 1).to(device)
    sparse = torch.optim.SparseAdam(list(bags.parameters()), lr=1e-2)
    dense = torch.optim.Adam([*bottom.parameters(), *top.parameters()], lr=1e-3)
    offsets = torch.tensor([0, 3, 4, 9]).to(device)
    for _ in range(2):
        features = torch.randn(4, 8).to(device)
        bagged = [bag(torch.randint(0, bag.num_embeddings, (12,)).to(device), offsets) for bag in bags]
        stacked = torch.stack([bottom(features), *bagged], dim=1)
        products = stacked @ stacked.transpose(1, 2)
        low = torch.tril_indices(3, 3, offset=-1, device=device)
        loss = F.binary_cross_entropy_with_logits(top(products[:, low[0], low[1]]).squeeze(1), torch.ones(4, device=device))
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()


def kmeans(device: torch.device) -> None:
    """Cluster points until the centres stop moving, for at most eight iterations."""
    points = torch.randn(500, 8).to(device)
    centers = points[torch.randperm(500)[:6]].clone()
    for _ in range(8):
        nearest = torch.cdist(points, centers).argmin(dim=1)
        sums = torch.zeros_like(centers).index_add_(0, nearest, points)
        counts = torch.bincount(nearest, minlength=6).clamp_(min=1).unsqueeze(1)
        moved = sums / counts
        shift = (moved - centers).norm()
        centers = moved
        if shift.item() < 1e-9:
            break
    counts.squeeze(1).tolist()


def principal_components(device: torch.device) -> None:
    """Find principal components with a singular value decomposition, and with a randomised one."""
    x = torch.randn(200, 30).to(device)
    x -= x.mean(dim=0)
    _, s, vh = torch.linalg.svd(x, full_matrices=False)
    explained = s.square() / s.square().sum()
    components = int((explained.cumsum(0) < 0.8).sum()) + 1
    projected = x @ vh[:components].t()
    basis, _ = torch.linalg.qr(x @ torch.randn(30, 10, device=device))
    approximate = basis @ (basis.t() @ x)
    torch.linalg.eigvalsh(x.t() @ x / 199).flip(0)[:3].tolist()
    (x - approximate).norm().item(), projected.std(dim=0).cpu()


def gaussian_process(device: torch.device) -> None:
    """Fit the length scale of a Gaussian process by its likelihood, and predict."""
    x = torch.linspace(0, 1, 60, device=device).unsqueeze(1)
    y = torch.sin(6 * x).squeeze(1) + 0.1 * torch.randn(60, device=device)
    log_scale = torch.tensor(-1.0, device=device, requires_grad=True)
    log_noise = torch.tensor(-2.0, device=device, requires_grad=True)
    optimizer = torch.optim.Adam([log_scale, log_noise], lr=0.1)

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.exp(-0.5 * (a - b.t()).square() / (2 * log_scale).exp())

    for _ in range(3):
        factor = torch.linalg.cholesky(kernel(x, x) + log_noise.exp() * torch.eye(60, device=device))
        alpha = torch.cholesky_solve(y.unsqueeze(1), factor).squeeze(1)
        loss = 0.5 * y @ alpha + factor.diagonal().log().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        new = torch.rand(10, 1, device=device)
        mean = kernel(new, x) @ alpha
        v = torch.linalg.solve_triangular(factor, kernel(x, new), upper=False)
        torch.stack([mean, 1 - v.square().sum(0)]).cpu()


def physics_informed(device: torch.device) -> None:
    """Train a network on the residual of the Burgers equation, with second derivatives."""
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        x = (torch.rand(128, 1, device=device) * 2 - 1).requires_grad_()
        t = torch.rand(128, 1, device=device, requires_grad=True)
        u = model(torch.cat([x, t], dim=1))
        u_t, u_x = torch.autograd.grad(u, (t, x), torch.ones_like(u), create_graph=True)
        (u_xx,) = torch.autograd.grad(u_x, x, torch.ones_like(u_x), create_graph=True)
        residual = u_t + u * u_x - 0.01 / torch.pi * u_xx
        loss = residual.square().mean() + u[:10].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def heat_equation(device: torch.device) -> None:
    """Solve the heat equation on a grid with in-place updates of slices, and watch its maximum."""
    field = torch.zeros(128, 128, dtype=torch.float64, device=device)
    field[40:80, 50:70] = 1.0
    source = torch.zeros_like(field)
    source[64, 64] = 0.1
    for step in range(40):
        inner = field[1:-1, 1:-1]
        laplacian = field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:] - 4 * inner
        inner += 0.2 * laplacian
        field += source
        field[0], field[-1] = field[1], field[-2]
        field[:, 0] = field[:, 1]
        field[:, -1].copy_(field[:, -2])
        if step % 10 == 9:
            field.max().item()
    torch.roll(field, 64, 0).float().cpu().numpy()


def option_pricing(device: torch.device) -> None:
    """Price an American option by simulation, with a regression on the paths that are in the money at each date."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2000, 12, generator=generator).to(device)
    paths = 100 * torch.exp((0.2 * noise / 12**0.5 - 0.02 / 12).cumsum(dim=1))
    payoff = (100 - paths).clamp(min=0)
    value = payoff[:, -1].clone()
    for date in reversed(range(11)):
        value *= 0.999
        inside = payoff[:, date] > 0
        x = paths[inside, date] / 100
        basis = torch.stack([torch.ones_like(x), x, x * x], dim=1)
        weights = torch.linalg.solve(basis.t() @ basis, basis.t() @ value[inside])
        continuation = basis @ weights
        exercise = payoff[inside, date] > continuation
        value[inside] = torch.where(exercise, payoff[inside, date], value[inside])
    value.mean().item()
    torch.quantile(value, torch.tensor([0.05, 0.95], device=device)).tolist()
    torch.histc(value, bins=20).cpu()
