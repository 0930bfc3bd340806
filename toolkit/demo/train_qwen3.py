"""Trains the Qwen3 that ships as demo/qwen3, on text that it makes itself.

    python -m toolkit.demo.train_qwen3 --out DIR

Writes a Hugging Face folder. Takes five to fifteen minutes on two cores and prints the quality at the end. The same
seed gives the same text, tokenizer and start; the weights then differ in rounding between machines and versions.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from toolkit.demo.corpus import CHAT_TEMPLATE, END, TURN, TURN_END, Corpus, train_tokenizer
from toolkit.devices.base import open_device
from toolkit.models import qwen3

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCAB = 768
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 256,  # every row a whole number of 256-weight blocks, so that all quantised formats can hold it
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
STEPS, WARM_UP, PEAK_RATE = 700, 40, 2e-3
# (until this part of the steps, rows, tokens a row): mostly short, in the end as long as the model's context
PHASES = ((0.85, 20, 192), (0.97, 8, 512), (1.0, 4, 1024))


def train(tokenizer: Tokenizer, steps: int = STEPS, seed: int = 0, threads: int = 2) -> qwen3.Model:
    """A model trained for `steps` steps of about 4,000 tokens each. Prints a line every 50."""
    torch.set_num_threads(threads)
    config = qwen3.Config.from_hf({**SHAPE, "model_type": "qwen3"})
    model = qwen3.Model(config, open_device("cpu"), torch.float32).init_weights(seed)
    corpus = Corpus(tokenizer, random.Random(seed))
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    began = time.monotonic()
    for step in range(steps):
        done = step / steps
        rate = PEAK_RATE * min(1, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        optimizer.param_groups[0]["lr"] = rate
        loss = _loss(model, corpus, *next((rows, length) for until, rows, length in PHASES if done < until))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d} of {steps}  loss {loss.item():.3f}  {time.monotonic() - began:4.0f} s", flush=True)
    return model.requires_grad_(False)


def _loss(model: qwen3.Model, corpus: Corpus, rows: int, length: int) -> torch.Tensor:
    drawn = [corpus.row(length + 1) for _ in range(rows)]
    ids = torch.tensor([ids for ids, _ in drawn])
    labels = torch.tensor([labels for _, labels in drawn])
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), labels[:, 1:].flatten())  # leaves out NOT_LEARNT (-100)


def write(model: qwen3.Model, tokenizer: Tokenizer, out: Path) -> None:
    """Write a Hugging Face folder: weights stored in bf16 to be small, computed in fp32 to be the same everywhere."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    ours = dict(model.named_parameters())
    tensors = {source.names[0]: ours[name].bfloat16().contiguous() for name, source in qwen3.names_hf(model.config).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the writer makes it private
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    end, turn_end = tokenizer.token_to_id(END), tokenizer.token_to_id(TURN_END)
    shape = {**SHAPE, "rope_parameters": {"rope_type": "default", "rope_theta": SHAPE["rope_theta"]}}
    texts = {
        "config.json": {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "dtype": "float32",
            **shape,
            "layer_types": ["full_attention"] * model.config.num_hidden_layers,
            "use_sliding_window": False,
            "eos_token_id": turn_end,
            "pad_token_id": end,
        },
        "generation_config.json": {"eos_token_id": [turn_end, end], "pad_token_id": end, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": SHAPE["max_position_embeddings"],
            "eos_token": TURN_END,
            "pad_token": END,
            "additional_special_tokens": [TURN, TURN_END],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in texts.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    """The command line. Returns 1 where the result continues a prompt wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    tokenizer = train_tokenizer(VOCAB)
    write(train(tokenizer, options.steps, options.seed, options.threads), tokenizer, options.out)
    from toolkit.demo.quality import main as check

    return check(str(options.out))


if __name__ == "__main__":
    raise SystemExit(main())
