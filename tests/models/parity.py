"""Compare our models with those of transformers on small random configs.

Two implementations that compute the same function differ only by rounding, and rounding depends on the processor: its vector
instructions decide the order of sums, and a recurrence can amplify the last bit of fp32 to 1e-4. So models are compared in
fp64 (`in_double`), where they agree to about 1e-13 on every processor and any real difference shows. The error of our models
in fp32 is measured in units of the error that rounding explains (`expected_errors`), which is the same on every processor.

`python -m tests.models.parity [NAME...]` prints the table of all cases in tests/models/cases_*.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.models import ARCHITECTURES
from toolkit.models.places import assign

TOLERANCE = 1e-10  # of logits in fp64. The largest difference measured is 1e-12
FLOAT32 = torch.float32  # also within `in_double`
ROUNDING = 2.0**-24  # the largest relative error of rounding to fp32
MARGIN = 4.0  # of `Parity.error`: the largest measured, with three sets of vector instructions, is 2.2
STEPS = 64
CPU = SimpleNamespace(torch=torch.device("cpu"), name="cpu")  # all that a model asks of a Device


@contextmanager
def in_double() -> Iterator[None]:
    """Replace float32 by float64 in code that requests it explicitly (norms, softmax, recurrent states). Also a decorator."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.set_default_dtype(torch.float64)
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Case:
    """A small config: the names of its classes in transformers, and its values."""

    name: str
    model_class: str  # "Gemma4ForCausalLM"
    config_class: str  # "Gemma4TextConfig"
    values: dict[str, Any] = field(default_factory=dict)
    prompt: int = 19
    chunk: int = 5
    noise: float = 0.2  # added to every weight; much of it makes a model of many layers amplify the last bit

    def theirs(self, seed: int = 0, dtype: torch.dtype | None = None) -> Any:
        """Return their model with random weights that fp32 can represent, in `dtype` (default: fp32; fp64 in `in_double`).

        Norms, biases and buffers, which start as ones or zeros, are random too.
        """
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, self.config_class)(**self.values)
        model = getattr(transformers, self.model_class)(config).eval()
        model.set_experts_implementation("eager")  # their grouped matmul wants sizes divisible by 4
        with torch.no_grad():
            for tensor in (*model.parameters(), *(model.get_buffer(name) for name in stored_buffers(model))):
                tensor.copy_((tensor + torch.randn(tensor.shape) * self.noise).to(FLOAT32))
        return model if dtype is None else model.to(dtype)


def stored_buffers(model: Any) -> list[str]:
    """Return the names of the buffers that a checkpoint holds."""
    return [name for name, _ in model.named_buffers() if name in model.state_dict()]


