"""Choose the cheapest strategies and layouts with CP-SAT under a memory bound (DESIGN section 4).

Decision variables: `x[root, i]`, one boolean per choice of a root (an op class that decides for itself, or a class of
parameters at rest); every other op class follows a root.

Objective: nanoseconds of one step, compute and exposed transfer of every op class times its count, plus re-layouts.

Constraints:
 1. exactly one choice per root (`_add_choices`);
 2. for a use whose producer and consumer have different roots, a flow between produced and required layouts whose
    marginals equal the choices on both sides: the LP relaxation is tight (`_add_flow`);
 3. a value needed in one layout by several uses of one phase is re-laid out once (`_add_shared`);
 4. memory per rank: parameters with gradients and optimizer state, plus saved activations, plus each op's own blocks,
    at every op that can be the peak (`_add_memory`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ortools.sat.python import cp_model

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.cost_models.memory import parameter_bytes
from stpart_compiler.ir.layout import Layout, max_local_numel
from stpart_compiler.ir.redistribute import redistribute
from stpart_compiler.passes.propagate import ValueInfo
from stpart_compiler.passes.space import Choices, Edge, Space, layouts_of, needs_of

FORBIDDEN = 10**12
"""Price in ns of a re-layout that a template rules out."""

Assignment = dict[int, int]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class SolverOptions:
    """`time_limit_s`: seconds for CP-SAT; `gap`: stop once within this relative distance of the bound; `workers`: threads.

    `patience_s`: stop when no better plan came for so long. `optimizer`: "adamw", "momentum" or "sgd", whose state counts against the memory limit.
    """

    seed: int = 0
    time_limit_s: float = 30.0
    gap: float = 0.02
    workers: int = 2
    patience_s: float = 5.0
    optimizer: str = "adamw"


@dataclass
class Solution:
    """Choice per root; objective and proven bound in seconds; `status` of CP-SAT."""

    choice: Assignment
    seconds: float
    bound: float
    status: str
    wall_s: float
    first_s: float = 0.0


class InfeasibleError(ValueError):
    """No plan meets the memory limit."""

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


@dataclass
class _Use:
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
        root, members = (self.from_root, self.from_members) if source else (self.to_root, self.to_members)
        if root is None:
            return 0
        return next(i for i, ids in enumerate(members) if choice[root] in ids)

    def roots(self) -> set[int]:
        return {root for root in (self.from_root, self.to_root) if root is not None}


@dataclass
class Problem:
    """The search space with all prices: built once, solved and evaluated many times."""

    space: Space
    options: SolverOptions
    roots: dict[int, int] = field(default_factory=dict)  # root -> number of choices
    own: dict[int, list[int]] = field(default_factory=dict)  # root -> ns per choice (with its followers)
    uses: list[list[_Use]] = field(default_factory=list)  # grouped by (producer, phase): re-layouts are shared inside
    persistent: dict[int, list[int]] = field(default_factory=dict)  # root -> bytes per choice held through the step
    constant_bytes: int = 0
    transient: list[tuple[int, list[int]]] = field(default_factory=list)  # (root, bytes per choice) per op class

    def local(self, root: int) -> Local:
        """The part of the objective that depends on one root."""
        return Local(self.own[root], root, [g for g in self.uses if any(root in use.roots() for use in g)])


@dataclass
class Local:
    """Costs of one root and of the re-layouts around it, in ns."""

    own: list[int]
    root: int
    groups: list[list[_Use]]

    def price(self, choice: Assignment) -> int:
        return self.own[choice[self.root]] + sum(_group_price(group, choice) for group in self.groups)


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
    """Bytes of the operands and results of one op, with double buffers for what moves."""
    derived, call = choices.derived[s], choices.op.call
    total = 0
    for port, operand in zip(derived.inputs, call.operands, strict=True):
        copies = 3 if port.motion == "move" else 1
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
        problem.persistent[root] = []
        for layout in params.layouts:
            numel = max_local_numel(layout)
            kept = parameter_bytes(numel, itemsize, problem.options.optimizer, True) * trained
            frozen = parameter_bytes(numel, itemsize, problem.options.optimizer, False) * (len(params.names) - trained)
            problem.persistent[root].append(kept + frozen)
    fixed = [info for info in problem.space.graph.values.values() if info.kind in ("buffer", "input", "constant")]
    problem.constant_bytes = sum(info.numel * info.dtype.itemsize for info in fixed)


def _price_uses(problem: Problem, weights_stay: bool) -> None:
    space = problem.space
    groups: dict[tuple[object, ...], list[_Use]] = {}
    for edge in [*space.edges, *space.finals]:
        phase = edge.consumer < 0 or space.choices[edge.consumer].op.name in space.graph.backward
        use = _use(space, edge, weights_stay)
        if any(any(row) for row in use.price):
            groups.setdefault((edge.producer, edge.value.shape, phase), []).append(use)
    problem.uses = list(groups.values())


def _use(space: Space, edge: Edge, weights_stay: bool) -> _Use:
    from_root, sources, from_members = layouts_of(space, edge.producer, edge.value)
    to_root, targets, to_members = needs_of(space, edge)
    itemsize = edge.value.dtype.itemsize
    price = [[_ns(space.costs.relayout(a, b, itemsize)) for b in targets] for a in sources]
    if weights_stay and from_root is not None and from_root < 0:
        price = [
            [FORBIDDEN if _transfers(space, a, b) else p for b, p in zip(targets, row, strict=True)]
            for a, row in zip(sources, price, strict=True)
        ]
    return _Use(edge, from_root, sources, from_members, to_root, targets, to_members, price)


def _transfers(space: Space, source: Layout, target: Layout) -> bool:
    plan = redistribute(source, target, space.mesh, space.costs.link)
    return any(step.kind != "slice" for step in plan.steps)


def _price_saved(problem: Problem) -> None:
    """Values that backward reads of forward, in the layout they were produced in; views count as what they look at."""
    space = problem.space
    graph = space.graph
    done: set[tuple[str, int]] = set()
    for op in graph.ops:
        if op.name not in graph.backward:
            continue
        for key in op.operands:
            while key[0] in graph.by_name and key[0] not in graph.backward and is_view(graph.by_name[key[0]].call.target):
                key = graph.by_name[key[0]].operands[0]
            if key in done or key[0] in graph.backward or graph.values[key].kind != "op":
                continue
            done.add(key)
            _add_saved(problem, graph.by_name[key[0]].klass, key[1], graph.values[key])


def _add_saved(problem: Problem, klass: int, result: int, value: ValueInfo) -> None:
    choices = problem.space.choices[klass]
    sizes = problem.persistent.setdefault(choices.root, [0] * _root_size(problem.space, choices.root))
    for derived, members in zip(choices.derived, choices.members, strict=True):
        nbytes = max_local_numel(derived.outputs[result].layout) * value.dtype.itemsize
        for i in members:
            sizes[i] += nbytes


def evaluate(problem: Problem, choice: Assignment) -> float:
    """Seconds of one step under an assignment: the objective, computed without a solver."""
    total = sum(costs[choice[root]] for root, costs in problem.own.items())
    return (total + sum(_group_price(group, choice) for group in problem.uses)) / 1e9


def _group_price(group: list[_Use], choice: Assignment) -> int:
    """Re-layouts of one value in one phase, each distinct one paid once."""
    paid: dict[tuple[Layout, Layout], int] = {}
    for use in group:
        i, j = use.side(choice, source=True), use.side(choice, source=False)
        pair = (use.from_layouts[i], use.to_layouts[j])
        paid[pair] = max(paid.get(pair, 0), use.price[i][j] * use.edge.count)
    return sum(paid.values())


def memory_bytes(problem: Problem, choice: Assignment) -> int:
    """Bytes per rank that constraint family 4 counts."""
    held = problem.constant_bytes + sum(sizes[choice[root]] for root, sizes in problem.persistent.items())
    return held + max((sizes[choice[root]] for root, sizes in problem.transient), default=0)


@dataclass(frozen=True)
class Solve:
    """priced problem -> cheapest assignment within `memory_limit` bytes per rank."""

    options: SolverOptions
    memory_limit: int | None = None

    def apply(
        self, problem: Problem, hint: Assignment | None = None, progress: Progress | None = None
    ) -> Solution:
        """Raises:
        InfeasibleError: no assignment fits in the memory limit.
        """
        start = time.perf_counter()
        model = _Model(problem)
        if self.memory_limit is not None:
            model.add_memory(self.memory_limit)
        model.minimize_time()
        if hint is not None:
            model.hint(hint)
        solver = self._solver(self.options.time_limit_s)
        watch = _Watch(start, progress, solver, self.options.patience_s)
        status = solver.solve(model.cp, watch)
        watch.cancel()
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            raise self._infeasible(problem)
        choice = model.read(solver)
        seconds = evaluate(problem, choice)
        bound = min(seconds, solver.best_objective_bound * model.unit / 1e9)
        wall = time.perf_counter() - start
        return Solution(choice, seconds, bound, solver.status_name(status), wall, watch.first or wall)

    def _solver(self, limit: float) -> cp_model.CpSolver:
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = limit
        solver.parameters.num_workers = self.options.workers
        solver.parameters.random_seed = self.options.seed
        solver.parameters.relative_gap_limit = self.options.gap
        solver.parameters.linearization_level = 2
        return solver

    def _infeasible(self, problem: Problem) -> InfeasibleError:
        model = _Model(problem)
        model.minimize_memory()
        solver = self._solver(self.options.time_limit_s)
        solver.solve(model.cp)
        choice = model.read(solver)
        least = memory_bytes(problem, choice)
        held = sum(
            sizes[choice[root]] for root, sizes in problem.persistent.items() if root < 0
        )
        saved = sum(sizes[choice[root]] for root, sizes in problem.persistent.items() if root >= 0)
        assert self.memory_limit is not None
        largest = max(problem.space.params, key=lambda p: p.value.numel * len(p.names), default=None)
        name = f", most of it {largest.names[0]} and its like" if largest else ""
        return InfeasibleError(
            f"memory_limit: no plan fits in {self.memory_limit} bytes per rank; the least is about {least} bytes"
            f" ({least / 2**20:.1f} MiB): parameters with gradients and optimizer state {held / 2**20:.1f} MiB{name},"
            f" saved activations {saved / 2**20:.1f} MiB, inputs and buffers {problem.constant_bytes / 2**20:.1f} MiB,"
            " the rest is one op's own blocks. Raise the limit, use more ranks, or a smaller batch",
            least,
        )


class _Watch(cp_model.CpSolverSolutionCallback):
    """Notes when the first solution came, reports progress, and stops a search that has stopped improving."""

    def __init__(
        self, start: float, progress: Progress | None, solver: cp_model.CpSolver, patience_s: float
    ) -> None:
        super().__init__()
        self._start = start
        self._progress = progress
        self._solver = solver
        self._patience_s = patience_s
        self._timer: threading.Timer | None = None
        self.first: float | None = None

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def on_solution_callback(self) -> None:
        self.cancel()
        self._timer = threading.Timer(self._patience_s, self._solver.stop_search)
        self._timer.daemon = True
        self._timer.start()
        now = time.perf_counter() - self._start
        if self.first is None:
            self.first = now
        if self._progress is not None:
            best, bound = self.objective_value, self.best_objective_bound
            gap = (best - bound) / best if best else 0.0
            self._progress(f"solve {now:.1f} s: plan found, within {100 * gap:.1f} % of the bound")


class _Model:
    """The CP-SAT model of a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.cp = cp_model.CpModel()
        self.x: dict[int, list[cp_model.IntVar]] = {}
        self.flows: list[tuple[_Use, list[list[cp_model.IntVar]]]] = []
        self.terms: list[tuple[cp_model.LinearExprT, int]] = []
        largest = max((max(costs) for costs in problem.own.values() if costs), default=1)
        self.unit = max(1, largest // 10**8)
        self._add_choices()
        for group in problem.uses:
            self._add_group(group)

    def _add_choices(self) -> None:
        for root, count in self.problem.roots.items():
            self.x[root] = [self.cp.new_bool_var("") for _ in range(count)]
            self.cp.add_exactly_one(self.x[root])
            self.terms += list(zip(self.x[root], self.problem.own[root], strict=True))

    def _add_group(self, group: list[_Use]) -> None:
        users: dict[tuple[Layout, Layout], list[tuple[cp_model.LinearExprT, int]]] = {}
        for use in group:
            for source, target, indicator in self._indicators(use):
                price = use.price[source][target] * use.edge.count
                if price:
                    pair = (use.from_layouts[source], use.to_layouts[target])
                    users.setdefault(pair, []).append((indicator, price))
        for sharing in users.values():
            self._add_shared(sharing)

    def _add_shared(self, sharing: list[tuple[cp_model.LinearExprT, int]]) -> None:
        if len(sharing) == 1:
            self.terms.append(sharing[0])
            return
        done = self.cp.new_bool_var("")
        for indicator, _ in sharing:
            self.cp.add(done >= indicator)
        self.terms.append((done, max(price for _, price in sharing)))

    def _indicators(self, use: _Use) -> list[tuple[int, int, cp_model.LinearExprT]]:
        """(source layout, target layout, 0/1 expression) for each pair that the use may need."""
        if use.from_root is None or use.to_root is None:
            members, root = (use.to_members, use.to_root) if use.from_root is None else (use.from_members, use.from_root)
            sums = [self._sum(root, ids) for ids in members] if root is not None else [1]
            return [(0, i, e) if use.from_root is None else (i, 0, e) for i, e in enumerate(sums)]
        if use.from_root == use.to_root:
            return self._same_root(use)
        return self._add_flow(use)

    def _sum(self, root: int, ids: list[int]) -> cp_model.LinearExprT:
        return cp_model.LinearExpr.sum([self.x[root][i] for i in ids])

    def _same_root(self, use: _Use) -> list[tuple[int, int, cp_model.LinearExprT]]:
        root = use.from_root
        assert root is not None
        target_of = {i: t for t, ids in enumerate(use.to_members) for i in ids}
        pairs: dict[tuple[int, int], list[int]] = {}
        for source, ids in enumerate(use.from_members):
            for i in ids:
                pairs.setdefault((source, target_of[i]), []).append(i)
        return [(source, target, self._sum(root, ids)) for (source, target), ids in pairs.items()]

    def _add_flow(self, use: _Use) -> list[tuple[int, int, cp_model.LinearExprT]]:
        assert use.from_root is not None and use.to_root is not None
        rows, columns = len(use.from_layouts), len(use.to_layouts)
        flow = [[self.cp.new_bool_var("") for _ in range(columns)] for _ in range(rows)]
        for i in range(rows):
            self.cp.add(cp_model.LinearExpr.sum(flow[i]) == self._sum(use.from_root, use.from_members[i]))
        for j in range(columns):
            column = [flow[i][j] for i in range(rows)]
            self.cp.add(cp_model.LinearExpr.sum(column) == self._sum(use.to_root, use.to_members[j]))
        self.flows.append((use, flow))
        return [(i, j, flow[i][j]) for i in range(rows) for j in range(columns)]

    def _held(self) -> cp_model.LinearExprT:
        pairs = [
            (var, -(-size // 1024))
            for root, sizes in self.problem.persistent.items()
            for var, size in zip(self.x[root], sizes, strict=True)
        ]
        return cp_model.LinearExpr.weighted_sum([v for v, _ in pairs], [s for _, s in pairs])

    def add_memory(self, limit: int) -> None:
        room = max(0, limit - self.problem.constant_bytes) // 1024
        held = self._held()
        self.cp.add(held <= room)
        for expr in self._transients():
            self.cp.add(held + expr <= room)

    def _transients(self) -> list[cp_model.LinearExprT]:
        distinct = {(root, tuple(sizes)) for root, sizes in self.problem.transient}
        return [
            cp_model.LinearExpr.weighted_sum(self.x[root], [-(-size // 1024) for size in sizes])
            for root, sizes in sorted(distinct)
        ]

    def minimize_time(self) -> None:
        exprs = [e for e, _ in self.terms]
        prices = [-(-price // self.unit) if price else 0 for _, price in self.terms]
        self.cp.minimize(sum(e * p for e, p in zip(exprs, prices, strict=True) if p))

    def minimize_memory(self) -> None:
        peak = self.cp.new_int_var(0, 2**50, "peak")
        for expr in self._transients():
            self.cp.add(peak >= expr)
        self.cp.minimize(self._held() + peak)

    def hint(self, choice: Assignment) -> None:
        for root, variables in self.x.items():
            for i, var in enumerate(variables):
                self.cp.add_hint(var, i == choice[root])
        for use, flow in self.flows:
            at = (use.side(choice, source=True), use.side(choice, source=False))
            for i, row in enumerate(flow):
                for j, var in enumerate(row):
                    self.cp.add_hint(var, (i, j) == at)

    def read(self, solver: cp_model.CpSolver) -> Assignment:
        return {
            root: next(i for i, var in enumerate(variables) if solver.boolean_value(var))
            for root, variables in self.x.items()
        }

