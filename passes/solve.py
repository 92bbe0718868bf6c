"""Choose the cheapest strategies and layouts with CP-SAT under a memory bound (DESIGN section 4).

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

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from stpart_compiler.passes.bound import Bound, FindBound, find_leanest
from stpart_compiler.passes.held import NOTHING, Demand, Mixed, Side
from stpart_compiler.passes.problem import Problem, SolverOptions, evaluate, memory_bytes
from stpart_compiler.passes.quotient import Producer
from stpart_compiler.passes.uses import Assignment, Use

POLISH_S = 1.0

LONG_SWEEPS, SHORT_SWEEPS = 200, 60
"""Passes of the bound for a plan that is wanted, and for a yardstick."""

MANY_CHOICES = 1500
SETTLED_GAP = 0.005
"""With more choices than that still open, a plan so near to the bound is taken as it is."""

MEMORY_ROUNDS = 4
NEAR_PEAK = 0.9
"""Points that are bounded from the start: those so near to the limit; others once a plan is over it there."""

LEAN_GAP, LEAN_SPAN = 0.01, 0.1
"""Relative distance to the least memory at which CP-SAT's search for it stops, and to the limit at which it starts."""

LEAN_S = 3.0
"""Seconds for that search."""

Progress = Callable[[str], None]


@dataclass
class Solution:
    """Choice per root; objective and proven bound in seconds; `status` of CP-SAT.

    `free`: seconds that no assignment can beat, whatever memory it needs. `memory_binds`: the memory limit may cost
    more than the wanted gap.
    """

    choice: Assignment
    seconds: float
    bound: float
    status: str
    wall_s: float
    first_s: float = 0.0
    memory_binds: bool = False
    free: float = 0.0


class InfeasibleError(ValueError):
    """No plan meets the memory limit. `least`: bytes that would do, by `choice` where the search got so far."""

    def __init__(self, message: str, least: int, choice: Assignment | None = None) -> None:
        super().__init__(message)
        self.least = least
        self.choice = choice


@dataclass(frozen=True)
class Solve:
    """priced problem -> cheapest assignment within `memory_limit` bytes per rank.

    `polish_s`: seconds for CP-SAT where the first assignment is already proven to be within the wanted gap.
    """

    options: SolverOptions
    memory_limit: int | None = None
    polish_s: float = POLISH_S

    def apply(self, problem: Problem, hint: Assignment | None = None, progress: Progress | None = None) -> Solution:
        """Raises:
        InfeasibleError: no assignment fits in the memory limit.
        """
        start = time.perf_counter()
        sweeps, enough = (LONG_SWEEPS, 0.0) if self.polish_s else (SHORT_SWEEPS, self.options.gap)
        bound = FindBound(self.memory_limit, sweeps, enough=enough).apply(problem, hint)
        first = time.perf_counter() - start
        if progress is not None and bound.choice is not None:
            best = evaluate(problem, bound.choice)
            progress(f"bound {first:.1f} s: plan found, within {100 * (1 - bound.lower / best):.1f} % of the bound")
        near = _proven(problem, bound, self.options.gap)
        if bound.choice is not None and near and (not self.polish_s or _settled(problem, bound)):
            seconds = evaluate(problem, bound.choice)
            return Solution(
                bound.choice, seconds, bound.lower, "BOUNDED", first, first, self._binds(bound, seconds), bound.free
            )
        if self.memory_limit is not None and bound.least > self.memory_limit:
            raise self._infeasible(problem, find_leanest(problem) if self.polish_s else bound.nearest)
        begin = bound.choice or self._leanest(problem)
        first = time.perf_counter() - start
        model = _Model(problem, bound)
        model.minimize_time()
        model.hint(begin)
        limit = min(self.polish_s, self.options.time_limit_s) if near else self.options.time_limit_s
        watch = _Watch(start, progress, self.options.patience_s, bound.lower * 1e9 / model.unit)
        choice, name, lower, limited = self._search(problem, model, bound, watch, limit)
        wall = time.perf_counter() - start
        chosen = min((begin, choice or begin), key=lambda found: evaluate(problem, found))
        seconds = evaluate(problem, chosen)
        binds = limited and self._binds(bound, seconds)
        return Solution(chosen, seconds, min(seconds, lower), name, wall, first, binds, bound.free)

    def _search(
        self, problem: Problem, model: _Model, bound: Bound, watch: _Watch, limit: float
    ) -> tuple[Assignment | None, str, float, bool]:
        """What CP-SAT finds, its status and bound, and whether memory had to be limited at any point for that.

        Points that a found assignment is over the limit at are added.
        """
        lower, limited = bound.lower, bound.choice is None
        if self.memory_limit is not None:
            near_peak = problem.memory.at_points(bound.nearest) >= NEAR_PEAK * self.memory_limit
            model.add_memory(self.memory_limit, np.flatnonzero(near_peak).tolist())
            limited = limited or bool(near_peak.any())
        for _ in range(MEMORY_ROUNDS):
            solver = _solver(self.options, limit)
            status = watch.solve(solver, model.cp)
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                break
            choice = model.read(solver)
            lower = max(lower, solver.best_objective_bound * model.unit / 1e9)
            if self.memory_limit is None or memory_bytes(problem, choice) <= self.memory_limit:
                return choice, solver.status_name(status), lower, limited
            over = problem.memory.at_points(choice) > self.memory_limit
            model.add_memory(self.memory_limit, np.flatnonzero(over).tolist())
            limited = True
        return None, solver.status_name(status), lower, limited

    def _binds(self, bound: Bound, seconds: float) -> bool:
        return self.memory_limit is not None and bound.free < (1 - self.options.gap) * seconds

    def _leanest(self, problem: Problem) -> Assignment:
        """An assignment that needs little memory, to begin with where what costs little does not fit.

        Raises:
            InfeasibleError: not even this one fits.
        """
        leanest = find_leanest(problem)
        held = memory_bytes(problem, leanest)
        if self.memory_limit is None or held <= self.memory_limit:
            return leanest
        if self.polish_s and held <= (1 + LEAN_SPAN) * self.memory_limit:
            leanest = find_leaner(problem, leanest, self.options)
        if memory_bytes(problem, leanest) <= self.memory_limit:
            return leanest
        raise self._infeasible(problem, leanest)

    def _infeasible(self, problem: Problem, choice: Assignment) -> InfeasibleError:
        least = memory_bytes(problem, choice)
        kinds = problem.memory.by_kind(choice)
        assert self.memory_limit is not None
        largest = max(problem.space.params, key=lambda p: p.value.numel * len(p.names), default=None)
        name = f", most of it {largest.names[0]} and its like" if largest else ""
        return InfeasibleError(
            f"memory_limit: no plan fits in {self.memory_limit} bytes per rank; the least is about {least} bytes"
            f" ({least / 2**20:.1f} MiB): parameters with optimizer state {kinds['parameters'] / 2**20:.1f} MiB{name},"
            f" inputs and buffers {kinds['inputs'] / 2**20:.1f} MiB, activations and gradients at the peak of the step"
            f" {kinds['others'] / 2**20:.1f} MiB. Raise the limit, use more ranks, or a smaller batch",
            least,
            choice,
        )


