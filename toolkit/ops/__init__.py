"""The operations of decoding, registered as `torch.ops.toolkit.*`: one file per group of operations.

Each operation has a reference in plain PyTorch, the Triton launches of `toolkit.kernels`, and its effects on the virtual GPU.
On a GPU that the kernels support (see `on_gpu`) a call runs the kernels; elsewhere, with gradients, and for sizes that the
kernels don't support, it runs the reference.
"""

from toolkit.ops.attention import HeadLayout, Projected, attend, make_heads, write_heads
from toolkit.ops.codes import Codebook, attend_codes, codes_fit, read_codes, write_codes
from toolkit.ops.collectives import Partial, all_gather, all_reduce, whole
from toolkit.ops.define import describe_problems, on_gpu, record_problems
from toolkit.ops.embedding import embed, embed_partial
from toolkit.ops.gates import gate_heads
from toolkit.ops.mixers import delta_net
from toolkit.ops.mixture import choose_experts, experts, experts_fit, moe, moe_fits
from toolkit.ops.norms import add_norm, norm_add, rms_norm
from toolkit.ops.products import ACTIVATIONS, Operand, few_rows, matmul, matmul_partial, matmul_sum, read_first, takes_quantized
from toolkit.ops.sampling import sample

__all__ = [
    "ACTIVATIONS", "Codebook", "HeadLayout", "Operand", "Partial", "Projected", "add_norm", "all_gather", "all_reduce",
    "attend", "attend_codes", "choose_experts", "codes_fit", "delta_net", "describe_problems", "embed", "embed_partial",
    "experts", "experts_fit", "few_rows", "gate_heads", "make_heads", "matmul", "matmul_partial", "matmul_sum", "moe",
    "moe_fits", "norm_add", "on_gpu", "read_codes", "read_first", "record_problems", "rms_norm", "sample", "takes_quantized",
    "whole", "write_codes", "write_heads",
]  # fmt: skip


def __dir__() -> list[str]:
    return sorted(__all__)
