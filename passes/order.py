"""The order of a step, whatever the placements: ops of forward and backward, what is saved, and views.

Forward and backward are two programs. What backward reads of forward is saved; views of it are made anew, as are views
of all that rests: they take no place in the order but are made when first asked for.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import lru_cache

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.quotient import quotient
from stpart_compiler.passes.rules.registry import draws
from stpart_compiler.passes.strategies import is_contraction

Use = tuple[int, int]
"""Op class and operand; (-1, class of parameters or -1) for a result of the step."""


@dataclass(frozen=True)
class Orders:
    """`forward`, `backward`: ops without the views that are made when asked for; of backward they are `lazy_backward`.

    Backward has the ops of forward that are run again, each right before the first op that needs it. `resting`: values
    that exist before the step. `saved`: values handed from forward to backward. `results`, `grads`:
    what each phase gives back; of gradients with the node of their parameter.
    """

    forward: list[OpNode]
    backward: list[OpNode]
    lazy_backward: frozenset[str]
    resting: frozenset[ValueKey]
    saved: list[ValueKey]
    results: list[ValueKey]
    grads: list[tuple[ValueKey, ValueKey]]
    training: bool


NOTHING_AGAIN: frozenset[str] = frozenset()


@lru_cache(maxsize=8)
def orders(graph: Annotated, again: frozenset[str] = NOTHING_AGAIN) -> Orders:
    """The order of the ops of a step. `again`: names of ops of forward that backward runs again, if it needs them."""
    captured = graph.captured
    rest = resting(graph)
    nodes = {p.name: p.node for p in captured.params}
    grads: list[tuple[ValueKey, ValueKey]] = []
    for name, grad in captured.grads.items():
        node = nodes[name]
        if grad is not None and node is not None:
            grads.append((graph.alias[grad], (node, 0)))
    results = [graph.alias[o.node] for o in captured.outputs if o.node]
    results += [graph.alias[node] for node in captured.mutations.values()]
    forward = [op for op in graph.ops if op.name not in graph.backward]
    lazy_forward = views_of(graph, rest)
    forward = [op for op in forward if op.name not in lazy_forward]
    if not captured.training or not captured.tangents:
        return Orders(forward, [], frozenset(), rest, [], results, [], False)
    backward = _read([op for op in graph.ops if op.name in graph.backward], {key for key, _ in grads})
    remake = _Remake(graph, again, rest)
    for op in backward:
        remake.add(op)
    for key, _ in grads:
        remake.need(key)
    saved = list(remake.saved)
    lazy_backward = views_of(graph, rest | set(saved))
    backward = [op for op in remake.ops if op.name not in lazy_backward]
    return Orders(forward, backward, lazy_backward, rest, saved, results, grads, True)


def may_run_again(graph: Annotated, op: OpNode) -> bool:
    """Whether an op of forward may be run again in backward: it draws nothing, and is no mere view."""
    return op.name not in graph.backward and not draws(op.call) and not is_view(op.call.target)


def resting(graph: Annotated) -> frozenset[ValueKey]:
    """Values that exist before the step."""
    return frozenset(key for key, info in graph.values.items() if info.kind != "op")


def is_heavy(op: OpNode) -> bool:
    """Whether an op takes long enough for a transfer to run beside it."""
    return is_contraction(op.rule) or bool(op.rule.loops)


def use_of_grad(graph: Annotated, param: ValueKey) -> Use:
    """The use of a gradient: it ends where its parameter rests."""
    return -1, quotient(graph).param_class[param]


def _read(ops: list[OpNode], results: set[ValueKey]) -> list[OpNode]:
    """The ops without views that nobody reads."""
    wanted = {name for name, _ in results}
    kept = []
    for op in reversed(ops):
        if op.name in wanted or not is_view(op.call.target):
            wanted |= {name for name, _ in op.operands}
            kept.append(op)
    return kept[::-1]


def views_of(graph: Annotated, rest: AbstractSet[ValueKey]) -> frozenset[str]:
    """Views of what rests, made when first asked for."""
    lazy: set[str] = set()
    for op in graph.ops:
        if is_view(op.call.target) and op.operands and all(key in rest or key[0] in lazy for key in op.operands):
            lazy.add(op.name)
    return frozenset(lazy)


@lru_cache(maxsize=4)
def marked(graph: Annotated) -> frozenset[str]:
    """Ops that the user's torch.utils.checkpoint asks to run again; what leaves a checkpoint is saved."""
    if all(op.checkpoint is None for op in graph.ops):
        return NOTHING_AGAIN
    leaves = {key[0] for key in orders(graph).results}
    for op in reversed(graph.ops):
        if op.checkpoint is None or op.name in graph.backward:
            continue
        forward = [reader for reader in graph.readers.get(op.name, ()) if reader.name not in graph.backward]
        outside = any(reader.checkpoint != op.checkpoint for reader in forward)
        if outside or any(reader.name in leaves and is_view(reader.call.target) for reader in forward):
            leaves.add(op.name)
    inside = (op for op in graph.ops if op.checkpoint is not None and op.name not in leaves)
    return frozenset(op.name for op in inside if may_run_again(graph, op))


class _Remake:
    """Backward's ops, each behind what it needs of forward: views, and what is run again. All else is saved."""

    def __init__(self, graph: Annotated, again: frozenset[str], resting: frozenset[ValueKey]) -> None:
        self.graph = graph
        self.again = again
        self.resting = resting
        self.ops: list[OpNode] = []
        self.placed: set[str] = set()
        self.saved: dict[ValueKey, None] = {}
        self.known: set[str] = set()
        self.number = {op.name: i for i, op in enumerate(graph.ops)}

    def add(self, op: OpNode) -> None:
        for key in op.operands:
            self.need(key)
        self.ops.append(op)

    def need(self, key: ValueKey) -> None:
        """Place all that a value needs, in the order of forward."""
        found: list[OpNode] = []
        todo = [key]
        while todo:
            key = todo.pop()
            if self._is_there(key):
                continue
            op = self.graph.by_name[key[0]]
            if op.name not in self.again and not (is_view(op.call.target) and op.operands):
                self.saved[key] = None
                continue
            self.known.add(op.name)
            found.append(op)
            todo += op.operands[::-1]
        for op in sorted(found, key=lambda op: self.number[op.name]):
            if op.name in self.again or any(name in self.placed for name, _ in op.operands):
                self.placed.add(op.name)
                self.ops.append(op)

    def _is_there(self, key: ValueKey) -> bool:
        return key in self.resting or key[0] in self.graph.backward or key in self.saved or key[0] in self.known
