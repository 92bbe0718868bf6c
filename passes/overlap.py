"""How much of a re-layout runs beside compute: what the schedule starts early hides behind the products meanwhile.

A parameter is fetched while the product before its own runs, a gradient is reduced while those after its own do
(`passes/schedule.py`). In a model of many layers these take about as long as its own product; each product hides one
transfer: the fetch of the parameter that it reads, or the reduction of the gradient that it makes. How long it leaves
the links idle depends on its strategy, which the layout of what it reads or makes tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stpart_compiler.cost_models.communication import exchange_seconds
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.spacetime import Port, Slices
from stpart_compiler.passes.order import is_heavy
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.quotient import Edge
from stpart_compiler.passes.space import Space, needs_of, ports_of

Beside = tuple[tuple[float, ...], tuple[float, ...]]
"""Seconds of compute beside re-layouts, per layout of the source and per one of the target: the smaller of both."""


class Overlap:
    """Seconds of compute beside the re-layouts of a search space."""

    def __init__(self, space: Space) -> None:
        self.space = space.widest or space  # a part of a space has the prices of the whole
        self.graph = space.graph
        self.link = space.costs.cluster.link_for(space.mesh.axes, space.mesh)
        self.known: dict[object, dict[tuple[Layout, Slices | None], float]] = {}

    def seconds(self, edge: Edge, sources: Sequence[Port], targets: Sequence[Port]) -> Beside:
        """What hides a re-layout of this use, each time: 0 unless it is of a parameter or to a gradient."""
        if edge.consumer < 0:
            maker = self._maker(edge) if edge.port >= 0 else None
            return self._each(maker, edge, sources), (math.inf,) * len(targets)
        reader = self._reader(edge) if self._rests(edge) else None
        return (math.inf,) * len(sources), self._each(reader, edge, targets)

    def _each(self, op: OpNode | None, edge: Edge, ports: Sequence[Port]) -> tuple[float, ...]:
        if op is None:
            return (0.0,) * len(ports)
        key = edge.producer, edge.consumer, edge.port
        if key not in self.known:
            self.known[key] = self._by_layout(op, edge)
        return tuple(self.known[key][port.layout, port.slices] for port in ports)

    def _by_layout(self, op: OpNode, edge: Edge) -> dict[tuple[Layout, Slices | None], float]:
        """Seconds of a product in which it leaves the links idle: of its strategies with that layout the least."""
        is_made = edge.consumer < 0
        root, ports, members = (
            ports_of(self.space, edge.producer, edge.value) if is_made else needs_of(self.space, edge)
        )
        choices = self.space.choices[op.klass]
        times = zip(choices.seconds, choices.moved, strict=True)
        idle = [max(0.0, seconds - exchange_seconds(moved, self.link)) for seconds, moved in times]
        by_choice = {i: idle[s] for s, ids in enumerate(choices.members) for i in ids}
        if root != choices.root:
            return {(port.layout, port.slices): min(idle) for port in ports}
        return {
            (port.layout, port.slices): min(by_choice[i] for i in ids) for port, ids in zip(ports, members, strict=True)
        }

    def _maker(self, edge: Edge) -> OpNode | None:
        """The product behind a gradient."""
        kind, klass, _ = edge.producer
        op = self.space.choices[klass].op if kind == "op" else None
        while op is not None and is_view(op.call.target) and op.operands:
            op = self.graph.by_name.get(op.operands[0][0])
        return op if op is not None and is_heavy(op) else None

    def _reader(self, edge: Edge) -> OpNode | None:
        """The product that reads a parameter, at once or through views."""
        op = self.space.choices[edge.consumer].op
        while is_view(op.call.target):
            readers = self.graph.readers.get(op.name, [])
            if len(readers) != 1:
                return None
            op = readers[0]
        return op if is_heavy(op) else None

    def _rests(self, edge: Edge) -> bool:
        """Whether the value exists before its phase starts: a parameter or a view of one."""
        kind, klass, _ = edge.producer
        if kind != "op":
            return kind == "param"
        op = self.space.choices[klass].op
        while is_view(op.call.target) and op.operands:
            key = op.operands[0]
            if key[0] not in self.graph.by_name:
                return self.graph.values[key].kind == "param"
            op = self.graph.by_name[key[0]]
        return False
