"""How a multiprocessor divides its memory between L1 cache and shared memory while a kernel runs (CUDA Programming Guide).

A kernel's blocks need some shared memory. The driver chooses how much of it the multiprocessor sets up, unless the kernel
prefers a share. How many blocks fit and how much L1 cache is left follow from it. Decode steps depend on it, because blocks of
several launches are on a multiprocessor at the same time. `docs/kernel_experiments.md` has measurements.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from toolkit.core.errors import DeviceError
from toolkit.gpu.cuda.graphs import bindings

# By compiled kernel. Those that never had a preference are absent.
_preferred: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def prefer_shared(compiled: Any, percent: int) -> None:
    """Let launches of one of Triton's compiled kernels prefer this share of the largest shared memory; -1: the driver's choice.

    It holds for captures and launches from now on, and for all shapes that share the compiled kernel. Without the package
    cuda-bindings nothing happens: results are the same. Raises DeviceError if CUDA refuses.
    """
    if _preferred.get(compiled, -1) == percent:
        return
    try:
        driver = bindings("driver")
    except DeviceError:
        return
    name = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    (error,) = driver.cuFuncSetAttribute(driver.CUfunction(int(compiled.function)), name, percent)
    if int(error):
        refused = f"CUDA says {getattr(error, 'name', error)}"
        raise DeviceError(f"preferring {percent} % of shared memory", refused, "Give -1, or a share from 0 to 100")
    _preferred[compiled] = percent
