"""The parts a decode loop is put together from: one small class for each answer that a `Strategy` gives.

Every copy between host and device that a decode step makes is a line of this file. Parts know tensors and a device's
streams; they don't know each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from toolkit import ops
from toolkit.decode.sampling import Sampler, Sampling
from toolkit.decode.strategies import Strategy
from toolkit.kernels.noise import mixed_seed
from toolkit.models.layers import Embedding
from toolkit.models.model import Model


class Inputs(Protocol):
    """Turns tokens into embedded inputs on the device."""

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        """`ids` [1, T] on the host -> [1, chunk or less, hidden], one part after the other: 32K rows at once are gigabytes."""

    def next(self, token: Tensor, known: int | None) -> Tensor:
        """The token just chosen: where it was chosen, and as the host knows it (None: not yet)."""


class UploadedToken:
    """The token goes up as an id, 8 bytes, into a fixed slot."""

    def __init__(self, model: Model) -> None:
        self.embed, self.device = model.embed, model.device.torch
        self.slot = torch.empty(1, 1, dtype=torch.int64, device=self.device)
        self.staging = torch.empty(1, 1, dtype=torch.int64)

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        return map(self.embed, ids.to(self.device).split(chunk, 1))

    def next(self, token: Tensor, known: int | None) -> Tensor:
        self.slot.copy_(self.staging.fill_(_told(known)))
        return self.embed(self.slot)  # type: ignore[no-any-return]


class UploadedRow:
    """The embedding table stays on the host; the token's row of it goes up."""

    def __init__(self, model: Model) -> None:
        self.device = model.device.torch
        self.table = model.embed.on_host()
        self.staging = torch.empty(1, 1, dtype=torch.int64)

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        rows: Tensor = self.table(ids).to(self.device)
        self.slot = torch.empty_like(rows[:, :1])
        return iter(rows.split(chunk, 1))

    def next(self, token: Tensor, known: int | None) -> Tensor:
        return self.slot.copy_(self.table(self.staging.fill_(_told(known))))


class SampledToken:
    """The sampled tensor is the next input: nothing goes up but the prompt."""

    def __init__(self, model: Model) -> None:
        self.embed, self.device = model.embed, model.device.torch

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        return map(self.embed, ids.to(self.device).split(chunk, 1))

    def next(self, token: Tensor, known: int | None) -> Tensor:
        return self.embed(token.view(1, 1))  # type: ignore[no-any-return]


class Positions(Protocol):
    """Says, on the device, at which position [1] a decode step's token goes."""

    def next(self, step: int) -> Tensor:
        """Decode steps count from 1."""


class UploadedPosition:
    """The position goes up, 8 bytes, into a fixed slot."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.first = first
        self.slot = torch.empty(1, dtype=torch.int64, device=device)
        self.staging = torch.empty(1, dtype=torch.int64)

    def next(self, step: int) -> Tensor:
        return self.slot.copy_(self.staging.fill_(self.first + step - 1))


class PositionArray:
    """All positions go up once; each step copies its own into a fixed slot, on the device."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.array = torch.arange(first, first + steps).to(device)
        self.slot = torch.empty(1, dtype=torch.int64, device=device)

    def next(self, step: int) -> Tensor:
        return self.slot.copy_(self.array[step - 1 : step])


class CountedPosition:
    """The position is counted up in place by a kernel: nothing is copied."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.slot = torch.full((1,), first - 1, dtype=torch.int64, device=device)

    def next(self, step: int) -> Tensor:
        return self.slot.add_(1)


class Choice:
    """Chooses tokens where the strategy says, into two slots in turn, so that the token before stays readable."""

    def __init__(self, sampling: Sampling, vocab_size: int, where: torch.device) -> None:
        self.where = where
        self.sampler = Sampler(sampling, vocab_size, where)
        self.slots = list(torch.empty(2, 1, dtype=torch.int64, device=where))

    def choose(self, logits: Tensor) -> Tensor:
        """The next token [1] int64; `logits` [vocab] come down first where the choice is the host's."""
        self.slots.reverse()
        return self.sampler.choose(logits.to(self.where), self.slots[0])


