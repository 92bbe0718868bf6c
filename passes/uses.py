"""Uses of values with the layouts on both sides, and what re-laying out costs between them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.redistribute import redistribute
from stpart_compiler.passes.overlap import Overlap
from stpart_compiler.passes.quotient import Edge, Producer
from stpart_compiler.passes.space import Space, layouts_of, needs_of

HIDDEN_SHARE = 0.02
"""Part of a transfer that is paid for though compute hides it: of two plans equally fast, the one that sends less."""

FORBIDDEN = 10**12
"""Price in ns of a re-layout that a template rules out."""

Assignment = dict[int, int]


@dataclass
class Use:
    """One edge with the layouts on both sides, and the re-layout price of every pair in ns."""

    edge: Edge
    from_root: int | None
    from_layouts: list[Layout]
    from_members: list[list[int]]
    to_root: int | None
    to_layouts: list[Layout]
    to_members: list[list[int]]
    price: list[list[int]]
    from_ids: list[int]  # numbers of the layouts: equal for equal layouts, over all uses
    to_ids: list[int]

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
        return {root for root in (self.from_root, self.to_root) if root is not None}


class Prices:
    """Numbers layouts and prices re-layouts between them, each table of them once: what compute does not hide.

    `uses`: all that were asked for.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.overlap = Overlap(space)
        self.numbers: dict[tuple[Layout, int], int] = {}
        self.tables: dict[object, list[list[int]]] = {}
        self.uses: dict[tuple[Producer, int, int], Use] = {}

    def use(self, edge: Edge, weights_stay: bool) -> Use:
        from_root, sources, from_members = layouts_of(self.space, edge.producer, edge.value)
        to_root, targets, to_members = needs_of(self.space, edge)
        itemsize = edge.value.dtype.itemsize
        from_ids, to_ids = self.ids(sources, itemsize), self.ids(targets, itemsize)
        hidden = self.overlap.seconds(edge)
        key = (tuple(from_ids), tuple(to_ids), itemsize, hidden)
        if key not in self.tables:
            self.tables[key] = self.table(sources, targets, itemsize, hidden)
        price = self.tables[key]
        if weights_stay and self._of_parameters(edge.producer):
            price = self._forbidden(sources, targets, price)
        use = Use(edge, from_root, sources, from_members, to_root, targets, to_members, price, from_ids, to_ids)
        self.uses[edge.producer, edge.consumer, edge.port] = use
        return use

    def table(self, sources: list[Layout], targets: list[Layout], itemsize: int, hidden: float) -> list[list[int]]:
        """Prices of all pairs, with `hidden` seconds of compute beside them."""
        return [[self._exposed(a, b, itemsize, hidden) for b in targets] for a in sources]

    def _exposed(self, source: Layout, target: Layout, itemsize: int, hidden: float) -> int:
        """Nanoseconds of a re-layout that compute does not hide."""
        transfer, local = self.space.costs.priced(source, target, itemsize)
        exposed = transfer - self.space.costs.cluster.hidden.collectives * min(transfer, hidden)
        return round((max(HIDDEN_SHARE * transfer, exposed) + local) * 1e9)

    def ids(self, layouts: list[Layout], itemsize: int) -> list[int]:
        """Numbers of layouts of values with this element size."""
        return [self.numbers.setdefault((layout, itemsize), len(self.numbers)) for layout in layouts]

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
