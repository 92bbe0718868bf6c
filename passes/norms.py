"""Norms, as one op or written in several: what is read of them is made again in little time from what they read."""

from __future__ import annotations

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.rule import COMBINED
from stpart_compiler.passes.order import may_run_again
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.strategies import is_contraction

_NORMS = ("aten.native_layer_norm.default", "aten._fused_rms_norm.default")
_CAST = "aten._to_copy.default"
_NONE: ValueKey = ("", 0)


def norms_of_regions(graph: Annotated) -> frozenset[str]:
    """Ops of forward from the activation that a norm reads to what regions read, casts and views included.

    What norms read is kept for their own backward; of what they make nothing need be kept then.
    """
    place = {op.name: i for i, op in enumerate(graph.ops)}
    read = {key for op in graph.ops if isinstance(op.call.target, Region) for key in op.operands}
    return frozenset(name for key in read for name in _norm_behind(graph, place, key))


def _norm_behind(graph: Annotated, place: dict[str, int], key: ValueKey) -> set[str]:
    """The ops that make a value from one activation and reduce that on the way; none where it is made otherwise."""
    todo, inside, reduced = {key}, set[str](), False
    while not (reduced and len(todo) == 1):
        op = graph.by_name.get(max(todo, key=lambda one: place.get(one[0], -1), default=_NONE)[0])
        if op is None or not _is_cheap(graph, op):
            return set()
        inside.add(op.name)
        reduced = reduced or _reduces(op)
        todo = {one for one in todo if one[0] != op.name} | _activations(graph, op)
    while (op := graph.by_name.get(min(todo)[0])) is not None and _only_looks(graph, op):
        inside.add(op.name)
        todo = _activations(graph, op)
    return inside


def _activations(graph: Annotated, op: OpNode) -> set[ValueKey]:
    """What an op reads that is made of the user's data."""
    return {
        key
        for key in op.operands
        if graph.values[key].kind == "input" or (key[0] in graph.by_name and graph.by_name[key[0]].data)
    }


def _is_cheap(graph: Annotated, op: OpNode) -> bool:
    """Whether an op of forward may run again, and is no product or kernel."""
    heavy = is_contraction(op.rule) or op.rule.loops or isinstance(op.call.target, Region)
    return op.name not in graph.backward and not heavy and (may_run_again(graph, op) or is_view(op.call.target))


def _reduces(op: OpNode) -> bool:
    return str(op.call.target) in _NORMS or any(factor.kind in COMBINED for factor in op.rule.factors)


def _only_looks(graph: Annotated, op: OpNode) -> bool:
    return op.name not in graph.backward and (is_view(op.call.target) or str(op.call.target) == _CAST)
