"""The recorder against an independent reading of CUPTI: the golden programs' measurements, made with plain PyTorch.

Held on the card and the versions that they were measured with; elsewhere libraries launch other kernels and copies.
"""

import collections
import gc
import json

import numpy as np
import pytest
import torch

from tests.golden.replay import DIRECTIONS, HERE, measured, programs
from toolkit.gpu.opening import open_device

MADE = json.loads((HERE / "h200.json").read_text())
HERE_IS = {"device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None, "torch": torch.__version__}
COMPILED = {"generate_qwen3_static"}  # generate() compiles its static cache's step: what Inductor fuses differs from run to run


@pytest.fixture(scope="module")
def card():
    differing = [name for name, value in HERE_IS.items() if value != MADE[name]]
    if differing:
        pytest.skip(f"measured on {MADE['device']} with torch {MADE['torch']}")
    if pytest.importorskip("transformers").__version__ != MADE["transformers"]:
        pytest.skip(f"measured with transformers {MADE['transformers']}")
    return open_device("cuda:0")


@pytest.mark.parametrize("name", programs())
@pytest.mark.filterwarnings("ignore")
def test_the_recorder_counts_what_cupti_counted(card, name):
    file, program = programs()[name]
    want = measured(file)[name]
    program("cuda")
    gc.collect()
    torch.cuda.synchronize()
    with card.record() as trace:
        result = program("cuda")
    del result
    got = {kind: dict(collections.Counter(trace["bytes"][trace.is_kind(kind)].tolist())) for kind in DIRECTIONS.values()}
    assert got == want.copies
    if name not in COMPILED:
        assert int(trace.is_kind("kernel").sum()) == want.kernels
    waits = trace.select(trace.is_kind("sync")).text("name")
    assert waits.count("cudaStreamSynchronize") == want.waits
    caused = trace.select(trace.is_kind("kernel", "h2d", "d2h", "d2d", "memset"))
    assert None not in caused.text("where")
    signed = np.where(trace.is_kind("alloc"), trace["bytes"], 0) - np.where(trace.is_kind("free"), trace["bytes"], 0)
    assert max(np.cumsum(signed).max(initial=0), 0) == want.peak_bytes
