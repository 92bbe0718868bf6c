"""Choose the cheapest strategies and layouts with CP-SAT under a memory bound (DESIGN section 4).

The model, its objective and its constraints are in `passes/sat_model.py`. Before CP-SAT starts, message passing
(`passes/bound.py`) gives it a bound, a first plan, and the choices that may still pay. Points at which memory may be
short are added as plans break them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from stpart_compiler.passes.bound import Bound, FindBound, find_leanest
from stpart_compiler.passes.problem import Problem, SolverOptions, evaluate, memory_bytes
from stpart_compiler.passes.sat_model import SatModel
from stpart_compiler.passes.uses import Assignment

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
        model = SatModel(problem, bound)
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
        self, problem: Problem, model: SatModel, bound: Bound, watch: _Watch, limit: float
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
        model = SatModel(problem)
        model.minimize_time()
        model.hint(hint)
        model.add_memory(self.memory_limit, list(range(problem.memory.points)))
        return _solved(model, _solver(self.options, self.options.time_limit_s))


def find_leaner(problem: Problem, known: Assignment, options: SolverOptions) -> Assignment:
    """An assignment that needs less memory than the known one, if CP-SAT finds it within a few seconds."""
    model = SatModel(problem)
    model.minimize_memory()
    model.hint(known)
    solver = _solver(options, min(LEAN_S, options.time_limit_s))
    solver.parameters.relative_gap_limit = LEAN_GAP
    found = _solved(model, solver) or known
    return min(known, found, key=lambda choice: memory_bytes(problem, choice))


def _solved(model: SatModel, solver: cp_model.CpSolver) -> Assignment | None:
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
