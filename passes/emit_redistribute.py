"""Instructions of a redistribution on one rank. Every rank emits the same steps in the same order.

Blocks are cut and joined over *atoms*: local tensors are reshaped to one dim per atom, on which each cut is a range.
Collectives see rows, one per member, in the order of their blocks; rows and grids of blocks are permutations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stpart_compiler.ir.combine import PAIRWISE
from stpart_compiler.ir.layout import Range, local_shape
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.placement import Box, extent
from stpart_compiler.ir.program import COLLECTIVE_CHANNEL, P2P_CHANNEL, SMALL, SMALL_CHANNEL, Builder, Pending, Value
from stpart_compiler.ir.redistribute import Redistribution, Step, holds_zeros, step_boxes, step_flow
from stpart_compiler.ir.relayout import Source

aten = torch.ops.aten

Shape = tuple[int, ...]
Finish = Callable[[], Value]


def emit_redistribution(builder: Builder, value: Value, plan: Redistribution, mesh: Mesh) -> Value | Pending:
    """Bring the local tensor of `builder.rank` from `plan.source` to `plan.target`.

    Local steps are emitted at once. The first transfer is started; `Pending.advance` waits for it and starts the next.
    All ranks call both alike and at the same places of their programs.
    """
    return _emit(builder, value, plan.steps, mesh)


def _emit(builder: Builder, value: Value, steps: Sequence[Step], mesh: Mesh) -> Value | Pending:
    for index, step in enumerate(steps):
        on = _OnRank(builder, step, mesh)
        if step.kind in _LOCAL:
            value = _LOCAL[step.kind](on, value)
            continue
        finish = _TRANSFERS[step.kind](on, value)
        return _pending(builder, finish, steps[index:], mesh)
    return value


def _pending(builder: Builder, finish: Finish, steps: Sequence[Step], mesh: Mesh) -> Pending:
    """A transfer under way, the first of the steps, and those that follow it."""
    transfers = tuple(step for step in steps if step.kind in _TRANSFERS)
    return Pending(lambda: _emit(builder, finish(), steps[1:], mesh), len(transfers), transfers)


@dataclass(frozen=True)
class _OnRank:
    """One step on one rank, and the calls that it is made of."""

    builder: Builder
    step: Step
    mesh: Mesh

    @property
    def rank(self) -> int:
        return self.builder.rank

    @property
    def shape(self) -> Shape:
        """Local shape after the step."""
        return local_shape(self.step.target, self.mesh, self.rank)

    @property
    def group(self) -> Shape:
        return next(group for group in self.step.groups if self.rank in group)

    def boxes(self) -> tuple[tuple[Box, ...], tuple[Box, ...]]:
        """Per rank, its block before and after, over common atoms."""
        return step_boxes(self.step, self.mesh)

    def view(self, target: Any, x: Value, args: tuple[Any, ...], shape: Shape) -> Value:
        return self.builder.call(target, (x, *args), shape=shape, dtype=x.dtype, stem=x.name, kind="view")

    def reshape(self, x: Value, shape: Shape) -> Value:
        return x if x.shape == shape else self.view(aten.reshape.default, x, (list(shape),), shape)

    def copy(self, x: Value) -> Value:
        kwargs = {"memory_format": torch.contiguous_format}
        return self.builder.call(aten.clone.default, (x,), kwargs, shape=x.shape, dtype=x.dtype, stem=x.name)

    def cut(self, x: Value, whole: Box, part: Box) -> Value:
        """`part` of the block `whole`: contiguous if x is."""
        inner = False
        for dim, (outer, (low, high)) in enumerate(zip(whole, part, strict=True)):
            if outer == (low, high):
                continue
            inner = inner or math.prod(x.shape[:dim]) != 1
            start = low - outer[0] if high > low else 0
            shape = (*x.shape[:dim], high - low, *x.shape[dim + 1 :])
            x = self.view(aten.slice.Tensor, x, (dim, start, start + high - low), shape)
        return self.copy(x) if inner else x

    def join(self, parts: Sequence[tuple[Box, Value]], dim: int = 0) -> Value:
        """The block that the parts make up: joined along the last dims first."""
        if len(parts) == 1:
            return parts[0][1]
        spans: dict[Range, list[tuple[Box, Value]]] = {}
        for box, value in parts:
            spans.setdefault(box[dim], []).append((box, value))
        made = [self.join(spans[span], dim + 1) for span in sorted(spans)]
        if len(made) == 1:
            return made[0]
        shape = (*made[0].shape[:dim], sum(x.shape[dim] for x in made), *made[0].shape[dim + 1 :])
        return self.builder.call(aten.cat.default, (made, dim), shape=shape, dtype=made[0].dtype, stem="joined")

    def to_rows(self, x: Value, grid: Shape) -> Value:
        """[number of parts, *part]: the parts of a block cut by `grid` in each dim, row-major."""
        parts = tuple(size // count for size, count in zip(x.shape, grid, strict=True))
        n = len(grid)
        split = tuple(size for pair in zip(grid, parts, strict=True) for size in pair)
        order = (*range(0, 2 * n, 2), *range(1, 2 * n, 2))
        return self._permuted(x, split, order, (math.prod(grid), *parts))

    def from_rows(self, rows: Value, grid: Shape, parts: Shape) -> Value:
        """The block made of rows of shape `parts`: the inverse of `to_rows`."""
        n = len(grid)
        order = tuple(i for dim in range(n) for i in (dim, n + dim))
        return self._permuted(rows, (*grid, *parts), order, tuple(map(math.prod, zip(grid, parts, strict=True))))

    def _permuted(self, x: Value, split: Shape, order: Shape, shape: Shape) -> Value:
        moved = [dim for dim in order if split[dim] != 1]
        if moved == sorted(moved):
            return self.reshape(x, shape)
        wide = tuple(split[dim] for dim in moved)
        x = self.reshape(x, tuple(split[dim] for dim in sorted(moved)))
        rank = {dim: i for i, dim in enumerate(sorted(moved))}
        turned = self.view(aten.permute.default, x, ([rank[dim] for dim in moved],), wide)
        return self.reshape(self.copy(turned), shape)


def _slice(on: _OnRank, value: Value) -> Value:
    before, after = (boxes[on.rank] for boxes in on.boxes())
    part = on.cut(on.reshape(value, extent(before)), before, after)
    return on.reshape(part, on.shape)


def _zero(on: _OnRank, value: Value) -> Value:
    if not holds_zeros(on.step, on.mesh, on.rank):
        return value
    return on.builder.call(aten.zeros_like.default, (value,), shape=value.shape, dtype=value.dtype, stem=value.name)


def _collective(on: _OnRank, value: Value, shape: Shape, use: Callable[[Value], Value]) -> Finish:
    """Start the step's collective on `value`; `use` makes the local tensor of its result."""
    tag, channel = on.builder.reserve(), channel_of(on.step, value.dtype.itemsize)
    result = on.builder.collective(on.step.kind, value, on.group, tag, shape, channel)

    def finish() -> Value:
        on.builder.wait((tag,), channel)
        return on.reshape(use(result), on.shape)

    return finish


