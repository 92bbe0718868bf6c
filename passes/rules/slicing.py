"""Taking tensors apart and putting them together along a dim.

The dim itself is whole, with two exceptions. Where all parts are equal, it is written as (part, rest), and the rest may
be cut: `split: (p r) -> r, ..., r`. So the projections of Q, K and V stay cut by heads when they are one matrix. And
zeros may be put around a dim that is cut: what it then consists of is shifted, and read through a window.
"""

from __future__ import annotations

import torch

from stpart_compiler.ir.rule import PARALLEL, WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.ir.window import Window
from stpart_compiler.passes.rules.factors import Factors, normalized, result, whole_at
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, Operand, localized, rule
from stpart_compiler.passes.rules.windows import margins, padding, places, spans

aten = torch.ops.aten


def _replaced(tensor: TensorMap, dim: int, new: tuple[DimMap, ...]) -> TensorMap:
    return (*tensor[:dim], *new, *tensor[dim + 1 :])


@rule(aten.slice.Tensor)
def sliced(call: OpCall) -> OpRule:
    """The dim is whole unless all of it is kept."""
    return _resized(call, call.arg(1, "dim", 0))


@rule(aten.slice_backward.default)
def slice_backward(call: OpCall) -> OpRule:
    return _resized(call, call.arg(2, "dim"))


def _resized(call: OpCall, dim: int) -> OpRule:
    """Same dims before and after but for one, which is whole on both sides where its size changes."""
    before, after = call.operands[0].shape, result(call).shape
    at = normalized(dim, len(before))
    factors = Factors()
    if before[at] == after[at]:
        source = factors.dims(before)
        return factors.rule((source,), (source,), ((0,),))
    source = factors.dims(before, whole_at(len(before), [at]))
    return factors.rule((source,), (_replaced(source, at, (factors.dim(after[at], WHOLE),)),), ((0,),))


@localized(aten.slice_backward.default, aten.select_backward.default)
def scattered_block(call: OpCall, block: Block) -> LocalCall:
    """slice_backward(grad, input_sizes, ...): the sizes are those of the block."""
    args = (call.args[0], list(block.out_shape()), *call.args[2:])
    return call.target, args, call.kwargs


@rule(aten.select.int)
def selected(call: OpCall) -> OpRule:
    """One place along a whole dim."""
    shape = call.operands[0].shape
    at = normalized(call.args[1], len(shape))
    factors = Factors()
    source = factors.dims(shape, whole_at(len(shape), [at]))
    return factors.rule((source,), (_replaced(source, at, ()),), ((0,),))


@rule(aten.select_backward.default)
def select_backward(call: OpCall) -> OpRule:
    shape = result(call).shape
    at = normalized(call.args[2], len(shape))
    factors = Factors()
    out = factors.dims(shape, whole_at(len(shape), [at]))
    return factors.rule((_replaced(out, at, ()),), (out,), ((0,),))


@rule(aten.slice_scatter.default, aten.select_scatter.default)
def written(call: OpCall) -> OpRule:
    """A part along a whole dim is replaced."""
    x, part = call.operands
    at = normalized(call.arg(2, "dim", 0), x.ndim)
    factors = Factors()
    source = factors.dims(x.shape, whole_at(x.ndim, [at]))
    own = (factors.dim(part.shape[at], WHOLE),) if part.ndim == x.ndim else ()
    return factors.rule((source, _replaced(source, at, own)), (source,), ((0, 1),))


@rule(aten.cat.default)
def joined(call: OpCall) -> OpRule:
    """Parts side by side along a dim."""
    shape = result(call).shape
    at = normalized(call.arg(1, "dim", 0), len(shape))
    parts = call.operands
    if all(part.shape == parts[0].shape for part in parts):
        return _equal_parts(parts[0].shape, len(parts), at, joins=True)
    factors = Factors()
    out = factors.dims(shape, whole_at(len(shape), [at]))
    inputs = [_part(factors, out, part, at) for part in parts]
    return factors.rule(inputs, (out,), (tuple(range(len(parts))),))


def _part(factors: Factors, out: TensorMap, part: Operand, at: int) -> TensorMap:
    if part.ndim != len(out):  # cat takes (and drops) empty vectors beside tensors of any shape
        return factors.dims(part.shape, WHOLE)
    return _replaced(out, at, (factors.dim(part.shape[at], WHOLE),))


def _equal_parts(shape: tuple[int, ...], count: int, at: int, joins: bool) -> OpRule:
    """`r, ..., r -> (p r)`, or the other way."""
    factors = Factors()
    part = factors.dims(shape)
    whole = _replaced(part, at, ((*factors.dim(count, WHOLE, "p"), *part[at]),))
    if joins:
        return factors.rule([part] * count, (whole,), (tuple(range(count)),))
    return factors.rule((whole,), [part] * count, ((0,),))


