"""Sizes as people write them, and what is refused with which words."""

import pytest

from memfit.core.errors import BudgetError
from memfit.core.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("1", 1),
        ("1048576", 1048576),
        ("12 B", 12),
        ("3GiB", 3 * 1024**3),
        ("3 GiB", 3 * 1024**3),
        ("  3 gib ", 3 * 1024**3),
        ("3G", 3 * 1024**3),  # a bare letter is binary, as in nvidia-smi
        ("3GB", 3 * 1000**3),
        ("500MB", 500 * 1000**2),
        ("1.5 KiB", 1536),
        (".5k", 512),
        ("2T", 2 * 1024**4),
        ("1PiB", 1024**5),
        (1073741824, 1024**3),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: an integer never goes through a float
    ],
)
def test_a_size_is_read_in_bytes(text, num_bytes):
    assert parse_size(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", " ", "GiB", "3 XiB", "3..5G", "-3 GiB", "+3G", "three", "3 G i B", "1e9", "nan", "inf", "3,5G"]
)
def test_what_is_no_size_is_refused_with_an_example_of_one(text):
    with pytest.raises(BudgetError, match=r"is not a size: .*Write it like '3 GiB'"):
        parse_size(text)


@pytest.mark.parametrize("value", [1.5, None, True, [3], b"3G"])
def test_what_is_neither_text_nor_int_is_refused_by_its_type(value):
    with pytest.raises(BudgetError, match=f"is a {type(value).__name__}"):
        parse_size(value)


@pytest.mark.parametrize("text", ["0", "0 GiB", "0.0", "0.4", 0])
def test_a_size_of_no_bytes_is_refused(text):
    with pytest.raises(BudgetError, match="is 0 bytes: a budget must be positive"):
        parse_size(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (100 * 1024, "100.0 KiB"),
        (3 * 1024**3, "3.00 GiB"),
        (int(2.97 * 1024**3), "2.97 GiB"),
        (5000 * 1024**5, "5000.0 PiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_a_size_is_written_in_binary_units(num_bytes, text):
    assert format_size(num_bytes) == text


@pytest.mark.parametrize("num_bytes", [1, 1024, 3 * 1024**2, 7 * 1024**3, 1024**5])
def test_a_written_size_can_be_read_again(num_bytes):
    assert parse_size(format_size(num_bytes)) == num_bytes
