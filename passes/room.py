"""Elements that a rank holds for a re-layout beside its source and its result: copies, messages, layouts on the way.

Blocks that are cut or joined along an inner dim are packed and unpacked by a copy; pieces that come one by one are
joined when all of them are there. These are the instructions of `passes/emit_redistribute.py`, counted instead of
emitted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.ir.layout import Layout, max_local_numel
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.placement import Box, extent
from stpart_compiler.ir.redistribute import Step, redistribute, step_boxes, step_traffic_scaled


class Room(NamedTuple):
    """Elements of the fullest rank, each beside the former: while the first transfer runs; when it begins; while later
    ones run; when the last one has ended.
    """

    move: int
    begin: int
    later: int
    end: int


NO_ROOM = Room(0, 0, 0, 0)


class _Needs(NamedTuple):
    """What one step allocates, in elements. `packed`: the copy that is sent in place of the source; `moving`: buffers
    of its transfer; `end`: those and the result, when it is made of them. `reads`: whether that needs the source.
    """

    packed: int
    moving: int
    end: int
    reads: bool = False


def room(source: Layout, target: Layout, mesh: Mesh, cost: LinkCost, *, stays: bool) -> Room:
    """What the steps from `source` to `target` hold, beside what is counted for them anyway.

    That is the result all the time; and the source: as long as the first transfer runs, or anyway if it `stays`.
    """
    steps = redistribute(source, target, mesh, cost).steps
    if all(step.kind in ("slice", "zero") for step in steps):
        return NO_ROOM
    first, *others = (_needs(step, mesh) for step in steps)
    own, made = max_local_numel(source), max_local_numel(target)
    begin = first.packed if stays else max(first.packed, first.moving)
    move = first.moving + (first.packed if stays or first.reads else 0)
    later, end = 0, first.end + (own if first.reads and not stays else 0)
    for step, needs in zip(steps[1:], others, strict=True):
        held = max_local_numel(step.source)
        end = max(end, held + needs.packed, needs.end + (held if needs.reads else 0))
        later = max(later, held + needs.moving)
    counted = made if stays else own + made
    move = max(0, move - made)
    later = max(0, later - counted - move)
    return Room(move, max(0, begin - made - move), later, max(0, end - counted - move - later))


def _needs(step: Step, mesh: Mesh) -> _Needs:
    own, made = max_local_numel(step.source), max_local_numel(step.target)
    if step.kind in ("slice", "zero"):
        return _Needs(0, 0, made, reads=True)
    if step.kind == "all_reduce":
        return _Needs(0, made, made)
    before, after = step_boxes(step, mesh)
    if step.kind in ("exchange", "reduce_exchange"):
        return _exchanged(step, mesh, own, made, before, after)
    packed = own if step.kind != "all_gather" and _is_inner(before[0], _parts(before[0], after)) else 0
    copied = made if step.kind != "reduce_scatter" and _is_inner(after[0], _parts(after[0], before)) else 0
    return _Needs(packed, made, made + copied)


def _exchanged(step: Step, mesh: Mesh, own: int, made: int, before: tuple[Box, ...], after: tuple[Box, ...]) -> _Needs:
    """Pieces: those of an inner dim are copied to be sent; where a block is one piece, it is received as it is."""
    traffic, scale = step_traffic_scaled(step, mesh)
    received = round(traffic.received * scale)
    packed = min(own, round(traffic.sent * scale)) if _is_inner(before[0], _parts(before[0], after[1:])) else 0
    if traffic.messages == 1 and received >= made:
        return _Needs(packed, received, received)
    return _Needs(packed, received, received + made, reads=True)


def _parts(block: Box, others: tuple[Box, ...]) -> list[Box]:
    """What a block has in common with others."""
    common = [tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(block, other, strict=True)) for other in others]
    return [box for box in common if all(high > low for low, high in box)]


def _is_inner(block: Box, parts: list[Box]) -> bool:
    """Whether some part of a block does not lie in it as one piece."""
    whole = extent(block)
    return any(_leaves_gaps(whole, extent(part)) for part in parts)


def _leaves_gaps(whole: tuple[int, ...], part: tuple[int, ...]) -> bool:
    cut = [i for i, (size, own) in enumerate(zip(whole, part, strict=True)) if size != own]
    return any(math.prod(part[:i]) != 1 for i in cut)
