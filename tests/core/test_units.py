"""Units: text from numbers and back."""

import io
import sys

import numpy as np
import pytest

from toolkit.core.errors import ToolkitError, brief
from toolkit.core.units import (
    GiB,
    KiB,
    MiB,
    TiB,
    bandwidth_text,
    bytes_text,
    count_text,
    decimal_text,
    number_text,
    parse_bytes,
    plural,
    print_any_text,
    seconds_text,
)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"), (8, "8 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (1536, "1.50 KiB"), (6.3e9, "5.87 GiB"),
        (15 * MiB, "15.0 MiB"), (141 * GiB, "141 GiB"), (3 * TiB, "3.00 TiB"), (-2 * KiB, "-2.00 KiB"), (5e18, "4547474 TiB"),
    ],
)  # fmt: skip
def test_bytes_text(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (0, "0 ns"),
        (7.3e-6, "7.30 µs"),
        (5e-9, "5 ns"),
        (0.0123, "12.3 ms"),
        (1.0, "1.00 s"),
        (600, "600 s"),
        (-0.002, "-2.00 ms"),
    ],
)
def test_seconds_text(s, text):
    assert seconds_text(s) == text


@pytest.mark.parametrize(
    ("value", "n"),
    [
        ("24 GiB", 24 * GiB), ("8GiB", 8 * GiB), ("8 gb", 8 * 10**9), ("8e9", 8 * 10**9), (8e9, 8 * 10**9), (0, 0), ("0", 0),
        ("1.5 MiB", 3 * MiB // 2), (".5kib", 512), ("1,024", 1024), (" 7 B ", 7), ("3 k", 3000), ("2T", 2 * 10**12), (17, 17),
        ("1,234,567.5 kB", 1_234_567_500), ("0.3 KiB", 307), (8e9 / 3, 2_666_666_666), (0.0, 0), (2.0, 2),
        (np.int64(1 << 59), 1 << 59), (np.uint32(17), 17), (np.float32(8e9), 8 * 10**9),
    ],
)  # fmt: skip
def test_parse_bytes(value, n):
    assert parse_bytes(value) == n


@pytest.mark.parametrize(
    "value",
    [
        "", "GiB", "-1 GiB", "8 GiBs", "8 8", "one", None, True, [8], -1, float("nan"), float("inf"), "1e", 10**5000,
        "4,5 GiB", "1,5", "0,25 GB", "0,512 MiB", "1,0240", "1234,567", ",024", "1,024,", "1.5,000",
        np.bool_(True), np.int64(-1), np.float32("nan"), np.float32(1.5), 0.5, 1.5, 1e-9, "0.5", "1.5 B", "0.0001 KiB",
    ],
    ids=brief,
)  # fmt: skip
def test_what_is_no_size_is_an_error_that_says_how_to_write_one(value):
    with pytest.raises(ToolkitError, match="24 GiB"):
        parse_bytes(value)


@pytest.mark.parametrize("n", [8, 1024, 15 * MiB, 141 * GiB, 3 * TiB])
def test_what_is_printed_can_be_read_back(n):
    assert parse_bytes(bytes_text(n)) == n


@pytest.mark.parametrize(
    ("n", "unit", "text"),
    [
        (0, "FLOP", "0 FLOP"), (8, "FLOP", "8 FLOP"), (999.4, "FLOP", "999 FLOP"), (999.6, "FLOP", "1.00 kFLOP"),
        (999_600_000, "FLOP", "1.00 GFLOP"), (65.8e9, "FLOP", "65.8 GFLOP"), (3e15, "FLOP", "3.00 PFLOP"),
    ],
    ids=str,
)  # fmt: skip
def test_decimal_text(n, unit, text):
    assert decimal_text(n, unit) == text


def test_a_bandwidth_is_in_the_units_of_datasheets_and_of_sizes():
    assert bandwidth_text(1.792e12) == "1,792 GB/s (1,669 GiB/s)"
    assert bandwidth_text(300e9) == "300 GB/s (279 GiB/s)"


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (308_224, "308,224"), (999_600, "1.00 million"), (8_190_735_360, "8.19 billion"), (1.5e12, "1.50 trillion")],
    ids=str,
)
def test_count_text(n, text):
    assert count_text(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [(0, "0"), (0.5, "0.5"), (39.42, "39.42"), (999.94, "999.9"), (999.96, "1,000"), (15_436.2, "15,436"), (1e6, "1,000,000")],
    ids=str,
)
def test_number_text_has_no_exponent(n, text):
    assert number_text(n) == text


@pytest.mark.parametrize(("n", "text"), [(0, "0 ranks"), (1, "1 rank"), (2, "2 ranks"), (2048, "2,048 ranks")])
def test_plural(n, text):
    assert plural(n, "rank") == text


def test_any_text_can_be_printed_in_ascii(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_any_text()
    print("1.5 µs ± 10 %", flush=True)
    assert written.getvalue() == b"1.5 ?s ? 10 %\n"
