"""The search space the solver works on: strategies per class of identical ops, and who follows whom.

An op whose placement is implied by its main operand *follows* it (views, casts, pointwise ops): it has no decision of
its own, its strategies map onto those of the op it follows. Ops that can choose are *roots*: contractions, attention,
and whatever meets a pending sum that it cannot pass on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from stpart_compiler.ir.layout import Digit, Layout, form, replicated, shard
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.rule import SUM
from stpart_compiler.ir.spacetime import Derived, Port, Slices, Strategy, derive
from stpart_compiler.passes.costs import Costs
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueInfo, ValueKey
from stpart_compiler.passes.quotient import Edge, Quotient, quotient
from stpart_compiler.passes.rules.registry import draws
from stpart_compiler.passes.strategies import (
    DEFAULT_SPACE,
    StrategySpace,
    enumerate_strategies,
    equal_pairs,
    is_contraction,
    with_digit,
)

LARGE_IN_LATENCIES = 20.0
"""A product that takes longer than so many link latencies on one rank is never repeated along an axis,"""

LARGE_IN_GATHERINGS = 0.1
"""if it also takes longer than such a part of the time in which its result would come from all ranks."""

Allow = Callable[[OpNode, Strategy, Mesh], bool]


@dataclass
class Choices:
    """Strategies of one op class. `members[s]`: the root's choices under which strategy s is used."""

    op: OpNode
    count: int
    strategies: list[Strategy]
    derived: list[Derived]
    seconds: list[float]
    moved: list[int]
    root: int
    members: list[list[int]]

    def picked(self, kept: Sequence[int], root: int, members: list[list[int]]) -> Choices:
        """Some of the strategies, with the root's choices under which each of them is used."""
        return Choices(
            self.op,
            self.count,
            [self.strategies[s] for s in kept],
            [self.derived[s] for s in kept],
            [self.seconds[s] for s in kept],
            [self.moved[s] for s in kept],
            root,
            members,
        )


@dataclass
class ParamChoices:
    """Layouts at rest of one class of parameters (same name but for layer numbers)."""

    names: list[str]
    value: ValueInfo
    layouts: list[Layout]


@dataclass
class Space:
    """Everything that the solver needs. `widest`: the space that this one is a part of; itself if None."""

    graph: Annotated
    mesh: Mesh
    costs: Costs
    choices: list[Choices]
    params: list[ParamChoices]
    classes: Quotient
    widest: Space | None = None


@dataclass(frozen=True)
class Restriction:
    """A sub-space: which strategies, and which layouts at rest, a template allows.

    Of the allowed strategies of an op those with the highest `score` remain.
    """

    allow: Allow | None = None
    layouts: Callable[[Annotated, ValueInfo, list[Layout], Mesh], list[Layout]] | None = None
    score: Callable[[OpNode, Strategy, Mesh], int] | None = None

    def strategies(self, op: OpNode, found: list[Strategy], mesh: Mesh) -> list[Strategy]:
        """What is left of the strategies of an op; all of them where none is allowed."""
        if self.allow is not None:
            allow = self.allow
            found = [s for s in found if allow(op, s, mesh)] or found
        if self.score is None:
            return found
        scores = [self.score(op, s, mesh) for s in found]
        return [s for s, score in zip(found, scores, strict=True) if score == max(scores)]


