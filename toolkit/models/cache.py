"""The cache of a sequence: memory that is allocated once, updated in place, and shared by prefill and decode.

Each layer has one state: the keys and values of every position (`KeysValues`) or of a sliding window (`Ring`), or a recurrent
state. Positions are passed with every write as a tensor on the device, so the host never needs to know them. `Reach` computes
once for all layers of a kind where new tokens are written and which slots they attend to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from toolkit import ops
from toolkit.core.errors import ModelError, brief
from toolkit.core.numbers import LARGEST, integer
from toolkit.core.units import bytes_text, plural
from toolkit.kernels.shared_keys import stored_numbers
from toolkit.ops import HeadLayout, Operand, Projected
from toolkit.ops.reference.attention import hidden_slots

BOUND_MULTIPLE = 256  # attention reads a multiple of this many slots, which limits the number of distinct shapes


@dataclass(frozen=True)
class Reach:
    """Where T new tokens are written and which slots they attend to, for all layers of one kind.

    `positions` [T] ascend by one, on the device. `bound` is the number of slots to read, and `numbers` holds their indices from
    0 on. `size` is the size of a ring and `window` that of its sliding window; both are None if every position has a slot of
    its own. `slots` and `mask` are computed on first use, because kernels don't need them.
    """

    positions: Tensor
    bound: int
    numbers: Tensor
    size: int | None = None
    window: int | None = None

    @cached_property
    def slots(self) -> Tensor:
        """The slot of each token: [T]."""
        return self.positions if self.size is None else self.positions % self.size

    @cached_property
    def mask(self) -> Tensor:
        """The mask that is added to the scores: [T, S] in fp32.

        S is the bound; several tokens in a ring add T for their own keys. The position in each slot of a ring follows from the
        first new position p, on the device: before p is written, slot s of a ring of size R holds the last position before p
        that is congruent to s modulo R. A negative result means that the slot is empty.
        """
        held, positions = self.numbers[: self.bound], self.positions
        if self.size is not None:
            last = positions if positions.shape[0] == 1 else positions[:1] - 1  # the newest one in the ring when it is read
            held = last - (last - held) % self.size
            held = held if positions.shape[0] == 1 else torch.cat((held, positions))
        return hidden_slots(held, positions, self.window)


class KeysValues:
    """Keys and values of `context` positions: [1, KV heads, context, head_dim] each. The slot index equals the position.

    With a `key_dim`, only so many numbers of each key are stored. The others equal the value's if queries, instead of keys, are
    multiplied by the keys' weight (see `toolkit.kernels.shared_keys`). Empty slots are zero: attention reads beyond the current
    length and masks the result, and a NaN would survive the mask.
    """

    key_dim = 0  # whole keys

    def __init__(
        self, kv_heads: int, context: int, head_dim: int, dtype: torch.dtype, device: torch.device, key_dim: int = 0
    ) -> None:
        self.key_dim = key_dim
        shape = (1, kv_heads, context)
        self.keys = torch.zeros(*shape, key_dim or head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, head_dim, dtype=dtype, device=device)

    def write(self, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Write `key` and `value` [1, KV heads, T, head_dim] to `slots` [T], which are distinct and on the device."""
        self.keys.index_copy_(2, slots, stored_numbers(key, self.keys.shape[3]))
        self.values.index_copy_(2, slots, value)

    def read(self, bound: int) -> tuple[Tensor, Tensor]:
        """Return views of the first `bound` slots: [1, KV heads, bound, key_dim or head_dim] each."""
        return self.keys[:, :, :bound], self.values[:, :, :bound]

    def extend(self, key: Tensor, value: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
        """Append new tokens [1, KV heads, T, head_dim] and return all keys and values, in the order of `reach.mask`."""
        self.write(key, value, reach.slots)
        return self.read(reach.bound)

    def attend(
        self, heads: HeadLayout, row: Projected, q_weight: Tensor, k_weight: Tensor, rope: Tensor, reach: Reach, scale: float,
        quantize: bool = False,
    ) -> Operand:  # fmt: skip
        """Normalize and rotate the heads of `row`, append the tokens and attend, with kernels: [1, T, H * D].

        `quantize` as in `ops.attend`.
        """
        query = ops.write_heads(heads, row, q_weight, k_weight, rope, reach.positions, self.keys, self.values)
        return self.look(query, reach, scale, quantize)

    def look(self, query: Tensor, reach: Reach, scale: float, quantize: bool = False) -> Operand:
        """Return the attention [1, T, H * D] of query [1, T, H, D] on the cache (its own tokens included), with a kernel."""
        return ops.attend(query, self.keys, self.values, reach.positions, scale, bound=reach.bound, quantize=quantize)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values


class Ring(KeysValues):
    """Keys and values of the last `window` positions; position p is in slot p modulo the size of the ring.

    The ring has min(window, context) slots. If the whole context fits, nothing is overwritten, and the size of its `Reach` is
    None. Otherwise, a single token overwrites the one that leaves its window. Several tokens could overwrite keys that the
    first of them still needs, so attention reads the ring and the new keys side by side, and the last of the new keys are
    written afterwards.
    """

    def __init__(
        self, kv_heads: int, window: int, context: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(kv_heads, min(window, context), head_dim, dtype, device)
        self.size = min(window, context)

    def extend(self, key: Tensor, value: Tensor, reach: Reach) -> tuple[Tensor, Tensor]:
        if key.shape[2] == 1 or reach.size is None:
            return super().extend(key, value, reach)
        held_keys, held_values = self.read(reach.bound)
        seen = torch.cat((held_keys, key), 2), torch.cat((held_values, value), 2)
        self.write_last(key, value, reach)
        return seen

    def attend(
        self, heads: HeadLayout, row: Projected, q_weight: Tensor, k_weight: Tensor, rope: Tensor, reach: Reach, scale: float,
        quantize: bool = False,
    ) -> Operand:  # fmt: skip
        at = reach.positions
        if at.shape[0] == 1 or reach.size is None:
            return super().attend(heads, row, q_weight, k_weight, rope, reach, scale, quantize)
        query, key, value = ops.make_heads(heads, row, q_weight, k_weight, rope, at)
        out = ops.attend(query, self.keys, self.values, at, scale, self.size, reach.bound, (key, value))
        self.write_last(key, value, reach)
        return out

    def look(self, query: Tensor, reach: Reach, scale: float, quantize: bool = False) -> Operand:
        window = reach.size or 0
        return ops.attend(query, self.keys, self.values, reach.positions, scale, window, reach.bound, quantize=quantize)

    def write_last(self, key: Tensor, value: Tensor, reach: Reach) -> None:
        """Write the last of T new keys and values [1, KV heads, T, head_dim]: as many as the ring holds."""
        self.write(key[:, :, -self.size :], value[:, :, -self.size :], reach.slots[-self.size :])


class Recurrent:
    """Recurrent states of fixed size, by name, initially zero. Rolling back needs a checkpoint."""

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], device: torch.device) -> None:
        self.states = {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes.items()}

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.states.values())


