"""Fine-tuning of Hugging Face models with small random weights."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn


def bert_classification(device: torch.device) -> None:
    """Fine-tune BERT for two steps with a linear schedule, and evaluate it."""
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    config = BertConfig(
        vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, num_labels=2
    )
    model = BertForSequenceClassification(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 10)
    batch = {"input_ids": torch.randint(0, 300, (4, 16)), "attention_mask": torch.ones(4, 16, dtype=torch.long)}
    batch["attention_mask"][1:, 10:] = 0
    batch["labels"] = torch.tensor([0, 1, 1, 0])
    model.train()
    for _ in range(2):
        moved = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**moved).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        predicted = model(**moved).logits.argmax(dim=-1)
    (predicted == moved["labels"]).float().mean().item()


def gpt2_accumulation(device: torch.device) -> None:
    """Train GPT-2 under bf16 autocast, and accumulate the gradients of two micro-batches."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 256, (4, 2, 32))
    for i, micro in enumerate(ids):
        micro = micro.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(micro, labels=micro).loss / 2
        loss.backward()
        if i % 2:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            print(f"{loss.item():.3f} {norm.item():.3f}", end="\r")


class _LoRA(nn.Module):
    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.a.t().to(x.dtype)) @ self.b.t().to(x.dtype) * 2.0


def llama_lora(device: torch.device) -> None:
    """Fine-tune low-rank adapters of a frozen bf16 Llama, then copy the adapters to the host."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = _LoRA(layer.self_attn.q_proj, 4)
        layer.self_attn.v_proj = _LoRA(layer.self_attn.v_proj, 4)
    model.to(device).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-3)
    ids = torch.randint(0, 256, (2, 24), device=device)
    labels = ids.masked_fill(torch.arange(24, device=device) < 8, -100)
    for _ in range(2):
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}


def t5_adafactor(device: torch.device) -> None:
    """Train T5 on source and target sequences with PyTorch's Adafactor."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=200, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0, pad_token_id=0
    )
    model = T5ForConditionalGeneration(config).to(device).train()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    source, target = torch.randint(1, 200, (3, 20)).to(device), torch.randint(1, 200, (3, 12)).to(device)
    for _ in range(2):
        out = model(input_ids=source, attention_mask=torch.ones_like(source), labels=target)
        out.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.loss.item()


def vit_checkpointed(device: torch.device) -> None:
    """Fine-tune a vision transformer with gradient checkpointing and a frozen embedding."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=5,
    )
    model = ViTForImageClassification(config).to(device)
    model.gradient_checkpointing_enable()
    model.vit.embeddings.requires_grad_(False)
    model.train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9)
    for _ in range(2):
        pixels, labels = torch.randn(4, 3, 32, 32).to(device), torch.randint(0, 5, (4,)).to(device)
        loss = model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def distillation(device: torch.device) -> None:
    """Distil a GPT-2 of three layers into one of one layer with softened probabilities."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shared = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_head": 4}
    teacher = GPT2LMHeadModel(GPT2Config(n_layer=3, **shared)).to(device).eval()
    student = GPT2LMHeadModel(GPT2Config(n_layer=1, **shared)).to(device).train()
    student.transformer.wte.load_state_dict(teacher.transformer.wte.state_dict())
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, foreach=True)
    for _ in range(2):
        ids = torch.randint(0, 256, (2, 32)).to(device)
        with torch.no_grad():
            wanted = teacher(ids).logits
        out = student(ids, labels=ids)
        divergence = F.kl_div(
            F.log_softmax(out.logits / 2, dim=-1), F.log_softmax(wanted / 2, dim=-1), reduction="batchmean", log_target=True
        )
        loss = 0.5 * out.loss + 2.0 * divergence
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss.item()


def preference_optimisation(device: torch.device) -> None:
    """Train a Llama on preferred and rejected answers with the DPO loss and a frozen reference."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4)
    policy = LlamaForCausalLM(config).to(device)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-5)
    ids = torch.randint(0, 128, (4, 20)).to(device)  # two preferred rows, two rejected ones
    answer = (torch.arange(20) >= 6).to(device)

    def log_probability(model: nn.Module) -> torch.Tensor:
        logps = model(ids).logits[:, :-1].log_softmax(-1)
        chosen = logps.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
        return (chosen * answer[1:]).sum(-1)

    ours = log_probability(policy)
    with torch.no_grad():
        theirs = log_probability(reference)
    margin = (ours - theirs)[:2] - (ours - theirs)[2:]
    loss = -F.logsigmoid(0.1 * margin).mean()
    loss.backward()
    optimizer.step()
    (margin > 0).float().mean().item()
