"""Make a plan of an operation's launches from a call, and run it with other operands of the same kind.

To find out where each pointer of a launch comes from, the operation is described a second time, with tensors on "meta" in place
of its operands. Each argument must then belong to the storage of an operand, of an output, or of the shared zeros
(`toolkit.ops.zeros`), and the pointers that this predicts for the call must be those that it used. Otherwise, for example if
the operation copies an operand first, it has no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from toolkit.core.callers import LAUNCH_PLAN
from toolkit.ops import zeros

if TYPE_CHECKING:
    from toolkit.kernels.base import Config, Kernel, Launch, Shape
    from toolkit.ops.tape import Tape

APART = 256  # bytes: the scratch tensors of a plan share one allocation, in which each begins at a multiple of it
MISSING = object()  # returned instead of a result if a plan can't be used

Problem = tuple["Kernel", "Shape", dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation that `toolkit.ops.define.define` registered. Its kernels don't read the last `hints` operands."""

    name: str
    problem: Callable[..., Problem]
    result: Callable[[dict[str, Tensor], Tensor], Any]
    hints: int = 0


@dataclass(frozen=True)
class Call:
    """A call of an operation that ran without a plan: its operands, what it launched, and what it returned."""

    operands: tuple[Any, ...]
    kernel: Kernel
    shape: Shape
    config: Config
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    launches: Sequence[Launch]
    compiled: Sequence[Any]  # by Triton, one per launch; None if nothing was launched
    returned: Any


class Plan(NamedTuple):
    """The launches of an operation for operands of one kind, as a Python function that starts Triton's compiled kernels."""

    run: Callable[[list[int]], Any]  # takes the pointers of all operands; returns the results, or MISSING
    record: Callable[[list[int], Tape], Any]  # the same, with a tape that records the launches


def make_plan(operation: Operation, call: Call, pointers: Sequence[int]) -> Plan:
    """Return a plan for operands like those of `call`; `pointers` are those of its tensors. Raises if there can't be one."""
    operands = [stand_in(operand) for operand in call.operands]
    kernel, shape, inputs = operation.problem(*operands)
    if kernel is not call.kernel or shape != call.shape:
        raise ValueError(f"{call.shape} is {shape} on meta")
    outputs = kernel.outputs(shape, inputs)
    launches = kernel.launches(shape, call.config, inputs, outputs)
    returned = _listed(operation.result(outputs, operands[0]))

    memory = _Memory(call)
    memory.add_operands([one for operand in operands for one in _listed(operand)], pointers)
    counts = memory.add_zeros(inputs)
    memory.add_results(outputs, returned)
    memory.add_scratch(outputs)
    device = call.operands[0].device
    code = _Code(device)
    code.begin(len(pointers), counts)
    for i, tensor in enumerate(returned):
        code.allocate(f"r{i}", tuple(tensor.shape), tensor.stride(), tensor.dtype)
    if memory.scratch_bytes:
        code.scratch(memory.scratch_bytes)
    for real, stand, compiled in zip(call.launches, launches, call.compiled, strict=True):
        if 0 not in real.grid:
            code.keep(compiled)
            code.start((*real.grid, 1, 1)[:3], handles(compiled), _arguments(real, stand, memory))
    results = [f"r{i}" for i in range(len(returned))]
    code.end(f"[{', '.join(results)}]" if type(call.returned) is list else "".join(results) or "None")
    return code.plan()


