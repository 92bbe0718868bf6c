"""What each phase runs, keeps and fetches: op order, saved values, and where each transfer starts.

Forward and backward are two programs. What backward reads of forward is saved in the layout it was produced in (or,
where that is a pending sum, in the layout that backward asks for). Views are made anew in backward, not saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import Layout, replicated
from stpart_compiler.ir.spacetime import Derived
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.strategies import is_contraction

Need = tuple[ValueKey, Layout]


@dataclass
class Phase:
    """One program's content, the same on all ranks.

    `starts[op]`: fetches of resting values to begin before that op. `wanted[value]`: layouts to begin as soon as the
    value is made. `layout`: layouts of inputs that differ from where the value was produced. `gives_sums`: outputs may
    be pending sums.
    """

    name: str
    ops: list[OpNode]
    inputs: list[Need]
    outputs: list[Need]
    starts: dict[str, list[Need]] = field(default_factory=dict)
    wanted: dict[ValueKey, list[Layout]] = field(default_factory=dict)
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
    """placement -> phases."""

    def apply(
        self,
        graph: Annotated,
        derived: Callable[[OpNode], Derived],
        layout: Callable[[ValueKey], Layout],
    ) -> Schedule:
        views = frozenset(op.name for op in graph.ops if is_view(op.call.target))
        forward_ops = [op for op in graph.ops if op.name not in graph.backward]
        backward_ops = [op for op in graph.ops if op.name in graph.backward]
        rest = resting(graph)
        captured = graph.captured
        outputs = [
            (graph.alias[node], replicated(graph.values[graph.alias[node]].shape))
            for node in [*(o.node for o in captured.outputs if o.node), *captured.mutations.values()]
        ]
        nodes = {p.name: p.node for p in captured.params}
        grads: list[Need] = []
        for name, grad in captured.grads.items():
            node = nodes[name]
            if grad is not None and node is not None:
                grads.append((graph.alias[grad], layout((node, 0))))
        reads = _reads(backward_ops, derived) + grads
        saved = _saved(graph, reads, views, rest, layout, derived)
        first = Phase("forward", forward_ops, [], [*outputs, *saved], views=views)
        first.inputs = [(key, layout(key)) for key in _used(graph, forward_ops, [*outputs, *saved], rest, views)]
        plan_transfers(graph, first, derived, rest)
        if not captured.training or not captured.tangents:
            return Schedule(first, None, [])
        second = Phase("backward", backward_ops, [], grads, views=views, layout=dict(saved))
        used = _used(graph, backward_ops, grads, rest, views)
        tangents = {name for _, name in captured.tangents}
        second.inputs = [*saved, *((key, layout(key)) for key in used if key[0] not in tangents)]
        second.inputs += [((name, 0), layout((name, 0))) for _, name in captured.tangents]
        plan_transfers(graph, second, derived, rest | {key for key, _ in saved})
        return Schedule(first, second, saved)


def resting(graph: Annotated) -> set[ValueKey]:
    """Values that exist before a phase starts."""
    return {key for key, info in graph.values.items() if info.kind != "op"}


def _reads(ops: Iterable[OpNode], derived: Callable[[OpNode], Derived]) -> list[Need]:
    return [(key, port.layout) for op in ops for key, port in zip(op.operands, derived(op).inputs, strict=True)]


def _through_views(
    graph: Annotated, key: ValueKey, views: frozenset[str], stop: Callable[[ValueKey], bool]
) -> ValueKey:
    """The value behind a chain of views."""
    while not stop(key) and key[0] in views and graph.by_name[key[0]].operands:
        key = graph.by_name[key[0]].operands[0]
    return key


def _saved(
    graph: Annotated,
    reads: list[Need],
    views: frozenset[str],
    rest: set[ValueKey],
    layout: Callable[[ValueKey], Layout],
    derived: Callable[[OpNode], Derived],
) -> list[Need]:
    found: dict[ValueKey, Layout] = {}

    def in_backward(key: ValueKey) -> bool:
        return key in rest or key[0] in graph.backward

    for key, wanted in reads:
        base = _through_views(graph, key, views, in_backward)
        if in_backward(base) or base in found:
            continue
        place = layout(base)
        if place.partial:
            place = wanted if base == key else _view_input(graph, key, base, derived)
        found[base] = place.without_partial().without_halo()
    return list(found.items())


def _view_input(graph: Annotated, key: ValueKey, base: ValueKey, derived: Callable[[OpNode], Derived]) -> Layout:
    """Layout in which the first view behind `key` reads `base`."""
    while graph.by_name[key[0]].operands[0] != base:
        key = graph.by_name[key[0]].operands[0]
    return derived(graph.by_name[key[0]]).inputs[0].layout


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


def plan_transfers(graph: Annotated, phase: Phase, derived: Callable[[OpNode], Derived], rest: set[ValueKey]) -> None:
    """Made values move on at once; resting ones (and views of them) one heavy op before their first use."""
    ahead: list[str] = []
    lazy = _lazy(graph, phase, rest)
    phase.ops = [op for op in phase.ops if op.name not in lazy]
    for op in phase.ops:
        begin = ahead[-1] if ahead else op.name
        for key, port in zip(op.operands, derived(op).inputs, strict=True):
            if key in rest or key[0] in lazy:
                phase.starts.setdefault(begin, []).append((key, port.layout))
            else:
                phase.wanted.setdefault(key, []).append(port.layout)
        if is_contraction(op.rule) or op.rule.loops:
            ahead.append(op.name)
    for key, layout in phase.outputs:
        if key not in rest and key[0] not in lazy:
            phase.wanted.setdefault(key, []).append(layout)


def _lazy(graph: Annotated, phase: Phase, rest: set[ValueKey]) -> set[str]:
    """Views of resting values: made when first asked for."""
    lazy: set[str] = set()
    for op in graph.ops:
        if op.name in phase.views and op.operands and all(key in rest or key[0] in lazy for key in op.operands):
            lazy.add(op.name)
    return lazy
