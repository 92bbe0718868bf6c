"""Convolutions and their gradients.

The sample, the channels and the places may be cut. Channels of a grouped convolution are (group, channel). A block of
the places of a result reads its image through a window (`ir.window`); what a window reads beyond the ends of the whole
image is padding, and inner borders have none. `Decompose` writes the gradient of an image as a convolution too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.ir.window import Range, Window
from stpart_compiler.passes.rules.factors import Factors, result
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, localized, rule
from stpart_compiler.passes.rules.windows import Geometry, Margin, each, margins, padding, places, spans
from stpart_compiler.runtime import window_ops

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution(Geometry):
    """`transposed`: places of the image are written, not read, by the kernel."""

    transposed: bool
    groups: int


def geometry(args: Sequence[Any], kernel: Sequence[int]) -> Convolution:
    """Of the arguments of a convolution, or of its backward, from the stride on."""
    stride, pad, dilation, is_transposed, _, groups = args[:6]
    n = len(kernel)
    return Convolution(list(kernel), each(stride, n), each(pad, n), each(dilation, n), bool(is_transposed), int(groups))


def _geometry(call: OpCall) -> Convolution:
    """Operand 1 of a convolution is the weight, operand 2 of a backward."""
    at, weight = (3, 1) if call.target is aten.convolution.default else (4, 2)
    return geometry(call.args[at:], call.operands[weight].shape[2:])


@dataclass
class _Maps:
    """Maps of input (n, (g i), places), weight ((g o), i, kernel) and output (n, (g o), places).

    A transposed convolution's weight is ((g i), o, kernel).
    """

    factors: Factors
    image: TensorMap
    weight: TensorMap
    output: TensorMap


def _maps(call: OpCall, image: int, out: tuple[int, ...], kinds: dict[str, str]) -> _Maps:
    """`image`: its operand index; `kinds`: of the sample n, the channels i and o, and the places p."""
    x, at = call.operands[image], _geometry(call)
    factors = Factors()
    n = factors.dim(x.shape[0], kinds["n"], "n")
    g = factors.dim(at.groups, PARALLEL, "g")
    i = factors.dim(x.shape[1] // at.groups, kinds["i"], "i")
    o = factors.dim(out[1] // at.groups, kinds["o"], "o")
    kernel = factors.dims(at.kernel, WHOLE)
    made, read = places(factors, at.windows(out[2:], back=at.transposed), x.shape[2:], [kinds["p"]] * len(at.kernel))
    outer, inner = ((*g, *i), o) if at.transposed else ((*g, *o), i)
    return _Maps(factors, (n, (*g, *i), *read), (outer, inner, *kernel), (n, (*g, *o), *made))


@rule(aten.convolution.default)
def convolution(call: OpCall) -> OpRule | None:
    """(n (g i) h, (g o) i) -> (n (g o) p), sum i, halo h. A bias would be added once per block (`Decompose`)."""
    if call.operands[0].ndim == call.operands[1].ndim - 1 or len(call.operands) > 2:
        return None
    maps = _maps(call, 0, result(call).shape, {"n": PARALLEL, "i": SUM, "o": PARALLEL, "p": PARALLEL})
    return maps.factors.rule((maps.image, maps.weight), (maps.output,), ((0,), (1,)))


@rule(aten.convolution_backward.default)
def convolution_backward(call: OpCall) -> OpRule | None:
    """The gradient of the weight (sum n and p, halo h), or of the input (sum o), of which the places are whole."""
    mask = call.args[-1]
    if sum(map(bool, mask)) != 1 or mask[2]:
        return None
    kinds = {"n": SUM, "i": PARALLEL, "o": PARALLEL, "p": WHOLE if _geometry(call).transposed else SUM}
    if mask[0]:
        kinds = {"n": PARALLEL, "i": PARALLEL, "o": SUM, "p": WHOLE}
    maps = _maps(call, 1, call.operands[0].shape, kinds)
    outputs: list[TensorMap] = [(), (), ()]
    outputs[0 if mask[0] else 1] = maps.image if mask[0] else maps.weight
    return maps.factors.rule((maps.output, maps.image, maps.weight), outputs, ((0,), (2,) if mask[0] else (1,)))


@localized(aten.convolution.default)
def convolution_block(call: OpCall, block: Block) -> LocalCall:
    """The groups of the block, and at its borders the padding that the whole has there."""
    at, groups = _geometry(call), _groups(call, block)
    out, image = spans(block, block.rule.outputs[0][2:]), spans(block, block.rule.inputs[0][2:])
    if at.transposed:
        margin, pad, extra = _crops(at, image, out)
        target = window_ops.cropped_convolution
    else:
        margin, pad = _pads(at, at.windows(result(call).shape[2:]), image, out)
        target, extra = window_ops.padded_convolution, call.args[7]
    args = (*call.args[:2], None, at.stride, pad, at.dilation, at.transposed, extra, groups)
    if not any(margin):
        return call.target, args, {}
    return target, (margin, *args), {}


@localized(aten.convolution_backward.default)
def convolution_backward_block(call: OpCall, block: Block) -> LocalCall:
    """The groups of the block, and at its borders the padding that the whole has there."""
    *tensors, biases, stride, pad, dilation, is_transposed, output_padding, _, mask = call.args
    at, groups = _geometry(call), _groups(call, block)
    margin: list[int] = []
    if mask[1] and not is_transposed:
        out, image = spans(block, block.rule.inputs[0][2:]), spans(block, block.rule.inputs[1][2:])
        margin, pad = _pads(at, at.windows(call.operands[0].shape[2:]), image, out)
    args = (*tensors, biases, stride, pad, dilation, is_transposed, output_padding, groups, mask)
    if not any(margin):
        return call.target, args, {}
    return window_ops.padded_weight_gradient, (margin, *args), {}


def _groups(call: OpCall, block: Block) -> int:
    """How many groups a block has; dim 1 of the first operand has all of them."""
    channels: DimMap = block.rule.inputs[0][1]
    cut = tuple(f for f in channels if block.rule.factors[f].name.startswith("g"))
    return block.extent(cut) if _geometry(call).groups > 1 else 1


def _pads(
    at: Geometry, windows: Sequence[Window], image: Sequence[Range], out: Sequence[Range]
) -> tuple[list[int], list[int]]:
    """Padding that has to be made beforehand, as torch's padding takes it, and what the op does by itself.

    An op pads both sides of a dim alike. That will do as long as it then gives as many places as are wanted.
    """
    before: list[Margin] = []
    by_op: list[int] = []
    for window, stride, span, read, made in zip(windows, at.stride, at.spans, image, out, strict=True):
        low, high = margins(window, read, made)
        alike = (read[1] - read[0] + 2 * low - span) // stride + 1 == made[1] - made[0]
        before.append((0, 0) if alike else (low, high))
        by_op.append(low if alike else 0)
    return padding(before), by_op


def _crops(at: Geometry, image: Sequence[Range], out: Sequence[Range]) -> tuple[list[int], list[int], list[int]]:
    """Of a transposed convolution: what has to be cut off, as torch's padding takes it; its padding, which cuts off
    both sides of a dim alike, and its output padding.
    """
    after: list[Margin] = []
    by_op: list[int] = []
    extra: list[int] = []
    for stride, pad, span, read, made in zip(at.stride, at.padding, at.spans, image, out, strict=True):
        low = made[0] - (stride * read[0] - pad)
        high = stride * (read[1] - 1) - pad + span - made[1]
        alike = low >= 0 and 0 <= low - high < stride
        both = low if alike else max(0, min(low, high))
        after.append((0, 0) if alike else (both - low, both - high))
        by_op.append(both)
        extra.append(low - high if alike else 0)
    return padding(after), by_op, extra
