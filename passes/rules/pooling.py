"""Pooling and resampling of images.

Samples and channels may be cut. So may the places of max_pool and avg_pool, which are read through windows
(`ir.window`); in the other ops places are whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stpart_compiler.ir.rule import PARALLEL, WHOLE, OpRule, TensorMap
from stpart_compiler.ir.window import Range
from stpart_compiler.passes.rules.factors import Factors, result
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, localized, rule
from stpart_compiler.passes.rules.windows import Geometry, each, margins, padding, places, spans
from stpart_compiler.runtime import window_ops

aten = torch.ops.aten


def _named(*names: str) -> list[torch._ops.OpOverload]:
    """All overloads of ops that give functional results, by name."""
    packets = [getattr(aten, name) for name in names]
    overloads = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [op for op in overloads if not op._schema.is_mutable and "out" not in op._overloadname]


_MAX = _named("max_pool2d_with_indices", "max_pool3d_with_indices")
_MAX_BACKWARD = _named("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
_AVERAGE = _named("avg_pool2d", "avg_pool3d")
_AVERAGE_BACKWARD = _named("avg_pool2d_backward", "avg_pool3d_backward")
_LINEAR = _named(
    "_adaptive_avg_pool2d",
    "_adaptive_avg_pool3d",
    "_upsample_bilinear2d_aa",
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "upsample_trilinear3d",
    "reflection_pad1d",
    "reflection_pad2d",
    "reflection_pad3d",
    "replication_pad1d",
    "replication_pad2d",
    "replication_pad3d",
)
_ADAPTIVE_MAX = _named("adaptive_max_pool2d", "adaptive_max_pool3d")
_ADAPTIVE_BACKWARD = _named(
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
)


def _geometry(call: OpCall) -> Geometry:
    """The kernel stands behind the image."""
    n, at = _places(call), 2 if call.target in (*_MAX_BACKWARD, *_AVERAGE_BACKWARD) else 1
    kernel = each(call.arg(at, "kernel_size"), n)
    stride = call.arg(at + 1, "stride", ()) or kernel
    dilation = call.arg(at + 3, "dilation", 1) if call.target in (*_MAX, *_MAX_BACKWARD) else 1
    return Geometry(kernel, each(stride, n), each(call.arg(at + 2, "padding", 0), n), each(dilation, n))


def _places(call: OpCall) -> int:
    """Number of trailing dims that are places: the digit in the op's name."""
    name = call.target.overloadpacket.__name__
    return next(int(name[i - 1]) for i in range(1, len(name) + 1) if name[i - 1 : i + 1] in ("1d", "2d", "3d"))


def _maps(
    call: OpCall, image: Sequence[int], out: Sequence[int], *, back: bool
) -> tuple[Factors, TensorMap, TensorMap]:
    """Maps of the image and of the result. `back`: places of the image read those of the result.

    Where a pool is none the places are whole, and all of them where it is dilated: of windows in which all is -inf,
    the place that is named is then another than the first of the image.
    """
    at = _geometry(call)
    n = len(at.kernel)
    factors = Factors()
    leading = factors.dims(image[:-n])
    made, read = (image, out) if back else (out, image)
    dilated = any(d > 1 for d in at.dilation)
    kinds = [WHOLE if dilated or k == s == 1 else PARALLEL for k, s in zip(at.kernel, at.stride, strict=True)]
    drivers, halos = places(factors, at.windows(made[-n:], back=back), read[-n:], kinds)
    one, two = (drivers, halos) if back else (halos, drivers)
    return factors, (*leading, *one), (*leading, *two)


@rule(*_AVERAGE)
def avg_pool(call: OpCall) -> OpRule:
    """(... h) -> (... p), halo h."""
    factors, image, out = _maps(call, call.operands[0].shape, result(call).shape, back=False)
    return factors.rule((image,), (out,), ((0,),))


@rule(*_MAX)
def max_pool(call: OpCall) -> OpRule:
    """(... h) -> (... p), (... p) their places in one channel; halo h."""
    factors, image, out = _maps(call, call.operands[0].shape, result(call).shape, back=False)
    return factors.rule((image,), (out, out))


@rule(*_AVERAGE_BACKWARD, *_MAX_BACKWARD)
def pool_backward(call: OpCall) -> OpRule:
    """(grad ... h, x ... p, indices ... h) -> (... p), halo h. Of the image only the shape is read."""
    factors, image, out = _maps(call, result(call).shape, call.operands[0].shape, back=True)
    return factors.rule((out, image, out)[: len(call.operands)], (image,), ((0,),))


def _is_cut(call: OpCall, block: Block) -> bool:
    """Whether places are: those of the result drive the others."""
    return any(block.is_cut(dim) for dim in block.rule.outputs[0][-_places(call) :])


