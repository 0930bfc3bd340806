"""Tests of parsing CUPTI's event names as different tools spell them."""

import numpy as np
import pytest

from toolkit.trace.cupti import is_copy_kernel, is_wait, number_streams, parse_memcpy


@pytest.mark.parametrize(
    ("name", "kind", "pinned"),
    [
        ("Memcpy HtoD (Pageable -> Device)", "h2d", 0),
        ("Memcpy HtoD (Pinned -> Device)", "h2d", 1),
        ("Memcpy DtoH (Device -> Pinned)", "d2h", 1),
        ("Memcpy DtoH (Device -> Pageable)", "d2h", 0),
        ("Memcpy HtoD (Unknown -> Device)", "h2d", -1),
        ("Memcpy DtoD (Device -> Device)", "d2d", -1),
        ("Memcpy PtoP (Device -> Device)", "p2p", -1),
        ("Memcpy AtoH (Array -> Pinned)", "d2h", 1),
        ("Memcpy HtoH (Pinned -> Pageable)", None, -1),
        ("[CUDA memcpy Device-to-Host]", "d2h", -1),
        ("[CUDA memcpy HtoD]", "h2d", -1),
        ("[CUDA memcpy Unified Host-to-Device]", "h2d", -1),
        ("MemcpyD2H", "d2h", -1),
        ("MemcpyP2P", "p2p", -1),
        ("CopyHostToDevice", "h2d", -1),
        ("matmul", None, -1),
    ],
)
def test_copies_by_name(name, kind, pinned):
    assert parse_memcpy(name) == (kind, pinned)


@pytest.mark.parametrize(
    "name", ["cudaStreamSynchronize", "cudaDeviceSynchronize_v3020", "cuCtxSynchronize", "hipEventSynchronize"]
)
def test_waits(name):
    assert is_wait(name)


@pytest.mark.parametrize("name", ["cudaEventQuery", "cudaStreamWaitEvent", "cudaLaunchKernel", "Stream Sync", ""])
def test_what_does_not_wait(name):
    assert not is_wait(name)


def test_copies_that_graphs_run_as_kernels():
    assert is_copy_kernel("memcpy32_post")
    assert not is_copy_kernel("memcpy_my_kernel(float*)")
    assert not is_copy_kernel("void copy_kernel<float>()")


@pytest.mark.parametrize(
    ("raw", "ours"),
    [([], []), ([7, 13, 7, 20, 13], [0, 1, 0, 2, 1]), ([20, 13, -1, 7], [1, 2, -1, 0]), ([0, 0xFFFFFFFF, 5], [0, -1, 1])],
)
def test_streams_are_numbered_as_first_seen(raw, ours):
    assert number_streams(np.array(raw, np.int64)).tolist() == ours
