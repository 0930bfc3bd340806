"""Splits a model into pieces to compile: each distinct layer and the head, as functions of tensors alone.

Weights and states are inputs, so no weight exists while a piece is traced or compiled, and layers that differ only in their
values share one piece. A forward pass is a chain of layers, each of which takes and returns the residual stream and the term
that is still to be added to it (`layers.Residual`). Everything here runs on fake tensors, which have shapes and no memory.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from toolkit import ops
from toolkit.models.cache import Cache, Reach, Ring
from toolkit.models.layers import Residual, RMSNorm
from toolkit.models.model import CausalLM
from toolkit.models.problems import describe
from toolkit.ops.define import compiling_for
from toolkit.ops.products import DECODED
from toolkit.tune.cards import Card

METHODS = ("prefill", "decode")
LEAST = DECODED + 1  # minimum tokens of a prefill; fewer are decoded one by one, since matmuls of few rows use other kernels
MOST = 512  # maximum tokens of a prefill; less for ring caches and delta nets
CHUNKED = 64  # maximum for a gated delta net's reference, which solves this many tokens at once
LONGEST = 1 << 24  # maximum slots of a cache
_TRACED = 13  # tokens in an example input for the CPU: any number that is no dimension of a model

Varying = dict[int, Any] | None  # an input's dynamic dimensions, each a torch.export.Dim


@dataclass(frozen=True)
class Piece:
    """One layer, or the head (`layer` None).

    `weights` are names of the model's parameters, in the order of the piece's inputs; None stands for a tensor that holds 1.
    A piece first completes the output of the layer before it: `post_eps` is the epsilon of that layer's last norm, if it has
    one, and the norm's weight is among `weights`. Pieces with equal `like` are compiled once.
    """

    name: str
    layer: int | None
    weights: tuple[str | None, ...]
    like: str
    post_eps: float | None = None
    scaled: bool = False  # whether the last weight is a scalar that the previous layer's output is multiplied by


@dataclass(frozen=True)
class Traceable:
    """A function to trace, its fake `inputs`, and their dynamic dimensions."""

    run: nn.Module
    inputs: tuple[Tensor, ...]
    varying: tuple[Varying, ...]
    mode: FakeTensorMode


_tracing = threading.Lock()  # the target of `compiling_for` is global to the process


@contextmanager
def compiled_for(model: CausalLM, card: Card | None) -> Iterator[None]:
    """Make `model` report the device to compile for: the GPU `card`, which need not be installed, or the CPU (None).

    Nothing else can use the model meanwhile, so pass a copy (see `skeleton`). Other threads wait.
    """
    own, kind = model.device, "cpu" if card is None else "cuda:0"
    with _tracing, nullcontext() if card is None else compiling_for(card):
        model.device = SimpleNamespace(torch=torch.device(kind), name=kind)  # type: ignore[assignment]
        try:
            yield
        finally:
            model.device = own


def least_context(model: CausalLM) -> int:
    """Return the smallest number of tokens for which a package allocates caches.

    A ring cache shorter than its window would be another kind of piece. Tracing needs at least two slots in half of a cache.
    """
    return max(4, *(getattr(module, "window", None) or 0 for module in model.modules()))


def traced_context(model: CausalLM, context: int) -> int:
    """Return the number of tokens of the caches that are traced for a package for `context` tokens.

    There are more of them than a window holds. Otherwise a layer would write a prompt to its ring as to other caches, and would
    be another kind of piece.
    """
    return max(context, least_context(model) + 1)


class _Fake(FakeTensorMode):
    """Fake tensors on CUDA without a GPU. PyTorch 2.15 would start CUDA for them while a virtual GPU is in use."""

    @property
    def avoid_device_init(self) -> bool:
        return not torch.cuda.is_available()


class Anatomy:
    """The `pieces` of a model in the order in which they run, with caches for `context` tokens in the format `kv`.

    Create and use it inside `compiled_for`; the model's weights may be on any device, or on "meta".
    """

    def __init__(self, model: CausalLM, context: int, kv: str | None = None) -> None:
        self.model, self.context, self.kv = model, context, kv
        self.mode = _Fake(allow_non_fake_inputs=True)
        self.empty = partial(torch.empty, device=model.device.torch)
        self.hidden = partial(self.empty, dtype=model.dtype)
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        with self.mode, torch.no_grad():
            self.cache: Cache = model.new_cache(context, kv)
            self.longer: Cache = model.new_cache(2 * context, kv)
            left = self._left()
        self.last = left[-1]  # the norm and scalar that complete the last layer's output
        # No layer precedes the first one. It gets zeros to add, the norm that the second layer gets, and a scalar of 1, so that
        # it is the same kind of piece as later layers.
        layers = [self._layer(i, *before) for i, before in enumerate([left[0], *left[:-1]])]
        self.pieces = (*layers, self._head())
        self.chunk = self._chunk()
        # On a GPU the traced length selects the kernels' configs, so trace the longest.
        self.traced = self.chunk if model.device.torch.type == "cuda" else min(_TRACED, self.chunk)

    def distinct(self) -> tuple[Piece, ...]:
        """Return the first piece of each kind."""
        return tuple({piece.like: piece for piece in reversed(self.pieces)}.values())[::-1]

    def traceable(self, piece: Piece, method: str) -> Traceable:
        """Return the function and inputs to trace for a piece and a method. The head has only the method "decode"."""
        size, parameters = self.model.config.hidden_size, dict(self.model.named_parameters())
        with self.mode:
            weights = [self.empty(w.shape, dtype=w.dtype) for w in (parameters[name] for name in self._sample(piece))]
            x = self.hidden(1, 1 if method == "decode" else self.traced, size)
            given, varying, reaches = self._inputs(piece.layer, x)
        run = _Run(self.model, piece, self._sample(piece), self.cache, reaches)
        return Traceable(run, (*given, *weights), (*varying, *(None for _ in weights)), self.mode)

    def _inputs(self, layer: int | None, x: Tensor) -> tuple[list[Tensor], list[Varying], dict[str, Reach]]:
        """Return a piece's inputs except for weights, their dynamic dimensions, and the cache slots that it uses (`Reach`).

        The inputs of a layer are x, the term to add to it, positions, its additional input if it has one, the slots of each
        kind of cache, ropes, the states of the layer whose cache it reads, and the tensors that this layer lends to it.
        """
        if layer is None:
            return [x], [None], {}
        positions = self.empty(x.shape[1], dtype=torch.int64)
        tokens = torch.export.Dim("tokens", min=LEAST, max=self.chunk) if x.shape[1] > 1 else None
        given = [x, self.hidden(*x.shape), positions]
        if self.model.layer_input_size:
            given.append(self.hidden(1, x.shape[1], self.model.layer_input_size))
        varying: list[Varying] = [{axis: tokens} if tokens else None for axis in (1, 1, 0, 1)[: len(given)]]
        reaches = self.model.reaches(positions, self.cache, 1)
        for kind, reach in reaches.items():
            whole = reach.bound == reach.size  # a ring so small that all of it is always read
            given.append(self.empty(reach.bound if whole else (reach.size or self.context) // 2, dtype=torch.int64))
            varying.append(None if whole else {0: torch.export.Dim(f"seen_{kind}", min=2, max=reach.size or LONGEST)})
        growing = [*zip(self.cache.ropes.values(), self.longer.ropes.values(), strict=True)]
        source = self.model.source(layer)
        growing += zip(tensors_of(self.cache.states[source]), tensors_of(self.longer.states[source]), strict=True)
        for short, long in growing:
            given.append(self.empty(short.shape, dtype=short.dtype))
            varying.append(self._growing(short, long))
        for number, shape in enumerate(self._borrowed(layer, x.shape[1])):
            given.append(self.hidden(*shape))
            varying.append({2: tokens} if number >= 2 else None)
        return given, varying, reaches

    def _borrowed(self, layer: int, tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that an earlier layer lends to a layer.

        If several tokens overwrite a ring that later layers read, too, its layer returns the ring's keys and values from before
        and the new ones: [1, KV heads, slots or tokens, head_dim] each.
        """
        source = self.model.source(layer)
        state = self.cache.states[source]
        if source == layer or tokens == 1 or not isinstance(state, Ring):
            return []
        return [(*t.shape[:2], size, t.shape[3]) for size in (state.size, tokens) for t in (state.keys, state.values)]

    def _growing(self, short: Tensor, long: Tensor) -> Varying:
        """Return the dimensions of a cache's tensor that grow with the context."""
        found: dict[int, Any] = {}
        for axis, (a, b) in enumerate(zip(short.shape, long.shape, strict=True)):
            if a != b:
                name = "context" if (a, b) == (self.context, 2 * self.context) else f"slots_{axis}"
                found[axis] = torch.export.Dim(name, min=2, max=LONGEST)
        return found or None

    def _left(self) -> list[tuple[RMSNorm | None, Tensor | None]]:
        """Return the norm and scalar that are still to be applied to each layer's output."""
        found: list[tuple[RMSNorm | None, Tensor | None]] = []
        kinds: dict[str, tuple[str | None, str | None]] = {}
        for layer, block in enumerate(self.model.layers):
            kind = digest(describe(block), _shapes(self.cache.states[self.model.source(layer)]))
            if kind not in kinds:
                kinds[kind] = self._names_of_left(layer, block)
            post, scalar = kinds[kind]
            norm: Any = None if post is None else block.get_submodule(post)
            found.append((norm, None if scalar is None else block.get_parameter(scalar)))
        return found

    def _names_of_left(self, layer: int, block: nn.Module) -> tuple[str | None, str | None]:
        """Run a layer on fake tensors; return the names in it of the norm and scalar still to be applied to its output."""
        x, positions = self.hidden(1, 1, self.model.config.hidden_size), self.empty(1, dtype=torch.int64)
        reaches = self.model.reaches(positions, self.cache, 1)
        fake = {n: self.empty(p.shape, dtype=p.dtype) for n, p in block.named_parameters()}
        own = {f"model.layers.{layer}.{n}": p for n, p in fake.items()}
        own_input = [self.hidden(1, 1, self.model.layer_input_size)] if self.model.layer_input_size else []
        given = ("layer", layer, Residual(x), self.model.passing(x, self.cache, reaches), *own_input)
        out = torch.func.functional_call(_Called(self.model), own, given)
        post = None if out.post is None else next(n for n, m in block.named_modules() if m is out.post)
        return post, None if out.scalar is None else next(n for n, p in fake.items() if p is out.scalar)

    def _layer(self, layer: int, post: RMSNorm | None, scalar: Tensor | None) -> Piece:
        block = self.model.layers[layer]
        weights: list[str | None] = [*self._named(block)]
        if post is not None:
            weights.append(self._names[id(post.weight)])
        if scalar is not None:
            weights.append(self._names[id(scalar)] if layer else None)
        eps, source = None if post is None else post.eps, self.model.source(layer)
        states = [_shapes(cache.states[source]) for cache in (self.cache, self.longer)]
        like = digest(describe(block), eps, scalar is not None, source == layer, states)
        return Piece(f"layers.{layer}", layer, tuple(weights), like, eps, scalar is not None)

    def _head(self) -> Piece:
        weight = self.model.embed.weight if self.model.head is None else self.model.head
        held = weight if isinstance(weight, nn.Module) else nn.ParameterList([weight])
        weights = (*self._named(self.model.norm), *self._named(held))
        return Piece("head", None, weights, digest(describe(self.model.norm), describe(held), repr(self.model.config)))

    def _named(self, module: nn.Module) -> list[str]:
        return [self._names[id(parameter)] for parameter in module.parameters()]

    def _sample(self, piece: Piece) -> list[str]:
        """Return the names of a piece's weights, with a parameter of the same shape in place of None."""
        return [self._names[id(self.last[1])] if name is None else name for name in piece.weights]

    def _chunk(self) -> int:
        """Return the maximum tokens that a prefill processes at once: fewer than a ring cache holds, for example.

        On a GPU a delta net in fp32 uses its reference, which Inductor can't compile for a dynamic number of tokens, so its
        prompts are processed one token at a time.
        """
        most = [MOST, *(state.size - 1 for state in self.cache.states if isinstance(state, Ring))]
        if any(hasattr(state, "states") for state in self.cache.states):
            if self.model.device.torch.type == "cpu":
                most.append(CHUNKED)
            elif self.model.dtype == torch.float32:
                most.append(1)
        return min(most)


