"""Which op classes run again in backward, chosen by CP-SAT: for given placements, or together with them.

One boolean per op class of forward that may run again, beside the choices of placements (`again_root`): with its
seconds by the strategy chosen, its re-layouts, and in memory what is saved, made anew and read for it
(`passes/optional.py`). Layers are tied. The order is that in which all of them run again but for a *cut*, classes that
all later ones are made of (the residual stream that enters a layer): without one, all of forward would run again before
backward begins.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property

from stpart_compiler.passes import recompute
from stpart_compiler.passes.peak import TrySets, only_chosen
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions, memory_bytes
from stpart_compiler.passes.recompute import FindCuts, MayAgain
from stpart_compiler.passes.solve import SolveFew, find_leaner
from stpart_compiler.passes.space import Space, again_root
from stpart_compiler.passes.uses import Assignment

Names = frozenset[str]
"""Ops of forward that run again."""

SET_GAP, SET_S = 0.003, 3.0
"""Relative distance to the best set of given placements at which its search stops, and seconds for it."""

CHANGES_TRIED = 4
"""Where nothing fits, how often a cut is replaced by the best near it."""

ROOM_ROUNDS = 4
"""How often a set is chosen anew with less room, where in its own order it needs more than in that of all sets."""


def with_flags(space: Space, choice: Assignment, optional: frozenset[int], again: frozenset[int]) -> Assignment:
    """An assignment in which of the `optional` op classes those in `again` run again."""
    return choice | {again_root(space, klass): int(klass in again) for klass in optional}


def without_flags(space: Space, choice: Assignment) -> Assignment:
    """The placements of an assignment."""
    return {root: i for root, i in choice.items() if root < len(space.choices)}


def runs_again(space: Space, choice: Assignment, optional: frozenset[int]) -> frozenset[int]:
    """Which of the `optional` op classes run again."""
    return frozenset(klass for klass in optional if choice[again_root(space, klass)])


def may_again(space: Space, options: SolverOptions) -> MayAgain:
    """What may run again, and what the user wants to."""
    return recompute.may_again(space.graph, options.marked(space.graph))


def names_again(may: MayAgain, space: Space, choice: Assignment, optional: frozenset[int]) -> Names:
    """The ops that really run again where the `optional` op classes do as an assignment says."""
    return may.names(may.needed(runs_again(space, choice, optional)))


@dataclass(frozen=True)
class Suiting:
    """search space, placements -> the ops to run again that suit them."""

    space: Space
    choice: Assignment
    options: SolverOptions
    fastest: dict[int, Names | None] = field(default_factory=dict)

    @cached_property
    def may(self) -> MayAgain:
        return may_again(self.space, self.options)

    @cached_property
    def trial(self) -> TrySets:
        return TrySets(self.space, self.choice, self.options)

    @cached_property
    def cuts(self) -> list[frozenset[int]]:
        """What to save so that little is needed if all else runs again."""
        return FindCuts(self.may).apply(self.space, self.choice)

    @cached_property
    def most(self) -> frozenset[int]:
        """What runs again where no more than the best of the cuts is saved."""
        return self.may.all_but(self._best_cut) if self.cuts else frozenset()

    @cached_property
    def _best_cut(self) -> frozenset[int]:
        return min(self.cuts, key=self._bytes)

    @cached_property
    def problem(self) -> Problem:
        """That of the sets alone: every other root has one choice."""
        optional = self.most - self.may.always
        build = BuildProblem(self.options, again=self.all_but_a_cut, optional=optional)
        return build.apply(only_chosen(self.space, self.choice))

    @cached_property
    def all_but_a_cut(self) -> Names:
        """The ops that run again where no more than the best of the cuts is saved."""
        return self.may.names(self.most)

    @cached_property
    def leanest(self) -> Names:
        """The ops to run again with which the placements need least, of those found."""
        chosen = find_leaner(self.problem, self._all_again(), replace(self.options, time_limit_s=SET_S))
        starts = [self._best_cut, self.cuts[-1]] if self.cuts else []
        sets = [self.may.names(self.may.all_but(self._leaner(cut))) for cut in starts]
        return min([*sets, self._names(chosen)], key=lambda again: self.trial.at(again).nbytes)

    def _leaner(self, cut: frozenset[int]) -> frozenset[int]:
        """A cut near this one with which less is needed, as far as there are such."""
        find = FindCuts(self.may)
        for _ in range(CHANGES_TRIED):
            better = min(find.beside(self.space, self.choice, cut), key=self._bytes, default=cut)
            if self._bytes(better) >= self._bytes(cut):
                return cut
            cut = better
        return cut

    def _bytes(self, cut: AbstractSet[int]) -> int:
        """What is needed if no more than a cut is saved."""
        return self.trial.at(self.may.names(self.may.all_but(cut))).nbytes

    def within(self, limit: int) -> Names | None:
        """The fastest ops to run again with which the placements fit in `limit` bytes; None: none was found."""
        if limit not in self.fastest:
            self.fastest[limit] = self._within(limit)
        return self.fastest[limit]

    def _within(self, limit: int) -> Names | None:
        options = replace(self.options, gap=SET_GAP, time_limit_s=SET_S)
        room = limit
        hint = self._all_again()
        for _ in range(ROOM_ROUNDS):
            if memory_bytes(self.problem, hint) > room:
                break
            chosen = SolveFew(options, room).apply(self.problem, hint)
            if chosen is None:
                break
            again = self._names(chosen)
            over = self.trial.at(again).nbytes - limit
            if over <= 0:
                return again
            room = memory_bytes(self.problem, chosen) - over
        return self.all_but_a_cut if self.trial.at(self.all_but_a_cut).nbytes <= limit else None

    def _all_again(self) -> Assignment:
        optional = self.problem.optional
        placed = dict.fromkeys(self.problem.roots, 0)
        return with_flags(self.space, placed, optional, optional)

    def _names(self, choice: Assignment) -> Names:
        return names_again(self.may, self.space, choice, self.problem.optional)


def together(
    space: Space, options: SolverOptions, most: frozenset[int], again: frozenset[int], choice: Assignment
) -> tuple[Problem, Assignment]:
    """The problem of placements and of what runs again at once, and an assignment of it.

    `most`: op classes that may run again, such that the order is near that of every part of them; `again`: those that
    do with the placements `choice`.
    """
    may = may_again(space, options)
    optional = (most | again) - may.always
    problem = BuildProblem(options, again=may.names(optional), optional=optional).apply(space)
    return problem, with_flags(space, choice, optional, again)


def any_set(space: Space, options: SolverOptions) -> Problem:
    """A problem whose bound holds whatever runs again, and whatever the placements.

    Memory is counted in forward alone, whose order is the same with every set: there what is read only by what runs
    again is held only if that does, and all else of backward's values if they are saved.
    """
    may = may_again(space, options)
    optional = may.classes - may.always
    return BuildProblem(options, again=may.names(optional), optional=optional, only_forward=True).apply(space)
