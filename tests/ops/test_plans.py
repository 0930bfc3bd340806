"""Launch plans: the second call of an operation starts the kernels of the first with its own operands.

Without a GPU, a stand-in takes the place of Triton's compiled kernel. It makes tensors of the pointers that it is started with,
and runs the kernel on them in Triton's interpreter.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import toolkit as tk
from tests.ops.test_ops import DEVICE, GEMMA4, PARTS, QWEN3, QWEN3_5_MOE, decoded, small
from toolkit.kernels.base import Config, Kernel, Launch, Shape
from toolkit.models import gemma4, qwen3, qwen3_5_moe
from toolkit.ops import define, plans, products, zeros
from toolkit.tune import lookup
from toolkit.weights.packed import PackedMatrix
from toolkit.weights.schemes import find_scheme

run_now = Launch.run


class Compiled:
    """Stands for a kernel that Triton compiled for a launch."""

    function = 17
    packed_metadata = ("metadata",)

    def __init__(self, launch: Launch, started: list[tuple[Any, ...]]) -> None:
        self.launch, self.started = launch, started

    def run(self, x: int, y: int, z: int, stream: int, function: Any, metadata: Any, *rest: Any) -> None:
        assert (function, metadata, rest[:3]) == (self.function, self.packed_metadata, (None, None, None))
        assert (x, y, z) == (*self.launch.grid, 1, 1)[:3]
        self.started.append((self.launch.function, stream, *rest[3:]))
        given = dict(zip(self.launch.function.arg_names, rest[3:], strict=True))
        assert {name: given[name] for name in self.launch.constants} == dict(self.launch.constants)
        first = self.launch.arguments
        with _disable_current_modes():  # which don't see what a kernel does
            own = {n: tensor_at(given[n], one) if isinstance(one := first[n], Tensor) else given[n] for n in first}
            assert all(own[n] == one for n, one in first.items() if not isinstance(one, Tensor))
            run_now(replace(self.launch, arguments=own))


def tensor_at(pointer: int, like: Tensor) -> Tensor:
    assert type(pointer) is int
    if not like.nbytes:
        return torch.empty_like(like)
    memory = (ctypes.c_uint8 * like.nbytes).from_address(pointer)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).view(like.shape)


def choose(kernel: Kernel, shape: Shape, device: object) -> SimpleNamespace:
    """Choose as the lookup does, except for products: many small programs take long in the interpreter."""
    wide = Config(block_k=32, rows=1, tokens=8, ahead=1, warps=4)
    return SimpleNamespace(config=wide if kernel.name == "int4_matmul" else kernel.space(shape)[0])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Plan operations on the CPU as on CUDA. Returns the starts of compiled kernels: function, stream, arguments."""
    found: list[tuple[Any, ...]] = []

    def run(launch: Launch) -> Any:
        run_now(launch)
        return None if 0 in launch.grid else Compiled(launch, found)

    monkeypatch.setattr(plans, "ENABLED", True)
    if DEVICE == "cpu":
        monkeypatch.setattr(lookup, "choose", choose)
        monkeypatch.setattr(define, "GPUS", ("cpu",))
        monkeypatch.setattr(zeros, "KINDS", ("cuda", "cpu"))
        monkeypatch.setattr(Launch, "run", run)
    plans.forget()
    with torch.no_grad():
        yield found
    plans.forget()