@dataclass(frozen=True)
class BuildSpace:
    """annotated ops -> search space."""

    costs: Costs
    options: StrategySpace = DEFAULT_SPACE

    def apply(self, graph: Annotated, restriction: Restriction = Restriction()) -> Space:
        mesh = self.costs.mesh
        classes = quotient(graph)
        params, param_class = _params(graph, classes, mesh, restriction, self.options), classes.param_class
        carriers = pending_carriers(graph)
        choices: list[Choices] = []
        for members in graph.classes:
            choices.append(self._choices(graph, members, choices, params, param_class, restriction, carriers))
        return Space(graph, mesh, self.costs, choices, params, classes)

    def _choices(
        self,
        graph: Annotated,
        members: list[OpNode],
        done: list[Choices],
        params: list[ParamChoices],
        param_class: dict[ValueKey, int],
        restriction: Restriction,
        carriers: frozenset[str],
    ) -> Choices:
        op = members[0]
        mesh = self.costs.mesh
        strategies = list(enumerate_strategies(op.rule, mesh, op.movable, self.options, op.data))
        strategies = [s for s in strategies if not s.pending or (op.name in carriers and not _twice(op, s))]
        strategies = self._busy(op, restriction.strategies(op, strategies, mesh))
        derived = [derive(op.rule, s, mesh) for s in strategies]
        costs = [self.costs.op(op, s, d) for s, d in zip(strategies, derived, strict=True)]
        own = Choices(
            op,
            len(members),
            strategies,
            derived,
            [seconds for seconds, _ in costs],
            [moved for _, moved in costs],
            op.klass,
            [[i] for i in range(len(strategies))],
        )
        lead = _lead(graph, op)
        if lead is None or is_contraction(op.rule) or op.rule.loops or _is_drawn(graph, op.operands[lead]):
            return own
        return _following(own, lead, graph, done, params, param_class, self.costs) or own

    def _busy(self, op: OpNode, strategies: list[Strategy]) -> list[Strategy]:
        """Leave out idle axes where a product is large: repeating it costs far more than any re-layout saves."""
        if not is_contraction(op.rule):
            return strategies
        nothing = Strategy(tuple(() for _ in op.rule.factors))
        whole, _ = self.costs.op(op, nothing, derive(op.rule, nothing, self.costs.mesh))
        latency = self.costs.cluster.link_for(self.costs.mesh.axes, self.costs.mesh).latency
        if whole < max(LARGE_IN_LATENCIES * latency, LARGE_IN_GATHERINGS * self._gathering(op)):
            return strategies
        most = max(_axes_used(s) for s in strategies)
        return [s for s in strategies if _axes_used(s) == most]

    def _gathering(self, op: OpNode) -> float:
        """Seconds in which the results of a product come from all ranks, of which each has a part."""
        mesh, results = self.costs.mesh, (result for result in op.call.results if result is not None)
        nbytes = sum(math.prod(result.shape) * result.dtype.itemsize for result in results)
        sent = nbytes * (mesh.world_size - 1) / mesh.world_size
        wide = tuple(axis for axis in mesh.axes if mesh.size[axis] > 1)
        return self.costs.link("all_gather", mesh.world_size, sent, wide, mesh.world_size - 1)


def _axes_used(strategy: Strategy) -> int:
    return len({axis for digits in strategy.digits for digit in digits for axis, _ in digit.coeffs})


@lru_cache(maxsize=4)
def pending_carriers(graph: Annotated) -> frozenset[str]:
    """Ops through which a pending sum may pass with profit.

    An addition of two values that can both be pending saves a reduction. A view, cast or sum passes one on if what
    reads it does, or if it is the result of the step. All others reduce first.
    """
    carriers: set[str] = set()
    finals = {node for node in graph.captured.grads.values() if node is not None}
    can = _can_pend(graph)
    for op in reversed(graph.ops):
        if not op.rule.linear:
            continue
        pending = [i for i, key in enumerate(op.operands) if key in can]
        joint = any(len(set(pending) & linear) > 1 for linear in op.rule.linear)
        passes = len(op.operands) == 1 and bool(pending)
        useful = op.name in finals or any(r.name in carriers for r in graph.readers.get(op.name, ()))
        if joint or (passes and useful):
            carriers.add(op.name)
    return frozenset(carriers)


def _can_pend(graph: Annotated) -> set[ValueKey]:
    """Values that some strategy makes as pending sums."""
    can: set[ValueKey] = set()
    for op in graph.ops:
        inside = {i for i, key in enumerate(op.operands) if key in can}
        passes = not is_contraction(op.rule) and any(inside & linear for linear in op.rule.linear)
        for index, tensor in enumerate(op.rule.outputs):
            present = {f for dim in tensor for f in dim}
            sums = any(f not in present and op.rule.factors[f].kind == SUM for f in op.movable)
            if op.call.results[index] is not None and (sums or passes):
                can.add((op.name, index))
    return can


def _twice(op: OpNode, strategy: Strategy) -> bool:
    """A pending sum must not pass where one value stands both inside and outside the linear operands."""
    if not strategy.pending:
        return False
    inside = {key for i, key in enumerate(op.operands) if i in op.rule.linear[strategy.linear]}
    outside = {key for i, key in enumerate(op.operands) if i not in op.rule.linear[strategy.linear]}
    return bool(inside & outside)


