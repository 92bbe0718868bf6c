"""One step of a temporal loop in symbols: the cost model's FLOPs and bytes, called with shapes of symbols."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import sympy as sp
import torch

from stpart_compiler.cost_models.compute import flops
from stpart_compiler.ir.overlap import Expr, StepCost
from stpart_compiler.ir.rule import block_shape
from stpart_compiler.ir.spacetime import MOVE, Derived, Strategy, factor_atom
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import OpCall
from stpart_compiler.passes.space import Costs, block_extents

_TAKEN = frozenset("bsfepFB")
"""Letters with a meaning of their own."""


def step_cost(op: OpNode, strategy: Strategy, derived: Derived, costs: Costs) -> StepCost | None:
    """What one step of the op's loop computes and moves; None where nothing travels or nothing is multiplied."""
    moving = [
        (tensor, x.dtype.itemsize, port)
        for tensors, infos, ports in (
            (op.rule.inputs, op.call.operands, derived.inputs),
            (op.rule.outputs, op.call.results, derived.outputs),
        )
        for tensor, x, port in zip(tensors, infos, ports, strict=True)
        if port.motion == MOVE and x is not None
    ]
    if strategy.steps == 1 or not moving:
        return None
    device = costs.cluster.device
    largest = block_extents(op, strategy)
    work = [(n, device.matmul_seconds(n, dtype)) for n, dtype in _products(op, largest)]
    seconds = sum(second for _, second in work)
    if not seconds:
        return None
    names = _Names(op, strategy)
    total = sp.nsimplify(sum(n for n, _ in _products(op, names.extents)), rational=True)
    e = moving[0][1]
    unit = sp.Symbol("e")
    nbytes = sum(
        math.prod(block_shape(tensor, names.extents)) * sp.Rational(size, e) * unit for tensor, size, _ in moving
    )
    link = costs.cluster.link_for({axis for *_, port in moving for axis, _ in port.shift}, costs.mesh)
    values = names.values | {
        "e": float(e),
        "F": sum(n for n, _ in work) / seconds,
        "B": link.bandwidth if link.full_duplex else link.bandwidth / 2,
    }
    return StepCost(str(total), str(nbytes), values)


def _products(op: OpNode, extents: Sequence[Any]) -> Iterator[tuple[Any, torch.dtype]]:
    """FLOPs of each product of a block, of which a causal mask hides half on average, and the type it is made in."""
    for call, (ins, outs) in _calls(op, extents):
        n = flops(call, ins, outs)
        if n:
            yield n / 2 if _is_causal(call) else n, call.operands[0].dtype


def _calls(op: OpNode, extents: Sequence[Any]) -> Iterator[tuple[OpCall, tuple[Any, Any]]]:
    if isinstance(op.call.target, Region):
        for inner in op.call.target.body:
            yield inner.call, inner.shapes(extents)
    else:
        ins, outs = ([block_shape(tensor, extents) for tensor in maps] for maps in (op.rule.inputs, op.rule.outputs))
        yield op.call, (ins, outs)


def _is_causal(call: OpCall) -> bool:
    names = [argument.name for argument in call.target._schema.arguments] if hasattr(call.target, "_schema") else []
    return "is_causal" in names and bool(call.arg(names.index("is_causal"), "is_causal", False))


class _Names:
    """Symbols of an op's loop dims. Sequences of one size share one, and dims of features that its rule names alike."""

    def __init__(self, op: OpNode, strategy: Strategy) -> None:
        self.op = op
        self.time = strategy.time_factor
        self.values: dict[str, float] = {}
        self.known: dict[tuple[str, int], str] = {}
        axes = {axis for digits in strategy.digits for digit in digits for axis, _ in digit.coeffs}
        self.extents: list[Expr] = []
        for f, factor in enumerate(op.rule.factors):
            extent: Expr = sp.Integer(1) if factor.size == 1 else sp.Symbol(self._of(f))
            for digit in factor_atom(op.rule, strategy, f).digits:
                name = "p" if len(axes) == 1 else "_".join(["p", *(axis for axis, _ in digit.coeffs)])
                self.values[name] = float(digit.q)
                extent /= sp.Symbol(name)
            self.extents.append(extent)

    def _of(self, f: int) -> str:
        size = self.op.rule.factors[f].size
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
