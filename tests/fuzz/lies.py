"""What files may lie about: every field of JSON, safetensors and GGUF in turn, and bytes at random.

A mutant is a description and the files it changes: bytes to write under a name, or None for a file that is gone.
"""

from __future__ import annotations

import copy
import json
import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Files = dict[str, bytes | None]
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 8, 64, 1000, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 62,
    1 << 63, 1 << 64, 10**40,
    -(1 << 63), 0.5, -0.0, 1e-45, 1e308, -1.5, math.nan, math.inf, -math.inf, "", "1", "\0", "default", "silu",
    "a" * 5000, "../../../etc/passwd", "\ud800", [], [1], [None], ["a", "b"], [[[]]], [1 << 70],
    {}, {"a": 1}, {"rope_type": "yarn"},
)  # fmt: skip
NUMBERS: tuple[int, ...] = (
    0, 1, 2, 3, 31, 255, (1 << 16) - 1, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1,
    1 << 63, (1 << 64) - 32, (1 << 64) - 1,
)  # fmt: skip
PATHS = (
    "../outside.safetensors", "/etc/passwd", "..", ".", "", "a/../../outside.safetensors", "..\\outside.safetensors",
    "model-00001-of-00002.safetensors\0", "file:///etc/passwd", "absent.safetensors", "config.json", "~", "x" * 300,
    "model.safetensors.index.json", "./model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors/",
)  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    says: str
    files: Files


