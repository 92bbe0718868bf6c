"""Annotate the joint graph: a factor rule per op, dims refined into atoms, and classes of identical ops.

A view may flatten (batch, sequence) into one dim. To cut the sequence there, the flattened dim is written as two
atoms, and so is every dim connected with it through the rules. `propagate` finds these atoms as a fixpoint over the
whole graph.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import fx

from stpart_compiler.capture import Captured
from stpart_compiler.ir.rule import WHOLE, DimMap, Factor, OpRule, refined
from stpart_compiler.passes.rules import OpCall, rule_of
from stpart_compiler.passes.rules.calls import op_call

ValueKey = tuple[str, int]


@dataclass
class OpNode:
    """One op of the joint graph with its refined rule. `operands[i]` is the value of the i-th tensor operand."""

    name: str
    call: OpCall
    rule: OpRule
    operands: tuple[ValueKey, ...]
    module_path: str
    is_backward: bool
    has_rule: bool
    movable: frozenset[int] = frozenset()  # factors that may be cut
    batch: frozenset[int] = frozenset()  # factors that come from dim 0 of the user's inputs
    data: frozenset[int] = frozenset()  # factors that come from any dim of the user's inputs
    klass: int = -1


@dataclass
class ValueInfo:
    """A tensor of the joint graph. `kind`: "op", "param", "buffer", "input", "tangent" or "constant"."""

    key: ValueKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    atoms: list[list[int]] = field(default_factory=list)  # per dim, atom sizes, major to minor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(eq=False)
class Annotated:
    """The joint graph as ops over values, in topological order."""

    captured: Captured
    ops: list[OpNode]
    values: dict[ValueKey, ValueInfo]
    alias: dict[str, ValueKey]  # graph node name -> value
    classes: list[list[OpNode]]  # identical ops of repeated layers share a class
    backward: set[str]  # names of ops that run in backward
    by_name: dict[str, OpNode]
    uses: dict[ValueKey, list[tuple[int, int]]]  # value -> (op class, operand) of every use


@dataclass(frozen=True)
class Propagate:
    """captured joint graph -> annotated ops."""

    def apply(self, captured: Captured) -> Annotated:
        ops, values, alias = _collect(captured)
        _refine(ops, values)
        _mark_movable(ops, values)
        classes = _classes(ops)
        by_name = {op.name: op for op in ops}
        return Annotated(captured, ops, values, alias, classes, _backward(captured, ops), by_name, _uses(ops))


def _uses(ops: list[OpNode]) -> dict[ValueKey, list[tuple[int, int]]]:
    uses: dict[ValueKey, list[tuple[int, int]]] = {}
    for op in ops:
        for port, key in enumerate(op.operands):
            uses.setdefault(key, []).append((op.klass, port))
    return uses


def _backward(captured: Captured, ops: list[OpNode]) -> set[str]:
    """Ops that run in backward: those that depend on a tangent, and those that only such ops read."""
    needed = {o.node for o in captured.outputs if o.node} | set(captured.mutations.values())
    forward: set[str] = set()
    for op in reversed(ops):
        if not op.is_backward and (op.name in needed or op.name in forward):
            forward.add(op.name)
            forward |= {name for name, _ in op.operands}
    return {op.name for op in ops if op.name not in forward}


def _collect(captured: Captured) -> tuple[list[OpNode], dict[ValueKey, ValueInfo], dict[str, ValueKey]]:
    kinds = _placeholder_kinds(captured)
    ops: list[OpNode] = []
    values: dict[ValueKey, ValueInfo] = {}
    alias: dict[str, ValueKey] = {}
    rules: dict[str, tuple[OpRule, bool]] = {}
    for node in captured.gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            _add_value(values, alias, node, kinds.get(node.name, "constant"))
        elif node.op == "call_function" and node.target is operator.getitem and node.args[0].name not in alias:
            alias[node.name] = (node.args[0].name, node.args[1])
        elif node.op == "call_function":
            ops.append(_op_node(node, alias, rules))
            _add_results(values, alias, node, ops[-1].call)
    return ops, values, alias


def _placeholder_kinds(captured: Captured) -> dict[str, str]:
    kinds = {p.node: "param" for p in captured.params if p.node}
    kinds |= {b.node: "buffer" for b in captured.buffers if b.node}
    kinds |= {i.node: "input" for i in captured.inputs if i.node}
    kinds |= {name: "tangent" for _, name in captured.tangents}
    return kinds


def _add_value(values: dict[ValueKey, ValueInfo], alias: dict[str, ValueKey], node: fx.Node, kind: str) -> None:
    val = node.meta["val"]
    if not isinstance(val, torch.Tensor):
        return
    key = (node.name, 0)
    values[key] = ValueInfo(key, tuple(val.shape), val.dtype, kind)
    alias[node.name] = key


def _add_results(values: dict[ValueKey, ValueInfo], alias: dict[str, ValueKey], node: fx.Node, call: OpCall) -> None:
    for index, result in enumerate(call.results):
        if result is not None:
            values[(node.name, index)] = ValueInfo((node.name, index), result.shape, result.dtype, "op")
    if isinstance(node.meta["val"], torch.Tensor):
        alias[node.name] = (node.name, 0)


def _op_node(node: fx.Node, alias: dict[str, ValueKey], rules: dict[str, tuple[OpRule, bool]]) -> OpNode:
    call = op_call(node)
    signature = call_signature(call)
    if signature not in rules:
        found = rule_of(call)
        rules[signature] = (found, True) if found is not None else (whole_rule(call), False)
    rule, has_rule = rules[signature]
    operands = tuple(alias[arg.name] for arg in _tensor_args(node))
    path = node.meta.get("module_path", "")
    return OpNode(node.name, call, rule, operands, path, node.meta["is_backward"], has_rule)


def _tensor_args(node: fx.Node) -> Iterator[fx.Node]:
    """Tensor operands in order of occurrence, lists flattened, repeats kept."""

    def walk(item: object) -> Iterator[fx.Node]:
        if isinstance(item, fx.Node):
            if isinstance(item.meta["val"], torch.Tensor):
                yield item
        elif isinstance(item, (list, tuple)):
            for part in item:
                yield from walk(part)

    yield from walk(node.args)
    yield from walk(tuple(node.kwargs.values()))


def call_signature(call: OpCall) -> str:
    """Text that is equal for calls with the same op, shapes, dtypes and other arguments."""
    return f"{call.target}{call.args}{call.kwargs}{call.results}"


def whole_rule(call: OpCall) -> OpRule:
    """Rule of an op that must not be cut: every dim is a factor of its own, kept whole."""
    factors: list[Factor] = []

    def tensor(shape: tuple[int, ...]) -> tuple[DimMap, ...]:
        start = len(factors)
        factors.extend(Factor(f"w{start + i}", size, WHOLE) for i, size in enumerate(shape))
        return tuple((start + i,) for i in range(len(shape)))

    inputs = tuple(tensor(operand.shape) for operand in call.operands)
    outputs = tuple(tensor(result.shape) if result is not None else () for result in call.results)
    return OpRule(tuple(factors), inputs, outputs)


Cuts = set[int]  # suffix products strictly inside a dim or factor


def _refine(ops: list[OpNode], values: dict[ValueKey, ValueInfo]) -> None:
    cuts: dict[ValueKey, list[Cuts]] = {key: [set() for _ in info.shape] for key, info in values.items()}
    by_value: dict[ValueKey, list[int]] = {}
    for index, op in enumerate(ops):
        for key in {*op.operands, *_results(op)}:
            by_value.setdefault(key, []).append(index)
    pending = dict.fromkeys(range(len(ops)))
    while pending:
        index = next(iter(pending))
        del pending[index]
        for key in _spread(ops[index], cuts):
            pending.update(dict.fromkeys(by_value[key]))
    for op in ops:
        op.rule = refined(op.rule, _factor_parts(op, cuts))
    for key, info in values.items():
        info.atoms = [_parts(size, dim) for size, dim in zip(info.shape, cuts[key], strict=True)]


def _results(op: OpNode) -> list[ValueKey]:
    return [(op.name, i) for i, result in enumerate(op.call.results) if result is not None]


def _ports(op: OpNode) -> list[tuple[ValueKey, tuple[DimMap, ...]]]:
    results = [((op.name, i), op.rule.outputs[i]) for i, r in enumerate(op.call.results) if r is not None]
    return [*zip(op.operands, op.rule.inputs, strict=True), *results]


def _spread(op: OpNode, cuts: dict[ValueKey, list[Cuts]]) -> set[ValueKey]:
    """Carry the inner boundaries of every dim through the op's factors; returns the values that gained some."""
    inner = _factor_cuts(op, cuts)
    changed = set()
    for key, tensor in _ports(op):
        for dim, factors in enumerate(tensor):
            if _add_cuts(cuts[key][dim], _dim_cuts(op.rule, factors, inner)):
                changed.add(key)
    return changed