class _Run(nn.Module):
    """A piece as a function of its tensors. It registers no parameters or submodules, which would enter its graph."""

    def __init__(self, model: CausalLM, piece: Piece, names: Sequence[str], cache: Cache, reaches: dict[str, Reach]) -> None:
        super().__init__()
        self._held = (_Called(model), piece, names, cache, reaches)

    def forward(self, *given: Tensor) -> Any:
        called, piece, names, cache, reaches = self._held
        count = len(names)
        inputs, weights = given[: len(given) - count], given[len(given) - count :]
        replaced = {f"model.{name}": weight for name, weight in zip(names, weights, strict=True)}
        if piece.layer is None:
            return torch.func.functional_call(called, replaced, ("logits", inputs[0]))
        x, added, positions, *rest = inputs
        source, extra = called.model.source(piece.layer), int(called.model.layer_input_size > 0)
        counts = extra, len(reaches), len(cache.ropes), len(tensors_of(cache.states[source]))
        own_input, numbers, ropes, states, borrowed = _cut(rest, *counts)
        fresh = Cache(numbers[0], dict(zip(cache.ropes, ropes, strict=True)))
        fresh.states = [None] * len(cache.states)
        fresh.states[source] = with_tensors(cache.states[source], states)
        seen = {
            kind: replace(reach, positions=positions, bound=number.shape[0], numbers=number)
            for (kind, reach), number in zip(reaches.items(), numbers, strict=True)
        }
        settled = list(weights[len(weights) - (piece.post_eps is not None) - piece.scaled :])
        post = None if piece.post_eps is None else SimpleNamespace(weight=settled.pop(0), eps=piece.post_eps)
        residual = Residual(x, added, post, settled.pop() if piece.scaled else None)  # type: ignore[arg-type]
        own = dict(list(replaced.items())[: count - (piece.post_eps is not None) - piece.scaled])
        at = called.model.passing(x, fresh, seen)
        if borrowed:
            at.lent[source] = tuple(borrowed)
        out = torch.func.functional_call(called, own, ("layer", piece.layer, residual, at, *own_input))
        return out.x, ops.whole(out.added), *([] if borrowed else lent_by(piece.layer, at))


