"""Memory of recurrent networks on cuDNN: workspace, reserved space for the gradient, and copies that cuDNN reads contiguously.

The order of allocations is that of ATen/native/cudnn/RNN.cpp, which also chooses the algorithm. cuDNN gives no formula for its
workspace. The one here follows from the workspaces of 309 networks on an H200 (PyTorch 2.11, CUDA 13.0, cuDNN 9.19) that
differ in one size at a time: it gives all but eight of them to within 512 bytes. Six of these are modules in bfloat16, for
which cuDNN asks for less; it does not under autocast. Not measured were inference with the standard algorithm, which is
modelled as training, and inference of bidirectional nn.GRU and nn.RNN.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.gpu.virtual.effects.recurrent import MODES, is_small
from toolkit.gpu.virtual.scratch.cub import SMS
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Make, Script, Take, brief, scratch

_KEPT = (1, 1, 5, 6)  # values of a step and hidden unit that each mode keeps for the gradient
_STATE_BYTES = 24 * 2048  # random-number state of the resident threads of one multiprocessor
_WORKSPACE = 8 << 20  # for each layer and direction
_ALIGNMENT = 256

# The workspace in values, for each hidden unit: (a of the steps of all sequences, a of the sequences in each layer).
_SMALL_FORWARD = ((6, 4), (6, 4), (21, 8), (16, 4))  # by mode: persistent kernels for small hidden sizes, any pass
_SMALL_TRAINING = ((12, 6), (12, 6), (15, 12), (17, 6))  # and for the gradient
_STANDARD = ((3, 3), (3, 3), (4, 6), (3, 3))
_STANDARD_BOTH_WAYS = ((10, 10), (10, 10), (12, 16), (10, 10))


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


def _small_values(
    x: torch.Tensor, mode: int, batch: int, hidden: int, layers: int, ways: int, train: bool, dropout: float
) -> int:
    size, steps = x.shape[-1], x.numel() // x.shape[-1]
    both, lstm = ways - 1, MODES[mode] == "lstm"
    a, b = _SMALL_FORWARD[mode]
    a += both * (9 if lstm else 8) + (ways if lstm and dropout else 0)
    forward = steps * (size + a * hidden) + (b * ways + 2 * both) * batch * hidden * layers
    if not train:
        return forward
    inputs = max(2 * size + ways**2 * max(size, hidden), (4 * ways - 1) * hidden if layers > 1 else 0)
    a, b = _SMALL_TRAINING[mode]
    return max(forward, steps * (inputs + (a + 3 * both) * hidden) + (b * ways + 2 * both) * batch * hidden * layers)


def _standard_values(
    x: torch.Tensor, mode: int, batch: int, hidden: int, projected: int, layers: int, ways: int, packed: bool
) -> int:
    size, steps = x.shape[-1], x.numel() // x.shape[-1]
    a, b = (_STANDARD, _STANDARD_BOTH_WAYS)[ways - 1][mode]
    lstm, cells = MODES[mode] == "lstm", batch * layers
    if packed and mode < MODES.index("lstm"):
        a, b = (2, 1) if ways == 1 else (8 if layers > 1 else 6, 6)
    values = steps * a * hidden + b * cells * hidden
    if not packed:  # copies of the padded operands
        values += (
            steps * ((size if lstm else 2 * size) + ways * (projected or hidden)) + (4 if lstm else 2) * ways * cells * hidden
        )
    return values + (steps * hidden - 2 * (hidden - projected) * cells if projected else 0)


def _workspace(
    x: torch.Tensor, weights: list[torch.Tensor], h: torch.Tensor, mode: int, hidden: int, projected: int, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_sizes: list[int], *, backward: bool = False,
) -> Take:  # fmt: skip
    """Return the workspace of a pass: 8 MiB for each layer and direction, the matrices, and values of the steps."""
    packed, ways, batch = bool(batch_sizes), 1 + bidirectional, h.shape[1]
    if is_small(mode, hidden, x.dtype, projected, packed, backward=backward):
        values = _small_values(x, mode, batch, hidden, layers, ways, train, dropout)
    else:
        values = _standard_values(x, mode, batch, hidden, projected, layers, ways, packed)
    matrices = sum(w.numel() for w in weights if w.dim() == 2)
    lengths = 0 if packed else 32 * math.ceil(batch / 4)
    return Take(_WORKSPACE * layers * ways + (matrices + values) * x.element_size() + lengths + _ALIGNMENT)


def _contiguous(*tensors: Any) -> list[Take]:
    return [Take(x.nbytes) for x in tensors if x is not None and not x.is_contiguous()]


@scratch("_cudnn_rnn")
def _forward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    (x, weights), h, (mode, hidden, projected, layers), (dropout, train, both, sizes) = (
        args[:2],
        args[4],
        args[6:10],
        args[11:15],
    )
    workspace = _workspace(x, weights, h, mode, hidden, projected, layers, dropout, train, both, sizes)
    made = [Make(0), Make(1), Make(2), workspace, Make(3), Free(workspace)]
    return [*_contiguous(x), *made, MAKE_RESULTS]


@scratch("_cudnn_rnn_backward")
def _backward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Gradients of input and states, then of the weights. Results without a gradient get zeros."""
    x, h, c, gradient = args[0], args[4], args[5], args[7]
    zeros = [Take(state.nbytes) for state, grad in ((h, args[8]), (c, args[9])) if state is not None and grad is None]
    zeros += [Take(args[6].nbytes)] if gradient is None else []
    options = (*args[10:14], *args[15:19])
    workspace, copied, again = _workspace(x, args[1], h, *options, backward=True), _contiguous(x, gradient), _contiguous(x)
    data = [*copied, Make(0), Make(1), Make(2), *brief(workspace.n_bytes), *map(Free, reversed(copied))]
    return [*zeros, *data, *again, MAKE_RESULTS, *brief(workspace.n_bytes)]
