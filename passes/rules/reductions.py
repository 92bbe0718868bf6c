"""Reductions over dims."""

from __future__ import annotations

import math

import torch

from stpart_compiler.ir.rule import LOGSUMEXP, MAX, MIN, PARALLEL, SUM, WHOLE, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, normalized, result
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, localized, rule
from stpart_compiler.runtime import fused_ops as _fused_ops  # noqa: F401  (defines them)
from stpart_compiler.runtime import local_ops

aten = torch.ops.aten

_SUMS = (aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
_COMBINED = {
    aten.amax.default: MAX,
    aten.max.default: MAX,
    aten.any.default: MAX,
    aten.any.dim: MAX,
    aten.any.dims: MAX,
    aten.amin.default: MIN,
    aten.min.default: MIN,
    aten.all.default: MIN,
    aten.all.dim: MIN,
    aten.all.dims: MIN,
    aten.logsumexp.default: LOGSUMEXP,
}
_WHOLE_REDUCTIONS = (
    aten.max.dim,
    aten.min.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.prod.default,
    aten.prod.dim_int,
    aten.var.correction,
    aten.var_mean.correction,
    aten.std.correction,
    aten.linalg_vector_norm.default,
)


@rule(*_SUMS)
def summed(call: OpCall) -> OpRule:
    """Sum and mean: the reduced dims may be cut, the results of the blocks add up."""
    return _reduction(call, SUM, ((0,),))


@rule(*_COMBINED)
def combined(call: OpCall) -> OpRule:
    """Largest, smallest, any, all, logsumexp: the reduced dims may be cut, the results of the blocks combine alike."""
    return _reduction(call, _COMBINED[call.target], ())


@rule(*_WHOLE_REDUCTIONS)
def reduced_whole(call: OpCall) -> OpRule:
    """Other reductions: the reduced dims are kept whole."""
    return _reduction(call, WHOLE, ())


@rule(torch.ops.stpart_fused.place_of.default)
def place_of(call: OpCall) -> OpRule:
    """(x, value, dim, keepdim, largest): the first place of the value in any block."""
    x, dim = call.operands[0], call.args[2]
    over = {normalized(dim, x.ndim)}
    factors = Factors()
    source = factors.dims(x.shape, [MIN if i in over else PARALLEL for i in range(x.ndim)])
    return factors.rule((source, _kept(source, over, x.ndim)), (_kept(source, over, result(call).ndim),))


@localized(torch.ops.stpart_fused.place_of.default)
def place_of_block(call: OpCall, block: Block) -> LocalCall:
    x, value, dim, keepdim, _ = call.args
    along = block.rule.inputs[0][dim]
    if not block.is_cut(along):
        return call.target, call.args, call.kwargs
    return local_ops.place_of_block, (x, value, dim, keepdim, block.digits(along)), {}


@rule(aten.histc.default)
def histogram(call: OpCall) -> OpRule:
    """Counts of the elements in bins, which add up, unless the bins' range comes from all elements."""
    low, high = call.arg(2, "min", 0), call.arg(3, "max", 0)
    factors = Factors()
    source = factors.dims(call.operands[0].shape, WHOLE if low == high else SUM)
    return factors.rule((source,), (factors.dims(call.results[0].shape, WHOLE) if call.results[0] else (),))


def _reduction(call: OpCall, kind: str, linear: tuple[tuple[int, ...], ...]) -> OpRule:
    shape = call.operands[0].shape
    over = reduced_dims(call)
    factors = Factors()
    source = factors.dims(shape, [kind if i in over else PARALLEL for i in range(len(shape))])
    outputs = [_kept(source, over, r.ndim) if r is not None else () for r in call.results]
    return factors.rule((source,), outputs, linear)


def _kept(source: TensorMap, over: set[int], out_ndim: int) -> TensorMap:
    if out_ndim == len(source):
        return tuple(() if i in over else dim for i, dim in enumerate(source))
    return tuple(dim for i, dim in enumerate(source) if i not in over)


def reduced_dims(call: OpCall) -> set[int]:
    """Dims that the call reduces. None and an empty list stand for all."""
    ndim = call.operands[0].ndim
    position = 2 if call.target is aten.linalg_vector_norm.default else 1
    dims = None if _takes_no_dims(call) else call.arg(position, "dim")
    if dims is None or dims == []:
        return set(range(ndim))
    return {normalized(dim, ndim) for dim in ([dims] if isinstance(dims, int) else dims)}


def _takes_no_dims(call: OpCall) -> bool:
    return all(argument.name != "dim" for argument in call.target._schema.arguments)


@localized(aten.mean.dim, aten.mean.default)
def mean_block(call: OpCall, block: Block) -> LocalCall:
    """The share of a block in the mean: its sum over the number of elements of the whole."""
    x = call.operands[0]
    dims = sorted(reduced_dims(call))
    count = math.prod(x.shape[dim] for dim in dims)
    local = block.in_shape(0)
    if math.prod(local[dim] for dim in dims) == count:
        return call.target, call.args, call.kwargs
    keepdim = bool(call.arg(2, "keepdim", False)) and not _takes_no_dims(call)
    return local_ops.block_mean, (x, dims, keepdim, count, call.kwargs.get("dtype")), {}


@rule(aten.cumsum.default, aten.cumprod.default, aten.flip.default, aten.roll.default)
def along_dims(call: OpCall) -> OpRule:
    """Same shape; the dims along which elements meet are whole."""
    shape = call.operands[0].shape
    dims = call.arg(2, "dims", []) if call.target is aten.roll.default else call.args[1]
    over = {normalized(dim, len(shape)) for dim in ([dims] if isinstance(dims, int) else dims)}
    everything = not over
    factors = Factors()
    source = factors.dims(shape, [WHOLE if everything or i in over else PARALLEL for i in range(len(shape))])
    linear = () if call.target is aten.cumprod.default else ((0,),)
    return factors.rule((source,), (source,), linear)


@rule(aten.tril.default, aten.triu.default)
def triangle(call: OpCall) -> OpRule:
    """The last two dims are whole."""
    shape = call.operands[0].shape
    factors = Factors()
    source = factors.dims(shape, [PARALLEL] * (len(shape) - 2) + [WHOLE] * 2)
    return factors.rule((source,), (source,), ((0,),))


@rule(aten.sort.default, aten.sort.stable, aten.topk.default)
def ordered(call: OpCall) -> OpRule:
    """The dim along which elements are ordered is whole; topk's results are shorter there."""
    shape = call.operands[0].shape
    position, default = {aten.sort.default: (1, -1), aten.topk.default: (2, -1)}.get(call.target, (None, -1))
    dim = call.kwargs.get("dim", default) if position is None else call.arg(position, "dim", default)
    over = normalized(dim, len(shape))
    factors = Factors()
    source = factors.dims(shape, [WHOLE if i == over else PARALLEL for i in range(len(shape))])
    outputs = []
    for found in call.results:
        assert found is not None
        own = source[over : over + 1] if found.shape == shape else (factors.dim(found.shape[over], WHOLE),)
        outputs.append((*source[:over], *own, *source[over + 1 :]) if shape else ())
    return factors.rule((source,), outputs)
