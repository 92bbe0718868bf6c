"""The search space with all its prices, and the cost of an assignment computed without a solver."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.cost_models.memory import parameter_bytes
from stpart_compiler.ir.layout import Layout, max_local_numel
from stpart_compiler.ir.redistribute import redistribute
from stpart_compiler.passes.propagate import ValueInfo
from stpart_compiler.passes.space import Choices, Edge, Space, layouts_of, needs_of

FORBIDDEN = 10**12
"""Price in ns of a re-layout that a template rules out."""

Assignment = dict[int, int]


@dataclass(frozen=True)
class SolverOptions:
    """`time_limit_s`: seconds for CP-SAT; `gap`: stop once within this relative distance of the bound.

    `workers`: threads. `patience_s`: stop when no better plan came for so long. `optimizer`: "adamw", "momentum" or
    "sgd", whose state counts against the memory limit.
    """

    seed: int = 0
    time_limit_s: float = 10.0
    gap: float = 0.02
    workers: int = 2
    patience_s: float = 3.0
    optimizer: str = "adamw"


@dataclass
class Use:
    """One edge with the layouts on both sides, and the re-layout price of every pair in ns."""

    edge: Edge
    from_root: int | None
    from_layouts: list[Layout]
    from_members: list[list[int]]
    to_root: int | None
    to_layouts: list[Layout]
    to_members: list[list[int]]
    price: list[list[int]]

    def side(self, choice: Assignment, *, source: bool) -> int:
        """Index of the chosen layout on the producing or the consuming side."""
        root = self.from_root if source else self.to_root
        if root is None:
            return 0
        return (self.from_index if source else self.to_index)[choice[root]]

    @cached_property
    def from_index(self) -> dict[int, int]:
        """Choice of the producing root -> index of its layout."""
        return {i: index for index, ids in enumerate(self.from_members) for i in ids}

    @cached_property
    def to_index(self) -> dict[int, int]:
        return {i: index for index, ids in enumerate(self.to_members) for i in ids}

    def roots(self) -> set[int]:
        return {root for root in (self.from_root, self.to_root) if root is not None}


@dataclass
class Problem:
    """The search space with all prices: built once, solved and evaluated many times."""

    space: Space
    options: SolverOptions
    roots: dict[int, int] = field(default_factory=dict)  # root -> number of choices
    own: dict[int, list[int]] = field(default_factory=dict)  # root -> ns per choice (with its followers)
    uses: list[list[Use]] = field(default_factory=list)  # grouped by (producer, phase): re-layouts are shared inside
    turn: dict[int, list[int]] = field(default_factory=dict)  # root -> bytes per choice held when backward starts
    end: dict[int, list[int]] = field(default_factory=dict)  # root -> bytes per choice held when backward ends
    constant_bytes: int = 0
    transient: list[tuple[int, list[int]]] = field(default_factory=list)  # (root, bytes per choice) per op class

    def local(self, root: int) -> Local:
        """The part of the objective that depends on one root."""
        return Local(self.own[root], root, self._groups_of.get(root, []))

    @cached_property
    def _groups_of(self) -> dict[int, list[list[Use]]]:
        found: dict[int, list[list[Use]]] = {}
        for group in self.uses:
            for root in sorted({root for use in group for root in use.roots()}):
                found.setdefault(root, []).append(group)
        return found


@dataclass
class Local:
    """Costs of one root and of the re-layouts around it, in ns."""

    own: list[int]
    root: int
    groups: list[list[Use]]

    def price(self, choice: Assignment) -> int:
        return self.own[choice[self.root]] + sum(group_price(group, choice) for group in self.groups)


@dataclass(frozen=True)
class BuildProblem:
    """search space -> priced problem."""

    options: SolverOptions
    weights_stay: bool = False

    def apply(self, space: Space) -> Problem:
        problem = Problem(space, self.options)
        _price_choices(problem)
        _price_params(problem)
        _price_uses(problem, self.weights_stay)
        _price_saved(problem)
        return problem


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _price_choices(problem: Problem) -> None:
    for klass, choices in enumerate(problem.space.choices):
        if choices.root == klass:
            problem.roots[klass] = len(choices.strategies)
        costs = problem.own.setdefault(choices.root, [0] * _root_size(problem.space, choices.root))
        blocks = [0] * len(costs)
        for s, members in enumerate(choices.members):
            for i in members:
                costs[i] += _ns(choices.seconds[s]) * choices.count
                blocks[i] = _block_bytes(choices, s)
        if not is_view(choices.op.call.target):
            problem.transient.append((choices.root, blocks))


def _root_size(space: Space, root: int) -> int:
    return len(space.params[-1 - root].layouts) if root < 0 else len(space.choices[root].strategies)


def _block_bytes(choices: Choices, s: int) -> int:
    """Bytes of the results of one op, with double buffers for what moves. Operands mostly count as held already."""
    derived, call = choices.derived[s], choices.op.call
    total = 0
    for port, operand in zip(derived.inputs, call.operands, strict=True):
        copies = 2 if port.motion == "move" else 0
        total += copies * max_local_numel(port.layout) * operand.dtype.itemsize
    for port, result in zip(derived.outputs, call.results, strict=True):
        if result is not None:
            copies = 3 if port.motion == "move" else 1
            total += copies * max_local_numel(port.layout) * result.dtype.itemsize
    return total


def _price_params(problem: Problem) -> None:
    by_name = {info.name: info for info in problem.space.graph.captured.params}
    for index, params in enumerate(problem.space.params):
        root = -1 - index
        problem.roots[root] = len(params.layouts)
        problem.own.setdefault(root, [0] * len(params.layouts))
        trained = sum(1 for name in params.names if by_name[name].requires_grad)
        itemsize = params.value.dtype.itemsize
        problem.turn[root], problem.end[root] = [], []
        for layout in params.layouts:
            numel = max_local_numel(layout)
            kept = parameter_bytes(numel, itemsize, problem.options.optimizer, True) * trained
            frozen = parameter_bytes(numel, itemsize, problem.options.optimizer, False) * (len(params.names) - trained)
            problem.turn[root].append(kept + frozen - numel * itemsize * trained)
            problem.end[root].append(kept + frozen)
    fixed = [info for info in problem.space.graph.values.values() if info.kind in ("buffer", "input", "constant")]
    problem.constant_bytes = sum(info.numel * info.dtype.itemsize for info in fixed)


def _price_uses(problem: Problem, weights_stay: bool) -> None:
    space = problem.space
    groups: dict[tuple[object, ...], list[Use]] = {}
    tables: dict[object, list[list[int]]] = {}
    for edge in [*space.edges, *space.finals]:
        phase = edge.consumer < 0 or space.choices[edge.consumer].op.name in space.graph.backward
        use = _use(space, edge, weights_stay, tables)
        if any(any(row) for row in use.price):
            groups.setdefault((edge.producer, edge.value.shape, phase), []).append(use)
    problem.uses = list(groups.values())


def _use(space: Space, edge: Edge, weights_stay: bool, tables: dict[object, list[list[int]]]) -> Use:
    from_root, sources, from_members = layouts_of(space, edge.producer, edge.value)
    to_root, targets, to_members = needs_of(space, edge)
    itemsize = edge.value.dtype.itemsize
    key = (tuple(sources), tuple(targets), itemsize)
    if key not in tables:
        tables[key] = [[_ns(space.costs.relayout(a, b, itemsize)) for b in targets] for a in sources]
    price = tables[key]
    if weights_stay and from_root is not None and from_root < 0:
        price = [
            [FORBIDDEN if _transfers(space, a, b) else p for b, p in zip(targets, row, strict=True)]
            for a, row in zip(sources, price, strict=True)
        ]
    return Use(edge, from_root, sources, from_members, to_root, targets, to_members, price)


def _transfers(space: Space, source: Layout, target: Layout) -> bool:
    plan = redistribute(source, target, space.mesh, space.costs.link)
    return any(step.kind not in ("slice", "zero") for step in plan.steps)


def _price_saved(problem: Problem) -> None:
    """Values that backward reads of forward, in the layout they were produced in; views count as what they look at."""
    space = problem.space
    graph = space.graph
    done: set[tuple[str, int]] = set()
    for op in graph.ops:
        if op.name not in graph.backward:
            continue
        for key in op.operands:
            while (
                key[0] in graph.by_name and key[0] not in graph.backward and is_view(graph.by_name[key[0]].call.target)
            ):
                key = graph.by_name[key[0]].operands[0]
            if key in done or key[0] in graph.backward or graph.values[key].kind != "op":
                continue
            done.add(key)
            _add_saved(problem, graph.by_name[key[0]].klass, key[1], graph.values[key])


def _add_saved(problem: Problem, klass: int, result: int, value: ValueInfo) -> None:
    choices = problem.space.choices[klass]
    sizes = problem.turn.setdefault(choices.root, [0] * _root_size(problem.space, choices.root))
    for derived, members in zip(choices.derived, choices.members, strict=True):
        nbytes = max_local_numel(derived.outputs[result].layout) * value.dtype.itemsize
        for i in members:
            sizes[i] += nbytes


def evaluate(problem: Problem, choice: Assignment) -> float:
    """Seconds of one step under an assignment: the objective, computed without a solver."""
    total = sum(costs[choice[root]] for root, costs in problem.own.items())
    return (total + sum(group_price(group, choice) for group in problem.uses)) / 1e9


def group_price(group: list[Use], choice: Assignment) -> int:
    """Re-layouts of one value in one phase, each distinct one paid once."""
    paid: dict[tuple[Layout, Layout], int] = {}
    for use in group:
        i, j = use.side(choice, source=True), use.side(choice, source=False)
        pair = (use.from_layouts[i], use.to_layouts[j])
        paid[pair] = max(paid.get(pair, 0), use.price[i][j] * use.edge.count)
    return sum(paid.values())


def memory_bytes(problem: Problem, choice: Assignment) -> int:
    """Bytes per rank that constraint family 4 counts.

    Backward frees saved values as it makes gradients, so the peak is where it starts or where it ends.
    """
    held = max(sum(sizes[choice[root]] for root, sizes in table.items()) for table in (problem.turn, problem.end))
    largest = max((sizes[choice[root]] for root, sizes in problem.transient), default=0)
    return problem.constant_bytes + held + largest