def problems_of(operation: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Replace the operation's `problem`; the list returned holds the operands of each call that described its launches."""
    found: list[tuple[Any, ...]] = []
    known = define._operations[operation]

    def problem(*operands: Any) -> Any:
        found.append(operands)
        return known.problem(*operands)

    monkeypatch.setitem(define._operations, operation, replace(known, problem=problem))
    return found


def copied(operand: Any) -> Any:
    """Return the operand with its tensors in other memory."""
    if isinstance(operand, (list, tuple)):
        return [copied(one) for one in operand]
    return operand.clone() if isinstance(operand, Tensor) else operand


def flat(one: Any) -> list[Tensor]:
    if isinstance(one, (list, tuple)):
        return [tensor for part in one for tensor in flat(part)]
    return [one] if isinstance(one, Tensor) else []


@pytest.fixture(scope="module")
def calls() -> dict[tuple[Any, ...], tuple[str, tuple[Any, ...]]]:
    """Operands of every operation, one call for each of its keys, from models that run by the references."""
    found: dict[tuple[Any, ...], tuple[str, tuple[Any, ...]]] = {}

    def run(name: str, *given: Any) -> Any:
        key = plans.key_of(define._operations[name], given)
        assert key is not None
        found.setdefault(key[0], (name, tuple(map(copied, given))))
        return getattr(torch.ops.toolkit, name)(*(list(one) if isinstance(one, list) else one for one in given))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(define, "GPUS", ("cpu",))
        for part in PARTS:
            monkeypatch.setattr(part, "call", run)
        for architecture, config in ((qwen3_5_moe, QWEN3_5_MOE), (gemma4, GEMMA4)):
            decoded(small(architecture, config, "int4-g32", torch.bfloat16), (9, 10))
        decoded(small(qwen3, QWEN3 | {"head_dim": 64}, None, torch.bfloat16), (9, 10), "int4")
        model = small(qwen3, QWEN3 | {"num_hidden_layers": 1}, None, torch.float32)
        for options in ({}, {"temperature": 0.9, "top_k": 20, "top_p": 0.9}):
            tk.generate(model, [1, 2], max_new_tokens=2, eos=(), record=False, **options)
    return found


@pytest.mark.parametrize("name", define.operations())
def test_a_plan_starts_what_the_first_call_launched(
    name: str, calls: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    described = problems_of(name, monkeypatch)
    cases = [operands for one, operands in calls.values() if one == name]
    assert cases
    for operands in cases:
        first, second = ([copied(one) for one in operands] for _ in range(2))
        first, second = ([_moved(one) for one in each] for each in (first, second))
        expected = define.by_kernels(name, *first)
        asked = len(described)
        started.clear()
        result = define.by_kernels(name, *second)
        assert not plans.refused()
        assert len(described) == asked
        assert DEVICE != "cpu" or started
        assert type(result) is type(expected)
        for one, other in zip(flat([result, second]), flat([expected, first]), strict=True):
            assert one.stride() == other.stride()
            assert torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def _moved(operand: Any) -> Any:
    if isinstance(operand, list):
        return [_moved(one) for one in operand]
    return operand.to(DEVICE) if isinstance(operand, Tensor) else operand


def normed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return define.by_kernels("rms_norm", x, weight, eps, None, None, None, True, False)[0]


def row(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(len(size))).to(DEVICE, dtype)


def test_operands_of_another_kind_have_a_plan_of_their_own(started: list[Any]) -> None:
    """A kind: sizes, strides, dtypes, flags, and whether pointers are multiples of 16."""
    weight, other = row(64), row(96)
    normed(row(2, 64), weight)
    assert len(plans.current()) == 1
    normed(row(2, 64) + 1, weight.clone())
    assert len(plans.current()) == 1
    for n, operands in enumerate(
        [
            (row(3, 64), weight), (row(2, 96), other), (row(2, 64), weight, 1e-5), (row(2, 64, dtype=torch.bfloat16), weight),
            (row(2, 1, 64), weight), (row(2, 64)[1:], weight),
        ]
    ):  # fmt: skip
        for _ in range(2):
            x, weights, *eps = operands
            wanted = torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weights, *eps or [1e-6]).to(x.dtype)
            torch.testing.assert_close(normed(*operands), wanted, rtol=2**-7 if x.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        assert len(plans.current()) == 2 + n
    keys = [
        plans.key_of(define._operations["rms_norm"], (x, weight))
        for x in (row(200)[:64], row(200)[1:65], row(200)[4:68], row(200)[:128:2])
    ]
    first, beside, aligned, apart = (key[0] for key in keys if key is not None)
    assert first == aligned
    assert len({first, beside, apart}) == 3
    assert not plans.refused()


def test_a_copied_operand_has_no_plan(calls: Any, started: list[Any]) -> None:
    operands = next(operands for name, operands in calls.values() if name == "experts")
    x, chosen, *rest = (_moved(one) for one in operands)
    across = chosen.t().contiguous().t()
    assert not across.is_contiguous()
    first, second = (define.by_kernels("experts", x, across, *rest) for _ in range(2))
    assert [next(iter(reasons)) for reasons in plans.refused().values()] == [
        f"ValueError: a tensor {list(chosen.shape)} is neither an operand nor an output"
    ]
    assert torch.equal(first, second)
    assert torch.equal(first, define.by_kernels("experts", x, chosen, *rest))


def test_scratch_without_memory_has_no_pointer(started: list[Any]) -> None:
    """Queries only: the outputs for keys and values are empty, and nothing else is scratch."""
    positions = torch.tensor([3, 4], device=DEVICE)
    operands = (row(1, 2, 32), None, row(16), row(16), row(8, 2, 16), positions, 2, 0, False, False, True, 1e-6)
    expected, found = (define.by_kernels("make_heads", *operands) for _ in range(2))
    assert len(plans.current()) == len(found) == 1
    assert torch.equal(found[0], expected[0])
    assert not plans.refused()


def test_the_bound_of_attention_needs_no_other_plan(calls: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    described = problems_of("attention", monkeypatch)
    *operands, bound = next(o for name, o in calls.values() if name == "attention" and o[0].shape[1] == 1)
    operands = [_moved(one) for one in operands]
    found = [define.by_kernels("attention", *operands, bound + more)[0] for more in (0, 1, 2)]
    assert len(described) == 2  # the call, and the same on meta
    assert torch.equal(found[0], found[2])


def test_counters_are_those_of_the_moment(calls: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = next(
        o for name, o in calls.values() if name == "packed_matmul" and o[0].numel() > products.DECODED * o[0].shape[-1]
    )
    operands = [_moved(o) for o in given]
    device = operands[0].device
    expected = define.by_kernels("packed_matmul", *operands)
    described = problems_of("packed_matmul", monkeypatch)
    shared = zeros.shared_zeros(device, zeros.current_stream(device))
    assert shared is not None
    own = torch.zeros(zeros.COUNTERS, dtype=torch.int32, device=device)
    with zeros.own_counters(own):
        assert define.counters(operands[0], 7).data_ptr() == own.data_ptr() != shared.data_ptr()
        for _ in range(2):
            assert torch.equal(define.by_kernels("packed_matmul", *operands), expected)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: zeros._thread.zeros).result() is None
    assert not own.any()
    assert not described
    if DEVICE == "cpu":
        assert [own.data_ptr() in start for start in started] == [True, True]
    assert define.counters(operands[0], 7).data_ptr() == shared.data_ptr()
    monkeypatch.setattr(zeros, "shared_zeros", lambda device, stream: None)  # as in a capture without its own
    assert torch.equal(define.by_kernels("packed_matmul", *operands), expected)
    assert len(described) == 1


def test_new_timings_drop_the_plans(started: list[Any]) -> None:
    normed(row(2, 64), row(64))
    old = plans.current()
    assert len(old) == 1
    lookup.forget()
    assert not plans.current()
    assert plans.current() is not old  # where a call that looked up its config before adds its plan


def test_threads_share_a_plan(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    weight = row(64)
    if DEVICE == "cpu":  # the interpreter runs in one thread at a time
        lock = threading.Lock()
        run = Compiled.run

        def locked(self: Compiled, *args: Any) -> None:
            with lock:
                run(self, *args)

        monkeypatch.setattr(Compiled, "run", locked)
    normed(row(2, 64), weight)

    def work(n: int) -> bool:
        with torch.no_grad():
            x = row(2, 64) * n + n
            wanted = torch.nn.functional.rms_norm(x, (64,), weight, 1e-6)
            return all(bool((normed(x, weight) - wanted).abs().max() < 1e-5) for _ in range(5))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(1, 9)))
    assert len(plans.current()) == 1


def test_what_runs_without_a_plan(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    described = problems_of("rms_norm", monkeypatch)
    x, weight = row(2, 64), row(64)
    rest = (1e-6, None, None, None, True, False)
    normed(x, weight)
    described.clear()
    define.call("rms_norm", x, weight, *rest)
    assert not described
    dispatched: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            dispatched.append(str(func))
            return func(*args, **kwargs or {})

    with Watch():
        define.call("rms_norm", x, weight, *rest)
    assert dispatched == ["toolkit.rms_norm.default"]
    with torch.enable_grad():
        assert not plans.unobserved(x)
    with torch.profiler.profile():
        assert not plans.unobserved(x)
    with FakeTensorMode() as fakes:
        fake = fakes.from_tensor(x)
        assert not plans.unobserved(fake)
    assert plans.key_of(define._operations["rms_norm"], (fake, weight)) is None
    assert type(define.call("rms_norm", fake, fakes.from_tensor(weight), *rest)[0]) is type(fake)
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.vmap(lambda x: define.call("rms_norm", x, weight, *rest)[0].sum())(x[None])
    described.clear()
    with define.record_problems() as found:
        define.call("rms_norm", x, weight, *rest)
        normed(x, weight)
    assert len(found) == 1
    assert described


def test_describing_problems_leaves_zeros_in_integer_results(started: list[Any]) -> None:
    """So that PyTorch's operations on CUDA may read them as indices."""
    scores = row(3, 40)
    torch.use_deterministic_algorithms(True)  # fills uninitialized integers with the largest
    try:
        with define.describe_problems() as found:
            chosen, weights = define.call("choose_experts", scores, 40, 4, False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not started
    assert [one[1].top_k for one in found] == [4]
    assert (chosen.shape, weights.shape) == ((3, 4), (3, 4))
    assert not chosen.any()


def test_without_a_compiled_kernel_there_is_no_plan(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launch, "run", lambda launch: None)
    normed(row(2, 64), row(64))
    assert plans.refused() == {"rms_norm": {"ValueError: nothing was compiled: the kernel ran in Triton's interpreter"}}


@pytest.mark.skipif(DEVICE != "cpu", reason="replaces the compiled kernel")
def test_kernels_that_are_started_in_another_way_run_without_a_plan(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = normed(row(2, 64), row(64))
    monkeypatch.setattr(Compiled, "run", lambda self, grid: None)
    plans.forget()
    for _ in range(2):
        assert torch.equal(normed(row(2, 64), row(64)), expected)
    assert "positional arguments" in next(iter(plans.refused()["rms_norm"]))


def test_only_so_many_plans_are_kept(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MOST_PLANS", 2)
    for tokens in range(1, 6):
        normed(row(tokens, 64), row(64))
        assert len(plans.current()) <= 2


def test_weights_that_moved_are_read_where_they_are(started: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    described = problems_of("packed_matmul", monkeypatch)
    matrices = [PackedMatrix(find_scheme("int4-g32"), (64, 64), "cpu") for _ in range(2)]
    for n, matrix in enumerate(matrices):
        for part in matrix.parameters():
            part.copy_(torch.randint(0, 7, part.shape, generator=torch.Generator().manual_seed(n)).to(part.dtype))
        matrix.to(DEVICE)
    x = row(1, 64, dtype=torch.bfloat16)
    wanted = [products._matmul_reference(x.cpu(), m.to("cpu").operand(), "int4-g32", "none") for m in matrices]
    first, second = (matrix.to(DEVICE) for matrix in matrices)
    assert _near(products.matmul(x, first), wanted[0])
    described.clear()
    assert _near(products.matmul(x, second), wanted[1])
    for name, part in second.parts().items():
        first.get_parameter(name).data = part.clone()
    assert _near(products.matmul(x, first), wanted[1])
    assert not described
    assert not plans.refused()


def _near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found.cpu() - wanted).norm() < 0.02 * wanted.norm())
