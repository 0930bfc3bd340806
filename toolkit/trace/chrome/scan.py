"""Iterate over the events of a Chrome trace as JSON objects. Memory use is bounded, whatever the size of the file."""

from __future__ import annotations

import codecs
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from toolkit.core.errors import TraceError
from toolkit.core.files import open_regular
from toolkit.core.schema import parse_json
from toolkit.trace.arrays import most_unpacked

EXPORT = "Export it as a Chrome trace"  # what to do about JSON of another kind
_CHUNK = 1 << 22
_LONGEST_EVENT = 1 << 24  # in characters; a longer event means that the file is damaged
_LONGEST_HEAD = 1 << 26
_BETWEEN = re.compile(r"[\s,]*")
_EVENTS = re.compile(r'"traceEvents"\s*:\s*\[')
_NOT_JSON = re.compile(r"(:\s*)-?(?:inf|nan)(?=\s*[,}\]])", re.IGNORECASE)  # C++ prints these for the bandwidth of a 0 ns copy


class EventScanner:
    """An iterable over the events (dicts) of a file.

    Once iteration has begun, `head` has the fields before the events; once it has ended, also those after them.

    Reads both forms of the format, {"traceEvents": [...]} and a bare [...]. Iteration raises TraceError when it reaches a
    place where the text ends too early or is not JSON, after yielding the events before that place.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked = f"opening the trace {str(path)!r}"
        self.head: dict[str, Any] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            yield from self._events(self._chunks())
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise self.damaged(f"its compressed data is truncated or damaged ({error})") from error
        except OSError as error:
            raise TraceError(
                self.asked, f"it can't be read ({error.strerror})", "Check the path and its permissions"
            ) from error

    def _chunks(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        with open_regular(self.path, self.asked, TraceError) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            size, found = os.fstat(raw.fileno()).st_size, 0
            file = gzip.GzipFile(fileobj=raw) if packed else raw
            while data := file.read(_CHUNK):
                found += len(data)
                if packed and found > most_unpacked(size):
                    what = f"its {size:,} bytes become more than {most_unpacked(size):,}"
                    raise TraceError(self.asked, what, "Decompress it first, if you trust it: gunzip FILE")
                yield decoder.decode(data)

    def _events(self, chunks: Iterator[str]) -> Iterator[dict[str, Any]]:
        text, bare = self._find_events(chunks)
        scan = json.JSONDecoder(strict=False).scan_once  # type: ignore[attr-defined]
        at, repair = 0, False
        while True:
            at = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # also matches the empty text
            if text.startswith("]", at):
                self._check_end(text[at + 1 :], chunks, bare)
                return
            try:
                event, at = scan(text, at)
            except (StopIteration, json.JSONDecodeError) as error:
                place = error.value if isinstance(error, StopIteration) else error.pos
                if not repair and _NOT_JSON.search(text, at):
                    repair, text, at = True, _NOT_JSON.sub(r"\1null", text[at:]), 0
                    continue
                more = next(chunks, None)
                if more is None and bare and at == len(text):
                    return  # the format allows a bare list without its closing bracket
                if more is None or len(text) - at > _LONGEST_EVENT or place < len(text) - _CHUNK // 2 > at:
                    what = "the text ends inside its events" if more is None else f"not JSON near {text[place : place + 40]!r}"
                    raise self.damaged(what) from None
                text, at = text[at:] + (_NOT_JSON.sub(r"\1null", more) if repair else more), 0
                continue
            except RecursionError:
                raise self.damaged("its brackets are nested too deeply") from None
            except ValueError as error:
                raise self.damaged("a number has thousands of digits") from error
            if type(event) is dict:
                yield event

    def _find_events(self, chunks: Iterator[str]) -> tuple[str, bool]:
        """Return the text from the first event on, and whether the list is bare."""
        text = ""
        for chunk in chunks:
            text += chunk
            stripped = text.lstrip("\ufeff \t\r\n")
            if stripped.startswith("["):
                return stripped[1:], True
            match = _EVENTS.search(text)
            if match:
                self.head = self._fields(text[: match.start()])
                return text[match.end() :], False
            if len(text) > _LONGEST_HEAD:
                raise TraceError(self.asked, f'its first {len(text):,} characters have no "traceEvents"', EXPORT)
        try:
            parse_json(text.lstrip("\ufeff"), dict[str, Any])
        except ValueError:
            raise TraceError(self.asked, "it is not JSON, or cut off", "Give a Chrome trace, or copy the file again") from None
        raise TraceError(self.asked, 'it is JSON without "traceEvents"', EXPORT)

    def _fields(self, head: str) -> dict[str, Any]:
        """Return the fields of the text before the events, or {} if it is not an object (some tools write odd ones)."""
        try:
            return parse_json(_NOT_JSON.sub(r"\1null", head.lstrip("\ufeff").rstrip().removesuffix(",") + "}"), dict[str, Any])
        except ValueError as error:
            if '"toolkit"' in head:
                raise self.damaged("its header can't be read") from error
            return {}

    def _check_end(self, rest: str, chunks: Iterator[str], bare: bool) -> None:
        for chunk in chunks:
            rest = (rest + chunk)[-_CHUNK:]
        if bare:
            return
        if not rest.rstrip().endswith("}"):
            raise self.damaged("the text ends after its events, before the closing brace")
        with suppress(ValueError):  # too long: some tools write tables of stack frames
            self.head |= parse_json(_NOT_JSON.sub(r"\1null", "{" + rest.lstrip().removeprefix(",")), dict[str, Any])

    def damaged(self, found: str) -> TraceError:
        """Return the error for a truncated or damaged file."""
        return TraceError(self.asked, found, "Copy the complete file again, or export the trace again")
