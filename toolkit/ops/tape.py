"""Tapes: launch the kernels of a decode step again without running the model's Python code.

Decode steps on one cache differ only in values: each launches the same kernels with the same pointers, if intermediate results
stay where they are. A `Tape` records one step: the launches of operations that run by a plan (see `plans`), and calls of a few
PyTorch functions. `play` makes the same launches, one after the other, and takes the host a few microseconds for each.

What a step does to Python objects isn't repeated, and Python values are those of the recorded step. A CUDA graph asks the same
of a step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.ops import zeros

aten = torch.ops.aten


def _embedding(table: Tensor, ids: Tensor, *options: Any, out: Tensor) -> None:
    torch.index_select(table, 0, ids.reshape(-1), out=out.view(-1, table.shape[1]))


# Functions and how to call them with `out=`. These write with the kernels that make a new tensor; many others fill a new one
# first and copy it.
INTO: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: aten.add.out, aten.addmm.default: aten.addmm.out, aten.bmm.default: aten.bmm.out,
    aten.cat.default: aten.cat.out, aten.clamp.default: aten.clamp.out, aten.div.Tensor: aten.div.out,
    aten.embedding.default: _embedding, aten.gelu.default: aten.gelu.out, aten.mm.default: aten.mm.out,
    aten.mul.Tensor: aten.mul.out, aten.ne.Tensor: aten.ne.Tensor_out, aten.sigmoid.default: aten.sigmoid.out,
    aten.silu.default: aten.silu.out, aten.sub.Tensor: aten.sub.out, aten.tanh.default: aten.tanh.out,
}  # fmt: skip
COPIES = frozenset((aten._to_copy.default, aten.clone.default))  # their result is made by `copy_`
IN_PLACE = frozenset(
    (aten.add_.Tensor, aten.copy_.default, aten.index_copy_.default, aten.masked_fill_.Scalar, aten.zero_.default)
)
# Views, and functions that only allocate: they launch nothing.
NOTHING = frozenset((aten.empty.memory_format, aten.empty_like.default, aten.empty_strided.default, aten._unsafe_view.default))

Start = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class _Thread(threading.local):
    tape: Tape | None = None


_thread = _Thread()


def recording() -> Tape | None:
    """Return the tape that records on this thread, or None. One that can't be played records no more."""
    tape = _thread.tape
    return tape if tape is not None and tape.why_not is None else None


class Tape(TorchDispatchMode):
    """The launches of the work inside `with tape:`, and all memory that they use.

    `why_not` is the reason why the tape can't be played, or None: an operation without a plan, or a PyTorch function that this
    file doesn't know.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.why_not: str | None = "nothing was recorded"
        self._starts: list[Start] = []
        self._held: dict[int, Any] = {}  # by id: tensors and plans, which must outlive the tape
        self._given: dict[int, Tensor] = {}  # tensors from elsewhere, such as weights
        self._pointers: list[int] = []  # of `_given`
        self._scratch: dict[int, Tensor] = {}  # by size in bytes

    def __enter__(self) -> Self:
        self._stream = zeros.current_stream(self.device)
        self._zeros = None if self._stream is None else zeros.shared_zeros(self.device, self._stream)
        self.why_not = "a graph is being captured, or another GPU is the current one" if self._zeros is None else None
        _thread.tape = self
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        super().__exit__(kind, error, traceback)
        _thread.tape = None
        self._pointers = [tensor.data_ptr() for tensor in self._given.values()]
        if error is not None:
            self.refuse("the work raised an error")

    def play(self) -> bool:
        """Launch the recorded work again; return False, without a launch, if the tape can't be played now.

        That is the case if memory from elsewhere has moved, on another stream, and in a capture.
        """
        if self.why_not is not None or self._stream is None or zeros.current_stream(self.device) != self._stream:
            return False
        if zeros.shared_zeros(self.device, self._stream) is not self._zeros:
            return False
        if list(map(Tensor.data_ptr, self._given.values())) != self._pointers:
            return False
        for start, arguments, options in self._starts:
            start(*arguments, **options)
        return True

    def refuse(self, why: str) -> None:
        """Note why the tape can't be played, and free what it holds."""
        self.why_not = self.why_not or why
        self._starts, self._held, self._given, self._scratch = [], {}, {}, {}

    def start(self, run: Callable[..., Any], *arguments: Any) -> None:
        """Start a kernel and record it. Called by the function of a plan."""
        run(*arguments)
        self._starts.append((run, arguments, {}))

    def hold(self, made: Any) -> None:
        """Keep a tensor that the work makes, or a plan."""
        self._held[id(made)] = made

    def scratch(self, n_bytes: int) -> Tensor:
        """Return memory that operations of the tape share, since they run one after the other."""
        if n_bytes not in self._scratch:
            self._scratch[n_bytes] = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        return self._scratch[n_bytes]

    def use(self, operands: Any) -> None:
        """Keep the tensors among operands. Those that the work didn't make may move, which `play` has to notice."""
        for tensor in _tensors(operands):
            if id(tensor) not in self._held:
                self._held[id(tensor)] = self._given[id(tensor)] = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        whole = NotImplemented if self.why_not is not None else self._by_parts(func, args, options)
        if whole is not NotImplemented:
            return whole
        result = func(*args, **options)
        if self.why_not is None:
            self.use((args, tuple(options.values())))
            if not self._add(func, args, options, result):
                self.refuse(f"{func} isn't known")
            for tensor in _tensors(result):
                self._held.setdefault(id(tensor), tensor)
        return result

    def _by_parts(self, func: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a function that consists of others, and record those; return NotImplemented for all other functions.

        In inference mode such functions arrive whole. Some, such as `reshape` and `to`, return a view or a copy.
        """
        super().__enter__()
        try:
            return func.decompose(*args, **options)
        finally:
            super().__exit__(None, None, None)

    def _add(self, func: Any, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> bool:
        """Record a call of PyTorch; return whether it is known."""
        if func in INTO:
            self._starts.append((INTO[func], args, {**options, "out": result}))
        elif func in COPIES:
            self._starts.append((result.copy_, args[:1], {}))
        elif func in IN_PLACE:
            self._starts.append((func, args, options))
        return func in INTO or func in COPIES or func in IN_PLACE or func in NOTHING or func.is_view


def _tensors(one: Any) -> Iterator[Tensor]:
    if isinstance(one, Tensor):
        yield one
    elif isinstance(one, (list, tuple)):
        for each in one:
            yield from _tensors(each)
