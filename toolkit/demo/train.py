"""Train one of the models that ship as demo/NAME, on generated text.

    python -m toolkit.demo.train qwen3.5-moe --out DIR --device cuda

Writes a Hugging Face folder and prints the quality at the end. demo/qwen3 takes ten to thirty minutes on two CPU cores, the
others many times that. On an H200 they take 17 s, 94 s (gemma4) and 110 s (qwen3.5-moe). The same seed gives the same text,
tokenizer and initial weights; trained weights differ in rounding between machines and versions.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toolkit.core.files import replace_text
from toolkit.demo.corpus import CHAT_TEMPLATE, END, TURN, TURN_END, Corpus, train_tokenizer
from toolkit.demo.miniatures import MINIATURES, Miniature
from toolkit.gpu.opening import open_device
from toolkit.models import ARCHITECTURES
from toolkit.models.model import CausalLM
from toolkit.models.places import spot

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WARM_UP = 40
# (end as a share of the steps, rows, tokens per row): mostly short rows, at the end as long as the model's context
PHASES = ((0.85, 20, 192), (0.97, 8, 512), (1.0, 4, 1024))


def train(mini: Miniature, steps: int | None = None, seed: int = 0, device: str = "cpu", workers: int = 0) -> Any:
    """Return the trained model, and print a line every 50 steps.

    `steps` defaults to the recipe's number. `workers` processes generate the text (0: this process does).
    """
    steps = mini.steps if steps is None else steps
    architecture, target = _architecture(mini), open_device(device)
    config = architecture.Config.from_hf({**mini.shape, **_ends(mini)})
    model = architecture.Model(config, target, torch.float32).init_weights(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if mini.start is not None:
                mini.start(name, parameter)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    began = time.monotonic()
    for step, (ids, labels) in enumerate(_batches(mini, steps, seed, workers)):
        rate = min(1, (step + 1) / WARM_UP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = mini.peak_rate * rate
        logits = model(ids[:, :-1].to(target.torch)).flatten(0, 1)
        loss = F.cross_entropy(logits, labels[:, 1:].flatten().to(target.torch))  # ignores NOT_LEARNT (-100)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step:4d} of {steps}  loss {loss.item():.3f}  {time.monotonic() - began:4.0f} s", flush=True)
    return model.requires_grad_(False)


def _architecture(mini: Miniature) -> ModuleType:
    return ARCHITECTURES[mini.shape["model_type"]]


def _batches(mini: Miniature, steps: int, seed: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ids and labels [rows, length + 1] of every step. They depend on the seed and the step, not on `workers`."""
    sizes = [next((rows, length) for until, rows, length in PHASES if step / steps < until) for step in range(steps)]
    jobs = [(f"{seed} {step}", rows * mini.rows_scale, length + 1) for step, (rows, length) in enumerate(sizes)]
    vocab_size = mini.shape["vocab_size"]
    if not workers:
        yield from map(_tensors, map(_Maker(vocab_size), jobs))
        return
    with get_context("spawn").Pool(workers, _start_worker, (vocab_size,)) as pool:
        yield from map(_tensors, pool.imap(_work, jobs, chunksize=8))