class _Called(nn.Module):
    """Wraps a model so that `torch.func.functional_call` can call parts of it."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self.model = model

    def __repr__(self) -> str:
        return "a model"  # called by PyTorch's tracer while the parameters are replaced

    def forward(self, what: str, *given: Any) -> Any:
        if what == "logits":
            return self.model.logits(*given)
        return self.model.run_layer(*given)


def lent_by(layer: int, at: Any) -> Sequence[Tensor]:
    """Return the tensors that a layer of a pass lends to later ones."""
    found: Sequence[Tensor] = getattr(at, "lent", {}).get(layer, ())
    return found


def _cut(rest: Sequence[Tensor], *counts: int) -> list[Sequence[Tensor]]:
    found, start = [], 0
    for count in (*counts, len(rest) - sum(counts)):
        found.append(rest[start : start + count])
        start += count
    return found


# ---- states as lists of tensors


def _places(state: Any) -> list[tuple[dict[str, Any], str]]:
    """Find a state's tensors, as (dict that holds it, key): in attributes, and in attributes that are dicts or dataclasses."""
    found = []
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            found.append((vars(state), name))
        elif isinstance(value, dict) or is_dataclass(value):
            inner = value if isinstance(value, dict) else vars(value)
            found.extend((inner, key) for key, one in inner.items() if isinstance(one, Tensor))
    return found


def tensors_of(state: Any) -> list[Tensor]:
    """Return all tensors of a layer's state, always in the same order."""
    return [holder[name] for holder, name in _places(state)]


def with_tensors(state: Any, tensors: Sequence[Tensor]) -> Any:
    """Return a copy of the state that holds other tensors."""
    found = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, dict) or is_dataclass(value):
            setattr(found, name, copy.copy(value))
    for (holder, name), tensor in zip(_places(found), tensors, strict=True):
        holder[name] = tensor
    return found


def _shapes(state: Any) -> list[Any]:
    return [type(state).__name__, *((str(t.dtype), tuple(t.shape)) for t in tensors_of(state))]


# ---- comparing layers


def digest(*described: Any) -> str:
    """Return a short hash of a description."""
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]
