"""`tk.generate`, and the decode loop that all strategies share.

`generate` checks its arguments, records the run and collects the tokens. `_decode` is the loop around a `Step`, which combines
the parts that the strategy names. A model may replace it with a loop of its own. Step 0 is the prefill; steps 1, 2, ... decode
one token each; strategies that read tokens one step late read the last one in one more step, called "drain".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor

from toolkit.core.distributed import WHOLE, Shard, check_same
from toolkit.core.errors import ModelError, brief
from toolkit.core.numbers import integer
from toolkit.core.progress import check_cancel
from toolkit.core.remote import Remote
from toolkit.core.units import plural
from toolkit.decode.compile_ahead import compile_ahead
from toolkit.decode.parts import READBACKS, Readback
from toolkit.decode.prefix import Prefix, check_chunk, check_context, most_positions
from toolkit.decode.run import AFTER, RECORDED, Run, tokens_per_s
from toolkit.decode.sampling import FLAGS, Sampling, checked
from toolkit.decode.step import Fallback, Step
from toolkit.decode.strategies import STRATEGIES, OwnLoop, Strategy, find_strategy, strategies_of
from toolkit.kernels.filters import NO_TOKEN
from toolkit.models.cache import Cache
from toolkit.models.cache_codes import check_kv
from toolkit.models.chunks import chunk_of
from toolkit.models.model import Model, check_model
from toolkit.text.prompts import StopText, TextStream, prompt_ids

SMALL = 1 << 24  # numbers in a model that one thread computes as quickly as several
AHEAD = 64  # tokens that "whole-loop" computes at most before the host has looked for a stop string in them


def generate(
    model: Model | Remote,
    prompt: str | Sequence[int] | Tensor,
    decode: str | Strategy | OwnLoop = "double-buffered",
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    seed: int = 0,
    stop: str | Sequence[str] = (),
    context: int | None = None,
    kv: str | None = None,
    prefix: Prefix | None = None,
    prefill_chunk: int | None = None,
    fallback: bool = False,
    eos: Collection[int] | None = None,
    on_token: Callable[[int, str], None] | None = None,
    cancel: threading.Event | None = None,
    record: bool = True,
    lines: bool = True,
) -> Run:
    """Generate up to `max_new_tokens` tokens after `prompt` with the strategy `decode`.

    Args:
        model: A model from `tk.load` or `tk.load_exported`. One that a cluster holds generates on all ranks; the trace then has
            the events of all of them.
        prompt: Text, or token ids: a sequence of ints, or a tensor [T] or [1, T].
        decode: The name of a strategy (see `tk.STRATEGIES`) or a `Strategy`. A model loaded with engine="hf" also offers
            "hf-generate", the `generate` method of transformers, which returns all tokens at the end.
        max_new_tokens: The number of tokens to generate, at most. The text also ends where the context is full.
        temperature, top_k, top_p, min_p, repetition_penalty, logit_bias, seed: See `toolkit.decode.sampling.Sampling`. With
            temperature 0, the default, the most probable token is chosen. A warning then names filters that have no effect.
        stop: Strings that end the text, which then ends before the first of them. The device may have computed more tokens by
            then, which are dropped: one under strategies that read tokens a step late, at most 64 under "whole-loop".
        context: The number of positions in the cache, for the prompt and all new tokens but the last. Default: as many as the
            run needs, at most those of the model.
        kv: The format of keys and values in the cache: "int8", "int4", "k4v8" (4-bit keys, 8-bit values), or None for the
            model's dtype. Layers with a sliding window are small and always keep the model's dtype.
        prefix: A `Prefix` that holds the beginning of the prompt and the cache. Only the rest of the prompt is fed.
        prefill_chunk: The number of prompt tokens that are fed at a time. Default: chosen from the sizes of the model and the
            GPU's memory, from 512 to 2,048 (see `toolkit.models.chunks`). `Run.prefill_chunk` is the number used.
        fallback: Whether a strategy that captures graphs goes on without them if it can't capture this model on this device.
            `Run.fallback` then holds the reason. Default: an error.
        eos: The token ids that end the text. Default: the model's own; `()` for none.
        on_token: Called as `on_token(id, text)` on this thread as soon as the host knows a token. Text that may be the
            beginning of a stop string is passed with a later token. With `stop` under "whole-loop", it must not wait for the
            GPU, whose loop waits for the host after 64 tokens. Gradients are off in it.
        cancel: An event that stops the run between two steps once it is set; the tokens so far are kept. On a cluster, it
            interrupts all ranks, which lose their tokens, and CancelledError is raised.
        record: Whether to record a trace, which makes the run slower.
        lines: Whether to record the source line of each copy, which costs time, too.

    The model computes in its own dtype, also inside of `torch.autocast`, which only "hf-generate" follows.

    Returns the text, its tokens, the rate and the trace. For example, `tk.generate(model, "Once").copies()` is a table of the
    copies of each step.

    Raises ModelError for an invalid prompt or option, and, under every strategy of the toolkit but not under "hf-generate", if
    no token can be chosen because logits are NaN or infinite; UnknownNameError for an unknown strategy or `kv`; DeviceError if
    the strategy captures graphs and the device, the model or one of its operations doesn't support that; and RecorderError if
    another thread records a run on this device, or generates while this run is to be recorded, and for a model on a cluster
    inside of a block that records or measures this process.
    """
    asked = {name: value for name, value in locals().items() if name != "model"}
    if not isinstance(model, Remote):
        check_model(model)
    sampling, asked = checked(asked)
    fallback, record, lines = (asked[name] for name in FLAGS)
    if isinstance(model, Remote):
        return model.generate(**asked)  # type: ignore[no-any-return]
    strategy = find_strategy(decode, {**STRATEGIES, **strategies_of(model)})
    ids = prompt_ids(model, prompt)
    if prefix is not None:
        if not isinstance(prefix, Prefix):
            raise ModelError("a run with a prefix", f"prefix={brief(prefix)}", "Give a toolkit.decode.prefix.Prefix")
        context = prefix.check(model, ids, context, kv)
    context, limit = _room(model, len(ids), max_new_tokens, context)
    if isinstance(strategy, OwnLoop):
        _check_own_loop(strategy, prefix, kv)
    chunk = None if prefill_chunk is None else check_chunk(prefill_chunk)
    ends, stops = _ends(model) if eos is None else _given_ends(model, eos), _stops(model, stop)
    check_cancel(cancel, ModelError)
    if on_token is not None and not callable(on_token):
        raise ModelError("tokens as they come", f"on_token={brief(on_token)}", "Give a function of a token id and its text")
    _check_ranks(
        model, strategy, cancel, prompt=ids, decode=strategy, max_new_tokens=limit, context=context, sampling=sampling,
        kv=kv, prefill_chunk=chunk, stop=stops, eos=sorted(ends), fallback=fallback,
    )  # fmt: skip
    cancel = cancel or threading.Event()
    device, text = model.device, _Text(model, ends, stops, on_token)
    known_ns: list[int] = []
    fallen = Fallback(fallback)
    after = AFTER if device.torch.type == "cuda" and device.recorded else ""
    slowed = RECORDED if record or device.recording is not None else after
    recording = device.record(lines=lines, exclusive=True) if record else device.unrecorded()
    if isinstance(strategy, OwnLoop):
        learnt, late, chunk = strategy.run(ids, limit, sampling, ends, cancel), False, None
    else:
        fallen.check(model, strategy)
        chunk = chunk or chunk_of(model)
        rest = len(ids) if prefix is None else len(ids) - len(prefix.ids)
        compile_ahead(model, rest, chunk, context, prefix.kv if prefix is not None else kv, limit > 1, cancel)
        request = _Request(ids, limit, context, kv, prefix, chunk, ends, AHEAD if stops else None)
        learnt, late = _decode(model, strategy, sampling, request, cancel, fallen), strategy.readback == "overlap"
    autocast = nullcontext() if isinstance(strategy, OwnLoop) else torch.autocast(device.torch.type, enabled=False)
    with recording as trace, torch.no_grad(), autocast, _few_threads(model), closing(learnt):
        for token, at_ns in learnt:
            check_token(token, len(known_ns))
            known_ns.append(at_ns)
            if text.add(token, last=len(known_ns) == limit):
                break
    invented = trace is not None and bool(trace.meta.get("sizes_only"))
    reason = text.ended or ("length" if len(text.tokens) == limit else "cancelled")
    return Run(
        text="" if invented else text.text(),  # sizes only: the token ids are meaningless
        tokens=tuple(text.tokens),
        prompt_tokens=tuple(ids),
        strategy=strategy.name,
        stop_reason=reason,
        tok_per_s=tokens_per_s(known_ns, late),
        clock=device.clock,
        device=device.name,
        recorded=trace,
        fallback=fallen.reason,
        prefill_chunk=chunk,
        slowed=slowed,
        context_full=reason == "length" and bool(limit < max_new_tokens),
    )


def _check_own_loop(strategy: OwnLoop, prefix: Prefix | None, kv: str | None) -> None:
    """Raise ModelError if a loop that makes its own cache should use another one, and UnknownNameError for an unknown `kv`."""
    if kv is not None:
        check_kv(kv)
    if prefix is not None or kv is not None:
        given = "a prefix" if kv is None else f"kv={kv!r}"
        do = "Leave out kv= and prefix=" if prefix is None else 'Leave it out, or use decode="double-buffered"'
        raise ModelError(f"{strategy.name} with {given}", "its loop makes its own cache", do)


@contextmanager
def _few_threads(model: Model) -> Iterator[None]:
    """Compute a small model of a virtual GPU with one thread.

    Each of its operations takes microseconds. Threads that wait for each other after each one take more processor time than the
    operations, and on a busy machine several times as long. `torch.set_num_threads` applies to the calling thread and to
    threads started later. Concurrent runs therefore all restore the number that the first of them found.
    """
    global _usual_threads
    if model.device.torch.type != "vgpu" or sum(x.numel() for x in model.parameters()) > SMALL:
        yield
        return
    this = threading.get_ident()
    with _counting:
        if not _few:
            _usual_threads = torch.get_num_threads()
        _few.append(this)
        torch.set_num_threads(1)
    try:
        yield
    finally:
        with _counting:
            _few.remove(this)
            if this not in _few:
                torch.set_num_threads(_usual_threads)


_counting = threading.Lock()
_few: list[int] = []  # the thread of each run inside `_few_threads`; twice if a callback generates
_usual_threads = 1  # outside of these runs


def _check_ranks(model: Model, strategy: Strategy | OwnLoop, cancel: threading.Event | None, **facts: Any) -> None:
    """Check that all ranks of a divided model do the same run, and begin it at the same time."""
    shard: Shard = getattr(model, "shard", WHOLE)
    by_itself = isinstance(strategy, Strategy) and strategy.capture == "loop" and model.device.clock == "measured"
    if shard != WHOLE and by_itself and facts["stop"]:
        found = "the hosts of the ranks would end the loops of their GPUs at different steps"
        raise ModelError(f"{strategy.name} with stop= over {shard.ranks} ranks", found, 'Use decode="cuda-graph"')
    if shard != WHOLE and cancel is not None:
        found = "ranks would stop at different steps, and wait for each other"
        raise ModelError(f"cancel= with a model over {shard.ranks} ranks", found, "Interrupt the processes instead")
    check_same(shard, "generating", **facts)
    if shard != WHOLE:
        model.device.meet()


def check_token(token: int, number: int) -> int:
    """Return `token`, which the host was told as token `number` of the text, counted from 0.

    Raises ModelError if it is NO_TOKEN.
    """
    if token != NO_TOKEN:
        return token
    found = "the highest logit is NaN or infinite, or all are -infinity"
    do = "Look for NaN or infinite weights, results beyond the range of the dtype, and a logit_bias that excludes all tokens"
    raise ModelError(f"choosing token {number} of the text", found, do)


class _Text:
    """The tokens of a run, and its text, which ends at an end token or before a stop string."""

    def __init__(
        self, model: Model, ends: Collection[int], stops: Sequence[str], on_token: Callable[[int, str], None] | None
    ) -> None:
        self.tokens: list[int] = []
        self.ended: str | None = None  # "eos" or "stop"
        self._ends, self._on_token, self._asked = ends, on_token, bool(on_token or stops)  # for the text of each token
        self._stream, self._stop = TextStream(model.tokenizer), StopText(stops)
        self._pieces: list[str] = []

    def add(self, token: int, *, last: bool) -> bool:
        """Add a token, which is the `last` that was asked for or not, and return whether the text ends here."""
        self.tokens.append(token)
        if token in self._ends:
            self.ended, piece = "eos", self._rest()
        elif not self._asked:
            return False
        else:
            piece = self._stop.add(self._stream.piece(token))
            if last and not self._stop.found:
                piece += self._rest()
            if self._stop.found:
                self.ended = "stop"
        self._pieces.append(piece)
        if self._on_token is not None:
            self._on_token(token, piece)
        return self.ended is not None

    def text(self) -> str:
        """Return the whole text: the pieces that `on_token` is given, and what was held back."""
        if not self._asked:
            self._pieces = self._stream.pieces(self.tokens[:-1] if self.ended else self.tokens)
        return "".join(self._pieces) + self._rest()

    def _rest(self) -> str:
        """Return the text that was held back, after the last token."""
        return self._stop.add(self._stream.rest()) + self._stop.rest()


@dataclass(frozen=True)
class _Request:
    """The prompt of a run and its limits. `ahead` is how many tokens a loop may compute before the host has read them."""

    ids: list[int]
    limit: int
    context: int
    kv: str | None
    prefix: Prefix | None
    chunk: int
    ends: Collection[int]
    ahead: int | None


def _decode(
    model: Model, strategy: Strategy, sampling: Sampling, request: _Request, cancel: threading.Event, fallback: Fallback
) -> Generator[tuple[int, int], None, None]:
    """Yield up to `limit` pairs (token id, time in ns) as soon as the host knows each token. `close()` frees the memory."""
    device = model.device
    used = ExitStack()  # each part is freed even if an interrupt keeps another from it
    try:
        with device.step(0, "prefill"):
            cache = used.enter_context(_own_cache(model, request) if request.prefix is None else request.prefix.in_use())
            step = Step(model, strategy, sampling, cache, request.ids, request.limit, fallback)
            used.callback(step.free)
            token = step.prefill(request.chunk, cancel)
            if token is None:
                return
            readback = READBACKS[strategy.readback](device)
            used.callback(readback.close)
            known = readback.after(token)
        if known is not None:
            yield known, device.now_ns()
        yield from _steps(step, readback, known, request, cancel)
    except torch.OutOfMemoryError as error:
        clear_frames(error.__traceback__)  # a notebook keeps the traceback, whose frames hold the activations
        raise
    finally:
        used.close()


@contextmanager
def _own_cache(model: Model, request: _Request) -> Iterator[Cache]:
    """Return an empty cache, and free it afterwards."""
    cache = model.new_cache(request.context, request.kv)
    try:
        yield cache
    finally:
        cache.free()


def _steps(
    step: Step, readback: Readback, known: int | None, request: _Request, cancel: threading.Event
) -> Generator[tuple[int, int], None, None]:
    """Yield the tokens of decode steps 1, 2, ... `known` is the first token, if the host has read it.

    The host waits for the first token before it launches the next step: whoever waits for a text sees it earlier by the time
    that the launches take. A loop that the first step has captured yields the token of that step, and generates the rest.
    """
    device, number = step.device, 0
    for number in range(1, request.limit):
        if cancel.is_set():
            break
        with device.step(number, "decode"):
            readback.before()
            if number == 1 and known is None:
                known = readback.arrived()
                assert known is not None
                yield known, device.now_ns()
                if cancel.is_set():
                    break
            token = step.run(number, known)
            known = readback.after(token) if step.loop is None else None
        if known is not None:
            yield known, device.now_ns()
        if step.loop is not None:
            yield from step.loop.run(request.limit - number, request.ends, cancel.is_set, request.ahead, first=number + 1)
            return
    if readback.behind:
        with device.step(number + 1, "drain"):
            readback.before()
            known = readback.arrived()
        if known is not None:
            yield known, device.now_ns()


def _room(model: Model, prompt: int, max_new_tokens: int, context: int | None) -> tuple[int, int]:
    """Return the size of the cache and the number of tokens to generate. The last token is not written to the cache."""
    new = integer(max_new_tokens, least=1)
    if new is None:
        raise ModelError("generating", f"max_new_tokens={brief(max_new_tokens)}", "Give a whole number of at least 1")
    room = min(most_positions(model), prompt + new - 1) if context is None else check_context(model, context)
    if prompt > room:
        found, asked = f"the context holds {room:,}", f"a prompt of {plural(prompt, 'token')}"
        do = f"Shorten the prompt by {plural(prompt - room, 'token')}"
        do += "" if context is None or prompt > most_positions(model) else f", or give context={prompt}"
        raise ModelError(asked, found, do, prompt=prompt, context=room)
    return room, min(new, room - prompt + 1)


def _ends(model: Model) -> frozenset[int]:
    """Return the token ids that end a text: those of the tokenizer, else those of the config."""
    return frozenset(getattr(model.tokenizer, "eos_ids", ()) or model.config.eos_token_ids)


def _stops(model: Model, stop: object) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(each, str) and each for each in stops):
        raise ModelError(
            "strings that end the text", f"stop={brief(stop)}", "Give a string that isn't empty, or a list of them"
        )
    if stops and model.tokenizer is None:
        raise ModelError("strings that end the text", "this model came without a tokenizer", "Give token ids as eos= instead")
    return tuple(stops)


def _given_ends(model: Model, eos: object) -> frozenset[int]:
    texts, last = str | bytes | bytearray, model.config.vocab_size - 1
    ids: list[int | None] = [None]
    if isinstance(eos, Collection) and not isinstance(eos, texts):
        with suppress(TypeError):  # an array without dimensions
            ids = [integer(i, 0, last) for i in eos]
    if None in ids:
        do = f"Give a collection of ids from 0 to {last:,}, such as [2], or () for none"
        raise ModelError("tokens that end the text", f"eos={brief(eos)}", do)
    return frozenset(i for i in ids if i is not None)
