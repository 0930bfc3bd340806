"""Launch plans: repeat an operation on operands like earlier ones without asking its kernel again.

Before its kernels run on CUDA, an operation chooses a kernel, looks up a config, makes views and checks every tensor. For small
operands this takes the host longer than the GPU needs for the kernels. But launches depend only on shapes, strides, dtypes and
flags (see `Kernel.launches`). So the first call with operands of a kind makes a plan (see `launch_plan`), and later calls with
operands of the same kind allocate the results and start the same compiled kernels with other pointers.

A plan holds no values and no pointers of operands. Without a plan an operation runs as ever; `refused` returns the reasons.
The environment variable TOOLKIT_LAUNCH_PLANS=0 turns plans off, and with them the tapes of decode steps (see `tape`).
"""

from __future__ import annotations

import os
import sys
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch._C._autograd import _profiler_enabled
from torch.nn import Parameter

from toolkit.ops import zeros
from toolkit.ops.launch_plan import MISSING, Call, Operation, Plan, make_plan
from toolkit.ops.tape import Tape
from toolkit.weights.packed import Parts

PLAIN = frozenset((Tensor, Parameter))  # types of tensors that stand for nothing but themselves
ENABLED = os.environ.get("TOOLKIT_LAUNCH_PLANS") != "0"
FLAGS = frozenset((int, float, str, bool, type(None), torch.dtype))  # types of operands that are part of the key
MOST_PLANS = 4096  # then all are dropped: prompts of many lengths would make ever more

Plans = dict[tuple[Any, ...], Plan | str]

_plans: Plans = {}  # by the key of `key_of`; a text is the reason why there is no plan
_numbers: dict[tuple[Any, ...], int] = {}  # a number for each kind of packed matrix
_next_number = count(1)


def replay(operation: Operation, operands: tuple[Any, ...]) -> Any:
    """Run the operation by its plan and return the result; `MISSING` if it has none, or if the plan can't be used now."""
    found = key_of(operation, operands)
    if found is None:
        return MISSING
    key, pointers = found
    plan = _plans.get(key)
    if type(plan) is not Plan or _hooked():
        return MISSING
    try:
        return plan.run(pointers)
    except (TypeError, AttributeError) as error:  # this version of Triton starts its kernels in another way
        _plans[key] = f"{type(error).__name__}: {error}"
        return MISSING


def record(operation: Operation, operands: tuple[Any, ...], tape: Tape) -> Any:
    """Run the operation by its plan, and record its launches; `MISSING` if it has no plan."""
    found = key_of(operation, operands)
    plan = None if found is None else _plans.get(found[0])
    if found is None or type(plan) is not Plan or operands[0].device != tape.device or _hooked():
        return MISSING
    tape.use(operands)
    tape.hold(plan)
    return plan.record(found[1], tape)


def unobserved(first: Tensor) -> bool:
    """Return whether an operation on `first` may run by its plan, without PyTorch's dispatcher.

    It may if plans are enabled, gradients are off, and no dispatch mode, function mode or profiler is active.
    """
    return (
        ENABLED
        and (first.is_cuda or first.device.type in zeros.KINDS)
        and not is_grad_enabled()
        and not _len_torch_dispatch_stack()
        and not _len_torch_function_stack()
        and not _profiler_enabled()
    )


def learn(operation: Operation, call: Call, plans: Plans) -> None:
    """Make a plan from a call and add it to `plans`, which `current` returned before the call looked up its config.

    During a capture without `own_counters`, zeros belong to the graph: no plan is made then.
    """
    found = key_of(operation, call.operands)
    device = call.operands[0].device
    if found is None or found[0] in plans or zeros.shared_zeros(device, zeros.current_stream(device) or 0) is None:
        return
    key, pointers = found
    _watch_lookup()
    if len(plans) >= MOST_PLANS:
        plans.clear()
    try:
        plans[key] = make_plan(operation, call, pointers)
    except Exception as error:  # whatever went wrong: the operation has run, and can always run without a plan
        plans[key] = f"{type(error).__name__}: {error}"


def current() -> Plans:
    """Return the plans in use."""
    return _plans


def forget() -> None:
    """Drop all plans. Called when the lookup of configs forgets its choices."""
    global _plans
    _plans = {}  # calls that run now add theirs, with configs of before, to the old ones


@cache
def _watch_lookup() -> None:
    from toolkit.tune.lookup import when_forgotten

    when_forgotten(forget)


def refused() -> dict[str, set[str]]:
    """Return the reasons why operations ran without a plan, by the names of the operations."""
    found: dict[str, set[str]] = {}
    for key, plan in list(_plans.items()):
        if isinstance(plan, str):
            found.setdefault(key[0], set()).add(plan)
    return found


def key_of(operation: Operation, operands: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[int]] | None:
    """Return (key, pointers of all tensors); None if an operand only stands for others. Calls with equal keys share a plan.

    Triton compiles other code for pointers that are multiples of 16, so the key holds the remainders.
    """
    key: list[Any] = [operation.name]
    pointers: list[int] = []
    try:
        for operand in operands[: -operation.hints] if operation.hints else operands:
            kind = type(operand)
            if kind is Tensor or kind is Parameter:
                pointer = operand.data_ptr()
                pointers.append(pointer)
                stride = operand.is_contiguous() or operand.stride()
                key += (operand.shape, stride, operand.dtype, operand.get_device(), pointer & 15)
            elif kind in FLAGS:
                key.append(operand)
            elif kind is Parts:
                found = [tensor.data_ptr() for tensor in operand]
                known = operand.known
                if known is None or known[0] != found:
                    known = operand.known = _known(operand, found)
                key.append(known[1])
                pointers += found
            elif kind is list or kind is tuple:
                key.append(len(operand))
                for tensor in operand:
                    pointer = tensor.data_ptr()
                    pointers.append(pointer)
                    key += _facts_of(tensor, pointer)
            else:
                return None
    except (RuntimeError, TypeError):  # a tensor without memory, for example inside torch.vmap; or one that stands for another
        return None
    return tuple(key), pointers


def _known(parts: Parts, pointers: list[int]) -> tuple[list[int], int]:
    """Return the pointers, and a number that packed matrices of the same kind share."""
    facts = tuple(map(_facts_of, parts, pointers))
    return pointers, _numbers.get(facts) or _numbers.setdefault(facts, next(_next_number))


def _facts_of(tensor: Tensor, pointer: int) -> tuple[Any, ...]:
    if type(tensor) not in PLAIN:
        raise TypeError(f"a {type(tensor).__name__} has no pointer")
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device(), pointer & 15


def _hooked() -> bool:
    """Return whether somebody, such as Triton's profiler, wants to know about every launch."""
    hook = sys.modules["triton.knobs"].runtime.launch_enter_hook
    return hook is not None and bool(getattr(hook, "calls", True))