def _lead(graph: Annotated, op: OpNode) -> int | None:
    """Index of the operand an op follows: the largest, the last where several are."""
    best: tuple[int, int] | None = None
    for i, key in enumerate(op.operands):
        if graph.values[key].kind in ("op", "param"):
            best = max(best or (-1, -1), (graph.values[key].numel, i))
    return best[1] if best else None


def _is_drawn(graph: Annotated, key: ValueKey) -> bool:
    """Whether a value is drawn, and so whole everywhere: what reads it need not stay so."""
    return key[0] in graph.by_name and draws(graph.by_name[key[0]].call)


def _following(
    own: Choices,
    lead: int,
    graph: Annotated,
    done: list[Choices],
    params: list[ParamChoices],
    param_class: dict[ValueKey, int],
    costs: Costs,
) -> Choices | None:
    """The same choices as a follower of the operand `lead`, or None where the op has to choose by itself."""
    key = own.op.operands[lead]
    root, produced = _produced(key, graph, done, params, param_class)
    if root is None:
        return None
    single = sum(1 for k in own.op.operands if graph.values[k].kind in ("op", "param")) == 1
    itemsize = graph.values[key].dtype.itemsize
    wanting: dict[Layout, list[int]] = {}
    for i, derived in enumerate(own.derived):
        wanting.setdefault(derived.inputs[lead].layout, []).append(i)
    table: dict[Layout, int] = {}
    for layout, _ in produced:
        exact = wanting.get(layout, [])
        if len(exact) > 1 or (layout.partial and not (single and exact)):
            return None
    for layout, _ in produced:
        table[layout] = wanting[layout][0] if layout in wanting else _nearest(own, wanting, layout, itemsize, costs)
    return _grouped(own, root, produced, table)


def _produced(
    key: ValueKey,
    graph: Annotated,
    done: list[Choices],
    params: list[ParamChoices],
    param_class: dict[ValueKey, int],
) -> tuple[int | None, list[tuple[Layout, list[int]]]]:
    """Root of a value, and its layouts with the root's choices that give each."""
    if key in param_class:
        index = param_class[key]
        return -1 - index, [(layout, [i]) for i, layout in enumerate(params[index].layouts)]
    klass = graph.by_name[key[0]].klass
    if klass >= len(done):
        return None, []
    source = done[klass]
    merged: dict[Layout, list[int]] = {}
    for derived, members in zip(source.derived, source.members, strict=True):
        merged.setdefault(derived.outputs[key[1]].layout, []).extend(members)
    return source.root, list(merged.items())


def _nearest(own: Choices, wanting: dict[Layout, list[int]], layout: Layout, itemsize: int, costs: Costs) -> int:
    """Cheapest strategy once the lead operand comes in `layout`, which none takes as it is."""
    found: tuple[float, int] | None = None
    for wanted, strategies in sorted(wanting.items(), key=lambda item: min(own.seconds[i] for i in item[1])):
        cheapest = min(strategies, key=lambda i: (own.seconds[i], i))
        if found is not None and own.seconds[cheapest] > found[0]:
            break
        price = own.seconds[cheapest] + costs.relayout(layout, wanted, itemsize)
        found = min(found or (price, cheapest), (price, cheapest))
    assert found is not None, f"{own.op.name} has no strategy"
    return found[1]


def _grouped(own: Choices, root: int, produced: list[tuple[Layout, list[int]]], table: dict[Layout, int]) -> Choices:
    members: dict[int, list[int]] = {}
    for layout, ids in produced:
        members.setdefault(table[layout], []).extend(ids)
    kept = sorted(members)
    return own.picked(kept, root, [members[i] for i in kept])


def rest_layouts(shape: Sequence[int], mesh: Mesh, space: StrategySpace = DEFAULT_SPACE) -> list[Layout]:
    """Candidate layouts of a parameter at rest: every axis on no dim or one dim, and skewed pairs on two dims with
    every other axis on no dim or one dim beside.
    """
    axes = [axis for axis in mesh.axes if mesh.size[axis] > 1]
    cuts = _plain_cuts(shape, axes, mesh, {dim: () for dim in range(len(shape))})
    if len(shape) == 2:
        cuts += _skewed_cuts(shape, axes, mesh, space)
    return list(dict.fromkeys(shard(shape, cut) for cut in cuts))


