"""The search space with all its prices, and the cost of an assignment computed without a solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.cost_models.memory import parameter_bytes
from stpart_compiler.ir.layout import Layout, max_local_numel
from stpart_compiler.ir.redistribute import redistribute
from stpart_compiler.passes.overlap import Overlap
from stpart_compiler.passes.quotient import Edge
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.space import Choices, Space, block_extents, layouts_of, needs_of

FORBIDDEN = 10**12
"""Price in ns of a re-layout that a template rules out."""

HIDDEN_SHARE = 0.02
"""Part of a transfer that is paid for though compute hides it: of two plans equally fast, the one that sends less."""

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
    from_ids: list[int]  # numbers of the layouts: equal for equal layouts, over all uses
    to_ids: list[int]

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
    if isinstance(call.target, Region):
        total = call.target.peak_bytes(block_extents(choices.op, choices.strategies[s]))
    for port, operand in zip(derived.inputs, call.operands, strict=True):
        copies = 2 if port.motion == "move" else 0
        total += copies * max_local_numel(port.layout) * operand.dtype.itemsize
    for port, result in zip(derived.outputs, call.results, strict=True):
        if result is not None:
            copies = 3 if port.motion == "move" else 1
            total += copies * max_local_numel(port.layout) * result.dtype.itemsize
    return total


def _price_params(problem: Problem) -> None:
    for index, params in enumerate(problem.space.params):
        root = -1 - index
        problem.roots[root] = len(params.layouts)
        problem.own.setdefault(root, [0] * len(params.layouts))
        trained = problem.space.classes.params[index].trained
        itemsize = params.value.dtype.itemsize
        problem.turn[root], problem.end[root] = [], []
        for layout in params.layouts:
            numel = max_local_numel(layout)
            kept = parameter_bytes(numel, itemsize, problem.options.optimizer, True) * trained
            frozen = parameter_bytes(numel, itemsize, problem.options.optimizer, False) * (len(params.names) - trained)
            problem.turn[root].append(kept + frozen - numel * itemsize * trained)
            problem.end[root].append(kept + frozen)
    problem.constant_bytes = problem.space.classes.fixed_bytes


def _price_uses(problem: Problem, weights_stay: bool) -> None:
    space = problem.space
    groups: dict[tuple[object, ...], list[Use]] = {}
    prices = _Prices(space)
    for edge in [*space.classes.edges, *space.classes.finals]:
        phase = edge.consumer < 0 or space.choices[edge.consumer].op.name in space.graph.backward
        use = prices.use(edge, weights_stay)
        if any(any(row) for row in use.price):
            groups.setdefault((edge.producer, edge.value.shape, phase), []).append(use)
    problem.uses = list(groups.values())


class _Prices:
    """Numbers layouts and prices re-layouts between them, each table of them once: what compute does not hide."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.overlap = Overlap(space)
        self.numbers: dict[Layout, int] = {}
        self.tables: dict[object, list[list[int]]] = {}

    def use(self, edge: Edge, weights_stay: bool) -> Use:
        from_root, sources, from_members = layouts_of(self.space, edge.producer, edge.value)
        to_root, targets, to_members = needs_of(self.space, edge)
        from_ids, to_ids = self._ids(sources), self._ids(targets)
        itemsize = edge.value.dtype.itemsize
        hidden = self.overlap.seconds(edge)
        key = (tuple(from_ids), tuple(to_ids), itemsize, hidden)
        if key not in self.tables:
            self.tables[key] = [[_ns(self._exposed(a, b, itemsize, hidden)) for b in targets] for a in sources]
        price = self.tables[key]
        if weights_stay and from_root is not None and from_root < 0:
            price = self._forbidden(sources, targets, price)
        return Use(edge, from_root, sources, from_members, to_root, targets, to_members, price, from_ids, to_ids)

    def _exposed(self, source: Layout, target: Layout, itemsize: int, hidden: float) -> float:
        costs = self.space.costs
        transfer = costs.relayout(source, target, itemsize)
        return max(HIDDEN_SHARE * transfer, transfer - hidden) + (
            costs.repacking(source, target, itemsize) if transfer else 0.0
        )

    def _ids(self, layouts: list[Layout]) -> list[int]:
        return [self.numbers.setdefault(layout, len(self.numbers)) for layout in layouts]

    def _forbidden(self, sources: list[Layout], targets: list[Layout], price: list[list[int]]) -> list[list[int]]:
        """The prices where nothing may be sent."""
        return [
            [FORBIDDEN if _transfers(self.space, a, b) else p for b, p in zip(targets, row, strict=True)]
            for a, row in zip(sources, price, strict=True)
        ]


def _transfers(space: Space, source: Layout, target: Layout) -> bool:
    plan = redistribute(source, target, space.mesh, space.costs.link)
    return any(step.kind not in ("slice", "zero") for step in plan.steps)


def _price_saved(problem: Problem) -> None:
    """Values that backward reads of forward, in the layout they were produced in."""
    for saved in problem.space.classes.saved:
        choices = problem.space.choices[saved.klass]
        sizes = problem.turn.setdefault(choices.root, [0] * _root_size(problem.space, choices.root))
        for derived, members in zip(choices.derived, choices.members, strict=True):
            numel = max_local_numel(derived.outputs[saved.result].layout)
            for i in members:
                sizes[i] += numel * saved.value.dtype.itemsize * saved.count


def evaluate(problem: Problem, choice: Assignment) -> float:
    """Seconds of one step under an assignment: the objective, computed without a solver."""
    total = sum(costs[choice[root]] for root, costs in problem.own.items())
    return (total + sum(group_price(group, choice) for group in problem.uses)) / 1e9


def group_price(group: list[Use], choice: Assignment) -> int:
    """Re-layouts of one value in one phase, each distinct one paid once."""
    paid: dict[tuple[int, int], int] = {}
    for use in group:
        i, j = use.side(choice, source=True), use.side(choice, source=False)
        if use.price[i][j]:
            pair = (use.from_ids[i], use.to_ids[j])
            paid[pair] = max(paid.get(pair, 0), use.price[i][j] * use.edge.count)
    return sum(paid.values())


def memory_bytes(problem: Problem, choice: Assignment) -> int:
    """Bytes per rank that constraint family 4 counts.

    Backward frees saved values as it makes gradients, so the peak is where it starts or where it ends.
    """
    held = max(sum(sizes[choice[root]] for root, sizes in table.items()) for table in (problem.turn, problem.end))
    largest = max((sizes[choice[root]] for root, sizes in problem.transient), default=0)
    return problem.constant_bytes + held + largest


def memory_around(problem: Problem, choice: Assignment, root: int) -> Callable[[int], int]:
    """`memory_bytes` as a function of the choice of one root, with all other roots as in `choice`."""
    others = [
        sum(sizes[choice[other]] for other, sizes in table.items() if other != root)
        for table in (problem.turn, problem.end)
    ]
    own = [table.get(root) for table in (problem.turn, problem.end)]
    blocks = [sizes for other, sizes in problem.transient if other == root]
    largest = max((sizes[choice[other]] for other, sizes in problem.transient if other != root), default=0)

    def total(i: int) -> int:
        held = max(rest + (sizes[i] if sizes else 0) for rest, sizes in zip(others, own, strict=True))
        return problem.constant_bytes + held + max([largest, *(sizes[i] for sizes in blocks)])

    return total
