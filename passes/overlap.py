"""How much of a re-layout runs beside compute: what the schedule starts early hides behind the products meanwhile.

A parameter is fetched while the product before its own runs, a gradient is reduced while those after its own do
(`passes/schedule.py`). In a model of many layers these take about as long as its own product; each product hides one
transfer: the fetch of the parameter that it reads, or the reduction of the gradient that it makes. How long it leaves
the links idle depends on its strategy, which the layout of what it reads or makes tells.

When a phase begins nothing has been fetched, and when it ends the last gradients are not reduced: there one fetch, and
one reduction, is not hidden. Which ones is taken from a step in which all parameters are spread over all ranks
(`passes/ahead.py`), so that it does not depend on placements.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from stpart_compiler.cost_models.communication import LinkCost, exchange_seconds
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.spacetime import Port, Slices
from stpart_compiler.passes.ahead import Ahead
from stpart_compiler.passes.order import is_heavy, orders
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.quotient import Edge
from stpart_compiler.passes.space import Space, needs_of, ports_of


class Beside(NamedTuple):
    """Seconds of compute beside re-layouts, per layout of the source and per one of the target: the smaller of both.

    `share`: of all re-layouts of a use, those that have it.
    """

    sources: tuple[float, ...]
    targets: tuple[float, ...]
    share: float

    def largest(self, i: int, j: int) -> float:
        """Seconds, at most, by which a re-layout from layout i to layout j is shorter."""
        return min(self.sources[i], self.targets[j])


class Overlap:
    """Seconds of compute beside the re-layouts of a search space."""

    def __init__(self, space: Space) -> None:
        self.space = space.widest or space  # a part of a space has the prices of the whole
        self.graph = space.graph
        self.link = space.costs.cluster.link_for(space.mesh.axes, space.mesh)
        self.known: dict[object, dict[tuple[Layout, Slices | None], float]] = {}

    def seconds(self, edge: Edge, sources: Sequence[Port], targets: Sequence[Port]) -> Beside:
        """What hides a re-layout of this use, each time: 0 unless it is of a parameter or to a gradient."""
        fetches, results = _unhidden(self.graph, self.space.costs.link)
        if edge.consumer < 0:
            maker = self._maker(edge) if edge.port >= 0 else None
            share = self._share(maker, results)
            return Beside(self._each(maker, edge, sources), (math.inf,) * len(targets), share)
        reader = self._reader(edge) if self._rests(edge) else None
        return Beside((math.inf,) * len(sources), self._each(reader, edge, targets), self._share(reader, fetches))

    def _share(self, op: OpNode | None, unhidden: Counter[int]) -> float:
        """Of the ops like this one those whose transfer is hidden."""
        return 1.0 if op is None else 1.0 - unhidden[op.klass] / len(self.graph.classes[op.klass])

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
        kind, klass, result = edge.producer
        return _product_behind(self.graph, (self.space.choices[klass].op.name, result)) if kind == "op" else None

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


def _product_behind(graph: Annotated, key: ValueKey) -> OpNode | None:
    """The product that makes a value, at once or behind views."""
    op = graph.by_name.get(key[0])
    while op is not None and is_view(op.call.target) and op.operands:
        op = graph.by_name.get(op.operands[0][0])
    return op if op is not None and is_heavy(op) else None


@lru_cache(maxsize=8)
def _unhidden(graph: Annotated, cost: LinkCost) -> tuple[Counter[int], Counter[int]]:
    """Per class of products how many fetches of their parameters, and reductions of their gradients, nothing hides."""
    order = orders(graph)
    phases = [Ahead(graph, ops, cost) for ops in (order.forward, order.backward)]
    fetches = Counter(op.klass for op in (phase.late_fetch() for phase in phases) if op is not None)
    made: dict[str, int] = {}
    for key, _ in order.grads:
        maker, value = _product_behind(graph, key), graph.values[key]
        if maker is not None:
            made[maker.name] = value.numel * value.dtype.itemsize
    last = phases[1].late_result(made)
    return fetches, Counter([last.klass] if last is not None else [])
