"""Pooling and resampling of images: samples and channels may be cut, places are whole."""

from __future__ import annotations

import torch

from stpart_compiler.ir.rule import WHOLE, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors
from stpart_compiler.passes.rules.registry import OpCall, rule

aten = torch.ops.aten


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
