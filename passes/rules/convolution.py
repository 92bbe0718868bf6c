"""Convolutions and their gradients; pooling and resampling of images.

The sample and the channels may be cut, the places are whole. Channels of a grouped convolution are (group, channel).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stpart_compiler.ir.rule import PARALLEL, SUM, WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, result
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, localized, rule

aten = torch.ops.aten

GROUPS = 8  # positions of `groups` among the arguments of convolution
BACKWARD_GROUPS = 9  # and of convolution_backward


@dataclass
class _Maps:
    """Maps of input (n, (g i), places), weight ((g o), i, kernel) and output (n, (g o), places).

    A transposed convolution's weight is ((g i), o, kernel).
    """

    factors: Factors
    image: TensorMap
    weight: TensorMap
    output: TensorMap


def _maps(call: OpCall, image: int, weight: int, out: tuple[int, ...], kinds: dict[str, str]) -> _Maps:
    """`image`, `weight`: their operand indices; `kinds`: of the sample n, and of the channels i and o."""
    x, w = call.operands[image], call.operands[weight]
    transposed, groups = _geometry(call)
    factors = Factors()
    inputs = x.shape[1] // groups
    outputs = out[1] // groups
    n = factors.dim(x.shape[0], kinds["n"], "n")
    g = factors.dim(groups, PARALLEL, "g")
    i, o = factors.dim(inputs, kinds["i"], "i"), factors.dim(outputs, kinds["o"], "o")
    kernel = factors.dims(w.shape[2:], WHOLE)
    outer, inner = ((*g, *i), o) if transposed else ((*g, *o), i)
    return _Maps(
        factors,
        (n, (*g, *i), *factors.dims(x.shape[2:], WHOLE)),
        (outer, inner, *kernel),
        (n, (*g, *o), *factors.dims(out[2:], WHOLE)),
    )


def _geometry(call: OpCall) -> tuple[bool, int]:
    """Whether transposed, and the number of groups."""
    at = _groups_at(call)
    return bool(call.args[at - 2]), int(call.args[at])


def _groups_at(call: OpCall) -> int:
    return GROUPS if call.target is aten.convolution.default else BACKWARD_GROUPS


@rule(aten.convolution.default)
def convolution(call: OpCall) -> OpRule | None:
    """(n (g i), (g o) i) -> (n (g o)), sum i. A bias would be added once per block (`Decompose` takes it apart)."""
    if call.operands[0].ndim == call.operands[1].ndim - 1 or len(call.operands) > 2:
        return None
    maps = _maps(call, 0, 1, result(call).shape, {"n": PARALLEL, "i": SUM, "o": PARALLEL})
    return maps.factors.rule((maps.image, maps.weight), (maps.output,), ((0,), (1,)))


@rule(aten.convolution_backward.default)
def convolution_backward(call: OpCall) -> OpRule | None:
    """The gradient of the input (sum o) or of the weight (sum n), one of them (`Decompose` takes them apart)."""
    mask = call.args[-1]
    if sum(map(bool, mask)) != 1 or mask[2]:
        return None
    kinds = {"n": PARALLEL, "i": PARALLEL, "o": SUM} if mask[0] else {"n": SUM, "i": PARALLEL, "o": PARALLEL}
    maps = _maps(call, 1, 2, call.operands[0].shape, kinds)
    outputs: list[TensorMap] = [(), (), ()]
    outputs[0 if mask[0] else 1] = maps.image if mask[0] else maps.weight
    return maps.factors.rule((maps.output, maps.image, maps.weight), outputs, ((0,), (2,) if mask[0] else (1,)))


@localized(aten.convolution.default, aten.convolution_backward.default)
def convolution_block(call: OpCall, block: Block) -> LocalCall:
    """The groups of the block."""
    at = _groups_at(call)
    channels: DimMap = block.rule.inputs[0][1]
    groups = call.args[at]
    if groups > 1:
        cut = [f for f in channels if block.rule.factors[f].name.startswith("g")]
        groups = block.extent(tuple(cut))
    args = (*call.args[:at], groups, *call.args[at + 1 :])
    return call.target, args, call.kwargs


def _named(*names: str) -> list[torch._ops.OpOverload]:
    """All overloads of ops that give functional results, by name."""
    packets = [getattr(aten, name) for name in names]
    overloads = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    return [op for op in overloads if not op._schema.is_mutable and "out" not in op._overloadname]


_LINEAR_POOLS = _named(
    "avg_pool2d",
    "avg_pool3d",
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
_MAX_POOLS = _named("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d")
_POOL_BACKWARDS = _named(
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "avg_pool2d_backward",
    "avg_pool3d_backward",
    "_adaptive_avg_pool2d_backward",
    "_adaptive_avg_pool3d_backward",
)


@rule(*_LINEAR_POOLS)
def linear_pool(call: OpCall) -> OpRule:
    """pool(x, ...): each sample and channel by itself."""
    return _per_channel(call, ((0,),))


@rule(*_MAX_POOLS)
def max_pool(call: OpCall) -> OpRule:
    """max_pool(x, ...) -> (maxima, their places within one channel)."""
    return _per_channel(call, ())


@rule(*_POOL_BACKWARDS)
def pool_backward(call: OpCall) -> OpRule:
    """pool_backward(grad, x, ...)."""
    return _per_channel(call, ((0,),))


def _per_channel(call: OpCall, linear: tuple[tuple[int, ...], ...]) -> OpRule:
    """Leading dims that all tensors share are independent, as far as they are no places; the others are whole."""
    shapes = [t.shape for t in (*call.operands, *call.results) if t is not None]
    places = _places(call)
    factors = Factors()
    leading = factors.dims(shapes[0][: len(shapes[0]) - places])

    def tensor(shape: tuple[int, ...]) -> TensorMap:
        return (*leading, *factors.dims(shape[len(leading) :], WHOLE))

    inputs = [tensor(operand.shape) for operand in call.operands]
    return factors.rule(inputs, [tensor(r.shape) if r is not None else () for r in call.results], linear)


def _places(call: OpCall) -> int:
    """Number of trailing dims that are places: the digit in the op's name."""
    name = call.target.overloadpacket.__name__
    return next(int(name[i - 1]) for i in range(1, len(name) + 1) if name[i - 1 : i + 1] in ("1d", "2d", "3d"))
