"""Choose the cheapest strategies and layouts with CP-SAT under a memory bound (DESIGN section 4).

Decision variables: `x[root, i]`, one boolean per choice of a root (an op class that decides for itself, or a class of
parameters at rest); every other op class follows a root.

Objective: nanoseconds of one step, compute and exposed transfer of every op class times its count, plus re-layouts.

Constraints:
 1. exactly one choice per root (`_add_choices`);
 2. for a use whose producer and consumer have different roots, a flow between produced and required layouts whose
    marginals equal the choices on both sides: the LP relaxation is tight (`_add_flow`);
 3. a value needed in one layout by several uses of one phase is re-laid out once (`_add_shared`);
 4. memory per rank, where backward starts (parameters, optimizer state, saved activations) and where it ends
    (parameters with gradients and optimizer state), each with the blocks of any one op (`add_memory`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ortools.sat.python import cp_model

from stpart_compiler.passes.bound import Bound, FindBound
from stpart_compiler.passes.problem import Assignment, Problem, SolverOptions, Use, evaluate, memory_bytes

POLISH_S = 1.0

LONG_SWEEPS, SHORT_SWEEPS = 200, 60
"""Passes of the bound for a plan that is wanted, and for a yardstick."""

MANY_CHOICES = 1500
SETTLED_GAP = 0.005
"""With more choices than that still open, a plan so near to the bound is taken as it is."""

Progress = Callable[[str], None]


@dataclass
class Solution:
    """Choice per root; objective and proven bound in seconds; `status` of CP-SAT.

    `memory_binds`: the memory limit may cost more than the wanted gap.
    """

    choice: Assignment
    seconds: float
    bound: float
    status: str
    wall_s: float
    first_s: float = 0.0
    memory_binds: bool = False


class InfeasibleError(ValueError):
    """No plan meets the memory limit."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


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
        bound = FindBound(self.memory_limit, LONG_SWEEPS if self.polish_s else SHORT_SWEEPS).apply(problem, hint)
        first = time.perf_counter() - start
        if progress is not None and bound.choice is not None:
            best = evaluate(problem, bound.choice)
            progress(f"bound {first:.1f} s: plan found, within {100 * (1 - bound.lower / best):.1f} % of the bound")
        near = _proven(problem, bound, self.options.gap)
        if bound.choice is not None and near and (not self.polish_s or _settled(problem, bound)):
            seconds = evaluate(problem, bound.choice)
            return Solution(bound.choice, seconds, bound.lower, "BOUNDED", first, first, self._binds(bound, seconds))
        model = _Model(problem, bound)
        if self.memory_limit is not None:
            model.add_memory(self.memory_limit)
        model.minimize_time()
        if bound.choice is not None:
            model.hint(bound.choice)
        solver = self._solver(min(self.polish_s, self.options.time_limit_s) if near else self.options.time_limit_s)
        watch = _Watch(start, progress, solver, self.options.patience_s)
        status = solver.solve(model.cp, watch)
        watch.cancel()
        wall = time.perf_counter() - start
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            choice = model.read(solver)
            lower = max(bound.lower, solver.best_objective_bound * model.unit / 1e9)
        elif bound.choice is not None:
            choice, lower = bound.choice, bound.lower
        else:
            choice, lower = self._leanest(problem), bound.lower
        if bound.choice is not None and evaluate(problem, bound.choice) < evaluate(problem, choice):
            choice = bound.choice
        seconds = evaluate(problem, choice)
        first = first if bound.choice is not None else watch.first or wall
        name = solver.status_name(status)
        return Solution(choice, seconds, min(seconds, lower), name, wall, first, self._binds(bound, seconds))

    def _binds(self, bound: Bound, seconds: float) -> bool:
        return self.memory_limit is not None and bound.free < (1 - self.options.gap) * seconds

    def _solver(self, limit: float) -> cp_model.CpSolver:
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = limit
        solver.parameters.num_workers = self.options.workers
        solver.parameters.random_seed = self.options.seed
        solver.parameters.relative_gap_limit = self.options.gap
        solver.parameters.cp_model_probing_level = 0
        solver.parameters.symmetry_level = 0
        return solver

    def _leanest(self, problem: Problem) -> Assignment:
        """The assignment that needs least memory: a search that found nothing may just be out of time.

        Raises:
            InfeasibleError: not even this one fits.
        """
        model = _Model(problem)
        model.minimize_memory()
        solver = self._solver(self.options.time_limit_s)
        solver.parameters.relative_gap_limit = 0.0
        solver.solve(model.cp)
        leanest = model.read(solver)
        if self.memory_limit is None or memory_bytes(problem, leanest) <= self.memory_limit:
            return leanest
        raise self._infeasible(problem, leanest)

    def _infeasible(self, problem: Problem, choice: Assignment) -> InfeasibleError:
        least = memory_bytes(problem, choice)
        held = sum(sizes[choice[root]] for root, sizes in problem.end.items())
        saved = sum(sizes[choice[root]] for root, sizes in problem.turn.items() if root >= 0)
        assert self.memory_limit is not None
        largest = max(problem.space.params, key=lambda p: p.value.numel * len(p.names), default=None)
        name = f", most of it {largest.names[0]} and its like" if largest else ""
        return InfeasibleError(
            f"memory_limit: no plan fits in {self.memory_limit} bytes per rank; the least is about {least} bytes"
            f" ({least / 2**20:.1f} MiB): parameters with gradients and optimizer state {held / 2**20:.1f} MiB{name},"
            f" saved activations {saved / 2**20:.1f} MiB, inputs and buffers {problem.constant_bytes / 2**20:.1f} MiB,"
            " the rest is one op's own blocks. Raise the limit, use more ranks, or a smaller batch",
            least,
        )


