"""What of a step would not be partitioned, and why, before anything is planned or run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.plan import layers_folded
from stpart_compiler.passes.propagate import Annotated, OpNode
from stpart_compiler.passes.rules.registry import draws

SMALL = 1024
"""Results of fewer elements are not worth cutting."""

RANDOM = "draws random numbers: every rank draws the same, for all of it"
NO_RULE = "has no rule, and none was found by running it in blocks: every rank computes all of it"
NO_DIM = "has no dim that may be cut: every rank computes all of it"


@dataclass(frozen=True)
class Finding:
    """An op of the step (with those like it in other layers) that every rank would compute whole."""

    op: str
    module_path: str
    where: str  # file and line of the user's model, "" where unknown
    shapes: tuple[tuple[int, ...], ...]  # of the operands
    reason: str
    count: int

    def __str__(self) -> str:
        shapes = ", ".join(str(list(shape)) for shape in self.shapes)
        place = f" at {self.where}" if self.where else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.module_path or '(no module)'}: {self.op}({shapes}){place}{times}: {self.reason}"


@dataclass(frozen=True)
class Diagnosis:
    """Kinds of ops by where their rule comes from, and what would be replicated."""

    own: frozenset[str]
    discovered: frozenset[str]
    findings: tuple[Finding, ...]

    def __str__(self) -> str:
        head = f"{len(self.own)} kinds of ops have rules, {len(self.discovered)} rules were found by running the op"
        if self.discovered:
            head += f" ({', '.join(sorted(self.discovered))})"
        if not self.findings:
            return f"{head}\nnothing is replicated"
        lines = "\n".join(f"  {finding}" for finding in self.findings)
        advice = "register a factor rule for it (CONTRIBUTING.md), or leave it: the step stays exact"
        return f"{head}\nreplicated:\n{lines}\nto partition an op, {advice}"


def diagnose(graph: Annotated) -> Diagnosis:
    """What every rank would compute whole, one finding per class of identical ops."""
    own = {_name(op) for op in graph.ops if op.has_rule and not op.discovered}
    discovered = {_name(op) for op in graph.ops if op.discovered}
    return Diagnosis(frozenset(own), frozenset(discovered - own), tuple(_findings(graph)))


def _findings(graph: Annotated) -> Iterator[Finding]:
    for members in graph.classes:
        op = members[0]
        reason = _reason(op)
        if reason is not None:
            path = layers_folded(op.module_path) if len(members) > 1 else op.module_path
            shapes = tuple(operand.shape for operand in op.call.operands)
            yield Finding(_name(op), path, op.line, shapes, reason, len(members))


def _reason(op: OpNode) -> str | None:
    sizes = [torch.Size(t.shape).numel() for t in (*op.call.operands, *op.call.results) if t is not None]
    if is_view(op.call.target) or max(sizes, default=0) < SMALL:
        return None
    if not op.has_rule:
        return RANDOM if draws(op.call) else NO_RULE
    return NO_DIM if not op.movable and op.call.operands else None


def _name(op: OpNode) -> str:
    return str(op.call.target).removeprefix("aten.").removesuffix(".default")
