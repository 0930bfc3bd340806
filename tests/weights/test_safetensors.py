"""Tests of the safetensors reader: every dtype round-trips, and every invalid header raises a clear error."""

from __future__ import annotations

import gc
import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from toolkit.core.errors import FormatError, ToolkitError
from toolkit.weights import safetensors_files as safetensors
from toolkit.weights.safetensors_files import INDEX, SafetensorsFile, open_safetensors
from toolkit.weights.stored import Mapped


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with the given header, valid or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", safetensors.DTYPES.values(), ids=safetensors.DTYPES)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        "matrix": torch.randint(0, 2, (3, 5)).to(dtype),
        "scalar": torch.ones((), dtype=torch.float32).to(dtype),
        "empty": torch.empty(0, 7).to(dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert file.stored[name].shape == tensor.shape
        got = file.read(name)
        assert got.dtype == dtype
        assert torch.equal(got.float(), tensor.float())


def test_a_tensor_off_its_alignment_is_read(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.5])
    path = write(tmp_path / "x.safetensors", {"w": entry()}, values.numpy().tobytes())
    raw = path.read_bytes()
    assert int.from_bytes(raw[:8], "little") % 4, "the header's length must be odd for this test to mean anything"
    assert torch.equal(SafetensorsFile(path).read("w"), values)


def test_reading_is_lazy_and_outlives_the_reader(tmp_path: Path) -> None:
    save_file({"w": torch.arange(8.0)}, tmp_path / "x.safetensors")
    tensor = SafetensorsFile(tmp_path / "x.safetensors").read("w")
    assert tensor.sum() == 28


def test_a_file_cut_while_open_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(100_000.0)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, 4096)
    with pytest.raises(FormatError, match="truncated to 4,096 bytes"):
        file.read("w")


BAD_HEADERS = {
    "not json": (b"{nope", "JSON"),
    "not utf-8": (b"\xff\xfe{}", "JSON"),
    "a list": ([], "list"),
    "nested too deep": (b"[" * 200_000, "JSON"),
    "key twice": (b'{"a": {}, "a": {}}', "'a' occurs twice"),
    "entry not an object": ({"w": 3}, "'w'"),
    "no dtype": ({"w": {"shape": [2], "data_offsets": [0, 8]}}, "'w'"),
    "dtype unknown": ({"w": entry("F13")}, "F13"),
    "dtype not a text": ({"w": entry([1])}, "'w'"),
    "shape not a list": ({"w": entry(shape={})}, "'w'"),
    "shape of texts": ({"w": entry(shape=["2"])}, "'w'"),
    "shape negative": ({"w": entry(shape=[-2])}, "'w'"),
    "shape of floats": ({"w": entry(shape=[2.0])}, "'w'"),
    "shape of bools": ({"w": entry(shape=[True])}, "'w'"),
    "shape of 2**62": ({"w": entry(shape=[1 << 62, 0], offsets=[0, 0])}, "'w'"),
    "40 dimensions": ({"w": entry(shape=[1] * 40, offsets=[0, 4])}, "'w'"),
    "three offsets": ({"w": entry(offsets=[0, 4, 8])}, "'w'"),
    "offsets backwards": ({"w": entry(offsets=[8, 0])}, "'w'"),
    "offsets of a text": ({"w": entry(offsets="08")}, "'w'"),
    "range too short": ({"w": entry(offsets=[0, 4])}, "needs 8 bytes"),
    "range past the end": ({"w": entry(shape=[4], offsets=[0, 16])}, "cut off"),
    "range of 2**63": ({"w": entry(offsets=[1 << 63, (1 << 63) + 8])}, "'w'"),
    "overlap": ({"v": entry(), "w": entry(offsets=[0, 8])}, "'v' and 'w' overlap"),
    "a tail": ({"w": entry(shape=[1], offsets=[0, 4])}, "fill 4 of the 8 bytes"),
    "a hole": ({"w": entry(shape=[1], offsets=[4, 8])}, "fill 4 of the 8 bytes"),
}


@pytest.mark.parametrize(("header", "says"), BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_bad_headers_are_refused(tmp_path: Path, header: Any, says: str) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(8))
    with pytest.raises(FormatError) as caught:
        SafetensorsFile(path)
    assert says in caught.value.found
    assert str(path) in caught.value.asked
    assert caught.value.do


@pytest.mark.parametrize("length", [0, 1, 7], ids=lambda n: f"{n} bytes")
def test_files_too_short_for_a_header(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(length))
    with pytest.raises(FormatError, match="too few"):
        SafetensorsFile(path)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 100_000_001], ids=lambda n: f"{n:#x}")
def test_an_oversized_header_is_refused_before_it_is_read(tmp_path: Path, length: int) -> None:
    with pytest.raises(FormatError, match="more than the format allows"):
        SafetensorsFile(write(tmp_path / "x.safetensors", b"{}", length=length))


