"""Byte sizes in and out."""

import pytest

from stpart_compiler.cost_models.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("16GiB", 16 * 2**30),
        ("16 GB", 16 * 10**9),
        (" 512 mib ", 512 * 2**20),
        ("1.5TB", 1_500_000_000_000),
        ("1024", 1024),
        ("7B", 7),
        (".5KiB", 512),
        (4096, 4096),
        (16e9, 16 * 10**9),
        ("9007199254740993", 9007199254740993),  # 2**53 + 1: whole numbers are exact
    ],
)
def test_accepted_forms(text, expected):
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "16 gigs", "-1GB", "1e9", "16GiB please", "1,5GB"])
def test_refused_strings_are_named_with_the_accepted_forms(text):
    with pytest.raises(ValueError) as error:
        parse_bytes(text)
    assert repr(text) in str(error.value)
    assert "'16GiB', '16 GB'" in str(error.value)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, None, [1]])
def test_refused_values(value):
    with pytest.raises(ValueError, match="expected a number of bytes"):
        parse_bytes(value)


def test_format():
    assert [format_bytes(n) for n in (0, 1023, 1536, 2**30, 3 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "1.00 GiB",
        "3.00 TiB",
    ]
