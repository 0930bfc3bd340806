"""Tests of the GGUF reader: values agree with the gguf package, and every invalid header raises a clear error."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from toolkit.core.errors import FormatError, ToolkitError
from toolkit.weights.gguf_files import BLOCKS, QUANTISED, UNSUPPORTED, GgufFile, open_gguf

PLAIN = ["F32", "F16", "BF16"]
STRING, UINT32, ARRAY = 8, 4, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "w", shape: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def write(
    path: Path,
    tensors: list[bytes] | tuple[bytes, ...] = (),
    pairs: list[bytes] | tuple[bytes, ...] = (),
    data: bytes = bytes(32),
    magic: bytes = b"GGUF",
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> Path:
    """Write a GGUF file with the given header, valid or not."""
    counts = counts or (len(tensors), len(pairs))
    header = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


@pytest.mark.parametrize("kind", [*PLAIN, *BLOCKS])
def test_tensors_come_back_as_the_gguf_package_writes_them(tmp_path: Path, kind: str) -> None:
    rng, quant = np.random.default_rng(2), gguf.GGMLQuantizationType[kind]
    blocks = rng.integers(0, 256, (3, 2 * BLOCKS[kind][1]), dtype=np.uint8) if kind in BLOCKS else None
    drawn = gguf.quantize(rng.standard_normal((3, 512), dtype=np.float32), quant) if blocks is None else blocks
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "test")
    writer.add_tensor("w", drawn, raw_dtype=quant)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write_part()
    file = open_gguf(tmp_path / "x.gguf")
    stored = file.stored["w"]
    assert (stored.shape, stored.kind) == ((3, 512 if kind not in BLOCKS else 2 * BLOCKS[kind][0]), kind)
    if blocks is not None:
        assert np.array_equal(file.raw("w")["blocks"].numpy(), blocks)
        with pytest.raises(FormatError, match=f"it is stored as {kind}"):
            file.read("w")
    else:
        assert np.array_equal(file.read("w").float().numpy(), gguf.dequantize(drawn, quant))


def test_metadata_of_every_type(tmp_path: Path) -> None:
    values: dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]] = {
        "a.u8": (200, gguf.GGUFValueType.UINT8, None),
        "a.i16": (-5, gguf.GGUFValueType.INT16, None),
        "a.u64": (1 << 63, gguf.GGUFValueType.UINT64, None),
        "a.f32": (0.5, gguf.GGUFValueType.FLOAT32, None),
        "a.bool": (True, gguf.GGUFValueType.BOOL, None),
        "a.text": ("größe", gguf.GGUFValueType.STRING, None),
        "a.numbers": ([1, 2, 3], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32),
        "a.texts": (["x", "", "yz"], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING),
        "a.flags": ([True, False], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL),
    }
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "test")
    for key, (value, kind, inner) in values.items():
        writer.add_key_value(key, value, kind, inner)
    for write_part in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write_part()
    metadata = GgufFile(tmp_path / "x.gguf").metadata
    assert {key: metadata[key] for key in values} == {key: value for key, (value, _, _) in values.items()}


@pytest.mark.parametrize("kind", BLOCKS)
def test_rows_as_they_are_stored(tmp_path: Path, kind: str) -> None:
    elements, nbytes = BLOCKS[kind]
    assert (elements, nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.random.default_rng(4).integers(0, 256, (6, 2 * nbytes), dtype=np.uint8)
    number = gguf.GGMLQuantizationType[kind].value
    data = blocks.tobytes() + bytes(-blocks.nbytes % 32) + np.arange(4, dtype="<f4").tobytes()
    tensors = [tensor("w", (2 * elements, 3, 2), number), tensor("v", (4,), 0, len(data) - 16)]
    file = GgufFile(write(tmp_path / "x.gguf", tensors, data=data + bytes(16)))
    assert (file.stored["w"].rows, file.stored["w"].columns) == (6, 2 * elements)
    assert np.array_equal(file.raw("w", 2, 5)["blocks"].numpy(), blocks[2:5])
    assert np.array_equal(file.raw("w")["blocks"].numpy(), blocks)
    assert file.raw("w", 6, 6)["blocks"].shape == (0, 2 * nbytes)
    assert file.raw("v")["values"].tolist() == [[0, 1, 2, 3]]
    for rows in ((-1, 2), (2, 1), (0, 7)):
        with pytest.raises(FormatError, match="has 6 rows"):
            file.raw("w", *rows)


def test_every_type_has_the_name_that_the_gguf_package_gives_it() -> None:
    names = QUANTISED | UNSUPPORTED | dict(zip((0, 1, 30), PLAIN, strict=True))
    assert names == {kind.value: kind.name for kind in gguf.GGMLQuantizationType if kind.value in names}
    assert len(names) == len(PLAIN) + len(QUANTISED) + len(UNSUPPORTED)


def split(folder: Path, count: int = 3, numbers: dict[int, tuple[int, int]] | None = None, promised: int | None = None) -> Path:
    """Write a split model with one tensor per part ("t0", "t1", ...); the metadata of part i claims `numbers[i]`."""
    promised = count if promised is None else promised
    for i in range(count):
        no, of = (numbers or {}).get(i, (i, count))
        stated = {"split.no": no, "split.count": of} | ({"split.tensors.count": promised} if i == 0 else {})
        pairs = [pair(key, UINT32, struct.pack("<I", value)) for key, value in stated.items()]
        data = np.full(8, i, "<f4").tobytes()
        write(folder / f"m-{i + 1:05d}-of-{count:05d}.gguf", [tensor(f"t{i}")], pairs, data)
    return folder / f"m-00001-of-{count:05d}.gguf"


@pytest.mark.parametrize("given", [1, 3])
def test_a_split_model_is_read_as_one_from_any_part(tmp_path: Path, given: int) -> None:
    split(tmp_path)
    model = open_gguf(tmp_path / f"m-{given:05d}-of-00003.gguf")
    assert model.metadata["split.tensors.count"] == 3, "the metadata is the first part's"
    assert list(model.stored) == ["t0", "t1", "t2"]
    assert model.read("t2").tolist() == [2] * 8
    assert model.raw("t1")["values"].tolist() == [[1] * 8]


def test_parts_may_have_an_extension_in_capitals(tmp_path: Path) -> None:
    split(tmp_path)
    for part in list(tmp_path.iterdir()):
        part.rename(part.with_suffix(".GGUF"))
    assert list(open_gguf(tmp_path / "m-00001-of-00003.GGUF").stored) == ["t0", "t1", "t2"]


SPLIT: dict[str, tuple[dict[str, Any], str]] = {
    "the same part twice": ({"numbers": {2: (1, 3)}}, "part 1 of 3 (from 0), its name says 2 of 3"),
    "parts in a circle": ({"numbers": {0: (1, 3), 1: (2, 3), 2: (0, 3)}}, "its name says 0 of 3"),
    "a part of another model": ({"numbers": {1: (1, 2)}}, "part 1 of 2"),
    "fewer tensors than promised": ({"promised": 9}, "hold 3 tensors, but the first part promises 9"),
}


@pytest.mark.parametrize(("parts", "says"), SPLIT.values(), ids=SPLIT)
def test_parts_that_are_not_of_one_model_are_refused(tmp_path: Path, parts: dict[str, Any], says: str) -> None:
    with pytest.raises(FormatError) as caught:
        open_gguf(split(tmp_path, **parts))
    assert says in caught.value.found


def test_a_missing_part_is_named_and_twins_are_refused(tmp_path: Path) -> None:
    first = split(tmp_path)
    (tmp_path / "m-00002-of-00003.gguf").rename(tmp_path / "kept.gguf")
    with pytest.raises(FormatError, match=r"its folder lacks 1 of 3 parts: m-00002-of-00003\.gguf"):
        open_gguf(first)
    pairs = [pair("split.no", UINT32, struct.pack("<I", 1)), pair("split.count", UINT32, struct.pack("<I", 3))]
    write(tmp_path / "m-00002-of-00003.gguf", [tensor("t0")], pairs)
    with pytest.raises(FormatError, match="both hold it"):
        open_gguf(first)


HUGE = 1 << 62
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "magic": ({"magic": b"GGML"}, "b'GGML'"),
    "version 1": ({"version": 1}, "version 1"),
    "big-endian": ({"version": 3 << 24}, "big-endian"),
    "2**62 tensors": ({"counts": (HUGE, 0)}, "promises 4,611"),
    "2**62 metadata entries": ({"counts": (0, HUGE)}, "promises 4,611"),
    "fewer metadata entries than promised": ({"counts": (0, 3), "pairs": [pair("a", UINT32, bytes(4))]}, "'' occurs twice"),
    "key of 2**62 bytes": ({"counts": (0, 1), "pairs": [struct.pack("<Q", HUGE) + bytes(40)]}, "promises 4,611"),
    "text of 2**62 bytes": ({"pairs": [pair("a", STRING, struct.pack("<Q", HUGE))]}, "promises 4,611"),
    "array of 2**62 numbers": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", UINT32, HUGE))]}, "promises 4,611"),
    "array of 2**62 texts": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", STRING, HUGE))]}, "promises 4,611"),
    "arrays in arrays without end": ({"pairs": [pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 20)]}, "value type 9"),
    "unknown value type": ({"pairs": [pair("a", 13, bytes(8))]}, "value type 13"),
    "text not UTF-8": ({"pairs": [pair("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")]}, "UTF-8"),
    "key twice": ({"pairs": [pair("a", UINT32, bytes(4))] * 2}, "'a' occurs twice"),
    "split model under another name": ({"pairs": [pair("split.count", UINT32, struct.pack("<I", 3))]}, "one of 3 parts"),
    "split count of 2**31": ({"pairs": [pair("split.count", UINT32, struct.pack("<I", 1 << 31))]}, "split.count"),
    "alignment 0": ({"pairs": [pair("general.alignment", UINT32, bytes(4))], "tensors": [tensor()]}, "alignment"),
    "tensor twice": ({"tensors": [tensor(), tensor(offset=32)], "data": bytes(64)}, "'w' occurs twice"),
    "overlap": ({"tensors": [tensor("v"), tensor("w")]}, "'v' and 'w' overlap"),
    "offset not aligned": ({"tensors": [tensor(offset=4)]}, "not a multiple"),
    "offset past the end": ({"tensors": [tensor(offset=32)]}, "cut off"),
    "offset of 2**64": ({"tensors": [tensor(offset=(1 << 64) - 32)]}, "cut off"),
    "data cut off": ({"tensors": [tensor()], "data": bytes(31)}, "cut off"),
    "shape of 2**62": ({"tensors": [tensor(shape=(HUGE,))]}, "cut off"),
    "shape of 0 and 2**62": ({"tensors": [tensor(shape=(0, HUGE))]}, "impossible shape"),
    "9 dimensions": ({"tensors": [tensor(shape=(1,) * 9)]}, "9 dimensions"),
    "2**31 dimensions": ({"counts": (1, 0), "tensors": [text("w") + struct.pack("<I", 1 << 31) + bytes(64)]}, "dimensions"),
    "type not supported": ({"tensors": [tensor(shape=(256,), kind=11)]}, "Q3_K"),
    "type unknown": ({"tensors": [tensor(kind=999)]}, "number 999"),
    "half a block": ({"tensors": [tensor(shape=(100,), kind=12)]}, "blocks of 256"),
}


@pytest.mark.parametrize(("parts", "says"), BAD.values(), ids=BAD)
def test_bad_headers_are_refused(tmp_path: Path, parts: dict[str, Any], says: str) -> None:
    path = write(tmp_path / "x.gguf", **parts)
    with pytest.raises(FormatError) as caught:
        open_gguf(path)
    assert says in caught.value.found
    assert str(path) in caught.value.asked
    assert caught.value.do


def test_a_type_not_supported_names_tensor_and_types(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"'w'.*Q3_K.*Q8_0, Q4_K, Q5_K, Q6_K"):
        open_gguf(write(tmp_path / "x.gguf", [tensor(shape=(256,), kind=11)]))


def test_no_file_a_folder_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="a folder"):
        open_gguf(tmp_path)
    with pytest.raises(FormatError, match="no such file"):
        open_gguf(tmp_path / "absent.gguf")
    (tmp_path / "x.gguf").touch()
    with pytest.raises(FormatError, match="too few"):
        open_gguf(tmp_path / "x.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_do_worse_than_a_format_error(tmp_path: Path, data: st.DataObject) -> None:
    good = tmp_path / "good.gguf"
    if not good.exists():
        pairs = [pair("k", UINT32, bytes(4)), pair("t", ARRAY, struct.pack("<IQ", STRING, 2) + text("ab") + text("c"))]
        tensors = [tensor("a"), tensor("b", (256, 2), 12, 32)]
        write(good, tensors, pairs, data=bytes(32) + bytes(288))
    raw = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 240))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    with suppress(ToolkitError):
        file = GgufFile(bad)
        for name in file.stored:
            file.raw(name)
