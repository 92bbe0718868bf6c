"""Annotate the joint graph: a factor rule per op, dims refined into atoms, and classes of identical ops.

A view may flatten (batch, sequence) into one dim. To cut the sequence there, the flattened dim is written as two
atoms, and so is every dim connected with it through the rules. `propagate` finds these atoms as a fixpoint over the
whole graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Generic, TypeVar

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from stpart_compiler.capture import Captured
from stpart_compiler.capture.breaks import user_line
from stpart_compiler.ir.plan import layers_folded
from stpart_compiler.ir.rule import HALO, WHOLE, DimMap, Factor, OpRule, refined
from stpart_compiler.passes.rules import OpCall, discovered_rule, rule_of
from stpart_compiler.passes.rules.calls import OpCalls
from stpart_compiler.passes.stripes import Sequences, stripe_cuts, write_stripes

K = TypeVar("K")
T = TypeVar("T")

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
    line: str  # file and line of the user's model, "" where unknown
    discovered: bool = False  # the rule was found by running the op
    movable: frozenset[int] = frozenset()  # factors that may be cut
    batch: frozenset[int] = frozenset()  # factors that come from dim 0 of the user's inputs
    data: frozenset[int] = frozenset()  # factors that come from any dim of the user's inputs
    stripes: frozenset[int] = frozenset()  # factors that are stripes of a sequence, each behind its rows in a dim
    klass: int = -1
    checkpoint: int | None = None  # number of the torch.utils.checkpoint that the op is in


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

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


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
    sequences: Sequences  # under causal masks

    @cached_property
    def digest(self) -> str:
        """That of the captured step, made once: plans and ranks are compared by it."""
        return self.captured.digest()

    @cached_property
    def readers(self) -> dict[str, list[OpNode]]:
        """Name of an op -> the ops that read any of its results, each once; of a placeholder likewise."""
        found: dict[str, list[OpNode]] = {}
        for op in self.ops:
            for name in dict.fromkeys(name for name, _ in op.operands):
                found.setdefault(name, []).append(op)
        return found


@dataclass(frozen=True)
class Propagate:
    """captured joint graph -> annotated ops.

    `stripes`: sequences under causal masks are written as (rows, stripes), this many, to be cut in stripes.
    """

    stripes: int = 1

    def apply(self, captured: Captured) -> Annotated:
        ops, values, alias = _collect(captured)
        starts = stripe_cuts(ops, self.stripes)
        _refine(ops, values, starts)
        sequences = write_stripes(ops, values, self.stripes)
        _mark_movable(ops, values)
        classes = _classes(ops)
        by_name = {op.name: op for op in ops}
        backward = _backward(captured, ops, alias)
        return Annotated(captured, ops, values, alias, classes, backward, by_name, _uses(ops), sequences)


def _uses(ops: list[OpNode]) -> dict[ValueKey, list[tuple[int, int]]]:
    uses: dict[ValueKey, list[tuple[int, int]]] = {}
    for op in ops:
        for port, key in enumerate(op.operands):
            uses.setdefault(key, []).append((op.klass, port))
    return uses


def _backward(captured: Captured, ops: list[OpNode], alias: dict[str, ValueKey]) -> set[str]:
    """Ops that run in backward: those that depend on a tangent, and those that only such ops read."""
    results = [*(o.node for o in captured.outputs if o.node), *captured.mutations.values()]
    needed = {alias[node][0] for node in results}
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
    calls = OpCalls()
    rules: dict[str, tuple[OpRule, bool, bool]] = {}
    for node in captured.gm.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            _add_value(values, alias, node, kinds.get(node.name, "constant"))
        elif node.op == "call_function" and node.target is operator.getitem and node.args[0].name not in alias:
            alias[node.name] = (node.args[0].name, node.args[1])
        elif node.op == "call_function":
            ops.append(_op_node(node, calls, alias, rules))
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


def _op_node(
    node: fx.Node, calls: OpCalls, alias: dict[str, ValueKey], rules: dict[str, tuple[OpRule, bool, bool]]
) -> OpNode:
    call, tensors = calls(node)
    if call.text not in rules:
        own = rule_of(call)
        found = own or discovered_rule(call)
        rules[call.text] = (found or whole_rule(call), found is not None, found is not own)
    rule, has_rule, discovered = rules[call.text]
    operands = tuple([alias[tensor.name] for tensor in tensors])
    path = node.meta.get("module_path", "")
    backward = node.meta["is_backward"]
    number = node.meta.get("ac_graph_id") if node.meta.get("recompute") in _RUN_AGAIN else None
    line = user_line(node)
    return OpNode(node.name, call, rule, operands, path, backward, has_rule, line, discovered, checkpoint=number)


_RUN_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


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


Cuts = frozenset[int]  # suffix products strictly inside a dim or factor
TensorCuts = tuple[Cuts, ...]  # per dim

NO_CUTS: Cuts = frozenset()


def _refine(ops: list[OpNode], values: dict[ValueKey, ValueInfo], starts: dict[tuple[ValueKey, int], int]) -> None:
    """Atoms of all values, rules over atoms. `starts`: boundaries given beforehand, by value and dim."""
    cuts: dict[ValueKey, TensorCuts] = {key: (NO_CUTS,) * len(info.shape) for key, info in values.items()}
    for (key, dim), cut in starts.items():
        cuts[key] = tuple(known | {cut} if d == dim else known for d, known in enumerate(cuts[key]))
    by_value: dict[ValueKey, list[int]] = {}
    ports = [(*op.operands, *((op.name, i) for i in range(len(op.rule.outputs)))) for op in ops]
    for index, keys in enumerate(ports):
        for key in dict.fromkeys(keys):
            by_value.setdefault(key, []).append(index)
    spread = _Memo(_spread)
    split: _Memo[tuple[TensorCuts, ...], OpRule] = _Memo(lambda rule, known: refined(rule, _factor_parts(rule, known)))
    waiting = bytearray(b"\1") * len(ops)

    def visit(index: int) -> None:
        waiting[index] = 0
        before = tuple(cuts.get(key, ()) for key in ports[index])
        for key, grown in zip(ports[index], spread(ops[index].rule, before), strict=True):
            if grown and grown != cuts[key]:
                # one value may be several operands
                cuts[key] = tuple(_with_cuts(old, new) for old, new in zip(cuts[key], grown, strict=True))
                for other in by_value[key]:
                    waiting[other] = 1

    steps = range(len(ops))
    while any(waiting):
        for index in steps:
            if waiting[index]:
                visit(index)
        steps = steps[::-1]  # cuts go from an op to what reads its results, and to what made its operands
    for op, keys in zip(ops, ports, strict=True):
        op.rule = split(op.rule, tuple(cuts.get(key, ()) for key in keys))
    for key, info in values.items():
        info.atoms = [_parts(size, dim) for size, dim in zip(info.shape, cuts[key], strict=True)]


class _Memo(Generic[K, T]):
    """Results of a function of a rule, which identical layers share, and something else."""

    def __init__(self, function: Callable[[OpRule, K], T]) -> None:
        self.function = function
        self.known: dict[tuple[int, K], tuple[OpRule, T]] = {}  # by id: hashing a rule takes longer than the function

    def __call__(self, rule: OpRule, key: K) -> T:
        at = (id(rule), key)
        if at not in self.known:
            self.known[at] = (rule, self.function(rule, key))
        return self.known[at][1]


def _tensors(rule: OpRule) -> list[tuple[DimMap, ...]]:
    return [*rule.inputs, *rule.outputs]


def _spread(rule: OpRule, known: tuple[TensorCuts, ...]) -> tuple[TensorCuts, ...]:
    """Carry the inner boundaries of every dim through the op's factors: per operand and result, the boundaries then."""
    inner = _factor_cuts(rule, known)
    return tuple(
        tuple(_with_cuts(cuts, _dim_cuts(rule, factors, inner)) for factors, cuts in zip(tensor, dims, strict=True))
        if dims
        else ()
        for tensor, dims in zip(_tensors(rule), known, strict=True)
    )


