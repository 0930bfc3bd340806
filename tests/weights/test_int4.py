"""Tests of GPTQ, AWQ and HQQ safetensors: codes match the published layouts, and unsupported files raise clear errors.

The packers below follow the definitions of the formats, bit by bit in plain Python, and share no code with the reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from toolkit.core.errors import FormatError
from toolkit.weights.int4_folders import open_folder

OUT, IN, GROUP = 24, 96, 32
RNG = np.random.default_rng(5)


def drawn(bits: int, out: int = OUT, columns: int = IN, group: int = GROUP) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return random codes [out, in], zeros [out, groups] from 0 to the largest code, and scales [out, groups]."""
    codes = RNG.integers(0, 1 << bits, (out, columns))
    zeros = RNG.integers(0, 1 << bits, (out, columns // group))
    zeros.flat[:2] = (0, (1 << bits) - 1)
    return codes, zeros, RNG.uniform(0.01, 0.1, zeros.shape).astype(np.float16)


def words(columns: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack `columns` [n, m] into int32 [n / per, m]: `per` = 32 / bits neighbors along the first dimension share a word."""
    per = 32 // bits
    order = order or tuple(range(per))
    found = np.zeros((len(columns) // per, columns.shape[1]), dtype=np.uint32)
    for word in range(len(found)):
        for place, which in enumerate(order):
            found[word] |= columns[word * per + which].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(found.view(np.int32))


def gptq(
    bits: int, version: str = "gptq", g_idx: np.ndarray | None = None, **shape: int
) -> tuple[dict[str, torch.Tensor], Any]:
    codes, zeros, scales = drawn(bits, **shape)
    kept = (zeros - 1) % (1 << bits) if version == "gptq" else zeros
    group = codes.shape[1] // zeros.shape[1]
    tensors = {
        "qweight": words(codes.T, bits),
        "qzeros": words(kept, bits).t().contiguous(),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.from_numpy((np.arange(codes.shape[1]) // group if g_idx is None else g_idx).astype(np.int32)),
    }
    return tensors, (codes, zeros, scales)


def awq(**shape: int) -> tuple[dict[str, torch.Tensor], Any]:
    codes, zeros, scales = drawn(4, **shape)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(codes, 4, order).t().contiguous(),
        "qzeros": words(zeros, 4, order).t().contiguous(),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors, (codes, zeros, scales)


def hqq(bits: int = 4, out: int = OUT, as_float: bool = False, **changes: Any) -> tuple[dict[str, torch.Tensor], Any]:
    codes, _, scales = drawn(bits, out)
    zeros = RNG.uniform(0, 1 << bits, scales.shape).astype(np.float16)  # hqq's zeros aren't whole numbers
    rows, per = codes.reshape(-1, GROUP).astype(np.uint8), 8 // bits
    step = len(rows) // per
    packed = np.zeros((step, GROUP), dtype=np.uint8)
    for block in range(per):
        packed |= rows[block * step : (block + 1) * step] << (bits * (per - 1 - block))
    tensors = {
        "W_q": torch.from_numpy(packed).view(torch.float16) if as_float else torch.from_numpy(packed),
        "scale": torch.from_numpy(scales.reshape(-1, 1)),
        "zero": torch.from_numpy(zeros.reshape(-1, 1)),
        "shape": torch.tensor([out, IN]),
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "group_size": torch.tensor(GROUP, dtype=torch.int32),
        "axis": torch.tensor(1, dtype=torch.int32),
        "packing": torch.tensor(list(f"{bits}bit_u8".encode()), dtype=torch.uint8),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
        "quant_zero": torch.tensor(0, dtype=torch.uint8),
        "view_as_float": torch.tensor(int(as_float), dtype=torch.uint8),
        "compute_dtype": torch.tensor(list(b"torch.float16"), dtype=torch.uint8),
        "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
    }
    return tensors | {name: torch.tensor(value) for name, value in changes.items()}, (codes, zeros, scales)


def folder(path: Path, tensors: dict[str, torch.Tensor], config: Any = None, **more: torch.Tensor) -> Any:
    """Write and open a folder with one quantized matrix, "a.b.weight"."""
    path.mkdir(exist_ok=True)
    save_file({f"a.b.{name}": value for name, value in tensors.items()} | more, path / "model.safetensors")
    return open_folder(path, {} if config is None else {"quantization_config": config})


def matches(weights: Any, expected: Any, kind: str, bits: int, group: int) -> None:
    """Assert that every range of rows returns the codes, zeros and scales of `expected`."""
    codes, zeros, scales = expected
    stored = weights.stored["a.b.weight"]
    assert (stored.shape, stored.kind, stored.bits, stored.group) == (codes.shape, kind, bits, group)
    assert stored.dtype is None
    assert list(weights.stored) == ["a.b.weight"], "the parts are hidden behind the matrix"
    for start, stop in [(0, len(codes)), (0, 1), (3, 11), (8, 16), (5, 5), (len(codes) - 1, len(codes))]:
        raw = weights.raw("a.b.weight", start, stop)
        assert raw["codes"].dtype == torch.uint8
        assert np.array_equal(raw["codes"].numpy(), codes[start:stop])
        assert np.array_equal(raw["zeros"].numpy(), zeros[start:stop])
        assert np.array_equal(raw["scales"].numpy(), scales[start:stop])


@pytest.mark.parametrize("field", ["checkpoint_format", "format"])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq(tmp_path: Path, bits: int, version: str, field: str) -> None:
    tensors, expected = gptq(bits, version, out=32)
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, field: version}
    matches(folder(tmp_path, tensors, config), expected, "GPTQ", bits, GROUP)


def test_the_name_of_a_format_may_be_in_capitals_and_the_older_field_counts(tmp_path: Path) -> None:
    tensors, expected = gptq(4, "gptq_v2", out=32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "GPTQ_V2", "format": "gptq"}
    matches(folder(tmp_path, tensors, config), expected, "GPTQ", 4, GROUP)


def test_gptq_of_one_group_a_row_and_columns_in_order_despite_desc_act(tmp_path: Path) -> None:
    tensors, expected = gptq(4, group=IN)
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True}
    matches(folder(tmp_path, tensors, config), expected, "GPTQ", 4, IN)


def test_gptq_of_8_bits_says_whether_it_is_centred(tmp_path: Path) -> None:
    config = {"quant_method": "gptq", "bits": 8, "group_size": GROUP}
    tensors, (codes, _, scales) = gptq(8)
    assert not folder(tmp_path / "a", tensors, config).stored["a.b.weight"].centred
    tensors["qzeros"] = torch.full_like(tensors["qzeros"], 0x7F7F7F7F)
    symmetric = folder(tmp_path / "b", tensors, config)
    assert symmetric.stored["a.b.weight"].centred
    matches(symmetric, (codes, np.full_like(scales, 128), scales), "GPTQ", 8, GROUP)


def test_awq(tmp_path: Path) -> None:
    tensors, expected = awq()
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    matches(folder(tmp_path, tensors, config), expected, "AWQ", 4, GROUP)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_hqq(tmp_path: Path, bits: int) -> None:
    tensors, expected = hqq(bits)
    matches(folder(tmp_path, tensors, {"quant_method": "hqq"}), expected, "HQQ", bits, GROUP)


def test_hqq_with_its_codes_viewed_as_floats_and_no_config(tmp_path: Path) -> None:
    tensors, expected = hqq(as_float=True)
    matches(folder(tmp_path, tensors), expected, "HQQ", 4, GROUP)


def test_hqq_rows_that_share_bytes_across_the_middle(tmp_path: Path) -> None:
    tensors, expected = hqq(out=6)  # two blocks of 9 rows of codes: matrix rows 2 and 3 are in different blocks
    weights = folder(tmp_path, tensors)
    for start in range(6):
        for stop in range(start, 7):
            assert np.array_equal(weights.raw("a.b.weight", start, stop)["codes"].numpy(), expected[0][start:stop])


def test_other_tensors_stay_as_they_are_and_biases_beside_codes_too(tmp_path: Path) -> None:
    weights = folder(tmp_path, awq()[0], {"quant_method": "awq"}, **{"a.b.bias": torch.ones(OUT), "norm": torch.ones(3)})
    assert set(weights.stored) == {"a.b.weight", "a.b.bias", "norm"}
    assert weights.read("norm").tolist() == [1, 1, 1]
    assert weights.raw("a.b.bias")["values"].shape == (1, OUT)


@pytest.mark.parametrize(("file", "content"), [
    ("quantize_config.json", {"bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}),
    ("quant_config.json", {"zero_point": True, "q_group_size": GROUP, "w_bit": 4, "version": "GEMM"}),
], ids=["AutoGPTQ's", "AutoAWQ's"])  # fmt: skip
def test_how_older_tools_said_it(tmp_path: Path, file: str, content: dict[str, Any]) -> None:
    tensors, expected = awq() if file == "quant_config.json" else gptq(4)
    (tmp_path / file).write_text(json.dumps(content))
    matches(folder(tmp_path, tensors), expected, "AWQ" if file == "quant_config.json" else "GPTQ", 4, GROUP)


GPTQ4 = {"quant_method": "gptq", "bits": 4, "group_size": GROUP}
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "bitsandbytes": (awq, {"quant_method": "bitsandbytes"}, "'bitsandbytes'"),
    "bitsandbytes of old": (awq, {"load_in_4bit": True}, "'bitsandbytes'"),
    "fp8": (awq, {"quant_method": "fp8"}, "'fp8'"),
    "compressed-tensors": (awq, {"quant_method": "compressed-tensors"}, "'compressed-tensors'"),
    "a method that is a list": (awq, {"quant_method": []}, "'[]'"),
    "no method": (awq, {"bits": 4}, "unnamed"),
    "not an object": (awq, [1], "list"),
    "not a word about it": (awq, None, "doesn't say how"),
    "marlin": (lambda: gptq(4), GPTQ4 | {"checkpoint_format": "marlin"}, "'marlin'"),
    "marlin in the newer field": (lambda: gptq(4), GPTQ4 | {"format": "marlin"}, "'marlin'"),
    "awq for gemv in the newer field": (awq, {"quant_method": "awq", "format": "gemv"}, "'gemv'"),
    "awq for gemv": (awq, {"quant_method": "awq", "version": "gemv"}, "'gemv'"),
    "bits of a text": (lambda: gptq(4), GPTQ4 | {"bits": "4"}, "'bits'"),
    "group of a float": (lambda: gptq(4), GPTQ4 | {"group_size": 1e300}, "'group_size'"),
    "other bits": (lambda: gptq(4), GPTQ4 | {"bits": 8}, "4 bits in groups of 32, the config says 8"),
    "other groups": (lambda: gptq(4), GPTQ4 | {"group_size": 128}, "says 4 and 128"),
    "act-order": (lambda: gptq(4, g_idx=np.arange(IN)[::-1] // GROUP), GPTQ4 | {"desc_act": True}, "act-order"),
    "hqq along columns": (lambda: hqq(axis=0), {"quant_method": "hqq"}, "axis 0"),
    "hqq of 3 bits": (lambda: hqq(nbits=3), {"quant_method": "hqq"}, "3 bits"),
    "hqq with quantised zeros": (lambda: hqq(quant_zero=1), {"quant_method": "hqq"}, "quantized themselves"),
    "hqq of another shape": (lambda: hqq(shape=[OUT, 2 * IN]), {"quant_method": "hqq"}, "W_q has"),
    "hqq of a shape of 2**62": (lambda: hqq(shape=[1 << 62, 1 << 62]), {"quant_method": "hqq"}, "don't fit its shape"),
    "hqq of a negative shape": (lambda: hqq(shape=[-OUT, -IN]), {"quant_method": "hqq"}, "don't fit its shape"),
    "hqq of 2**31 groups": (lambda: hqq(group_size=1 << 31), {"quant_method": "hqq"}, "were promised"),
}  # fmt: skip


@pytest.mark.parametrize(("make", "config", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, make: Any, config: Any, says: str) -> None:
    with pytest.raises(FormatError) as caught:
        folder(tmp_path, make()[0], config)
    assert says in caught.value.found
    assert caught.value.do


@pytest.mark.parametrize("leaf", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("wrong", ["missing", "cut", "float64", "one dimension", "empty"])
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, method: str, wrong: str, leaf: str) -> None:
    tensors = awq()[0] if method == "awq" else gptq(4)[0]
    whole = tensors[leaf]
    tensors[leaf] = {
        "cut": whole[:, :-1].contiguous(), "float64": whole.double(), "one dimension": whole.flatten(),
        "empty": whole[:0], "missing": whole,
    }[wrong]  # fmt: skip
    if wrong == "missing":
        del tensors[leaf]
    if wrong == "missing" and leaf == "qweight":
        assert set(folder(tmp_path, tensors, {"quant_method": method}).stored) == {f"a.b.{name}" for name in tensors}
        return
    with pytest.raises(FormatError) as caught:
        folder(tmp_path, tensors, {"quant_method": method})
    assert f"{method.upper()} matrix 'a.b'" in caught.value.asked


@pytest.mark.parametrize("leaf", ["scale", "zero", "shape", "nbits", "axis", "packing"])
@pytest.mark.parametrize("wrong", ["missing", "two of it", "texts for numbers"])
def test_hqq_parts_that_do_not_fit_are_refused(tmp_path: Path, leaf: str, wrong: str) -> None:
    tensors = hqq()[0]
    tensors[leaf] = torch.cat([tensors[leaf].reshape(-1)] * 2) if wrong == "two of it" else tensors[leaf].double()
    if wrong == "missing":
        del tensors[leaf]
    with pytest.raises(FormatError) as caught:
        folder(tmp_path, tensors)
    assert "HQQ matrix 'a.b'" in caught.value.asked


def test_a_matrix_both_plain_and_quantised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="both plain and quantized"):
        folder(tmp_path, awq()[0], {"quant_method": "awq"}, **{"a.b.weight": torch.ones(OUT, IN)})
