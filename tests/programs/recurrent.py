"""Recurrent networks: language models, packed sequences, cells, attention, generation, streaming."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def lstm_language_model(device: torch.device) -> None:
    """Train a two-layer LSTM with truncated backpropagation through time."""
    embedding, lstm, head = nn.Embedding(200, 64), nn.LSTM(64, 128, num_layers=2, dropout=0.2), nn.Linear(128, 200)
    model = nn.ModuleList([embedding, lstm, head]).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    text = torch.randint(0, 200, (36, 8)).to(device)
    hidden = (torch.zeros(2, 8, 128, device=device), torch.zeros(2, 8, 128, device=device))
    for start in (0, 12, 24):
        hidden = tuple(h.detach() for h in hidden)
        out, hidden = model[1](model[0](text[start : start + 11]), hidden)
        loss = F.cross_entropy(model[2](out).view(-1, 200), text[start + 1 : start + 12].reshape(-1))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        loss.item()


def packed_gru_classifier(device: torch.device) -> None:
    """Train a bidirectional GRU on sequences of different lengths, packed."""
    embedding = nn.Embedding(100, 32, padding_idx=0).to(device)
    gru = nn.GRU(32, 48, bidirectional=True, batch_first=True).to(device)
    head = nn.Linear(96, 3).to(device)
    parameters = [*embedding.parameters(), *gru.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    lengths = torch.tensor([14, 9, 20, 3])
    ids = torch.randint(1, 100, (4, 20))
    ids[torch.arange(20)[None] >= lengths[:, None]] = 0
    ids, labels = ids.to(device), torch.tensor([0, 1, 2, 1], device=device)
    for _ in range(2):
        packed = nn.utils.rnn.pack_padded_sequence(embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        out, last = gru(packed)
        padded, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        logits = head(torch.cat([last[0], last[1]], dim=1) + padded.amax(dim=1))
        loss = F.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def lstm_cell_forecast(device: torch.device) -> None:
    """Train LSTM cells on sine waves, and forecast ten values."""
    first, second, out = nn.LSTMCell(1, 32), nn.LSTMCell(32, 32), nn.Linear(32, 1)
    model = nn.ModuleList([first, second, out]).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    waves = torch.sin(torch.arange(25) * 0.3 + torch.arange(6)[:, None]).to(device)

    def run(x: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        h1 = c1 = h2 = c2 = torch.zeros(x.shape[0], 32, device=device)
        outputs = []
        for step in x.split(1, dim=1):
            h1, c1 = model[0](step, (h1, c1))
            h2, c2 = model[1](h1, (h2, c2))
            outputs.append(model[2](h2))
        for _ in range(ahead):
            h1, c1 = model[0](outputs[-1], (h1, c1))
            h2, c2 = model[1](h1, (h2, c2))
            outputs.append(model[2](h2))
        return torch.cat(outputs, dim=1)

    loss = F.mse_loss(run(waves[:, :-1]), waves[:, 1:])
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        run(waves, ahead=10)[:, -10:].cpu().numpy()


def seq2seq_attention(device: torch.device) -> None:
    """Train a GRU encoder and decoder with dot-product attention and teacher forcing."""
    embedding, encoder = nn.Embedding(60, 32).to(device), nn.GRU(32, 64).to(device)
    decoder, head = nn.GRUCell(32 + 64, 64).to(device), nn.Linear(128, 60).to(device)
    parameters = [p for m in (embedding, encoder, decoder, head) for p in m.parameters()]
    optimizer = torch.optim.RMSprop(parameters, lr=1e-3)
    source, target = torch.randint(0, 60, (10, 4)).to(device), torch.randint(0, 60, (8, 4)).to(device)
    memory, last = encoder(embedding(source))
    keys = memory.transpose(0, 1)
    hidden, context, losses = last[0], torch.zeros(4, 64, device=device), []
    for step in range(7):
        hidden = decoder(torch.cat([embedding(target[step]), context], dim=1), hidden)
        weights = torch.bmm(keys, hidden.unsqueeze(2)).softmax(dim=1)
        context = torch.bmm(weights.transpose(1, 2), keys).squeeze(1)
        losses.append(F.cross_entropy(head(torch.cat([hidden, context], dim=1)), target[step + 1]))
    loss = torch.stack(losses).mean()
    loss.backward()
    optimizer.step()
    loss.item()


@torch.no_grad()
def character_generation(device: torch.device) -> None:
    """Generate twelve characters with a tanh RNN, one step at a time."""
    embedding, rnn, head = nn.Embedding(64, 32).to(device), nn.RNN(32, 96).to(device), nn.Linear(96, 64).to(device)
    prime = torch.arange(6).view(6, 1).to(device)
    out, hidden = rnn(embedding(prime))
    text = []
    for _ in range(12):
        probabilities = (head(out[-1]) / 0.8).softmax(dim=-1)
        token = torch.multinomial(probabilities, 1)
        text.append(token.item())
        out, hidden = rnn(embedding(token.view(1, 1)), hidden)


def lstm_autocast(device: torch.device) -> None:
    """Train a bidirectional LSTM tagger under bf16 autocast."""
    embedding, lstm = nn.Embedding(300, 64).to(device), nn.LSTM(64, 64, 2, batch_first=True, bidirectional=True).to(device)
    head = nn.Linear(128, 9).to(device)
    optimizer = torch.optim.AdamW([*embedding.parameters(), *lstm.parameters(), *head.parameters()])
    words, tags = torch.randint(0, 300, (8, 24)).to(device), torch.randint(0, 9, (8, 24)).to(device)
    for _ in range(2):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out, _ = lstm(embedding(words))
            loss = F.cross_entropy(head(out).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()


@torch.inference_mode()
def streaming_denoiser(device: torch.device) -> None:
    """Run a GRU in fp16 over chunks of audio features, and keep its state between them."""
    gru = nn.GRU(40, 96, num_layers=2, batch_first=True).to(device, torch.float16).eval()
    mask = nn.Sequential(nn.Linear(96, 40), nn.Sigmoid()).to(device, torch.float16)
    state = None
    for _ in range(5):
        chunk = torch.rand(1, 10, 40, dtype=torch.float16)
        x = chunk.to(device)
        out, state = gru(x, state)
        (x * mask(out)).cpu()