def spots(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a JSON document, itself first."""
    yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from spots(child, (*path, key))


def with_lie(document: Any, path: tuple[Any, ...], lie: Any) -> Any:
    """A copy of `document` with `lie` at `path`; an Ellipsis takes the value away."""
    if not path:
        return lie
    changed = copy.deepcopy(document)
    node = changed
    for key in path[:-1]:
        node = node[key]
    if lie is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = lie
    return changed


def json_mutants(
    name: str, document: Any, rng: random.Random, each: int, only: int | None = None, top: tuple[Any, ...] = ()
) -> Iterator[Mutant]:
    """Every value of a JSON file (or `only` some of them) replaced by `each` of the lies, and taken away."""
    paths = [path for path in spots(document) if path[: len(top)] == top]
    for path in paths if only is None or len(paths) <= only else rng.sample(paths, only):
        chosen = VALUES if each >= len(VALUES) else rng.sample(VALUES, each)
        for lie in (*chosen, *([...] if path else [])):
            written = json.dumps(with_lie(document, path, lie)).encode()
            yield Mutant(f"{name} {'.'.join(map(str, path))[:80]} = {lie!r:.40}", {name: written})


def safetensors_file(header: Any, data: bytes, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def safetensors_parts(raw: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack_from("<Q", raw)[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def safetensors_mutants(name: str, raw: bytes, rng: random.Random, each: int = 10) -> Iterator[Mutant]:
    """Every field of a safetensors header in turn, its length, and what single fields can't say."""
    header, data = safetensors_parts(raw)
    text = json.dumps(header).encode()
    for length in (*NUMBERS, len(text) - 1, len(text) + 1, len(text) + 8, len(raw), len(raw) - 8, 100_000_001):
        yield Mutant(f"{name} header of {length} bytes", {name: safetensors_file(text, data, length)})
    tensors = [key for key in header if key != "__metadata__"]
    for key in tensors:
        entry = header[key]
        for mutant in json_mutants(name, entry, rng, each):
            lied = json.loads(next(iter(mutant.files.values())) or b"")
            yield Mutant(f"{key}: {mutant.says}", {name: safetensors_file(header | {key: lied}, data)})
        other = header[rng.choice(tensors)]
        start, end = entry["data_offsets"]
        shapes = ([*entry["shape"], 1], entry["shape"][::-1], [n * 2 for n in entry["shape"]], [0, 1 << 62], [1] * 40)
        changes: list[dict[str, Any]] = [{"shape": shape} for shape in shapes]
        changes += [{"dtype": kind} for kind in ("F16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "f32")]
        changes += [
            {"data_offsets": pair} for pair in (other["data_offsets"], [end, start], [start + 4, end + 4], [start, end, end])
        ]
        changes += [{"data_offsets": [start + far, end + far]} for far in (1 << 31, 1 << 62, 1 << 63, -start - 1)]
        for change in changes:
            yield Mutant(f"{name} {key} with {change!r:.60}", {name: safetensors_file(header | {key: entry | change}, data)})
        yield Mutant(f"{name} {key} as another", {name: safetensors_file(header | {key: other}, data)})
        renamed = {(f"{k}x" if k == key else k): value for k, value in header.items()}
        yield Mutant(f"{name} {key} renamed", {name: safetensors_file(renamed, data)})
        without = {k: value for k, value in header.items() if k != key}
        yield Mutant(f"{name} without {key}", {name: safetensors_file(without, data)})
        twice = text[:-1] + f", {json.dumps(key)}: {json.dumps(entry)}}}".encode()
        yield Mutant(f"{name} {key} twice", {name: safetensors_file(twice, data)})
    for odd in (
        b"",
        b"[]",
        b"null",
        b"{}",
        b"[" * 99_999,
        b'{"a":' * 5_000,
        b"\xff" * 64,
        text + b"\0" * 9,
        text.replace(b"F32", b"F3\x00"),
    ):
        yield Mutant(f"{name} header {odd[:20]!r}", {name: safetensors_file(odd, data)})


def index_mutants(name: str, document: Any, rng: random.Random, each: int = 8) -> Iterator[Mutant]:
    """Every entry of a shard index: other files, paths out of the folder, no texts at all."""
    yield from json_mutants(name, document, rng, each)
    for tensor in document["weight_map"]:
        for path in PATHS:
            lied = with_lie(document, ("weight_map", tensor), path)
            yield Mutant(f"index sends {tensor} to {path!r:.40}", {name: json.dumps(lied).encode()})
    files = sorted(set(document["weight_map"].values()))
    turned = dict(zip(files, files[1:] + files[:1], strict=True))
    circle = {tensor: turned[file] for tensor, file in document["weight_map"].items()}
    yield Mutant("index with the shards in a circle", {name: json.dumps(document | {"weight_map": circle}).encode()})
    for file in files:
        yield Mutant(f"{file} is gone", {file: None})
        yield Mutant(f"{file} is empty", {file: b""})
        yield Mutant(f"{file} is the index itself", {file: json.dumps(document).encode()})
        for path in (*PATHS, file):
            lied = {tensor: (path if home == file else home) for tensor, home in document["weight_map"].items()}
            yield Mutant(f"index calls {file} {path!r:.40}", {name: json.dumps(document | {"weight_map": lied}).encode()})


_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def gguf_fields(raw: bytes) -> Iterator[tuple[str, int, int, bool]]:
    """Every number in a GGUF header: what it is, where it stands, how many bytes it has, whether it is a float."""
    tensors, pairs = struct.unpack_from("<QQ", raw, 8)
    yield from (("magic", 0, 4, False), ("version", 4, 4, False), ("tensor count", 8, 8, False), ("pair count", 16, 8, False))
    at = 24

    def text(what: str) -> Iterator[tuple[str, int, int, bool]]:
        nonlocal at
        yield f"length of {what}", at, 8, False
        length = struct.unpack_from("<Q", raw, at)[0]
        if length:
            yield f"first letters of {what}", at + 8, min(length, 2), False
        at += 8 + length

    for number in range(pairs):
        yield from text(f"key {number}")
        key, kind = raw[at - 24 : at].decode(errors="replace"), struct.unpack_from("<I", raw, at)[0]
        yield f"type of {key}", at, 4, False
        at += 4
        count = 1
        if kind == 9:
            kind, count = struct.unpack_from("<IQ", raw, at)
            yield from ((f"item type of {key}", at, 4, False), (f"items of {key}", at + 4, 8, False))
            at += 12
        for item in range(count):
            shown = item < 3
            if kind == 8:
                found = list(text(f"{key}[{item}]"))
                yield from found if shown else ()
            else:
                if shown:
                    yield f"{key}[{item}]", at, _SIZES[kind], kind in (6, 12)
                at += _SIZES[kind]
    for number in range(tensors):
        yield from text(f"name of tensor {number}")
        dimensions = struct.unpack_from("<I", raw, at)[0]
        yield f"dimensions of tensor {number}", at, 4, False
        yield from ((f"size {d} of tensor {number}", at + 4 + 8 * d, 8, False) for d in range(dimensions))
        at += 4 + 8 * dimensions
        yield from ((f"type of tensor {number}", at, 4, False), (f"offset of tensor {number}", at + 4, 8, False))
        at += 12


def gguf_mutants(name: str, raw: bytes, rng: random.Random, each: int = 8) -> Iterator[Mutant]:
    """Every number of a GGUF header in turn: near its value, and far from it."""
    for what, at, size, is_float in gguf_fields(raw):
        value = int.from_bytes(raw[at : at + size], "little")
        top = 1 << (8 * size)
        lies = {(value + 1) % top, (value - 1) % top, 0, top - 1, top >> 1}
        lies |= {number % top for number in rng.sample(NUMBERS, min(each, len(NUMBERS)))}
        if is_float:
            code = "<f" if size == 4 else "<d"
            lies |= {
                int.from_bytes(struct.pack(code, odd), "little") for odd in (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-40)
            }
        for lie in sorted(lies - {value}):
            yield Mutant(f"{name} {what} = {lie}", {name: raw[:at] + lie.to_bytes(size, "little") + raw[at + size :]})


def random_mutants(name: str, raw: bytes, rng: random.Random, count: int, head: int | None = None) -> Iterator[Mutant]:
    """Bits flipped, bytes overwritten, parts cut out, doubled or cut off; in the first `head` bytes mostly."""
    for number in range(count):
        changed = bytearray(raw)
        far = len(raw) if head is None or rng.random() < 0.2 else min(head, len(raw))
        at = rng.randrange(far)
        kind = rng.choice(("flip", "flips", "overwrite", "cut", "cut out", "double"))
        if kind == "flip":
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == "flips":
            for _ in range(rng.randrange(2, 12)):
                changed[rng.randrange(far)] ^= 1 << rng.randrange(8)
        elif kind == "overwrite":
            changed[at : at + 8] = rng.choice((b"\0" * 8, b"\xff" * 8, rng.randbytes(8)))
        elif kind == "cut":
            del changed[at:]
        elif kind == "cut out":
            del changed[at : at + rng.randrange(1, 40)]
        else:
            changed[at:at] = changed[at : at + rng.randrange(1, 40)]
        yield Mutant(f"{name} {kind} at {at}, number {number}", {name: bytes(changed)})
