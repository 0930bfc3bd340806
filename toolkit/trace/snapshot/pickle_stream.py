"""Read pickles of plain data as a stream: nothing in the file is imported or called, and memory use is bounded.

A pickle is a program for a small stack machine. `PickleStream` implements the instructions that plain data need (dicts, lists,
tuples, text, bytes, numbers, None; protocols 2 to 5) and raises an error for every other instruction. It reads a few megabytes
of the file at a time. Dicts that are records go to a `Sink`, and lists get their row numbers in place of them, so that millions
of records never exist as Python objects. Equal lists of references are kept once, as a `Shared`.
"""

from __future__ import annotations

import pickletools
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NoReturn, Protocol

from toolkit.core.errors import TraceError

CHUNK_BYTES = 4 << 20
MAX_TEXT_BYTES = 256 << 20
MAX_OBJECTS = 40_000_000  # in containers, records not counted: about 3 GB; real snapshots have thousands
MAX_MEMO = 1 << 28
MAX_DEPTH = 500
MAX_INT_BYTES = 16
_LONGEST_OP = 1 + 1 + 255  # bytes of an instruction that is read without checking how much data is left

# A list of at most 999 references: picklers write longer lists in batches of 1000, so those are not complete after one batch
_SHARED = re.compile(rb"\](\x94|q.|r....)(?:\(((?:j....|h.){1,999}+)e|(j....|h.)a)", re.DOTALL)
_REFERENCE = re.compile(rb"j(....)|h(.)", re.DOTALL)
_OBJECT_OPS = b"Rbo\x81\x92\x82\x83\x84PQ\x97\x98\x8f\x90\x91"  # instructions that call, or make objects other than plain data


class Shared:
    """A list of references. The same object stands for all lists of the same references; `note` is for the reader's use."""

    __slots__ = ("items", "note")

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items
        self.note: Any = None


class Sink(Protocol):
    """Takes records, which are dicts in a list that have the key `key`."""

    key: str

    def record(self, record: dict[Any, Any]) -> int:
        """Store a record and return its row number."""

    def skim(self, stream: PickleStream, data: bytes, at: int) -> tuple[Sequence[int], int]:
        """Take the records that `data` has from `at` on; return their row numbers and the position after the last one.

        Appends to `stream.memo` the values that their instructions would append. `data` may end within a record.
        """


