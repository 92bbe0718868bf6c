"""Bytes that a rank holds at each point of a step, as tables over the choices of the solver.

`passes/timeline.py` says how many values of a class are held at each point, and because of whom; here the layouts come
in. A value whose claims all depend on one root is a table over its choices. One whose claims depend on several roots is
held once in each layout that some claim asks for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from stpart_compiler.cost_models.memory import parameter_bytes
from stpart_compiler.ir.layout import Layout, max_local_numel
from stpart_compiler.ir.spacetime import MOVE
from stpart_compiler.passes.own_bytes import own_bytes
from stpart_compiler.passes.space import Space, again_root, ports_of
from stpart_compiler.passes.timeline import KEPT_ROOM, ROOM, Claim, ClaimKind, Counts, Held, Timeline
from stpart_compiler.passes.uses import Assignment, Prices, Use

Index = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.int64]
NOTHING = -1

ROOMS: dict[ClaimKind, tuple[int, bool]] = {
    kind: (moment, stays) for stays, kinds in ((False, ROOM), (True, KEPT_ROOM)) for moment, kind in enumerate(kinds)
}
"""Which part of a `Room` a claim is, and whether the value is there anyway."""


@dataclass(frozen=True)
class Side:
    """Index of a layout per choice of a root; a root None has one choice."""

    root: int | None
    index: Index

    def at(self, choice: Assignment) -> int:
        return int(self.index[0 if self.root is None else choice[self.root]])


NOBODY = Side(None, np.zeros(1, dtype=np.int64))


class Asked:
    """Numbers of what is held, as in a table [source, target], each found when it is first asked for."""

    def __init__(self, find: Callable[[int, int], int]) -> None:
        self._find = functools.cache(find)

    def __getitem__(self, at: tuple[Index, Index]) -> Index:
        """At pairs of indices."""
        return np.array([self._find(i, j) for i, j in np.broadcast(*at)], dtype=np.int64)

    def at(self, i: int, j: int) -> int:
        return self._find(i, j)


class Sizes:
    """Bytes per number of what is held, of those made so far."""

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self._known: list[int] = []

    def __getitem__(self, number: int) -> int:
        if number >= len(self._known):
            self._extend()
        return self._known[number]

    def all(self) -> Bytes:
        self._extend()
        return np.array(self._known, dtype=np.int64)

    def _extend(self) -> None:
        new = itertools.islice(self._prices.numbers, len(self._known), None)
        self._known += [sum(map(_numel, held)) * itemsize for held, itemsize, _ in new]


@dataclass(frozen=True)
class Demand:
    """A claim with its layouts: `table[i, j]` is the number of the layout in which it holds the value, or NOTHING.

    `when`: choices of further roots without which it holds nothing.
    """

    source: Side
    target: Side
    table: Index | Asked
    counts: Counts
    when: tuple[tuple[int, int], ...] = ()

    @cached_property
    def where(self) -> Index:
        """Points at which it holds anything."""
        return np.flatnonzero(self.counts)

    def at(self, choice: Assignment) -> int:
        if any(choice[root] != wanted for root, wanted in self.when):
            return NOTHING
        return self.number(self.source.at(choice), self.target.at(choice))

    def number(self, i: int, j: int) -> int:
        """What is held with such layouts on both sides."""
        return self.table.at(i, j) if isinstance(self.table, Asked) else int(self.table[i, j])

    @cached_property
    def when_sides(self) -> list[Side]:
        return [Side(root, np.arange(2)) for root, _ in self.when]

    @property
    def sides(self) -> list[Side]:
        return [self.source, self.target, *self.when_sides]

    def roots(self) -> set[int]:
        return {side.root for side in self.sides if side.root is not None}

    def along(self, root: int | None, size: int) -> Index:
        """Number of the layout per choice of the only root that it depends on."""
        rows = self.source.index if self.source.root is not None else np.zeros(size, dtype=np.int64)
        columns = self.target.index if self.target.root is not None else np.zeros(size, dtype=np.int64)
        first = np.zeros(1, dtype=np.int64)
        return np.asarray(self.table[rows, columns] if root is not None else self.table[first, first])


@dataclass(frozen=True)
class Mixed:
    """A value whose claims depend on several roots."""

    demands: list[Demand]

    def roots(self) -> set[int]:
        return set().union(*(demand.roots() for demand in self.demands))

    def single(self) -> list[Demand]:
        """Those that hold something whatever runs again, in a layout that one root chooses."""
        return [demand for demand in self.demands if len(demand.roots()) == 1 and not demand.when]

    def add(self, total: Bytes, choice: Assignment, sizes: Sizes, sign: int = 1) -> None:
        """Add what is held under a choice to the bytes at each point."""
        held: dict[int, list[Demand]] = {}
        for demand in self.demands:
            number = demand.at(choice)
            if number != NOTHING:
                held.setdefault(number, []).append(demand)
        for number, demands in held.items():
            if len(demands) == 1:
                where = demands[0].where
                total[where] += sign * sizes[number] * demands[0].counts[where]
            else:
                total += sign * sizes[number] * functools.reduce(np.maximum, [d.counts for d in demands])


@dataclass(frozen=True)
class Saved:
    """`nbytes` per choice of `root` of each of `counts[p]` values, unless they run again: choice 0 of `again`."""

    root: int
    again: int
    nbytes: Bytes
    counts: Counts


@dataclass
class Memory:
    """`tables[root][i, p]`: bytes at point p by choice i. `sizes`: bytes per number of a layout."""

    points: int
    constant: Bytes
    tables: dict[int, Bytes]
    mixed: list[Mixed]
    sizes: Sizes

    @staticmethod
    def of(space: Space, line: Timeline, roots: dict[int, int], prices: Prices, optimizer: str) -> Memory:
        return MemoryMaker(space, line, roots, prices, optimizer).run()

    def at_points(self, choice: Assignment) -> Bytes:
        """Bytes at each point."""
        total = self.constant.copy()
        for root, table in self.tables.items():
            total += table[choice[root]]
        for mixed in self.mixed:
            mixed.add(total, choice, self.sizes)
        return total

    def worst(self, choice: Assignment) -> int:
        """The point of the peak."""
        return int(self.at_points(choice).argmax())

    def by_kind(self, choice: Assignment) -> dict[str, int]:
        """Bytes at the peak: parameters with optimizer state, inputs with buffers, and others."""
        at = self.at_points(choice)
        inputs = int(self.constant.min())
        params = sum(int(table[choice[root]].min()) for root, table in self.tables.items() if root < 0)
        return {"parameters": params, "inputs": inputs, "others": int(at.max()) - params - inputs}

    def peaks(self, choice: Assignment, root: int) -> Bytes:
        """Largest bytes of any point per choice of one root, with all other roots as in `choice`."""
        involved = self._around.get(root, [])
        rest = self.at_points(choice) - self.tables[root][choice[root]]
        for mixed in involved:
            mixed.add(rest, choice, self.sizes, -1)
        total = rest + self.tables[root]
        trial = dict(choice)
        for mixed in involved:
            for first, members in self._kinds(mixed, root):
                trial[root] = first
                more = np.zeros(self.points, dtype=np.int64)
                mixed.add(more, trial, self.sizes)
                total[members] += more
        return np.asarray(total.max(axis=1))

    def changed(self, at_points: Bytes, choice: Assignment, root: int, other: int) -> Bytes:
        """Bytes at each point where one root chooses otherwise. `at_points`: those under `choice`."""
        trial = {**choice, root: other}
        total = at_points + self.tables[root][other] - self.tables[root][choice[root]]
        for mixed in self._around.get(root, []):
            mixed.add(total, choice, self.sizes, -1)
            mixed.add(total, trial, self.sizes)
        return np.asarray(total)

    @cached_property
    def _around(self) -> dict[int, list[Mixed]]:
        found: dict[int, list[Mixed]] = {}
        for mixed in self.mixed:
            for root in mixed.roots():
                found.setdefault(root, []).append(mixed)
        return found

    def _kinds(self, mixed: Mixed, root: int) -> list[tuple[int, Index]]:
        """Choices of a root that are alike for a value: the first of each kind, and all."""
        key = (id(mixed), root)
        if key not in self._known:
            first, kind = _kinds([side.index for d in mixed.demands for side in d.sides if side.root == root])
            self._known[key] = [(int(one), np.flatnonzero(kind == number)) for number, one in enumerate(first)]
        return self._known[key]

    @cached_property
    def _known(self) -> dict[tuple[int, int], list[tuple[int, Index]]]:
        return {}

    def lower(self) -> dict[int, Bytes]:
        """Tables beside `constant` whose sum no assignment holds less than: of each mixed value one claim."""
        found = dict(self.tables)
        for mixed in self.mixed:
            single = mixed.single()
            if not single:
                continue
            most = np.argmax(np.stack([demand.counts for demand in single]), axis=0)
            for number, demand in enumerate(single):
                root = next(iter(demand.roots()))
                counts = np.where(most == number, demand.counts, 0)
                if counts.any():
                    found[root] = found[root] + self._of(demand, root, counts)
        return found

    def lower_pairs(self) -> list[Saved]:
        """What is held beside `lower` of values that run again or are saved, as one chooses."""
        found = []
        for mixed in self.mixed:
            always = [demand.counts for demand in mixed.single()]
            anyway = functools.reduce(np.maximum, always, np.zeros(self.points, dtype=np.int64))
            saved = [demand for demand in mixed.demands if [wanted for _, wanted in demand.when] == [0]]
            longest = max(saved, key=lambda demand: int(demand.counts.sum()), default=None)
            if longest is None or longest.source.root is None or isinstance(longest.table, Asked):
                continue
            numbers = longest.table[longest.source.index]
            least = np.where(numbers == NOTHING, 0, self.sizes.all()[numbers]).min(axis=1)
            found.append(Saved(longest.source.root, longest.when[0][0], least, np.maximum(longest.counts - anyway, 0)))
        return found

    def _of(self, demand: Demand, root: int, counts: Counts) -> Bytes:
        numbers = demand.along(root, len(self.tables[root]))
        return np.where(numbers == NOTHING, 0, self.sizes.all()[numbers])[:, None] * counts[None, :]


def _numel(held: Layout | int) -> int:
    """Elements of the largest block of a layout; or just so many."""
    return held if isinstance(held, int) else max_local_numel(held)


def _kinds(columns: Sequence[Index]) -> tuple[Index, Index]:
    """Places at which all columns agree are of one kind: the first place of each kind, and the kind of every place."""
    known: dict[tuple[int, ...], int] = {}
    kind = [known.setdefault(row, len(known)) for row in zip(*(column.tolist() for column in columns), strict=True)]
    return np.unique(kind, return_index=True)[1], np.array(kind)


class MemoryMaker:
    """Builds the tables of a problem."""

    def __init__(self, space: Space, line: Timeline, roots: dict[int, int], prices: Prices, optimizer: str) -> None:
        self.space = space
        self.prices = prices
        self.optimizer = optimizer
        self.line = line
        self.points = len(self.line.points)
        self.tables = {root: np.zeros((count, self.points), dtype=np.int64) for root, count in roots.items()}
        self.sizes = Sizes(prices)
        self.constant = np.full(self.points, space.classes.fixed_bytes, dtype=np.int64)

    def run(self) -> Memory:
        found = [demands for held in self.line.held for demands in self._demands(held)]
        mixed = [Mixed(demands) for demands in found if not self._add(demands)]
        self.add_params()
        self._add_own()
        return Memory(self.points, self.constant, self.tables, mixed, self.sizes)

    def _demands(self, held: Held) -> Iterator[list[Demand]]:
        """Of the value that is being made, and of those that were: never of the same one, so both are held."""
        for is_made in (True, False):
            found = [self.demand(held, claim) for claim in held.claims if (claim.kind == "made") == is_made]
            yield [demand for demand in found if demand is not None]

    def demand(self, held: Held, claim: Claim) -> Demand | None:
        """None where nothing is held."""
        if claim.use is None:
            found = None if held.shares else self._made(held, claim)
        else:
            found = self._used(held, claim, self.prices.uses[held.producer, *claim.use])
        if found is None or not claim.when:
            return found
        return replace(found, when=tuple((again_root(self.space, klass), int(runs)) for klass, runs in claim.when))

    def _used(self, held: Held, claim: Claim, use: Use) -> Demand | None:
        source, target = self._side(use.from_root, use.from_members), self._side(use.to_root, use.to_members)
        if claim.kind in ROOMS:
            moves = any(map(any, use.price))
            return Demand(source, target, self._rooms(held, claim, use), claim.counts) if moves else None
        if claim.kind == "loop":
            return self._in_loop(held, claim, use)
        table = self._table(held, claim, use)
        if np.all(table == NOTHING):
            return None
        if np.all(table == table[:, :1]):
            return Demand(source, NOBODY, table[:, :1], claim.counts)
        if np.all(table == table[:1]):
            return Demand(NOBODY, target, table[:1], claim.counts)
        return Demand(source, target, table, claim.counts)

    def _made(self, held: Held, claim: Claim) -> Demand:
        """While the op runs that makes it: of a loop that makes it in slices all of these too, before they are joined.

        Of a gradient that is reduced by slices: the one just made, the one being reduced, and those that were.
        """
        itemsize = held.value.dtype.itemsize
        root, ports, members = ports_of(self.space, held.producer, held.value)
        wholes = [(port.layout,) * (2 if port.slices is not None else 1) for port in ports]
        rows = np.array([self.prices.number(layouts, itemsize) for layouts in wholes])[:, None]
        source = self._side(root, members)
        use = self.prices.by_slices.get(held.producer)
        if use is None:
            return Demand(source, NOBODY, rows, claim.counts)
        table = np.tile(rows, (1, len(use.to_ports)))
        for (i, j), slices in use.apart.items():
            part = slices.largest(use.from_layouts[i])
            table[i, j] = self.prices.number((part, part, use.to_layouts[j]), itemsize)
        return Demand(source, self._side(use.to_root, use.to_members), table, claim.counts)

    def _side(self, root: int | None, members: list[list[int]]) -> Side:
        if root is None:
            return Side(None, np.zeros(1, dtype=np.int64))
        index = np.zeros(len(self.tables[root]), dtype=np.int64)
        for layout, ids in enumerate(members):
            index[ids] = layout
        return Side(root, index)

    def _table(self, held: Held, claim: Claim, use: Use) -> Index:
        """The number of what is held, over the layouts of both sides."""
        rows, columns = np.array(use.from_ids)[:, None], use.wanted_ids()
        if claim.kind == "read":
            for at in use.apart:
                columns[at] = self.prices.first_slice(use, *at)
            return np.where(rows == columns, NOTHING, columns) if held.shares else columns
        settled = self._settled(use.from_layouts, held)[:, None]
        if claim.kind == "flight":  # an all-reduce sums in its result
            let_go = (rows == columns) | (settled == columns)
            return np.where(let_go | held.shares, NOTHING, self._sent(held, use))
        return np.where(settled == rows, rows, self._settled(use.to_layouts, held)[None, :])

    def _rooms(self, held: Held, claim: Claim, use: Use) -> Asked:
        """Numbers of what re-layouts hold beside their sources and results, at one of their moments."""
        moment, stays = ROOMS[claim.kind]

        def find(i: int, j: int) -> int:
            if not use.price[i][j] or (i, j) in use.apart:
                return NOTHING
            elements = self.prices.room(use, i, j, stays=stays)[moment]
            itemsize = held.value.dtype.itemsize  # what is held at several moments adds up: each has its own numbers
            return self.prices.number((elements,), itemsize, (-1, moment)) if elements else NOTHING

        return Asked(find)

    def _in_loop(self, held: Held, claim: Claim, use: Use) -> Demand | None:
        """Of an operand in slices the one in use beside the one arriving; of blocks that travel, where the first one
        rests, one more than of those that are let go of.
        """
        klass, port = use.edge.consumer, use.edge.port
        found, itemsize = self.space.choices[klass], held.value.dtype.itemsize
        more = self._more_if_lasting(klass, port) if held.shares else [0] * len(found.strategies)
        columns = self._side(use.to_root, use.to_members).index[[ids[0] for ids in found.members]].tolist()
        if not any(more) and not use.apart:
            return None

        def find(i: int, s: int) -> int:
            j = columns[s]
            if (i, j) in use.apart:
                part = max_local_numel(use.apart[i, j].largest(use.to_layouts[j]))
                return self.prices.number((part,), itemsize, (klass, port))
            return self.prices.number((more[s],), 1) if more[s] and use.from_ids[i] == use.to_ids[j] else NOTHING

        source, target = self._side(use.from_root, use.from_members), self._side(found.root, found.members)
        return Demand(source, target, Asked(find), claim.counts)

    def _more_if_lasting(self, klass: int, port: int) -> list[int]:
        """Per strategy, bytes that an op needs more if an operand lives longer than the op."""
        found, lasting = self.space.choices[klass], self.line.lasting
        chosen = [(found.op, *pair) for pair in zip(found.strategies, found.derived, strict=True)]
        if (klass, port) in lasting:
            return [0] * len(chosen)
        more = lasting | {(klass, port)}
        return [
            own_bytes(self.space.costs, *one, more) - own_bytes(self.space.costs, *one, lasting)
            if one[2].inputs[port].motion == MOVE
            else 0
            for one in chosen
        ]

    def _settled(self, layouts: list[Layout], held: Held) -> Index:
        """Numbers of the layouts once their sums are reduced."""
        itemsize = held.value.dtype.itemsize
        return np.array([self.prices.number((layout.without_partial(),), itemsize) for layout in layouts])

    def _sent(self, held: Held, use: Use) -> Index:
        """What is held of a value as it was made, until a use has it: of a gradient in slices the last one."""
        table = np.tile(np.array(use.from_ids)[:, None], (1, len(use.to_ids)))
        for (i, j), slices in use.apart.items() if use.edge.consumer < 0 else ():
            table[i, j] = self.prices.number((slices.largest(use.from_layouts[i]),), held.value.dtype.itemsize)
        return table

    def _add(self, demands: list[Demand]) -> bool:
        """Add a value to the tables, if one root decides of it alone."""
        roots = set().union(*(demand.roots() for demand in demands)) if demands else set()
        if len(roots) > 1 or any(demand.when for demand in demands):
            return False
        root = next(iter(roots), None)
        size = 1 if root is None else len(self.tables[root])
        numbers = [demand.along(root, size) for demand in demands]
        if not numbers:
            return True
        first, kind = _kinds(numbers)
        rows = np.stack([self._held(demands, column) for column in np.stack(numbers)[:, first].T])
        if root is None:
            self.constant += rows[0]
        else:
            self.tables[root] += rows[kind]
        return True

    def _held(self, demands: list[Demand], numbers: Index) -> Bytes:
        total = np.zeros(self.points, dtype=np.int64)
        for number in set(numbers.tolist()) - {NOTHING}:
            counts = [d.counts for d, own in zip(demands, numbers, strict=True) if own == number]
            total += self.sizes[number] * np.max(np.stack(counts), axis=0)
        return total

    def add_params(self) -> None:
        """Parameters and optimizer state; gradients are values like others."""
        for index, params in enumerate(self.space.params):
            trained = self.space.classes.params[index].trained
            itemsize = params.value.dtype.itemsize
            for i, layout in enumerate(params.layouts):
                numel = max_local_numel(layout)
                kept = parameter_bytes(numel, itemsize, self.optimizer, True) - numel * itemsize
                frozen = parameter_bytes(numel, itemsize, self.optimizer, False)
                self.tables[-1 - index][i] += kept * trained + frozen * (len(params.names) - trained)

    def _add_own(self) -> None:
        """What an op needs while it runs, beside its operands and results."""
        places: dict[int, list[int]] = {}
        for p, point in enumerate(self.line.points):
            places.setdefault(point.klass, []).append(p)
        for klass, choices in enumerate(self.space.choices):
            if klass not in places:
                continue
            own = np.zeros(len(self.tables[choices.root]), dtype=np.int64)
            for s, members in enumerate(choices.members):
                chosen = choices.op, choices.strategies[s], choices.derived[s]
                own[members] = own_bytes(self.space.costs, *chosen, self.line.lasting)
            if own.any():
                self.tables[choices.root][:, places[klass]] += own[:, None]