class ChoiceWithRow:
    """Chooses by an operation that gives the token's row of the embedding too: for device strategies, without top-k and top-p.

    It is the next step's input as well (`Inputs`), which is that row.
    """

    def __init__(self, sampling: Sampling, model: Model) -> None:
        assert isinstance(model.embed, Embedding)  # see `suits`
        self.embed, self.device = model.embed, model.device.torch
        self.slots = list(torch.empty(2, 1, dtype=torch.int64, device=self.device))
        self.draw: tuple[Tensor, Tensor, Tensor] | None = None
        if not sampling.greedy:
            one = partial(torch.full, (1,), device=self.device)
            temperature = one(sampling.temperature, dtype=torch.float64)
            self.draw = temperature, one(mixed_seed(sampling.seed), dtype=torch.int64), one(0, dtype=torch.int64)

    @staticmethod
    def suits(strategy: Strategy, sampling: Sampling, model: Model) -> bool:
        """Is everything that it does the device's, and does the operation run there?"""
        embed = model.embed
        fits = isinstance(embed, Embedding) and embed.alone and ops.on_gpu(next(embed.parameters()))
        whole = sampling.top_k is None and sampling.top_p in (None, 1)
        return fits and whole and strategy.token == "device" and strategy.sampler == "device"

    def choose(self, logits: Tensor) -> Tensor:
        """The next token [1] int64, of fp32 logits [vocab]."""
        self.slots.reverse()
        embed = self.embed
        self.row = ops.sample_embed(logits, embed.weight, embed.dtype, embed.scale, self.slots[0], self.draw)
        return self.slots[0]

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        return map(self.embed, ids.to(self.device).split(chunk, 1))

    def next(self, token: Tensor, known: int | None) -> Tensor:
        return self.row[None]


class Readback(Protocol):
    """Tells the host which tokens were chosen. `before` and `after` enclose what a decode step launches."""

    behind: bool  # a token was chosen that the host doesn't know yet, and that `before` and `arrived` would bring

    def before(self) -> None:
        """Start what can run beside the step."""

    def after(self, token: Tensor) -> int | None:
        """The token the host knows now: this step's, the one before, or None for not yet."""

    def arrived(self) -> int | None:
        """Wait for the token that `before` sent on its way; None where there is none."""

    def close(self) -> None:
        """Wait for a copy under way, before the memory it reads is let go."""


class WaitForToken:
    """Reads each token as soon as it is chosen, and blocks until it is."""

    behind = False

    def __init__(self, device: torch.device) -> None:
        pass

    def before(self) -> None:
        pass

    def after(self, token: Tensor) -> int:
        return int(token.item())

    def arrived(self) -> None:
        pass

    def close(self) -> None:
        pass


class ReadOneBehind:
    """Reads the token of the step before, on a second stream, into page-locked memory, while this step runs.

    Tokens alternate between two slots, here and on the device (`Choice`). A slot is written again two steps later; by
    then the host has waited for the copy out of it, so neither side overwrites what the other still reads.
    """

    def __init__(self, device: torch.device) -> None:
        self.streams = Streams(device)
        self.slots = list(torch.empty(2, 1, dtype=torch.int64, pin_memory=self.streams.real))
        self.token: Tensor | None = None
        self.under_way = self.behind = False

    def before(self) -> None:
        assert self.token is not None  # `after` of the prefill set it
        self.slots.reverse()
        with self.streams.aside():
            self.slots[0].copy_(self.token, non_blocking=True)
        self.under_way, self.behind = True, False

    def after(self, token: Tensor) -> int | None:
        self.streams.chosen()
        self.token, self.behind = token, True
        return self.arrived()

    def arrived(self) -> int | None:
        if not self.under_way:
            return None
        self.streams.wait()
        self.under_way = False
        return int(self.slots[0])

    def close(self) -> None:
        self.arrived()


class Streams:
    """A second stream of a device, and the two events that order it with the first; on the CPU, nothing at all."""

    def __init__(self, device: torch.device) -> None:
        self.real = device.type != "cpu"
        self.device = device
        if self.real:
            self.module = torch.get_device_module(device)
            self.second = self.module.Stream(device=device)
            self._chosen, self._copied = self.module.Event(), self.module.Event()

    def chosen(self) -> None:
        """On the first stream: the token has been chosen when the device gets here."""
        if self.real:
            self._chosen.record(self.module.current_stream(self.device))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A scope on the second stream, which begins after `chosen` was reached and whose end `wait` waits for."""
        if not self.real:
            yield
            return
        self.second.wait_event(self._chosen)
        with self.module.stream(self.second):
            yield
        self._copied.record(self.second)

    def wait(self) -> None:
        """Block the host until the last `aside` scope is done."""
        if self.real:
            self._copied.synchronize()


def _told(known: int | None) -> int:
    """The token that goes up. A strategy that uploads it reads it back first: `Strategy` refuses the others."""
    assert known is not None
    return known


INPUTS: dict[str, Callable[[Model], Inputs]] = {"host": UploadedToken, "host-row": UploadedRow, "device": SampledToken}
POSITIONS: dict[str, Callable[[int, int, torch.device], Positions]] = {
    "host": UploadedPosition,
    "array": PositionArray,
    "device": CountedPosition,
}
READBACKS: dict[str, Callable[[torch.device], Readback]] = {"wait": WaitForToken, "overlap": ReadOneBehind}
