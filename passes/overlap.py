"""How much of a re-layout runs beside compute: what the schedule starts early hides behind the products meanwhile.

A parameter, or what backward reads of forward, is fetched while the product before its own runs, a gradient is reduced
while those after its own do (`passes/schedule.py`). In a model of many layers these take about as long as its own
product; each product hides one transfer: the fetch of what rests and it reads, or the reduction of the gradient that it
makes. How long it leaves the links idle depends on its strategy, which the layout of what it reads or makes tells.

What is made is re-laid out at once, beside the products that run before it is read: so the gradient of an activation
beside that of a weight, as far as it stays inside of hosts. Their order does not depend on placements; their work is
shared by all ranks.

Small tensors have collectives of their own, which take time but next to nothing else: each fetch and reduction of one
has at least an equal part of the phase to hide behind.

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

from stpart_compiler.cost_models.cluster import groups_along
from stpart_compiler.cost_models.communication import LinkCost, exchange_seconds
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.program import SMALL
from stpart_compiler.ir.spacetime import Port, Slices
from stpart_compiler.passes.ahead import Ahead, parameters
from stpart_compiler.passes.order import is_heavy, orders
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.quotient import Edge
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.space import Choices, Space, needs_of, ports_of


class Beside(NamedTuple):
    """Seconds of compute beside re-layouts, per layout of the source and per one of the target: the smaller of both.

    `share`: of all re-layouts of a use, those that have it. `hidden`: the part of the time of both that costs nothing.
    """

    sources: tuple[float, ...]
    targets: tuple[float, ...]
    share: float
    hidden: float

    def largest(self, i: int, j: int) -> float:
        """Seconds, at most, by which a re-layout from layout i to layout j is shorter."""
        return min(self.sources[i], self.targets[j])


class Overlap:
    """Seconds of compute beside the re-layouts of a search space."""

    def __init__(self, space: Space) -> None:
        self.space = space.widest or space  # a part of a space has the prices of the whole
        self.graph = space.graph
        self.link = space.costs.cluster.link_for(space.mesh.axes, space.mesh)
        self.hidden = space.costs.cluster.hidden.collectives
        self.known: dict[object, dict[tuple[Layout, Slices | None], float]] = {}
        self.idle: dict[int, list[float]] = {}
        cluster, mesh = space.costs.cluster, space.mesh
        self.inside = {axis for axis in mesh.axes if not cluster.crossed(groups_along((axis,), mesh))}

    def seconds(self, edge: Edge, sources: Sequence[Port], targets: Sequence[Port]) -> Beside:
        """What hides a re-layout of this use, each time."""
        found = Beside(*self._beside(edge, sources, targets), self.hidden)
        if edge.value.nbytes > SMALL or not (edge.is_gradient or self._of_parameters(edge)):
            return found
        spare = self._spare(edge)
        from_sources, from_targets = ([max(spare, own) for own in side] for side in (found.sources, found.targets))
        return Beside(tuple(from_sources), tuple(from_targets), found.share, self.space.costs.cluster.hidden_small)

    def _spare(self, edge: Edge) -> float:
        """Seconds of the products of the phase for each small tensor that is fetched or reduced in it."""
        forward, backward = _spare_seconds(self.graph, self.space.costs.link)
        is_late = edge.consumer < 0 or self.space.choices[edge.consumer].op.name in self.graph.backward
        return backward if is_late else forward

    def _beside(
        self, edge: Edge, sources: Sequence[Port], targets: Sequence[Port]
    ) -> tuple[tuple[float, ...], tuple[float, ...], float]:
        fetches, results = _unhidden(self.graph, self.space.costs.link)
        if edge.consumer < 0:
            maker = self._maker(edge) if edge.is_gradient else None
            share = self._share(maker, results)
            return self._each(maker, edge, sources), (math.inf,) * len(targets), share
        if not self._rests(edge):
            return self._beside_later(edge, sources), (math.inf,) * len(targets), 1.0
        reader = self._reader(edge)
        return (math.inf,) * len(sources), self._each(reader, edge, targets), self._share(reader, fetches)

    def _beside_later(self, edge: Edge, sources: Sequence[Port]) -> tuple[float, ...]:
        """Per layout of a value that is made, what runs before it is read: of transfers that stay inside of hosts.

        Links between hosts are busy by then, with the reductions of gradients and the loops of those products.
        """
        seconds = self._between(edge)
        return tuple(seconds if self._stays_inside(port.layout) else 0.0 for port in sources)

    def _stays_inside(self, layout: Layout) -> bool:
        """Whether ranks that differ along the digits of a layout, or of its pending sum alone, are in one host."""
        digits = layout.partial or layout.digits
        return {axis for digit in digits for axis, _ in digit.coeffs} <= self.inside

    def _between(self, edge: Edge) -> float:
        """Seconds of the products that run between the op that makes the value and the one that reads it."""
        kind, klass, _ = edge.producer
        worked = _worked(self.graph, self.space.costs.link)
        for reader in self.graph.classes[edge.consumer]:
            maker = self.graph.by_name.get(reader.operands[edge.port][0])
            if kind == "op" and maker is not None and maker.klass == klass:
                return _apart(worked.get(maker.name), worked.get(reader.name))
        return 0.0

    def _share(self, op: OpNode | None, unhidden: Counter[int]) -> float:
        """Of the ops like this one those whose transfer is hidden."""
        return 1.0 if op is None else 1.0 - unhidden[op.klass] / len(self.graph.classes[op.klass])

    def _each(self, op: OpNode | None, edge: Edge, ports: Sequence[Port]) -> tuple[float, ...]:
        if op is None:
            return (0.0,) * len(ports)
        key = edge.producer, edge.consumer, edge.port
        if key not in self.known:
            self.known[key] = self._by_layout(op, edge)
        part = self._part(op, edge)
        return tuple(part * self.known[key][port.layout, port.slices] for port in ports)

    def _part(self, op: OpNode, edge: Edge) -> float:
        """Of what an op hides the part that is for this use: less than all of a region's parameters and gradients."""
        total = _bytes_beside(self.graph).get(op.klass)
        if total is None or not (self._of_parameters(edge) or edge.consumer < 0):
            return 1.0
        return edge.value.nbytes / total

    def _of_parameters(self, edge: Edge) -> bool:
        """Whether the value is a parameter or a view of one."""
        kind, klass, _ = edge.producer
        return kind == "param" or (kind == "op" and self.space.choices[klass].op.name in parameters(self.graph))

    def _by_layout(self, op: OpNode, edge: Edge) -> dict[tuple[Layout, Slices | None], float]:
        """Seconds of a product in which it leaves the links idle: of its strategies with that layout the least."""
        is_made = edge.consumer < 0
        root, ports, members = (
            ports_of(self.space, edge.producer, edge.value) if is_made else needs_of(self.space, edge)
        )
        choices = self.space.choices[op.klass]
        idle = self._idle(op.klass)
        by_choice = {i: idle[s] for s, ids in enumerate(choices.members) for i in ids}
        if root != choices.root:
            return {(port.layout, port.slices): min(idle) for port in ports}
        return {
            (port.layout, port.slices): min(by_choice[i] for i in ids) for port, ids in zip(ports, members, strict=True)
        }

    def _idle(self, klass: int) -> list[float]:
        """Per strategy of a class, its seconds in which its own transfers leave the links idle."""
        if klass not in self.idle:
            choices = self.space.choices[klass]
            busy = [self._busy(choices, s) if moved else 0.0 for s, moved in enumerate(choices.moved)]
            self.idle[klass] = [max(0.0, own - sent) for own, sent in zip(choices.seconds, busy, strict=True)]
        return self.idle[klass]

    def _busy(self, choices: Choices, s: int) -> float:
        """Seconds of the transfers of a loop over the links that it takes; of rings inside of it, over any."""
        costs, times = self.space.costs, choices.strategies[s].steps - 1
        moving = costs.moving(choices.op, choices.strategies[s], choices.derived[s])
        if not moving:
            return exchange_seconds(choices.moved[s], self.link)
        sizes = [nbytes for _, nbytes in moving]
        own = costs.link.moves(tuple(shift for shift, _ in moving)).seconds(sizes)
        return times * own + exchange_seconds(choices.moved[s] - times * sum(sizes), self.link)

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
        """Whether the value exists before its phase starts: a parameter, a view of one, or what forward has made."""
        kind, klass, _ = edge.producer
        if kind != "op":
            return kind == "param"
        op, backward = self.space.choices[klass].op, self.graph.backward
        if op.name not in backward and self.space.choices[edge.consumer].op.name in backward:
            return True
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
def _bytes_beside(graph: Annotated) -> dict[int, int]:
    """Per class of regions, bytes of the parameters that one reads and of the gradients that it makes."""
    made, own = _gradients(graph), parameters(graph)
    regions = [members[0] for members in graph.classes if isinstance(members[0].call.target, Region)]
    return {
        op.klass: made[op.name] + sum(graph.values[key].nbytes for key in dict.fromkeys(op.operands) if key[0] in own)
        for op in regions
    }


