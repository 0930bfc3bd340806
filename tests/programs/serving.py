"""Serving loops: caches, batches, pages, speculation, beams, sampling, Hugging Face generation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class _Decoder(nn.Module):
    """One attention layer with a cache that is allocated in advance."""

    def __init__(self, vocabulary: int = 128, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def cache(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.out.weight
        shape = (rows, self.heads, length, weight.shape[0] // self.heads)
        return tuple(torch.zeros(shape, device=weight.device, dtype=weight.dtype) for _ in range(2))

    def forward(self, ids: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], start: int) -> torch.Tensor:
        x = self.embedding(ids)
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=-1))
        end = start + ids.shape[1]
        cache[0][:, :, start:end], cache[1][:, :, start:end] = k, v
        y = F.scaled_dot_product_attention(q, cache[0][:, :, :end], cache[1][:, :, :end], is_causal=start == 0 and end > 1)
        return (x + self.out(y.transpose(1, 2).flatten(2))) @ self.embedding.weight.t()


@torch.inference_mode()
def greedy_with_cache(device: torch.device) -> None:
    """Decode twelve tokens greedily, and read each token to look for the end."""
    model = _Decoder().to(device, torch.bfloat16).eval()
    prompt = torch.tensor([[5, 9, 2, 14, 33]], device=device)
    cache = model.cache(1, 32)
    logits, tokens = model(prompt, cache, 0), []
    for position in range(5, 17):
        token = logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(token.item())
        if tokens[-1] == 999:
            break
        logits = model(token, cache, position)


@torch.inference_mode()
def dynamic_batching(device: torch.device) -> None:
    """Serve three batches of requests of different lengths: pad, upload, embed, return one vector per request."""
    encoder = nn.Sequential(nn.Embedding(500, 64, padding_idx=0), nn.Linear(64, 64), nn.Tanh()).to(device, torch.float16).eval()
    for lengths in ([3, 8, 5], [12], [7, 7, 2, 9, 4]):
        requests = [torch.randint(1, 500, (n,)) for n in lengths]
        ids = nn.utils.rnn.pad_sequence(requests, batch_first=True)
        ids = (ids if device.type == "cpu" else ids.pin_memory()).to(device, non_blocking=True)
        mask = (ids != 0).unsqueeze(-1)
        vectors = (encoder(ids) * mask).sum(1) / mask.sum(1)
        for vector in F.normalize(vectors.float(), dim=-1).cpu().unbind():
            vector.numpy().tolist()


@torch.inference_mode()
def paged_cache(device: torch.device) -> None:
    """Decode two requests whose keys and values lie in pages that a table names."""
    pages, size, heads, dim = 16, 4, 2, 32
    keys, values = (torch.zeros(pages, size, heads, dim, device=device, dtype=torch.float16) for _ in range(2))
    free, tables, lengths = list(range(pages)), [[], []], [3, 6]
    for table, length in zip(tables, lengths, strict=True):
        table += [free.pop() for _ in range(-(-length // size))]
    for _ in range(5):
        for row, table in enumerate(tables):
            if lengths[row] % size == 0:
                table.append(free.pop())
        k, v = (torch.randn(2, heads, dim, device=device, dtype=torch.float16) for _ in range(2))
        slot = torch.tensor([table[-1] * size + n % size for table, n in zip(tables, lengths, strict=True)]).to(device)
        keys.view(-1, heads, dim)[slot] = k
        values.view(-1, heads, dim).index_copy_(0, slot, v)
        lengths = [n + 1 for n in lengths]
        most = max(len(table) for table in tables)
        index = torch.tensor([table + [0] * (most - len(table)) for table in tables], device=device)
        mask = torch.arange(most * size, device=device)[None] < torch.tensor(lengths, device=device)[:, None]
        gathered = [x[index].flatten(1, 2).transpose(1, 2) for x in (keys, values)]
        q = torch.randn(2, heads, 1, dim, device=device, dtype=torch.float16)
        y = F.scaled_dot_product_attention(q, *gathered, attn_mask=mask[:, None, None])
    y.float().sum().item()


@torch.inference_mode()
def speculative_decoding(device: torch.device) -> None:
    """Draft three tokens with a small model, check them with a large one, and keep those that agree."""
    torch.manual_seed(1)
    draft, target = _Decoder(dim=32, heads=2).to(device).eval(), _Decoder(dim=64).to(device).eval()
    ids = torch.tensor([[1, 2, 3, 4]], device=device)
    accepted = 0
    for _ in range(4):
        proposal = ids
        for _ in range(3):
            logits = draft(proposal, draft.cache(1, proposal.shape[1]), 0)
            proposal = torch.cat([proposal, logits[:, -1:].argmax(-1)], dim=1)
        checked = target(proposal, target.cache(1, proposal.shape[1]), 0).argmax(-1)
        drafted, wanted = proposal[:, ids.shape[1] :], checked[:, ids.shape[1] - 1 : -1]
        count = int((drafted == wanted).long().cumprod(dim=1).sum())
        accepted += count
        bonus = checked[:, ids.shape[1] - 1 + count : ids.shape[1] + count]
        ids = torch.cat([ids, drafted[:, :count], bonus], dim=1)
    ids.tolist()


@torch.inference_mode()
def beam_search(device: torch.device) -> None:
    """Search with four beams, and reorder the cache after each step."""
    model = _Decoder().to(device).eval()
    beams, cache = 4, model.cache(4, 16)
    ids = torch.tensor([[7, 8, 9]], device=device).expand(beams, -1).contiguous()
    scores = torch.tensor([0.0] + [-1e9] * (beams - 1), device=device)
    logits = model(ids, cache, 0)[:, -1]
    for position in range(3, 9):
        total = scores[:, None] + logits.log_softmax(-1)
        scores, flat = total.flatten().topk(beams)
        parent, token = flat // 128, flat % 128
        ids = torch.cat([ids[parent], token[:, None]], dim=1)
        cache = tuple(part.index_select(0, parent) for part in cache)
        logits = model(token[:, None], cache, position)[:, -1]
    ids[scores.argmax()].tolist()


@torch.inference_mode()
def nucleus_sampling(device: torch.device) -> None:
    """Sample a batch with temperature, repetition penalty and the top 90 % of the probability."""
    model = _Decoder().to(device).eval()
    generator = torch.Generator(device=device).manual_seed(3)
    ids, cache = torch.randint(0, 128, (3, 6)).to(device), model.cache(3, 20)
    logits = model(ids, cache, 0)[:, -1]
    for position in range(6, 14):
        seen = logits.gather(1, ids)
        logits = logits.scatter(1, ids, torch.where(seen > 0, seen / 1.1, seen * 1.1)) / 0.7
        ordered, order = logits.sort(descending=True)
        drop = ordered.softmax(-1).cumsum(-1) > 0.9
        drop[:, 1:] = drop[:, :-1].clone()
        drop[:, 0] = False
        logits = logits.masked_fill(drop.scatter(1, order, drop), float("-inf"))
        token = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        ids = torch.cat([ids, token], dim=1)
        logits = model(token, cache, position)[:, -1]
    ids.cpu()


def padded_generation(device: torch.device) -> None:
    """Generate for a batch that is padded on the left with an unmodified GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None)
    model = GPT2LMHeadModel(config).to(device).eval()
    ids = torch.randint(1, 256, (3, 9))
    mask = (torch.arange(9)[None] >= torch.tensor([0, 4, 6])[:, None]).long()
    ids, mask = (ids * mask).to(device), mask.to(device)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0)
    out[:, 9:].tolist()
