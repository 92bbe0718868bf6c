"""From annotated ops to a plan: templates as yardsticks and first hints, then the whole space.

Where the cheapest plan does not fit, hardly a template does: they are then priced after the plan was found, with what
it runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.plan import Plan
from stpart_compiler.passes.bound import find_leanest, find_least
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.narrow import only_choices
from stpart_compiler.passes.plan_rows import plan_rows
from stpart_compiler.passes.problem import BuildProblem, Problem, SolverOptions, evaluate, memory_bytes
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.solve import InfeasibleError, Solution, Solve
from stpart_compiler.passes.solve_recompute import Sets, SolveRecompute, bound_within, free_bound
from stpart_compiler.passes.space import BuildSpace, Choices, Restriction, Space, strategy_of
from stpart_compiler.passes.strategies import space_on
from stpart_compiler.passes.templates import TEMPLATES, Template, template, whole_layouts
from stpart_compiler.passes.uses import Assignment

Progress = Callable[[str], None]

TEMPLATE_PATIENCE_S = 0.5
TEMPLATE_GAP = 0.05
"""A template is a yardstick and a first hint: its own best is not worth a long search."""

SPATIAL_ONLY = "best spatial-only"
"""Name of the yardstick that is the solver itself with temporal maps switched off."""

Found = tuple[Space, Problem, Solution]


@dataclass(frozen=True)
class Screened:
    """What a short search on a mesh found, whatever memory it takes: seconds no plan can beat, and those of a plan.

    `nbytes`: what that plan needs per rank; a look at memory takes as long as the search, so it is made when asked for.
    """

    lower: float
    seconds: float
    nbytes: Callable[[], int]


UNKNOWN = Screened(float("inf"), 0.0, lambda: 0)
"""Of a mesh that was not looked at: it may beat any plan, and its bound is that of its own plan."""


@dataclass
class Known:
    """What does not depend on the memory limit, or still holds under a lower one: the whole space, and yardsticks.

    `priced`: the yardsticks of the last plan.
    """

    whole: tuple[Space, Problem] | None = None
    sets: Sets = field(default_factory=Sets)
    yardsticks: dict[str, Found] | None = None
    spatial: dict[str, Found] | None = None
    priced: dict[str, Found] = field(default_factory=dict)


@dataclass(frozen=True)
class MakePlan:
    """annotated ops -> plan. `name`: a template to price as it is, None to solve; `memory_limit`: bytes per rank.

    `known`: shared by passes over one graph whose limit falls.

    Raises:
        InfeasibleError: no plan fits in the memory limit.
        ValueError: the template is unknown or does not apply to the mesh.
    """

    costs: Costs
    options: SolverOptions
    memory_limit: int
    name: str | None = None
    whole_parameters: bool = False
    known: Known = field(default_factory=Known, compare=False, repr=False)

    def apply(self, graph: Annotated, progress: Progress = lambda text: None) -> Plan:
        if self.name is not None:
            space, problem, solution = self._template(graph, template(self.name), self.options.marked(graph))
            return written_plan(graph, space, problem, solution, self.name, {self.name: solution.seconds}, self.options)
        is_short = self._is_short()
        yardsticks = {} if is_short else self._yardsticks(graph, progress)  # first, so that there is a plan soon
        space, problem = self._known_whole(graph)
        hint = self._hint(problem, yardsticks)
        space, problem, solution = self._solved(space, problem, hint, progress, self.known.sets)
        if is_short and self.options.yardsticks:
            yardsticks = self._priced(graph, self._applicable(graph), self.options.marked(graph), progress)
        if self.options.yardsticks:
            yardsticks |= self._priced_again(graph, yardsticks, problem.again, progress)
        yardsticks |= self._spatial(graph, progress)
        self.known.priced = yardsticks
        prices = {name: found[2].seconds for name, found in yardsticks.items()}
        best = min(yardsticks.values(), key=lambda found: found[2].seconds, default=None)
        if best is not None and best[2].seconds < solution.seconds:
            # followers of a sub-space may have a little more freedom: then its plan is the better one
            space, problem, found = best
            bound = min(solution.bound, found.seconds)
            solution = replace(solution, choice=found.choice, seconds=found.seconds, bound=bound)
        if SPATIAL_ONLY in prices and _is_spatial(space, solution.choice):
            prices[SPATIAL_ONLY] = min(prices[SPATIAL_ONLY], solution.seconds)
        return written_plan(graph, space, problem, solution, None, prices, self.options)

    def yardstick(self, graph: Annotated, name: str) -> Plan:
        """The plan of a yardstick that was priced for the last plan of this graph."""
        return written_plan(graph, *self.known.priced[name], None, {}, self.options)

    def _is_short(self) -> bool:
        """Whether what is cheapest is known not to fit."""
        whole, free = self.known.whole, self.known.sets.free
        return whole is not None and free is not None and memory_bytes(whole[1], free.nearest) > self.memory_limit

    def _yardsticks(self, graph: Annotated, progress: Progress) -> dict[str, Found]:
        """Templates that fit, and the best plan without temporal maps; solved once per graph."""
        if self.known.yardsticks is None:
            templates = self._applicable(graph) if self.options.yardsticks else []
            self.known.yardsticks = self._priced(graph, templates, self.options.marked(graph), progress)
        fitting = {name: found for name, found in self.known.yardsticks.items() if self._fits(found)}
        return fitting | self._spatial(graph, progress)

    def _spatial(self, graph: Annotated, progress: Progress) -> dict[str, Found]:
        """The best plan without temporal maps, if it is asked for and fits; solved once per graph."""
        if self.known.spatial is None and self.options.spatial_only:
            self.known.spatial = self._spatial_only(self._known_whole(graph)[0], progress)
        return {name: found for name, found in (self.known.spatial or {}).items() if self._fits(found)}

    def screened(self, graph: Annotated, progress: Progress = lambda text: None) -> Screened:
        """What to expect of this graph and mesh, before templates are priced and anything is solved."""
        _, problem = self._known_whole(graph)
        bound = free_bound(problem, self.known.sets)
        choice = bound.nearest
        seconds = evaluate(problem, choice)
        gap = 100 * max(0.0, 1 - bound.lower / seconds)
        progress(f"on mesh {self.costs.mesh}: {seconds * 1e3:.3f} ms, within {gap:.1f} % of the bound")
        return Screened(bound.lower, seconds, lambda: memory_bytes(problem, choice))

    def lower_within(self, graph: Annotated) -> float:
        """Seconds that no plan within the memory limit beats, whatever runs again: takes longer than `screened`."""
        space, _ = self._known_whole(graph)
        return bound_within(space, self.options, self.memory_limit, self.known.sets).lower

    def priced(self, graph: Annotated, again: frozenset[str], progress: Progress) -> dict[str, float]:
        """Seconds of the templates that fit. `again`: ops that backward runs again where one would not fit else."""
        found = self._priced(graph, self._applicable(graph), self.options.marked(graph), progress)
        found |= self._priced_again(graph, found, again, progress)
        return {name: solution.seconds for name, (_, _, solution) in found.items()}

    def least(self, graph: Annotated) -> int:
        """Bytes per rank that some assignment needs, of those that need little."""
        _, problem = self._whole(graph)
        return memory_bytes(problem, find_leanest(problem))

    def _known_whole(self, graph: Annotated) -> tuple[Space, Problem]:
        if self.known.whole is None:
            self.known.whole = self._whole(graph)
        return self.known.whole

    def _whole(self, graph: Annotated) -> tuple[Space, Problem]:
        """The space without a template's restrictions, and its prices."""
        space = BuildSpace(self.costs).apply(graph, self._restricted(Restriction()))
        return space, BuildProblem(self.options, again=self.options.marked(graph)).apply(space)

    def _solved(self, space: Space, problem: Problem, hint: Assignment | None, progress: Progress, sets: Sets) -> Found:
        """The cheapest assignment found; where memory is short, also with some of forward run again in backward."""
        problem, solution = SolveRecompute(self.options, self.memory_limit, sets).apply(space, problem, hint, progress)
        return space, problem, solution

    def _fits(self, found: Found) -> bool:
        return memory_bytes(found[1], found[2].choice) <= self.memory_limit

    def _template(self, graph: Annotated, chosen: Template, again: frozenset[str]) -> Found:
        """`again`: ops of forward that backward runs again, beside those that the template has it run.

        Raises:
            InfeasibleError: it does not fit.
        """
        again |= chosen.again(graph)
        reason = chosen.applies(self.costs.mesh)
        if reason is not None:
            raise ValueError(f"template {chosen.name!r}: {reason}")
        options = space_on(self.costs.mesh)
        space = BuildSpace(self.costs, options).apply(graph, self._restricted(chosen.restriction))
        problem = BuildProblem(self.options, chosen.weights_stay, again).apply(space)
        if self.name is None and self._is_short() and (least := find_least(problem)[0]) > self.memory_limit:
            raise InfeasibleError(f"template {chosen.name}: does not fit in the memory limit", least)
        quick = replace(self.options, patience_s=TEMPLATE_PATIENCE_S, gap=max(self.options.gap, TEMPLATE_GAP))
        solution = Solve(quick, self.memory_limit, polish_s=0.0).apply(problem)
        if not chosen.weights_stay:
            return space, problem, solution
        # where a weight cannot stay (no layout at rest is the one in use), moving it costs what it costs
        priced = BuildProblem(self.options, again=again).apply(space)
        seconds = evaluate(priced, solution.choice)
        return space, priced, replace(solution, seconds=seconds, bound=min(solution.bound, seconds))

    def _restricted(self, restriction: Restriction) -> Restriction:
        return replace(restriction, layouts=whole_layouts) if self.whole_parameters else restriction

    def _applicable(self, graph: Annotated) -> list[Template]:
        """Every yardstick that applies; on a graph with regions those that are made for it."""
        mesh, fused = self.costs.mesh, is_fused(graph)
        yardsticks = [each for each in TEMPLATES.values() if each.yardstick and each.applies(mesh) is None]
        return [each for each in yardsticks if bool(each.regions) == fused]

    def _priced(
        self, graph: Annotated, templates: Sequence[Template], again: frozenset[str], progress: Progress
    ) -> dict[str, Found]:
        """Those of the templates that fit where so much is run again."""
        found = {}
        for chosen in templates:
            try:
                found[chosen.name] = self._template(graph, chosen, again)
            except InfeasibleError:
                progress(f"template {chosen.name}: does not fit in the memory limit")
                continue
            progress(f"template {chosen.name}: {found[chosen.name][2].seconds * 1e3:.3f} ms")
        return found

    def _priced_again(
        self, graph: Annotated, found: dict[str, Found], again: frozenset[str], progress: Progress
    ) -> dict[str, Found]:
        """Templates where so much more is run again: of those that did not fit, or that memory made slower, what is
        faster than before."""
        if again == self.options.marked(graph):
            return {}
        strained = [
            chosen
            for chosen in self._applicable(graph)
            if chosen.name not in found or found[chosen.name][2].memory_binds
        ]
        priced = self._priced(graph, strained, again, progress)
        return {
            name: other
            for name, other in priced.items()
            if name not in found or other[2].seconds < found[name][2].seconds
        }

    def _spatial_only(self, space: Space, progress: Progress) -> dict[str, Found]:
        """The best plan found in the part of the space without temporal maps, if one fits."""
        progress("solving without temporal maps")
        space = without_temporal(space)
        problem = BuildProblem(self.options, again=self.options.marked(space.graph)).apply(space)
        try:
            found = self._solved(space, problem, None, progress, Sets())
        except InfeasibleError:
            progress(f"{SPATIAL_ONLY}: does not fit in the memory limit")
            return {}
        progress(f"{SPATIAL_ONLY}: {found[2].seconds * 1e3:.3f} ms")
        return {SPATIAL_ONLY: found}

    def _hint(self, problem: Problem, yardsticks: dict[str, Found]) -> Assignment | None:
        """The best of the templates as an assignment of the whole space."""
        best: tuple[float, Assignment] | None = None
        for small, _, solution in yardsticks.values():
            hint = _translated(small, solution.choice, problem.space)
            if hint is None or memory_bytes(problem, hint) > self.memory_limit:
                continue
            seconds = evaluate(problem, hint)
            if best is None or seconds < best[0]:
                best = (seconds, hint)
        return best[1] if best else None


