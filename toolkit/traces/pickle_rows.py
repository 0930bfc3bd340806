"""The entries of a memory history as they lie in a pickle's bytes: a file has millions, all made alike.

From an entry that was read instruction by instruction, a `Layout` learns which keys there are and where in the memo; a regular
expression of it then takes a whole entry in one match. What doesn't look like that, whatever the reason, goes the slow way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.traces.pickle_stream import GONE, PickleStream

NUMBERS = ("addr", "size", "stream", "time_us")  # in the order in which a layout gives them
MAX_LAYOUTS = 8
_MAX_RUN = 1024  # entries at once: what is worked on stays in the processor's cache

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
        self._stacks: dict[bytes, tuple[Any, int]] = {}
        self._words: dict[bytes, str] = {}

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
            fits, groups, end = layout.match, layout.groups, -1
            while end < at:
                run: list[Any] = []
                end = at
                while (match := fits(data, at)) is not None and len(run) < _MAX_RUN:
                    run.append(match.group(*groups))
                    at = match.end()
                if run:
                    self._take(stream, run)
        return at

    def _take(self, stream: PickleStream, run: list[Any]) -> None:
        """Entries in order, each as its layout's groups have it."""
        action, address, size, on_stream, time, frames, *texts = zip(*run, strict=True)
        stacks = self._stacks_of(stream, frames, [column for column in texts if any(column)])
        codes = self._codes
        for raw in set(action).difference(codes):
            codes[raw] = self.code(stream.memo[_index(raw)])
        self.take([codes[raw] for raw in action], *map(_values, (address, size, on_stream, time)), stacks)
        self.skimmed += len(run)

    def _stacks_of(self, stream: PickleStream, frames: Sequence[bytes], texts: list[Any]) -> list[int]:
        """The stacks' numbers. The memo grows by what each entry adds to it: itself, its texts, its list of frames."""
        memo, memoize, known, words, found = stream.memo, stream.memo.append, self._stacks, self._words, []
        for raw, fresh in zip(frames, zip(*texts, strict=True) if texts else repeat(())):  # noqa: B905  # one has no end
            memoize(GONE)
            for word in fresh:
                if word is not None:
                    memoize(words[word] if word in words else words.setdefault(word, stream.text(word[1:])))
            stack = known.get(raw)
            if stack is not None:
                memoize(stack[0])
                found.append(stack[1])
            elif raw[:1] == b"]":
                value = stream.shared(raw[3:-1] if raw[2:3] == b"(" else raw[2:-1]) if len(raw) > 2 else ()
                memoize(value)
                found.append(self.note(value))
                known[raw] = value, found[-1]
            else:  # most lists are referred to once, if at all: not worth remembering
                found.append(self.note(memo[_index(raw)] if raw else ()))
        return found


def _values(raw: Sequence[bytes]) -> NDArray[np.int64]:
    """The numbers of instructions: 1 byte, or 2 where a length follows, then the number, lowest byte first."""
    table = np.array(raw, "S10").view(np.uint8).reshape(len(raw), 10)  # what is shorter gets zeros behind it
    long = table[:, :1] == 0x8A
    numbers = np.ascontiguousarray(np.where(long, table[:, 2:], table[:, 1:9]))
    signs = np.where(long[:, 0], 1 + table[:, 1], np.where(table[:, 0] == ord("J"), 4, 0))
    if (np.take_along_axis(table, signs[:, None], 1)[signs > 0] & 0x80).any():
        raise ValueError("a negative number")
    return numbers.view("<i8")[:, 0]


def _index(raw: bytes) -> int:
    return int.from_bytes(raw[1:], "little")


def _get(index: int) -> bytes:
    """The instruction that gets `index` from the memo, as picklers write it."""
    return b"h%c" % index if index < 256 else b"j" + index.to_bytes(4, "little")
