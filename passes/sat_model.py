"""The CP-SAT model of a problem (DESIGN section 4).

Decision variables: `x[root, i]`, one boolean per choice of a root (an op class that decides for itself, or a class of
parameters at rest); every other op class follows a root.

Objective: nanoseconds of one step, compute and exposed transfer of every op class times its count, plus re-layouts.

Constraints:
 1. exactly one choice per root (`_add_choices`);
 2. for a use whose producer and consumer have different roots, a flow between produced and required layouts whose
    marginals equal the choices on both sides: the LP relaxation is tight (`_add_flow`);
 3. a value needed in one layout by several uses of one phase is re-laid out once (`_add_shared`);
 4. memory per rank at each point that can be the peak (`passes/timeline.py`): parameters, optimizer state, gradients so
    far, saved activations, operands and results, re-laid-out copies, buffers of loops in time (`add_memory`). A value
    that is held for several roots is held once in each layout that one of them asks for (`_held_once`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from stpart_compiler.passes.bound import Bound
from stpart_compiler.passes.held import NOTHING, Demand, Mixed, Side
from stpart_compiler.passes.problem import Problem
from stpart_compiler.passes.quotient import Producer
from stpart_compiler.passes.uses import Assignment, Use


@dataclass(frozen=True)
class _Sharer:
    """One use of a re-layout: `indicator` is 1 where the use needs it."""

    use: Use
    pair: tuple[int, int]
    indicator: cp_model.LinearExprT
    price: int

    def used(self, choice: Assignment) -> bool:
        if self.use.when is not None and not choice[self.use.when]:
            return False
        return self.pair == (self.use.side(choice, source=True), self.use.side(choice, source=False))


@dataclass(frozen=True)
class _Chosen:
    """That a root has one of some choices: `indicator` is then 1."""

    root: int
    members: frozenset[int]
    indicator: cp_model.LinearExprT


@dataclass(frozen=True)
class _Need:
    """A layout is held where all sides have chosen so."""

    sides: list[_Chosen]

    def there(self, choice: Assignment) -> bool:
        return all(choice[side.root] in side.members for side in self.sides)


_Who = tuple[int, frozenset[int]]
"""A layout, and which claims on a value hold it in that layout."""


class SatModel:
    """The CP-SAT model of a problem."""

    def __init__(self, problem: Problem, bound: Bound | None = None) -> None:
        self.problem = problem
        self.bound = bound
        self.cp = cp_model.CpModel()
        self.x: dict[int, dict[int, cp_model.IntVar]] = {}
        self.flows: list[tuple[Use, dict[tuple[int, int], cp_model.IntVar]]] = []
        self.flow_of: dict[tuple[Producer, int, int], dict[tuple[int, int], cp_model.IntVar]] = {}
        self.shared: list[tuple[cp_model.IntVar, list[_Sharer]]] = []
        self.held: list[tuple[cp_model.IntVar, list[_Need]]] = []
        self.bounded: set[int] = set()
        self.mixed: list[dict[_Who, cp_model.IntVar]] = [{} for _ in problem.memory.mixed]
        self.terms: list[tuple[cp_model.LinearExprT, int]] = []
        largest = max((max(costs) for costs in problem.own.values() if costs), default=1)
        self.unit = max(1, largest // 10**8)
        self._add_choices()
        for group in problem.uses:
            self._add_group(group)

    def _add_choices(self) -> None:
        """Booleans of the choices that the bound has not ruled out."""
        for root, count in self.problem.roots.items():
            alive = self.bound.alive[root] if self.bound is not None and self.bound.choice is not None else range(count)
            self.x[root] = {i: self.cp.new_bool_var("") for i in alive}
            self.cp.add_exactly_one(self.x[root].values())
            self.terms += [(var, self.problem.own[root][i]) for i, var in self.x[root].items()]

    def _add_group(self, group: list[Use]) -> None:
        users: dict[tuple[int, int], list[_Sharer]] = {}
        for use in group:
            for source, target, indicator in self._indicators(use):
                price = use.price[source][target] * use.edge.count
                if price:
                    pair = use.pair(source, target)
                    sharer = _Sharer(use, (source, target), self._if_there(use, indicator), price)
                    users.setdefault(pair, []).append(sharer)
        for sharing in users.values():
            self._add_shared(sharing)

    def _add_shared(self, sharing: list[_Sharer]) -> None:
        if len(sharing) == 1 and sharing[0].use.when is None:
            self.terms.append((sharing[0].indicator, sharing[0].price))
            return
        done = self.cp.new_bool_var("")
        for sharer in sharing:
            self.cp.add(done >= sharer.indicator)
        self.terms.append((done, max(sharer.price for sharer in sharing)))
        self.shared.append((done, sharing))

    def _if_there(self, use: Use, indicator: cp_model.LinearExprT) -> cp_model.LinearExprT:
        """1 where the indicator is 1 and the use is there."""
        return indicator if use.when is None else cp_model.LinearExpr.sum([indicator, self._sum(use.when, [1]), -1])

    def _indicators(self, use: Use) -> list[tuple[int, int, cp_model.LinearExprT]]:
        """(source layout, target layout, 0/1 expression) for each pair that the use may need."""
        if use.from_root is None or use.to_root is None:
            members, root = (
                (use.to_members, use.to_root) if use.from_root is None else (use.from_members, use.from_root)
            )
            if root is None:
                return [(0, 0, 1)]
            sums = [(i, self._sum(root, members[i])) for i in self._present(root, members)]
            return [(0, i, e) if use.from_root is None else (i, 0, e) for i, e in sums]
        if use.from_root == use.to_root:
            return self._same_root(use)
        at = use.edge.producer, use.edge.consumer, use.edge.port
        if at not in self.flow_of:  # what runs again reads in the same layouts
            self.flow_of[at] = self._add_flow(use)
        return [(i, j, var) for (i, j), var in self.flow_of[at].items()]

    def _sum(self, root: int, ids: list[int]) -> cp_model.LinearExprT:
        return cp_model.LinearExpr.sum([self.x[root][i] for i in ids if i in self.x[root]])

    def _present(self, root: int, members: list[list[int]]) -> list[int]:
        """Layouts that some remaining choice gives."""
        return [index for index, ids in enumerate(members) if any(i in self.x[root] for i in ids)]

    def _same_root(self, use: Use) -> list[tuple[int, int, cp_model.LinearExprT]]:
        root = use.from_root
        assert root is not None
        target_of = {i: t for t, ids in enumerate(use.to_members) for i in ids}
        pairs: dict[tuple[int, int], list[int]] = {}
        for source, ids in enumerate(use.from_members):
            for i in ids:
                if i in self.x[root]:
                    pairs.setdefault((source, target_of[i]), []).append(i)
        return [(source, target, self._sum(root, ids)) for (source, target), ids in pairs.items()]

    def _add_flow(self, use: Use) -> dict[tuple[int, int], cp_model.IntVar]:
        assert use.from_root is not None and use.to_root is not None
        rows, columns = self._present(use.from_root, use.from_members), self._present(use.to_root, use.to_members)
        flow = {(i, j): self.cp.new_bool_var("") for i in rows for j in columns}
        for i in rows:
            row = cp_model.LinearExpr.sum([flow[i, j] for j in columns])
            self.cp.add(row == self._sum(use.from_root, use.from_members[i]))
        for j in columns:
            column = cp_model.LinearExpr.sum([flow[i, j] for i in rows])
            self.cp.add(column == self._sum(use.to_root, use.to_members[j]))
        self.flows.append((use, flow))
        return flow

    def add_memory(self, limit: int, points: list[int]) -> None:
        """Bound what is held at some points."""
        new = [p for p in points if p not in self.bounded]
        self.bounded.update(new)
        for held, constant in self._held(new):
            self.cp.add(held <= max(0, limit - constant))

    def _held(self, points: list[int]) -> list[tuple[cp_model.LinearExprT, int]]:
        """Per point what is held by choice, and what is held anyway."""
        memory = self.problem.memory
        terms: dict[int, list[tuple[cp_model.IntVar, int]]] = {p: [] for p in points}
        for root, variables in self.x.items():
            for i, var in variables.items():
                row = memory.tables[root][i, points]
                for n in np.flatnonzero(row):
                    terms[points[n]].append((var, int(row[n])))
        for mixed, known in zip(memory.mixed, self.mixed, strict=True):
            self._add_mixed(mixed, terms, known)
        sums = [cp_model.LinearExpr.weighted_sum([v for v, _ in row], [b for _, b in row]) for row in terms.values()]
        return list(zip(sums, memory.constant[points].tolist(), strict=True))

    def _add_mixed(
        self, mixed: Mixed, terms: dict[int, list[tuple[cp_model.IntVar, int]]], known: dict[_Who, cp_model.IntVar]
    ) -> None:
        """Where a layout is held by several claims, the one with most values counts."""
        sizes = self.problem.memory.sizes
        needs: list[dict[int, list[_Need]]] = []
        counts = np.stack([demand.counts for demand in mixed.demands])
        for p, row in terms.items():
            order = sorted(np.flatnonzero(counts[:, p]).tolist(), key=lambda d: -counts[d, p])
            needs = needs or [self._needs(demand) for demand in mixed.demands] if order else needs
            for rank, d in enumerate(order):
                least = counts[order[rank + 1], p] if rank + 1 < len(order) else 0
                if counts[d, p] == least:
                    continue
                for number in set().union(*(needs[e] for e in order[: rank + 1])):
                    who = number, frozenset(e for e in order[: rank + 1] if number in needs[e])
                    if who not in known:
                        known[who] = self._held_once([need for e in sorted(who[1]) for need in needs[e][number]])
                    row.append((known[who], int(counts[d, p] - least) * sizes[number]))

    def _held_once(self, needs: list[_Need]) -> cp_model.IntVar:
        """1 where any of the needs is there."""
        held = self.cp.new_bool_var("")
        for need in needs:
            taken = [chosen.indicator for chosen in need.sides]
            self.cp.add(held >= cp_model.LinearExpr.sum(taken) - (len(taken) - 1))
        self.held.append((held, needs))
        return held

    def _needs(self, demand: Demand) -> dict[int, list[_Need]]:
        """Per number of a layout, how the two sides may choose for the demand to hold it."""
        found: dict[int, list[_Need]] = {}
        if any(wanted not in self.x[root] for root, wanted in demand.when):
            return found
        when = [self._chosen(side, [wanted]) for side, (_, wanted) in zip(demand.when_sides, demand.when, strict=True)]
        sources, targets = self._by_index(demand.source), self._by_index(demand.target)
        for i, source in sources.items():
            columns: dict[int, list[int]] = {}
            for j, members in targets.items():
                columns.setdefault(demand.number(i, j), []).extend(members)
            for number, target in columns.items():
                if number != NOTHING:
                    sides = self._chosen(demand.source, source), self._chosen(demand.target, target), *when
                    found.setdefault(number, []).append(_Need([side for side in sides if side is not None]))
        return found

    def _by_index(self, side: Side) -> dict[int, list[int]]:
        """Index of a layout -> remaining choices that give it."""
        found: dict[int, list[int]] = {}
        for i in self.x[side.root] if side.root is not None else (0,):
            found.setdefault(int(side.index[i]), []).append(i)
        return found

    def _chosen(self, side: Side, members: list[int]) -> _Chosen | None:
        """That one of some choices is taken; None where one surely is."""
        if side.root is None or len(members) == len(self.x[side.root]):
            return None
        return _Chosen(side.root, frozenset(members), self._sum(side.root, members))

    def minimize_time(self) -> None:
        exprs = [e for e, _ in self.terms]
        prices = [-(-price // self.unit) if price else 0 for _, price in self.terms]
        total = sum(e * p for e, p in zip(exprs, prices, strict=True) if p)
        if self.bound is not None:
            self.cp.add(total >= int(self.bound.lower * 1e9 / self.unit))
        self.cp.minimize(total)

    def minimize_memory(self) -> None:
        peak = self.cp.new_int_var(0, 2**50, "peak")
        for held, constant in self._held(list(range(self.problem.memory.points))):
            self.cp.add(peak >= held + constant)
        self.cp.minimize(peak)

    def hint(self, choice: Assignment) -> None:
        for root, variables in self.x.items():
            for i, var in variables.items():
                self.cp.add_hint(var, i == choice[root])
        for use, flow in self.flows:
            at = (use.side(choice, source=True), use.side(choice, source=False))
            for pair, var in flow.items():
                self.cp.add_hint(var, pair == at)
        for done, sharing in self.shared:
            self.cp.add_hint(done, any(sharer.used(choice) for sharer in sharing))
        for held, needs in self.held:
            self.cp.add_hint(held, any(need.there(choice) for need in needs))

    def read(self, solver: cp_model.CpSolver) -> Assignment:
        return {
            root: next(i for i, var in variables.items() if solver.boolean_value(var))
            for root, variables in self.x.items()
        }