@rule(aten.stack.default)
def stacked(call: OpCall) -> OpRule:
    """A new whole dim that counts the operands."""
    shape = result(call).shape
    at = normalized(call.arg(1, "dim", 0), len(shape))
    factors = Factors()
    out = factors.dims(shape, whole_at(len(shape), [at]))
    count = len(call.operands)
    return factors.rule([_replaced(out, at, ())] * count, (out,), (tuple(range(count)),))


@rule(aten.unbind.int)
def unbound(call: OpCall) -> OpRule:
    """One result per place along a whole dim."""
    shape = call.operands[0].shape
    at = normalized(call.arg(1, "dim", 0), len(shape))
    factors = Factors()
    source = factors.dims(shape, whole_at(len(shape), [at]))
    return factors.rule((source,), [_replaced(source, at, ())] * len(call.results), ((0,),))


_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


@rule(*_SPLITS)
def parted(call: OpCall) -> OpRule:
    """Parts of a dim."""
    shape = call.operands[0].shape
    at = normalized(call.arg(2, "dim", 0), len(shape))
    sizes = [result(call, i).shape[at] for i in range(len(call.results))]
    if len(set(sizes)) == 1:
        return _equal_parts(result(call).shape, len(sizes), at, joins=False)
    factors = Factors()
    source = factors.dims(shape, whole_at(len(shape), [at]))
    outputs = [_replaced(source, at, (factors.dim(size, WHOLE),)) for size in sizes]
    return factors.rule((source,), outputs, ((0,),))


@localized(*_SPLITS)
def parted_block(call: OpCall, block: Block) -> LocalCall:
    x = call.operands[0]
    at = normalized(call.arg(2, "dim", 0), x.ndim)
    sizes = [block.out_shape(i)[at] for i in range(len(call.results))]
    return aten.split_with_sizes.default, (x, sizes, at), {}


@rule(aten.constant_pad_nd.default)
def padded(call: OpCall) -> OpRule:
    """Padded dims are cut with zeros alone, and read through windows (halo h): a block may be padding as a whole."""
    before, after = call.operands[0].shape, result(call).shape
    zeros = call.arg(2, "value", 0) == 0
    windows = _pad_windows(call)
    factors = Factors()
    own = [factors.dim(size) if i not in windows else () for i, size in enumerate(before)]
    made, read = places(
        factors, list(windows.values()), [before[i] for i in windows], [PARALLEL if zeros else WHOLE] * len(windows)
    )
    source, out = list(own), list(own)
    for i, into, of in zip(windows, made, read, strict=True):
        source[i], out[i] = of, into
    assert len(out) == len(after)
    return factors.rule((tuple(source),), (tuple(out),), ((0,),) if zeros else ())


def _pad_windows(call: OpCall) -> dict[int, Window]:
    """Dim that is padded -> window through which its positions read: each at most one."""
    before, after, pad = call.operands[0].shape, result(call).shape, call.args[1]
    touched = [len(before) - 1 - i // 2 for i, width in enumerate(pad) if width]
    starts = {dim: pad[2 * (len(before) - 1 - dim)] for dim in sorted(set(touched))}
    return {dim: Window(after[dim], 1, 1, -start, -start) for dim, start in starts.items()}


@localized(aten.constant_pad_nd.default)
def padded_block(call: OpCall, block: Block) -> LocalCall:
    """Padding of the block at the borders of the whole."""
    windows = _pad_windows(call)
    read, made = (spans(block, tensor) for tensor in (block.rule.inputs[0], block.rule.outputs[0]))
    around = [margins(windows[i], read[i], made[i]) if i in windows else (0, 0) for i in range(len(read))]
    return call.target, (call.args[0], padding(around), *call.args[2:]), call.kwargs


@rule(aten.repeat.default)
def repeated(call: OpCall) -> OpRule:
    """`d -> (r d)`: blocks of the copies, or of what is copied."""
    shape, repeats = call.operands[0].shape, call.args[1]
    factors = Factors()
    source = factors.dims(shape)
    new = len(repeats) - len(shape)
    padded_source = ((),) * new + source
    out = tuple((*factors.dim(r), *dim) for r, dim in zip(repeats, padded_source, strict=True))
    return factors.rule((source,), (out,), ((0,),))


@localized(aten.repeat.default)
def repeated_block(call: OpCall, block: Block) -> LocalCall:
    x = call.operands[0]
    outs = block.rule.outputs[0]
    ins = ((),) * (len(outs) - x.ndim) + block.rule.inputs[0]
    copies = [block.extent(out[: len(out) - len(dim)]) for out, dim in zip(outs, ins, strict=True)]
    return aten.repeat.default, (x, copies), {}