@dataclass(frozen=True)
class SolveFew:
    """priced problem with few choices -> cheapest assignment within `memory_limit` bytes per rank, by CP-SAT alone.

    Memory is bounded at all points at once. `hint`: an assignment to begin with. None: none was found in the time.
    """

    options: SolverOptions
    memory_limit: int

    def apply(self, problem: Problem, hint: Assignment) -> Assignment | None:
        model = _Model(problem)
        model.minimize_time()
        model.hint(hint)
        model.add_memory(self.memory_limit, list(range(problem.memory.points)))
        return _solved(model, _solver(self.options, self.options.time_limit_s))


def find_leaner(problem: Problem, known: Assignment, options: SolverOptions) -> Assignment:
    """An assignment that needs less memory than the known one, if CP-SAT finds it within a few seconds."""
    model = _Model(problem)
    model.minimize_memory()
    model.hint(known)
    solver = _solver(options, min(LEAN_S, options.time_limit_s))
    solver.parameters.relative_gap_limit = LEAN_GAP
    found = _solved(model, solver) or known
    return min(known, found, key=lambda choice: memory_bytes(problem, choice))


def _solved(model: _Model, solver: cp_model.CpSolver) -> Assignment | None:
    """What CP-SAT finds in its time, if anything."""
    found = solver.solve(model.cp) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return model.read(solver) if found else None


def _solver(options: SolverOptions, limit_s: float) -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    solver.parameters.num_workers = options.workers
    solver.parameters.random_seed = options.seed
    solver.parameters.relative_gap_limit = options.gap
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    return solver


def _proven(problem: Problem, bound: Bound, gap: float) -> bool:
    return bound.choice is not None and bound.lower >= (1 - gap) * evaluate(problem, bound.choice)


def _settled(problem: Problem, bound: Bound) -> bool:
    """Whether CP-SAT could gain less than its model costs to build."""
    open_choices = sum(map(len, bound.alive.values()))
    return open_choices > MANY_CHOICES and _proven(problem, bound, SETTLED_GAP)


class _Watch(cp_model.CpSolverSolutionCallback):
    """Notes when the first solution came, reports progress, and stops a search that has stopped improving."""

    def __init__(self, start: float, progress: Progress | None, patience_s: float, lower: float) -> None:
        super().__init__()
        self._start = start
        self._progress = progress
        self._patience_s = patience_s
        self._lower = lower  # known before, in units of the objective
        self._timer: threading.Timer | None = None

    def solve(self, solver: cp_model.CpSolver, model: cp_model.CpModel) -> cp_model.CpSolverStatus:
        self._solver = solver
        status = solver.solve(model, self)
        self._cancel()
        return status

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_solution_callback(self) -> None:
        self._cancel()
        self._timer = threading.Timer(self._patience_s, self._solver.stop_search)
        self._timer.daemon = True
        self._timer.start()
        now = time.perf_counter() - self._start
        if self._progress is not None:
            best, bound = self.objective_value, max(self.best_objective_bound, self._lower)
            gap = (best - bound) / best if best else 0.0
            self._progress(f"solve {now:.1f} s: plan found, within {100 * gap:.1f} % of the bound")


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


class _Model:
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
