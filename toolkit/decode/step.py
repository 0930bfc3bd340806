"""`Step`: the decode step of one run, which a strategy describes and a graph may capture."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from toolkit.core.errors import DeviceError
from toolkit.decode.parts import INPUTS, POSITIONS
from toolkit.decode.sampling import Sampler, Sampling
from toolkit.decode.strategies import Strategy, check_capture
from toolkit.gpu.device import Graph, Loop
from toolkit.models.cache import Cache
from toolkit.models.model import CausalLM, Model
from toolkit.ops.define import direct
from toolkit.ops.tape import Tape
from toolkit.ops.zeros import COUNTERS, own_counters


class Fallback:
    """Whether a run may go on without the graphs of its strategy, and why it did."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self.reason: str | None = None

    def check(self, model: Model, strategy: Strategy) -> None:
        """Check that `strategy` can capture graphs of `model`, if it has to."""
        try:
            check_capture(model, strategy)
        except DeviceError as error:
            self.use(error)

    def use(self, error: DeviceError) -> None:
        """Go on without graphs because of `error`; raises it if that isn't allowed."""
        if not self.allowed:
            raise error
        self.reason = f"{error.asked}: {error.found}"  # what to do instead has been done


def altered(model: Model) -> bool:
    """Return whether modules of the model run code of others, which played steps would miss.

    That is a module of another package, such as an adapter, a hook, compiled code, or a method of the object.
    """

    def alters(one: nn.Module) -> bool:
        foreign = type(one).__module__.partition(".")[0] not in ("toolkit", "torch")
        own = not vars(one).keys().isdisjoint(("forward", "advance", "logits"))
        return bool(foreign or own or one._forward_hooks or one._forward_pre_hooks or one._compiled_call_impl is not None)

    return _has_any_global_hook() or (isinstance(model, CausalLM) and any(map(alters, model.modules())))


