"""Pickles of plain data, read as a stream: nothing is imported, called or built, and the large lists are never whole in memory.

A pickle is a program for a small stack machine. This one knows the instructions that plain data need (dicts, lists, tuples,
texts, bytes, numbers, None; protocols 2 to 5) and refuses all others by the name of what they would call. The file is read
a few megabytes at a time. Where the outermost dict has, under the name that a `Sink` gives, a list of lists of dicts, the
dicts ("records") go to the sink one by one and are dropped.

Lists that hold nothing but references to what was read before, as the frames of a stack do, are kept once, as a `Shared`.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from toolkit.core.errors import TraceError

CHUNK_BYTES = 4 << 20
MAX_TEXT_BYTES = 256 << 20
MAX_OBJECTS = 40_000_000  # in containers, records not counted: some 3 GB; the snapshots there are have thousands
MAX_MEMO = 1 << 28
MAX_DEPTH = 500
MAX_INT_BYTES = 16
_LONGEST_OP = 1 + 1 + 255  # bytes of an instruction whose length isn't asked for

# fewer than 1000: a pickler closes such a list at once, while longer ones grow by a thousand at a time
_SHARED = re.compile(rb"\](\x94|q.|r....)(?:\(((?:j....|h.){1,999}+)e|(j....|h.)a)", re.DOTALL)
_REFERENCE = re.compile(rb"j(....)|h(.)", re.DOTALL)
_NAMES = {
    ord("R"): "call a function", ord("b"): "set an object's state", ord("o"): "make an object",
    0x81: "make an object", 0x92: "make an object", 0x82: "make a registered object", 0x83: "make a registered object",
    0x84: "make a registered object", ord("P"): "ask for an outside object", ord("Q"): "ask for an outside object",
    0x97: "use a buffer outside of the file", 0x98: "use a buffer outside of the file",
    0x8F: "make a set", 0x90: "make a set", 0x91: "make a set",
}  # fmt: skip


class Shared:
    """A list of references, the same object wherever the file has the same references. `note` is its reader's."""

    __slots__ = ("items", "note")

    def __init__(self, items: tuple[Any, ...]) -> None:
        self.items = items
        self.note: Any = None


class Record(dict[Any, Any]):
    """A dict of the large lists, for as long as it is being read. `group` is that of its list."""

    group = 0


class Records(list[Any]):
    """One of the large lists; it stays empty. `group` is its place among them."""

    group = 0


class Groups(list[Any]):
    """The list of the large lists."""


class _Gone:
    """What the memo has in place of a record that was handed over."""


GONE = _Gone()


class Sink(Protocol):
    """Where the records go."""

    key: str

    def record(self, group: int, record: dict[Any, Any]) -> None:
        """Take a record of the list number `group`."""

    def skim(self, stream: PickleStream, group: int, data: bytes, at: int) -> int:
        """Take as many records as can be taken at once from `data` at `at` on; returns where they end, `at` for none.

        Adds to `stream.memo` what their instructions would. `data` may end anywhere.
        """

    def learn(self, stream: PickleStream, record: dict[Any, Any]) -> None:
        """A record was read by the slow way: a sink that skims can see from it what the next ones will look like."""


