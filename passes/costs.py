"""Prices on one cluster and mesh: of ops by strategy, and of re-layouts, each of them found once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stpart_compiler.cost_models.cluster import Cluster
from stpart_compiler.cost_models.communication import LinkCost, temporal_seconds
from stpart_compiler.cost_models.compute import ALL, Computed, combining_seconds, copy_seconds, op_seconds
from stpart_compiler.ir.layout import Atom, Layout, max_local_numel
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.redistribute import redistribution_cost
from stpart_compiler.ir.rule import TensorMap, block_shape
from stpart_compiler.ir.spacetime import MOVE, SLICE, Derived, Port, Shift, Strategy, derive, factor_atom
from stpart_compiler.passes.hops import Hops, busiest, skips_blocks
from stpart_compiler.passes.hops import moving as hops_of
from stpart_compiler.passes.inner_rings import inner_op, inner_ring, inner_strategy
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import WORK
from stpart_compiler.passes.shares import step_shares

Array = npt.NDArray[np.float64]


class _Lying(NamedTuple):
    """A layout: its number, that of what lies inside of its outermost dim, and the elements of its largest block."""

    layout: Layout
    number: int
    inner: int
    numel: int


@dataclass(frozen=True)
class Costs:
    """Prices on one cluster and mesh, in seconds."""

    cluster: Cluster
    mesh: Mesh

    @cached_property
    def link(self) -> LinkCost:
        return LinkCost(self.cluster, self.mesh)

    @cached_property
    def in_rows(self) -> Costs:
        """Of collectives of which one follows the other, such as those of parameters and gradients."""
        cluster = self.cluster.in_rows
        return self if cluster is self.cluster else Costs(cluster, self.mesh)

    def relayout(self, source: Layout, target: Layout, itemsize: int) -> float:
        """Seconds of the transfers of a re-layout."""
        return self.priced(source, target, itemsize)[0]

    def priced(self, source: Layout, target: Layout, itemsize: int) -> tuple[float, float]:
        """Seconds of the transfers of a re-layout, and of the local copies beside them."""
        return self._between(self._lying(source), self._lying(target), itemsize)

    def table(self, sources: Sequence[Layout], targets: Sequence[Layout], itemsize: int) -> Array:
        """[source, target] -> seconds as in `priced`."""
        rows, columns = ([self._lying(layout) for layout in side] for side in (sources, targets))
        return np.array([[self._between(a, b, itemsize) for b in columns] for a in rows])

    def _between(self, source: _Lying, target: _Lying, itemsize: int) -> tuple[float, float]:
        key = (source.number, target.number, itemsize)
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._priced(source, target, itemsize)
        return found

    def _priced(self, source: _Lying, target: _Lying, itemsize: int) -> tuple[float, float]:
        """Local copies: blocks that differ in their outermost dim alone, or not at all, are sent where they are.

        Nothing hides the others.
        """
        if source.number == target.number:
            return 0.0, 0.0
        seconds = redistribution_cost(source.layout, target.layout, self.mesh, itemsize, self.link)
        if not seconds or source.inner == target.inner:
            return seconds, 0.0
        return seconds, copy_seconds(max(source.numel, target.numel) * itemsize, self.cluster)

    def _lying(self, layout: Layout) -> _Lying:
        found = self.lying.get(layout)
        if found is None:
            atoms = tuple(atom for dim in layout.dims for atom in dim if atom.size > 1)
            number = self.inner.setdefault(atoms[1:], len(self.inner))
            found = self.lying[layout] = _Lying(layout, len(self.lying), number, max_local_numel(layout))
        return found

    # Prices asked for before, as identical tensors are common, and what is known of layouts:

    @cached_property
    def known(self) -> dict[tuple[int, int, int], tuple[float, float]]:
        return {}

    @cached_property
    def lying(self) -> dict[Layout, _Lying]:
        return {}

    @cached_property
    def inner(self) -> dict[tuple[Atom, ...], int]:
        return {}

    def op(self, op: OpNode, strategy: Strategy, derived: Derived) -> tuple[float, int]:
        """Seconds of one op on the busiest rank, and the bytes it sends while it runs."""
        rows = set(step_shares(op, strategy, self.mesh)) or {(ALL,) * strategy.steps}
        extents = self.extents(op, strategy)
        blocks = {x: self._block_seconds(op, strategy, extents, x) for x in {x for row in rows for x in row}}
        compute = {part: seconds for part, (seconds, _) in blocks.items()}
        within = max(nbytes for _, nbytes in blocks.values())
        if strategy.steps == 1:
            return max(compute.values()), within
        steps = self.steps(strategy)
        added, joined = self._combine_seconds(op, strategy, derived)
        added = added * (steps - 1) / steps
        moving = self.moving(op, strategy, derived)
        starting = self._starts(derived) * self.cluster.device.transfer_overhead * (steps - 1) / steps
        compute = {part: seconds + (added if part.share else 0.0) + starting for part, seconds in compute.items()}
        if not moving:
            return max(compute.values()) * steps + joined, within * steps
        shifts, sizes = tuple(shift for shift, _ in moving), [nbytes for _, nbytes in moving]
        if skips_blocks(op, strategy, self.mesh):
            link = self.link.link(tuple(sorted({axis for shift in shifts for axis, _ in shift})))
            hops, shares = self._hops(op, strategy, derived), step_shares(op, strategy, self.mesh)
            seconds, sent = busiest(shares, compute, hops, link, self.cluster.hidden.exchanges)
            return seconds + joined, min(sum(sizes) * (steps - 1), sent) + within * steps
        transfer = self.link.moves(shifts).seconds(sizes)

        def loop_seconds(row: tuple[Computed, ...]) -> float:
            usual = max(row[:-1], key=row[:-1].count)
            odd = [compute[part] for part in row[:-1] if part != usual]
            last, hidden = compute[row[-1]], self.cluster.hidden.exchanges
            return temporal_seconds(compute[usual], transfer, steps, odd, last, hidden)

        return max(map(loop_seconds, rows)) + joined, sum(sizes) * (steps - 1) + within * steps

    def _starts(self, derived: Derived) -> int:
        """Transfers that a rank starts between two steps of a loop: one for all operands, one for each result."""
        moving = [[port.motion == MOVE for port in side] for side in (derived.inputs, derived.outputs)]
        return any(moving[0]) + sum(moving[1])

    def _hops(self, op: OpNode, strategy: Strategy, derived: Derived) -> list[tuple[Hops, int]]:
        """Of all that moves in a loop: its transfers, and bytes of each."""
        found = hops_of(op, strategy, derived, self.mesh)
        sides = (
            (found.inputs, op.rule.inputs, derived.inputs, op.call.operands),
            (found.outputs, op.rule.outputs, derived.outputs, op.call.results),
        )
        return [
            (hops, self.numel(op, strategy, tensors[i], ports[i]) * value.dtype.itemsize)
            for by_port, tensors, ports, values in sides
            for i, hops in by_port.items()
            if (value := values[i]) is not None
        ]

    # What `passes/formula.py` replaces by numbers that remember how they were made:

    def extents(self, op: OpNode, strategy: Strategy) -> list[int]:
        """Per factor, the size of the largest block that is computed at once."""
        return [factor_atom(op.rule, strategy, f).largest for f in range(len(op.rule.factors))]

    def steps(self, strategy: Strategy) -> int:
        return strategy.steps

    def numel(self, op: OpNode, strategy: Strategy, tensor: TensorMap, port: Port) -> int:
        """Elements of the largest block of an operand or result."""
        return max_local_numel(port.layout)

    def _combine_seconds(self, op: OpNode, strategy: Strategy, derived: Derived) -> tuple[float, float]:
        """Seconds of adding a step's results to those before, or to those that arrive; and of joining all steps'."""
        added = joined = 0.0
        for tensor, port, result in zip(op.rule.outputs, derived.outputs, op.call.results, strict=True):
            if result is None:
                continue
            nbytes = self.numel(op, strategy, tensor, port) * result.dtype.itemsize
            if port.motion == SLICE:
                joined += copy_seconds(nbytes, self.cluster)
            else:
                added += combining_seconds(nbytes, self.cluster)
        return added, joined

    def _block_seconds(
        self, op: OpNode, strategy: Strategy, extents: Sequence[int], done: Computed = ALL
    ) -> tuple[float, int]:
        """Seconds of one step, and the bytes that go round inside of it. `done`: what is computed of the block."""
        if not isinstance(op.call.target, Region):
            maps = (op.rule.inputs, op.rule.outputs)
            ins, outs = ([block_shape(tensor, extents) for tensor in tensors] for tensors in maps)
            return op_seconds(op.call, ins, outs, self.cluster, done), 0
        seconds, moved = 0.0, 0
        for inner in op.call.target.body:
            ring = inner_ring(op, strategy, inner, self.mesh)
            if ring is None and inner.call.target not in WORK and not isinstance(inner.call.target, Region):
                seconds += op_seconds(inner.call, *inner.shapes(extents), self.cluster)
                continue
            if ring is None:
                made, cut = inner_op(op, inner), inner_strategy(strategy, inner, 0)
                own, within = self.op(made, cut, derive(made.rule, cut, self.mesh))
                seconds, moved = seconds + own, moved + within
                continue
            own, within = self.op(ring.op, ring.strategy, ring.derived)
            ports = zip(ring.given, ring.derived.inputs, inner.call.operands, strict=True)
            seconds += own + sum(self.relayout(layout, port.layout, x.dtype.itemsize) for layout, port, x in ports)
            moved += within
        return seconds, moved

    def moving(self, op: OpNode, strategy: Strategy, derived: Derived) -> list[tuple[Shift, int]]:
        """Per tensor that moves, how far, and the bytes that a rank sends of it between two steps."""
        operands = zip(op.rule.inputs, derived.inputs, op.call.operands, strict=True)
        results = zip(op.rule.outputs, derived.outputs, op.call.results, strict=True)
        return [
            (port.shift, self.numel(op, strategy, tensor, port) * value.dtype.itemsize)
            for tensor, port, value in (*operands, *results)
            if port.motion == MOVE and value is not None
        ]
