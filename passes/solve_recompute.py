"""Choose placements under a memory bound together with what of forward is run again in backward.

Sets of ops to run again are tried one after another: each gives another order, and so another problem, with exact
points and the full price of what runs twice, for which the placements are solved anew. The cheapest plan wins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stpart_compiler.passes.bound import Bound, FindBound, find_leanest
from stpart_compiler.passes.peak import Tried, TrySets
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions, memory_bytes
from stpart_compiler.passes.recompute import FindRecompute
from stpart_compiler.passes.solve import InfeasibleError, Solution, Solve
from stpart_compiler.passes.space import Space
from stpart_compiler.passes.uses import Assignment

Progress = Callable[[str], None]

SETS_TRIED = 8
"""Number of sets of ops to run again whose memory is worked out before the best is sought near one."""

CHANGES_TRIED = 3
"""How often a set is replaced by the best of those that save one class more or less, or where nothing fits another."""

LEAST_S = 1.0
"""All sets and memory limits together get the solver's time limit, and what is solved after that so many seconds."""

LEAN_TURNS = 3
"""How often, where nothing fits, leaner placements are sought for the leanest set, and a leaner set for those."""

Names = frozenset[str]
Fixed = tuple[tuple[int, int], ...]
"""An assignment as a key."""

Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass(frozen=True)
class Suiting:
    """What suits one assignment, whatever the limit. `leanest`: classes to save so that it needs least; `ways`: growing
    sets to run again."""

    find: FindRecompute
    trial: TrySets
    leanest: frozenset[int]
    ways: tuple[list[Names], ...]

    @staticmethod
    def of(space: Space, start: Assignment, options: SolverOptions) -> Suiting:
        find = FindRecompute(space, start, options.marked(space.graph))
        trial = TrySets(space, start, options)
        leanest = min(find.cuts(), key=lambda cut: trial.at(find.names(find.all_but(cut))).nbytes)
        ways = (list(map(find.names, sets)) for sets in (find.grown(), find.pruned(leanest)))
        return Suiting(find, trial, leanest, tuple(way for way in ways if way))


@dataclass
class Sets:
    """What was worked out for one space and holds under any memory limit; by ops run again, or by assignment."""

    problems: dict[Names, Problem] = field(default_factory=dict)
    leanest: dict[Names, Assignment] = field(default_factory=dict)
    free: dict[Fixed, Bound] = field(default_factory=dict)
    suiting: dict[Fixed, Suiting] = field(default_factory=dict)
    spent_s: float = 0.0
    last_best: Names | None = None


@dataclass(frozen=True)
class SolveRecompute:
    """search space, its problem -> the cheapest assignment within `memory_limit` bytes per rank, and its problem.

    `sets`: shared by passes over one space whose limit differs.
    """

    options: SolverOptions
    memory_limit: int
    sets: Sets = field(default_factory=Sets, compare=False, repr=False)

    def apply(
        self, space: Space, problem: Problem, hint: Assignment | None, progress: Progress
    ) -> tuple[Problem, Solution]:
        """Raises:
        InfeasibleError: no assignment fits in the memory limit, with none of the sets that were tried.
        """
        search = _Search(space, self.options, self.memory_limit, progress, self.sets)
        first = search.solve(problem, hint)
        if first is not None and not first.memory_binds:
            return problem, first
        self.sets.problems.setdefault(problem.again, problem)
        free = _kept(self.sets.free, _fixed(hint or {}), lambda: FindBound().apply(problem, hint))
        if search.is_late:
            search.those_known()
            return search.best(free)
        for start in (free.nearest, first.choice if first is not None else search.leanest(problem)):
            search.near(start)
        search.leaner()
        return search.best(free)