def is_fused(graph: Annotated) -> bool:
    """Whether the graph has regions."""
    return any(isinstance(members[0].call.target, Region) for members in graph.classes)


def without_temporal(space: Space) -> Space:
    """The part of the space in which no op takes several steps, nor a ring inside of it.

    A root that would have no choice left keeps all: an op that is worth cutting at any price may know temporal maps
    alone.
    """
    sizes = {-1 - index: len(params.layouts) for index, params in enumerate(space.params)}
    sizes |= {klass: len(own.strategies) for klass, own in enumerate(space.choices) if own.root == klass}
    timed: dict[int, set[int]] = {root: set() for root in sizes}
    for found in space.choices:
        for s in range(len(found.strategies)):
            if _is_timed(found, s):
                timed[found.root].update(found.members[s])
    kept = {root: [i for i in range(n) if i not in timed[root]] or list(range(n)) for root, n in sizes.items()}
    return only_choices(space, kept)


def _is_timed(found: Choices, s: int) -> bool:
    return found.strategies[s].steps > 1 or found.moved[s] > 0


def _is_spatial(space: Space, choice: Assignment) -> bool:
    chosen = ((found, strategy_of(space, choice, klass)[0]) for klass, found in enumerate(space.choices))
    return not any(_is_timed(found, s) for found, s in chosen)


