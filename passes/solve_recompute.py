"""Choose placements under a memory bound together with what of forward is run again in backward.

Sets of ops to run again are tried one after another: each gives another order, and so another problem, with exact
points and the full price of what runs twice, for which the placements are solved anew. The cheapest plan wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from stpart_compiler.passes.bound import Bound, FindBound, find_leanest
from stpart_compiler.passes.peak import Tried, TrySets
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.recompute import FindRecompute
from stpart_compiler.passes.solve import InfeasibleError, Solution, Solve
from stpart_compiler.passes.space import Space
from stpart_compiler.passes.uses import Assignment

Progress = Callable[[str], None]

SETS_TRIED = 8
"""Number of sets of ops to run again whose memory is worked out before the best is sought near one."""

CHANGES_TRIED = 3
"""How often a set is replaced by the best of those that save one class more or less, or where nothing fits another."""

LEAN_TURNS = 3
"""How often, where nothing fits, leaner placements are sought for the leanest set, and a leaner set for those."""

Names = frozenset[str]


@dataclass(frozen=True)
class SolveRecompute:
    """search space, its problem -> the cheapest assignment within `memory_limit` bytes per rank, and its problem."""

    options: SolverOptions
    memory_limit: int

    def apply(
        self, space: Space, problem: Problem, hint: Assignment | None, progress: Progress
    ) -> tuple[Problem, Solution]:
        """Raises:
        InfeasibleError: no assignment fits in the memory limit, with none of the sets that were tried.
        """
        search = _Search(space, self.options, self.memory_limit, progress)
        first = search.solve(problem, hint)
        if first is not None and not first.memory_binds:
            return problem, first
        free = FindBound().apply(problem, hint)
        for start in (free.nearest, first.choice if first is not None else find_leanest(problem)):
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
    found: list[tuple[Problem, Solution]] = field(default_factory=list)
    short: list[tuple[Problem, InfeasibleError]] = field(default_factory=list)
    known: set[Names] = field(default_factory=set)

    def solve(self, problem: Problem, hint: Assignment | None) -> Solution | None:
        """The cheapest assignment of one problem; None where none fits."""
        self.known.add(problem.again)
        try:
            solution = Solve(self.options, self.memory_limit).apply(problem, hint, self.progress)
        except InfeasibleError as error:
            self.short.append((problem, error))
            return None
        self.found.append((problem, solution))
        return solution

    def near(self, start: Assignment, *, swap: bool = False) -> None:
        """Solve with sets that suit an assignment. `swap`: also try sets that save another class in place of one."""
        for again in self._suiting(start, swap):
            if again not in self.known:
                self.progress(f"memory is short: solving with {len(again)} ops run again in backward")
                self.solve(BuildProblem(self.options, again=again).apply(self.space), start)

    def leaner(self) -> None:
        """While nothing fits, go on from the leanest problem's leanest assignment."""
        for _ in range(LEAN_TURNS):
            if self.found:
                return
            before = len(self.short)
            self.near(find_leanest(min(self.short, key=lambda pair: pair[1].least)[0]), swap=True)
            if len(self.short) == before:
                return

    def best(self, free: Bound) -> tuple[Problem, Solution]:
        """The cheapest. Its bound is that without a limit: it holds for all sets."""
        if not self.found:
            raise min((error for _, error in self.short), key=lambda error: error.least)
        problem, solution = min(self.found, key=lambda pair: pair[1].seconds)
        binds = free.lower < (1 - self.options.gap) * solution.seconds
        return problem, replace(solution, bound=min(free.lower, solution.seconds), memory_binds=binds)

    def _suiting(self, start: Assignment, swap: bool) -> list[Names]:
        """The fastest set found with which an assignment fits; none where no op may run again.

        Where it fits with none, the one with which it needs least: when too much is run again at once, it is all held
        at once. Beside it then the leanest of those that save few values: with other placements that may be leaner.
        """
        find = FindRecompute(self.space, start, self.options.marked(self.space.graph))
        trial = TrySets(self.space, start, self.options)

        def names(classes: frozenset[int]) -> Names:
            return find.marked | _names(self.space.graph, classes)

        leanest = min(find.cuts(), key=lambda cut: trial.at(names(find.all_but(cut))).nbytes)
        ways = [[names(classes) for classes in sets] for sets in (find.grown(), find.pruned(leanest)) if sets]
        if not any(ways):
            return []
        tried = [self._first_fitting(trial, way) for way in ways]
        best = min([*tried, *map(trial.at, self.known)], key=self._rank)
        for _ in range(CHANGES_TRIED):
            better = self._better(best, trial, map(names, find.beside(best.again)))
            if better is None and swap:
                better = self._better(best, trial, map(names, find.swapped(best.again)))
            if better is None:
                break
            best = better
        fits = best.nbytes <= self.memory_limit
        return [best.again] if fits else [best.again, names(find.all_but(leanest))]

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


def _names(graph: Annotated, classes: frozenset[int]) -> Names:
    return frozenset(op.name for klass in classes for op in graph.classes[klass])
