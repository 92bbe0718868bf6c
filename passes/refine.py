"""A better plan on a finer mesh: the same ranks over more axes, starting from a plan on fewer.

On three axes a space cut stands beside a 2-D temporal map of two axes (PrimePar's {K, P2x2}), and a space has tens of
thousands of choices. The plan on the coarse mesh is written in the axes of the fine one and improved round by round: of
each op the choices that look best around the plan are priced exactly and solved for. Every round ends with a plan at
least as good as it started with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stpart_compiler.ir.layout import Atom, Digit, Layout, form
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.make_plan import written_plan
from stpart_compiler.passes.narrow import ScoreChoices, Scores, only_choices
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions, memory_bytes
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.solve import InfeasibleError, Solution, Solve
from stpart_compiler.passes.space import BuildSpace, Costs, Restriction, Space
from stpart_compiler.passes.strategies import space_on
from stpart_compiler.passes.templates import whole_layouts
from stpart_compiler.passes.uses import Assignment

Progress = Callable[[str], None]

FIRST_CHOICES, MOST_CHOICES, MOST_ROUNDS = 16, 32, 6
"""Choices per op that are priced exactly: twice as many once a round gains less than LEAST_GAIN."""

LEAST_GAIN = 0.005

FILL_ROUNDS = 3


@dataclass(frozen=True)
class RefinePlan:
    """annotated ops, plan on a coarse mesh -> a faster plan on `costs.mesh`, or the same one, with a bound for both.

    `memory_limit`: bytes per rank by the solver's estimate. The ops that the coarse plan runs again are run again.
    """

    costs: Costs
    options: SolverOptions
    memory_limit: int
    whole_parameters: bool = False

    def apply(self, graph: Annotated, coarse: Plan, progress: Progress = lambda text: None) -> Plan:
        mesh = self.costs.mesh
        restriction = Restriction(layouts=whole_layouts if self.whole_parameters else None)
        again = self.options.marked(graph) | frozenset(coarse.recompute)
        space = BuildSpace(self.costs, space_on(mesh)).apply(graph, restriction)
        scores = ScoreChoices(self.options, again).apply(space)
        lower = min(scores.lower, coarse.bound_seconds)
        unchanged = replace(coarse, bound_seconds=lower)
        if lower >= (1 - self.options.gap) * coarse.seconds:
            return unchanged
        current = start_of(space, coarse, scores)
        best: tuple[Space, Problem, Solution] | None = None
        seconds = float("inf")
        most = FIRST_CHOICES
        for _ in range(MOST_ROUNDS):
            kept, is_complete = scores.near(current, most, min(seconds, coarse.seconds))
            found = self._solved(only_choices(space, kept), again, _inside(kept, current), progress)
            if found is None:
                return unchanged
            gain = 1 - found[2].seconds / seconds
            if gain > 0:
                best, seconds = found, found[2].seconds
                current = {root: kept[root][i] for root, i in found[2].choice.items()}
            progress(f"{mesh}: {seconds * 1e3:.3f} ms with {most} choices an op")
            most *= 1 if gain >= LEAST_GAIN else 2
            if most > MOST_CHOICES or is_complete or scores.lower >= (1 - self.options.gap) * seconds:
                break
        if best is None or seconds >= coarse.seconds:
            return unchanged
        solution = replace(best[2], bound=min(lower, seconds))
        return written_plan(graph, best[0], best[1], solution, None, coarse.yardsticks, self.options)

    def _solved(
        self, space: Space, again: frozenset[str], hint: Assignment, progress: Progress
    ) -> tuple[Space, Problem, Solution] | None:
        problem = BuildProblem(self.options, again=again).apply(space)
        fits = memory_bytes(problem, hint) <= self.memory_limit
        try:
            solution = Solve(self.options, self.memory_limit).apply(problem, hint if fits else None, progress)
        except InfeasibleError:
            return None
        return space, problem, solution


def _inside(kept: Mapping[int, list[int]], choice: Assignment) -> Assignment:
    return {root: ids.index(choice[root]) for root, ids in kept.items()}


def start_of(space: Space, coarse: Plan, scores: Scores) -> Assignment:
    """The coarse plan as an assignment of the space. What has no counterpart there is chosen to suit the rest."""
    parts = axis_parts(coarse.mesh, space.mesh)
    found: Assignment = {root: min(range(n), key=scores.likely.own[root].__getitem__) for root, n in _roots(scores)}
    missing = []
    for root in found:
        index = _index_in(space, coarse, root, parts)
        if index is None:
            missing.append(root)
        else:
            found[root] = index
    for _ in range(FILL_ROUNDS):
        for root in missing:
            prices = scores.likely.local(root).prices(found)
            found[root] = min(range(len(prices)), key=prices.__getitem__)
    return found


def _roots(scores: Scores) -> list[tuple[int, int]]:
    return list(scores.likely.roots.items())


def _index_in(space: Space, coarse: Plan, root: int, parts: dict[str, tuple[tuple[str, int], ...]]) -> int | None:
    if root < 0:
        params = space.params[-1 - root]
        layout = lifted_layout(coarse.params[params.names[0]], parts)
        return params.layouts.index(layout) if layout in params.layouts else None
    choices = space.choices[root]
    strategy = lifted_strategy(coarse.strategies[choices.op.name], parts)
    return choices.strategies.index(strategy) if strategy in choices.strategies else None


def axis_parts(coarse: Mesh, fine: Mesh) -> dict[str, tuple[tuple[str, int], ...]]:
    """Per axis of the coarse mesh the axes of the fine one that make it up, with their sizes, major to minor."""
    left = [(axis, fine.size[axis]) for axis in fine.axes]
    parts: dict[str, tuple[tuple[str, int], ...]] = {}
    for axis in coarse.axes:
        taken: list[tuple[str, int]] = []
        size = 1
        while size < coarse.size[axis]:
            taken.append(left.pop(0))
            size *= taken[-1][1]
        assert size == coarse.size[axis], f"axis {axis} of {coarse} is not made of axes of {fine}"
        parts[axis] = tuple(part for part in taken if part[1] > 1)
    return parts


def _lifted(digits: tuple[Digit, ...], parts: dict[str, tuple[tuple[str, int], ...]]) -> tuple[Digit, ...] | None:
    """Digits of the coarse axes in the fine ones; None where one has no counterpart."""
    out: list[Digit] = []
    for digit in digits:
        if all(len(parts[axis]) == 1 for axis, _ in digit.coeffs):
            coeffs = {parts[axis][0][0]: coeff for axis, coeff in digit.coeffs}
            out.append(form(digit.q, digit.tau, digit.offset, **coeffs))
        elif len(digit.coeffs) > 1 or digit.coeffs[0][1] != 1 or digit.tau or digit.offset:
            return None
        else:
            out += [form(size, **{axis: 1}) for axis, size in parts[digit.coeffs[0][0]]]
    return tuple(out)


def lifted_strategy(strategy: Strategy, parts: dict[str, tuple[tuple[str, int], ...]]) -> Strategy | None:
    """The strategy on a finer mesh; None where it has no counterpart there."""
    digits = [_lifted(cut, parts) for cut in strategy.digits]
    pending = _lifted(strategy.pending, parts)
    if pending is None or any(cut is None for cut in digits):
        return None
    return Strategy(tuple(cut for cut in digits if cut is not None), strategy.steps, strategy.linear, pending)


def lifted_layout(layout: Layout, parts: dict[str, tuple[tuple[str, int], ...]]) -> Layout | None:
    """The layout of a value at rest on a finer mesh; None where it has no counterpart there."""
    dims: list[tuple[Atom, ...]] = []
    for atoms in layout.dims:
        cuts = [_lifted(atom.digits, parts) for atom in atoms]
        if any(cut is None for cut in cuts):
            return None
        dims.append(tuple(Atom(atom.size, cut or ()) for atom, cut in zip(atoms, cuts, strict=True)))
    return Layout(tuple(dims))