def _gradients(graph: Annotated) -> Counter[str]:
    """Bytes of the gradients that are made, by the product that makes them."""
    made: Counter[str] = Counter()
    for key, _ in orders(graph).grads:
        maker = _product_behind(graph, key)
        if maker is not None:
            made[maker.name] += graph.values[key].nbytes
    return made


@lru_cache(maxsize=8)
def _phases(graph: Annotated, cost: LinkCost) -> tuple[Ahead, Ahead]:
    """The products of forward and of backward."""
    order = orders(graph)
    return Ahead(graph, order.forward, cost), Ahead(graph, order.backward, cost)


@lru_cache(maxsize=8)
def _unhidden(graph: Annotated, cost: LinkCost) -> tuple[Counter[int], Counter[int]]:
    """Per class of products how many fetches of their parameters, and reductions of their gradients, nothing hides."""
    phases = _phases(graph, cost)
    fetches = Counter(op.klass for op in (phase.late_fetch() for phase in phases) if op is not None)
    last = phases[1].late_result(_gradients(graph))
    return fetches, Counter([last.klass] if last is not None else [])


@lru_cache(maxsize=8)
def _spare_seconds(graph: Annotated, cost: LinkCost) -> tuple[float, float]:
    """Seconds of products for each fetch of a small parameter, in backward for each reduction of a gradient too."""
    small = sum(value.kind == "param" and value.nbytes <= SMALL for value in graph.values.values())
    forward, backward = (sum(phase.seconds().values()) for phase in _phases(graph, cost))
    return forward / max(1, small), backward / max(1, 2 * small)


class _At(NamedTuple):
    """Where an op is: its phase, and the seconds of products before it and up to its end."""

    phase: int
    before: float
    after: float


def _apart(maker: _At | None, reader: _At | None) -> float:
    """Seconds of products after an op and before another one; 0 where one of them has no place of its own."""
    if maker is None or reader is None or maker.phase != reader.phase:
        return 0.0
    return max(0.0, reader.before - maker.after)


@lru_cache(maxsize=8)
def _worked(graph: Annotated, cost: LinkCost) -> dict[str, _At]:
    """Per op of the step where it is."""
    order = orders(graph)
    found: dict[str, _At] = {}
    for number, (ops, phase) in enumerate(zip((order.forward, order.backward), _phases(graph, cost), strict=True)):
        seconds, before = phase.seconds(), 0.0
        for op in ops:
            after = before + seconds.get(op.name, 0.0)
            found[op.name] = _At(number, before, after)
            before = after
    return found
