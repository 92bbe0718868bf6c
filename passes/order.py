"""The order of a step, whatever the placements: ops of forward and backward, what is saved, and views.

Forward and backward are two programs. What backward reads of forward is saved; views of it are made anew, as are views
of all that rests: they take no place in the order but are made when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.quotient import quotient
from stpart_compiler.passes.strategies import is_contraction

WAIT_AFTER = 2
"""Heavy ops that run beside the transfer of a phase's result before it is waited for."""

Use = tuple[int, int]
"""Op class and operand; (-1, class of parameters or -1) for a result of the step."""


@dataclass(frozen=True)
class Orders:
    """`forward`, `backward`: ops without the views that are made when asked for, which are in `lazy_*`.

    `resting`: values that exist before the step. `saved`: values handed from forward to backward. `results`, `grads`:
    what each phase gives back; of gradients with the node of their parameter.
    """

    forward: list[OpNode]
    backward: list[OpNode]
    lazy_forward: frozenset[str]
    lazy_backward: frozenset[str]
    resting: frozenset[ValueKey]
    saved: list[ValueKey]
    results: list[ValueKey]
    grads: list[tuple[ValueKey, ValueKey]]
    training: bool


@lru_cache(maxsize=4)
def orders(graph: Annotated) -> Orders:
    """The order of the ops of a step."""
    captured = graph.captured
    resting = frozenset(key for key, info in graph.values.items() if info.kind != "op")
    nodes = {p.name: p.node for p in captured.params}
    grads: list[tuple[ValueKey, ValueKey]] = []
    for name, grad in captured.grads.items():
        node = nodes[name]
        if grad is not None and node is not None:
            grads.append((graph.alias[grad], (node, 0)))
    results = [graph.alias[o.node] for o in captured.outputs if o.node]
    results += [graph.alias[node] for node in captured.mutations.values()]
    forward = [op for op in graph.ops if op.name not in graph.backward]
    lazy_forward = _lazy(graph, resting)
    forward = [op for op in forward if op.name not in lazy_forward]
    if not captured.training or not captured.tangents:
        return Orders(forward, [], lazy_forward, frozenset(), resting, [], results, [], False)
    backward = _read([op for op in graph.ops if op.name in graph.backward], {key for key, _ in grads})
    saved = _saved(graph, backward, [key for key, _ in grads], resting)
    lazy_backward = _lazy(graph, resting | set(saved))
    backward = [op for op in backward if op.name not in lazy_backward]
    return Orders(forward, backward, lazy_forward, lazy_backward, resting, saved, results, grads, True)


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


def _lazy(graph: Annotated, rest: frozenset[ValueKey] | set[ValueKey]) -> frozenset[str]:
    """Views of what rests."""
    lazy: set[str] = set()
    for op in graph.ops:
        if is_view(op.call.target) and op.operands and all(key in rest or key[0] in lazy for key in op.operands):
            lazy.add(op.name)
    return frozenset(lazy)


def _saved(
    graph: Annotated, backward: list[OpNode], grads: list[ValueKey], resting: frozenset[ValueKey]
) -> list[ValueKey]:
    """What backward reads of forward, behind any views."""
    found: dict[ValueKey, None] = {}
    for key in [*(key for op in backward for key in op.operands), *grads]:
        while not _in_backward(graph, key, resting) and is_view(graph.by_name[key[0]].call.target):
            if not graph.by_name[key[0]].operands:
                break
            key = graph.by_name[key[0]].operands[0]
        if not _in_backward(graph, key, resting):
            found[key] = None
    return list(found)


def _in_backward(graph: Annotated, key: ValueKey, resting: frozenset[ValueKey]) -> bool:
    return key in resting or key[0] in graph.backward
