"""Views: the same elements under another shape or order of dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from stpart_compiler.ir.rule import WHOLE, DimMap, OpRule, TensorMap
from stpart_compiler.passes.rules.factors import Factors, Shape, aligned, normalized, result
from stpart_compiler.passes.rules.registry import Block, LocalCall, OpCall, localized, rule

aten = torch.ops.aten

_RESHAPES = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
)


@rule(*_RESHAPES, aten.unsqueeze.default)
def reshaped(call: OpCall) -> OpRule:
    """Factors common to both shapes: `(a (b c)) -> ((a b) c)`."""
    factors = Factors()
    source, target = matched(factors, call.operands[0].shape, result(call).shape)
    return factors.rule((source,), (target,), ((0,),))


@localized(*_RESHAPES)
def reshaped_block(call: OpCall, block: Block) -> LocalCall:
    """A block need not be laid out so that a view exists, so it is reshaped, which copies only where it must."""
    return aten.reshape.default, (call.operands[0], list(block.out_shape())), {}


def matched(factors: Factors, source: Shape, target: Shape) -> tuple[TensorMap, TensorMap]:
    """Maps of two shapes of the same elements in the same order.

    Dims are matched in groups of equal product. Where the boundaries of both sides in a group divide one another, the
    group is written as the factors between them; otherwise its dims are kept whole.
    """
    left: dict[int, DimMap] = {}
    right: dict[int, DimMap] = {}
    for ins, outs in _groups(source, target):
        sizes, other = [source[i] for i in ins], [target[i] for i in outs]
        bounds = sorted(_boundaries(sizes) | _boundaries(other), reverse=True)
        if all(minor and major % minor == 0 for major, minor in itertools.pairwise(bounds)):
            atoms = [factors.add(major // minor) for major, minor in itertools.pairwise(bounds)]
            maps = [_covering(factors, atoms, shape) for shape in (sizes, other)]
        else:
            maps = [[(factors.add(size, WHOLE),) for size in shape] for shape in (sizes, other)]
        left.update(zip(ins, maps[0], strict=True))
        right.update(zip(outs, maps[1], strict=True))
    return (
        tuple(left.get(i, ()) for i in range(len(source))),
        tuple(right.get(i, ()) for i in range(len(target))),
    )


def _groups(source: Shape, target: Shape) -> Iterator[tuple[list[int], list[int]]]:
    """Smallest runs of dims (those of size one left out) of equal product on both sides."""
    left = [i for i, size in enumerate(source) if size != 1]
    right = [i for i, size in enumerate(target) if size != 1]
    if math.prod(source) == 0:
        yield left, right
        return
    ins: list[int] = []
    outs: list[int] = []
    have, want = 1, 1
    while left or right or ins:
        if ins and have == want:
            yield ins, outs
            ins, outs, have, want = [], [], 1, 1
        elif not outs or have > want or not left:
            outs.append(right.pop(0))
            want *= target[outs[-1]]
        else:
            ins.append(left.pop(0))
            have *= source[ins[-1]]


def _boundaries(sizes: Shape) -> set[int]:
    """Suffix products: the numbers of elements at which a dim of the group begins."""
    return {math.prod(sizes[i:]) for i in range(len(sizes) + 1)}


def _covering(factors: Factors, atoms: list[int], sizes: Shape) -> list[DimMap]:
    """Per dim the consecutive atoms whose sizes multiply to its size."""
    rest = list(atoms)
    maps = []
    for size in sizes:
        taken: list[int] = []
        while math.prod(factors.items[f].size for f in taken) < size:
            taken.append(rest.pop(0))
        maps.append(tuple(taken))
    return maps


@rule(aten.t.default, aten.transpose.int, aten.permute.default)
def permuted(call: OpCall) -> OpRule:
    """The dims in another order."""
    factors = Factors()
    source = factors.dims(call.operands[0].shape)
    return factors.rule((source,), (tuple(source[i] for i in _order(call, len(source))),), ((0,),))


def _order(call: OpCall, ndim: int) -> list[int]:
    if call.target is aten.permute.default:
        return [normalized(dim, ndim) for dim in call.args[1]]
    order = list(range(ndim))
    if call.target is aten.t.default:
        return order[::-1]
    first, second = (normalized(dim, ndim) for dim in call.args[1:3])
    order[first], order[second] = second, first
    return order


@rule(aten.expand.default)
def expanded(call: OpCall) -> OpRule:
    """Dims of size one, or missing on the left, are repeated: factors that only the result has."""
    factors = Factors()
    out = factors.dims(result(call).shape)
    return factors.rule((aligned(out, call.operands[0].shape),), (out,), ((0,),))


@localized(aten.expand.default)
def expanded_block(call: OpCall, block: Block) -> LocalCall:
    return aten.expand.default, (call.operands[0], list(block.out_shape())), {}
