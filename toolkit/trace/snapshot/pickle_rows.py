"""The entries of a memory history as they lie in a pickle's bytes: a file has millions, all made alike.

From an entry that was read instruction by instruction, a `Layout` learns which keys there are and where in the memo; a regular
expression of it then takes a whole entry in one match. What doesn't look like that, whatever the reason, goes the slow way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.trace.snapshot.pickle_stream import GONE, PickleStream

NUMBERS = ("addr", "size", "stream", "time_us")  # in the order in which a layout gives them
MAX_LAYOUTS = 8

_LONG = 0x8A
_NUMBER = rb"(\x8a(?:\x06.{6}|\x07.{7}|\x05.{5}|\x08.{8})|J....|K.|M..)"
_REFERENCE = rb"(h.|j....)"
_LIST = rb"(\]\x94(?:\((?:(?:j....)++|(?:h.)++)++e|h.a|j....a)?+|h.|j....)"
_TEXT = b"|".join(rb"\x%02x.{%d}" % (n, n) for n in range(1, 48))
_OTHER = rb"(?:h.|j....|\x8c(%b)\x94|N|K.|\x88|\x89|M..|J....|G.{8})" % _TEXT


class Layout:
    """Entries with the keys `names`, in that order, which the memo has at one of `places[name]`.

    `match.group(*groups)` is the action, the numbers of NUMBERS and the frames, then the texts that the memo gets, in order.
    """

    def __init__(self, names: Iterable[str], places: dict[str, list[int]]) -> None:
        parts, found, texts = [rb"}\x94\("], {}, []
        for i, name in enumerate(names, 1):
            parts.append(b"(?:" + b"|".join(re.escape(_get(place)) for place in places[name]) + b")")
            if name in (*NUMBERS, "device_free"):
                parts.append(_NUMBER)
            elif name in ("action", "frames"):
                parts.append(_REFERENCE if name == "action" else _LIST)
            else:
                parts.append(_OTHER)
                texts.append(i)
            found[name] = i
        empty = len(found) + 1  # the group of what such entries don't have
        self.match = re.compile(b"".join(parts) + b"u()", re.DOTALL).match
        self.groups = (*(found.get(name, empty) for name in ("action", *NUMBERS, "frames")), *texts)


class Layouts:
    """Skims entries; `take(action, address, size, stream, time_us, stack)` is given columns of them.

    `code` gives an action's number, `note` that of a stack's frames.
    """

    def __init__(self, code: Callable[[Any], int], note: Callable[[Any], int], take: Callable[..., None]) -> None:
        self.code, self.note, self.take = code, note, take
        self.skimmed = 0  # entries that were taken this way
        self._layouts: list[Layout] = []
        self._known: set[tuple[Any, ...]] = set()
        self._codes: dict[bytes, int] = {}
        self._stacks: dict[bytes, tuple[Any, int]] = {}  # what the memo gets of one, and its number
        self._words: dict[bytes | None, str | None] = {}

    def learn(self, stream: PickleStream, record: dict[Any, Any]) -> None:
        """Make a layout of what `record` looks like, once."""
        names = tuple(record)
        if names in self._known or len(self._known) >= MAX_LAYOUTS:
            return
        self._known.add(names)
        if "action" not in record or ("frames" in record and names[-1] != "frames"):
            return
        places: dict[str, list[int]] = {name: [] for name in names}
        for i, value in enumerate(stream.memo):
            if type(value) is str and value in places:
                places[value].append(i)
        if all(0 < len(found) < 9 for found in places.values()):
            self._layouts.append(Layout(names, places))

    def skim(self, stream: PickleStream, data: bytes, at: int) -> int:
        """Take the entries of `data` from `at` on for as long as they have a known layout. Returns where the last ends."""
        for layout in self._layouts:
            fits, groups = layout.match, layout.groups
            run: list[Any] = []
            while (match := fits(data, at)) is not None:
                run.append(match.group(*groups))
                at = match.end()
            if run:  # no longer than a batch of the pickler's, which what it lays between them ends
                self._take(stream, run)
        return at

    def _take(self, stream: PickleStream, run: list[Any]) -> None:
        """Entries in order, each as its layout's groups have it."""
        action, address, size, on_stream, time, frames, *texts = zip(*run, strict=True)
        stacks = self._stacks_of(stream, frames, [column for column in texts if any(column)])
        for raw in set(action).difference(self._codes):
            self._codes[raw] = self.code(stream.memo[_index(raw)])
        numbers = _values(address + size + on_stream + time).reshape(4, -1)
        self.take(list(map(self._codes.__getitem__, action)), *numbers, stacks)
        self.skimmed += len(run)

    def _stacks_of(self, stream: PickleStream, frames: Sequence[bytes], texts: list[Any]) -> list[int]:
        """The stacks' numbers. The memo grows by what each entry adds to it: itself, its texts, its list of frames."""
        memo, words = stream.memo, self._words
        found: list[Any] = list(map(self._stacks.get, frames))
        missing = [i for i, stack in enumerate(found) if stack is None] if None in found else []
        for i in missing:
            found[i] = self._stack(stream, frames[i])
        for raw in set().union(*texts).difference(words):
            words[raw] = None if raw is None else stream.text(raw[1:])
        added = [repeat(GONE, len(found)), *(map(words.__getitem__, column) for column in texts), [stack[0] for stack in found]]
        memo.extend([value for value in chain.from_iterable(zip(*added, strict=True)) if value is not None])
        numbers = [stack[1] for stack in found]
        for i in missing:  # a list may be one that an entry just before had
            if found[i] is _THERE:
                numbers[i] = self.note(memo[_index(frames[i])])
        return numbers

    def _stack(self, stream: PickleStream, raw: bytes) -> tuple[Any, int]:
        """What the memo gets of a stack that wasn't seen before, None where nothing, and its number."""
        if raw[:1] == b"]":
            value = stream.shared(raw[3:-1] if raw[2:3] == b"(" else raw[2:-1]) if len(raw) > 2 else ()
            return self._stacks.setdefault(raw, (value, self.note(value)))
        return _THERE if raw else (None, self.note(()))


_THERE = (None, -1)  # a list that is in the memo: most are referred to once, if at all, and not worth remembering


def _values(raw: Sequence[bytes]) -> NDArray[np.int64]:
    """The numbers of instructions: 1 byte, or 2 where a length follows, then the number, lowest byte first."""
    table = np.array(raw, "S10").view(np.uint8).reshape(len(raw), 10)  # what is shorter gets zeros behind it
    op, length = table[:, 0], table[:, 1]
    numbers = np.where((op == _LONG)[:, None], table[:, 2:], table[:, 1:9]).view("<u8")[:, 0]
    bits = np.where(op == _LONG, length * 8, np.where(op == ord("J"), 32, 64)).astype(np.uint64)  # K and M have no sign
    if (numbers >> (bits - np.uint64(1))).any():
        raise ValueError("a negative number")
    return numbers.view(np.int64)


def _index(raw: bytes) -> int:
    return int.from_bytes(raw[1:], "little")


def _get(index: int) -> bytes:
    """The instruction that gets `index` from the memo, as picklers write it."""
    return b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")
