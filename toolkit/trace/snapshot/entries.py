"""The entries of a memory history as columns of numbers, taken from dicts or directly from the bytes of a pickle.

A file has millions of entries, nearly all in the same layout: the same keys, in the same order, at the same places of the memo.
`Entries.skim` learns each layout from the first entry that has it and builds a regular expression that matches a whole entry.
Entries without a known layout are read by `pickle_stream`, instruction by instruction.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.trace.assemble import Strings
from toolkit.trace.snapshot import frames
from toolkit.trace.snapshot.block_sizes import ACTION
from toolkit.trace.snapshot.pickle_stream import PickleStream, Shared
from toolkit.trace.snapshot.rows import History

MAX_LAYOUTS = 8
_KEYS = ("action", "addr", "size", "stream", "time_us", "frames")

_LONG = 0x8A
_NUMBER = rb"(?:\x8a(?:\x06.{6}|\x07.{7}|\x05.{5}|\x08.{8})|J....|K.|M..)"
_GET = rb"(?:h.|j....)"
_LIST = rb"(?:\]\x94(?:\((?:(?:j....)++|(?:h.)++)++e|h.a|j....a)?+|h.|j....)"
_TEXT = b"|".join(rb"\x%02x.{%d}" % (n, n) for n in range(1, 48))
_OTHER = rb"(?:h.|j....|\x8c(%b)\x94|N|K.|\x88|\x89|M..|J....|G.{8}|%b)" % (_TEXT, _NUMBER)  # its group is a new text
_ITEM = rb"(%b)(?:%b|%b)" % (_GET, _LIST, _OTHER)
_ENTRY = re.compile(rb"}\x94\(((?:%b){1,64}+)u" % _ITEM, re.DOTALL)


class Entries:
    """The entries of all devices in the order of the file, and the texts that the column `where` refers to.

    `shorten` makes the name of a file short enough to show (see `frames.chain`).
    """

    key = "action"

    def __init__(self) -> None:
        self.strings = Strings()
        self.columns = {name: array("q") for name in ("action", "address", "size", "stream", "time_us", "where")}
        self.skimmed = 0  # how many entries were read in bulk
        self._layouts: list[tuple[re.Pattern[bytes], list[int]]] = []

    def __len__(self) -> int:
        return len(self.columns["where"])

    def record(self, record: Mapping[Any, Any]) -> int:
        """Add an entry and return its row number. Raises TypeError, KeyError, ValueError or OverflowError for another dict."""
        get = record.get
        address = get("addr", get("device_free", 0))
        numbers = (ACTION.get(record["action"], 0), address, record["size"], get("stream", 0), get("time_us", 0))
        if type(address) is not int or min(numbers) < 0:
            raise ValueError("the address, size, stream or time of an entry is invalid")
        row = array("q", (*numbers, self.where(get("frames", ()))))
        for column, number in zip(self.columns.values(), row, strict=True):
            column.append(number)
        return len(self) - 1

    def where(self, stack: Any) -> int:
        """Return the code of the text that describes a stack, -1 if there is none."""
        if type(stack) is Shared:
            if stack.note is None:
                stack.note = self.where(stack.items)
            return int(stack.note)
        text = frames.chain(listed(stack))
        return -1 if text is None else self.strings.code(text)

    def history(self, rows: Sequence[int]) -> History:
        """Return the entries of the given row numbers. Raises IndexError or ValueError for any other number."""
        index = np.array(rows, np.int64)
        if (index < 0).any():
            raise ValueError("a negative row")
        return History(**{name: np.asarray(column)[index] for name, column in self.columns.items()})

    def skim(self, stream: PickleStream, data: bytes, at: int) -> tuple[Sequence[int], int]:
        """Add the entries of one layout from `at` on. Returns their row numbers and the position after the last one."""
        for pattern, groups in self._layouts:
            fits, run, end = pattern.match, [], at
            while (match := fits(data, end)) is not None:
                run.append(match.group(*groups))
                end = match.end()
            if run:  # at most 1000: picklers write lists in batches
                return self._add(stream, run), end
        return self.skim(stream, data, at) if self._learn(stream, data, at) else ((), at)

    def _learn(self, stream: PickleStream, data: bytes, at: int) -> bool:
        """Add the layout of the dict at `at`. Returns False if the dict is no entry, or if a key is not in the memo yet."""
        entry = _ENTRY.match(data, at) if len(self._layouts) < MAX_LAYOUTS else None
        gets = [item[0] for item in re.findall(_ITEM, entry[1], re.DOTALL)] if entry else []
        names = [stream.memo[_index(get)] for get in gets]
        if "action" not in names or "size" not in names:  # `record` needs both
            return False
        if not all(type(name) is str for name in names) or len({*names}) < len(names):
            return False
        if "frames" in names[:-1]:  # a list of frames must be the last value that an entry adds to the memo
            return False
        values = dict.fromkeys(names, _OTHER) | dict.fromkeys(_KEYS, b"(%b)" % _NUMBER)
        values |= {"action": b"(%b)" % _GET, "frames": b"(%b)" % _LIST}
        parts = [re.escape(get) + values[name] for get, name in zip(gets, names, strict=True)]
        pattern = re.compile(rb"}\x94\(" + b"".join(parts) + b"u()", re.DOTALL)
        if pattern.match(data, at) is None:  # an entry with text in place of a number
            return False
        groups = [names.index(key) + 1 if key in names else len(names) + 1 for key in _KEYS]  # the last group is empty
        self._layouts.append((pattern, groups + [i for i, name in enumerate(names, 1) if name not in _KEYS]))
        return True

    def _add(self, stream: PickleStream, run: list[Any]) -> Sequence[int]:
        """Add consecutive entries, given as the groups of their layout."""
        action, address, size, on_stream, time, stacks, *texts = zip(*run, strict=True)
        memo, rows = stream.memo, range(len(self), len(self) + len(run))
        columns: list[Any] = [
            rows
        ]  # the memo gets each entry, its new texts, and its list of frames unless that is a reference
        for column in texts:
            if any(column):
                words = {raw: raw and stream.text(raw[1:]) for raw in set(column)}
                columns.append([words[raw] for raw in column])
        lists = {raw: stream.shared(raw) if raw[:1] == b"]" else None for raw in set(stacks)}
        columns.append([lists[raw] for raw in stacks])
        actions = {raw: ACTION.get(memo[_index(raw)], 0) for raw in set(action)}
        memo.extend([value for value in chain.from_iterable(zip(*columns, strict=True)) if value is not None])
        codes = {raw: self.where(shared or (memo[_index(raw)] if raw else ())) for raw, shared in lists.items()}
        numbers = _values(address + size + on_stream + time).reshape(4, -1)
        added = ([actions[raw] for raw in action], *numbers, [codes[raw] for raw in stacks])
        for mine, more in zip(self.columns.values(), added, strict=True):
            mine.frombytes(np.asarray(more, np.int64).tobytes())
        self.skimmed += len(run)
        return rows


def listed(value: Any) -> Sequence[Any]:
    """Return the items of a list or tuple of the file; `Shared` is a list of references. Raises TypeError for other values."""
    if type(value) is Shared:
        return value.items
    if not isinstance(value, list | tuple):
        raise TypeError(f"{type(value).__name__} instead of a list")
    return value


def _values(raw: Sequence[bytes]) -> NDArray[np.int64]:
    """Decode instructions that push numbers: 1 byte, for long numbers a length, then the number in little-endian order."""
    table = np.array(raw, "S10").view(np.uint8).reshape(len(raw), 10)  # shorter instructions are padded with zeros
    op, length = table[:, 0], table[:, 1]
    numbers = np.where((op == _LONG)[:, None], table[:, 2:], table[:, 1:9]).view("<u8")[:, 0]
    bits = np.where(op == _LONG, length * 8, np.where(op == ord("J"), 32, 64)).astype(np.uint64)  # K and M are unsigned
    if (numbers >> (bits - np.uint64(1))).any():
        raise ValueError("a number is negative")
    return numbers.view(np.int64)


def _index(get: bytes) -> int:
    """The index in an instruction that gets a value from the memo."""
    return int.from_bytes(get[1:], "little")
