"""How much of its blocks an op computes, rank by rank and step by step, where a causal mask leaves out scores."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from stpart_compiler.cost_models.compute import Computed
from stpart_compiler.ir.layout import Atom
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.spacetime import Strategy, factor_atom
from stpart_compiler.passes.inner_rings import inner_op, inner_ring, inner_strategy
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules.region import BodyOp, Region
from stpart_compiler.passes.rules.registry import WORK, Work, span_of

Shares = tuple[tuple[Computed, ...], ...]
"""Per rank and step, what is computed of a block."""

Dims = tuple[tuple[Atom, ...], ...]


def step_shares(op: OpNode, strategy: Strategy, mesh: Mesh) -> Shares:
    """What each rank computes of its block in each step; empty where that is all of it."""
    work, dims = _work(op, strategy)
    return _shares(work.done, dims, strategy.steps, mesh) if work is not None else ()


def imbalance(op: OpNode, strategy: Strategy, mesh: Mesh) -> float | None:
    """What the busiest rank computes over what a rank computes on average; None where no mask leaves out anything.

    Of a region: of the op inside of it in which that is most.
    """
    if isinstance(op.call.target, Region):
        inside = (_inside(op, strategy, inner, mesh) for inner in op.call.target.body)
        return max((found for found in inside if found is not None), default=None)
    work, dims = _work(op, strategy)
    if work is None:
        return None
    shares = _shares(work.done, dims, strategy.steps, mesh)
    done = [
        sum(part.share * _numel(dims, coords, t) for t, part in enumerate(row))
        for row, coords in zip(shares, mesh.coords, strict=True)
    ]
    return max(done) * len(done) / sum(done)


def _work(op: OpNode, strategy: Strategy) -> tuple[Work | None, Dims]:
    """What is known of the op's work, and the dims that decide; None where all of every block is computed."""
    work = WORK.get(op.call.target)
    dims = work.dims(op.call, op.rule) if work is not None else ()
    return work if dims else None, tuple(tuple(factor_atom(op.rule, strategy, f) for f in dim) for dim in dims)


@lru_cache(maxsize=10_000)
def _shares(done: Callable[..., Computed], dims: Dims, steps: int, mesh: Mesh) -> Shares:
    return tuple(tuple(_computed(done, dims, coords, t) for t in range(steps)) for coords in mesh.coords)


def _computed(done: Callable[..., Computed], dims: Dims, coords: dict[str, int], t: int) -> Computed:
    if not _numel(dims, coords, t):
        return Computed(0.0)
    return done(*(span_of([x.size for x in atoms], [x.range(coords, t) for x in atoms]) for atoms in dims))


def _numel(dims: Dims, coords: dict[str, int], t: int) -> int:
    """Scores in a block."""
    ranges = [atom.range(coords, t) for atoms in dims for atom in atoms]
    return math.prod(high - low for low, high in ranges)


def _inside(op: OpNode, strategy: Strategy, inner: BodyOp, mesh: Mesh) -> float | None:
    ring = inner_ring(op, strategy, inner, mesh)
    if ring is not None:
        return imbalance(ring.op, ring.strategy, mesh)
    return imbalance(inner_op(op, inner), inner_strategy(strategy, inner, 0), mesh)