class PickleStream:
    """Reads the pickle in `file`, of `size` bytes. `asked` begins its errors."""

    def __init__(self, file: BinaryIO, size: int, asked: str, sink: Sink | None = None) -> None:
        self.asked, self.protocol = asked, 0
        self.memo: list[Any] = []
        self._file, self._size, self._sink = file, size, sink
        self._data, self._at, self._read, self._safe = b"", 0, 0, -1
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._shared: dict[bytes, Shared] = {}
        self._texts: dict[bytes, str] = {}
        self._objects = 0
        self._new_texts = 0
        self._groups = 0
        self._done = False

    def load(self) -> Any:
        """What the pickle holds. Raises TraceError where it is damaged, or isn't plain data."""
        ops = _OPS
        try:
            while not self._done:
                if self._at > self._safe:
                    self._refill()
                op = self._data[self._at]
                self._at += 1
                run = ops.get(op)
                if run is None:
                    self._refuse(op)
                else:
                    run(self)
            (value,) = self._stack
        except TraceError:
            raise
        except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error, OverflowError, OSError) as error:
            raise self.damaged(f"{type(error).__name__} near byte {self._read - len(self._data) + self._at}") from error
        except MemoryError as error:
            raise TraceError(self.asked, "it needs more memory than there is", "Open it on a larger machine") from error
        return value

    def damaged(self, found: str) -> TraceError:
        """The error for a file that isn't what it should be."""
        if self._at >= len(self._data) and self._read >= self._size:
            found = f"the pickle ends early, after {self._size} bytes"
        return TraceError(self.asked, f"damaged ({found})", "Copy the file again, whole, or make it again")

    def text(self, raw: bytes) -> str:
        """UTF-8 as a str, the same object for the same bytes."""
        found = self._texts.get(raw)
        if found is None:
            found = str(raw, "utf-8", "surrogatepass")
            self._new_texts += 1
            if len(raw) <= 256 and len(self._texts) < 1_000_000:
                self._texts[raw] = found
        return found

    def shared(self, references: bytes) -> Shared:
        """The list of what `references` (instructions to get from the memo) refer to."""
        found = self._shared.get(references)
        if found is None:
            memo, numbers = self.memo, _REFERENCE.findall(references)
            items = tuple([memo[int.from_bytes(wide or narrow, "little")] for wide, narrow in numbers])
            found = self._shared[references] = Shared(items)
        return found

    def _refill(self) -> None:
        """Have the next instruction whole in memory, or all that is left of the file. Also where limits are checked."""
        left = self._data[self._at :]
        fresh = self._file.read(CHUNK_BYTES)
        self._read += len(fresh)
        self._data, self._at = left + fresh, 0
        self._safe = len(self._data) - (_LONGEST_OP if len(fresh) == CHUNK_BYTES else 1)
        if not self._data:
            raise IndexError
        kept = self._objects + self._new_texts + len(self._stack)
        if kept > MAX_OBJECTS or len(self.memo) > MAX_MEMO:
            found = f"more than {min(kept, MAX_OBJECTS):,} objects outside of its trace"
            raise TraceError(self.asked, found, "No snapshot has as many: make it again")

    def _take(self, n: int) -> bytes:
        """The next `n` bytes."""
        end = self._at + n
        if end > len(self._data):
            if n > MAX_TEXT_BYTES or n > self._size - self._read + len(self._data) - self._at:
                raise self.damaged(f"it says that {n:,} more bytes follow")
            parts = [self._data[self._at :]]
            missing = n - len(parts[0])
            parts.append(self._file.read(missing))
            self._read += len(parts[1])
            self._data, self._at, self._safe = b"", 0, -1
            if len(parts[1]) < missing:
                raise IndexError
            return b"".join(parts)
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def _number(self, n: int) -> int:
        at = self._at
        self._at = at + n
        return int.from_bytes(self._data[at : at + n], "little")

    def _refuse(self, op: int) -> None:
        """The error for an instruction that plain data have no need of, naming what it wants."""
        if op in b"ci":
            lines = self._data[self._at : self._at + 400].split(b"\n", 2)
            names = [line.decode("utf-8", "replace")[:100] for line in lines[:2]]
        elif op == 0x93:
            names = [str(part)[:100] for part in self._stack[-2:] if isinstance(part, str)]
        else:
            what = _NAMES.get(op)
            if what is None:
                raise self.damaged(f"instruction {bytes((op,))!r} at byte {self._read - len(self._data) + self._at - 1}")
            raise self._unsafe(what)
        raise self._unsafe(f"use {'.'.join(names)}")

    def _unsafe(self, what: str) -> TraceError:
        found = f"a pickle that would {what}; it wasn't run"
        return TraceError(self.asked, found, "Only plain data are read: pickles of torch.cuda.memory._dump_snapshot")

    # containers

    def _inside(self, kind: type) -> Any:
        """The container of `kind` that the next value will be appended to; None where it is another."""
        stack, marks = self._stack, self._marks
        parent = stack[marks[-1] - 1] if marks and marks[-1] else None
        if type(parent) is kind:
            return parent
        return stack[-1] if stack and type(stack[-1]) is kind else None

    def _mark(self) -> None:
        self._marks.append(len(self._stack))
        if len(self._marks) > MAX_DEPTH:
            raise TraceError(self.asked, f"nested deeper than {MAX_DEPTH} levels", "No snapshot is: make it again")

    def _since_mark(self) -> list[Any]:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        self._objects += len(items)
        return items

    def _empty_dict(self) -> None:
        records = self._inside(Records) if self._sink else None
        if records is None:
            self._stack.append({})
            return
        if (
            self.protocol >= 4 and self._marks[-1] and self._stack[self._marks[-1] - 1] is records
        ):  # not the one of a lone append
            end = self._sink.skim(self, records.group, self._data, self._at - 1)  # type: ignore[union-attr]
            if end > self._at - 1:
                self._at = end
                return
        record = Record()
        record.group = records.group
        self._stack.append(record)

    def _empty_list(self) -> None:
        match = _SHARED.match(self._data, self._at - 1)
        if match is not None:
            self._at = match.end()
            self._put(len(self.memo) if match[1] == b"\x94" else int.from_bytes(match[1][1:], "little"), None)
            self.memo[-1] = shared = self.shared(match[2] or match[3])
            self._stack.append(shared)
            return
        value: list[Any] = []
        if self._sink is not None:
            stack = self._stack
            in_top = len(self._marks) < 2 and len(stack) % 2 == 0 and len(stack) and type(stack[0]) is dict
            if in_top and stack[-1] == self._sink.key and not self._groups:
                value = Groups()
            elif self._inside(Groups) is not None:
                value = records = Records()
                records.group = self._groups
                self._groups += 1
        self._stack.append(value)

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not Records:
            if not isinstance(target, list):
                raise self.damaged("a list that grows after it was closed")
            target.extend(items)
            return
        self._objects -= len(items)
        for item in items:
            if isinstance(item, dict):
                self._sink.record(target.group, item)  # type: ignore[union-attr]
            elif item is not GONE:
                raise self.damaged("an entry of its trace is no dict")

    def _set_items(self) -> None:
        items = self._since_mark()
        self._set(items)
        record = self._stack[-1]
        if type(record) is Record:  # whole: picklers set up to a thousand items at once
            self._objects -= len(items)
            self._stack[-1] = GONE
            self._sink.record(record.group, record)  # type: ignore[union-attr]
            if self.protocol >= 4:
                self._sink.learn(self, record)  # type: ignore[union-attr]

    def _set(self, items: list[Any]) -> None:
        target, keys = self._stack[-1], items[::2]
        if not isinstance(target, dict) or len(items) % 2:
            raise self.damaged("an entry for what is no dict")
        for key in keys:
            if type(key) not in _KEYS:  # others could be nested without end
                raise self.damaged("a key of a dict that is neither text nor number")
        target.update(zip(keys, items[1::2], strict=True))

    def _last(self, n: int) -> list[Any]:
        at = len(self._stack) - n
        if at < (self._marks[-1] if self._marks else 0):
            raise IndexError
        items = self._stack[at:]
        del self._stack[at:]
        self._objects += n
        return items

    # the memo

    def _put(self, index: int, value: Any) -> None:
        memo = self.memo
        if type(value) is Record:
            value = GONE
        if index == len(memo):
            memo.append(value)
        else:  # picklers count up
            raise self.damaged("its memo skips a number" if index > len(memo) else "its memo changes")

    def _memoize(self) -> None:
        value = self._stack[-1]
        self.memo.append(GONE if type(value) is Record else value)

    def _binget(self) -> None:
        at = self._at
        self._at = at + 1
        self._stack.append(self.memo[self._data[at]])

    # texts and numbers

    def _text_of(self, n: int) -> None:
        self._stack.append(self.text(self._take(self._number(n))))

    def _bytes_of(self, n: int) -> None:
        self._new_texts += 1
        self._stack.append(self._take(self._number(n)))

    def _byte(self) -> None:
        at = self._at
        self._at = at + 1
        self._stack.append(self._data[at])

    def _int4(self) -> None:
        (value,) = struct.unpack_from("<i", self._data, self._at)
        self._at += 4
        self._stack.append(value)

    def _long(self, n: int) -> None:
        length = self._number(n)
        if length > MAX_INT_BYTES:
            raise self.damaged(f"a number of {length:,} bytes")
        self._stack.append(int.from_bytes(self._take(length), "little", signed=True))

    def _float(self) -> None:
        (value,) = struct.unpack(">d", self._take(8))
        self._stack.append(value)

    # the rest

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _skip(self, n: int) -> None:
        self._at += n

    def _proto(self) -> None:
        self.protocol = self._number(1)
        if self.protocol > 5:
            raise TraceError(self.asked, f"a pickle of protocol {self.protocol}", "Protocols 2 to 5 are read")

    def _stop(self) -> None:
        self._done = True


