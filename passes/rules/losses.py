"""Losses and their gradients."""

from __future__ import annotations

import math

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, OpRule
from stpart_compiler.passes.rules.factors import Factors, aligned, result
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, Operand, localized, rule
from stpart_compiler.runtime import fused_ops as _fused_ops  # noqa: F401  (defines them)
from stpart_compiler.runtime import local_ops

aten = torch.ops.aten

NONE, MEAN = 0, 1  # torch's codes of a loss's `reduction`; 2 is the sum


@rule(aten.mse_loss.default)
def mse_loss(call: OpCall) -> OpRule:
    """(x, y, reduction): elements add up."""
    x, y = call.operands
    factors = Factors()
    whole = call.arg(2, "reduction", MEAN) == NONE
    shape = torch.broadcast_shapes(x.shape, y.shape)
    elements = factors.dims(shape, PARALLEL if whole else SUM)
    return factors.rule((aligned(elements, x.shape), aligned(elements, y.shape)), (elements if whole else (),))


@localized(aten.mse_loss.default)
def mse_loss_block(call: OpCall, block: Block) -> LocalCall:
    x, y = call.operands
    count = math.prod(torch.broadcast_shapes(x.shape, y.shape))
    here = math.prod(torch.broadcast_shapes(block.in_shape(0), block.in_shape(1)))
    if call.arg(2, "reduction", MEAN) != MEAN or here == count:
        return call.target, call.args, call.kwargs
    return local_ops.mse_loss_block, (x, y, count), {}


@rule(aten.mse_loss_backward.default)
def mse_loss_backward(call: OpCall) -> OpRule:
    """(grad, x, y, reduction): element by element; the gradient is one number unless nothing was reduced."""
    factors = Factors()
    elements = factors.dims(result(call).shape)
    return factors.rule([aligned(elements, o.shape) for o in call.operands], (elements,), ((0,), (1, 2)))


@localized(aten.mse_loss_backward.default)
def mse_loss_backward_block(call: OpCall, block: Block) -> LocalCall:
    count = math.prod(result(call).shape)
    if call.args[3] != MEAN or math.prod(block.out_shape()) == count:
        return call.target, call.args, call.kwargs
    return local_ops.mse_loss_backward_block, (*call.operands, count), {}


@rule(aten.nll_loss_forward.default)
def nll_loss(call: OpCall) -> OpRule:
    """Whole: means of blocks with unequal numbers of ignored targets do not add up (`Decompose` takes it apart)."""
    factors = Factors()
    logits = factors.dims(call.operands[0].shape, WHOLE)
    inputs = [logits, logits[:-1], *[logits[-1:]] * (len(call.operands) - 2)]
    outputs = [factors.dims(r.shape, WHOLE) if r is not None else () for r in call.results]
    return factors.rule(inputs, outputs)


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(call: OpCall) -> OpRule:
    """(grad, logits, target, weight, reduction, ignore_index, total_weight): a block has the targets of its classes."""
    factors = Factors()
    logits = factors.dims(call.operands[1].shape)
    along = _classes_at(call)
    target = (*logits[:along], *logits[along + 1 :])
    grad = aligned(target, call.operands[0].shape)
    weight = [logits[along : along + 1]] if isinstance(call.args[3], Operand) else []
    return factors.rule((grad, logits, target, *weight, ()), (logits,), ((0,),))


@localized(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward_block(call: OpCall, block: Block) -> LocalCall:
    along = _classes_at(call)
    classes = block.rule.inputs[1][along]
    if not block.is_cut(classes):
        return local_ops.contiguous_call, (call.target, *call.args), call.kwargs
    return local_ops.nll_loss_backward_block, (*call.args, along, block.digits(classes)), {}


@rule(torch.ops.stpart_fused.cross_entropy_grad.default)
def cross_entropy_grad(call: OpCall) -> OpRule:
    """(rows, x, logsumexp, index, dim): element by element, each row less what it counts for at its index."""
    factors = Factors()
    x = factors.dims(call.operands[1].shape)
    return factors.rule([aligned(x, operand.shape) for operand in call.operands], (x,), ((0,),))


@localized(torch.ops.stpart_fused.cross_entropy_grad.default)
def cross_entropy_grad_block(call: OpCall, block: Block) -> LocalCall:
    classes = block.rule.inputs[1][call.args[4]]
    if not block.is_cut(classes):
        return call.target, call.args, call.kwargs
    return local_ops.cross_entropy_grad_block, (*call.args, block.digits(classes)), {}


def _classes_at(call: OpCall) -> int:
    """Dim of the classes."""
    return 1 if call.operands[1].ndim > 1 else 0
