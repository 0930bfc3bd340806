"""Kernels run under Triton's interpreter where there is no CUDA GPU: it must be told before a kernel is imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