class PickleStream:
    """Reads the pickle in `file`, of `size` bytes. `asked` begins the text of its errors."""

    def __init__(self, file: BinaryIO, size: int, asked: str, sink: Sink | None = None) -> None:
        self.asked = asked
        self.memo: list[Any] = []
        self._file, self._size, self._sink = file, size, sink
        self._data, self._at, self._read, self._safe = b"", 0, 0, -1
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._shared: dict[bytes, Shared] = {}
        self._texts: dict[bytes, str] = {}
        self._objects = 0

    def load(self) -> Any:
        """Return the value that the pickle holds. Raises TraceError if it is damaged or is not plain data."""
        ops = _OPS
        try:
            while True:
                if self._at > self._safe:
                    self._fill()
                op = self._data[self._at]
                self._at += 1
                run = ops.get(op)
                if run is not None:
                    run(self)
                elif op == ord("."):
                    (value,) = self._stack
                    return value
                else:
                    self._refuse(op)
        except TraceError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError, OSError) as error:
            raise self.damaged(type(error).__name__) from error
        except MemoryError as error:
            raise TraceError(self.asked, "it needs more memory than there is", "Open it on a larger machine") from error

    def damaged(self, found: str) -> TraceError:
        """Return the error for a file whose content is invalid."""
        at = self._read - len(self._data) + self._at
        found = f"the pickle ends early, after {self._size} bytes" if at >= self._size else f"{found} near byte {at}"
        return TraceError(self.asked, f"it is damaged ({found})", "Copy the complete file again, or write the snapshot again")

    def text(self, raw: bytes) -> str:
        """Decode UTF-8. Equal short texts are the same object."""
        found = self._texts.get(raw)
        if found is None:
            found = str(raw, "utf-8", "surrogatepass")
            self._objects += 1
            if len(raw) <= 256 and len(self._texts) < 1_000_000:
                self._texts[raw] = found
        return found

    def shared(self, references: bytes) -> Shared:
        """Return the list of the objects that `references` (instructions that get objects from the memo) refer to."""
        found = self._shared.get(references)
        if found is None:
            memo, numbers = self.memo, _REFERENCE.findall(references)
            items = tuple([memo[int.from_bytes(wide or narrow, "little")] for wide, narrow in numbers])
            found = self._shared[references] = Shared(items)
        return found

    def _fill(self, n: int = 0) -> None:
        """Read the next chunk, of at least `n` bytes if the file has them, and check the limits on memory."""
        left = self._data[self._at :]
        wanted = max(n - len(left), CHUNK_BYTES)
        fresh = self._file.read(wanted)
        self._read += len(fresh)
        self._data, self._at = left + fresh, 0
        self._safe = len(self._data) - (_LONGEST_OP if len(fresh) == wanted else 1)
        if not self._data:
            raise IndexError
        kept = self._objects + len(self._stack)
        if kept > MAX_OBJECTS or len(self.memo) > MAX_MEMO:
            found = f"it has more than {min(kept, MAX_OBJECTS):,} objects in addition to its events, unlike any snapshot"
            raise TraceError(self.asked, found, "Write the snapshot again")

    def _take(self, n: int) -> bytes:
        """Return the next `n` bytes."""
        ahead = len(self._data) - self._at
        if n > ahead:
            if n > min(MAX_TEXT_BYTES, self._size - self._read + ahead):
                raise self.damaged(f"it announces {n:,} more bytes than it has or may have")
            self._fill(n)
        taken = self._data[self._at : self._at + n]
        if len(taken) < n:
            raise IndexError
        self._at += n
        return taken

    def _number(self, n: int, signed: bool = False) -> int:
        self._at += n
        return int.from_bytes(self._data[self._at - n : self._at], "little", signed=signed)

    def _refuse(self, op: int) -> NoReturn:
        """Raise the error for an instruction that plain data do not need; it names the function or class, if there is one."""
        if op in b"ci":
            lines = self._data[self._at : self._at + 400].split(b"\n", 2)
            wanted = "import " + ".".join(line.decode("utf-8", "replace")[:100] for line in lines[:2])
        elif op == 0x93:
            wanted = "import " + ".".join(part[:100] for part in self._stack[-2:] if isinstance(part, str))
        elif op in _OBJECT_OPS:
            wanted = "create an object with " + next(known.name for known in pickletools.opcodes if known.code == chr(op))
        else:
            raise self.damaged(f"unknown instruction {bytes((op,))!r}")
        do = "Only memory snapshots can be opened: pickles written by torch.cuda.memory._dump_snapshot"
        raise TraceError(self.asked, f"it is a pickle that would {wanted}, and was not run", do)

    # containers

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        if len(self._marks) > MAX_DEPTH:
            raise TraceError(
                self.asked, f"it is nested deeper than {MAX_DEPTH} levels, unlike any snapshot", "Write the snapshot again"
            )

    def _pop(self, n: int = 0) -> list[Any]:
        """Remove the last `n` values from the stack, or all values since the last mark."""
        at = len(self._stack) - n if n else self._marks.pop()
        if n and at < (self._marks[-1] if self._marks else 0):
            raise IndexError
        items = self._stack[at:]
        del self._stack[at:]
        self._objects += len(items)
        return items

    def _empty_dict(self) -> None:
        rows, end = self._sink.skim(self, self._data, self._at - 1) if self._sink is not None else ((), 0)
        if rows:
            self._at = end
            self._objects -= len(rows)
            self._stack.extend(rows)
        else:
            self._stack.append({})

    def _empty_list(self) -> None:
        match = _SHARED.match(self._data, self._at - 1)
        if match is None:
            self._stack.append([])
            return
        self._at = match.end()
        self._stack.append(self.shared(match[2] or match[3]))
        self._put(len(self.memo) if match[1] == b"\x94" else int.from_bytes(match[1][1:], "little"))

    def _append(self, items: list[Any]) -> None:
        target, sink = self._stack[-1], self._sink
        if type(target) is not list:
            raise self.damaged("items are added to a value that is not a list")
        if sink is not None:
            items = [self._row(sink, item) if type(item) is dict and sink.key in item else item for item in items]
        target.extend(items)

    def _row(self, sink: Sink, record: dict[Any, Any]) -> int:
        self._objects -= 1 + 2 * len(record)
        row = sink.record(record)
        record.clear()  # the memo keeps the dict
        return row

    def _set(self, items: list[Any]) -> None:
        target, keys = self._stack[-1], items[::2]
        if type(target) is not dict or len(items) % 2:
            raise self.damaged("items are set in a value that is not a dict")
        if not _KEYS.issuperset(map(type, keys)):  # hashing tuples that are nested without limit would overflow the C stack
            raise self.damaged("a key of a dict is neither text nor a number")
        target.update(zip(keys, items[1::2], strict=True))

    # values and the memo

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _put(self, index: int) -> None:
        if index != len(self.memo):  # picklers count up
            raise self.damaged("its memo skips or repeats a number")
        self.memo.append(self._stack[-1])

    def _bytes(self, n: int) -> None:
        self._objects += 1
        self._stack.append(self._take(self._number(n)))

    def _long(self, n: int) -> None:
        length = self._number(n)
        if length > MAX_INT_BYTES:
            raise self.damaged(f"a number of {length:,} bytes")
        self._stack.append(self._number(length, signed=True))

    def _frame(self) -> None:
        self._at += 8  # its length

    def _proto(self) -> None:
        protocol = self._number(1)
        if protocol > 5:
            raise TraceError(self.asked, f"it is a pickle of protocol {protocol}", "Write it with a protocol from 2 to 5")