def channel_of(step: Step, itemsize: int) -> int:
    """The channel of a step that communicates, for elements of `itemsize` bytes."""
    if not step.groups:
        return P2P_CHANNEL
    return SMALL_CHANNEL if math.prod(step.source.shape) * itemsize <= SMALL else COLLECTIVE_CHANNEL


def _all_reduce(on: _OnRank, value: Value) -> Finish:
    return _collective(on, value, value.shape, lambda result: result)


def _all_gather(on: _OnRank, value: Value) -> Finish:
    before, _ = on.boxes()
    grid = _grid([before[rank] for rank in on.group])
    parts = extent(before[on.rank])
    return _collective(on, value, (len(on.group), *value.shape), lambda rows: on.from_rows(rows, grid, parts))


def _reduce_scatter(on: _OnRank, value: Value) -> Finish:
    before, after = on.boxes()
    grid = _grid([after[rank] for rank in on.group])
    rows = on.to_rows(on.reshape(value, extent(before[on.rank])), grid)
    return _collective(on, rows, rows.shape[1:], lambda result: result)


def _all_to_all(on: _OnRank, value: Value) -> Finish:
    before, after = on.boxes()
    outgoing = _grid([_common(before[on.rank], after[rank]) for rank in on.group])
    incoming = _grid([_common(before[rank], after[on.rank]) for rank in on.group])
    rows = on.to_rows(on.reshape(value, extent(before[on.rank])), outgoing)
    return _collective(on, rows, rows.shape, lambda result: on.from_rows(result, incoming, rows.shape[1:]))


