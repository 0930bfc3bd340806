"""Graph neural networks: sparse matrices, scatter operations, sampling, pooling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def _edges(nodes: int, edges: int) -> torch.Tensor:
    return torch.randint(0, nodes, (2, edges))


def gcn_training(device: torch.device) -> None:
    """Train a two-layer graph convolution with a sparse normalised adjacency, on the nodes of a mask."""
    n = 200
    edges = torch.cat([_edges(n, 800), torch.arange(n).repeat(2, 1)], dim=1)
    degree = torch.bincount(edges[0], minlength=n).float().rsqrt()
    adjacency = torch.sparse_coo_tensor(edges, degree[edges[0]] * degree[edges[1]], (n, n)).coalesce().to(device)
    features, labels = torch.randn(n, 32).to(device), torch.randint(0, 4, (n,)).to(device)
    train = (torch.rand(n) < 0.5).to(device)
    lin1, lin2 = nn.Linear(32, 16).to(device), nn.Linear(16, 4).to(device)
    optimizer = torch.optim.Adam([*lin1.parameters(), *lin2.parameters()], lr=0.01, weight_decay=5e-4)
    for _ in range(2):
        hidden = F.dropout(F.relu(torch.sparse.mm(adjacency, lin1(features))), 0.5)
        logits = torch.sparse.mm(adjacency, lin2(hidden))
        loss = F.cross_entropy(logits[train], labels[train])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    correct = (logits.argmax(1)[~train] == labels[~train]).sum().item()
    correct / int((~train).sum())


def gat_training(device: torch.device) -> None:
    """Train a graph attention layer with a softmax over the edges of each node."""
    n, heads, dim = 100, 4, 8
    source, target = _edges(n, 500).to(device)
    x = torch.randn(n, 16, device=device)
    project = nn.Linear(16, heads * dim, bias=False).to(device)
    a_source, a_target = (nn.Parameter(torch.randn(heads, dim, device=device) * 0.1) for _ in range(2))
    optimizer = torch.optim.Adam([*project.parameters(), a_source, a_target], lr=5e-3)
    h = project(x).view(n, heads, dim)
    scores = F.leaky_relu((h * a_source).sum(-1)[source] + (h * a_target).sum(-1)[target], 0.2)
    index = target.unsqueeze(1).expand(-1, heads)
    most = torch.full((n, heads), float("-inf"), device=device).scatter_reduce(0, index, scores.detach(), "amax")
    weights = (scores - most[target]).exp()
    total = torch.zeros(n, heads, device=device).index_add(0, target, weights)
    alpha = weights / (total[target] + 1e-16)
    out = torch.zeros(n, heads, dim, device=device).index_add(0, target, alpha.unsqueeze(-1) * h[source])
    loss = F.elu(out.flatten(1)).pow(2).mean()
    loss.backward()
    optimizer.step()
    loss.item()


def neighbor_sampling(device: torch.device) -> None:
    """Sample neighbours on the host for two mini-batches, and train GraphSAGE on the unique nodes."""
    n = 500
    neighbors = torch.randint(0, n, (n, 10))
    features, labels = torch.randn(n, 24), torch.randint(0, 3, (n,))
    lin_self, lin_near = nn.Linear(24, 3).to(device), nn.Linear(24, 3, bias=False).to(device)
    optimizer = torch.optim.SGD([*lin_self.parameters(), *lin_near.parameters()], lr=0.1)
    for seeds in torch.randperm(n)[:64].split(32):
        sampled = neighbors[seeds][:, torch.randperm(10)[:4]]
        nodes, inverse = torch.unique(torch.cat([seeds, sampled.flatten()]), return_inverse=True)
        x = features[nodes].to(device)
        inverse = inverse.to(device)
        center, near = inverse[:32], inverse[32:].view(32, 4)
        logits = lin_self(x[center]) + lin_near(x[near].mean(dim=1))
        loss = F.nll_loss(F.log_softmax(logits, dim=1), labels[seeds].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def graph_pooling(device: torch.device) -> None:
    """Classify a batch of small graphs by sums, means and maxima over their nodes."""
    sizes = torch.tensor([5, 9, 7, 12, 4, 11])
    batch = torch.repeat_interleave(torch.arange(6), sizes).to(device)
    x = torch.randn(int(sizes.sum()), 16, device=device, requires_grad=True)
    index = batch.unsqueeze(1).expand(-1, 16)
    total = torch.zeros(6, 16, device=device).scatter_add(0, index, x)
    mean = torch.zeros(6, 16, device=device).scatter_reduce(0, index, x, "mean", include_self=False)
    most = torch.zeros(6, 16, device=device).scatter_reduce(0, index, x, "amax", include_self=False)
    classifier = nn.Linear(48, 2).to(device)
    loss = F.cross_entropy(classifier(torch.cat([total, mean, most], dim=1)), torch.arange(6, device=device) % 2)
    loss.backward()
    per_graph = torch.bincount(batch)
    padded = torch.zeros(6, int(per_graph.max()), 16, device=device)
    offsets = torch.arange(len(batch), device=device) - (per_graph.cumsum(0) - per_graph)[batch]
    padded[batch, offsets] = x.detach()
    padded.sum().item()


def link_prediction(device: torch.device) -> None:
    """Train node embeddings on edges and sampled non-edges, and compute the area under the ROC curve."""
    n = 300
    positive = torch.unique(_edges(n, 600).to(device), dim=1)
    embedding = nn.Embedding(n, 16, device=device)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=0.1)
    for _ in range(2):
        negative = _edges(n, positive.shape[1]).to(device)
        pairs = torch.cat([positive, negative], dim=1)
        scores = (embedding(pairs[0]) * embedding(pairs[1])).sum(-1)
        truth = torch.cat([torch.ones(positive.shape[1]), torch.zeros(positive.shape[1])]).to(device)
        loss = F.binary_cross_entropy_with_logits(scores, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ranked = truth[scores.argsort()]
    below = (1 - ranked).cumsum(0)
    auc = (below * ranked).sum() / (ranked.sum() * (1 - ranked).sum())
    auc.item()


def pagerank(device: torch.device) -> None:
    """Iterate PageRank with a sparse CSR matrix in fp64 until it converges or twenty iterations are over."""
    n = 400
    edges = _edges(n, 3000)
    out_degree = torch.bincount(edges[0], minlength=n).clamp(min=1).double()
    matrix = torch.sparse_coo_tensor(edges.flip(0), 1 / out_degree[edges[0]], (n, n)).coalesce().to_sparse_csr().to(device)
    rank = torch.full((n, 1), 1 / n, dtype=torch.float64, device=device)
    for _ in range(20):
        following = 0.85 * (matrix @ rank) + 0.15 / n
        change = (following - rank).abs().sum()
        rank = following
        if change.item() < 1e-12:
            break
    values, nodes = rank.squeeze(1).topk(5)
    dict(zip(nodes.tolist(), values.tolist(), strict=True))
