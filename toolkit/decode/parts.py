"""The parts of a decode step: one small class for each value of each field of `Strategy`.

Every copy between host and device in a decode step is made by a line of this file. The parts are independent of each other;
`step` combines them. Each part separates its copies (`stage`), which a graph can't contain, from its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from toolkit.gpu.device import Device
from toolkit.models.model import Model


class Inputs(Protocol):
    """Turns tokens into embedded inputs on the device."""

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        """Yield the embedded prompt in parts [1, chunk or less, hidden]; `ids` [1, T] are on the host.

        The parts bound the memory: 32K embedded tokens at once take gigabytes.
        """

    def stage(self, known: int | None) -> None:
        """Copy what the next step needs to the device. `known` is the last token, or None if the host has not read it yet."""

    def embedded(self, token: Tensor) -> Tensor:
        """Return the next input [1, 1, hidden]. `token` [1] is the last token, where it was sampled."""


class UploadedToken:
    """Uploads the token id, 8 bytes, into a fixed slot on the device."""

    def __init__(self, model: Model) -> None:
        self.embed, self.device = model.embed, model.device.torch
        self.slot = torch.empty(1, 1, dtype=torch.int64, device=self.device)
        self.staging = torch.empty(1, 1, dtype=torch.int64, device="cpu")

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        return map(self.embed, ids.to(self.device).split(chunk, 1))

    def stage(self, known: int | None) -> None:
        self.slot.copy_(self.staging.fill_(_given(known)))

    def embedded(self, token: Tensor) -> Tensor:
        return self.embed(self.slot)  # type: ignore[no-any-return]


class UploadedRow:
    """Looks up the embedding row in a table on the host and uploads the row."""

    def __init__(self, model: Model) -> None:
        self.device = model.device.torch
        self.table = model.embed.on_host()
        self.staging = torch.empty(1, 1, dtype=torch.int64, device="cpu")

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        rows: Tensor = self.table(ids).to(self.device)
        self.slot = torch.empty_like(rows[:, :1])
        return iter(rows.split(chunk, 1))

    def stage(self, known: int | None) -> None:
        self.slot.copy_(self.table(self.staging.fill_(_given(known))))

    def embedded(self, token: Tensor) -> Tensor:
        return self.slot


class SampledToken:
    """Uses the sampled tensor as the next input; only the prompt is uploaded."""

    def __init__(self, model: Model) -> None:
        self.embed, self.device = model.embed, model.device.torch

    def prompt(self, ids: Tensor, chunk: int) -> Iterator[Tensor]:
        return map(self.embed, ids.to(self.device).split(chunk, 1))

    def stage(self, known: int | None) -> None:
        pass

    def embedded(self, token: Tensor) -> Tensor:
        return self.embed(token.view(1, 1))  # type: ignore[no-any-return]


class Positions(Protocol):
    """Provides the position of each decode step's token as a tensor [1] on the device."""

    def stage(self, step: int) -> None:
        """Copy the position of decode step `step`, counted from 1."""

    def current(self) -> Tensor:
        """Return the position of the step that begins now. Call it once per step."""


class UploadedPosition:
    """Uploads the position, 8 bytes, into a fixed slot on the device."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.first = first
        self.slot = torch.empty(1, dtype=torch.int64, device=device)
        self.staging = torch.empty(1, dtype=torch.int64, device="cpu")

    def stage(self, step: int) -> None:
        self.slot.copy_(self.staging.fill_(self.first + step - 1))

    def current(self) -> Tensor:
        return self.slot


class PositionArray:
    """Uploads all positions once; each step copies its own into a fixed slot on the device."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.array = torch.arange(first, first + steps, device="cpu").to(device)
        self.slot = torch.empty(1, dtype=torch.int64, device=device)

    def stage(self, step: int) -> None:
        self.slot.copy_(self.array[step - 1 : step])

    def current(self) -> Tensor:
        return self.slot


class CountedPosition:
    """Increments the position in place with a kernel, without a copy."""

    def __init__(self, first: int, steps: int, device: torch.device) -> None:
        self.slot = torch.full((1,), first - 1, dtype=torch.int64, device=device)

    def stage(self, step: int) -> None:
        pass

    def current(self) -> Tensor:
        return self.slot.add_(1)


class Readback(Protocol):
    """Transfers the chosen tokens to the host. `before` and `after` enclose the launches of a decode step."""

    behind: bool  # whether a chosen token still needs the copy that `before` starts

    def before(self) -> None:
        """Start work that can overlap with the step."""

    def after(self, token: Tensor) -> int | None:
        """Return the token that the host knows now: this step's, the previous step's, or None if none has arrived."""

    def arrived(self) -> int | None:
        """Wait for the copy that `before` started and return its token; None if there is none."""

    def close(self) -> None:
        """Wait for a copy in flight before the memory that it reads is freed."""


class WaitForToken:
    """Reads each token as soon as it is chosen, which blocks the host."""

    behind = False

    def __init__(self, device: Device) -> None:
        self._device = device

    def before(self) -> None:
        pass

    def after(self, token: Tensor) -> int:
        return int(token.item())

    def arrived(self) -> None:
        pass

    def close(self) -> None:
        pass


class PollToken(WaitForToken):
    """Polls mapped memory, to which a kernel writes each token as soon as it is chosen."""

    def after(self, token: Tensor) -> int:
        return self._device.poll(token)


class ReadOneBehind:
    """Reads the token of the previous step on a second stream into pinned memory while this step runs.

    Tokens alternate between two slots on the host and two on the device (see `Step`). A slot is reused two steps later; by then
    the host has waited for the copy, so neither side overwrites data that the other still reads.
    """

    def __init__(self, device: Device) -> None:
        self.streams = Streams(device.torch)
        self.slots = list(torch.empty(2, 1, dtype=torch.int64, device="cpu", pin_memory=self.streams.real))
        self.token: Tensor | None = None
        self.under_way = self.behind = False

    def before(self) -> None:
        assert self.token is not None  # set by `after` in the prefill
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
    """A second stream, and the two events that order it with the current stream. Does nothing on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.real = device.type != "cpu"
        self.device = device
        if self.real:
            self.module = torch.get_device_module(device)
            self.second = self.module.Stream(device=device)
            self._chosen, self._copied = self.module.Event(), self.module.Event()

    def chosen(self) -> None:
        """Record on the current stream that the token has been chosen."""
        if self.real:
            self._chosen.record(self.module.current_stream(self.device))

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Enter the second stream, which waits until the token has been chosen. `wait` waits for the end of this scope."""
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


def _given(known: int | None) -> int:
    """Return `known`. It is never None here: `Strategy` makes strategies that upload tokens wait for them."""
    assert known is not None
    return known


INPUTS: dict[str, Callable[[Model], Inputs]] = {"host": UploadedToken, "host-row": UploadedRow, "device": SampledToken}
POSITIONS: dict[str, Callable[[int, int, torch.device], Positions]] = {
    "host": UploadedPosition,
    "array": PositionArray,
    "device": CountedPosition,
}
READBACKS: dict[str, Callable[[Device], Readback]] = {
    "wait": WaitForToken,
    "overlap": ReadOneBehind,
    "ring": PollToken,  # until the loop begins, or without one
}
