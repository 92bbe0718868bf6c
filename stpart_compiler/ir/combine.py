"""How the parts of a pending value combine: it is their sum, the largest or smallest of them, or their logsumexp.

All of these are associative and commutative, so parts may be combined over several axes one after another.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from stpart_compiler.ir.rule import LOGSUMEXP, MAX, MIN, SUM

aten = torch.ops.aten

PAIRWISE: dict[str, Any] = {
    SUM: aten.add.Tensor,
    MAX: aten.maximum.default,
    MIN: aten.minimum.default,
    LOGSUMEXP: aten.logaddexp.default,
}


def neutral(combine: str, dtype: torch.dtype) -> float | int | bool:
    """The part that changes nothing: what a block without elements contributes."""
    if combine == SUM:
        return 0
    if dtype == torch.bool:
        return combine == MIN
    if dtype.is_floating_point:
        return math.inf if combine == MIN else -math.inf
    limits = torch.iinfo(dtype)
    return limits.max if combine == MIN else limits.min