Cut = dict[int, tuple[Digit, ...]]


def _plain_cuts(shape: Sequence[int], axes: Sequence[str], mesh: Mesh, start: Cut) -> list[Cut]:
    """`start` with each axis on no dim or one dim."""
    cuts = [start]
    for axis in axes:
        digit = form(mesh.size[axis], **{axis: 1})
        grown = [{**cut, dim: with_digit(cut[dim], digit, mesh)} for cut in cuts for dim in range(len(shape))]
        cuts += [cut for cut in grown if _fits(shape, cut)]
    return cuts


def _fits(shape: Sequence[int], cut: Cut) -> bool:
    return all(size >= math.prod(digit.q for digit in cut[dim]) for dim, size in enumerate(shape))


def _skewed_cuts(shape: Sequence[int], axes: Sequence[str], mesh: Mesh, space: StrategySpace) -> list[Cut]:
    """Two dims cut by a form of a pair of axes each, one of them skewed."""
    found: list[Cut] = []
    for a, b in equal_pairs(mesh, axes, space):
        q = mesh.size[a]
        others = [axis for axis in axes if axis not in (a, b)]
        plain = [form(q, **{a: 1}), form(q, **{b: 1})]
        both = form(q, **{a: 1, b: 1})
        starts: list[Cut] = [{0: (both,), 1: (one,)} for one in plain]
        starts += [{0: (one,), 1: (both,)} for one in plain]
        found += [cut for start in starts if min(shape) >= q for cut in _plain_cuts(shape, others, mesh, start)]
    return found


def _params(
    graph: Annotated, classes: Quotient, mesh: Mesh, restriction: Restriction, space: StrategySpace
) -> list[ParamChoices]:
    found = []
    for group in classes.params:
        layouts = rest_layouts(group.value.shape, mesh, space)
        if restriction.layouts is not None:
            layouts = restriction.layouts(graph, group.value, layouts, mesh)
        found.append(ParamChoices(group.names, group.value, layouts))
    return found


def again_root(space: Space, klass: int) -> int:
    """The root that says whether an op class of forward runs again in backward: choice 1 is that it does."""
    return len(space.choices) + klass


def strategy_of(space: Space, choice: Mapping[int, int], klass: int) -> tuple[int, Strategy]:
    """Chosen strategy of an op class, and its index there."""
    choices = space.choices[klass]
    index = next(s for s, members in enumerate(choices.members) if choice[choices.root] in members)
    return index, choices.strategies[index]


def ports_of(
    space: Space, producer: tuple[str, int, int], value: ValueInfo
) -> tuple[int | None, list[Port], list[list[int]]]:
    """Root, the distinct ways in which values of a producer class are made, and per way the root's choices."""
    kind, index, result = producer
    if kind == "fixed":
        return None, [Port(replicated(value.shape))], [[]]
    if kind == "param":
        layouts = space.params[index].layouts
        return -1 - index, [Port(layout) for layout in layouts], [[i] for i in range(len(layouts))]
    source = space.choices[index]
    return source.root, *_distinct([derived.outputs[result] for derived in source.derived], source.members)


def needs_of(space: Space, edge: Edge) -> tuple[int | None, list[Port], list[list[int]]]:
    """Root, the distinct ways in which a use reads values, and per way the root's choices."""
    if edge.consumer < 0:
        if edge.port < 0:
            return None, [Port(replicated(edge.value.shape))], [[]]
        layouts = space.params[edge.port].layouts
        return -1 - edge.port, [Port(layout) for layout in layouts], [[i] for i in range(len(layouts))]
    target = space.choices[edge.consumer]
    return target.root, *_distinct([derived.inputs[edge.port] for derived in target.derived], target.members)


def _distinct(ports: list[Port], members: list[list[int]]) -> tuple[list[Port], list[list[int]]]:
    """Ports that differ in their layout or slices, and the root's choices of each."""
    merged: dict[tuple[Layout, Slices | None], list[int]] = {}
    for port, ids in zip(ports, members, strict=True):
        merged.setdefault((port.layout, port.slices), []).extend(ids)
    return [Port(layout, slices=slices) for layout, slices in merged], list(merged.values())
