"""PyTorch's own transformer modules: encoders, decoders, translation, their fast paths and autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def encoder_classification(device: torch.device) -> None:
    """Train `nn.TransformerEncoder` on padded sentences."""
    layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True)
    model = nn.ModuleList([nn.Embedding(200, 64), nn.TransformerEncoder(layer, 2), nn.Linear(64, 3)]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    ids = torch.randint(1, 200, (6, 20))
    padding = torch.arange(20)[None] >= torch.tensor([20, 14, 9, 17, 5, 11])[:, None]
    ids, padding, labels = ids.to(device), padding.to(device), (torch.arange(6) % 3).to(device)
    for _ in range(2):
        hidden = model[1](model[0](ids), src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1)
        loss = F.cross_entropy(model[2]((hidden * keep).sum(1) / keep.sum(1)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def encoder_inference(device: torch.device) -> None:
    """Embed padded sentences with an encoder in evaluation mode, which takes its fast path."""
    layer = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True, activation="gelu")
    embedding, encoder = nn.Embedding(200, 64).to(device), nn.TransformerEncoder(layer, 2).to(device).eval()
    ids = torch.randint(1, 200, (4, 16)).to(device)
    padding = (torch.arange(16)[None] >= torch.tensor([16, 10, 7, 12])[:, None]).to(device)
    with torch.no_grad():
        hidden = encoder(embedding(ids), src_key_padding_mask=padding)
        sentence = F.normalize(hidden[:, 0], dim=-1)
        similarity = sentence @ sentence.t()
    similarity.cpu().tolist()


def causal_language_model(device: torch.device) -> None:
    """Train an encoder with a causal mask as a language model, with norms first and a warm-up of the learning rate."""
    layer = nn.TransformerEncoderLayer(96, 6, 192, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(96), enable_nested_tensor=False)
    model = nn.ModuleDict({"tokens": nn.Embedding(150, 96), "positions": nn.Embedding(64, 96), "encoder": encoder}).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    mask = nn.Transformer.generate_square_subsequent_mask(32, device=device)
    for _ in range(2):
        ids = torch.randint(0, 150, (4, 33)).to(device)
        x = model["tokens"](ids[:, :-1]) + model["positions"](torch.arange(32, device=device))
        hidden = model["encoder"](x, mask=mask, is_causal=True)
        logits = hidden @ model["tokens"].weight.t()
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def translation(device: torch.device) -> None:
    """Train `nn.Transformer` on pairs of sentences with all its masks."""
    model = nn.Transformer(64, 4, 2, 2, 128, batch_first=True).to(device)
    source_embedding, target_embedding = nn.Embedding(80, 64).to(device), nn.Embedding(90, 64).to(device)
    head = nn.Linear(64, 90).to(device)
    parameters = [p for m in (model, source_embedding, target_embedding, head) for p in m.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, betas=(0.9, 0.98), eps=1e-9)
    source, target = torch.randint(0, 80, (4, 12)).to(device), torch.randint(1, 90, (4, 11)).to(device)
    source[1:3, 8:] = 0
    padding = source == 0
    causal = nn.Transformer.generate_square_subsequent_mask(10).to(device)
    out = model(
        source_embedding(source) * 8, target_embedding(target[:, :-1]) * 8, tgt_mask=causal,
        src_key_padding_mask=padding, memory_key_padding_mask=padding,
    )  # fmt: skip
    loss = F.cross_entropy(head(out).transpose(1, 2), target[:, 1:], ignore_index=0)
    loss.backward()
    optimizer.step()
    loss.item()


def encoder_autocast(device: torch.device) -> None:
    """Train an encoder under bf16 autocast, and read the loss of each step."""
    layer = nn.TransformerEncoderLayer(128, 8, 256, batch_first=True)
    encoder, head = nn.TransformerEncoder(layer, 3).to(device), nn.Linear(128, 1).to(device)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=1e-4)
    x, y = torch.randn(8, 40, 128).to(device), torch.randn(8, 40, 1).to(device)
    for _ in range(2):
        with torch.autocast(device_type=device.type, dtype=torch.bfloat16):
            loss = F.mse_loss(head(encoder(x)).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()


@torch.no_grad()
def decoder_captions(device: torch.device) -> None:
    """Decode captions of image features greedily with `nn.TransformerDecoder`, until all rows have ended."""
    layer = nn.TransformerDecoderLayer(64, 4, 128, batch_first=True)
    decoder, embedding = nn.TransformerDecoder(layer, 2).to(device).eval(), nn.Embedding(50, 64).to(device)
    features = torch.randn(3, 9, 64).to(device)
    ids = torch.ones(3, 1, dtype=torch.long, device=device)
    ended = torch.zeros(3, dtype=torch.bool, device=device)
    for _ in range(6):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], device=device)
        hidden = decoder(embedding(ids), features, tgt_mask=mask, tgt_is_causal=True)
        token = (hidden[:, -1] @ embedding.weight.t()).argmax(-1)
        token = token.masked_fill(ended, 0)
        ids = torch.cat([ids, token.unsqueeze(1)], dim=1)
        ended |= token == 99
        if ended.all():
            break
    ids.tolist()
