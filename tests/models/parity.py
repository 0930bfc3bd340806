"""How far our models are from transformers', on small random configs: the harness of every architecture's tests.

`python -m tests.models.parity [NAME...]` prints the table of all cases in tests/models/cases_*.py.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from toolkit.models import ARCHITECTURES
from toolkit.models.layers import assign

TOLERANCE = 1e-4  # fp32 on both sides; what differs is the order of sums
STEPS = 64
CPU = SimpleNamespace(torch=torch.device("cpu"), name="cpu")  # all that a model asks of a Device


@dataclass(frozen=True)
class Case:
    """A small config: the classes of transformers it is of, and its values."""

    name: str
    model_class: str  # "Gemma4ForCausalLM"
    config_class: str  # "Gemma4TextConfig"
    values: dict[str, Any] = field(default_factory=dict)
    prompt: int = 19
    chunk: int = 5
    noise: float = 0.2  # added to every weight; much of it makes a model of many layers amplify the last bit

    def theirs(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """Their model with random weights: also norms, biases and buffers that start as ones or zeros."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config_class)(**self.values)
        model = getattr(transformers, self.model_class)(config).eval()
        model.set_experts_implementation("eager")  # their grouped matmul wants sizes divisible by 4
        with torch.no_grad():
            for tensor in (*model.parameters(), *(model.get_buffer(name) for name in stored_buffers(model))):
                tensor.add_(torch.randn(tensor.shape) * self.noise)
        return model.to(dtype)


def stored_buffers(model: Any) -> list[str]:
    """The buffers that a checkpoint holds."""
    return [name for name, _ in model.named_buffers() if name in model.state_dict()]


def value_of(source: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """What a `Source` says, taken out of a checkpoint's tensors."""
    found = [weights[name] for name in source.names]
    value = found[0] if len(found) == 1 else torch.stack(found)
    value = value if source.shape is None else value.reshape(source.shape)
    value = value if source.rows is None else value[..., source.rows, :]
    return value if source.change is None else source.change(value.float())


def ours(theirs: Any, dtype: torch.dtype = torch.float32, values: dict[str, Any] | None = None) -> Any:
    """Our model with the weights of `theirs`, under the names it would be saved with."""
    values = theirs.config.to_dict() if values is None else values
    architecture = ARCHITECTURES[values["model_type"]]
    config = architecture.Config.from_hf(values)
    return filled(architecture.Model(config, CPU, dtype), architecture.names_hf, theirs.state_dict())


def filled(model: Any, names: Any, weights: dict[str, torch.Tensor]) -> Any:
    """`model` with every parameter taken from `weights` where `names` says it is; all shapes must agree."""
    sources = names(model.config, set(weights))
    assert set(sources) == {name for name, _ in model.named_parameters()}
    for name, source in sources.items():
        value, old = value_of(source, weights), model.get_parameter(name)
        assert old.shape == value.shape, (name, old.shape, value.shape)
        assign(model, name, value.detach().to(old.dtype).clone())
    return model


@dataclass
class Parity:
    """Largest differences of logits: a whole sequence at once, prefill in chunks, each decode step; and equal tokens."""

    whole: float
    prefill: float
    decode: float
    same_tokens: int

    @property
    def worst(self) -> float:
        return max(self.whole, self.prefill, self.decode)


@torch.no_grad()
def compare(case: Case, steps: int = STEPS, seed: int = 0, dtype: torch.dtype = torch.float32) -> Parity:
    """Feed both models a prompt, ours in chunks, and `steps` greedy tokens; the tokens are those ours chose."""
    theirs = case.theirs(seed, dtype)
    model = ours(theirs, dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    ids = torch.randint(model.config.vocab_size, (1, case.prompt), generator=generator)
    expected = theirs(ids, use_cache=True)
    whole = _apart(model(ids), expected.logits)
    cache, logits = prefill(model, ids, case.chunk, case.prompt + steps)
    before = _apart(logits, expected.logits[0, -1])
    past, decode, same = expected.past_key_values, 0.0, 0
    position = torch.tensor([case.prompt])
    for _ in range(steps):
        token = logits.argmax().view(1, 1)
        same += int(token == expected.logits[0, -1].argmax())
        logits = last(model, model.embed(token), position, cache, int(position) + 1)
        expected = theirs(token, past_key_values=past, use_cache=True)
        decode = max(decode, _apart(logits, expected.logits[0, -1]))
        position = position + 1
    return Parity(whole, before, decode, same)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; infinite where either is not a number."""
    worst = float((a.float() - b.float()).abs().max())
    return worst if worst == worst else float("inf")


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor, chunk: int, context: int) -> tuple[Any, torch.Tensor]:
    """A cache that was fed `ids` [1, T], `chunk` at a time, and the last token's logits [vocab]."""
    cache = model.new_cache(context)
    for start in range(0, ids.shape[1], chunk):
        stop = min(start + chunk, ids.shape[1])
        logits = last(model, model.embed(ids[:, start:stop]), cache.slots[start:stop], cache, stop)
    return cache, logits


@torch.no_grad()
def last(model: Any, x: torch.Tensor, positions: torch.Tensor, cache: Any, length: int) -> torch.Tensor:
    """Feed embedded tokens; the last one's logits [vocab]."""
    return model.logits(model.advance(x, positions, cache, length)[:, -1:]).view(-1)


def cases() -> dict[str, tuple[Case, ...]]:
    """The cases of each architecture, from the files beside this one."""
    files = sorted(Path(__file__).parent.glob("cases_*.py"))
    return {f.stem[6:]: importlib.import_module(f"tests.models.{f.stem}").CASES for f in files}


def main(wanted: list[str]) -> None:
    print(
        "| architecture | config | sequence | prefill in chunks | decode | same tokens |\n| --- | --- | --- | --- | --- | --- |"
    )
    for architecture, several in cases().items():
        for case in several if not wanted or architecture in wanted else ():
            p = compare(case)
            found = f"{p.whole:.1e} | {p.prefill:.1e} | {p.decode:.1e} | {p.same_tokens} of {STEPS} |"
            print(f"| {architecture} | {case.name} | {found}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
