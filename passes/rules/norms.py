"""Normalisation over dims: softmax, layer norm, RMS norm, and their gradients. The normalised dims are whole."""

from __future__ import annotations

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, maps_of_results, normalized, result, whole_at
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, Operand, localized, rule
from stpart_compiler.runtime import local_ops

aten = torch.ops.aten


@rule(aten._softmax.default, aten._log_softmax.default, aten._safe_softmax.default)
def softmax(call: OpCall) -> OpRule:
    """softmax(x, dim, ...)."""
    return _along(call, call.args[1], ())


@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
def softmax_backward(call: OpCall) -> OpRule:
    """softmax_backward(grad, out, dim, dtype): linear in the gradient."""
    return _along(call, call.args[2], ((0,),))


def _along(call: OpCall, dim: int, linear: tuple[tuple[int, ...], ...]) -> OpRule:
    shape = result(call).shape
    factors = Factors()
    out = factors.dims(shape, whole_at(len(shape), [normalized(dim, len(shape))]))
    return factors.rule([out] * len(call.operands), (out,), linear)


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def norm(call: OpCall) -> OpRule:
    """norm(x, normalized_shape, weight, ...) -> (out, statistics of each row, ...)."""
    factors = Factors()
    full, stats, inner = _row_maps(factors, call, PARALLEL)
    inputs = [full, *[inner] * (len(call.operands) - 1)]
    return factors.rule(inputs, (full, *[stats] * (len(call.results) - 1)))


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def norm_backward(call: OpCall) -> OpRule:
    """norm_backward(grad, x, normalized_shape, statistics..., weight, ...) -> (dx, dweight, ...): rows add up there."""
    factors = Factors()
    full, stats, inner = _row_maps(factors, call, SUM)
    count = 2 if call.target is aten.native_layer_norm_backward.default else 1
    by_position = [full, full, (), *[stats] * count, inner, inner]
    tensors = [(i, arg) for i, arg in enumerate(call.args) if isinstance(arg, Operand)]
    inputs = [by_position[i] for i, _ in tensors]
    outputs = maps_of_results(call, (full, *[inner] * (len(call.results) - 1)))
    return factors.rule(inputs, outputs, ((0,),))


@localized(aten.native_layer_norm_backward.default)
def norm_backward_block(call: OpCall, block: Block) -> LocalCall:
    """The kernel takes the statistics for contiguous."""
    return local_ops.contiguous_call, (call.target, *call.args), call.kwargs


def _row_maps(factors: Factors, call: OpCall, rows: str) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Maps of a full tensor, of one number per row (normalised dims of size one), and of the normalised dims."""
    shape = call.operands[0].shape
    depth = len(shape) - len(_normalized_shape(call))
    full = factors.dims(shape, [rows] * depth + [WHOLE] * (len(shape) - depth))
    return full, (*full[:depth], *[()] * (len(shape) - depth)), full[depth:]


def _normalized_shape(call: OpCall) -> list[int]:
    return next(list(arg) for arg in call.args if isinstance(arg, (list, tuple)))
