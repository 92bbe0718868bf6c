"""Matrix products."""

from __future__ import annotations

import torch

from stpart_compiler.ir.rule import SUM, WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, aligned
from stpart_compiler.passes.rules.registry import OpCall, rule

aten = torch.ops.aten
BILINEAR = ((0,), (1,))


def _product(factors: Factors, left: tuple[int, ...], right: tuple[int, ...], kind: str) -> tuple[TensorMap, ...]:
    """Maps of left (*batch, m, n), right (*batch, n, k) and the product (*batch, m, k)."""
    batch: tuple[DimMap, ...] = tuple((factors.add(size, name="b"),) for size in left[:-2])
    m = (factors.add(left[-2], name="m"),)
    n = (factors.add(left[-1], kind, name="n"),)
    k = (factors.add(right[-1], name="k"),)
    return (*batch, m, n), (*batch, n, k), (*batch, m, k)


@rule(aten.mm.default, aten.bmm.default)
def matrix_product(call: OpCall) -> OpRule:
    """(m n, n k) -> (m k), sum n."""
    factors = Factors()
    left, right, out = _product(factors, call.operands[0].shape, call.operands[1].shape, SUM)
    return factors.rule((left, right), (out,), BILINEAR)


@rule(aten.addmm.default, aten.baddbmm.default)
def added_product(call: OpCall) -> OpRule:
    """bias + (m n, n k) -> (m k). Cutting n would add the bias once per block, so n is whole."""
    bias, a, b = call.operands
    factors = Factors()
    left, right, out = _product(factors, a.shape, b.shape, WHOLE)
    return factors.rule((aligned(out, bias.shape), left, right), (out,), ((0, 1), (0, 2)))


@rule(aten.mv.default)
def matrix_vector(call: OpCall) -> OpRule:
    """(m n, n) -> (m), sum n."""
    rows, columns = call.operands[0].shape
    factors = Factors()
    m, n = (factors.add(rows, name="m"),), (factors.add(columns, SUM, "n"),)
    return factors.rule(((m, n), (n,)), ((m,),), BILINEAR)


@rule(aten.dot.default)
def vector_product(call: OpCall) -> OpRule:
    """(n, n) -> (), sum n."""
    factors = Factors()
    n = (factors.add(call.operands[0].shape[0], SUM, "n"),)
    return factors.rule(((n,), (n,)), ((),), BILINEAR)
