"""A better plan on a finer mesh: the same ranks over more axes, starting from a plan on fewer.

On three axes a space cut stands beside a 2-D temporal map of two axes (PrimePar's {K, P2x2}), and a space has tens of
thousands of choices. First a bound is found (`passes/tighten.py`): where it shows that nothing there is faster by more
than the gap, the plan stays. Else the plan on the coarse mesh is written in the axes of the fine one and improved round
by round: of each op the choices that look best around the plan are priced exactly and solved for. Every round ends with
a plan at least as good as it started with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from stpart_compiler.ir.layout import Atom, Digit, Layout, form
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.plan import Plan
from stpart_compiler.ir.spacetime import Strategy
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.floors import FloorPrices
from stpart_compiler.passes.make_plan import written_plan
from stpart_compiler.passes.narrow import near, only_choices
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions, memory_bytes
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.solve import InfeasibleError, Solution, Solve
from stpart_compiler.passes.space import BuildSpace, Restriction, Space
from stpart_compiler.passes.strategies import space_on
from stpart_compiler.passes.templates import whole_layouts
from stpart_compiler.passes.tighten import Tight, Tighten
from stpart_compiler.passes.uses import Assignment

Progress = Callable[[str], None]

FIRST_CHOICES, MOST_CHOICES, MOST_ROUNDS = 16, 32, 6
"""Choices per op that are priced exactly: twice as many once a round gains less than LEAST_GAIN."""

LEAST_GAIN = 0.005

FILL_ROUNDS = 3

TIMES_LIMIT, BOUND_SHARE = 10.0, 0.8
"""How much longer than CP-SAT refining may take, and which part of that its bound."""

LEAST_S = 1.0


class _Watch:
    """How long something takes. `allowed`: seconds."""

    def __init__(self, allowed: float) -> None:
        self.start = time.perf_counter()
        self.allowed = allowed

    def passed(self) -> float:
        return time.perf_counter() - self.start

    def left(self) -> float:
        return self.allowed - self.passed()

    def part(self) -> float:
        """Of the time that is allowed."""
        return self.passed() / self.allowed


@dataclass(frozen=True)
class RefinePlan:
    """annotated ops, plan on a coarse mesh -> a faster plan on `costs.mesh`, or the same one, with a bound for both.

    `memory_limit`: bytes per rank by the solver's estimate. The ops that the coarse plan runs again are run again.
    Takes about ten times the solver's time limit at most, of which what is found by then is returned.
    """

    costs: Costs
    options: SolverOptions
    memory_limit: int
    whole_parameters: bool = False

    def apply(self, graph: Annotated, coarse: Plan, progress: Progress = lambda text: None) -> Plan:
        watch = _Watch(TIMES_LIMIT * self.options.time_limit_s)
        mesh = self.costs.mesh
        restriction = Restriction(layouts=whole_layouts if self.whole_parameters else None)
        again = self.options.marked(graph) | frozenset(coarse.recompute)
        space = BuildSpace(self.costs, space_on(mesh)).apply(graph, restriction)
        problem = BuildProblem(self.options, again=again, priced_by=FloorPrices).apply(space)

        def say(lower: float, seconds: float = coarse.seconds) -> None:
            gap = max(0.0, 1 - lower / seconds)
            progress(f"{mesh}: {seconds * 1e3:.3f} ms, within {100 * gap:.1f} % of the bound, {watch.passed():.0f} s")

        tighten = Tighten(self.options.gap, coarse.seconds, lambda: watch.part() > BOUND_SHARE)
        tight = tighten.apply(problem, say)
        lower = min(tight.lower, coarse.bound_seconds)
        unchanged = replace(coarse, bound_seconds=lower)
        if lower >= (1 - self.options.gap) * coarse.seconds:
            return unchanged
        current = start_of(problem, coarse, tight)
        best: tuple[Space, Problem, Solution] | None = None
        seconds = float("inf")
        most = FIRST_CHOICES
        for _ in range(MOST_ROUNDS):
            kept, is_complete = near(tight, problem, current, most, min(seconds, coarse.seconds))
            found = self._solved(only_choices(space, kept), again, _inside(kept, current), progress, watch)
            if found is None:
                break
            gain = 1 - found[2].seconds / seconds
            if gain > 0:
                best, seconds = found, found[2].seconds
                current = {root: kept[root][i] for root, i in found[2].choice.items()}
            say(lower, min(seconds, coarse.seconds))
            most *= 1 if gain >= LEAST_GAIN else 2
            is_done = most > MOST_CHOICES or is_complete or tight.lower >= (1 - self.options.gap) * seconds
            if is_done or watch.part() > 1:
                break
        if best is None or seconds >= coarse.seconds:
            return unchanged
        solution = replace(best[2], bound=min(lower, seconds))
        return written_plan(graph, best[0], best[1], solution, None, coarse.yardsticks, self.options)

    def _solved(
        self, space: Space, again: frozenset[str], hint: Assignment, progress: Progress, watch: _Watch
    ) -> tuple[Space, Problem, Solution] | None:
        problem = BuildProblem(self.options, again=again).apply(space)
        fits = memory_bytes(problem, hint) <= self.memory_limit
        options = replace(self.options, time_limit_s=min(self.options.time_limit_s, max(LEAST_S, watch.left())))
        try:
            solution = Solve(options, self.memory_limit).apply(problem, hint if fits else None, progress)
        except InfeasibleError:
            return None
        return space, problem, solution


def _inside(kept: Mapping[int, list[int]], choice: Assignment) -> Assignment:
    return {root: ids.index(choice[root]) for root, ids in kept.items()}


def start_of(problem: Problem, coarse: Plan, tight: Tight) -> Assignment:
    """The coarse plan as an assignment of the space. What has no counterpart there is chosen to suit the rest; where
    what the bound has met is better than the plan, that.
    """
    if tight.seconds <= coarse.seconds:
        return tight.choice
    space = problem.space
    parts = axis_parts(coarse.mesh, space.mesh)
    found: Assignment = dict(tight.choice)
    lifted = {root: _index_in(space, coarse, root, parts) for root in found} if parts else {}
    missing = [root for root in found if lifted.get(root) is None]
    found |= {root: index for root, index in lifted.items() if index is not None}
    for _ in range(FILL_ROUNDS):
        for root in missing:
            prices = problem.local(root).prices(found)
            found[root] = min(range(len(prices)), key=prices.__getitem__)
    return found


def _index_in(space: Space, coarse: Plan, root: int, parts: dict[str, tuple[tuple[str, int], ...]]) -> int | None:
    if root < 0:
        params = space.params[-1 - root]
        layout = lifted_layout(coarse.params[params.names[0]], parts)
        return params.layouts.index(layout) if layout in params.layouts else None
    choices = space.choices[root]
    strategy = lifted_strategy(coarse.strategies[choices.op.name], parts)
    return choices.strategies.index(strategy) if strategy in choices.strategies else None


def axis_parts(coarse: Mesh, fine: Mesh) -> dict[str, tuple[tuple[str, int], ...]] | None:
    """Per axis of the coarse mesh the axes of the fine one that make it up, with their sizes, major to minor. None: an
    axis of the fine one lies in two of the coarse one."""
    left = [(axis, fine.size[axis]) for axis in fine.axes]
    parts: dict[str, tuple[tuple[str, int], ...]] = {}
    for axis in coarse.axes:
        taken: list[tuple[str, int]] = []
        size = 1
        while size < coarse.size[axis]:
            taken.append(left.pop(0))
            size *= taken[-1][1]
        if size != coarse.size[axis]:
            return None
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