State = KeysValues | Recurrent


def check_room(context: object) -> int:
    """Return the number of tokens that a new cache shall hold as an int. Raises ModelError unless it is one."""
    if (found := integer(context, 1, LARGEST)) is None:
        asked = f"a cache for {brief(context)} tokens"
        raise ModelError(asked, "not a whole number of at least 1", "Give the tokens of a prompt and its text together")
    return found


def check_one_sequence(x: Tensor) -> None:
    """Raise ModelError unless x [B, T, hidden] holds one sequence, as a cache does."""
    if x.shape[0] != 1:
        raise ModelError(
            f"{x.shape[0]} sequences at once", "a cache holds one", "Feed each sequence separately, with a cache of its own"
        )


class Cache:
    """The states of all layers for one sequence of at most `context` tokens, and the rotary tables of its positions.

    `states[layer]` is None for a layer that reads the state of another one. `slots` [context] holds the numbers 0 to context -
    1 as int64. `ropes` maps the model's names to rotary tables [context, 2, head_dim].
    """

    def __init__(self, slots: Tensor, ropes: Mapping[str, Tensor]) -> None:
        self.states: list[State | None] = []
        self.slots, self.ropes = slots, dict(ropes)
        self.context = slots.shape[0]
        self.length = 0  # upper bound on the number of tokens fed
        self._kept: dict[int, list[list[Tensor]]] = {}

    def __repr__(self) -> str:
        if not self.states:
            return "Cache(freed)"
        held = sum(tensor.nbytes for state in self.states if state is not None for tensor in state.tensors())
        room = f"{self.length:,} of {plural(self.context, 'position')} filled"
        return f"Cache({plural(len(self.states), 'layer')}, {room}, {bytes_text(held)})"

    def fill(self, makers: list[Callable[[], State] | None]) -> Cache:
        """Create the states of all layers in order. If the memory does not suffice, everything is freed again."""
        try:
            self.states.extend(None if make is None else make() for make in makers)
        except torch.OutOfMemoryError:
            self.free()  # the traceback of the error would keep the allocated states alive
            raise
        return self

    def bound(self, length: int) -> int:
        """Return the number of slots to read for `length` tokens. Raises ModelError if the cache is too small."""
        if length > self.context:
            raise ModelError(
                f"{length:,} tokens", f"the cache has room for {self.context:,}", "Create the cache with a larger context="
            )
        self.length = max(self.length, length)
        return min(self.context, -(-length // BOUND_MULTIPLE) * BOUND_MULTIPLE)

    def reach(self, positions: Tensor, length: int) -> Reach:
        """Return the `Reach` of tokens at `positions` [T] (ascending by one, on the device) in layers that keep every position.

        `length` is an upper bound on the number of tokens after them. Raises ModelError if the cache is too small.
        """
        return Reach(positions, self.bound(length), self.slots)

    def ring_reach(self, positions: Tensor, length: int, window: int) -> Reach:
        """Return the `Reach` of the tokens in layers with a sliding window; see `reach`."""
        if self.context <= window:
            return self.reach(positions, length)
        return Reach(positions, min(window, self.bound(length)), self.slots, window, window)

    def checkpoint(self) -> int:
        """Save the recurrent states and rings, so that `rollback` can return to this position, and return the position.

        The copies use memory until `forget`, `free`, or a `rollback` to an earlier position.
        """
        self._kept[self.length] = [[t.clone() for t in state.tensors()] for state in self._passing()]
        return self.length

    def rollback(self, position: int) -> None:
        """Forget every token from `position` on, as if only the tokens before it had been fed.

        Keys and values of all positions stay as is. Recurrent states, and rings that have overwritten slots, are restored
        from the `checkpoint` at exactly this position. Raises ModelError if there is none; the message lists the available
        checkpoints.
        """
        if not 0 <= position <= self.length:
            raise ModelError(
                f"rollback to {position:,}", f"{self.length:,} tokens were fed", f"Give a position from 0 to {self.length:,}"
            )
        if position < self.length and position > 0:
            lost = [state for state in self._passing() if not isinstance(state, Ring) or self.length > state.size]
            if lost and position not in self._kept:
                kind = "recurrent states" if any(isinstance(s, Recurrent) for s in lost) else "sliding windows"
                known = ", ".join(f"{p:,}" for p in sorted(self._kept)) or "none"
                raise ModelError(
                    f"rollback to {position:,}",
                    f"{len(lost)} layers hold {kind}, which can't be rolled back; checkpoints: {known}",
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
        """Discard the checkpoint at `position` if there is one."""
        self._kept.pop(position, None)

    def _passing(self) -> list[State]:
        """Return the states that lose information: rings and recurrent states."""
        return [state for state in self.states if isinstance(state, Ring | Recurrent)]

    def free(self) -> None:
        """Free the device memory now, even if a traceback keeps this object alive."""
        self.states.clear()
        self._kept.clear()
        self.ropes.clear()
        self.slots = torch.empty(0)
