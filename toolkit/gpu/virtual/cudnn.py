"""Ask cuDNN which algorithm it takes for a convolution on an H200, and how much workspace it needs. No GPU is needed.

cuDNN chooses by heuristics that are part of the library, and need only a description of the GPU. So where cuDNN 9.19 or later
is installed, as it is with PyTorch 2.11 for CUDA 13, the virtual GPU asks for its plans as PyTorch does, and takes the first
one that can be built (ATen/native/cudnn/Conv_v8.cpp). Plans that call cuBLAS can't be built without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

H200 = {
    "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "multiProcessorCount": 132, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
    "reservedSharedMemoryPerBlock": 1024, "maxRegistersPerSM": 65536, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "pciDeviceId": 0, "isTccDriver": 0, "supportCoopLaunch": 1, "totalGlobalMem": 150109880320,
    "smClockRateKHz": 1980000, "memClockRateKHz": 3201000, "l2CacheSize": 62914560, "cudaDeviceId": 0, "deviceVer": 900,
    "driverVer": 13000, "deviceName": "NVIDIA H200",
}  # fmt: skip

# In this order: cuDNN ends the process if it doesn't find cuBLAS. The last one, which cuDNN would load itself, can't be loaded
# without a CUDA driver if it is of a later version, such as 9.28.
_CUDNN = "libcudnn.so.9"
_LIBRARIES = ("libnvrtc.so.*", "libcublasLt.so.*", "libcublas.so.*", _CUDNN, "libcudnn_engines_runtime_compiled.so.9")
_FIRST_VERSION = 91900  # that was compared with an H200

# Numbers of cudnn_graph.h: types of attributes, descriptors, modes of heuristics, notes.
_DATA_TYPE, _INT64, _FLOAT, _MODE, _HEURISTIC, _NOTE, _DESCRIPTOR, _CHAR = 1, 3, 4, 7, 8, 11, 15, 24
_CONVOLUTION, _ENGINE, _CONFIG, _HEURISTICS, _PLAN, _GRAPH, _TENSOR, _GPU = 1, 2, 3, 4, 5, 15, 17, 38
_INSTANT, _FALLBACK = 0, 2
_TENSOR_CORE, _DOWN_CONVERT, _NONDETERMINISTIC, _MOST_NOTES = 0, 1, 4, 16
# The descriptor of each pass, and its attributes for x, y, w, the convolution, alpha and beta.
_OPERATIONS = {
    "forward": (10, 704, 705, 703, 702, 700, 701),
    "input": (12, 710, 711, 709, 708, 706, 707),
    "weight": (11, 716, 717, 715, 714, 712, 713),
}
_DTYPES = {"float32": 0, "float16": 2, "bfloat16": 9}
_C_TYPES: dict[int, Any] = {_INT64: ctypes.c_int64, _FLOAT: ctypes.c_float, _DESCRIPTOR: ctypes.c_void_p, _CHAR: ctypes.c_char}

Sizes = tuple[int, ...]


class Convolution(NamedTuple):
    """One pass of a convolution in two or three dimensions: "forward", or the gradient of the "input" or of the "weight".

    `x`, `w` and `y` are the shapes of cuDNN's input, filter and output.
    """

    which: str
    x: Sizes
    w: Sizes
    y: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    dtype: str
    channels_last: bool
    tf32: bool = True
    deterministic: bool = False


class Plan(NamedTuple):
    """The number of the engine that a plan takes, and the bytes of its workspace."""

    engine: int
    workspace_bytes: int


class CudnnError(Exception):
    """A call of cuDNN failed."""


@lru_cache
def library() -> Any | None:
    """Return cuDNN, or None if it is not installed, too old, or needs a CUDA driver that isn't there."""
    found = importlib.util.find_spec("nvidia") if sys.platform == "linux" else None
    folders = [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
    loaded: dict[str, Any] = {}
    for pattern in _LIBRARIES:
        for path in sorted(path for folder in folders for path in folder.glob(f"*/lib/{pattern}")):
            try:
                loaded[pattern] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            except OSError:
                return None
        if pattern not in loaded:
            return None
    cudnn = loaded[_CUDNN]
    return cudnn if cudnn.cudnnGetVersion() >= _FIRST_VERSION else None


def version() -> int | None:
    """Return the version of cuDNN that is asked, such as 91900 for 9.19.0, or None."""
    cudnn = library()
    return None if cudnn is None else int(cudnn.cudnnGetVersion())


@lru_cache(maxsize=4096)
def plan(convolution: Convolution) -> Plan | None:
    """Return the plan that PyTorch takes, or None if cuDNN is not installed or has none."""
    if library() is None or convolution.dtype not in _DTYPES:
        return None
    try:
        return next(_plans(convolution), None)
    except CudnnError:  # cuDNN does not support the sizes
        return None


def _plans(convolution: Convolution) -> Iterator[Plan]:
    graph = _graph(convolution)
    for mode in (_INSTANT, _FALLBACK):
        heuristics = _Descriptor(_HEURISTICS).set(201, _DESCRIPTOR, graph).set(200, _HEURISTIC, mode)
        try:
            configs = heuristics.set(204, _DESCRIPTOR, _h200()).done().children(202, _CONFIG)
        except CudnnError:
            continue
        for config in configs:
            (engine,) = config.children(300, _ENGINE, 1)
            if _is_filtered(convolution, engine.numbers(1303, _NOTE, _MOST_NOTES)):
                continue
            try:
                built = _Descriptor(_PLAN).set(401, _DESCRIPTOR, config).set(407, _DESCRIPTOR, _h200()).done()
            except CudnnError:
                continue
            yield Plan(engine.numbers(1301)[0], built.numbers(402)[0])


def _is_filtered(convolution: Convolution, notes: list[int]) -> bool:
    if convolution.deterministic and _NONDETERMINISTIC in notes:
        return True
    return convolution.dtype == "float32" and (_DOWN_CONVERT in notes or (not convolution.tf32 and _TENSOR_CORE in notes))


def _graph(convolution: Convolution) -> _Descriptor:
    kind, of_x, of_y, of_w, of_convolution, alpha, beta = _OPERATIONS[convolution.which]
    described = _Descriptor(_CONVOLUTION).set(100, _DATA_TYPE, 0).set(101, _MODE, 1)
    described.set(106, _INT64, len(convolution.stride)).set(102, _INT64, *convolution.dilation)
    described.set(103, _INT64, *convolution.stride)
    described.set(104, _INT64, *convolution.padding).set(105, _INT64, *convolution.padding)
    operation = _Descriptor(kind).set(of_convolution, _DESCRIPTOR, described.done())
    for attribute, name, shape in ((of_x, "x", convolution.x), (of_y, "y", convolution.y), (of_w, "w", convolution.w)):
        operation.set(attribute, _DESCRIPTOR, _tensor(shape, name, convolution))
    operation.set(alpha, _FLOAT, 1.0).set(beta, _FLOAT, 0.0)
    return _Descriptor(_GRAPH).set(801, _DESCRIPTOR, operation.done()).done()


def _tensor(shape: Sizes, name: str, convolution: Convolution) -> _Descriptor:
    order = [*range(len(shape))]
    if convolution.channels_last:
        order = [0, *order[2:], 1]
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], step = step, step * shape[dim]
    made = _Descriptor(_TENSOR).set(902, _INT64, *shape).set(903, _INT64, *strides).set(906, _INT64, ord(name))
    return made.set(900, _INT64, 16).set(901, _DATA_TYPE, _DTYPES[convolution.dtype]).done()


