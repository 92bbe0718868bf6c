"""Raise the bound of a problem whose re-layouts have floors: what the bound rests on is priced exactly, part by part.

On three mesh axes hundreds of thousands of re-layouts can be asked for, and an exact price takes a millisecond. Floors
(`passes/floors.py`) are worked out for all at once, but lie far below the prices. Message passing says how much dearer
than the bound an assignment is at least that needs a re-layout: those for which that is next to nothing hold the bound
down. They are priced exactly, messages are passed again, and so on: cuts to a linear program, found in its dual. At
every moment the bound is one, and the assignment that the messages point to gets more nearly the best.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stpart_compiler.passes.costs import Array
from stpart_compiler.passes.floors import FloorPrices, Index
from stpart_compiler.passes.messages import Joint, Model, Shared, State
from stpart_compiler.passes.problem import Problem, evaluate
from stpart_compiler.passes.uses import Assignment, Use

Mask = npt.NDArray[np.bool_]

FIRST_SWEEPS, SWEEPS = 12, 3
"""Sweeps before re-layouts are priced, and between two times of that."""

AT_ONCE = 2000
"""Re-layouts that are priced at once."""

REACH = 1e-3
"""Part of the bound by which what is priced at first may be over it."""

STALL_ROUNDS, STALL_GAIN = 5, 1e-3
"""A bound that so many rounds have raised by no more than such a part of it is left as it is."""


@dataclass(frozen=True)
class Tight:
    """`lower`: seconds that no assignment beats. `over[root][i]`: ns by which every assignment with choice i is over
    that. `choice`: the best assignment met, `seconds` its exact cost, whatever memory it takes."""

    lower: float
    over: dict[int, Array]
    choice: Assignment
    seconds: float


@dataclass(frozen=True)
class Tighten:
    """problem with floors -> its bound, and an assignment. Prices of the problem become exact where that matters.

    `known`: seconds of a plan; the search ends when nothing can beat it, or the assignment found, by more than the
    relative `gap`, or when the bound no longer rises. `is_over`: asked after every round whether to stop there;
    `progress`: called with the bound in seconds.
    """

    gap: float
    known: float = float("inf")
    is_over: Callable[[], bool] = lambda: False

    def apply(self, problem: Problem, progress: Callable[[float], None] = lambda lower: None) -> Tight:
        work = _Work(problem)
        choice = work.begun()
        seconds = work.exactly(choice)
        reach = REACH * work.lower() * 1e9
        bounds: list[float] = []
        while True:
            lower, nearest = work.lower(), min(self.known, seconds)
            bounds.append(lower)
            progress(lower)
            if lower >= (1 - self.gap) * nearest or stalls(bounds) or self.is_over():
                break
            found = work.cheap(reach)
            if not found and reach > (nearest - lower) * 1e9:
                break  # all that a better assignment may need is priced
            work.price(found)
            if len(found) < AT_ONCE // 2:
                reach *= 2
            other = work.swept()
            if (cost := work.exactly(other)) < seconds:
                choice, seconds = other, cost
        return Tight(work.lower(), work.state.extra(), choice, seconds)


def stalls(bounds: Sequence[float]) -> bool:
    """Whether the last rounds have hardly raised the bound. `bounds`: of all rounds so far, never falling."""
    return len(bounds) > STALL_ROUNDS and bounds[-1] - bounds[-1 - STALL_ROUNDS] <= STALL_GAIN * bounds[-1]


@dataclass
class _Side:
    """A use between the two roots of a joint. `rows`, `columns`: layouts of the roots' choices. `ids`: numbers of the
    re-layouts, [source, target]; `open`: those whose price is a floor."""

    use: Use
    rows: Index
    columns: Index
    ids: Index
    open: Mask

    def hits(self, wanted: Index) -> tuple[Index, Index]:
        """Where the wanted re-layouts still have floors; from now on they have not."""
        at = np.minimum(np.searchsorted(wanted, self.ids), len(wanted) - 1)
        found = np.nonzero(self.open & (wanted[at] == self.ids))
        self.open[found] = False
        return found[0], found[1]


class _Work:
    """The model of a problem, and which of its re-layouts have which price."""

    def __init__(self, problem: Problem) -> None:
        assert isinstance(problem.prices, FloorPrices)
        self.problem = problem
        self.prices = problem.prices
        self.model = Model.of(problem)
        self.state = self.model.state()
        self.joints = [
            (group, number, joint, [_side(joint, k) for k in range(len(joint.uses))])
            for group in self.model.shared
            for number, joint in enumerate(group.joints)
        ]
        self.nothing = sum(side.use.edge.count for *_, sides in self.joints for side in sides)

    def lower(self) -> float:
        """Seconds that no assignment beats; a floor of one nanosecond stands for none."""
        return (self.state.bound() - self.nothing) / 1e9

    def begun(self) -> Assignment:
        for sweep in range(FIRST_SWEEPS):
            decoded = self.state.sweep()
            self.model.split_anew(self.state, decoded, 1 / (2 + sweep / 4))
        return decoded

    def swept(self) -> Assignment:
        for _ in range(SWEEPS):
            decoded = self.state.sweep()
        return decoded

    def exactly(self, choice: Assignment) -> float:
        """Seconds of an assignment, its re-layouts priced exactly."""
        wanted: set[int] = set()
        for *_, sides in self.joints:
            for side in sides:
                i, j = side.use.side(choice, source=True), side.use.side(choice, source=False)
                if side.open[i, j]:
                    wanted.add(int(side.ids[i, j]))
        self.price(wanted)
        return evaluate(self.problem, choice)

    def cheap(self, reach: float) -> list[int]:
        """Numbers of re-layouts with a floor that some assignment may need that is over the bound by no more than
        `reach` ns; those nearest to it, of many."""
        extra = self.state.extra()
        numbers, overs = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for _, _, joint, sides in self.joints:
            rows, columns, over = _cells(self.state, joint, extra, reach)
            for side in sides:
                at = side.rows[rows], side.columns[columns]
                keep = side.open[at]
                numbers.append(side.ids[at][keep])
                overs.append(over[keep])
        flat, over = np.concatenate(numbers), np.concatenate(overs)
        order = np.lexsort((flat, over))
        return list(dict.fromkeys(flat[order].tolist()))[:AT_ONCE]

    def price(self, numbers: Collection[int]) -> None:
        """Price re-layouts exactly wherever they may be needed."""
        if not numbers:
            return
        wanted = np.array(sorted(numbers), dtype=np.int64)
        for group, number, joint, sides in self.joints:
            hits = [side.hits(wanted) for side in sides]
            if len(sides) == 1:
                self._raise_alone(group, number, joint, sides[0], hits[0])
                continue
            found: dict[int, list[tuple[int, int, int]]] = {}
            for k, (side, (rows, columns)) in enumerate(zip(sides, hits, strict=True)):
                for i, j in zip(rows.tolist(), columns.tolist(), strict=True):
                    found.setdefault(int(side.ids[i, j]), []).append((k, i, j))
            for pair, where in found.items():
                self._raise(group, number, joint, sides, pair, where)

    def _raise_alone(self, group: Shared, number: int, joint: Joint, side: _Side, hits: tuple[Index, Index]) -> None:
        """Of the only use of a joint."""
        i, j = hits
        if not len(i):
            return
        new = np.array(self.prices.exact(side.use, i.tolist(), j.tolist()), dtype=np.float64) * side.use.edge.count
        weights = np.array(group.parts_of(side.ids[i, j].tolist(), number))
        table = np.full(side.ids.shape, -1.0)
        table[i, j] = new
        rows = np.flatnonzero(np.isin(side.rows, i))
        columns = np.flatnonzero(np.isin(side.columns, j))
        at, block = np.ix_(side.rows[rows], side.columns[columns]), np.ix_(rows, columns)
        fresh, old = table[at], joint.prices[0][block]
        joint.prices[0][block] = np.where(fresh >= 0, fresh, old)
        table[i, j] = weights
        self._add(joint, rows, columns, np.where(fresh >= 0, (fresh - old) * table[at], 0.0))

    def _raise(
        self,
        group: Shared,
        number: int,
        joint: Joint,
        sides: list[_Side],
        pair: int,
        where: list[tuple[int, int, int]],
    ) -> None:
        """Of one re-layout that several uses of a joint may need, which pay for it once."""
        changes = []
        for k, i, j in where:
            (price,) = self.prices.exact(sides[k].use, [i], [j])
            rows, columns = np.flatnonzero(sides[k].rows == i), np.flatnonzero(sides[k].columns == j)
            changes.append((k, rows, columns, float(price) * sides[k].use.edge.count))
        all_rows = np.unique(np.concatenate([rows for _, rows, _, _ in changes]))
        all_columns = np.unique(np.concatenate([columns for _, _, columns, _ in changes]))
        before = np.zeros((len(all_rows), len(all_columns)))
        after = np.zeros_like(before)
        for k, rows, columns, new in changes:
            at = np.ix_(np.searchsorted(all_rows, rows), np.searchsorted(all_columns, columns))
            before[at] = np.maximum(before[at], joint.prices[k][np.ix_(rows, columns)])
            after[at] = np.maximum(after[at], new)
            joint.prices[k][np.ix_(rows, columns)] = new
        self._add(joint, all_rows, all_columns, group.parts_of([pair], number)[0] * (after - before))

    def _add(self, joint: Joint, rows: Index, columns: Index, delta: Array) -> None:
        """Raise costs of the choices of a joint's two roots."""
        source, target = joint.source, joint.target
        if source is None:
            if target is not None:
                self.state.unary[target][columns] += delta[0]
        elif target is None:
            self.state.unary[source][rows] += delta[:, 0]
        elif source == target:
            both = np.intersect1d(rows, columns)
            self.state.unary[source][both] += delta[np.searchsorted(rows, both), np.searchsorted(columns, both)]
        elif source < target:
            self.state.pairwise[source, target][np.ix_(rows, columns)] += delta
        else:
            self.state.pairwise[target, source][np.ix_(columns, rows)] += delta.T


