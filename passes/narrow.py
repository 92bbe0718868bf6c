"""Smaller spaces of the best choices of a large one.

What is kept is priced exactly and solved like any other space.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from stpart_compiler.passes.problem import Problem
from stpart_compiler.passes.space import Choices, ParamChoices, Space
from stpart_compiler.passes.tighten import Tight
from stpart_compiler.passes.uses import Assignment


def near(
    tight: Tight, problem: Problem, start: Assignment, most: int, seconds: float
) -> tuple[dict[int, list[int]], bool]:
    """The choices per root that are kept, `most` at most, and whether they are all that may be part of a plan of less
    than so many seconds.

    Half of them are best beside the other choices of `start`, the others have the lowest bounds.
    """
    kept: dict[int, list[int]] = {}
    is_complete = True
    for root, over in tight.over.items():
        may_pay = over <= (seconds - tight.lower) * 1e9 + 1.0
        local = np.array(problem.local(root).prices(start), dtype=np.float64)
        best = [np.argsort(np.where(may_pay, by, np.inf), kind="stable") for by in (local, over)]
        chosen = [i for pair in zip(*best, strict=True) for i in pair if may_pay[i]]
        found = list(dict.fromkeys([start[root], *map(int, chosen)]))[:most]
        is_complete &= len(found) >= may_pay.sum()
        kept[root] = sorted(found)
    return kept, bool(is_complete)


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