def _translated(small: Space, choice: Assignment, space: Space) -> Assignment | None:
    """An assignment of a restricted space in the whole space; None where that leaves a strategy out."""
    found: Assignment = {}
    for klass, choices in enumerate(space.choices):
        if choices.root == klass:
            strategy = strategy_of(small, choice, klass)[1]
            if strategy not in choices.strategies:
                return None
            found[klass] = choices.strategies.index(strategy)
    for index, params in enumerate(space.params):
        found[-1 - index] = params.layouts.index(small.params[index].layouts[choice[-1 - index]])
    return found


def written_plan(
    graph: Annotated,
    space: Space,
    problem: Problem,
    solution: Solution,
    name: str | None,
    yardsticks: dict[str, float],
    options: SolverOptions,
) -> Plan:
    """A solution as a plan. `name`: the template, if it is one; `yardsticks`: seconds of templates."""
    strategies = {op.name: strategy_of(space, solution.choice, op.klass)[1] for op in graph.ops}
    params: dict[str, Layout] = {}
    for index, group in enumerate(space.params):
        params |= dict.fromkeys(group.names, group.layouts[solution.choice[-1 - index]])
    return Plan(
        mesh=space.mesh,
        graph_digest=graph.digest,
        torch_version=torch.__version__,
        template=name,
        strategies=strategies,
        params=params,
        rows=plan_rows(space, problem, solution.choice),
        seconds=solution.seconds,
        bound_seconds=solution.bound,
        memory={"solver estimate": memory_bytes(problem, solution.choice)},
        yardsticks=yardsticks,
        replicated_ops=sorted({str(op.call.target) for op in graph.ops if not op.has_rule}),
        discovered_ops=sorted({str(op.call.target) for op in graph.ops if op.discovered}),
        solver={
            "status": solution.status,
            "wall_s": round(solution.wall_s, 3),
            "first_plan_s": round(solution.first_s, 3),
            "seed": options.seed,
            "cluster": space.costs.cluster.name,
            "memory_binds": solution.memory_binds,
        },
        stripes=graph.sequences.stripes,
        uneven=list(graph.sequences.uneven),
        recompute=[op.name for op in graph.ops if op.name in problem.again and op.klass in problem.again_classes],
    )
