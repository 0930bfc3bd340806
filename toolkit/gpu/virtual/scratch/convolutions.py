"""Memory of convolutions: operands that are copied, and the workspace of cuDNN's algorithm.

`toolkit.gpu.virtual.cudnn` asks cuDNN which algorithm it takes, if cuDNN is installed. Otherwise no workspace is modelled. What
cuDNN can't say without a GPU is modelled as it was measured on an H200 (`python -m tests.golden.convolutions`, 11,381 calls):

- A product with a 1 x 1 filter runs in cuBLAS, mostly without a workspace. The gradient of such a filter needs a partial sum
  in fp32 for each image, unless cuDNN takes an algorithm without a workspace.
- Kernels for Hopper need no semaphores, which cuDNN counts when it doesn't see a GPU.

Not modelled are fp64, `torch.backends.cudnn.benchmark`, which times all algorithms, and algorithms that need cuBLAS (Winograd's
and Fourier's) or share tiles among multiprocessors.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from toolkit.core.units import dtype_name
from toolkit.gpu.virtual import cudnn
from toolkit.gpu.virtual.scratch.script import MAKE_RESULTS, Args, Free, Kwargs, Make, Script, Step, Take, brief, scratch

_LAST_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_SEMAPHORE_BYTES, _ALIGNMENT = 131, 16
_HOPPER_ENGINES = {"float32": (67, 68, 71), "float16": (62, 65, 67), "bfloat16": (62, 65, 67)}
_MEASURED = "float32", "float16", "bfloat16"
_SWAPPED = {"forward": "input", "input": "forward", "weight": "weight"}  # a transposed convolution runs the other pass
_LEAST_CHANNELS = 32  # of a depthwise convolution in half precision that runs in cuDNN


class Call(NamedTuple):
    """Operands of a convolution in two or three dimensions, as ATen passes them on."""

    x: Any
    w: Any
    y: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    groups: int

    @property
    def format(self) -> torch.memory_format:
        """The memory format in which cuDNN gets its operands: channels_last if input or weight has it (ConvUtils.h)."""
        last = _LAST_FORMATS[self.x.dim()]
        wanted = any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in (self.x, self.w))
        return last if wanted else torch.contiguous_format

    @property
    def is_native(self) -> bool:
        """Whether ATen's own kernels run it: depthwise ones mostly (use_cudnn_depthwise in Convolution.cpp)."""
        channels = self.x.shape[1]
        depthwise = self.groups == channels > 1 and self.w.shape[0] % channels == 0 and not self.transposed
        if not depthwise or self.format is not torch.contiguous_format:
            return False
        is_row = self.x.dim() == 4 and self.x.shape[2] == 1 and max(self.stride) == max(self.dilation) == 1
        return not (is_row and self.x.dtype == torch.float16 and channels >= _LEAST_CHANNELS)


def call_of(x: Any, w: Any, y: Any, options: Any) -> Call | None:
    """Return the call, or None if ATen doesn't pass it to cuDNN, or nobody has measured its dtype."""
    if not torch.backends.cudnn.enabled or dtype_name(x.dtype) not in _MEASURED or not x.numel():
        return None
    stride, padding, dilation, transposed, _, groups = options
    stride, padding, dilation = (tuple(values) for values in (stride, padding, dilation))
    shape = tuple(y.shape)
    if x.dim() == 3:  # a row of pixels
        x, w, shape = _as_image(x), _as_image(w), (*shape[:2], 1, shape[2])
        stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
    return Call(x, w, shape, stride, padding, dilation, transposed, groups) if x.dim() in _LAST_FORMATS else None


def _as_image(x: Any) -> Any:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").unsqueeze(2)


def asked(call: Call, which: str) -> cudnn.Convolution:
    """Return what cuDNN is asked for one pass: "forward", or the gradient of the "input" or the "weight"."""
    x, w, y = tuple(call.x.shape), tuple(call.w.shape), call.y
    if call.transposed:
        x, y, which = y, x, _SWAPPED[which]
    dtype, last = dtype_name(call.x.dtype), call.format is not torch.contiguous_format
    lists, flags = (call.stride, call.padding, call.dilation), torch.backends.cudnn
    return cudnn.Convolution(which, x, w, y, *lists, dtype, last, flags.allow_tf32, flags.deterministic)


def workspace_bytes(call: Call, which: str) -> int:
    """Return the bytes that cuDNN allocates for one pass: "forward", or the gradient of the "input" or the "weight"."""
    if call.is_native or (plan := cudnn.plan(question := asked(call, which))) is None:
        return 0
    if math.prod(question.w[2:]) == call.groups == max(call.stride) == 1 and not any(call.padding):
        if which != "weight":
            return 0
        if not question.channels_last:
            return min(plan.workspace_bytes, 1) * question.x[0] * math.prod(question.w) * 4
    without = plan.workspace_bytes - _SEMAPHORE_BYTES
    is_hopper = plan.engine in _HOPPER_ENGINES[question.dtype]
    return without if is_hopper and without in _of_copies(question, call.x.element_size()) else plan.workspace_bytes


def _of_copies(asked: cudnn.Convolution, size: int) -> set[int]:
    """Return the workspaces that consist of copies in channels_last: none, input and output, all, all with padded channels."""
    x, w, y = asked.x, asked.w, asked.y
    x_bytes, w_bytes, y_bytes = (math.prod(shape) * size for shape in (x, w, y))
    channels, filters = (_padded(n, size) for n in (w[1], y[1]))
    of_padded = x_bytes // x[1] * _padded(x[1], size) + w_bytes // w[1] * channels + y_bytes // y[1] * filters
    return {0, *(n + _ALIGNMENT for n in (0, x_bytes + y_bytes, x_bytes + w_bytes + y_bytes, of_padded))}


def _padded(channels: int, size: int) -> int:
    return math.ceil(channels * size / _ALIGNMENT) * _ALIGNMENT // size


def _copy(call: Call, x: Any) -> Take:
    return Take(0 if x.is_contiguous(memory_format=call.format) else x.nbytes)


@scratch("convolution")
def _forward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """An input that doesn't have the memory format is copied before the result is allocated, a weight after it."""
    call = call_of(args[0], args[1], out, args[3:9])
    if call is None:
        return ()
    return [_copy(call, call.x), MAKE_RESULTS, _copy(call, call.w), Take(workspace_bytes(call, "forward"))]


@scratch("convolution_backward")
def _backward(args: Args, kwargs: Kwargs, out: Any) -> Script:
    """Each of the two gradients copies an incoming gradient that is not contiguous (cudnn/ConvShared.cpp)."""
    gradient, x, w = args[:3]
    call = call_of(x, w, gradient, args[4:10])
    formats = (torch.contiguous_format, *([_LAST_FORMATS[gradient.dim()]] if gradient.dim() in _LAST_FORMATS else []))
    copy = Take(0 if any(gradient.is_contiguous(memory_format=f) for f in formats) else gradient.nbytes)
    steps: list[Step] = []
    if out[0] is not None:
        steps += [Make(0), copy, *brief(workspace_bytes(call, "input") if call else 0), Free(copy)]
    steps += [copy]
    if out[1] is not None:
        steps += [Make(1), *brief(workspace_bytes(call, "weight") if call else 0)]
    return [*steps, Free(copy), MAKE_RESULTS]
