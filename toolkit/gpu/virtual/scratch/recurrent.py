"""Memory of recurrent networks on cuDNN: workspace, reserved space for the gradient, and copies that cuDNN reads contiguously.

The order of allocations is that of ATen/native/cudnn/RNN.cpp, the sizes are those of PyTorch 2.11 with CUDA 13.0 on an H200
(`tests/programs/h200.json`, recurrent.*). cuDNN gives no formula for its workspace: 8 MiB for each layer and direction were
measured, and as many bytes as the weights. The rest, up to 6.1 per cent of both, is not modelled.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.gpu.virtual.scratch.cub import SMS
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Make, Script, Take, brief, scratch

MODES = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # cudnnRNNMode_t
_KEPT = (1, 1, 5, 6)  # values of a step and hidden unit that each mode keeps for the gradient
_STATE_BYTES = 24 * 2048  # random-number state of the resident threads of one multiprocessor
_WORKSPACE = 8 << 20
_ALIGNMENT = 256


def dropout_state_bytes() -> int:
    """Return the bytes of cuDNN's state for dropout."""
    return SMS * _STATE_BYTES


def reserve_bytes(steps: int, hidden: int, layers: int, directions: int, mode: int, itemsize: int, dropout: float) -> int:
    """Return the bytes that are kept for the gradient: values inside the cells, outputs of inner layers, and dropout masks.

    `steps` are those of all sequences of the batch.
    """
    outputs = steps * hidden * directions
    masks = (layers - 1) * math.ceil(outputs / 8) if dropout else 0
    return itemsize * outputs * (layers * _KEPT[mode] + layers - 1) + masks + _ALIGNMENT


def _workspace(weights: list[torch.Tensor], layers: int, bidirectional: bool) -> Take:
    return Take(_WORKSPACE * layers * (1 + bidirectional) + sum(w.nbytes for w in weights))


def _contiguous(*tensors: Any) -> list[Take]:
    return [Take(x.nbytes) for x in tensors if x is not None and not x.is_contiguous()]


@scratch("_cudnn_rnn")
def _forward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    workspace = _workspace(args[1], args[9], args[13])
    made = [Make(0), Make(1), Make(2), workspace, Make(3), Free(workspace)]
    return [*_contiguous(args[0]), *made, MAKE_RESULTS]


@scratch("_cudnn_rnn_backward")
def _backward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Gradients of input and states, then of the weights. Results without a gradient get zeros."""
    x, h, c, gradient = args[0], args[4], args[5], args[7]
    zeros = [Take(state.nbytes) for state, grad in ((h, args[8]), (c, args[9])) if state is not None and grad is None]
    zeros += [Take(args[6].nbytes)] if gradient is None else []
    workspace, copied, again = _workspace(args[1], args[13], args[17]), _contiguous(x, gradient), _contiguous(x)
    data = [*copied, Make(0), Make(1), Make(2), *brief(workspace.n_bytes), *map(Free, reversed(copied))]
    return [*zeros, *data, *again, MAKE_RESULTS, *brief(workspace.n_bytes)]
