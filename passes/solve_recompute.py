"""Choose placements under a memory bound together with what of forward is run again in backward.

Where what is cheapest without a limit does not fit, message passing gives a few placements to start from, and for each
the set of ops to run again that suits it is chosen. Where one of these plans is near enough to the bound that holds for
all sets, that is all. Else placements and sets are chosen in turn, from the best of them: the placements that are best
with a set, whose own order gives exact points and prices, then the set for these, and so on while that pays; then both
at once. A set found so is always solved for in its own order in the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from stpart_compiler.passes.bound import Bound, FindBound, find_leanest
from stpart_compiler.passes.choose_again import (
    Names,
    Suiting,
    any_set,
    may_again,
    names_again,
    together,
    with_flags,
    without_flags,
)
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions, evaluate, memory_bytes
from stpart_compiler.passes.solve import SHORT_SWEEPS, InfeasibleError, Solution, Solve
from stpart_compiler.passes.space import Space
from stpart_compiler.passes.uses import Assignment

Progress = Callable[[str], None]

TURNS = 3
"""How often the set for some placements, and placements for that set, are chosen from one start."""

TURN_GAIN = 0.002
"""What a turn must gain for another one."""

STARTS = 2
"""With how many placements sets and placements are chosen in turn."""

TIGHTER = (0.8, 0.5)
"""Parts of the memory limit: placements that are good with them leave room to save more."""

MOST_TOGETHER = 500
"""Choices of placements with which both are chosen at once: with more that takes long, and gained 0.2 % at most."""

LEAST_S = 1.0
"""All sets and memory limits together get the solver's time limit, and what is solved after that so many seconds."""

LEAN_TURNS = 3
"""How often, where nothing fits, leaner placements are sought for the leanest set, and a leaner set for those."""

Fixed = tuple[tuple[int, int], ...]
"""An assignment as a key."""

Key = TypeVar("Key")
Made = TypeVar("Made")


@dataclass
class Sets:
    """What was worked out for one space and holds under any memory limit; by ops run again, or by assignment."""

    problems: dict[Names, Problem] = field(default_factory=dict)
    leanest: dict[Names, Assignment] = field(default_factory=dict)
    suiting: dict[Fixed, Suiting] = field(default_factory=dict)
    free: Bound | None = None
    any_set: Problem | None = None
    bounds: dict[int, Bound] = field(default_factory=dict)
    spent_s: float = 0.0
    last_best: Names | None = None


def free_bound(problem: Problem, sets: Sets) -> Bound:
    """Seconds that nothing beats, whatever memory it needs, and placements near to that, from a short search."""
    if sets.free is None:
        sets.free = FindBound(sweeps=SHORT_SWEEPS, gap=problem.options.gap / 4).apply(problem)
    return sets.free


def bound_within(space: Space, options: SolverOptions, limit: int, sets: Sets, hint: Assignment | None = None) -> Bound:
    """Seconds that nothing beats within `limit` bytes, whatever runs again, and placements near to that."""
    if sets.any_set is None:
        sets.any_set = any_set(space, options)
    if limit not in sets.bounds:
        flagged = sets.any_set
        flags = None if hint is None else with_flags(space, hint, flagged.optional, frozenset())
        sets.bounds[limit] = FindBound(limit).apply(flagged, flags)
    return sets.bounds[limit]


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
        free = free_bound(problem, self.sets).nearest
        if memory_bytes(problem, free) <= self.memory_limit:
            first = search.solve(problem, cheaper(problem, free, hint))
            if first is not None and not first.memory_binds:
                return problem, first
        self.sets.problems.setdefault(problem.again, problem)
        search.lower = bound_within(space, self.options, self.memory_limit, self.sets, hint)
        if search.is_late:
            search.those_known()
            if search.found:
                return search.best()
        search.from_starts()
        if not search.found:
            search.hopeless(problem, hint)
        search.together()
        return search.best()