def _common(one: Box, two: Box) -> Box:
    return tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, two, strict=True))


def _grid(boxes: Sequence[Box]) -> Shape:
    """Number of different ranges in each dim."""
    grid = tuple(len(set(spans)) for spans in zip(*boxes, strict=True))
    assert math.prod(grid) == len(boxes), f"{boxes} are no grid"
    return grid


def _exchange(on: _OnRank, value: Value) -> Finish:
    """Pieces go point to point, one message for each pair of ranks; summands that arrive are added up, or combined."""
    tag = on.builder.reserve()
    if not math.prod(on.step.source.shape):
        return lambda: _empty(on, value)
    before, after = on.boxes()
    flow = step_flow(on.step, on.mesh)
    block = on.reshape(value, extent(before[on.rank]))
    sends = _sends(on, block, before[on.rank], flow.gives[on.rank], tag)
    mine = flow.takes[on.rank]
    wanted = [source for summand in mine for source in summand if source.rank != on.rank]
    recvs = [(extent(source.piece.part), value.dtype, source.rank, tag) for source in wanted]
    buffers, tags = on.builder.exchange(sends, recvs)
    received = {source.rank: buffer for source, buffer in zip(wanted, buffers, strict=True)}

    def piece(source: Source) -> tuple[Box, Value]:
        if source.rank != on.rank:
            return source.piece.part, received[source.rank]
        return source.piece.part, on.cut(block, before[on.rank], source.piece.part)

    def finish() -> Value:
        on.builder.wait(tags, P2P_CHANNEL)
        if not math.prod(extent(after[on.rank])):
            return _empty(on, value)
        return on.reshape(_combined(on, [on.join([piece(source) for source in summand]) for summand in mine]), on.shape)

    return finish


def _sends(
    on: _OnRank, block: Value, box: Box, gives: Sequence[tuple[int, Box]], tag: int
) -> list[tuple[Value, int, int]]:
    """Messages with what other ranks take from this one, each part made contiguous once."""
    parts: dict[Box, Value] = {}
    for _, part in gives:
        if part not in parts:
            cut = on.cut(block, box, part)
            parts[part] = on.view(aten.contiguous.default, cut, (), cut.shape)
    return [(parts[part], peer, tag) for peer, part in gives]


def _combined(on: _OnRank, summands: Sequence[Value]) -> Value:
    total = summands[0]
    target = PAIRWISE[on.step.source.combine]
    for other in summands[1:]:
        total = on.builder.call(target, (total, other), shape=total.shape, dtype=total.dtype, stem="summed")
    return total


def _empty(on: _OnRank, value: Value) -> Value:
    args = (value, list(on.shape))
    return on.builder.call(aten.new_empty.default, args, shape=on.shape, dtype=value.dtype, stem="empty")


_LOCAL: dict[str, Callable[[_OnRank, Value], Value]] = {"slice": _slice, "zero": _zero}
_TRANSFERS: dict[str, Callable[[_OnRank, Value], Finish]] = {
    "exchange": _exchange,
    "reduce_exchange": _exchange,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