def _places_of(call: OpCall, block: Block) -> tuple[list[Range], list[Range]]:
    """Places of the first operand that a block reads, and those of the result that it makes."""
    n = _places(call)
    return spans(block, block.rule.inputs[0][-n:]), spans(block, block.rule.outputs[0][-n:])


def _margins(call: OpCall, block: Block) -> list[int]:
    """Padding around the block of an image, as torch's padding takes it."""
    windows = _geometry(call).windows(result(call).shape[-_places(call) :])
    return padding([margins(*each_) for each_ in zip(windows, *_places_of(call, block), strict=True)])


@localized(*_MAX)
def max_pool_block(call: OpCall, block: Block) -> LocalCall:
    """Places are counted in the whole channel."""
    if not _is_cut(call, block):
        return call.target, call.args, call.kwargs
    at, (read, _) = _geometry(call), _places_of(call, block)
    sizes = call.operands[0].shape[-len(read) :]
    starts = [low for low, _ in read]
    return window_ops.max_pool_block, (call.args[0], _margins(call, block), at.kernel, at.stride, starts, sizes), {}


@localized(*_MAX_BACKWARD)
def max_pool_backward_block(call: OpCall, block: Block) -> LocalCall:
    if not _is_cut(call, block):
        return call.target, call.args, call.kwargs
    _, made = _places_of(call, block)
    sizes = result(call).shape[-len(made) :]
    indices = call.arg(7, "indices")
    return window_ops.max_pool_backward_block, (call.args[0], indices, made, sizes), {}


@localized(*_AVERAGE)
def avg_pool_block(call: OpCall, block: Block) -> LocalCall:
    if not _is_cut(call, block):
        return call.target, call.args, call.kwargs
    at, (_, made) = _geometry(call), _places_of(call, block)
    counts = _counts(call, made, call.operands[0].shape, 4)
    return window_ops.avg_pool_block, (call.args[0], _margins(call, block), at.kernel, at.stride, *counts), {}


@localized(*_AVERAGE_BACKWARD)
def avg_pool_backward_block(call: OpCall, block: Block) -> LocalCall:
    if not _is_cut(call, block):
        return call.target, call.args, call.kwargs
    at, (read, made) = _geometry(call), _places_of(call, block)
    sizes = zip(read, made, at.stride, at.padding, at.kernel, strict=True)
    crops = [(s * r[0] - p - m[0], m[1] - (s * (r[1] - 1) - p + k)) for r, m, s, p, k in sizes]
    counts = _counts(call, read, result(call).shape, 5)
    return window_ops.avg_pool_backward_block, (call.args[0], padding(crops), at.kernel, at.stride, *counts), {}


def _counts(
    call: OpCall, made: Sequence[Range], image: Sequence[int], position: int
) -> tuple[list[window_ops.Counted], bool, int | None]:
    """What tells how many places an average is over. `position`: of the arguments from ceil_mode on."""
    at = _geometry(call)
    with_padding = call.arg(position + 1, "count_include_pad", True)
    places_ = zip(made, image[-len(made) :], at.kernel, at.stride, at.padding, strict=True)
    counted = [(*span, size, k, s, p) for span, size, k, s, p in places_]
    return counted, with_padding, call.arg(position + 2, "divisor_override")


@rule(*_LINEAR)
def linear_pool(call: OpCall) -> OpRule:
    """pool(x, ...): each sample and channel by itself."""
    return _per_channel(call, ((0,),))


@rule(*_ADAPTIVE_MAX)
def adaptive_max_pool(call: OpCall) -> OpRule:
    """max_pool(x, ...) -> (maxima, their places within one channel): each sample and channel by itself."""
    return _per_channel(call, ())


@rule(*_ADAPTIVE_BACKWARD)
def adaptive_pool_backward(call: OpCall) -> OpRule:
    """pool_backward(grad, x, ...): each sample and channel by itself."""
    return _per_channel(call, ((0,),))


def _per_channel(call: OpCall, linear: tuple[tuple[int, ...], ...]) -> OpRule:
    """Leading dims that all tensors share are independent, as far as they are no places; the others are whole."""
    shapes = [t.shape for t in (*call.operands, *call.results) if t is not None]
    count = _places(call)
    factors = Factors()
    leading = factors.dims(shapes[0][: len(shapes[0]) - count])

    def tensor(shape: tuple[int, ...]) -> TensorMap:
        return (*leading, *factors.dims(shape[len(leading) :], WHOLE))

    inputs = [tensor(operand.shape) for operand in call.operands]
    return factors.rule(inputs, [tensor(r.shape) if r is not None else () for r in call.results], linear)
