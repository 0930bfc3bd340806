"""Collectives in the traces of CUPTI-based tools: kernel names of NCCL and others, and the arguments that PyTorch writes.

Names of operations are those of `torch.distributed` ("all_reduce"). `record_param_comms` is PyTorch's record of a call of a
process group; Kineto copies its arguments to the kernels that the call launched.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

_NCCL = re.compile(r"ncclSy\w*Kernel_|nccl(?:Dev)?Kernel_")
_NCCL_OPERATION = re.compile(r"_(AllReduce|AllGather|ReduceScatter|AllToAll|Broadcast|Reduce|SendRecv|Gather|Scatter)")
_NCCL_ALGORITHM = re.compile(r"_(RING|TREE|COLLNET_DIRECT|COLLNET_CHAIN|NVLS_TREE|NVLS|PAT)(?=_|\(|$)")
_NCCL_PROTOCOL = re.compile(r"_(LL128|LL|SIMPLE)(?=_|\(|$)")
# kernels of symmetric memory (PyTorch), and the all-reduces of vLLM, SGLang, FlashInfer and TensorRT-LLM
_OTHER = re.compile(r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce", re.IGNORECASE)
_INDUCTOR = re.compile(r"triton_[a-z]+_fused_")  # named after operations around it, also after collectives; it is none itself
_OTHER_ALGORITHM = re.compile(r"multimem_one_shot|multimem|one_?shot|two_?shot|1stage|2stage", re.IGNORECASE)
_SAME = {"1stage": "one-shot", "2stage": "two-shot", "multimemoneshot": "multimem one-shot"}
_OPERATIONS = {
    operation.replace("_", ""): operation
    for operation in (
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter", "barrier",
        "send", "recv",
    )
}  # fmt: skip
_OPERATIONS |= {"crossdevicereduce": "all_reduce", "sendrecv": "send and recv"}
_ITEM_BYTES = {
    "double": 8, "long": 8, "complexfloat": 8, "complexdouble": 16, "uint64": 8, "float": 4, "int": 4, "uint32": 4, "half": 2,
    "bfloat16": 2, "short": 2, "uint16": 2, "byte": 1, "char": 1, "bool": 1,
}  # fmt: skip
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")  # end on all ranks at the same time
SAME_BYTES = ("all_reduce", "broadcast", "reduce")  # of as many bytes on all ranks; others may divide them unequally
# The names of the toolkit's kernels that add up what earlier kernels have sent begin like this. They may end on one rank before
# they begin on another one.
SUM_OF_SENT = "one_shot_all_reduce_of_sent"
PEER = ("send", "recv", "send and recv")


class Communication(NamedTuple):
    """The columns of an event that communicates; texts are None, numbers -1, if they are not known."""

    operation: str | None = None
    algorithm: str | None = None
    group: str | None = None
    group_size: int = -1
    seq: int = -1
    peer: int = -1


@lru_cache(maxsize=4096)
def of_kernel(name: str) -> Communication | None:
    """Return the operation and the algorithm of a kernel from its name; None if the name is not that of a collective.

    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(...)" gives ("all_reduce", "ring, LL").
    """
    if _NCCL.search(name):
        operation, algorithm, protocol = (found.search(name) for found in (_NCCL_OPERATION, _NCCL_ALGORITHM, _NCCL_PROTOCOL))
        parts = [algorithm[1].lower().replace("_", " ")] if algorithm else []
        parts += [protocol[1]] if protocol else []
        parts = parts or (["symmetric"] if "ncclSy" in name else [])
        return Communication(operation_of(operation[1]) if operation else None, ", ".join(parts) or None)
    own = re.split(r"[<(]", name.replace("(anonymous namespace)", ""), maxsplit=1)[0].rpartition("::")[2]
    found = _OTHER.search(own)
    if found is None or _INDUCTOR.match(own):
        return None
    way = _OTHER_ALGORITHM.search(own)
    word = way[0].lower().replace("_", "") if way else ""
    algorithm_name = _SAME.get(word, word.replace("shot", "-shot"))
    return Communication(operation_of(found[0]), algorithm_name or None)


def operation_of(name: str) -> str:
    """Return the name of an operation as in `torch.distributed`: "_allgather_base" and "AllGather" give "all_gather"."""
    plain = name.lower().strip("_").replace("_", "")
    if plain in _OPERATIONS:
        return _OPERATIONS[plain]
    longest = max((known for known in _OPERATIONS if plain.startswith(known)), key=len, default=None)
    return _OPERATIONS[longest] if longest else name


def of_arguments(args: Mapping[str, Any], kernel: Communication) -> tuple[Communication, int]:
    """Return the columns and the bytes of a collective from the arguments of `record_param_comms`, completed by its kernel's.

    The bytes are those of the larger one of input and output. Raises TypeError or ValueError if an argument has another type.
    """
    name = args.get("Collective name")
    operation = operation_of(_text(name)) if name else kernel.operation
    size = item_bytes(_text(args.get("dtype", ""))) * max(_number(args, "In msg nelems", 0), _number(args, "Out msg nelems", 0))
    if size < 0:
        raise ValueError(f"a size of {size} bytes")
    group = args.get("Process Group Name")
    peer = {"send": "Dst Rank", "recv": "Src Rank"}.get(operation or "", "")
    seq = -1 if operation in PEER else _number(args, "Seq")  # sends and receives are counted apart
    return Communication(
        operation, kernel.algorithm, _text(group) if group not in (None, "") else None, _number(args, "Group size"), seq,
        _number(args, peer),
    ), size  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Return the bytes of one element of a dtype as PyTorch's profiler names it ("BFloat16"); 0 if it is not known."""
    plain = dtype.lower()
    return 1 if plain.startswith("float8") else _ITEM_BYTES.get(plain, 0)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{type(value).__name__} instead of a text")
    return value


def _number(args: Mapping[str, Any], name: str, default: int = -1) -> int:
    value = args.get(name, default)
    return value if type(value) is int else int(_text(value))
