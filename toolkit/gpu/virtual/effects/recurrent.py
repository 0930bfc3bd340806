"""Recurrent networks on cuDNN: which algorithm runs, and the copies that it makes on the device.

Source: networks with packed sequences of different lengths, and bidirectional ones, measured on an H200 with PyTorch 2.11 and
cuDNN 9.19, and `get_algo` in ATen/native/cudnn/RNN.cpp.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from toolkit.gpu.virtual.effects.effect import Effect, d2d, kernel, nbytes
from toolkit.gpu.virtual.effects.operations import rule

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # cudnnRNNMode_t


def is_small(mode: int, hidden: int, dtype: torch.dtype, projected: int, packed: bool, *, backward: bool) -> bool:
    """Return whether PyTorch asks for the algorithm for small hidden sizes (`use_rnn_persist_small_h`)."""
    gated = MODES[mode] in ("lstm", "gru")
    most = (128 if gated else 256) if backward else (192 if gated else 384)
    return dtype != torch.float64 and hidden <= most and not projected and not packed


def _joins(batch_sizes: list[int]) -> list[tuple[int, int]]:
    """Return, from the last step to the first, how many sequences were running and how many more begin to."""
    return [(later, earlier - later) for later, earlier in pairwise(reversed(batch_sizes)) if earlier > later]


@rule("_cudnn_rnn")
def _forward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """In the reverse direction of packed sequences, the states are copied whenever more sequences begin."""
    hidden, layers, bidirectional, batch_sizes = args[7], args[9], args[13], args[14]
    state = hidden * args[0].element_size()
    copies = [d2d(n * state) for join in _joins(batch_sizes) for n in join] if bidirectional else []
    return [*copies * layers, _network(args[0], args[1], out[0])]


@rule("_cudnn_rnn_backward")
def _backward(args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> list[Effect]:
    """The gradients of final states are copied where their sequences end, and those of projected states."""
    x, (mode, hidden, projected, layers), bidirectional, batch_sizes = args[0], args[10:14], args[17], args[18]
    state, joins, kind = hidden * x.element_size(), _joins(batch_sizes), MODES[mode]
    copies: list[int] = []  # numbers of states
    for (running, ends), (_, begin) in zip(reversed(joins), joins, strict=True):
        if bidirectional and kind == "gru":
            copies += [2 * running, *[1] * ends]
        elif bidirectional and kind == "lstm":
            copies += [running, ends, ends]
        copies += [begin] * (2 if kind == "lstm" else 1)
    if bidirectional and not is_small(mode, hidden, x.dtype, projected, bool(batch_sizes), backward=True):
        batch = args[4].shape[1]
        copies += [batch_sizes[-1] if batch_sizes else batch, batch] if kind == "lstm" else [batch]
    states = [d2d(n * state) for n in copies] + ([d2d(args[4].shape[1] * projected * x.element_size())] if projected else [])
    return [*states * layers, _network(x, args[1], out[0])]


def _network(x: torch.Tensor, weights: list[torch.Tensor], out: torch.Tensor) -> Effect:
    return kernel("_cudnn_rnn", nbytes(x) + sum(nbytes(w) for w in weights) + nbytes(out))
