"""GGUF blocks and integer codes into the packed layout: the gguf package is the oracle, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from toolkit.quant import dequantise
from toolkit.repack import GGUF_KINDS, from_stored, scheme_of

KINDS = list(GGUF_KINDS)


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes, every code and scale, with the fp16 fields kept finite. [rows, bytes of a row]"""
    layout = GGUF_KINDS[kind]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // layout.weights, layout.nbytes), dtype=np.uint8)
    starts = {"Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q5_0": (0,)}.get(kind, (0, 2))
    for start in starts:
        d = (rng.standard_normal(blocks.shape[:2]) * 10.0 ** rng.integers(-6, 3, blocks.shape[:2])).astype(np.float16)
        blocks[..., start : start + 2] = d[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def bits(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


@pytest.mark.parametrize("columns", [256, 1280])
@pytest.mark.parametrize("kind", KINDS)
def test_dequantises_as_the_gguf_package_bit_for_bit(kind: str, columns: int) -> None:
    raw = random_blocks(kind, 7, columns)
    scheme = scheme_of(kind)
    assert scheme is not None
    parts = from_stored(kind, {"blocks": torch.from_numpy(raw)}, columns)
    assert {n: (p.dtype, p.shape) for n, p in parts.items()} == {
        n: (dtype, (7, columns // per)) for n, (dtype, per) in scheme.parts().items()
    }
    ours = dequantise(scheme, parts).numpy()
    theirs = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(7, columns)
    assert np.array_equal(bits(ours), bits(theirs))
