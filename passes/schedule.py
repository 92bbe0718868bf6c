"""What each phase runs, keeps and fetches: op order, saved values, and where each transfer starts.

Forward and backward are two programs. What backward reads of forward is saved in the layout it was produced in (or,
where that is a pending sum, in the layout that backward asks for). Views are made anew in backward, not saved; so is
what backward runs again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import Layout, replicated
from stpart_compiler.ir.spacetime import Derived
from stpart_compiler.passes.ahead import Ahead
from stpart_compiler.passes.order import NOTHING_AGAIN, Orders, orders, views_of
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.quotient import producer_of, quotient

Need = tuple[ValueKey, Layout]


@dataclass
class Phase:
    """One program's content, the same on all ranks.

    `starts[op]`: fetches of resting values to begin before that op. `slices[op]`: operands that arrive slice by slice,
    as names of loops and ports, the first slice to begin before that op. `wanted[value]`: layouts to begin as soon as
    the value is made. `leaving[value]`: where its slices are brought as they are made. `ends[op]`: results of the phase
    to wait for before that op. `seconds[op]`: work of heavy ops, shared by all ranks. `layout`: layouts of inputs that
    differ from where the value was produced. `gives_sums`: outputs may be pending sums.
    """

    name: str
    ops: list[OpNode]
    inputs: list[Need]
    outputs: list[Need]
    starts: dict[str, list[Need]] = field(default_factory=dict)
    slices: dict[str, list[tuple[str, int]]] = field(default_factory=dict)
    wanted: dict[ValueKey, list[Layout]] = field(default_factory=dict)
    leaving: dict[ValueKey, Layout] = field(default_factory=dict)
    ends: dict[str, list[Need]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    layout: dict[ValueKey, Layout] = field(default_factory=dict)
    views: frozenset[str] = frozenset()
    gives_sums: bool = False


@dataclass
class Schedule:
    """Both phases; `saved`: values handed from forward to backward, in order."""

    forward: Phase
    backward: Phase | None
    saved: list[Need]


@dataclass(frozen=True)
class MakeSchedule:
    """placement -> phases. `cost`: of the cluster and mesh on which transfers are to run beside compute."""

    cost: LinkCost

    def apply(
        self,
        graph: Annotated,
        derived: Callable[[OpNode], Derived],
        layout: Callable[[ValueKey], Layout],
        again: frozenset[str] = NOTHING_AGAIN,
    ) -> Schedule:
        """`again`: names of ops of forward that backward runs again instead of reading what was saved of them."""
        order = orders(graph, again)
        views = frozenset(op.name for op in graph.ops if is_view(op.call.target))
        rest = set(order.resting)
        outputs = [(key, replicated(graph.values[key].shape)) for key in order.results]
        grads = [(key, layout(param)) for key, param in order.grads]
        saved = _saved(graph, order, [*_reads(order.backward, derived), *grads], layout, derived)
        first = Phase("forward", order.forward, [], [*outputs, *saved], views=views)
        first.inputs = [(key, layout(key)) for key in _used(graph, order.forward, first.outputs, rest, views)]
        plan_transfers(graph, first, derived, layout, rest, self.cost)
        if not order.training:
            return Schedule(first, None, [])
        second = Phase("backward", order.backward, [], grads, views=views, layout=dict(saved))
        used = _used(graph, order.backward, grads, rest, views)
        tangents = {name for _, name in graph.captured.tangents}
        second.inputs = [*saved, *((key, layout(key)) for key in used if key[0] not in tangents)]
        second.inputs += [((name, 0), layout((name, 0))) for _, name in graph.captured.tangents]
        plan_transfers(graph, second, derived, layout, rest | {key for key, _ in saved}, self.cost)
        return Schedule(first, second, saved)


def _reads(ops: Iterable[OpNode], derived: Callable[[OpNode], Derived]) -> list[Need]:
    return [(key, port.layout) for op in ops for key, port in zip(op.operands, derived(op).inputs, strict=True)]


def _saved(
    graph: Annotated,
    order: Orders,
    reads: list[Need],
    layout: Callable[[ValueKey], Layout],
    derived: Callable[[OpNode], Derived],
) -> list[Need]:
    """Saved values in the layout they are produced in, or where that is pending as the first read asks for them."""
    made = {op.name for op in order.backward}
    asked: dict[ValueKey, Layout] = {}

    def visit(key: ValueKey, wanted: Layout) -> None:
        if key in saved:
            asked.setdefault(key, wanted)
        elif key[0] in order.lazy_backward and key[0] not in made:
            view = graph.by_name[key[0]]
            for operand, port in zip(view.operands, derived(view).inputs, strict=True):
                visit(operand, port.layout)

    saved = set(order.saved)
    for key, wanted in reads:
        visit(key, wanted)
    places = {key: asked[key] if layout(key).partial else layout(key) for key in order.saved}
    return [(key, place.without_partial().without_halo()) for key, place in places.items()]


def _used(
    graph: Annotated, ops: list[OpNode], outputs: list[Need], rest: set[ValueKey], views: frozenset[str]
) -> list[ValueKey]:
    """Resting values that a phase reads, directly or through views that it makes itself."""
    found: dict[ValueKey, None] = {}
    names = {op.name for op in ops}

    def visit(key: ValueKey) -> None:
        if key in rest:
            found[key] = None
        elif key[0] not in names and key[0] in views:
            for operand in graph.by_name[key[0]].operands:
                visit(operand)

    for op in ops:
        for key in op.operands:
            visit(key)
    for key, _ in outputs:
        visit(key)
    return list(found)


def plan_transfers(
    graph: Annotated,
    phase: Phase,
    derived: Callable[[OpNode], Derived],
    layout: Callable[[ValueKey], Layout],
    rest: AbstractSet[ValueKey],
    cost: LinkCost,
) -> None:
    """Made values move on at once; resting ones (and views of them) start, and results end, as `Ahead` says."""
    lazy = views_of(graph, rest)
    phase.ops = [op for op in phase.ops if op.name not in lazy]
    ahead = Ahead(graph, phase.ops, cost)
    phase.seconds = ahead.seconds()
    given: dict[str, list[Need]] = {}
    for key, wanted in phase.outputs:
        if key not in rest and key[0] not in lazy:
            if _leaves_apart(graph, key, wanted, derived):
                phase.leaving[key] = wanted
            else:
                phase.wanted.setdefault(key, []).append(wanted)
            given.setdefault(key[0], []).append((key, wanted))
    place = {op.name: t for t, op in enumerate(phase.ops)}
    for t, (op, begin) in enumerate(zip(phase.ops, ahead.begins(), strict=True)):
        for i, (key, port) in enumerate(zip(op.operands, derived(op).inputs, strict=True)):
            rests = key in rest or key[0] in lazy
            if port.comes_apart(phase.layout.get(key) or layout(key)):
                first = begin if rests else max(begin, place[key[0]] + 1)
                phase.slices.setdefault(phase.ops[first].name, []).append((op.name, i))
            elif rests:
                phase.starts.setdefault(phase.ops[begin].name, []).append((key, port.layout))
            else:
                phase.wanted.setdefault(key, []).append(port.layout)
        end = ahead.end(t) if op.name in given else None
        if end is not None:
            phase.ends.setdefault(phase.ops[end].name, []).extend(given[op.name])


def _leaves_apart(graph: Annotated, key: ValueKey, wanted: Layout, derived: Callable[[OpNode], Derived]) -> bool:
    """Whether a result of the phase is brought to its layout slice by slice, as the loop makes it."""
    port = derived(graph.by_name[key[0]]).outputs[key[1]]
    if not port.comes_apart(wanted):
        return False
    folded = quotient(graph)
    return producer_of(graph, key, folded.param_class) in folded.gradients