@lru_cache
def _h200() -> _Descriptor:
    text = json.dumps(H200).encode()
    return _Descriptor(_GPU).set(2702, _CHAR, *text).done()


class _Descriptor:
    """A descriptor of cuDNN's backend."""

    def __init__(self, kind: int) -> None:
        self._cudnn: Any = library()
        self._parts: list[_Descriptor] = []
        self.pointer = ctypes.c_void_p()
        self._call("CreateDescriptor", kind, ctypes.byref(self.pointer))

    def __del__(self) -> None:
        self._cudnn.cudnnBackendDestroyDescriptor(self.pointer)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cudnn, f"cudnnBackend{name}")(*arguments)
        if status:
            raise CudnnError(f"cudnnBackend{name} returned {status}")

    def set(self, attribute: int, kind: int, *values: Any) -> _Descriptor:
        """Set an attribute. A descriptor that becomes a part of this one lives as long."""
        self._parts += [value for value in values if isinstance(value, _Descriptor)]
        plain = [value.pointer.value if isinstance(value, _Descriptor) else value for value in values]
        array = (_C_TYPES.get(kind, ctypes.c_int32) * len(plain))(*plain)
        self._call("SetAttribute", self.pointer, attribute, kind, ctypes.c_int64(len(plain)), array)
        return self

    def done(self) -> _Descriptor:
        """Finalize the descriptor."""
        self._call("Finalize", self.pointer)
        return self

    def _get(self, attribute: int, kind: int, n: int, array: Any) -> int:
        found = ctypes.c_int64(0)
        self._call("GetAttribute", self.pointer, attribute, kind, ctypes.c_int64(n), ctypes.byref(found), array)
        return found.value

    def numbers(self, attribute: int, kind: int = _INT64, most: int = 1) -> list[int]:
        """Return an attribute that consists of at most `most` numbers."""
        array = ((ctypes.c_int64 if kind == _INT64 else ctypes.c_int32) * most)()
        return list(array[: self._get(attribute, kind, most, array)])

    def children(self, attribute: int, kind: int, n: int | None = None) -> list[_Descriptor]:
        """Return an attribute that consists of descriptors."""
        made = [_Descriptor(kind) for _ in range(self._get(attribute, _DESCRIPTOR, 0, None) if n is None else n)]
        array = (ctypes.c_void_p * len(made))(*(one.pointer.value for one in made))
        return made[: self._get(attribute, _DESCRIPTOR, len(made), array)] if made else []
