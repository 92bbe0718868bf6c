"""Products of tokens, sorted by expert, with the matrix of their expert (mixture of experts).

Tokens are whole; the experts may be cut: a block of experts gives zeros for the tokens of the others.
"""

from __future__ import annotations

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, OpRule
from stpart_compiler.passes.rules.factors import Factors
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, localized, rule
from stpart_compiler.runtime import local_ops

aten = torch.ops.aten

_FALLBACK = "transformers.grouped_mm_fallback.default"
_FALLBACK_BACKWARD = "transformers.grouped_mm_fallback_backward.default"


@rule(_FALLBACK, aten._grouped_mm.default)
def grouped_product(call: OpCall) -> OpRule | None:
    """(s k, e k n, ends) -> (s n), sum k and e; or, for two matrices, (m s, s n, ends) -> (e m n)."""
    a, b, *rest = call.operands
    if len(rest) != 1 or a.ndim != 2:
        return None
    factors = Factors()
    if b.ndim == 2:
        m, s, n = factors.dim(a.shape[0]), factors.dim(a.shape[1], WHOLE), factors.dim(b.shape[1])
        e = factors.dim(rest[0].shape[0], WHOLE)
        return factors.rule(((m, s), (s, n), (e,)), ((e, m, n),), ((0,), (1,)))
    s, k = factors.dim(a.shape[0], WHOLE, "s"), factors.dim(a.shape[1], SUM, "k")
    e, n = factors.dim(b.shape[0], SUM, "e"), factors.dim(b.shape[2], PARALLEL, "n")
    ends = factors.dim(b.shape[0], WHOLE, "ends")
    return factors.rule(((s, k), (e, k, n), (ends,)), ((s, n),), ((0,), (1,)))


@rule(_FALLBACK_BACKWARD)
def grouped_product_backward(call: OpCall) -> OpRule:
    """(s k, e k n, ends, s n) -> (s k), sum n and e; (e k n)."""
    a, b, _, _ = call.operands
    factors = Factors()
    s, k = factors.dim(a.shape[0], WHOLE, "s"), factors.dim(a.shape[1], PARALLEL, "k")
    e, n = factors.dim(b.shape[0], SUM, "e"), factors.dim(b.shape[2], SUM, "n")
    ends = factors.dim(b.shape[0], WHOLE, "ends")
    return factors.rule(((s, k), (e, k, n), (ends,), (s, n)), ((s, k), (e, k, n)), ((3,),))


@localized(_FALLBACK, _FALLBACK_BACKWARD, aten._grouped_mm.default)
def grouped_block(call: OpCall, block: Block) -> LocalCall:
    experts = block.rule.inputs[1][0]
    if len(block.rule.inputs[1]) == 2 or not block.is_cut(experts):
        return call.target, call.args, call.kwargs
    local = local_ops.grouped_backward_block if len(call.operands) == 4 else local_ops.grouped_block
    return local, (call.target, block.digits(experts), *call.operands), {}
