"""Factor rules by op family: which loop dims an op has, and of which of them each tensor dim is made."""

from stpart_compiler.passes.rules import (
    matmul,
    pointwise,
    reductions,
    views,
)
from stpart_compiler.passes.rules.registry import Block, OpCall, Operand, local_call, rule_of

__all__ = [
    "Block",
    "OpCall",
    "Operand",
    "local_call",
    "matmul",
    "pointwise",
    "reductions",
    "rule_of",
    "views",
]
