"""`Exported`: a loaded package with the interface of a model, whose layers run compiled code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from toolkit.core.current_layer import in_layer
from toolkit.core.errors import ModelError
from toolkit.exporting.pieces import LEAST, tensors_of
from toolkit.models.cache import Cache, check_one_sequence, check_room
from toolkit.models.cache_codes import check_kv
from toolkit.models.layers import Residual, RMSNorm
from toolkit.models.model import CausalLM
from toolkit.ops.define import aligned

Run = Callable[[list[Tensor]], list[Tensor]]  # the compiled code of a piece for one method


class Exported:
    """An exported model, which `tk.generate` and `tk.compare` accept like a loaded one.

    `context` is the longest sequence that its caches hold, `kv` their format, and `package` the package's absolute path.
    Prefill and decode share one copy of the weights. `model(ids)` runs the uncompiled model on these weights.
    """

    def __init__(self, model: CausalLM, package: Path, manifest: Mapping[str, Any], runs: Mapping[str, Run]) -> None:
        """Combine `model`, which holds the package's weights, and `runs`, its compiled code by file name."""
        self.inner, self.package, self._made = model, package, (manifest, runs)
        self.config, self.device, self.dtype = model.config, model.device, model.dtype
        self.embed, self.tokenizer = model.embed, model.tokenizer
        self.context, self.chunk, self.kv, self._least = (manifest[name] for name in ("context", "chunk", "kv", "least"))
        held = dict(model.named_parameters())
        one = torch.ones(1, dtype=model.dtype, device=model.device.torch)
        self._layers: list[tuple[int, list[Tensor], dict[str, Run]]] = []
        for piece in manifest["pieces"]:
            weights = [one if name is None else held[name] for name in piece["weights"]]
            methods = {method: runs[file] for method, file in manifest["compiled"][piece["like"]].items()}
            if piece["layer"] is None:
                self._head = methods["decode"], weights
            else:
                self._layers.append((piece["layer"], weights, methods))
        post, eps, scalar = manifest["last"]
        self._post: RMSNorm | None = None
        if post is not None:
            self._post = RMSNorm(held[post].shape[0], eps)
            self._post.weight = held[post]
        self._scalar = None if scalar is None else held[scalar]

    def __repr__(self) -> str:
        return f"Exported({self.package}, context {self.context:,}, {self.device.name})"

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)  # not set yet while the object is created or copied
        return getattr(self.inner, name)

    def __copy__(self) -> Exported:
        return Exported(self.inner, self.package, *self._made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Exported:
        """Copy the weights. Both models run the same compiled code."""
        return Exported(copy.deepcopy(self.inner, memo), self.package, *self._made)

    def __reduce__(self) -> NoReturn:
        found = "its compiled code is loaded into this process"
        raise ModelError(f"pickling {self!r}", found, f'Load it there: tk.load_exported("{self.package}")')

    def __call__(self, ids: Tensor) -> Tensor:
        found: Tensor = self.inner(ids)
        return found

    def new_cache(self, context: int, kv: str | None = None) -> Cache:
        """Return a cache for `context` tokens. Raises ModelError if the package was exported for fewer, or for another `kv`."""
        if kv not in (None, self.kv):
            check_kv(kv)
            found = f"the package was exported with kv={self.kv!r}"
            raise ModelError(f"a cache with kv={kv!r}", found, f"Export the model again with kv={kv!r}")
        context = check_room(context)
        if context > self.context:
            found = f"the package was exported for contexts up to {self.context:,}"
            raise ModelError(
                f"a context of {context:,}", found, f"Export the model again with context={context}", context=self.context
            )
        return self.inner.new_cache(max(context, self._least), self.kv)

    def advance(self, x: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        """Return the hidden states [1, T, hidden] of embedded tokens `x` [1, T, hidden] at `positions` [T]."""
        check_one_sequence(x)
        tokens = x.shape[1]
        found = [
            self._pass(x[:, start:stop], positions[start:stop], cache, length - (tokens - stop))
            for start, stop in parts_of(tokens, self.chunk)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def logits(self, x: Tensor) -> Tensor:
        """Return fp32 logits [1, T, vocab] of hidden states [1, T, hidden]."""
        run, weights = self._head
        found = [run([part.contiguous(), *weights])[0] for part in x.split(1, 1)]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def _pass(self, x: Tensor, positions: Tensor, cache: Cache, length: int) -> Tensor:
        method = "decode" if x.shape[1] == 1 else "prefill"
        reaches = self.inner.reaches(positions, cache, length)
        positions = aligned(positions)  # otherwise each layer's code would copy them
        shared = [*(r.numbers[: r.bound] for r in reaches.values()), *cache.ropes.values()]
        x, given = self.inner.enter(x)
        x = x.contiguous()
        added = torch.zeros_like(x)
        lent: dict[int, list[Tensor]] = {}
        for layer, weights, compiled in self._layers:
            source = self.inner.source(layer)
            states = [*tensors_of(cache.states[source]), *lent.get(source, ())]
            inputs = [x, added, positions, *given[layer : layer + 1], *shared, *states, *weights]
            with in_layer(layer):
                x, added, *lent[layer] = compiled[method](inputs)
        return Residual(x, added, self._post, self._scalar).sum()


def parts_of(tokens: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of the parts in which `tokens` are processed: `LEAST` to `most` tokens each, or single tokens."""
    start = 0
    while most >= LEAST and tokens - start >= LEAST:
        size = min(tokens - start, most)
        rest = tokens - start - size
        if 0 < rest < LEAST <= size - (LEAST - rest):
            size -= LEAST - rest  # leave enough tokens for another part of at least `LEAST`
        yield start, (start := start + size)
    yield from ((one, one + 1) for one in range(start, tokens))
