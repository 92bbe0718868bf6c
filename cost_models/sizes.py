"""Byte sizes as people write them."""

from __future__ import annotations

import math
import re

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_PATTERN = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)")
_FORMS = "a number of bytes, or a string such as '16GiB', '16 GB', '512MiB', '1.5TB', '1024'"


def parse_bytes(size: str | int | float) -> int:
    """Bytes from `16e9`, `"16GiB"` (2**30) or `"16 GB"` (10**9); case of the unit does not matter; rounded down.

    Raises:
        ValueError: not of these forms, negative, or not finite.
    """
    if isinstance(size, bool) or not isinstance(size, str | int | float):
        raise ValueError(f"size {size!r} cannot be read; expected {_FORMS}")
    if isinstance(size, int | float):
        if not math.isfinite(size) or size < 0:
            raise ValueError(f"size {size!r} is no number of bytes; expected {_FORMS}")
        return int(size)
    match = _PATTERN.fullmatch(size.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"size {size!r} cannot be read; expected {_FORMS}")
    number = match[1]
    return int(number) * unit if number.isdigit() else int(float(number) * unit)


def format_bytes(size: float) -> str:
    """Bytes in the largest binary unit that leaves at least one: `format_bytes(1536)` is "1.50 KiB"."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(size) >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size:.0f} B"