def test_a_header_longer_than_the_file(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cut off") as caught:
        SafetensorsFile(write(tmp_path / "x.safetensors", b"{}", length=50_000))
    assert caught.value.facts["needed_bytes"] == 50_008


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="a folder"):
        SafetensorsFile(tmp_path)
    with pytest.raises(FormatError, match="no such file"):
        SafetensorsFile(tmp_path / "absent")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        SafetensorsFile(tmp_path / "pipe")


def test_an_unknown_tensor_names_the_nearest(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(FormatError, match=r"model\.norm\.weight"):
        SafetensorsFile(tmp_path / "x.safetensors").read("model.norm.weigth")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_do_worse_than_a_format_error(tmp_path: Path, data: st.DataObject) -> None:
    good = tmp_path / "good.safetensors"
    if not good.exists():
        save_file({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}, good)
    raw = bytearray(good.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] ^= 1 << data.draw(st.integers(0, 7))
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(raw[: data.draw(st.integers(0, len(raw)))] if data.draw(st.booleans()) else raw)
    with suppress(ToolkitError):
        file = SafetensorsFile(bad)
        for name in file.stored:
            file.read(name)


def shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(3.0), "b": torch.arange(4.0), "c": torch.arange(5.0)}
    save_file({"a": tensors["a"], "c": tensors["c"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"]}, folder / "model-00002-of-00002.safetensors")
    where = {"a": 1, "b": 2, "c": 1}
    index = {"weight_map": {name: f"model-0000{i}-of-00002.safetensors" for name, i in where.items()}}
    (folder / INDEX).write_text(json.dumps(index))
    return tensors


@pytest.mark.parametrize("indexed", [True, False], ids=["with index", "without index"])
def test_shards_read_as_one(tmp_path: Path, indexed: bool) -> None:
    tensors = shards(tmp_path)
    if not indexed:
        (tmp_path / INDEX).unlink()
    weights = open_safetensors(tmp_path)
    assert set(weights.stored) == set(tensors)
    assert all(torch.equal(weights.read(name), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("indexed", [True, False], ids=["with index", "without index"])
def test_a_missing_shard_is_named(tmp_path: Path, indexed: bool) -> None:
    shards(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    if not indexed:
        (tmp_path / INDEX).unlink()
    with pytest.raises(FormatError, match=r"its folder lacks 1 of 2 shards: model-0000" if indexed else "model-0000"):
        open_safetensors(tmp_path)


ESCAPES = ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ".", "", "..\\x.safetensors", "a\0b"]


@pytest.mark.parametrize("name", ESCAPES, ids=repr)
def test_an_index_can_not_leave_its_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(FormatError, match="same folder"):
        open_safetensors(inside)


BAD_INDEXES = {
    "not json": "{",
    "a list": "[]",
    "no map": "{}",
    "map empty": '{"weight_map": {}}',
    "map of numbers": '{"weight_map": {"a": 1}}',
}


@pytest.mark.parametrize("text", BAD_INDEXES.values(), ids=BAD_INDEXES)
def test_bad_indexes_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(FormatError, match="index"):
        open_safetensors(tmp_path)


def test_an_index_that_lies_about_a_tensor(tmp_path: Path) -> None:
    shards(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["weight_map"]["bb"] = index["weight_map"]["b"]
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(FormatError, match="nearest name is 'b'"):
        open_safetensors(tmp_path)


def test_two_shards_with_the_same_tensor(tmp_path: Path) -> None:
    for i in (1, 2):
        save_file({"a": torch.ones(1)}, tmp_path / f"model-0000{i}-of-00002.safetensors")
    with pytest.raises(FormatError, match="both hold it"):
        open_safetensors(tmp_path)


def test_links_are_followed(tmp_path: Path) -> None:
    real, linked = tmp_path / "blobs", tmp_path / "snapshot"
    real.mkdir()
    linked.mkdir()
    save_file({"a": torch.ones(3)}, real / "0123abcd")
    (linked / "model.safetensors").symlink_to(real / "0123abcd")
    assert open_safetensors(linked).read("a").sum() == 3


def test_a_folder_of_pickles_says_how_to_convert(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(FormatError, match="save_pretrained"):
        open_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FormatError, match=r"no \.safetensors file\. Download"):
        open_safetensors(tmp_path)


def test_a_folder_with_a_config_and_a_gguf_file_says_what_to_pass(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"no \.safetensors file, but a GGUF file\. Give the path of the GGUF file"):
        open_safetensors(tmp_path)


def test_no_file_stays_open(tmp_path):
    """The map needs no open file, which would be reported as a leak when it is freed."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(3)}, path)
    gc.collect()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        mapped = Mapped(path, "reading")
        del mapped
        gc.collect()
    assert not said
