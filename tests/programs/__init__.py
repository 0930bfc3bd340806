"""A hundred programs as users write them, to compare the virtual GPU with an H200 to the byte.

`tests/golden` has small programs that were written for rules. The ones here were written as an outsider would, from memory of
PyTorch's and transformers' documentation and without looking at the rules of the virtual GPU. Until they were committed, they
ran only on the CPU, to find their own mistakes. No program was changed after it had run on the virtual GPU.

How they were chosen: the classes are those in which 71 earlier programs deviated (recurrent networks, Fourier transforms,
grouped products of experts, PyTorch's transformer modules, training steps with autocast or of Hugging Face models) and the
neighbouring kinds of work that people use a GPU for. A class has five to eight programs. Within a class, each program is
another textbook task of the field with its usual ingredients, and no two share their central operation. Read-backs
(`.item()`, `nonzero`, masks, `unique`), streams, views, in-place operations and optimizers appear where such code has them.

| class         | programs | why |
| ------------- | -------- | --- |
| vision        | 8        | convolutions, batch norm, boxes that are read back, augmentation |
| audio         | 6        | convolutions in one dimension, short-time Fourier transforms, CTC |
| spectral      | 5        | deviated before: Fourier transforms, complex weights |
| diffusion     | 5        | sampling loops, averages of weights, two optimizers |
| graphs        | 6        | sparse matrices, scatter, unique, sampling |
| reinforcement | 5        | replay buffers, actions that are read back, environments on the device |
| recurrent     | 7        | deviated before: LSTM, GRU and RNN on cuDNN, packed sequences, cells |
| experts       | 7        | deviated before: grouped products, offsets, loops over experts |
| encoders      | 6        | deviated before: `nn.TransformerEncoder`, its decoder and fast path |
| attention     | 5        | causal, masked, grouped queries, flexible, linear |
| finetuning    | 7        | deviated before: training steps of Hugging Face models |
| training      | 8        | deviated before: autocast, scalers, optimizers, checkpointing, torch.func |
| quantised     | 5        | int8, fp8, int4, fake quantisation |
| serving       | 7        | caches, batching, pages, speculation, beams, sampling |
| transfers     | 6        | data loaders, streams, offloading, checkpoints, metrics |
| numeric       | 7        | embedding bags, clustering, linear algebra, differential equations |

A program is a function of a device that returns nothing. The sizes of its tensors don't depend on the device: data that decides
sizes comes from the CPU's random numbers. `python -m tests.programs.report` runs all programs on a device and compares records.

`h200.json` is what an H200 did, measured before any rule was changed for these programs. `virtual_h200_before.json` is what the
virtual GPU did with the rules of that time, and `virtual_h200.json` what it does now, with cuDNN installed;
`virtual_h200_without_cudnn.json` is without.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable

import torch

Program = Callable[[torch.device], None]
CLASSES = {name: int(n) for name, n in re.findall(r"^\| (\w+) +\| (\d+) ", __doc__, re.MULTILINE)}


def programs() -> dict[str, Program]:
    """Return every program by its name, "class.program", in the order of the table."""
    modules = {name: importlib.import_module(f"{__name__}.{name}") for name in CLASSES}
    return {
        f"{name}.{function.__name__}": function
        for name, module in modules.items()
        for function in vars(module).values()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not function.__name__.startswith("_")
    }