def _tensors(drawn: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    return torch.tensor([ids for ids, _ in drawn]), torch.tensor([labels for _, labels in drawn])


class _Maker:
    """Draws the rows of a step."""

    def __init__(self, vocab_size: int) -> None:
        self.corpus = Corpus(train_tokenizer(vocab_size), random.Random(0))

    def __call__(self, job: tuple[str, int, int]) -> list[tuple[list[int], list[int]]]:
        seed, rows, length = job
        self.corpus.rng = random.Random(seed)
        return [self.corpus.row(length) for _ in range(rows)]


_maker: list[_Maker] = []  # of this worker process


def _start_worker(vocab_size: int) -> None:
    _maker.append(_Maker(vocab_size))


def _work(job: tuple[str, int, int]) -> list[tuple[list[int], list[int]]]:
    return _maker[0](job)


def checkpoint(model: CausalLM, mini: Miniature) -> dict[str, Tensor]:
    """Return the weights with the names and shapes of transformers' model: the inverse of `names_hf`."""
    shapes = _shapes_hf(mini)
    out: dict[str, Tensor] = {}
    for ours, source in _architecture(mini).names_hf(model.config, tuple(shapes)).items():
        place = spot(model, ours)
        weight = place.weight
        assert isinstance(weight, Tensor)
        value = _unchanged((weight if place.rows is None else weight[..., place.rows, :]).detach().cpu(), source.change)
        parts = value.unbind(0) if len(source.names) > 1 else (value,)
        for name, part in zip(source.names, parts, strict=True):
            there = out.setdefault(name, torch.full(shapes[name], math.nan))
            there = there if source.shape is None else there.view(source.shape)
            (there if source.rows is None else there[..., source.rows, :]).copy_(part)
    assert set(out) == set(shapes)
    assert not any(tensor.isnan().any() for tensor in out.values())
    return out


def _unchanged(value: Tensor, change: Callable[[Tensor], Tensor] | None) -> Tensor:
    """Return the stored tensor from which `change` makes `value`.

    The known changes add a constant, or negate the exponential. Raises ValueError for others.
    """
    if change is None:
        return value
    for stored in (value - change(torch.zeros_like(value)), value.neg().log()):
        if torch.allclose(change(stored), value, rtol=1e-5, atol=1e-6):
            return stored
    raise ValueError("the inverse of this weight's change while loading is unknown")


def _shapes_hf(mini: Miniature) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights of transformers' model, without a tied head."""
    import transformers

    config = transformers.AutoConfig.for_model(**mini.shape)
    with torch.device("meta"):
        model = getattr(transformers, mini.architecture)(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}  # tied parameters appear once
    buffers = {name: tuple(buffer.shape) for name, buffer in model.named_buffers() if name in model.state_dict()}
    return shapes | buffers


def write(model: CausalLM, mini: Miniature, tokenizer: Tokenizer, out: Path) -> None:
    """Write a Hugging Face folder. Weights are stored in bf16 to be small; models compute in fp32 to be reproducible."""
    from safetensors.torch import save_file

    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in checkpoint(model, mini).items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # save_file makes the file private
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    end, turn_end = tokenizer.token_to_id(END), tokenizer.token_to_id(TURN_END)
    texts = {
        "config.json": {"architectures": [mini.architecture], **mini.shape, **_ends(mini)},
        "generation_config.json": {"eos_token_id": [turn_end, end], "pad_token_id": end, "do_sample": False},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": mini.shape["max_position_embeddings"],
            "eos_token": TURN_END,
            "pad_token": END,
            "additional_special_tokens": [TURN, TURN_END],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in texts.items():
        replace_text(out / name, json.dumps(content, indent=2) + "\n")


def _ends(mini: Miniature) -> Mapping[str, int]:
    """Return the ids of the special tokens, the last three of the vocabulary: END, TURN, TURN_END."""
    return {"eos_token_id": mini.shape["vocab_size"] - 1, "pad_token_id": mini.shape["vocab_size"] - 3}


def main(arguments: list[str] | None = None) -> int:
    """Run the command line. Returns 1 if the trained model continues a prompt wrong, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m toolkit.demo.train", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=MINIATURES, help="name of the demo model")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, help="number of steps (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help='"cpu" (default) or "cuda"')
    parser.add_argument("--workers", type=int, default=0, help="processes that generate the text (default: only this one)")
    options = parser.parse_args(arguments)
    mini = MINIATURES[options.name]
    model = train(mini, options.steps, options.seed, options.device, options.workers)
    write(model, mini, train_tokenizer(mini.shape["vocab_size"]), options.out)
    from toolkit.demo.quality import main as check

    return check(str(options.out))


if __name__ == "__main__":
    raise SystemExit(main())
