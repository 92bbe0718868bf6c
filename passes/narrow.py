"""Score the choices of a large space before anything in it is priced exactly, and make smaller spaces of the best.

With prices that no re-layout is below (`passes/floors.py`) message passing bounds every choice from below: those whose
bound is over the cost of a known plan cannot be part of a better one. With prices that re-layouts probably have, the
others are ranked. What is kept is priced exactly and solved like any other space.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stpart_compiler.passes.bound import Model
from stpart_compiler.passes.floors import FloorPrices, LikelyPrices
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions
from stpart_compiler.passes.space import Choices, ParamChoices, Space
from stpart_compiler.passes.uses import Assignment

Array = npt.NDArray[np.float64]

SWEEPS = 60
STALL, STALL_GAIN = 12, 1e-3
"""The sweeps end where so many raise the bound by less than that share of it."""


@dataclass(frozen=True)
class Scores:
    """`lower`: seconds that no assignment can beat. `over[root][i]`: ns by which every assignment with choice i is over
    that. `likely`: the problem at prices that re-layouts probably have."""

    lower: float
    over: dict[int, Array]
    likely: Problem

    def near(self, start: Assignment, most: int, seconds: float) -> tuple[dict[int, list[int]], bool]:
        """The choices per root that are kept, `most` at most, and whether they are all that may be part of a plan of
        less than so many seconds.

        Half of them are best beside the other choices of `start`, the others have the lowest bounds.
        """
        kept: dict[int, list[int]] = {}
        is_complete = True
        for root, over in self.over.items():
            may_pay = over <= (seconds - self.lower) * 1e9 + 1.0
            local = np.array(self.likely.local(root).prices(start), dtype=np.float64)
            best = [np.argsort(np.where(may_pay, by, np.inf), kind="stable") for by in (local, over)]
            chosen = [i for pair in zip(*best, strict=True) for i in pair if may_pay[i]]
            found = list(dict.fromkeys([start[root], *chosen]))[:most]
            is_complete &= len(found) >= may_pay.sum()
            kept[root] = sorted(found)
        return kept, bool(is_complete)


@dataclass(frozen=True)
class ScoreChoices:
    """search space -> scores of its choices. `again`: ops of forward that backward runs again."""

    options: SolverOptions
    again: frozenset[str]

    def apply(self, space: Space) -> Scores:
        build = BuildProblem(self.options, again=self.again, priced_by=FloorPrices)
        model = Model.of(build.apply(space))
        state = model.state()
        lowers = [0.0]
        for sweep in range(SWEEPS):
            decoded = state.sweep()
            lowers.append(max(lowers[-1], state.bound()))
            if sweep > STALL and lowers[-1] - lowers[-STALL] < STALL_GAIN * lowers[-1]:
                break
            model.split_anew(state, decoded, 1 / (2 + sweep / 4))
        likely = replace(build, priced_by=LikelyPrices).apply(space)
        return Scores(state.bound() / 1e9, state.extra(), likely)


def only_choices(space: Space, kept: dict[int, list[int]]) -> Space:
    """The space in which each root has some of its choices, in their order."""
    params = [ParamChoices(p.names, p.value, [p.layouts[i] for i in kept[-1 - n]]) for n, p in enumerate(space.params)]
    new = {root: {old: i for i, old in enumerate(ids)} for root, ids in kept.items()}
    choices = [_some(found, new[found.root]) for found in space.choices]
    return replace(space, choices=choices, params=params, widest=space.widest or space)


def _some(found: Choices, new: dict[int, int]) -> Choices:
    members = [[new[i] for i in ids if i in new] for ids in found.members]
    used = [s for s, ids in enumerate(members) if ids]
    return found.picked(used, found.root, [members[s] for s in used])