def _proven(problem: Problem, bound: Bound, gap: float) -> bool:
    return bound.choice is not None and bound.lower >= (1 - gap) * evaluate(problem, bound.choice)


def _settled(problem: Problem, bound: Bound) -> bool:
    """Whether CP-SAT could gain less than its model costs to build."""
    open_choices = sum(map(len, bound.alive.values()))
    return open_choices > MANY_CHOICES and _proven(problem, bound, SETTLED_GAP)


class _Watch(cp_model.CpSolverSolutionCallback):
    """Notes when the first solution came, reports progress, and stops a search that has stopped improving."""

    def __init__(self, start: float, progress: Progress | None, solver: cp_model.CpSolver, patience_s: float) -> None:
        super().__init__()
        self._start = start
        self._progress = progress
        self._solver = solver
        self._patience_s = patience_s
        self._timer: threading.Timer | None = None
        self.first: float | None = None

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_solution_callback(self) -> None:
        self.cancel()
        self._timer = threading.Timer(self._patience_s, self._solver.stop_search)
        self._timer.daemon = True
        self._timer.start()
        now = time.perf_counter() - self._start
        if self.first is None:
            self.first = now
        if self._progress is not None:
            best, bound = self.objective_value, self.best_objective_bound
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
        return self.pair == (self.use.side(choice, source=True), self.use.side(choice, source=False))


class _Model:
    """The CP-SAT model of a problem."""

    def __init__(self, problem: Problem, bound: Bound | None = None) -> None:
        self.problem = problem
        self.bound = bound
        self.cp = cp_model.CpModel()
        self.x: dict[int, dict[int, cp_model.IntVar]] = {}
        self.flows: list[tuple[Use, dict[tuple[int, int], cp_model.IntVar]]] = []
        self.shared: list[tuple[cp_model.IntVar, list[_Sharer]]] = []
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
                    pair = (use.from_ids[source], use.to_ids[target])
                    users.setdefault(pair, []).append(_Sharer(use, (source, target), indicator, price))
        for sharing in users.values():
            self._add_shared(sharing)

    def _add_shared(self, sharing: list[_Sharer]) -> None:
        if len(sharing) == 1:
            self.terms.append((sharing[0].indicator, sharing[0].price))
            return
        done = self.cp.new_bool_var("")
        for sharer in sharing:
            self.cp.add(done >= sharer.indicator)
        self.terms.append((done, max(sharer.price for sharer in sharing)))
        self.shared.append((done, sharing))

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
        return self._add_flow(use)

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

    def _add_flow(self, use: Use) -> list[tuple[int, int, cp_model.LinearExprT]]:
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
        return [(i, j, var) for (i, j), var in flow.items()]

    def _held(self, table: dict[int, list[int]]) -> cp_model.LinearExprT:
        pairs = [(var, sizes[i]) for root, sizes in table.items() for i, var in self.x[root].items()]
        return cp_model.LinearExpr.weighted_sum([v for v, _ in pairs], [s for _, s in pairs])

    def add_memory(self, limit: int) -> None:
        room = max(0, limit - self.problem.constant_bytes)
        for table in (self.problem.turn, self.problem.end):
            held = self._held(table)
            self.cp.add(held <= room)
            for expr in self._transients():
                self.cp.add(cp_model.LinearExpr.sum([held, expr]) <= room)

    def _transients(self) -> list[cp_model.LinearExprT]:
        distinct = {(root, tuple(sizes)) for root, sizes in self.problem.transient}
        return [
            cp_model.LinearExpr.weighted_sum(list(self.x[root].values()), [sizes[i] for i in self.x[root]])
            for root, sizes in sorted(distinct)
        ]

    def minimize_time(self) -> None:
        exprs = [e for e, _ in self.terms]
        prices = [-(-price // self.unit) if price else 0 for _, price in self.terms]
        total = sum(e * p for e, p in zip(exprs, prices, strict=True) if p)
        if self.bound is not None:
            self.cp.add(total >= int(self.bound.lower * 1e9 / self.unit))
        self.cp.minimize(total)

    def minimize_memory(self) -> None:
        peak = self.cp.new_int_var(0, 2**50, "peak")
        for expr in self._transients():
            self.cp.add(peak >= expr)
        held = self.cp.new_int_var(0, 2**50, "held")
        for table in (self.problem.turn, self.problem.end):
            self.cp.add(held >= self._held(table))
        self.cp.minimize(cp_model.LinearExpr.sum([held, peak]))

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

    def read(self, solver: cp_model.CpSolver) -> Assignment:
        return {
            root: next(i for i, var in variables.items() if solver.boolean_value(var))
            for root, variables in self.x.items()
        }
