"""Ops that make tensors out of nothing. Every rank makes its own block."""

from __future__ import annotations

import torch

from stpart_compiler.ir.rule import WHOLE, OpRule
from stpart_compiler.passes.rules.factors import Factors, result
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, localized, rule
from stpart_compiler.runtime import local_ops

aten = torch.ops.aten

_SIZED = (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format)
_NEW = (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
_RANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)


@rule(*_RANGES)
def range_made(call: OpCall) -> OpRule | None:
    """A range may be cut; integers counted in fractional steps have no rule."""
    fractional = not all(isinstance(arg, int) for arg in call.args)
    return None if fractional and not result(call).dtype.is_floating_point else made(call)


@rule(*_SIZED, aten.scalar_tensor.default)
def made(call: OpCall) -> OpRule:
    """Every dim may be cut."""
    factors = Factors()
    return factors.rule((), (factors.dims(result(call).shape),))


@rule(*_NEW)
def made_like(call: OpCall) -> OpRule:
    """The operand only lends its type and device: it is cut alike where its shape is the same, else whole."""
    factors = Factors()
    out = factors.dims(result(call).shape)
    shape = call.operands[0].shape
    return factors.rule((out if shape == result(call).shape else factors.dims(shape, WHOLE),), (out,))


@localized(*_SIZED)
def made_block(call: OpCall, block: Block) -> LocalCall:
    return call.target, (list(block.out_shape()), *call.args[1:]), call.kwargs


@localized(*_NEW)
def made_like_block(call: OpCall, block: Block) -> LocalCall:
    return call.target, (call.args[0], list(block.out_shape()), *call.args[2:]), call.kwargs


@localized(*_RANGES)
def range_block(call: OpCall, block: Block) -> LocalCall:
    """A block of arange begins further on."""
    dim = block.rule.outputs[0][0]
    if not block.is_cut(dim):
        return call.target, call.args, call.kwargs
    start = 0 if call.target is aten.arange.default else call.args[0]
    step = call.arg(2, "step", 1)
    args = (start, step, block.digits(dim), result(call).dtype, call.kwargs.get("device"))
    return local_ops.arange_block, args, {}
