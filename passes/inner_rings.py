"""Rings inside of regions: an op of a region's body goes round an axis that the region's own dim is cut over.

In METP's attention the outer loop is one over groups of heads, so that queries, keys and values of one group exist at a
time. The sequence is one dim of the region, cut in space; in attention it is both that of queries and that of keys.
There queries stay and keys and values travel, step by step, within one step of the outer loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from stpart_compiler.ir.layout import Digit, Layout, form
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.spacetime import MOVE, Derived, Strategy, derive
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules.region import BodyOp


@dataclass(frozen=True)
class InnerRing:
    """An op of a body as a ring. `given`: layouts in which its operands are there; `derived` may want others."""

    op: OpNode
    strategy: Strategy
    derived: Derived
    given: tuple[Layout, ...]


def inner_ring(op: OpNode, strategy: Strategy, inner: BodyOp, mesh: Mesh, t: int = 0) -> InnerRing | None:
    """The ring that `inner` is in step `t` of the region `op`; None where its dim is not cut."""
    if inner.ring is None:
        return None
    stays, travels = inner.ring
    cut = strategy.digits[inner.factors[stays]]
    if not cut:
        return None
    ((axis, _),) = cut[0].coeffs
    plain = inner_strategy(strategy, inner, t)
    made = inner_op(op, inner)
    given = tuple(port.layout for port in derive(inner.rule, plain, mesh).inputs)
    for offset in (0, -1):  # a result that travels starts one rank further on, so that it ends where the plain form is
        digits = list(plain.digits)
        digits[travels] = (form(cut[0].q, -1, offset, **{axis: 1}),)
        ring = Strategy(tuple(digits), cut[0].q)
        derived = derive(inner.rule, ring, mesh)
        if any(port.motion == MOVE for port in derived.outputs) == bool(offset):
            return InnerRing(made, ring, derived, given)
    raise AssertionError(f"{inner.kind}: no ring along {axis}")


def inner_strategy(strategy: Strategy, inner: BodyOp, t: int) -> Strategy:
    """How an op of the body is cut in step `t` of the region's loop."""

    def at_rest(f: int) -> tuple[Digit, ...]:
        return tuple(digit.at_rest(t) for digit in strategy.digits[f])

    return Strategy(tuple(at_rest(f) for f in inner.factors))


def inner_op(op: OpNode, inner: BodyOp) -> OpNode:
    """An op of the body as one of the graph, under the name of the region."""

    def own(factors: frozenset[int]) -> frozenset[int]:
        return frozenset(f for f, outer in enumerate(inner.factors) if outer in factors)

    return replace(
        op,
        call=inner.call,
        rule=inner.rule,
        operands=tuple(("", i) for i in range(len(inner.sources))),
        movable=own(op.movable),
        batch=own(op.batch),
        data=own(op.data),
        stripes=own(op.stripes),
    )