@dataclass
class _Search:
    """What was found so far, and the problems for which nothing fits."""

    space: Space
    options: SolverOptions
    memory_limit: int
    progress: Progress
    sets: Sets
    found: list[tuple[Problem, Solution]] = field(default_factory=list)
    short: list[tuple[Problem, InfeasibleError]] = field(default_factory=list)
    known: set[Names] = field(default_factory=set)

    def solve(self, problem: Problem, hint: Assignment | None) -> Solution | None:
        """The cheapest assignment of one problem; None where none fits."""
        self.known.add(problem.again)
        lean = self.sets.leanest.get(problem.again)
        if lean is not None and (hint is None or memory_bytes(problem, hint) > self.memory_limit):
            hint = lean
        began = time.perf_counter()
        left = max(LEAST_S, self.options.time_limit_s - self.sets.spent_s)
        options = replace(self.options, time_limit_s=min(self.options.time_limit_s, left))
        try:
            solution = Solve(options, self.memory_limit).apply(problem, hint, self.progress)
        except InfeasibleError as error:
            self.short.append((problem, error))
            if error.choice is not None:
                self.sets.leanest[problem.again] = error.choice
            return None
        finally:
            self.sets.spent_s += time.perf_counter() - began
        self.found.append((problem, solution))
        return solution

    def near(self, start: Assignment, *, swap: bool = False) -> None:
        """Solve with sets that suit an assignment. `swap`: also try sets that save another class in place of one."""
        for again in self._suiting(start, swap):
            if again not in self.known:
                self._solve_again(again, start)

    def _solve_again(self, again: Names, start: Assignment) -> None:
        self.progress(f"memory is short: solving with {len(again)} ops run again in backward")
        build = BuildProblem(self.options, again=again)
        self.solve(_kept(self.sets.problems, again, lambda: build.apply(self.space)), start)

    def leaner(self) -> None:
        """While nothing fits, go on from the leanest problem's leanest assignment."""
        for _ in range(LEAN_TURNS):
            if self.found:
                return
            before = len(self.short)
            self.near(self.leanest(min(self.short, key=lambda pair: pair[1].least)[0]), swap=True)
            if len(self.short) == before:
                return

    @property
    def is_late(self) -> bool:
        """Whether sets were sought under another limit, and what all sets and limits get together is spent."""
        return bool(self.sets.suiting) and self.sets.spent_s >= self.options.time_limit_s

    def those_known(self) -> None:
        """Solve with the set that was best under the last limit, and with the one with which least is needed."""
        problems = self.sets.problems
        leanest = min(problems, key=lambda again: memory_bytes(problems[again], self.leanest(problems[again])))
        for again in (self.sets.last_best, leanest):
            if again is not None and again not in self.known:
                self._solve_again(again, self.leanest(problems[again]))

    def leanest(self, problem: Problem) -> Assignment:
        """An assignment of a problem that needs little."""
        return _kept(self.sets.leanest, problem.again, lambda: find_leanest(problem))

    def best(self, free: Bound) -> tuple[Problem, Solution]:
        """The cheapest. Its bound is that without a limit: it holds for all sets."""
        if not self.found:
            raise min((error for _, error in self.short), key=lambda error: error.least)
        problem, solution = min(self.found, key=lambda pair: pair[1].seconds)
        self.sets.last_best = problem.again
        binds = free.lower < (1 - self.options.gap) * solution.seconds
        return problem, replace(solution, bound=min(free.lower, solution.seconds), memory_binds=binds)

    def _suiting(self, start: Assignment, swap: bool) -> list[Names]:
        """The fastest set found with which an assignment fits; none where no op may run again.

        Where it fits with none, the one with which it needs least: when too much is run again at once, it is all held
        at once. Beside it then the leanest of those that save few values: with other placements that may be leaner.
        """
        suiting = _kept(self.sets.suiting, _fixed(start), lambda: Suiting.of(self.space, start, self.options))
        find, trial, names = suiting.find, suiting.trial, suiting.find.names
        if not suiting.ways:
            return []
        tried = [self._first_fitting(trial, way) for way in suiting.ways]
        best = min([*tried, *map(trial.at, self.known)], key=self._rank)
        for _ in range(CHANGES_TRIED):
            better = self._better(best, trial, map(names, find.beside(best.again)))
            if better is None and swap:
                better = self._better(best, trial, map(names, find.swapped(best.again)))
            if better is None:
                break
            best = better
        fits = best.nbytes <= self.memory_limit
        return [best.again] if fits else [best.again, names(find.all_but(suiting.leanest))]

    def _better(self, best: Tried, trial: TrySets, sets: Iterable[Names]) -> Tried | None:
        other = min(map(trial.at, sets), key=self._rank, default=best)
        return other if self._rank(other) < self._rank(best) else None

    def _rank(self, tried: Tried) -> tuple[int, float]:
        """Less is better: what does not fit by its bytes, what does by its seconds."""
        return max(0, tried.nbytes - self.memory_limit), tried.seconds

    def _first_fitting(self, trial: TrySets, sets: list[Names]) -> Tried:
        """The first of some growing sets with which an assignment fits, or with which it needs least."""
        step = -(-len(sets) // SETS_TRIED)
        some = [*range(0, len(sets), step), len(sets) - 1]
        fitting = [n for n in some if trial.at(sets[n]).nbytes <= self.memory_limit]
        if not fitting:
            return min((trial.at(sets[n]) for n in some), key=lambda one: one.nbytes)
        low, high = max(0, fitting[0] - step + 1), fitting[0]
        while low < high:
            middle = (low + high) // 2
            fits = trial.at(sets[middle]).nbytes <= self.memory_limit
            low, high = (low, middle) if fits else (middle + 1, high)
        return trial.at(sets[high])


def _fixed(choice: Assignment) -> Fixed:
    return tuple(sorted(choice.items()))


def _kept(known: dict[Key, Made], key: Key, make: Callable[[], Made]) -> Made:
    """What is known, or is made now and kept."""
    if key not in known:
        known[key] = make()
    return known[key]
