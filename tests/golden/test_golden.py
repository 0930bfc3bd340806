"""Tests that golden programs have the same copies, waits and memory peaks on the virtual H200 as on a real one."""

import pytest
import torch

from tests.golden import programs_more
from tests.golden.replay import allocations, compare, differences, measured, peak_of, programs

# Known deviations and their reasons. A listed program that no longer deviates fails its test, as does an unlisted one that
# deviates. None of the first 25 programs may be listed.
DEVIATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "generate_qwen3_static": (("d2d",), "transformers compiles a static cache's decode step on CUDA only: another program"),
    "copy_d2d_complex_conj": (("d2d",), "a conjugate is computed at once here; on CUDA it is lazy, and its copy is a kernel"),
}
if torch.__version__ >= (2, 14):
    DEVIATIONS["quantile"] = ("d2d",), "since PyTorch 2.14 its ranks are fp64, 8 bytes; the H200 was recorded with 2.11"

# Known deviations of the peak of allocated bytes: reason -> programs. h200_allocs.json has all allocations of the programs, in
# order; `python -m tests.golden.replay NAME` shows them.
PEAKS: dict[str, tuple[str, ...]] = {
    "transformers compiles a static cache's decode step on CUDA only: another program": ("generate_qwen3_static",),
    "cuSOLVER's and MAGMA's workspaces are not modelled": ("inv", "solve", "cholesky", "det"),
    "a conjugate is made at once here; on CUDA it is lazy": ("copy_d2d_complex_conj",),
    "the gradient of a mask's entries is written into zeros there, into a copy of them here": ("backward_mask",),
}  # fmt: skip
PEAK_OF = {name: reason for reason, names in PEAKS.items() for name in names}


@pytest.mark.parametrize("name", list(programs()))
def test_the_virtual_gpu_copies_and_waits_as_an_h200(name: str):
    if name.startswith(("hf_", "generate_")):
        pytest.importorskip("transformers", reason="an unmodified Hugging Face generate() needs transformers")
    want, got = compare(name)
    expected, reason = DEVIATIONS.get(name, ((), "no deviation is known"))
    assert differences(want, got) == expected, f"{reason}\nmeasured {want}\nreplayed {got}"
    assert (want.peak_bytes == got.peak_bytes) is (name not in PEAK_OF), (
        f"{PEAK_OF.get(name, 'no deviation of the peak is known')}: {want.peak_bytes:,} there, {got.peak_bytes:,} here"
    )
    if want.value is not None and name not in programs_more.RANDOM:
        assert got.value == (pytest.approx(want.value) if isinstance(want.value, float) else want.value)


@pytest.mark.parametrize("name", [*DEVIATIONS, *PEAK_OF])
def test_a_deviation_is_of_a_program_that_exists(name: str):
    assert name in programs_more.PROGRAMS


def test_the_allocations_that_were_measured_make_the_peaks_that_were_measured():
    """Two runs on an H200: what was recorded in order, rounded and added up, and what the allocator said itself."""
    odd = {name for name, seen in allocations().items() if not seen["cut"] and peak_of(seen["events"]) != seen["peak"]}
    assert odd == set()
    for name, seen in allocations().items():
        if name not in PEAK_OF:
            assert seen["peak"] == measured(programs()[name][0])[name].peak_bytes
