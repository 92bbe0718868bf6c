"""Reading and writing at positions that are data: embedding, gather, index, scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, aligned, normalized, result, whole_at
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, Operand, localized, rule
from stpart_compiler.runtime import local_ops

aten = torch.ops.aten


@rule(aten.embedding.default)
def embedding(call: OpCall) -> OpRule:
    """((v h), idx) -> (idx h): a block of the table gives zeros for the indices of the others, so v adds up."""
    weight, indices = call.operands
    factors = Factors()
    at = factors.dims(indices.shape)
    v, h = factors.dim(weight.shape[0], SUM, "v"), factors.dim(weight.shape[1], PARALLEL, "h")
    return factors.rule(((v, h), at), ((*at, h),), ((0,),))


@localized(aten.embedding.default)
def embedding_block(call: OpCall, block: Block) -> LocalCall:
    vocabulary = block.rule.inputs[0][0]
    if not block.is_cut(vocabulary):
        return call.target, call.args, call.kwargs
    return local_ops.embedding_block, (*call.operands, block.digits(vocabulary)), {}


@rule(aten.embedding_dense_backward.default)
def embedding_backward(call: OpCall) -> OpRule:
    """((idx h), idx) -> (v h), sum idx. Scaling by the frequency of an index needs all of them."""
    grad, indices = call.operands
    factors = Factors()
    at = factors.dims(indices.shape, WHOLE if call.args[4] else SUM)
    v, h = factors.dim(call.args[2], WHOLE if call.args[4] else PARALLEL, "v"), factors.dim(grad.shape[-1], name="h")
    return factors.rule(((*at, h), at), ((v, h),), ((0,),))


@localized(aten.embedding_dense_backward.default)
def embedding_backward_block(call: OpCall, block: Block) -> LocalCall:
    vocabulary = block.rule.outputs[0][0]
    if not block.is_cut(vocabulary):
        return call.target, call.args, call.kwargs
    args = (*call.operands, block.digits(vocabulary), call.args[3])
    return local_ops.embedding_backward_block, args, {}


@rule(aten.gather.default)
def gathered(call: OpCall) -> OpRule:
    """gather(x, dim, index): the other dims go together; a block of x along dim gives zeros for what it lacks."""
    x, index = call.operands
    at = normalized(call.args[1], x.ndim)
    factors = Factors()
    source, target = _beside(factors, at, x.shape, index.shape)
    if x.ndim:
        source = (*source[:at], factors.dim(x.shape[at], SUM), *source[at + 1 :])
        target = (*target[:at], factors.dim(index.shape[at]), *target[at + 1 :])
    return factors.rule((source, target), (target,), ((0,),))


@localized(aten.gather.default)
def gathered_block(call: OpCall, block: Block) -> LocalCall:
    x, index = call.operands
    at = normalized(call.args[1], x.ndim)
    if not x.ndim or not block.is_cut(block.rule.inputs[0][at]):
        return call.target, call.args, call.kwargs
    return local_ops.gather_block, (x, at, index, block.digits(block.rule.inputs[0][at])), {}


def _beside(factors: Factors, at: int, *shapes: Sequence[int]) -> tuple[TensorMap, ...]:
    """Maps of tensors that meet place by place in all dims but `at`: common factors where sizes agree, else whole."""
    columns: list[list[DimMap]] = []
    for dim, sizes in enumerate(zip(*shapes, strict=True)):
        if dim != at and len(set(sizes)) == 1:
            columns.append([factors.dim(sizes[0])] * len(sizes))
        else:
            columns.append([factors.dim(size, WHOLE) for size in sizes])
    return tuple(tuple(column[i] for column in columns) for i in range(len(shapes)))


@rule(aten.scatter.src, aten.scatter_add.default, aten.scatter.value)
def scattered(call: OpCall) -> OpRule:
    """scatter(x, dim, index, src or value): the dim is whole."""
    x = call.operands[0]
    factors = Factors()
    maps = _beside(factors, normalized(call.args[1], x.ndim), *(operand.shape for operand in call.operands))
    zero = call.target is aten.scatter.value and call.args[3] == 0
    linear = ((0, 2),) if len(call.operands) == 3 else ((0,),) if zero else ()
    return factors.rule(maps, (maps[0],), linear)


@rule(aten.index_select.default)
def index_selected(call: OpCall) -> OpRule:
    """index_select(x, dim, index): the dim is whole in x, its new places may be cut."""
    x, index = call.operands
    at = normalized(call.args[1], x.ndim)
    factors = Factors()
    source = factors.dims(x.shape, whole_at(x.ndim, [at]))
    places = factors.dims(index.shape)
    return factors.rule((source, places), ((*source[:at], *places, *source[at + 1 :]),), ((0,),))


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def indexed(call: OpCall) -> OpRule | None:
    """index(x, [i, None, j, ...]): indexed dims are whole, the broadcast dims of the indices may be cut."""
    x, *indices = call.operands
    if any(index.dtype == torch.bool for index in indices):
        return None
    factors = Factors()
    source, places, out = _index_maps(factors, x, call.args[1], PARALLEL)
    assert len(out) == result(call).ndim
    return factors.rule((source, *(aligned(places, index.shape) for index in indices)), (out,), ((0,),))


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_written(call: OpCall) -> OpRule | None:
    """index_put(x, indices, values, accumulate): indexed dims and places are whole."""
    x, *indices, values = call.operands
    if any(index.dtype == torch.bool for index in indices):
        return None
    factors = Factors()
    source, places, out = _index_maps(factors, x, call.args[1], WHOLE)
    maps = (source, *(aligned(places, index.shape) for index in indices), aligned(out, values.shape))
    return factors.rule(maps, (source,), ((0, len(call.operands) - 1),))


def _index_maps(
    factors: Factors, x: Operand, indices: Sequence[Operand | None], kind: str
) -> tuple[TensorMap, TensorMap, TensorMap]:
    """Maps of x, of the broadcast indices, and of `x[indices]`."""
    dims = [i for i, index in enumerate(indices) if index is not None]
    source = factors.dims(x.shape, whole_at(x.ndim, dims))
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    places = factors.dims(shape, kind)
    rest = [dim for i, dim in enumerate(source) if i not in dims]
    together = dims == list(range(dims[0], dims[-1] + 1))
    start = dims[0] if together else 0  # places of indices that are apart come first in the result
    return source, places, (*rest[:start], *places, *rest[start:])
