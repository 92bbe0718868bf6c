"""The joint graph with identical layers folded: what the search needs of it, per class instead of per op.

Built once per graph; search spaces, templates and problems then cost the same for 4 layers as for 80.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from stpart_compiler.passes.propagate import Annotated, ValueInfo, ValueKey

Producer = tuple[str, int, int]
"""("op", class, result), ("param", class, 0) or ("fixed", 0, 0): whole on every rank."""


@dataclass
class ParamClass:
    """Parameters of one shape and dtype with the same uses."""

    names: list[str]
    value: ValueInfo
    trained: int = 0  # how many of them get a gradient


@dataclass
class Edge:
    """A class of uses: operand `port` of op class `consumer` reads a value of `producer`, `count` times."""

    producer: Producer
    consumer: int
    port: int
    count: int
    value: ValueInfo

    @property
    def is_gradient(self) -> bool:
        """Whether it gives back a parameter's gradient."""
        return self.consumer < 0 and self.port >= 0


@dataclass
class Quotient:
    """`finals`: uses by what the program gives back; consumer -1, port the class of the parameter or -1.

    `fixed_bytes`: inputs, buffers and constants, whole on every rank.
    """

    params: list[ParamClass]
    param_class: dict[ValueKey, int]
    edges: list[Edge]
    finals: list[Edge]
    fixed_bytes: int

    @cached_property
    def gradients(self) -> frozenset[Producer]:
        """Whose values are each the gradient of a parameter, and nothing else."""
        read = [edge.producer for edge in (*self.edges, *self.finals)]
        return frozenset(edge.producer for edge in self.finals if edge.is_gradient and read.count(edge.producer) == 1)


@lru_cache(maxsize=4)
def quotient(graph: Annotated) -> Quotient:
    """Fold the annotated graph by its classes."""
    params, param_class = _params(graph)
    fixed = [info for info in graph.values.values() if info.kind in ("buffer", "input", "constant")]
    nbytes = sum(info.nbytes for info in fixed)
    edges, finals = _edges(graph, param_class), _finals(graph, param_class)
    return Quotient(params, param_class, edges, finals, nbytes)


def _params(graph: Annotated) -> tuple[list[ParamClass], dict[ValueKey, int]]:
    groups: dict[tuple[object, ...], ParamClass] = {}
    number: dict[tuple[object, ...], int] = {}
    order: dict[ValueKey, int] = {}
    for info in graph.captured.params:
        if info.node is None:
            continue
        value = graph.values[(info.node, 0)]
        users = frozenset(graph.uses.get(value.key, ()))
        key = (value.shape, value.dtype, info.requires_grad, users)
        group = groups.setdefault(key, ParamClass([], value))
        group.names.append(info.name)
        group.trained += info.requires_grad
        order[value.key] = number.setdefault(key, len(number))
    return list(groups.values()), order


def _edges(graph: Annotated, param_class: dict[ValueKey, int]) -> list[Edge]:
    found: dict[tuple[object, ...], Edge] = {}
    for op in graph.ops:
        for port, key in enumerate(op.operands):
            producer = producer_of(graph, key, param_class)
            at = (producer, op.klass, port)
            if at not in found:
                found[at] = Edge(producer, op.klass, port, 0, graph.values[key])
            found[at].count += 1
    return list(found.values())


def producer_of(graph: Annotated, key: ValueKey, param_class: dict[ValueKey, int]) -> Producer:
    """Class of the producer of a value; inputs, tangents, buffers and constants are whole on every rank."""
    if key in param_class:
        return ("param", param_class[key], 0)
    if graph.values[key].kind != "op":
        return ("fixed", 0, 0)
    return ("op", graph.by_name[key[0]].klass, key[1])


def _finals(graph: Annotated, param_class: dict[ValueKey, int]) -> list[Edge]:
    """Gradients must end where their parameter rests; outputs and new buffer values whole on every rank."""
    captured = graph.captured
    found: dict[tuple[object, ...], Edge] = {}

    def add(node: str, port: int) -> None:
        key = graph.alias[node]
        at = (producer_of(graph, key, param_class), port)
        if at not in found:
            found[at] = Edge(at[0], -1, port, 0, graph.values[key])
        found[at].count += 1

    nodes = {p.name: p.node for p in captured.params}
    for name, grad in captured.grads.items():
        if grad is not None:
            node = nodes[name]
            add(grad, param_class[(node, 0)] if node is not None else -1)
    for output in captured.outputs:
        if output.node is not None:
            add(output.node, -1)
    for node in captured.mutations.values():
        add(node, -1)
    return list(found.values())