_KEYS = (str, int, float, bytes, bool, type(None))
_OPS: dict[int, Callable[[PickleStream], None]] = {
    ord("("): PickleStream._mark, ord("}"): PickleStream._empty_dict, ord("]"): PickleStream._empty_list,
    ord("a"): lambda p: p._append(p._last(1)), ord("e"): lambda p: p._append(p._since_mark()),
    ord("s"): lambda p: p._set(p._last(2)), ord("u"): PickleStream._set_items,
    ord(")"): lambda p: p._push(()), ord("t"): lambda p: p._push(tuple(p._since_mark())),
    0x85: lambda p: p._push(tuple(p._last(1))), 0x86: lambda p: p._push(tuple(p._last(2))),
    0x87: lambda p: p._push(tuple(p._last(3))),
    0x94: PickleStream._memoize, ord("q"): lambda p: p._put(p._number(1), p._stack[-1]),
    ord("r"): lambda p: p._put(p._number(4), p._stack[-1]),
    ord("h"): PickleStream._binget, ord("j"): lambda p: p._push(p.memo[p._number(4)]),
    0x8C: lambda p: p._text_of(1), ord("X"): lambda p: p._text_of(4), 0x8D: lambda p: p._text_of(8),
    ord("C"): lambda p: p._bytes_of(1), ord("B"): lambda p: p._bytes_of(4), 0x8E: lambda p: p._bytes_of(8),
    0x96: lambda p: p._bytes_of(8), ord("K"): PickleStream._byte, ord("M"): lambda p: p._push(p._number(2)),
    ord("J"): PickleStream._int4, 0x8A: lambda p: p._long(1), 0x8B: lambda p: p._long(4), ord("G"): PickleStream._float,
    ord("N"): lambda p: p._push(None), 0x88: lambda p: p._push(True), 0x89: lambda p: p._push(False),
    0x80: PickleStream._proto, 0x95: lambda p: p._skip(8), ord("."): PickleStream._stop,
}  # fmt: skip
