"""What a model remembers of a sequence: static memory, allocated once, written in place, shared by prefill and decode.

One state a layer: keys and values of every position, of a sliding window (a ring), or a recurrent state. None of them
knows a model, nor how far decoding has come: the position is given with every write, as a tensor on the device, so that
no step needs the host to know it. Where new tokens go and what they see is worked out once for all layers (`Reach`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from toolkit import ops
from toolkit.core.errors import ModelError
from toolkit.ops import HeadLayout
from toolkit.ops.reference.attention import hidden_slots

BOUND_MULTIPLE = 256  # attention reads a whole number of these slots: few distinct shapes, little read in vain


@dataclass(frozen=True)
class Reach:
    """Where T new tokens go in the states of one kind, and what they see there; the same for every layer of that kind.

    `positions` [T] ascend by one, on the device. `bound`: how many slots are read. `numbers`: those of the slots, from 0 on.
    `size` and `window`: of a ring and its layers; None where every position is kept. What kernels work out by themselves
    (`slots`, `mask`) is made when it is first asked for.
    """

    positions: Tensor
    bound: int
    numbers: Tensor
    size: int | None = None
    window: int | None = None

    @cached_property
    def slots(self) -> Tensor:
        """Where each token is written: [T]."""
        return self.positions if self.size is None else self.positions % self.size

    @cached_property
    def mask(self) -> Tensor:
        """What is added to the scores: [T, S] in fp32. S is the bound, and for several tokens in a ring, T more: themselves.

        Which position a ring's slot holds follows from the first new one, p, on the device: before it is written, slot s of R
        holds the last position before p that is s modulo R; a negative one says that nothing was written there yet.
        """
        held, positions = self.numbers[: self.bound], self.positions
        if self.size is not None:
            last = positions if positions.shape[0] == 1 else positions[:1] - 1  # the newest in the ring when it is read
            held = last - (last - held) % self.size
            held = held if positions.shape[0] == 1 else torch.cat((held, positions))
        return hidden_slots(held, positions, self.window)


class KeysValues:
    """Keys and values of `context` positions: [1, KV heads, context, head_dim] each, slot = position.

    Zero where nothing was written yet: attention reads beyond the current length and masks it; a NaN there would survive
    the mask.
    """

    def __init__(self, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (1, kv_heads, context, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Put `key` and `value` [1, KV heads, T, head_dim] into `slots` [T] (on the device, each once)."""
        self.keys.index_copy_(2, slots, key)
        self.values.index_copy_(2, slots, value)

    def read(self, bound: int) -> tuple[Tensor, Tensor]:
        """Views of the first `bound` slots: [1, KV heads, bound, head_dim] each."""
        return self.keys[:, :, :bound], self.values[:, :, :bound]

    def extend(self, key: Tensor, value: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
        """Remember new tokens [1, KV heads, T, head_dim]; the keys and values they attend to, in the order of `reach.mask`."""
        self.write(key, value, reach.slots)
        return self.read(reach.bound)

    def attend(
        self, heads: HeadLayout, row: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Tensor, reach: Reach, scale: float
    ) -> Tensor:
        """By kernels: norm and turn the heads of `row` [T, width], remember the new tokens, attend. [1, T, H * D]."""
        query = ops.write_heads(heads, row, q_weight, k_weight, rope, reach.positions, self.keys, self.values)
        return self.look(query, reach, scale)

    def look(self, query: Tensor, reach: Reach, scale: float) -> Tensor:
        """By a kernel: attention of query [1, T, H, D] on what is held, its own tokens included. [1, T, H * D]."""
        return ops.attend(query, self.keys, self.values, reach.positions, scale, bound=reach.bound)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values


class Ring(KeysValues):
    """Keys and values of the last `window` positions; position p stands in slot p modulo the ring's size.

    The ring has min(window, context) slots: where the context fits, nothing is ever overwritten. One token is written
    over the one that leaves its window; several may overwrite what the first of them still see, so they are appended to
    what the ring held, and the last of them written after.
    """

    def __init__(
        self, kv_heads: int, window: int, context: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(kv_heads, min(window, context), head_dim, dtype, device)
        self.size = min(window, context)

    def extend(self, key: Tensor, value: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
        if key.shape[2] == 1:
            return super().extend(key, value, reach)
        held_keys, held_values = self.read(reach.bound)
        seen = torch.cat((held_keys, key), 2), torch.cat((held_values, value), 2)
        self.write(key[:, :, -self.size :], value[:, :, -self.size :], reach.slots[-self.size :])
        return seen

    def attend(
        self, heads: HeadLayout, row: Tensor, q_weight: Tensor, k_weight: Tensor, rope: Tensor, reach: Reach, scale: float
    ) -> Tensor:
        at = reach.positions
        if at.shape[0] == 1:
            query = ops.write_heads(heads, row, q_weight, k_weight, rope, at, self.keys, self.values)
            return self.look(query, reach, scale)
        query, key, value = ops.make_heads(heads, row, q_weight, k_weight, rope, at)
        out = ops.attend(query, self.keys, self.values, at, scale, self.size, reach.bound, (key, value))
        self.write(key[:, :, -self.size :], value[:, :, -self.size :], reach.slots[-self.size :])
        return out

    def look(self, query: Tensor, reach: Reach, scale: float) -> Tensor:
        return ops.attend(query, self.keys, self.values, reach.positions, scale, self.size, reach.bound)


class Recurrent:
    """States of a fixed size, by name, zero at the beginning of a sequence. They can't be taken back, only kept aside."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self.states = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.states.values())


State = KeysValues | Recurrent


def check_one_sequence(x: Tensor) -> None:
    """ModelError unless x [B, T, hidden] is one sequence, as a cache holds."""
    if x.shape[0] != 1:
        raise ModelError(f"{x.shape[0]} sequences at once", "a cache holds one", "Feed each by itself, with a cache of its own")


class Cache:
    """The states of every layer for one sequence of at most `context` tokens, and the tables their positions need.

    `states[layer]` is None for a layer that reads another layer's. `slots`: [context] int64, the numbers 0 to context - 1;
    `ropes`: rotary tables [context, 2, head_dim] by the name the model gives them.
    """

    def __init__(self, slots: Tensor, ropes: Mapping[str, Tensor]) -> None:
        self.states: list[State | None] = []
        self.slots, self.ropes = slots, dict(ropes)
        self.context = slots.shape[0]
        self.length = 0  # how many tokens have been fed, at most
        self._kept: dict[int, list[list[Tensor]]] = {}

    def fill(self, makers: list[Callable[[], State] | None]) -> Cache:
        """Make the states of all layers, in order; gives everything back where the memory doesn't suffice."""
        try:
            self.states.extend(None if make is None else make() for make in makers)
        except torch.OutOfMemoryError:
            self.free()  # the error's traceback would hold what was allocated so far
            raise
        return self

    def bound(self, length: int) -> int:
        """How many slots attention must read for `length` tokens. ModelError where the cache is too small for them."""
        if length > self.context:
            raise ModelError(f"{length:,} tokens", f"the cache has room for {self.context:,}", "Give a larger context=")
        self.length = max(self.length, length)
        return min(self.context, -(-length // BOUND_MULTIPLE) * BOUND_MULTIPLE)

    def reach(self, positions: Tensor, length: int) -> Reach:
        """Of tokens at `positions` [T] (ascending by one, on the device) in the layers that keep every position.

        `length` is how many tokens there then are, at most. ModelError where the cache is too small for them.
        """
        return Reach(positions, self.bound(length), self.slots)

    def ring_reach(self, positions: Tensor, length: int, window: int) -> Reach:
        """The same in the layers that keep a sliding window."""
        size = min(window, self.context)
        return Reach(positions, min(size, self.bound(length)), self.slots, size, window)

    def checkpoint(self) -> int:
        """Keep aside what can't be taken back (recurrent states, rings), so that `rollback` to here works. The position.

        Costs their memory once more, until `forget`, a `rollback` to before, or `free`.
        """
        self._kept[self.length] = [[t.clone() for t in state.tensors()] for state in self._passing()]
        return self.length

    def rollback(self, position: int) -> None:
        """Forget every token from `position` on, as though only that many had been fed.

        Keys and values need nothing. Rings that have come round and recurrent states have lost what they held: they come
        back from a `checkpoint` made at that very position. ModelError, naming the layers' kind and the positions that
        would do, where there is none.
        """
        if not 0 <= position <= self.length:
            raise ModelError(f"rollback to {position:,}", f"{self.length:,} tokens were fed", "Give a position among them")
        if position < self.length and position > 0:
            lost = [state for state in self._passing() if not isinstance(state, Ring) or self.length > state.size]
            if lost and position not in self._kept:
                kind = "recurrent states" if any(isinstance(s, Recurrent) for s in lost) else "sliding windows"
                known = ", ".join(f"{p:,}" for p in sorted(self._kept)) or "none"
                raise ModelError(
                    f"rollback to {position:,}",
                    f"{len(lost)} layers hold {kind}, which can't be taken back; checkpoints: {known}",
                    "Call cache.checkpoint() at the positions you will return to, or roll back to 0 and feed the tokens again",
                    checkpoints=sorted(self._kept),
                )
            if position in self._kept:
                for state, kept in zip(self._passing(), self._kept[position], strict=True):
                    for tensor, old in zip(state.tensors(), kept, strict=True):
                        tensor.copy_(old)
        if position == 0:
            for state in self._passing():
                for tensor in state.tensors():
                    tensor.zero_()
        self._kept = {p: kept for p, kept in self._kept.items() if p <= position}
        self.length = position

    def forget(self, position: int) -> None:
        """Let go of the checkpoint at `position`, if there is one."""
        self._kept.pop(position, None)

    def _passing(self) -> list[State]:
        """The states that forget: rings and recurrent ones."""
        return [state for state in self.states if isinstance(state, Ring | Recurrent)]

    def free(self) -> None:
        """Let go of the device memory now, even where a traceback still holds this object."""
        self.states.clear()
        self._kept.clear()
        self.ropes.clear()
        self.slots = torch.empty(0)
