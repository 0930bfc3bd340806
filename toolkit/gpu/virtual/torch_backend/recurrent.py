# mypy: allow-untyped-calls, no-warn-return-any, no-warn-unused-ignores
# (PyTorch's extension points carry no types.)
"""nn.RNN, nn.LSTM and nn.GRU on the virtual GPU: one operation, `_cudnn_rnn`, as on CUDA.

A module on the device packs its weights into one buffer (a D2D copy each). Under autocast, every call packs their casts.
The CPU's kernels compute the values, and the gradients by running the forward pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.backends.cudnn import CUDNN_TENSOR_DTYPES

from toolkit.gpu.virtual.dispatch import SPECIAL, machine
from toolkit.gpu.virtual.dispatch_keys import Including
from toolkit.gpu.virtual.effects.recurrent import MODES
from toolkit.gpu.virtual.host_kernels import HOSTS
from toolkit.gpu.virtual.scratch.recurrent import dropout_state_bytes, reserve_bytes
from toolkit.gpu.virtual.tensor import VirtualTensor
from toolkit.gpu.virtual.torch_backend import module

aten = torch.ops.aten
Tensor = torch.Tensor
_flatten = nn.RNNBase.flatten_parameters


# ---- weights


def _flatten_parameters(self: nn.RNNBase) -> None:
    """Pack the weights of a module on the virtual GPU into one buffer; those of other devices as before."""
    weights: list[Any] = self._flat_weights
    if weights and weights[0].dtype not in CUDNN_TENSOR_DTYPES:  # bfloat16: every call packs them
        return
    if not weights or not all(isinstance(w, VirtualTensor) for w in weights) or len({w.dtype for w in weights}) > 1:
        _flatten(self)
        return
    if len({w.data_ptr() for w in weights}) < len(weights):
        return
    with torch.no_grad():
        for weight, part in zip(weights, _packed(weights, weights[0].dtype), strict=True):
            weight.data = part


def _packed(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return copies of the weights that are views of one buffer."""
    buffer, parts, start = weights[0].new_empty(sum(w.numel() for w in weights), dtype=dtype), [], 0
    for weight in weights:
        parts.append(buffer[start : start + weight.numel()].view(weight.shape).detach())
        start += weight.numel()
    for part, weight in zip(parts, weights, strict=True):
        part.copy_(weight)
    return parts


def _buffer_of(weights: list[Tensor]) -> Tensor | None:
    """Return the buffer that the weights were packed into; None if they were not."""
    start = weights[0].data_ptr()
    for weight in weights:
        if weight.data_ptr() != start:
            return None
        start += weight.nbytes
    with torch.no_grad():
        return weights[0].detach().as_strided((sum(w.numel() for w in weights),), (1,))


# ---- dropout between layers


class _Dropout:
    """The state of cuDNN's random numbers, which a new seed replaces."""

    state: Tensor | None = None
    owner: Any = None
    seeded = False


def _dropout_state(x: Tensor, dropout: float, train: bool) -> Tensor | None:
    if not train or not dropout:
        return None
    card = machine()
    if _Dropout.state is None or _Dropout.owner is not card or _Dropout.seeded:
        x.new_zeros((), dtype=torch.int64).item()  # the seed, which CUDA draws on the device
        _Dropout.state, _Dropout.owner = x.new_empty(dropout_state_bytes(), dtype=torch.uint8), card
        _Dropout.seeded = False
    return _Dropout.state


def _note_seed(seed: Callable[[int], None]) -> Callable[[int], None]:
    def manual_seed(number: int) -> None:
        _Dropout.seeded = True
        seed(number)

    return manual_seed


# ---- the operations


