"""`Prefix`: the beginning of a prompt, fed once, from which several runs of `generate` start."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from toolkit.core.errors import ModelError, brief
from toolkit.core.numbers import LARGEST, integer
from toolkit.core.remote import Remote
from toolkit.core.units import plural
from toolkit.decode.compile_ahead import compile_ahead
from toolkit.models.cache import Cache
from toolkit.models.chunks import chunk_of
from toolkit.models.model import Model, check_model
from toolkit.text.prompts import prompt_ids


def most_positions(model: Model) -> int:
    """Return the largest context of `model`. An exported model may support fewer positions than its config."""
    most: int = getattr(model, "context", model.config.max_position_embeddings)
    return most


def check_context(model: Model, context: object) -> int:
    """Return `context` as an int. Raises ModelError unless the model has that many positions."""
    most = most_positions(model)
    if (found := integer(context, 1, most)) is None:
        why, do = f"this model has positions for 1 to {most:,}", "Give a number in this range"
        if most < model.config.max_position_embeddings:
            why = f"the package was exported for contexts up to {most:,}"
            do = "Give a number from 1 to that, or export the model again with a larger context"
        raise ModelError(f"a context of {brief(context)}", why, do)
    return found


def check_chunk(chunk: object) -> int:
    """Return the number of prompt tokens to feed at a time as an int. Raises ModelError unless it is one."""
    if (found := integer(chunk, 1, LARGEST)) is None:
        raise ModelError("prefill in chunks", f"prefill_chunk={brief(chunk)}", "Give a whole number from 1 to 2**63 - 1")
    return found


class Prefix:
    """The first tokens of a prompt in a cache. `generate(model, prompt, prefix=prefix)` feeds only the rest of the prompt.

    After each run the cache is rolled back, so that the next run starts from the same state. For that, copies of the sliding
    windows and recurrent states are made before the first run; they take `kept_bytes` of device memory until `free`.
    """

    def __init__(
        self, model: Model, ids: Sequence[int], context: int, *, kv: str | None = None, chunk: int | None = None
    ) -> None:
        """Feed `ids`, `chunk` tokens at a time, to a new cache for `context` tokens; `chunk` and `kv` as in `generate`.

        Raises ModelError if an argument is invalid or the cache is too small, and torch.OutOfMemoryError.
        """
        if isinstance(model, Remote):
            do = "Load the model without cluster=, or generate without prefix="
            raise ModelError("a prefix of a model on a cluster", "its cache would be in this process", do)
        check_model(model)
        self.model, self.ids = model, tuple(prompt_ids(model, ids))
        context, chunk = check_context(model, context), chunk_of(model) if chunk is None else check_chunk(chunk)
        self.kv = kv
        compile_ahead(model, len(self.ids), chunk, context, kv, decodes=False)
        self.kept_bytes: int | None = None  # None before the first run
        self._lock, self._freed = threading.Lock(), False
        autocast = torch.autocast(model.device.torch.type, enabled=False)  # as `generate` does
        with torch.inference_mode(False), torch.no_grad(), autocast:  # runs outside of inference mode write to the cache, too
            self.cache = model.new_cache(context, kv)
            try:
                stop = 0
                for part in torch.tensor([self.ids], device="cpu").to(model.device.torch).split(chunk, 1):
                    start, stop = stop, stop + part.shape[1]
                    model.advance(model.embed(part), self.cache.slots[start:stop], self.cache, stop)
            except BaseException:
                self.cache.free()
                raise

    def __repr__(self) -> str:
        return f"Prefix({plural(len(self.ids), 'token')} in {self.cache})"

    def check(self, model: Model, ids: Sequence[int], context: int | None, kv: str | None) -> int:
        """Return the size of the cache. Raises ModelError unless a run of `model` on the prompt `ids` can start here."""
        if context is not None or kv is not None:
            found = f"context={context!r}, kv={kv!r}"
            raise ModelError("a run with a prefix", found, "Leave them out, because the prefix brings its own cache")
        self._check_held()
        if model is not self.model:
            raise ModelError("a run with a prefix", "another model fed it", "Make a prefix with this model")
        if tuple(ids[: len(self.ids)]) != self.ids or len(ids) == len(self.ids):
            found = f"the prompt of {len(ids):,} tokens doesn't continue the {len(self.ids):,} tokens of the prefix"
            raise ModelError("a run with a prefix", found, "Give a prompt that begins with the prefix and is longer")
        room = self.cache.context
        if len(ids) > room:
            asked, found = f"a prompt of {plural(len(ids), 'token')}", f"the cache of the prefix holds {room:,}"
            do = f"Shorten the prompt by {plural(len(ids) - room, 'token')}, or make the prefix with context={len(ids):,}"
            raise ModelError(asked, found, do, prompt=len(ids), context=room)
        return room

    @contextmanager
    def in_use(self) -> Iterator[Cache]:
        """Return the cache for one run, and roll it back afterwards. Raises ModelError while another run uses it."""
        with self._alone("a run with a prefix", "Run one after the other, or make two prefixes"):
            self._check_held()  # another thread may have freed it since `check`
            try:
                self._roll_back()  # in case an interrupt kept the last run from it
                if self.kept_bytes is None:
                    before = self.model.device.memory().allocated_bytes
                    self.cache.checkpoint()
                    self.kept_bytes = self.model.device.memory().allocated_bytes - before
                yield self.cache
            finally:
                self._roll_back()

    @contextmanager
    def _alone(self, asked: str, do: str) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise ModelError(asked, "another run uses it now", do)
        try:
            yield
        finally:
            self._lock.release()

    def _check_held(self) -> None:
        if self._freed:
            raise ModelError("a run with a prefix", "it was freed", "Make another one")

    def _roll_back(self) -> None:
        if self.kept_bytes is not None:
            self.cache.rollback(len(self.ids))

    def free(self) -> None:
        """Free the device memory of the cache. No run can start from it any more. Raises ModelError while a run uses it."""
        with self._alone("freeing a prefix", "Free it after the run"):
            self._freed = True
            self.cache.free()