def _factor_cuts(op: OpNode, cuts: dict[ValueKey, list[Cuts]]) -> list[Cuts]:
    inner: list[Cuts] = [set() for _ in op.rule.factors]
    for key, tensor in _ports(op):
        for dim, factors in enumerate(tensor):
            known = cuts[key][dim]
            if not known:
                continue
            base = 1
            for f in reversed(factors):
                size = op.rule.factors[f].size
                if op.rule.factors[f].kind != WHOLE:
                    inside = {c // base for c in known if c % base == 0 and base < c < base * size}
                    _add_cuts(inner[f], {c for c in inside if size % c == 0})
                base *= size
    return inner


def _dim_cuts(rule: OpRule, factors: DimMap, inner: list[Cuts]) -> Cuts:
    found: Cuts = set()
    base = 1
    for position, f in enumerate(reversed(factors)):
        if position and base > 1:
            found.add(base)
        found |= {base * cut for cut in inner[f]}
        base *= rule.factors[f].size
    return {cut for cut in found if 1 < cut < base}


def _add_cuts(known: Cuts, new: Cuts) -> bool:
    """Add those cuts that keep `known` a divisor chain (a view that mixes sizes otherwise keeps its dims whole)."""
    grew = False
    for cut in sorted(new - known):
        if all(cut % other == 0 or other % cut == 0 for other in known):
            known.add(cut)
            grew = True
    return grew


def _parts(size: int, cuts: Cuts) -> list[int]:
    bounds = sorted({1, *cuts, size}, reverse=True)
    return [major // minor for major, minor in pairwise(bounds)] or [size]


def _factor_parts(op: OpNode, cuts: dict[ValueKey, list[Cuts]]) -> dict[int, tuple[int, ...]]:
    inner = _factor_cuts(op, cuts)
    return {f: tuple(_parts(op.rule.factors[f].size, cut)) for f, cut in enumerate(inner) if cut}


def _mark_movable(ops: list[OpNode], values: dict[ValueKey, ValueInfo]) -> None:
    """Factors that may be cut: of user data, every atom; of features, only the major atom of a dim.

    A minor feature atom (the size of a head) is whole in attention; cutting it elsewhere only multiplies the search.
    """
    _flood(ops, values, "data", lambda dim: True)
    _flood(ops, values, "batch", lambda dim: dim == 0)
    for op in ops:
        minor = {
            f
            for _, tensor in _ports(op)
            for factors in tensor
            for f in [f for f in factors if op.rule.factors[f].size > 1][1:]
        }
        op.movable = frozenset(f for f in op.rule.cuttable if f in op.data or f not in minor)


def _flood(ops: list[OpNode], values: dict[ValueKey, ValueInfo], name: str, source: Callable[[int], bool]) -> None:
    """Mark the factors reached from the input dims that `source` selects."""
    marks: dict[ValueKey, list[list[bool]]] = {
        key: [[info.kind == "input" and source(i)] * len(dim) for i, dim in enumerate(info.atoms)]
        for key, info in values.items()
    }
    for op in ops:
        flags = [False] * len(op.rule.factors)
        for key, tensor in zip(op.operands, op.rule.inputs, strict=True):
            for dim, factors in enumerate(tensor):
                _read_flags(op.rule, factors, marks[key][dim], flags)
        for key in _results(op):
            marks[key] = [_write_flags(op.rule, factors, flags) for factors in op.rule.outputs[key[1]]]
        setattr(op, name, frozenset(f for f, flag in enumerate(flags) if flag))


def _read_flags(rule: OpRule, factors: DimMap, dim: list[bool], flags: list[bool]) -> None:
    wide = [f for f in factors if rule.factors[f].size > 1]
    if len(wide) == len(dim):
        for f, flag in zip(wide, dim, strict=True):
            flags[f] = flags[f] or flag
    elif all(dim):
        for f in wide:
            flags[f] = True


def _write_flags(rule: OpRule, factors: DimMap, flags: list[bool]) -> list[bool]:
    return [flags[f] for f in factors if rule.factors[f].size > 1] or [False]


_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def _classes(ops: list[OpNode]) -> list[list[OpNode]]:
    seen: dict[tuple[object, ...], int] = {}
    ordinal: dict[tuple[object, ...], int] = {}
    classes: list[list[OpNode]] = []
    texts: dict[int, str] = {}
    for op in ops:
        text = texts.setdefault(id(op.call), f"{call_signature(op.call)}{op.rule}{sorted(op.movable)}")
        here = (op.module_path, op.is_backward, text)
        ordinal[here] = ordinal.get(here, -1) + 1
        key = (_LAYER_NUMBER.sub("*", op.module_path), op.is_backward, text, ordinal[here])
        if key not in seen:
            seen[key] = len(classes)
            classes.append([])
        op.klass = seen[key]
        classes[op.klass].append(op)
    return classes