def _whole(mode: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the operations of `mode` for padded and for packed sequences."""

    def padded(
        x: Tensor, state: Any, weights: list[Tensor], biases: bool, layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        x = x.transpose(0, 1) if batch_first else x
        out, *states = _run(mode, x, state, weights, biases, layers, dropout, train, bidirectional, [])
        return out.transpose(0, 1) if batch_first else out, *states

    def packed(
        x: Tensor, batch_sizes: Tensor, state: Any, weights: list[Tensor], biases: bool, layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        return _run(mode, x, state, weights, biases, layers, dropout, train, bidirectional, batch_sizes.tolist())

    return padded, packed


def _run(
    mode: str, x: Tensor, state: Any, weights: list[Tensor], biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    h, c = state if mode == "lstm" else (state, None)
    hidden, projected = (c if c is not None else h).shape[2], h.shape[2] if c is not None and h.shape[2] != c.shape[2] else 0
    cached = _dropout_state(x, dropout, train)
    if torch.is_autocast_enabled("vgpu") and weights[0].dtype == torch.float32:
        dtype = torch.get_autocast_dtype("vgpu")
        weights = _packed(weights, dtype)
        c = None if c is None else c.to(dtype)
        h, x = h.to(dtype), x.to(dtype)
    buffer = _buffer_of(weights)
    if buffer is None or not biases:  # cuDNN's weights always have biases, so that a buffer without them is not used (RNN.cpp)
        weights = _packed(weights, weights[0].dtype)
        buffer = _buffer_of(weights)
    per_layer = 2 + 2 * biases + bool(projected)
    out, h, c, _, _ = aten._cudnn_rnn(
        x, weights, per_layer, buffer, h, c, MODES.index(mode), hidden, projected, layers, False, dropout, train,
        bidirectional, batch_sizes, cached,
    )  # fmt: skip
    return (out, h, c) if mode == "lstm" else (out, h)


# ---- values


def _host_run(
    x: Tensor, weights: list[Tensor], per_layer: int, h: Tensor, c: Tensor | None, mode: int, projected: int, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_sizes: list[int],
) -> tuple[Tensor, ...]:  # fmt: skip
    operation = getattr(aten, MODES[mode])
    state = h if c is None else [h, c]
    rest = (weights, per_layer - bool(projected) == 4, layers, dropout, train, bidirectional)
    if batch_sizes:
        return operation.data(x, torch.tensor(batch_sizes), state, *rest)
    return operation.input(x, state, *rest, False)


def _forward(
    x: Tensor, weights: list[Tensor], per_layer: int, buffer: Tensor, h: Tensor, c: Tensor | None, mode: int, hidden: int,
    projected: int, layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
    batch_sizes: list[int], state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    seed = torch.randint(1 << 62, (1,)) if dropout and train and not x.is_meta else None
    with _seeded(seed):
        out, *states = _host_run(
            x, weights, per_layer, h, c, mode, projected, layers, dropout, train, bidirectional, batch_sizes
        )  # fmt: skip
    steps = x.numel() // x.shape[-1]
    size = reserve_bytes(steps, hidden, layers, 1 + bidirectional, mode, x.element_size(), dropout if train else 0.0)
    reserve = torch.empty(size if train else 0, dtype=torch.uint8)
    if seed is not None:
        reserve[: seed.nbytes] = seed.view(torch.uint8)  # copies of the reserve are as good
    return out.contiguous(), *(x.contiguous() for x in states), *([] if c is not None else [h.new_empty(0)]), reserve, buffer


@contextmanager
def _seeded(seed: Tensor | None) -> Iterator[None]:
    """Draw random numbers from `seed` [1] in this block, and go on as before after it; None changes nothing."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(seed))
        yield


def _backward(
    x: Tensor, weights: list[Tensor], per_layer: int, buffer: Tensor, h: Tensor, c: Tensor | None, out: Tensor,
    grad_out: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, mode: int, hidden: int, projected: int,
    layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool, batch_sizes: list[int],
    state: Tensor | None, reserve: Tensor, wanted: list[bool],
) -> tuple[Any, ...]:  # fmt: skip
    """Return the gradients of input, states and weights; those of the weights are views of one buffer."""
    if not train:
        raise RuntimeError("cudnn RNN backward can only be called in training mode")
    flat = torch.empty_like(buffer)
    parts, start = [], 0
    for weight in weights:
        parts.append(flat[start : start + weight.numel()].view(weight.shape))
        start += weight.numel()
    if x.is_meta:
        return torch.empty_like(x), torch.empty_like(h), None if c is None else torch.empty_like(c), parts
    seed = reserve[:8].clone().view(torch.int64) if dropout else None
    with Including("AutogradFunctionality", "ADInplaceOrView"), _seeded(seed), torch.enable_grad():
        leaves = [y.detach().requires_grad_() for y in (x, h, *([] if c is None else [c]), *weights)]
        inputs, (first, *cell) = leaves[0], leaves[1 : 2 + (c is not None)]
        results = _host_run(
            inputs, leaves[-len(weights) :], per_layer, first, cell[0] if cell else None, mode, projected, layers, dropout,
            train, bidirectional, batch_sizes,
        )  # fmt: skip
        given = [(r, g) for r, g in zip(results, (grad_out, grad_h, grad_c), strict=False) if g is not None]
        grads = torch.autograd.grad([r for r, _ in given], leaves, [g for _, g in given], allow_unused=True)
    for part, grad in zip(parts, grads[-len(weights) :], strict=True):
        part.copy_(torch.zeros_like(part) if grad is None else grad)
    dense = [torch.zeros_like(y) if g is None else g.contiguous() for y, g in zip(leaves, grads, strict=True)]
    return dense[0], dense[1], None if c is None else dense[2], parts


def _handler(mode: str) -> Callable[[Any], Any]:
    """Return the handlers of `mode` where PyTorch leaves out autograd: in inference mode."""
    functions = dict(zip(("input", "data"), _whole(mode), strict=True))
    return lambda func: lambda args, kwargs: functions[func._overloadname](*args, **kwargs)


def register() -> list[torch.library.Library]:
    """Register recurrent networks for the virtual GPU, with and without autograd. The caller keeps the libraries alive."""
    library = torch.library.Library("aten", "IMPL")
    for mode in MODES:
        for name, function in zip(("input", "data"), _whole(mode), strict=True):
            for key in ("AutogradPrivateUse1", "PrivateUse1"):
                library.impl(f"{mode}.{name}", function, key)
        SPECIAL[mode] = _handler(mode)
    HOSTS["_cudnn_rnn"], HOSTS["_cudnn_rnn_backward"] = _forward, _backward
    return [library]


def install() -> None:
    """Make recurrent modules pack their weights on the virtual GPU, in this process."""
    nn.RNNBase.flatten_parameters = _flatten_parameters  # type: ignore[method-assign]
    module.manual_seed = module.manual_seed_all = _note_seed(module.manual_seed)  # type: ignore[assignment]