class Step:
    """The prefill and the decode step of one run, on tensors that keep their addresses from step to step.

    A decode step has three parts: copies to the device (`stage` of its parts), kernels (`launch`), and sampling on the host if
    the strategy asks for it. A graph holds the kernels only.

    Tokens are written to `tokens`, one or two slots [1] int64, and what the host is told of them to `told`: the token, or
    NO_TOKEN. With readback="overlap", two slots alternate, so that the previous token can be read while this step writes its
    own; two graphs are then captured. Every step passes the cache the same upper bound of its length, so that a graph and
    separate launches compute the same.
    """

    def __init__(
        self, model: Model, strategy: Strategy, sampling: Sampling, cache: Cache, ids: Sequence[int], limit: int,
        fallback: Fallback,
    ) -> None:  # fmt: skip
        """Prepare to generate `limit` tokens after the prompt `ids`. `cache` may hold the first tokens of the prompt."""
        self.model, self.strategy, self.cache, self._fallback = model, strategy, cache, fallback
        self._held = cache.length
        self.device = model.device
        self._ids, self._limit = torch.tensor([ids], device="cpu"), limit
        self._length = len(ids) + limit - 1
        self._inputs = INPUTS[strategy.token](model)
        self._positions = POSITIONS[strategy.position](len(ids), limit - 1, self.device.torch)
        self._samples_here = strategy.sampler == "device"
        where = self.device.torch if self._samples_here else torch.device("cpu")
        self._sampler = Sampler(sampling, model.config.vocab_size, where)
        self.slots = 2 if strategy.readback == "overlap" else 1
        slots = torch.zeros(2, self.slots, 2, dtype=torch.int64, device=where)[..., :1]  # 16 bytes apart: one program for all
        self.tokens, self.told = map(list, slots)
        self._logits: list[Tensor | None] = [None] * self.slots  # for a sampler on the host
        self._graphs: list[Graph] = []  # by slot
        captures = strategy.capture != "none" and fallback.reason is None
        self._counters = torch.zeros(COUNTERS, dtype=torch.int32, device=self.device.torch) if captures else None
        self.loop: Loop | None = None  # the device's own repetition of the step, once it has been captured
        self._tapes: dict[int, Tape] = {}  # by slot
        self._taping = isinstance(model, CausalLM)  # others may launch kernels that a tape doesn't see

    def prefill(self, chunk: int, cancel: threading.Event) -> Tensor | None:
        """Feed the rest of the prompt, `chunk` tokens at a time, and return the host's view of the first token.

        Returns None if cancelled.
        """
        stop = self._held
        self._sampler.begin(self._ids[0])
        for x in self._inputs.prompt(self._ids[:, self._held :], chunk):
            if cancel.is_set():
                return None
            start, stop = stop, stop + x.shape[1]
            hidden = self.model.advance(x, self.cache.slots[start:stop], self.cache, stop)
        self._sample_from(self.model.logits(hidden[:, -1:]).view(-1), 0)
        return self.finish(0)

    def run(self, number: int, known: int | None) -> Tensor:
        """Run decode step `number`, counted from 1, and return what the host is told of its token [1].

        `known` is the previous token, if the host has read it. The first step of a run is launched kernel by kernel, which
        compiles what is missing. Graphs are captured between the times at which the host knows the first and the second token,
        an interval that rates leave out. With capture="loop", `loop` then generates the rest.
        """
        slot = number % self.slots
        self.start(number, known)
        token = self.finish(slot)
        if number == 1 and self._limit > 2:
            if self.strategy.capture == "loop":
                self._capture_loop()
            elif self.strategy.capture == "step" and self.slots == 1:
                self._graph(slot)  # with two slots, the host knows the first token only after the first step
        return token

    def start(self, number: int, known: int | None) -> None:
        """Launch decode step `number` without waiting for the device; see `run`."""
        slot = number % self.slots
        self._inputs.stage(known)
        self._positions.stage(number)
        graph = self._graph(slot) if self.strategy.capture == "step" and number > 1 else None
        if graph is None:
            self._launch_again(slot, number)
        else:
            graph.replay()

    @property
    def nodes(self) -> int | None:
        """The kernels, copies and memsets of a captured step, or None if nothing has been captured."""
        captured = self.loop or next(iter(self._graphs), None)
        return None if captured is None else captured.nodes

    def launch(self, slot: int) -> None:
        """Launch the kernels of a step, which read the slot before `slot` and write this one."""
        x = self._inputs.embedded(self.tokens[slot - 1])
        hidden = self.model.advance(x, self._positions.current(), self.cache, self._length)
        self._sample_from(self.model.logits(hidden).view(-1), slot)

    def _launch_again(self, slot: int, number: int) -> None:
        """Launch the kernels of step `number`, from a tape of an earlier step unless somebody observes how.

        The first step of each slot is not recorded, since it may compile kernels and make their plans. A graph needs no tape.
        A virtual GPU has no tapes, but models their times.
        """
        tape = self._tapes.get(slot)
        first, replayed = number <= self.slots, number > 2 * self.slots  # of the steps of this slot; the second is recorded
        if self._taping and number == self.slots + 1:
            self._taping = not altered(self.model)
        if not self._taping or first or not direct(self.cache.slots):
            with self.device.from_tape() if self._taping and replayed else nullcontext():
                self.launch(slot)
        elif tape is None or not tape.play():
            with Tape(self.device.torch) as tape:
                self.launch(slot)
            self._tapes[slot] = tape
            self._taping = tape.why_not is None

    def _captured(self, slot: int) -> None:
        """Launch the kernels of a step in a capture. They count in zeros of their own, which they leave behind as zeros."""
        assert self._counters is not None
        with own_counters(self._counters):
            self.launch(slot)

    def _capture_loop(self) -> None:
        """Capture the `loop`, unless the run goes on without graphs. A step must have been launched before."""
        if self._fallback.reason is None:
            try:
                self.loop = self.device.capture_loop(partial(self._captured, 0), self.told[0])
            except DeviceError as error:
                self._fallback.use(error)

    def free(self) -> None:
        """Wait for the graphs and free their memory, and that of the tapes, even if a traceback keeps a tape alive."""
        for tape in self._tapes.values():
            tape.refuse("the run has ended")
        self._tapes.clear()
        if self._graphs:
            self.device.sync()
        for graph in self._graphs:
            graph.free()
        self._graphs.clear()
        if self.loop is not None:
            self.loop.free()
            self.loop = None

    def _graph(self, slot: int) -> Graph | None:
        """Return the graph of the step that writes `slot`, or None without graphs. The first call captures all of them."""
        if not self._graphs and self._fallback.reason is None:
            try:
                for each in range(self.slots):
                    self._graphs.append(self.device.capture(partial(self._captured, each)))
            except DeviceError as error:
                for graph in self._graphs:  # of earlier slots
                    graph.free()
                self._graphs.clear()
                self._fallback.use(error)
        return self._graphs[slot] if slot < len(self._graphs) else None

    def _sample_from(self, logits: Tensor, slot: int) -> None:
        """Choose the token of `slot` from `logits` [vocab], or keep them for `finish`."""
        if self._samples_here:
            self._sampler.choose(logits, self.tokens[slot], self.told[slot])
        else:
            self._logits[slot] = logits

    def finish(self, slot: int) -> Tensor:
        """Return what the host is told of the token [1] of `slot`. A sampler on the host downloads the logits first."""
        logits = self._logits[slot]
        if logits is not None:
            self._sampler.choose(logits.to(torch.device("cpu")), self.tokens[slot], self.told[slot])
        return self.told[slot]
