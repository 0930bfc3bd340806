"""A small tiled matmul for the tuner's tests. Its deepest config needs more shared memory than some GPUs have, and some configs
are wrong on purpose: they skip rows, accumulate into old outputs, don't compile, crash the compiler process, or start early
without waiting for the previous launch."""

# mypy: allow-untyped-defs, allow-untyped-calls
from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.gpu.catalogue import CATALOGUE
from toolkit.kernels.base import Config, Cost, Kernel, Launch, Shape, Tensors
from toolkit.tune.compiling import Job, compile_configs

RIGHT, LEAVES_OUT, ADDS, BROKEN, DIES, RUSHES = 0, 1, 2, 3, 4, 5


def toy_config(block: int = 16, fault: int = RIGHT, warps: int = 1, stages: int = 1, block_k: int = 16) -> Config:
    return Config(block_m=block, block_n=block, block_k=block_k, fault=fault, warps=warps, stages=stages)


SMALL, MEDIUM, OVERSIZED = toy_config(), toy_config(32, warps=2, block_k=32), toy_config(128, warps=8, stages=5, block_k=64)
FAULTY = [toy_config(fault=fault) for fault in (LEAVES_OUT, ADDS, BROKEN)]


@dataclass(frozen=True)
class ToyShape(Shape):
    m: int
    n: int
    k: int


@triton.jit
def toy_product(
    a_ptr, b_ptr, out_ptr, M, N, K, scale, unused,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, FAULT: tl.constexpr,
):  # fmt: skip
    """out[m, n] = scale * sum_k a[m, k] b[k, n]"""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        a = tl.load(a_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0)
        b = tl.load(b_ptr + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0)
        acc = tl.dot(a, b, acc)
    acc *= scale
    inside = (m[:, None] < M) & (n[None, :] < N)
    at = out_ptr + m[:, None] * N + n[None, :]
    if FAULT == 1:
        inside = inside & (m[:, None] > 0)
    if FAULT == 2:
        acc += tl.load(at, mask=inside, other=0).to(tl.float32)
    if FAULT == 3:
        tl.static_assert(BLOCK_M < 0, "this config was never meant to compile")
    tl.store(at, acc.to(tl.float16), mask=inside)


class ToyMatmul(Kernel):
    """out [m, n] = 0.5 * a [m, k] @ b [k, n], fp16."""

    name: ClassVar[str] = "toy_matmul"
    shape_type = ToyShape
    lengths = ("m", "n")
    known: ClassVar = {"square": ToyShape(1024, 1024, 1024), "odd": ToyShape(17, 33, 40)}

    def space(self, shape: Shape) -> Sequence[Config]:
        return [SMALL, MEDIUM, OVERSIZED]

    def inputs(self, shape: Shape, device: torch.device | str, seed: int = 0) -> dict[str, Tensor]:
        assert isinstance(shape, ToyShape)
        sizes = {"a": (shape.m, shape.k), "b": (shape.k, shape.n)}
        if str(device) == "meta":
            return {name: torch.empty(size, dtype=torch.float16, device="meta") for name, size in sizes.items()}
        source = torch.Generator(device).manual_seed(seed)
        return {name: torch.randn(size, generator=source, device=device).half() for name, size in sizes.items()}

    def reference(self, shape: Shape, inputs: Tensors) -> tuple[Tensor, ...]:
        return (((inputs["a"].float() @ inputs["b"].float()) * 0.5).half(),)

    def outputs(self, shape: Shape, inputs: Tensors) -> dict[str, Tensor]:
        return {"out": inputs["a"].new_empty(inputs["a"].shape[0], inputs["b"].shape[1])}

    def launches(self, shape: Shape, config: Config, inputs: Tensors, outputs: Tensors) -> Sequence[Launch]:
        assert isinstance(shape, ToyShape)
        grid = (triton.cdiv(shape.m, config["block_m"]), triton.cdiv(shape.n, config["block_n"]))
        arguments = {
            "a_ptr": inputs["a"], "b_ptr": inputs["b"], "out_ptr": outputs["out"],
            "M": shape.m, "N": shape.n, "K": shape.k, "scale": 0.5, "unused": None,
        }  # fmt: skip
        if config["fault"] == DIES and inputs["a"].is_meta:
            os.abort()
        constants = {name.upper(): config[name] for name in ("block_m", "block_n", "block_k", "fault")}
        return [Launch(toy_product, grid, arguments, constants, config.warps, config.stages, early=config["fault"] == RUSHES)]

    def cost(self, shape: Shape) -> Cost:
        assert isinstance(shape, ToyShape)
        m, n, k = shape.m, shape.n, shape.k
        return Cost(2 * (m * k + k * n + m * n), 2.0 * m * n * k, "bf16_flops")


TOY = ToyMatmul()

ODD, SQUARE = TOY.known["odd"], TOY.known["square"]
CAPABILITIES = sorted({spec.compute_capability for spec in CATALOGUE.values()})


@functools.cache
def _compiled() -> Path:
    """A cache folder with the toy's compiled configs, made once per test run because starting a compiler takes seconds."""
    folder = Path(tempfile.mkdtemp())
    before = os.environ.get("TOOLKIT_CACHE")
    os.environ["TOOLKIT_CACHE"] = str(folder)
    try:
        jobs = [Job(SQUARE, SMALL, capability) for capability in CAPABILITIES]
        jobs += [Job(SQUARE, OVERSIZED, capability) for capability in ((8, 0), (9, 0), (12, 0))]
        compile_configs(TOY, [*jobs, *(Job(ODD, config, (9, 0)) for config in (SMALL, MEDIUM, OVERSIZED, *FAULTY))])
    finally:
        os.environ["TOOLKIT_CACHE"] = before or ""
    return folder


def fresh_cache(folder: Path, monkeypatch) -> Path:
    """A separate cache folder in which the toy's configs are compiled but not timed."""
    shutil.copytree(_compiled() / "compiled", folder / "compiled")
    monkeypatch.setenv("TOOLKIT_CACHE", str(folder))
    return folder