class _Code:
    """Writes the function of a plan. Its names: p0 (pointers to operands), z (zeros), r0 (results), s (scratch), v... (their
    pointers), k... (all values).

    Since values have names, plans for prompts of other lengths usually have the same text, which Python compiles only once.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lines: list[str] = []
        self.recorded: list[str] = []  # the lines of the function that records
        self.values: dict[str, Any] = {
            "MISSING": MISSING, "device": device, "torch": torch, "allocate": _allocator(device), "zeros": zeros,
        }  # fmt: skip

    def begin(self, operands: int, counts: bool) -> None:
        self.lines += ["def run(pointers):", "    stream = zeros.current_stream(device)"]
        self.lines += ["    if stream is None:", "        with torch.cuda.device(device):", "            return run(pointers)"]
        self.recorded += ["def record(pointers, tape):", "    stream = zeros.current_stream(device)"]
        self._both(f"[{', '.join(f'p{i}' for i in range(operands))}] = pointers")
        if counts:
            self._both("z = zeros.shared_zeros(device, stream)", "if z is None:", "    return MISSING", "vz = z.data_ptr()")

    def allocate(self, name: str, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> None:
        given = ", ".join(map(self._name, (size, stride, dtype)))
        self._both(f"{name} = allocate({given})", f"v{name} = {name}.data_ptr()")
        self.recorded.append(f"    tape.hold({name})")

    def scratch(self, n_bytes: int) -> None:
        self.lines.append(f"    s = allocate({self._name((n_bytes,))}, (1,), torch.uint8)")
        self.recorded.append(f"    s = tape.scratch({self._name(n_bytes)})")
        self._both("vs = s.data_ptr()")

    def start(self, grid: Sequence[int], handles: tuple[Any, Any, Any], arguments: Sequence[Any]) -> None:
        """Start a kernel as Triton does, whose launchers take a number for a pointer. Nobody is told of the launch."""
        run, function, metadata = map(self._name, handles)
        given = [self._pointer(one) if isinstance(one, _Pointer) else self._name(one) for one in arguments]
        words = [*map(self._name, grid), "stream", function, metadata, "None", "None", "None", *given]
        self.lines.append(f"    {run}({', '.join(words)})")
        self.recorded.append(f"    tape.start({run}, {', '.join(words)})")

    def keep(self, compiled: Any) -> None:
        """Keep a compiled kernel for as long as the plan, because Triton unloads it when it is freed."""
        self._name(compiled)

    def end(self, returned: str) -> None:
        self._both(f"return {returned}")

    def plan(self) -> Plan:
        for lines in (self.lines, self.recorded):
            exec(_compiled("\n".join(lines)), self.values)
        return Plan(self.values["run"], self.values["record"])

    def _both(self, *lines: str) -> None:
        """Add lines to both functions."""
        for each in (self.lines, self.recorded):
            each += [f"    {line}" for line in lines]

    def _pointer(self, pointer: _Pointer) -> str:
        return f"{pointer.name} + {self._name(pointer.offset)}" if pointer.offset else pointer.name

    def _name(self, value: Any) -> str:
        """Return the name of a global variable that holds the value."""
        name = f"k{len(self.values)}"
        self.values[name] = value
        return name


class _Pointer(NamedTuple):
    """An argument that points into a tensor: a variable of the plan, and bytes to add."""

    name: str
    offset: int


class _Memory:
    """Which variables of a plan point to the storages of tensors on "meta", and where those were that they stand for."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.scratch_bytes = 0
        self._found: dict[int, tuple[_Pointer, int]] = {}  # by storage: its beginning, and its address in the call
        self._kept: list[Tensor] = []  # so that no storage is freed and its number given to another

    def _add(self, tensor: Tensor, name: str, address: int, offset: int = 0) -> None:
        self._kept.append(tensor)
        self._found[_storage(tensor)] = _Pointer(name, offset), address

    def add_operands(self, operands: Sequence[Any], pointers: Sequence[int]) -> None:
        tensors = [one for one in operands if isinstance(one, Tensor)]
        for i, (tensor, pointer) in enumerate(zip(tensors, pointers, strict=True)):
            self._add(tensor, f"p{i}", pointer)

    def add_zeros(self, inputs: dict[str, Tensor]) -> bool:
        """Add the inputs that are the shared zeros, and return whether there are any."""
        device = self.call.operands[0].device
        shared = zeros.shared_zeros(device, zeros.current_stream(device) or 0)
        if shared is None:
            return False
        start = shared.data_ptr()
        counting = [t for n, t in inputs.items() if _storage(t) not in self._found and self.call.inputs[n].data_ptr() == start]
        for tensor in counting:
            self._add(tensor, "vz", start)
        return bool(counting)

    def add_results(self, outputs: dict[str, Tensor], returned: Sequence[Tensor]) -> None:
        """Add the outputs that are returned, each of them as a whole."""
        of_storage = {_storage(tensor): self.call.outputs[name] for name, tensor in outputs.items()}
        for i, (stand, real) in enumerate(zip(returned, _listed(self.call.returned), strict=True)):
            whole = stand.is_contiguous() and stand.nbytes == stand.untyped_storage().nbytes()
            alike = (stand.shape, stand.stride(), stand.dtype) == (real.shape, real.stride(), real.dtype)
            if _storage(stand) in self._found or not whole or not alike:
                raise ValueError(f"a result {list(real.shape)} is only a part of an output, or of an operand")
            if of_storage[_storage(stand)].data_ptr() != real.data_ptr():
                raise ValueError(f"a result {list(real.shape)} is another output on meta")
            self._add(stand, f"vr{i}", real.data_ptr())

    def add_scratch(self, outputs: dict[str, Tensor]) -> None:
        """Add all other outputs, as parts of one allocation. Those without memory get a null pointer, as PyTorch gives them."""
        for name, tensor in outputs.items():
            if _storage(tensor) not in self._found:
                held, address = tensor.untyped_storage().nbytes(), self.call.outputs[name].untyped_storage().data_ptr()
                self._add(tensor, "vs" if held else "0", address, self.scratch_bytes if held else 0)
                self.scratch_bytes += -(-held // APART) * APART

    def pointer(self, stand: Tensor, real: Tensor) -> _Pointer:
        """Return what points where `real` was in the call."""
        if _storage(stand) not in self._found:
            raise ValueError(f"a tensor {list(real.shape)} is neither an operand nor an output")
        place, address = self._found[_storage(stand)]
        offset = int(stand.storage_offset()) * stand.element_size()
        if address + offset != real.data_ptr():
            raise ValueError(f"a tensor {list(real.shape)} is elsewhere on meta")
        return _Pointer(place.name, place.offset + offset)


def _arguments(real: Launch, stand: Launch, memory: _Memory) -> list[Any]:
    """Return the arguments of a launch in the order of its function: pointers and constants."""
    if (stand.function, stand.grid) != (real.function, real.grid):
        raise ValueError(f"{real.function} has another launch on meta")
    found = []
    for name in real.function.arg_names:
        value, other = (one.arguments[name] if name in one.arguments else one.constants[name] for one in (real, stand))
        if isinstance(value, Tensor):
            found.append(memory.pointer(other, value))
        elif name in real.arguments and value != other:
            raise ValueError(f"{name} is {other} on meta, not {value}")
        else:
            found.append(value)
    return found


def handles(compiled: Any) -> tuple[Any, Any, Any]:
    """Return what starts a kernel that Triton has compiled and launched: its run, its function, and its metadata."""
    if compiled is None:
        raise ValueError("nothing was compiled: the kernel ran in Triton's interpreter")
    if compiled.function is None:
        raise ValueError("the kernel is not loaded")
    return compiled.run, compiled.function, compiled.packed_metadata


def stand_in(operand: Any) -> Any:
    """Return the operand with each of its tensors replaced by one on "meta", which has memory of its own."""
    if isinstance(operand, (list, tuple)):
        return [stand_in(one) for one in operand]
    if not isinstance(operand, Tensor):
        return operand
    return torch.empty_strided(operand.shape, operand.stride(), dtype=operand.dtype, device="meta")


def _listed(one: Any) -> Sequence[Any]:
    return one if isinstance(one, (list, tuple)) else [] if one is None else [one]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@lru_cache(1024)
def _compiled(code: str) -> CodeType:
    return compile(code, LAUNCH_PLAN, "exec")


@cache
def _allocator(device: torch.device) -> Callable[..., Tensor]:
    """Return a function of a size, strides and a dtype that allocates on `device`, which is the current device.

    It is the one that PyTorch's compiled code calls, which takes half as long as `torch.empty`, if it works in this version.
    """
    try:
        quick: Callable[..., Tensor] = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}")
        found = quick((2, 3), (3, 1), torch.int32)
        if (found.shape, found.stride(), found.dtype, found.device) == ((2, 3), (3, 1), torch.int32, device):
            return quick
    except (AttributeError, TypeError, RuntimeError):
        pass
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)
