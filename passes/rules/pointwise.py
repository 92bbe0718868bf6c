"""Ops that compute each element of the result from the elements at the same place of the (broadcast) operands.

All aten overloads tagged `pointwise` get this rule. Sets of linear operands are given per op; the caller must see to
it that one graph value is not both inside and outside a set (in `mul(x, x)` neither operand may be a pending sum).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from stpart_compiler.ir.rule import OpRule
from stpart_compiler.passes.rules.factors import Factors, aligned, result
from stpart_compiler.passes.rules.registry import OpCall, Operand, rule, tagged

aten = torch.ops.aten
LinearSets = tuple[tuple[int, ...], ...]


@tagged(torch.Tag.pointwise)
@rule(
    aten.clone.default,
    aten._to_copy.default,
    aten.detach.default,
    aten.alias.default,
    aten.lift_fresh_copy.default,
    aten.copy.default,
    aten.where.ScalarOther,
    aten.where.ScalarSelf,
    aten.where.Scalar,
    aten.masked_fill.Tensor,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.fill.Tensor,
    aten.fill.Scalar,
    aten.floor_divide.default,
)
def pointwise(call: OpCall) -> OpRule:
    """One factor per dim of the result; operands are aligned to the right."""
    factors = Factors()
    out = factors.dims(result(call).shape)
    inputs = [aligned(out, operand.shape) for operand in call.operands]
    return factors.rule(inputs, [out] * len(call.results), _linear_sets(call))


def _linear_sets(call: OpCall) -> LinearSets:
    name = call.target.overloadpacket.__name__
    if name in _LINEAR_IN_FIRST:
        return ((0,),)
    find = _LINEAR.get(name)
    return find(call) if find else ()


_LINEAR_IN_FIRST = {
    "neg",
    "clone",
    "_to_copy",
    "detach",
    "alias",
    "lift_fresh_copy",
    "elu_backward",
    "gelu_backward",
    "hardsigmoid_backward",
    "hardswish_backward",
    "hardtanh_backward",
    "leaky_relu_backward",
    "mish_backward",
    "native_dropout_backward",
    "sigmoid_backward",
    "silu_backward",
    "softplus_backward",
    "tanh_backward",
    "threshold_backward",
}


def _sum(call: OpCall) -> LinearSets:
    """x + y, x - y: in both together; x + 1: not at all."""
    return ((0, 1),) if len(call.operands) == 2 else ()


def _product(call: OpCall) -> LinearSets:
    return tuple((i,) for i in range(len(call.operands)))


def _quotient(call: OpCall) -> LinearSets:
    rounding = call.kwargs.get("rounding_mode")
    return ((0,),) if isinstance(call.args[0], Operand) and rounding is None else ()


def _choice(call: OpCall) -> LinearSets:
    """where(condition, x, y): in x and y together; a scalar branch must be zero."""
    branches = call.args[1:3]
    if any(not isinstance(b, Operand) and b != 0 for b in branches):
        return ()
    chosen = tuple(b.index for b in branches if isinstance(b, Operand))
    return (chosen,) if chosen else ()


def _filled(call: OpCall) -> LinearSets:
    """masked_fill(x, mask, value): in x and a tensor value together; a scalar value must be zero."""
    value = call.arg(2, "value")
    if isinstance(value, Operand):
        return ((0, value.index),)
    return ((0,),) if value == 0 else ()


def _product_added(call: OpCall) -> LinearSets:
    """addcmul(x, y, z): in x together with y or with z."""
    return ((0, 1), (0, 2))


def _softmax_taken(call: OpCall) -> LinearSets:
    """minus_softmax(grad, x, shift, total): in grad together with its sum."""
    return ((0, 3),)


def _copied(call: OpCall) -> LinearSets:
    return ((1,),)


_LINEAR: dict[str, Callable[[OpCall], LinearSets]] = {
    "add": _sum,
    "sub": _sum,
    "mul": _product,
    "div": _quotient,
    "where": _choice,
    "masked_fill": _filled,
    "copy": _copied,
    "addcmul": _product_added,
    "minus_softmax": _softmax_taken,
}