def _cells(state: State, joint: Joint, extra: dict[int, Array], reach: float) -> tuple[Index, Index, Array]:
    """Choices of both sides of a joint, one index a pair, and how far an assignment with them is over the bound."""
    source, target = joint.source, joint.target
    if source is None or target is None or source == target:
        root = source if source is not None else target
        if root is None:
            return np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64), np.zeros(1)
        near = np.flatnonzero(extra[root] <= reach)
        none = np.zeros_like(near)
        return (near if source is not None else none), (near if target is not None else none), extra[root][near]
    edge = (min(source, target), max(source, target))
    costs = state.pairwise[edge]
    least = costs.min()
    first, second = np.flatnonzero(extra[edge[0]] <= reach), np.flatnonzero(extra[edge[1]] <= reach)
    over = costs[np.ix_(first, second)] - least
    over = over + (extra[edge[0]][first] - (costs[first].min(axis=1) - least))[:, None]
    over = over + (extra[edge[1]][second] - (costs[:, second].min(axis=0) - least))[None, :]
    x, y = np.nonzero(over <= reach)
    rows, columns = first[x], second[y]
    return (rows, columns, over[x, y]) if edge == (source, target) else (columns, rows, over[x, y])


def _side(joint: Joint, k: int) -> _Side:
    use = joint.uses[k]
    ids = np.array(use.from_ids, dtype=np.int64)[:, None] * 2**20 + use.wanted_ids()
    other = np.not_equal.outer(np.array(use.from_ids), np.array(use.to_ids))
    return _Side(use, *joint.indices[k], ids, other)
