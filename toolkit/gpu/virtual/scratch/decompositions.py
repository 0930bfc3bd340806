"""Memory of singular value, eigenvalue and QR decompositions of one matrix on cuSOLVER.

The sizes are those of the decompositions that `effects.decompositions` names. Not modelled are the workspaces of square
matrices of more than 32 columns, of eigenvalues in fp32 of 32 and more columns, of QR with 128 and more columns, and of
batches.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from toolkit.gpu.virtual.effects.decompositions import SMALL
from toolkit.gpu.virtual.effects.operations import operand
from toolkit.gpu.virtual.scratch.script import Args, Free, Kwargs, Make, Script, Take, brief, scratch

_CHECKED = (Take(1), Take(1))  # whether an error code is set
_INFO = Take(4)
_BUFFERS = 3 << 18  # elements
_MOST_REFLECTORS = 128


def _aligned(elements: int, to: int) -> int:
    return to * math.ceil(elements / to)


@scratch("_linalg_svd")
def _svd(args: Args, kwargs: Kwargs, out: Any) -> Script:
    a, full, vectors = args[0], operand(args, kwargs, 1, "full_matrices", False), operand(args, kwargs, 2, "compute_uv", True)
    if a.dim() > 2 or not a.numel():
        return ()
    (m, n), size = a.shape, a.element_size()
    k, is_small = min(m, n), max(m, n) <= SMALL
    copied, parts = Take(a.nbytes), []
    if is_small:
        workspace = 992 * size
        parts = [Take(m * m * size), Take(n * n * size)]
        if vectors:
            parts = [Take(max(m, n) ** 2 * size)] if m != n and not full else []
    else:
        workspace = 0 if m == n else (_BUFFERS + _aligned(k, 64) + (_aligned(m * n, 64) if m < n else 0)) * size
        parts = [] if vectors else [Take(m * k * size), Take(k * n * size)]
    made = [Make(0), Make(2), Make(1)] if vectors else [Make(1)]
    return [*made, _INFO, copied, *parts, *brief(workspace), *map(Free, reversed([copied, *parts])), *_CHECKED]


@scratch("_linalg_eigh")
def _eigh(args: Args, kwargs: Kwargs, out: Any) -> Script:
    a, vectors = args[0], operand(args, kwargs, 2, "compute_v", True)
    if a.dim() > 2 or not a.numel():
        return ()
    n, size = a.shape[-1], a.element_size()
    workspace = 0 if a.dtype == torch.float32 and n >= SMALL else (3 * n * n + 766 * n) * size + (262540 * size // 4)
    made = [Make(1), Make(0)] if vectors else [Make(0), Take(a.nbytes)]
    return [*made, _INFO, *brief(workspace), *_CHECKED]


@scratch("linalg_qr")
def _qr(args: Args, kwargs: Kwargs, out: Any) -> Script:
    a = args[0]
    if a.dim() > 2 or not a.numel():
        return ()
    (m, n), size = a.shape, a.element_size()
    k = min(m, n)
    reflectors = 0 if k >= _MOST_REFLECTORS else (33024 + _aligned(m * k, 32)) * size
    each = [_INFO, *brief((_BUFFERS + 32) * size), Free(_INFO), _INFO, *brief(reflectors), Free(_INFO)]
    return [Make(0), Make(1), Take(k * size), *each]