def _factor_cuts(rule: OpRule, known: tuple[TensorCuts, ...]) -> list[Cuts]:
    inner = [NO_CUTS] * len(rule.factors)
    for tensor, dims in zip(_tensors(rule), known, strict=True):
        for factors, cuts in zip(tensor, dims, strict=True) if dims else ():
            base = 1
            for f in reversed(factors) if cuts else ():
                size = rule.factors[f].size
                if rule.factors[f].kind != WHOLE and f not in rule.windowed:
                    inside = {c // base for c in cuts if c % base == 0 and base < c < base * size}
                    inner[f] = _with_cuts(inner[f], {c for c in inside if size % c == 0})
                base *= size
    return inner


def _dim_cuts(rule: OpRule, factors: DimMap, inner: list[Cuts]) -> set[int]:
    found: set[int] = set()
    base = 1
    for position, f in enumerate(reversed(factors)):
        if position and base > 1:
            found.add(base)
        found |= {base * cut for cut in inner[f]}
        base *= rule.factors[f].size
    return {cut for cut in found if 1 < cut < base}


def _with_cuts(known: Cuts, new: set[int] | Cuts) -> Cuts:
    """Add those cuts that keep `known` a divisor chain (a view that mixes sizes otherwise keeps its dims whole)."""
    for cut in sorted(new - known):
        if all(cut % other == 0 or other % cut == 0 for other in known):
            known |= {cut}
    return known


def _parts(size: int, cuts: Cuts) -> list[int]:
    if not cuts:
        return [size]
    bounds = sorted({1, *cuts, size}, reverse=True)
    return [major // minor for major, minor in pairwise(bounds)] if size > 1 else [size]


def _factor_parts(rule: OpRule, known: tuple[TensorCuts, ...]) -> dict[int, tuple[int, ...]]:
    inner = _factor_cuts(rule, known)
    return {f: tuple(_parts(rule.factors[f].size, cuts)) for f, cuts in enumerate(inner) if cuts}


def _mark_movable(ops: list[OpNode], values: dict[ValueKey, ValueInfo]) -> None:
    """Factors that may be cut: of user data, every atom; of features, only the major one of a dim; stripes.

    A minor feature atom (the size of a head) is whole in attention; cutting it elsewhere only multiplies the search.
    """
    data = reached_from(ops, values, "input")
    batch = reached_from(ops, values, "input", lambda key, dim: dim == 0)
    movable = _Memo(_movable)
    for op in ops:
        op.data, op.batch = data[op.name], batch[op.name]
        op.movable = movable(op.rule, op.data | op.stripes)


def _movable(rule: OpRule, tokens: frozenset[int]) -> frozenset[int]:
    minor = {
        f
        for tensor in _tensors(rule)
        for factors in tensor
        for f in [f for f in factors if rule.factors[f].size > 1 and f not in tokens][1:]
    }
    return frozenset(f for f in rule.cuttable if f in tokens or f not in minor)


Marks = tuple[tuple[bool, ...], ...]  # per dim, per atom


def reached_from(
    ops: list[OpNode],
    values: dict[ValueKey, ValueInfo],
    kind: str,
    source: Callable[[ValueKey, int], bool] = lambda key, dim: True,
) -> dict[str, frozenset[int]]:
    """Per op, the factors reached from those dims of values of a kind that `source` selects."""
    marks: dict[ValueKey, Marks] = {
        key: tuple((info.kind == kind and source(key, i),) * len(dim) for i, dim in enumerate(info.atoms))
        for key, info in values.items()
        if info.kind != "op"
    }
    through = _Memo(_marked)
    found: dict[str, frozenset[int]] = {}
    for op in ops:
        found[op.name], results = through(op.rule, tuple(marks[key] for key in op.operands))
        for index, result in enumerate(results):
            marks[op.name, index] = result
    return found


def _marked(rule: OpRule, operands: tuple[Marks, ...]) -> tuple[frozenset[int], list[Marks]]:
    """Marked factors, and the marks of the results."""
    flags = [False] * len(rule.factors)
    for tensor, dims in zip(rule.inputs, operands, strict=True):
        for factors, dim in zip(tensor, dims, strict=True):
            _read_flags(rule, factors, dim, flags)
    for f, factor in enumerate(rule.factors):
        if factor.kind == HALO:  # positions of one dim read those of the other
            flags[factor.driver] = flags[f] = flags[factor.driver] or flags[f]
    results = [tuple(_write_flags(rule, factors, flags) for factors in tensor) for tensor in rule.outputs]
    return frozenset(f for f, flag in enumerate(flags) if flag), results


def _read_flags(rule: OpRule, factors: DimMap, dim: tuple[bool, ...], flags: list[bool]) -> None:
    wide = [f for f in factors if rule.factors[f].size > 1]
    if len(wide) == len(dim):
        for f, flag in zip(wide, dim, strict=True):
            flags[f] = flags[f] or flag
    elif all(dim):
        for f in wide:
            flags[f] = True


def _write_flags(rule: OpRule, factors: DimMap, flags: list[bool]) -> tuple[bool, ...]:
    return tuple(flags[f] for f in factors if rule.factors[f].size > 1) or (False,)


def _classes(ops: list[OpNode]) -> list[list[OpNode]]:
    seen: dict[tuple[object, ...], int] = {}
    ordinal: dict[tuple[object, ...], int] = {}
    classes: list[list[OpNode]] = []
    texts: _Memo[frozenset[int], str] = _Memo(lambda rule, movable: f"{rule}{sorted(movable)}")
    for op in ops:
        text = op.call.text + texts(op.rule, op.movable) + ("" if op.checkpoint is None else " in a checkpoint")
        here = (op.module_path, op.is_backward, text)
        ordinal[here] = ordinal.get(here, -1) + 1
        key = (layers_folded(op.module_path), op.is_backward, text, ordinal[here])
        if key not in seen:
            seen[key] = len(classes)
            classes.append([])
        op.klass = seen[key]
        classes[op.klass].append(op)
    return classes