def value_of(source: Any, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the value that a `Source` describes, read from a checkpoint's tensors."""
    found = [weights[name] for name in source.names]
    value = found[0] if len(found) == 1 else torch.stack(found)
    value = value if source.shape is None else value.reshape(source.shape)
    value = value if source.rows is None else value[..., source.rows, :]
    return value if source.change is None else source.change(value.float())


def ours(theirs: Any, dtype: torch.dtype | None = None, values: dict[str, Any] | None = None) -> Any:
    """Return our model with the weights of `theirs`, under the names it would be saved with."""
    values = theirs.config.to_dict() if values is None else values
    architecture = ARCHITECTURES[values["model_type"]]
    config = architecture.Config.from_hf(values)
    return filled(architecture.Model(config, CPU, dtype or torch.float32), architecture.names_hf, theirs.state_dict())


def filled(model: Any, names: Any, weights: dict[str, torch.Tensor]) -> Any:
    """Fill every parameter of `model` from the place in `weights` that `names` gives; all shapes must agree."""
    sources = names(model.config, set(weights))
    assert set(sources) == {name for name, _ in model.named_parameters()}
    for name, source in sources.items():
        value, old = value_of(source, weights), model.get_parameter(name)
        assert old.shape == value.shape, (name, old.shape, value.shape)
        assign(model, name, value.detach().to(old.dtype).clone())
    return model


@dataclass
class Parity:
    """Largest differences of logits in fp64: a whole sequence at once, prefill in chunks, each decode step; and equal tokens.

    `error` is that of our model in fp32, in units of `expected_errors`: the root mean square over positions, for a whole
    sequence or for chunks and decode steps, whichever is larger. It is about 1 if each operation rounds its result once.
    """

    whole: float
    prefill: float
    decode: float
    same_tokens: int
    error: float

    @property
    def worst(self) -> float:
        return max(self.whole, self.prefill, self.decode)


@torch.no_grad()
def compare(case: Case, steps: int = STEPS, seed: int = 0) -> Parity:
    """Feed both models a prompt (ours in chunks), then `steps` greedy tokens, which are the choices of our model."""
    generator = torch.Generator().manual_seed(seed + 1)
    with in_double():
        theirs = case.theirs(seed)
        model = ours(theirs)
        ids = torch.randint(model.config.vocab_size, (1, case.prompt), generator=generator)
        expected = theirs(ids, use_cache=True)
        past, exact, same = expected.past_key_values, [expected.logits[0, -1]], 0
        whole = _apart(model(ids), expected.logits)
        cache, logits = prefill(model, ids, case.chunk, case.prompt + steps)
        found = [logits]
        for position in range(case.prompt, case.prompt + steps):
            token = logits.argmax().view(1, 1)
            same += int(token == exact[-1].argmax())
            ids = torch.cat((ids, token), 1)
            logits = last(model, model.embed(token), torch.tensor([position]), cache, position + 1)
            found.append(logits)
            exact.append(theirs(token, past_key_values=past, use_cache=True).logits[0, -1])
        exact_whole = theirs(ids, use_cache=False).logits[0]
        expected_squares = expected_errors(theirs, ids, exact_whole)
    differences = [_apart(a, b) for a, b in zip(found, exact, strict=True)]
    error = _fp32_error(case, ours(theirs), ids, exact_whole, expected_squares)
    return Parity(whole, differences[0], max(differences[1:], default=0.0), same, error)


class _Rounding(TorchDispatchMode):
    """Change each number that an operation in fp64 returns at random, by at most the relative error of rounding to fp32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, torch.Tensor) or out.dtype is not torch.float64 or func.is_view:
            return out
        return out * (1 + ROUNDING * (2 * torch.rand(out.shape, dtype=out.dtype, generator=self.generator) - 1))


def expected_errors(theirs: Any, ids: torch.Tensor, exact: torch.Tensor, draws: int = 4) -> torch.Tensor:
    """Return the mean squared error of the logits at each position [T] if every operation rounds its result to fp32 once.

    `theirs` computes in fp64 and gives the logits `exact` [T, vocab] for `ids` [1, T]. Rounding is drawn at random, several
    times. So the result accounts for the number of operations and for how much the model amplifies an error at that position,
    but not for the processor.
    """
    with _Rounding(0):
        found = theirs(ids.expand(draws, -1), use_cache=False).logits  # [draws, T, vocab]
    return (found - exact).square().mean((0, -1))


def _fp32_error(case: Case, model: Any, ids: torch.Tensor, exact: torch.Tensor, expected_squares: torch.Tensor) -> float:
    """Return `Parity.error` of `model`, in fp32, for `ids` [1, T] with the logits `exact` [T, vocab]."""
    cache, logits = prefill(model, ids[:, : case.prompt], case.chunk, ids.shape[1])
    steps = [logits]
    for i in range(case.prompt, ids.shape[1]):
        steps.append(last(model, model.embed(ids[:, i : i + 1]), torch.tensor([i]), cache, i + 1))
    found = model(ids)[0], torch.stack(steps)
    return max(float(((a - exact[-len(a) :]).square().mean(-1) / expected_squares[-len(a) :]).mean().sqrt()) for a in found)


def _apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the largest difference, or infinity if either tensor holds a NaN."""
    worst = float((a.double() - b.double()).abs().max())
    return worst if worst == worst else float("inf")


@torch.no_grad()
def prefill(model: Any, ids: torch.Tensor, chunk: int, context: int) -> tuple[Any, torch.Tensor]:
    """Return a cache that was fed `ids` [1, T], `chunk` at a time, and the last token's logits [vocab]."""
    cache = model.new_cache(context)
    for start in range(0, ids.shape[1], chunk):
        stop = min(start + chunk, ids.shape[1])
        logits = last(model, model.embed(ids[:, start:stop]), cache.slots[start:stop], cache, stop)
    return cache, logits


@torch.no_grad()
def last(model: Any, x: torch.Tensor, positions: torch.Tensor, cache: Any, length: int) -> torch.Tensor:
    """Feed the embedded tokens `x` and return the logits [vocab] of the last one."""
    return model.logits(model.advance(x, positions, cache, length)[:, -1:]).view(-1)


def cases() -> dict[str, tuple[Case, ...]]:
    """Return the cases of each architecture, from the files next to this one."""
    files = sorted(Path(__file__).parent.glob("cases_*.py"))
    return {f.stem[6:]: importlib.import_module(f"tests.models.{f.stem}").CASES for f in files}


def main(wanted: list[str]) -> None:
    print(
        "| architecture | config | sequence | prefill in chunks | decode | same tokens | fp32 error / expected |\n"
        "| --- | --- | --- | --- | --- | --- | --- |"
    )
    for architecture, several in cases().items():
        for case in several if not wanted or architecture in wanted else ():
            p = compare(case)
            found = f"{p.whole:.1e} | {p.prefill:.1e} | {p.decode:.1e} | {p.same_tokens} of {STEPS}"
            print(f"| {architecture} | {case.name} | {found} | {p.error:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
