from typing import NamedTuple
import torch


class Effect(NamedTuple):
    kind: str
    bytes: int
    name: str
    pinned: int = -1
    flops: int = 0
    moved_bytes: int = 0


K = {
    "_to_copy",
    "clone",
    "masked_fill",
    "ones",
    "zeros",
    "full",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "zeros_like",
    "ones_like",
    "full_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "randn",
    "rand",
    "randint",
    "arange",
    "contiguous",
    "scalar_tensor",
    "stack",
    "rand_like",
    "randn_like",
}


def decomposes(func):
    n = func._schema.name
    return n.removeprefix("aten::") in K and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeExplicitAutograd"
    )


def effects(func, args, kwargs, out):
    n = func._schema.name.removeprefix("aten::")
    if n == "copy_":
        d, s = args[0], args[1]
        dv = hasattr(d, "_host")
        sv = hasattr(s, "_host")
        b = d.numel() * d.element_size()
        if dv and sv:
            return (Effect("d2d", b, "Memcpy DtoD"),)
        return (Effect("h2d" if dv else "d2h", b, "Memcpy", 0), Effect("wait", 0, "cudaStreamSynchronize"))
    if n == "_local_scalar_dense":
        return (Effect("d2h", args[0].element_size(), "Memcpy DtoH", 1), Effect("wait", 0, "cudaStreamSynchronize"))
    if out is None or n.startswith("empty"):
        return ()
    return (Effect("kernel", 0, n),)


def duration_ns(e, spec):
    return 2000


def host_ns(e, spec):
    return 5000