_KEYS = frozenset((str, int, float, bytes, bool, type(None)))
_OPS: dict[int, Callable[[PickleStream], None]] = {
    ord("("): PickleStream._mark, ord("}"): PickleStream._empty_dict, ord("]"): PickleStream._empty_list,
    ord("a"): lambda p: p._append(p._pop(1)), ord("e"): lambda p: p._append(p._pop()),
    ord("s"): lambda p: p._set(p._pop(2)), ord("u"): lambda p: p._set(p._pop()),
    ord(")"): lambda p: p._push(()), ord("t"): lambda p: p._push(tuple(p._pop())), 0x85: lambda p: p._push(tuple(p._pop(1))),
    0x86: lambda p: p._push(tuple(p._pop(2))), 0x87: lambda p: p._push(tuple(p._pop(3))),
    0x94: lambda p: p._put(len(p.memo)), ord("q"): lambda p: p._put(p._number(1)), ord("r"): lambda p: p._put(p._number(4)),
    ord("h"): lambda p: p._push(p.memo[p._number(1)]), ord("j"): lambda p: p._push(p.memo[p._number(4)]),
    0x8C: lambda p: p._push(p.text(p._take(p._number(1)))), ord("X"): lambda p: p._push(p.text(p._take(p._number(4)))),
    0x8D: lambda p: p._push(p.text(p._take(p._number(8)))), ord("C"): lambda p: p._bytes(1), ord("B"): lambda p: p._bytes(4),
    0x8E: lambda p: p._bytes(8), 0x96: lambda p: p._bytes(8), ord("K"): lambda p: p._push(p._number(1)),
    ord("M"): lambda p: p._push(p._number(2)), ord("J"): lambda p: p._push(p._number(4, signed=True)),
    0x8A: lambda p: p._long(1), 0x8B: lambda p: p._long(4), ord("G"): lambda p: p._push(*struct.unpack(">d", p._take(8))),
    ord("N"): lambda p: p._push(None), 0x88: lambda p: p._push(True), 0x89: lambda p: p._push(False),
    0x80: PickleStream._proto, 0x95: PickleStream._frame,
}  # fmt: skip
