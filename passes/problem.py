"""The search space with all its prices, and the cost of an assignment computed without a solver."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

from stpart_compiler.passes.held import Memory
from stpart_compiler.passes.optional import optional_timeline
from stpart_compiler.passes.order import NOTHING_AGAIN, marked, orders
from stpart_compiler.passes.propagate import Annotated
from stpart_compiler.passes.quotient import Edge
from stpart_compiler.passes.space import Space, again_root
from stpart_compiler.passes.timeline import timeline
from stpart_compiler.passes.uses import Assignment, Prices, Use


@dataclass(frozen=True)
class SolverOptions:
    """`time_limit_s`: seconds for CP-SAT; `gap`: stop once within this relative distance of the bound.

    `workers`: threads. `patience_s`: stop when no better plan came for so long. `optimizer`: "adamw", "momentum" or
    "sgd", whose state counts against the memory limit. `yardsticks`: price the templates first, which gives first plans
    and what the report compares with; without them a small problem is solved sooner. `spatial_only`: for the report
    also find the best plan without temporal maps, and price each template on every split of the ranks over two axes.
    `honour_checkpoints`: what is in a `torch.utils.checkpoint` is run again in backward; False leaves that to the
    solver, which does so where memory is short.
    """

    seed: int = 0
    time_limit_s: float = 10.0
    gap: float = 0.02
    workers: int = 2
    patience_s: float = 3.0
    optimizer: str = "adamw"
    yardsticks: bool = True
    spatial_only: bool = False
    honour_checkpoints: bool = True

    def marked(self, graph: Annotated) -> frozenset[str]:
        """Ops that the user wants to be run again in backward, unless that is left to the solver."""
        return marked(graph) if self.honour_checkpoints else frozenset()


@dataclass
class Problem:
    """The search space with all prices: built once, solved and evaluated many times."""

    space: Space
    options: SolverOptions
    roots: dict[int, int] = field(default_factory=dict)  # root -> number of choices
    own: dict[int, list[int]] = field(default_factory=dict)  # root -> ns per choice (with its followers)
    uses: list[list[Use]] = field(default_factory=list)  # grouped by (producer, phase): re-layouts are shared inside
    again: frozenset[str] = NOTHING_AGAIN  # ops of forward that backward runs again
    optional: frozenset[int] = frozenset()  # classes of which that is chosen as well: see `passes/optional.py`
    only_forward: bool = False  # no memory is counted in backward
    prices: Prices = field(init=False)
    priced_by: type[Prices] = Prices

    def __post_init__(self) -> None:
        self.prices = self.priced_by(self.space)

    @cached_property
    def again_classes(self) -> frozenset[int]:
        """Classes of the ops that backward really runs again, whatever is chosen."""
        if not self.again:
            return frozenset()
        graph = self.space.graph
        ran = [op for op in orders(graph, self.again).backward if op.name in self.again]
        return frozenset(op.klass for op in ran) - self.optional

    @cached_property
    def memory(self) -> Memory:
        """What is held at each point that can be the peak. Made when first asked for."""
        graph, cost = self.space.graph, self.space.costs.link
        if self.optional:
            lines = optional_timeline(graph, cost, self.again, self.optional, only_forward=self.only_forward)
        else:
            lines = timeline(graph, cost, self.again)
        return Memory.of(self.space, lines, self.roots, self.prices, self.options.optimizer)

    def local(self, root: int) -> Local:
        """The part of the objective that depends on one root."""
        if root not in self._locals:
            groups = [_Around.of(group, root, self.roots[root]) for group in self._groups_of.get(root, [])]
            self._locals[root] = Local(root, self.own[root], groups)
        return self._locals[root]

    @cached_property
    def _locals(self) -> dict[int, Local]:
        return {}

    @cached_property
    def _groups_of(self) -> dict[int, list[list[Use]]]:
        found: dict[int, list[list[Use]]] = {}
        for group in self.uses:
            for root in sorted({root for use in group for root in use.roots()}):
                found.setdefault(root, []).append(group)
        return found


@dataclass(frozen=True)
class _Around:
    """Uses of one value that involve a root. Choices of the root with the same layouts there cost the same.

    `kinds`: one such choice of each kind; `kind_of`: choice -> index of its kind.
    """

    group: list[Use]
    kinds: list[int]
    kind_of: list[int]

    @staticmethod
    def of(group: list[Use], root: int, count: int) -> _Around:
        sides = [use.from_index for use in group if use.from_root == root]
        sides += [use.to_index for use in group if use.to_root == root]
        sides += [{0: 0, 1: 1} for use in group if use.when == root]
        seen: dict[tuple[int, ...], int] = {}
        kinds: list[int] = []
        kind_of: list[int] = []
        for i in range(count):
            at = tuple(side[i] for side in sides)
            if at not in seen:
                seen[at] = len(kinds)
                kinds.append(i)
            kind_of.append(seen[at])
        return _Around(group, kinds, kind_of)


@dataclass(frozen=True)
class Local:
    """Costs of one root and of the re-layouts around it, in ns."""

    root: int
    own: list[int]
    groups: list[_Around]

    def prices(self, choice: Assignment) -> list[int]:
        """Per choice of the root, with all other roots as in `choice`."""
        trial = dict(choice)
        total = list(self.own)
        for around in self.groups:
            prices = []
            for i in around.kinds:
                trial[self.root] = i
                prices.append(group_price(around.group, trial))
            total = [t + prices[kind] for t, kind in zip(total, around.kind_of, strict=True)]
        return total


@dataclass(frozen=True)
class BuildProblem:
    """search space -> priced problem. `again`: ops of forward that backward runs again, at their full price.

    `optional`: op classes among them of which the solver chooses whether they do. `only_forward`: no memory is counted
    in backward. `priced_by`: exact prices of re-layouts, or such as take far less time (`passes/floors.py`).
    """

    options: SolverOptions
    weights_stay: bool = False
    again: frozenset[str] = NOTHING_AGAIN
    optional: frozenset[int] = frozenset()
    only_forward: bool = False
    priced_by: type[Prices] = Prices

    def apply(self, space: Space) -> Problem:
        again = (self.again, self.optional, self.only_forward)
        problem = Problem(space, self.options, {}, {}, [], *again, priced_by=self.priced_by)
        _price_choices(problem)
        _price_params(problem)
        _price_uses(problem, self.weights_stay)
        _price_again(problem)
        return problem


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _price_choices(problem: Problem) -> None:
    for klass, choices in enumerate(problem.space.choices):
        if choices.root == klass:
            problem.roots[klass] = len(choices.strategies)
        times = 2 if klass in problem.again_classes else 1
        costs = problem.own.setdefault(choices.root, [0] * _root_size(problem.space, choices.root))
        for s, members in enumerate(choices.members):
            for i in members:
                costs[i] += _ns(choices.seconds[s]) * choices.count * times


def _root_size(space: Space, root: int) -> int:
    return len(space.params[-1 - root].layouts) if root < 0 else len(space.choices[root].strategies)


def _price_params(problem: Problem) -> None:
    for index, params in enumerate(problem.space.params):
        root = -1 - index
        problem.roots[root] = len(params.layouts)
        problem.own.setdefault(root, [0] * len(params.layouts))


def _price_uses(problem: Problem, weights_stay: bool) -> None:
    space = problem.space
    groups: dict[tuple[object, ...], list[Use]] = {}
    for edge in [*space.classes.edges, *space.classes.finals]:
        phase = edge.consumer < 0 or space.choices[edge.consumer].op.name in space.graph.backward
        use = problem.prices.use(edge, weights_stay)
        if not any(any(row) for row in use.price):
            continue
        for at in (phase, True) if edge.consumer in problem.again_classes else (phase,):
            groups.setdefault((edge.producer, edge.value.shape, at), []).append(use)
        if edge.consumer in problem.optional:
            when = replace(use, when=again_root(space, edge.consumer))
            groups.setdefault((edge.producer, edge.value.shape, True), []).append(when)
    problem.uses += list(groups.values())


def _price_again(problem: Problem) -> None:
    """Of what is chosen to run again its seconds, as those of a use between that choice and the one of its strategy."""
    for klass in sorted(problem.optional):
        choices = problem.space.choices[klass]
        flag = again_root(problem.space, klass)
        problem.roots[flag], problem.own[flag] = 2, [0, 0]
        by_price: dict[int, list[int]] = {}
        for seconds, members in zip(choices.seconds, choices.members, strict=True):
            by_price.setdefault(_ns(seconds) * choices.count, []).extend(members)
        edge = Edge(("op", klass, 0), klass, -1, 1, problem.space.graph.values[choices.op.name, 0])
        numbers = list(range(len(by_price)))
        price = [[0] * len(by_price), [*by_price]]
        groups = list(by_price.values())
        problem.uses.append([Use(edge, flag, [], [[0], [1]], choices.root, [], groups, {}, price, [0, 1], numbers, {})])


def evaluate(problem: Problem, choice: Assignment) -> float:
    """Seconds of one step under an assignment: the objective, computed without a solver."""
    total = sum(costs[choice[root]] for root, costs in problem.own.items())
    return (total + sum(group_price(group, choice) for group in problem.uses)) / 1e9


def group_price(group: list[Use], choice: Assignment) -> int:
    """Re-layouts of one value in one phase, each distinct one paid once."""
    paid: dict[tuple[int, int], int] = {}
    for use in group:
        if use.when is not None and not choice[use.when]:
            continue
        i, j = use.side(choice, source=True), use.side(choice, source=False)
        if use.price[i][j]:
            pair = use.pair(i, j)
            paid[pair] = max(paid.get(pair, 0), use.price[i][j] * use.edge.count)
    return sum(paid.values())


def memory_bytes(problem: Problem, choice: Assignment) -> int:
    """Bytes per rank at the peak of the step, with the optimizer's state."""
    return int(problem.memory.at_points(choice).max())