def cheaper(problem: Problem, one: Assignment, other: Assignment | None) -> Assignment:
    """The cheaper of two assignments that fit, if there are two."""
    return one if other is None else min(one, other, key=lambda choice: evaluate(problem, choice))


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
    lower: Bound = field(init=False)  # holds for all sets

    def solve(self, problem: Problem, hint: Assignment | None) -> Solution | None:
        """The cheapest assignment of one problem; None where none fits."""
        self.known.add(problem.again)
        lean = self.sets.leanest.get(problem.again)
        if lean is not None and (hint is None or memory_bytes(problem, hint) > self.memory_limit):
            hint = lean
        began = time.perf_counter()
        try:
            solution = Solve(self._limited(), self.memory_limit).apply(problem, hint, self.progress)
        except InfeasibleError as error:
            self.short.append((problem, error))
            if error.choice is not None:
                self.sets.leanest[problem.again] = error.choice
            return None
        finally:
            self.sets.spent_s += time.perf_counter() - began
        self.found.append((problem, solution))
        return solution

    def _limited(self) -> SolverOptions:
        left = max(LEAST_S, self.options.time_limit_s - self.sets.spent_s)
        return replace(self.options, time_limit_s=min(self.options.time_limit_s, left))

    def from_starts(self) -> None:
        """Look at placements until one is near enough to the bound, else solve from the most promising of them."""
        ranks: dict[Fixed, tuple[int, float]] = {}
        for start in self._starts():
            ranks[_fixed(start)] = self._rank(start)
            if self._take(start) and self.is_near:
                return
        for fixed in sorted(ranks, key=ranks.__getitem__)[:STARTS]:
            self.near(dict(fixed))
            if self.is_near:
                return

    def _starts(self) -> Iterator[Assignment]:
        """Placements to begin with, each worked out when asked for."""
        near = without_flags(self.space, self.lower.nearest)
        yield self._tighter(TIGHTER[0])
        yield self._jointly(near)
        yield near
        yield self._tighter(TIGHTER[1])

    def _tighter(self, part: float) -> Assignment:
        assert self.sets.any_set is not None
        bound = FindBound(round(part * self.memory_limit), SHORT_SWEEPS).apply(self.sets.any_set)
        return without_flags(self.space, bound.nearest)

    def _jointly(self, start: Assignment) -> Assignment:
        """What message passing finds with memory counted in backward too, in the order of one start."""
        most = self._suiting_of(start).most
        flagged, hint = together(self.space, self.options, most, most, start)
        return without_flags(self.space, FindBound(self.memory_limit, SHORT_SWEEPS).apply(flagged, hint).nearest)

    def _rank(self, start: Assignment) -> tuple[int, float]:
        """Bytes over the limit, and seconds, with the set that suits."""
        tried = self._suiting_of(start).trial.at(self._suiting(start))
        return max(0, tried.nbytes - self.memory_limit), tried.seconds

    def _take(self, start: Assignment) -> bool:
        """Note placements with the set that suits them as a plan, if they fit and are near enough to the bound."""
        over, seconds = self._rank(start)
        if over or not self._near(seconds):
            return False
        problem = self._problem(self._suiting(start))
        seconds = evaluate(problem, start)
        lower = self.lower.lower
        self.found.append((problem, Solution(start, seconds, min(lower, seconds), "BOUNDED", self.sets.spent_s)))
        return True

    def _near(self, seconds: float) -> bool:
        return self.lower.lower >= (1 - self.options.gap) * seconds

    @property
    def is_near(self) -> bool:
        """Whether a plan was found that is within the wanted gap of all."""
        return any(self._near(solution.seconds) for _, solution in self.found)

    def near(self, start: Assignment, *, lean: bool = False) -> None:
        """Solve with the set that suits an assignment, and with the one that suits what that gives.

        `lean`: where it fits with none, with the one with which it needs least, which takes longer to find.
        """
        seconds = float("inf")
        for _ in range(TURNS):
            again = self._suiting(start, lean)
            if again in self.known:
                return
            solution = self._solve_again(again, start)
            if solution is None or self.is_near or solution.seconds > (1 - TURN_GAIN) * seconds:
                return
            start, seconds = solution.choice, solution.seconds

    def _suiting(self, start: Assignment, lean: bool = False) -> Names:
        """The fastest set found with which an assignment fits; where it fits with none, one that needs little."""
        suiting = self._suiting_of(start)
        return suiting.within(self.memory_limit) or (suiting.leanest if lean else suiting.all_but_a_cut)

    def _suiting_of(self, start: Assignment) -> Suiting:
        return _kept(self.sets.suiting, _fixed(start), lambda: Suiting(self.space, start, self.options))

    def _problem(self, again: Names) -> Problem:
        build = BuildProblem(self.options, again=again)
        return _kept(self.sets.problems, again, lambda: build.apply(self.space))

    def _solve_again(self, again: Names, start: Assignment) -> Solution | None:
        self.progress(f"memory is short: solving with {len(again)} ops run again in backward")
        return self.solve(self._problem(again), start)

    def together(self) -> None:
        """From the best so far, choose placements and what runs again at once, where there are few enough choices."""
        if (
            self.is_near
            or not self.found
            or sum(self.found[0][0].roots.values()) > MOST_TOGETHER
            or self.sets.spent_s >= self.options.time_limit_s
        ):
            return
        problem, solution = min(self.found, key=lambda pair: pair[1].seconds)
        self.progress("memory is short: solving for placements and what is run again at once")
        most = self.sets.suiting[min(self.sets.suiting)].most
        flagged, hint = together(self.space, self.options, most, problem.again_classes, solution.choice)
        began = time.perf_counter()
        try:
            chosen = Solve(self._limited(), self.memory_limit).apply(flagged, hint, self.progress).choice
        except InfeasibleError:
            return
        finally:
            self.sets.spent_s += time.perf_counter() - began
        may = may_again(self.space, self.options)
        again = names_again(may, self.space, chosen, flagged.optional)
        if (again, without_flags(self.space, chosen)) != (problem.again, solution.choice):
            self._solve_again(again, without_flags(self.space, chosen))

    def hopeless(self, problem: Problem, hint: Assignment | None) -> None:
        """Where no start fits: nothing run again, the sets known, and leaner and leaner ones."""
        if problem.again not in self.known:
            self.solve(problem, hint)
        if not self.found:
            self.those_known()
        self.leaner()

    def leaner(self) -> None:
        """While nothing fits, go on from the leanest problem's leanest assignment."""
        for _ in range(LEAN_TURNS):
            if self.found:
                return
            before = len(self.short)
            self.near(self.leanest(min(self.short, key=lambda pair: pair[1].least)[0]), lean=True)
            if len(self.short) == before:
                return

    @property
    def is_late(self) -> bool:
        """Whether sets were sought under another limit, and what all sets and limits get together is spent."""
        return bool(self.sets.suiting) and self.sets.spent_s >= self.options.time_limit_s

    def those_known(self) -> None:
        """Solve with the set that was best under the last limit, and with the one with which least is needed.

        So what was named as the least under one limit is found again under another one.
        """
        problems = self.sets.problems
        leanest = min(problems, key=lambda again: memory_bytes(problems[again], self.leanest(problems[again])))
        for again in (self.sets.last_best, leanest):
            if again is not None and again not in self.known:
                self._solve_again(again, self.leanest(problems[again]))

    def leanest(self, problem: Problem) -> Assignment:
        """An assignment of a problem that needs little."""
        return _kept(self.sets.leanest, problem.again, lambda: find_leanest(problem))

    def best(self) -> tuple[Problem, Solution]:
        """The cheapest. Its bound is the one that holds for all sets."""
        if not self.found:
            raise min((error for _, error in self.short), key=lambda error: error.least)
        problem, solution = min(self.found, key=lambda pair: pair[1].seconds)
        self.sets.last_best = problem.again
        bound = self.lower
        binds = bound.free < (1 - self.options.gap) * solution.seconds
        return problem, replace(solution, bound=min(bound.lower, solution.seconds), memory_binds=binds)


def _fixed(choice: Assignment) -> Fixed:
    return tuple(sorted(choice.items()))


def _kept(known: dict[Key, Made], key: Key, make: Callable[[], Made]) -> Made:
    """What is known, or is made now and kept."""
    if key not in known:
        known[key] = make()
    return known[key]
