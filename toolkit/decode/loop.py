"""`tk.generate`, and the decode loop that all strategies share.

`generate` checks its arguments, records the run and collects the tokens. `_decode` is the loop: it combines the parts that the
strategy names (see `parts`). A model may replace it with a loop of its own. Step 0 is the prefill; steps 1, 2, ... decode one
token each; double buffering reads its last token in one more step, called "drain".
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from traceback import clear_frames

import torch
from torch import Tensor

from toolkit.core.errors import ModelError
from toolkit.decode.parts import INPUTS, POSITIONS, READBACKS, Choice
from toolkit.decode.run import Run, tokens_per_s
from toolkit.decode.sampling import Sampling
from toolkit.decode.strategies import STRATEGIES, OwnLoop, Strategy, find_strategy, strategies_of
from toolkit.models.cache import Cache
from toolkit.models.cache_codes import check_kv
from toolkit.models.model import Model
from toolkit.text.prompts import TextStream, prompt_ids


def generate(
    model: Model,
    prompt: str | Sequence[int] | Tensor,
    decode: str | Strategy | OwnLoop = "double-buffered",
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    context: int | None = None,
    kv: str | None = None,
    prefill_chunk: int = 512,
    eos: Collection[int] | None = None,
    on_token: Callable[[int, str], None] | None = None,
    cancel: threading.Event | None = None,
    record: bool = True,
    lines: bool = True,
) -> Run:
    """Generate up to `max_new_tokens` tokens after `prompt` with the strategy `decode`.

    Args:
        model: A model from `tk.load` or `tk.load_exported`.
        prompt: Text or token ids.
        decode: The name of a strategy (see `tk.STRATEGIES`) or a `Strategy`. A model loaded with engine="hf" also offers
            "hf-generate", the `generate` method of transformers, which returns all tokens at the end.
        temperature, top_k, top_p, seed: See `Sampling`; temperature 0 is greedy.
        context: The number of positions in the cache. Default: as many as the run needs.
        kv: The format of keys and values in the cache: "int8", "int4", "k4v8" (4-bit keys, 8-bit values), or None for the
            model's dtype. Layers with a sliding window are small and always keep the model's dtype.
        prefill_chunk: The number of prompt tokens that are fed at a time.
        eos: The token ids that end the text. Default: the model's own; `()` for none.
        on_token: Called as `on_token(id, text)` on this thread as soon as the host knows a token.
        cancel: An event that stops the run between two steps once it is set; the tokens so far are kept.
        record: Whether to record a trace. On a real GPU recording costs time.
        lines: Whether to record the source line of each copy, which costs time, too.

    Raises ModelError for an invalid prompt or option, UnknownNameError for an unknown strategy or `kv`.
    """
    strategy = find_strategy(decode, {**STRATEGIES, **strategies_of(model)})
    sampling = Sampling(temperature, top_k, top_p, seed)
    ids = prompt_ids(model, prompt)
    context, limit = _room(model, len(ids), max_new_tokens, context)
    if kv is not None and check_kv(kv) and isinstance(strategy, OwnLoop):
        raise ModelError(f"{strategy.name} with kv={kv!r}", "its loop makes its own cache", "Leave out kv=")
    if not _is_count(prefill_chunk):
        raise ModelError("prefill in chunks", f"prefill_chunk={prefill_chunk!r}", "Give a whole number from 1 on")
    ends = _ends(model) if eos is None else _given_ends(eos)
    if cancel is not None and not hasattr(cancel, "is_set"):
        raise ModelError("a way to cancel", f"cancel={cancel!r:.80}", "Give a threading.Event, and set it to stop")
    cancel = cancel or threading.Event()
    device, stream = model.device, TextStream(model.tokenizer)
    tokens: list[int] = []
    known_ns: list[int] = []
    recording = device.record(lines=lines) if record else nullcontext()
    if isinstance(strategy, OwnLoop):
        learnt, late = strategy.run(ids, limit, sampling, ends, cancel), False
    else:
        learnt, late = (
            _decode(model, strategy, sampling, ids, limit, (context, kv), prefill_chunk, cancel),
            strategy.readback != "wait",
        )
    with recording as trace, torch.no_grad(), closing(learnt):
        for token, at_ns in learnt:
            tokens.append(token)
            known_ns.append(at_ns)
            if on_token is not None:
                on_token(token, "" if token in ends else stream.piece(token))
            if token in ends:
                break
    ended = bool(tokens) and tokens[-1] in ends
    invented = trace is not None and device.recording is None and bool(trace.meta.get("sizes_only"))
    return Run(
        text="" if invented else _text(model, tokens[:-1] if ended else tokens),  # sizes only: the token ids are meaningless
        tokens=tuple(tokens),
        prompt_tokens=tuple(ids),
        strategy=strategy.name,
        stop_reason="eos" if ended else "length" if len(tokens) == limit else "cancelled",
        tok_per_s=tokens_per_s(known_ns, late),
        clock=device.clock,
        device=device.name,
        recorded=trace,
    )


def _decode(
    model: Model, strategy: Strategy, sampling: Sampling, ids: list[int], limit: int, room: tuple[int, str | None],
    chunk: int, cancel: threading.Event,
) -> Generator[tuple[int, int], None, None]:  # fmt: skip
    """Yield up to `limit` pairs (token id, time in ns) as soon as the host knows each token. `close()` frees the cache."""
    device, step = model.device, 0
    cache: Cache | None = None
    readback = READBACKS[strategy.readback](device.torch)
    try:
        with device.step(0, "prefill"):
            context, kv = room
            cache = model.new_cache(context) if kv is None else model.new_cache(context, kv)
            positions = POSITIONS[strategy.position](len(ids), limit - 1, device.torch)
            where = device.torch if strategy.sampler == "device" else torch.device("cpu")
            choice, inputs = Choice(sampling, model.config.vocab_size, where), INPUTS[strategy.token](model)
            logits = _prefill(model, inputs.prompt(torch.tensor([ids]), chunk), cache, cancel)
            if logits is None:
                return
            token = choice.choose(logits)
            known = readback.after(token)
        if known is not None:
            yield known, device.now_ns()
        for step in range(1, limit):
            if cancel.is_set():
                break
            with device.step(step, "decode"):
                readback.before()
                x = inputs.next(token, known)
                hidden = model.advance(x, positions.next(step), cache, len(ids) + step)
                token = choice.choose(model.logits(hidden).view(-1))
                known = readback.after(token)
            if known is not None:
                yield known, device.now_ns()
        if readback.behind:
            with device.step(step + 1, "drain"):
                readback.before()
                known = readback.arrived()
            if known is not None:
                yield known, device.now_ns()
    except torch.OutOfMemoryError as error:
        clear_frames(error.__traceback__)  # a notebook keeps the traceback, whose frames hold the activations
        raise
    finally:
        readback.close()
        if cache is not None:
            cache.free()


def _prefill(model: Model, parts: Iterator[Tensor], cache: Cache, cancel: threading.Event) -> Tensor | None:
    """Feed the embedded prompt in parts [1, T, hidden]. Returns the logits [vocab] of the last token, None if cancelled."""
    stop = 0
    for x in parts:
        if cancel.is_set():
            return None
        start, stop = stop, stop + x.shape[1]
        hidden = model.advance(x, cache.slots[start:stop], cache, stop)
    logits: Tensor = model.logits(hidden[:, -1:]).view(-1)
    return logits


def _room(model: Model, prompt: int, max_new_tokens: int, context: int | None) -> tuple[int, int]:
    """Return the size of the cache and the number of tokens to generate. The last token is not written to the cache."""
    most = getattr(model, "context", model.config.max_position_embeddings)  # an exported model may support fewer positions
    if not _is_count(max_new_tokens):
        raise ModelError("generating", f"max_new_tokens={max_new_tokens!r}", "Give a whole number from 1 on")
    if context is not None and not (_is_count(context) and context <= most):
        raise ModelError(
            f"a context of {context!r}", f"this model has positions for 1 to {most:,}", "Give a number in this range"
        )
    room = min(most, prompt + max_new_tokens - 1) if context is None else context
    if prompt > room:
        do = f"Shorten the prompt by {prompt - room:,} tokens" + ("" if context is None else f", or give context={prompt:,}")
        raise ModelError(f"a prompt of {prompt:,} tokens", f"the context holds {room:,}", do, prompt=prompt, context=room)
    return room, min(max_new_tokens, room - prompt + 1)


def _ends(model: Model) -> frozenset[int]:
    """Return the token ids that end a text: those of the tokenizer and those of the config."""
    return frozenset(getattr(model.tokenizer, "eos_ids", ())) | frozenset(model.config.eos_token_ids)


def _given_ends(eos: object) -> frozenset[int]:
    ids = eos if isinstance(eos, Collection) and not isinstance(eos, str) else None
    if ids is None or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError("tokens that end the text", f"eos={eos!r:.80}", "Give a collection of ids such as [2], or () for none")
    return frozenset(ids)


def _text(model: Model, tokens: list[int]) -> str:
    return model.tokenizer.decode(tokens) if model.tokenizer is not None and tokens else ""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
