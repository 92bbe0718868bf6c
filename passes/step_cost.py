"""One step of a temporal loop in symbols: the cost model's FLOPs and bytes, called with shapes of symbols."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import sympy as sp

from stpart_compiler.cost_models.compute import arithmetic_seconds, flops, is_causal
from stpart_compiler.ir.overlap import Expr, StepCost
from stpart_compiler.ir.rule import OpRule, TensorMap, block_shape
from stpart_compiler.ir.spacetime import MOVE, Derived, Port, Strategy, factor_atom
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.inner_rings import inner_ring
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import OpCall

_TAKEN = frozenset("bsfepFB")
"""Letters with a meaning of their own."""


def step_costs(op: OpNode, strategy: Strategy, derived: Derived, costs: Costs) -> list[StepCost]:
    """What one step of the op's loop computes and moves, and of the rings inside of it.

    Left out are those in which nothing travels or nothing is multiplied.
    """
    body = op.call.target.body if isinstance(op.call.target, Region) else ()
    rings = (inner_ring(op, strategy, inner, costs.mesh) for inner in body)
    found = [_step_cost(ring.op, ring.strategy, ring.derived, costs) for ring in rings if ring is not None]
    return [cost for cost in (_step_cost(op, strategy, derived, costs), *found) if cost is not None]


def _step_cost(op: OpNode, strategy: Strategy, derived: Derived, costs: Costs) -> StepCost | None:
    moving = _moving(op, derived)
    largest = costs.extents(op, strategy)
    work = [(n, arithmetic_seconds(call, n, costs.cluster.device)) for n, call in _products(op.call, op.rule, largest)]
    seconds = sum(second for _, second in work)
    if strategy.steps == 1 or not moving or not seconds:
        return None
    names = _Names(op, strategy)
    total = sp.nsimplify(sum(n for n, _ in _products(op.call, op.rule, names.extents)), rational=True)
    e = moving[0][1]
    unit = sp.Symbol("e")
    nbytes = sum(math.prod(block_shape(x, names.extents)) * sp.Rational(size, e) * unit for x, size, _ in moving)
    sizes = [math.prod(block_shape(x, largest)) * size for x, size, _ in moving]
    values = names.values | {
        "e": float(e),
        "F": sum(n for n, _ in work) / seconds,
        "B": costs.link.moves(tuple(port.shift for *_, port in moving)).bandwidth(sizes),
    }
    return StepCost(strategy.steps, str(total), str(nbytes), values)


def _moving(op: OpNode, derived: Derived) -> list[tuple[TensorMap, int, Port]]:
    """Operands and results that travel: their maps, bytes of an element, and ports."""
    ports = (
        *zip(op.rule.inputs, op.call.operands, derived.inputs, strict=True),
        *zip(op.rule.outputs, op.call.results, derived.outputs, strict=True),
    )
    return [(x, info.dtype.itemsize, port) for x, info, port in ports if port.motion == MOVE and info is not None]


def _products(call: OpCall, rule: OpRule, extents: Sequence[Any]) -> Iterator[tuple[Any, OpCall]]:
    """FLOPs of each product of a block, of which a causal mask hides half on average, and the call that makes it."""
    if isinstance(call.target, Region):
        for inner in call.target.body:
            yield from _products(inner.call, inner.rule, [extents[f] for f in inner.factors])
        return
    ins, outs = ([block_shape(tensor, extents) for tensor in maps] for maps in (rule.inputs, rule.outputs))
    n = flops(call, ins, outs)
    if n:
        yield n / 2 if is_causal(call) else n, call


class _Names:
    """Symbols of an op's loop dims. Sequences of one size share one, and dims of features that its rule names alike."""

    def __init__(self, op: OpNode, strategy: Strategy) -> None:
        self.op = op
        self.time = strategy.time_factor
        self.values: dict[str, float] = {}
        self.known: dict[tuple[str, int], str] = {}
        axes = {axis for digits in strategy.digits for digit in digits for axis, _ in digit.coeffs}
        self.extents: list[Expr] = []
        self.beside = dict(_rows_and_stripes(op))
        for f, factor in enumerate(op.rule.factors):
            extent: Expr = sp.Integer(1)
            if factor.size > 1 and f not in self.beside.values():
                extent = sp.Symbol(self._of(f))
            for digit in factor_atom(op.rule, strategy, f).digits:
                name = "p" if len(axes) == 1 else "_".join(["p", *(axis for axis, _ in digit.coeffs)])
                self.values[name] = float(digit.q)
                extent /= sp.Symbol(name)
            self.extents.append(extent)

    def _of(self, f: int) -> str:
        size = self.op.rule.factors[f].size
        if f in self.beside:  # rows and stripes are one dim
            size *= self.op.rule.factors[self.beside[f]].size
        role = self._role(f)
        own = self.op.rule.factors[f].name.rstrip("0123456789")
        if not role and own in _TAKEN:  # the value's dim of a head is that of the query's
            alike = [name for (stem, n), name in self.known.items() if n == size and stem not in "bsf"]
            if alike:
                return alike[-1]
        stem = role or (own if len(own) == 1 and own not in _TAKEN else "h")
        if (stem, size) not in self.known:
            taken = sum(1 for known, _ in self.known if known == stem)
            self.known[stem, size] = f"{stem}{taken}" if taken else stem
            self.values[self.known[stem, size]] = float(size)
        return self.known[stem, size]

    def _role(self, f: int) -> str:
        return "b" if f in self.op.batch else "s" if f in self.op.data else "f" if f == self.time else ""


def _rows_and_stripes(op: OpNode) -> Iterator[tuple[int, int]]:
    """Factors of rows, each with that of the stripes behind it in a dim."""
    dims = {dim for tensor in (*op.rule.inputs, *op.rule.outputs) for dim in tensor}
    yield from (
        pair for dim in dims for pair in pairwise(dim) if pair[1] in op.stripes and op.rule.factors[pair[0]].local
    )
