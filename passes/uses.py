"""Uses of values with the layouts on both sides, and what re-laying out costs between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.redistribute import redistribute
from stpart_compiler.ir.spacetime import Port, Slices
from stpart_compiler.passes.costs import Array, Costs
from stpart_compiler.passes.overlap import Beside, Overlap
from stpart_compiler.passes.quotient import Edge, Producer
from stpart_compiler.passes.room import Room, room
from stpart_compiler.passes.space import Space, needs_of, ports_of

HIDDEN_SHARE = 0.02
"""Part of a transfer that is paid for though compute hides it: of two plans equally fast, the one that sends less."""

FORBIDDEN = 10**12
"""Price in ns of a re-layout that a template rules out."""

Assignment = dict[int, int]
Pair = tuple[int, int]


@dataclass
class Use:
    """One edge with what is on both sides, and the re-layout price of every pair in ns.

    `apart[i, j]`: the slices by which a re-layout is made, of those that are not made at once. `from_ids`, `to_ids`:
    numbers of the layouts, equal for equal layouts, over all uses; `slice_ids[i, j]`: of an operand that comes in
    slices that of what is held instead. `when`: of a use by what may run again, the root that chooses whether it does.
    """

    edge: Edge
    from_root: int | None
    from_ports: list[Port]
    from_members: list[list[int]]
    to_root: int | None
    to_ports: list[Port]
    to_members: list[list[int]]
    apart: dict[Pair, Slices]
    price: list[list[int]]
    from_ids: list[int]
    to_ids: list[int]
    slice_ids: dict[Pair, int]
    when: int | None = None

    @property
    def from_layouts(self) -> list[Layout]:
        return [port.layout for port in self.from_ports]

    @property
    def to_layouts(self) -> list[Layout]:
        return [port.layout for port in self.to_ports]

    def pair(self, i: int, j: int) -> Pair:
        """Numbers of what is there and of what is made of it: for uses with the same pair one re-layout does."""
        return self.from_ids[i], self.slice_ids.get((i, j), self.to_ids[j])

    def wanted_ids(self) -> npt.NDArray[np.int64]:
        """[source, target] -> number of what is held for this use."""
        found = np.tile(np.array(self.to_ids, dtype=np.int64), (len(self.from_ids), 1))
        for at, number in self.slice_ids.items():
            found[at] = number
        return found

    def side(self, choice: Assignment, *, source: bool) -> int:
        """Index of the chosen layout on the producing or the consuming side."""
        root = self.from_root if source else self.to_root
        if root is None:
            return 0
        return (self.from_index if source else self.to_index)[choice[root]]

    @cached_property
    def from_index(self) -> dict[int, int]:
        """Choice of the producing root -> index of its layout."""
        return {i: index for index, ids in enumerate(self.from_members) for i in ids}

    @cached_property
    def to_index(self) -> dict[int, int]:
        return {i: index for index, ids in enumerate(self.to_members) for i in ids}

    def roots(self) -> set[int]:
        return {root for root in (self.from_root, self.to_root, self.when) if root is not None}


class Prices:
    """Numbers layouts and prices re-layouts between them, each table of them once: what compute does not hide.

    `uses`: all that were asked for. `by_slices`: those of gradients that may be reduced by slices. `numbers`: by
    layouts that are held together, bytes of an element, and the use, if no other one shares what is held.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.overlap = Overlap(space)
        self.numbers: dict[tuple[tuple[Layout | int, ...], int, Pair | None], int] = {}
        self.rooms: dict[tuple[int, int, bool], Room] = {}
        self.tables: dict[object, list[list[int]]] = {}
        self.uses: dict[tuple[Producer, int, int], Use] = {}
        self.by_slices: dict[Producer, Use] = {}

    def use(self, edge: Edge, weights_stay: bool) -> Use:
        from_root, sources, from_members = ports_of(self.space, edge.producer, edge.value)
        to_root, targets, to_members = needs_of(self.space, edge)
        itemsize = edge.value.dtype.itemsize
        from_ids, to_ids = ([self.number((port.layout,), itemsize) for port in side] for side in (sources, targets))
        hidden = self.overlap.seconds(edge, sources, targets)
        costs = self.costs(edge)
        apart = self._apart(edge, sources, targets)
        key = (tuple(from_ids), tuple(to_ids), itemsize, hidden, costs is self.space.costs, tuple(apart.items()))
        use = Use(edge, from_root, sources, from_members, to_root, targets, to_members, apart, [], from_ids, to_ids, {})
        if key not in self.tables:
            table = self.table(use, costs, hidden)
            self.tables[key] = self.with_slices(table, use, costs, hidden) if apart else table
        use.price = self.tables[key]
        if weights_stay and self._of_parameters(edge.producer):
            use.price = self._forbidden(use.from_layouts, use.to_layouts, use.price)
        if edge.consumer >= 0:
            use.slice_ids = {at: self._slice_number(use, *at) for at in apart}
        elif apart:
            self.by_slices[edge.producer] = use
        self.uses[edge.producer, edge.consumer, edge.port] = use
        return use

    def _apart(self, edge: Edge, sources: list[Port], targets: list[Port]) -> dict[Pair, Slices]:
        """The slices by which re-layouts are made: those of the loop that reads the value, or that makes it."""
        found: dict[Pair, Slices] = {}
        if edge.consumer >= 0:
            for j, port in enumerate(targets):
                if port.slices is not None:
                    found |= {(i, j): port.slices for i, other in enumerate(sources) if port.comes_apart(other.layout)}
        elif edge.producer in self.space.classes.gradients:
            for i, port in enumerate(sources):
                if port.slices is not None:
                    found |= {(i, j): port.slices for j, other in enumerate(targets) if port.comes_apart(other.layout)}
        return found

    def _slice_number(self, use: Use, i: int, j: int) -> int:
        """Of the slices of an operand that are held: the one in use, and the one arriving. No other use shares them."""
        edge = use.edge
        return self.number(self._slices(use, i, j), edge.value.dtype.itemsize, (edge.consumer, edge.port))

    def _slices(self, use: Use, i: int, j: int) -> tuple[Layout, ...]:
        slices = use.apart[i, j]
        part = slices.largest(use.to_layouts[j])
        return part, part, *(() if slices.is_outer else (slices.largest(use.from_layouts[i]),))  # made contiguous

    def first_slice(self, use: Use, i: int, j: int) -> int:
        """Number of what is held of an operand in slices until the loop begins: the first one."""
        (part, _, *sent), itemsize = self._slices(use, i, j), use.edge.value.dtype.itemsize
        return self.number((part, *sent), itemsize, (use.edge.consumer, use.edge.port))

    def costs(self, edge: Edge) -> Costs:
        """Those of the re-layouts of a use: of parameters and gradients many follow one another."""
        in_rows = edge.is_gradient or self._of_parameters(edge.producer)
        return self.space.costs.in_rows if in_rows else self.space.costs

    def table(self, use: Use, costs: Costs, hidden: Beside) -> list[list[int]]:
        """Prices of all pairs, with `hidden` seconds of compute beside them: one at least where something is sent."""
        itemsize = use.edge.value.dtype.itemsize
        transfer, local = np.moveaxis(costs.table(use.from_layouts, use.to_layouts, itemsize), -1, 0)
        mean = self.exposed(transfer, np.minimum.outer(hidden.sources, hidden.targets), hidden)
        found: list[list[int]] = np.maximum(np.rint((mean + local) * 1e9), transfer > 0).astype(np.int64).tolist()
        return found

    def exposed(self, transfer: Array, most: Array, beside: Beside) -> Array:
        """Seconds, on average, of what is not hidden of transfers. `most`: of compute beside each of them."""
        shown = transfer - beside.hidden * np.minimum(transfer, most)
        return beside.share * np.maximum(HIDDEN_SHARE * transfer, shown) + (1 - beside.share) * transfer

    def _ns(self, transfer: float, local: float, hidden: Beside, at: Pair) -> int:
        """Nanoseconds, on average, of what compute does not hide of a transfer, and of the copies that it needs."""
        mean = self.exposed(np.array(transfer), np.array(hidden.largest(*at)), hidden)
        return max(round((float(mean) + local) * 1e9), int(transfer > 0))

    def with_slices(self, table: list[list[int]], use: Use, costs: Costs, hidden: Beside) -> list[list[int]]:
        """The prices where some re-layouts are made of those of slices: the same bytes in more messages."""
        found = [list(row) for row in table]
        sources, targets, itemsize = use.from_layouts, use.to_layouts, use.edge.value.dtype.itemsize
        for (i, j), slices in use.apart.items():
            part = costs.relayout(slices.largest(sources[i]), slices.largest(targets[j]), itemsize)
            local = costs.priced(sources[i], targets[j], itemsize)[1]
            found[i][j] = self._ns(len(slices.atoms) * part, local, hidden, (i, j))
        return found

    def room(self, use: Use, i: int, j: int, *, stays: bool) -> Room:
        """Elements that a re-layout holds beside its source and its result. `stays`: the source is held anyway."""
        key = (use.from_ids[i], use.to_ids[j], stays)
        if key not in self.rooms:
            ends = use.from_ports[i].layout, use.to_ports[j].layout
            self.rooms[key] = room(*ends, self.space.mesh, self.space.costs.link, stays=stays)
        return self.rooms[key]

    def number(self, layouts: tuple[Layout | int, ...], itemsize: int, only: Pair | None = None) -> int:
        """Number of what is held of a value with this element size: in a layout, parts of it in several, or elements.

        `only`: the use, where no other one shares them.
        """
        return self.numbers.setdefault((layouts, itemsize, only), len(self.numbers))

    def _of_parameters(self, producer: Producer) -> bool:
        """Whether a value is a parameter, or made of nothing else. What follows a parameter may be an activation."""
        kind, index, _ = producer
        if kind != "op":
            return kind == "param"
        found = self.space.choices[index]
        return found.root < 0 and not found.op.data

    def _forbidden(self, sources: list[Layout], targets: list[Layout], price: list[list[int]]) -> list[list[int]]:
        """The prices where nothing may be sent."""
        return [
            [FORBIDDEN if _transfers(self.space, a, b) else p for b, p in zip(targets, row, strict=True)]
            for a, row in zip(sources, price, strict=True)
        ]


def _transfers(space: Space, source: Layout, target: Layout) -> bool:
    plan = redistribute(source, target, space.mesh, space.costs.link)
    return any(step.kind not in ("slice", "zero") for step in plan.steps)
