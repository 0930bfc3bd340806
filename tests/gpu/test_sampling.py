"""Sampling and embedding on CUDA: the bits of the host, eager and captured, for every option."""

import math

import pytest
import torch

from toolkit.decode.sampling import Sampler, Sampling
from toolkit.models.layers import Embedding
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import SCHEMES

VOCAB, STEPS = 151_936, 12
OPTIONS = {
    "greedy": {},
    "drawn": {"temperature": 0.9},
    "top-k": {"temperature": 0.9, "top_k": 40},
    "top-k of many": {"temperature": 3.0, "top_k": 100_000},
    "top-p": {"temperature": 1.1, "top_p": 0.8},
    "top-p of nearly all": {"temperature": 20.0, "top_p": 1 - 1e-9},
    "min-p": {"temperature": 1.5, "min_p": 0.05},
    "penalty": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": {7: 9.5, 8: -math.inf}},
    "all": {
        "temperature": 1.2, "top_k": 100, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "logit_bias": {7: 3.0}
    },
}  # fmt: skip


def some_logits(kind):
    x = torch.randn(VOCAB, generator=torch.Generator().manual_seed(4)) * 3
    if kind == "ties":
        return x.round()
    return torch.where(x > 0, 0.0, -0.0) if kind == "zeros" else x


@pytest.mark.parametrize("kind", ["spread", "ties", "zeros"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_gpu_chooses_the_tokens_of_the_host(gpu, name, kind):
    """Eager and replayed choices alternate; each changes the step, and the tokens that the penalty applies to."""
    sampling, prompt, x = Sampling(seed=11, **OPTIONS[name]), torch.arange(5), some_logits(kind)
    host, token = Sampler(sampling, VOCAB, torch.device("cpu")), torch.empty(1, dtype=torch.int64)
    host.begin(prompt)
    wanted = [int(host.choose(x, token)) for _ in range(STEPS)]
    sampler, out = Sampler(sampling, VOCAB, gpu.torch), torch.zeros(1, dtype=torch.int64, device=gpu.torch)
    sampler.begin(prompt.to(gpu.torch))
    logits = x.to(gpu.torch)
    found = [int(sampler.choose(logits, out))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.choose(logits, out)
    while len(found) < STEPS:
        graph.replay() if len(found) % 3 else sampler.choose(logits, out)
        found.append(int(out))
    assert found == wanted


@pytest.mark.parametrize("name", OPTIONS)
def test_a_choice_copies_nothing(gpu, name):
    sampler, out = Sampler(Sampling(**OPTIONS[name]), VOCAB, gpu.torch), torch.zeros(1, dtype=torch.int64, device=gpu.torch)
    logits = some_logits("spread").to(gpu.torch)
    sampler.choose(logits, out)  # compiles the kernels
    with gpu.record() as trace:
        for _ in range(3):
            sampler.choose(logits, out)
        torch.cuda.synchronize()
    assert not len(trace.select(trace.is_kind("h2d", "d2h", "d2d", "memset")))
    filters = {"top-k": 3, "top-k of many": 3, "top-p": 4, "top-p of nearly all": 4, "min-p": 1, "all": 6}.get(name, 0)
    assert len(trace.select(trace.is_kind("kernel"))) == 3 * (1 + filters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_embedding_rows_are_those_of_the_host(gpu, scheme, dtype):
    """One kernel for one token and for many, with the bits of the host."""
    host = Embedding(1000, 768, dtype, scale=73.5).requires_grad_(False)
    if scheme is None:
        host.weight.data = torch.randn(1000, 768, generator=torch.Generator().manual_seed(0)).to(dtype)
    else:
        del host.weight
        host.weight = PackedMatrix(SCHEMES[scheme], (1000, 768), "cpu")
        for part in host.weight.parts().values():
            random = torch.Generator().manual_seed(part.shape[1])
            whole = torch.randn(part.shape, generator=random) if part.is_floating_point() else None
            part.data.copy_(whole if whole is not None else torch.randint(0, 127, part.shape, generator=random))
    device = host.on_host().to(gpu.torch)
    for ids in (torch.tensor([[7]]), torch.arange(999, -1, -7)[None]):
        moved = ids.to(gpu.torch)
        device(moved)
        with gpu.record() as trace:
            found = device(moved)
            torch.cuda.synchronize()
        assert len(trace.select(trace.is_kind("kernel", "d2d"))) == 1
        assert torch.equal(found.cpu(), host(ids))
