"""Run kernels in Triton's interpreter if there is no CUDA GPU; the variable must be set before a kernel is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
