"""Factor rules by op family: which loop dims an op has, and of which of them each tensor dim is made.

Importing this package registers the rules of all families.
"""

from stpart_compiler.passes.rules import (
    attention,
    convolution,
    device_attention,
    experts,
    factories,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    reductions,
    slicing,
    views,
)
from stpart_compiler.passes.rules.calls import op_call
from stpart_compiler.passes.rules.discovery import discovered_rule
from stpart_compiler.passes.rules.registry import (
    Block,
    OpCall,
    Operand,
    is_void,
    local_call,
    merge_of,
    rule_of,
)

FAMILIES = (
    attention,
    convolution,
    device_attention,
    experts,
    factories,
    indexing,
    losses,
    matmul,
    norms,
    pointwise,
    pooling,
    reductions,
    slicing,
    views,
)

__all__ = [
    "FAMILIES",
    "Block",
    "OpCall",
    "Operand",
    "discovered_rule",
    "is_void",
    "local_call",
    "merge_of",
    "op_call",
    "rule_of",
]
