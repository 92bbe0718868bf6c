"""Curves of efficiency over size: points (size, share of a peak rate), ascending."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import lru_cache
from itertools import pairwise

Curve = tuple[tuple[float, float], ...]


def share_at(curve: Curve, size: float) -> float:
    """Share of the peak at a size: log-log interpolation, constant beyond the ends."""
    if size <= curve[0][0]:
        return curve[0][1]
    if size >= curve[-1][0]:
        return curve[-1][1]
    xs, ys = _logarithms(curve)
    x = math.log(size)
    i = bisect_right(xs, x)
    return math.exp(ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1]))


@lru_cache(maxsize=256)
def _logarithms(curve: Curve) -> tuple[tuple[float, ...], tuple[float, ...]]:
    sizes, shares = zip(*curve, strict=True)
    return tuple(map(math.log, sizes)), tuple(map(math.log, shares))


def check_curve(where: str, curve: Curve, unit: str) -> None:
    """Raises:
    ValueError: there is no point, one is out of range or order, or more (of `unit`) would take less time.
    """
    if not curve:
        raise ValueError(f"{where} is empty; give at least one [{unit}, efficiency]")
    for size, share in curve:
        if not (math.isfinite(size) and size >= 1 and 0 < share <= 1):
            raise ValueError(f"{where} has [{size}, {share}]; expected {unit} >= 1 and an efficiency in (0, 1]")
    for (size, share), (next_size, next_share) in pairwise(curve):
        if next_size <= size:
            raise ValueError(f"{where}: {unit} must ascend, got {next_size} after {size}")
        if next_share * size > share * next_size * (1 + 1e-12):  # not for the last bits of a float
            raise ValueError(f"{where}: from {size} to {next_size} {unit} the time would fall; lower {next_share}")
