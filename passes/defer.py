"""Backward in two phases, so that gradients of several micro-batches are reduced once.

A gradient is made as a pending sum (or elsewhere than it rests) and re-laid out; views, casts and additions may follow.
All of these are linear, so sums over micro-batches pass through them as well as single values do. The *tail* of
backward is made of these ops, from the first re-layout that communicates on. What enters the tail is what each
micro-batch adds up; the tail then runs once, on the sums.

Before: a schedule with backward. After: `accumulate`, which is backward without the tail, on backward's inputs; and
`reduce`, the tail. What needs no communication stays in `accumulate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from stpart_compiler.ir.artifact import Deferred, RankArtifact, SumSlot
from stpart_compiler.ir.layout import Layout
from stpart_compiler.ir.program import RankProgram, groups_of
from stpart_compiler.ir.redistribute import Step, redistribute
from stpart_compiler.ir.rule import SUM
from stpart_compiler.passes.codegen import PhaseEmitter, Placement
from stpart_compiler.passes.order import resting
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.schedule import Need, Phase, Schedule, plan_transfers
from stpart_compiler.passes.verify import verify_handover, verify_programs

_LOCAL = ("slice", "zero")


@dataclass(frozen=True)
class DeferReductions:
    """placement, schedule and programs of all ranks -> both programs of each rank, verified.

    Raises:
        VerificationError: a bug of this package; nothing was run.
    """

    device: torch.device

    def apply(self, placement: Placement, schedule: Schedule, artifacts: Sequence[RankArtifact]) -> list[Deferred]:
        assert schedule.backward is not None, "inference has no gradients"
        split = _Split(placement, schedule.backward)
        first, second = split.accumulate(), split.reduce()
        tail = replace(placement, graph=split.widened)
        tag = _free_tag(artifacts)
        pairs = []
        for rank in range(len(artifacts)):
            one = PhaseEmitter(placement, first, rank, self.device, tag)
            accumulate = one.run()
            two = PhaseEmitter(tail, second, rank, self.device, one.builder.next_tag)
            pairs.append((accumulate, two.run()))
        _verify(pairs)
        groups = groups_of([program for pair in pairs for program in pair])
        grads, sums, reduced = split.names(False), split.slots(), split.names(True)
        return [Deferred(*pair, grads, sums, reduced, groups) for pair in pairs]


def _verify(pairs: Sequence[tuple[RankProgram, RankProgram]]) -> None:
    verify_programs([accumulate for accumulate, _ in pairs])
    verify_programs([reduce for _, reduce in pairs])
    for accumulate, reduce in pairs:
        verify_handover(accumulate, reduce)


def _free_tag(artifacts: Iterable[RankArtifact]) -> int:
    """A tag above all that any rank uses: error messages find their op by the tag."""
    bodies = (instr for artifact in artifacts for program in artifact.programs for instr in program.body)
    return 1 + max((tag for instr in bodies for tag in (instr.tag, *instr.tags)), default=-1)


@dataclass(frozen=True, eq=False)
class _Split:
    """What of backward is its tail."""

    placement: Placement
    backward: Phase

    @property
    def graph(self) -> Annotated:
        return self.placement.graph

    @cached_property
    def grads(self) -> list[tuple[str, ValueKey, Layout]]:
        """Parameter, value and layout at rest of every gradient, in the order of backward's outputs."""
        captured = self.graph.captured
        used = {info.name for info in captured.params if info.node is not None}
        names = [name for name, grad in captured.grads.items() if grad is not None and name in used]
        return [(name, *need) for name, need in zip(names, self.backward.outputs, strict=True)]

    @cached_property
    def linear(self) -> set[str]:
        """Ops of backward through which sums over micro-batches may pass, and whose results nothing else reads."""
        wanted = {key for _, key, _ in self.grads}
        found: set[str] = set()
        for op in reversed(self.graph.ops):
            readers = self.graph.readers.get(op.name, [])
            reached = (op.name, 0) in wanted or readers
            if reached and found.issuperset(reader.name for reader in readers) and self._is_linear(op):
                found.add(op.name)
        return found

    def _is_linear(self, op: OpNode) -> bool:
        """In all its operands, which backward makes, and which are no larger than the result: they are to be kept."""
        if op.name not in self.graph.backward or len(op.call.results) != 1:
            return False
        if frozenset(range(len(op.operands))) not in op.rule.linear or self.placement.strategies[op.name].steps > 1:
            return False
        size = self.graph.values[(op.name, 0)].numel
        return all(key[0] in self.graph.backward and self.graph.values[key].numel <= size for key in op.operands)

    @cached_property
    def tail(self) -> list[OpNode]:
        found: dict[str, OpNode] = {}
        for op in self.graph.ops:
            edges = zip(op.operands, self.placement.derived(op).inputs, strict=True)
            if op.name in self.linear and any(key[0] in found or self._moves(key, p.layout) for key, p in edges):
                found[op.name] = op
        return list(found.values())

    @cached_property
    def tail_names(self) -> set[str]:
        return {op.name for op in self.tail}

    def _made(self, key: ValueKey) -> Layout:
        return self.backward.layout.get(key) or self.placement.layout(key)

    def _moves(self, key: ValueKey, wanted: Layout) -> bool:
        """Whether a value of backward, which can be added up, communicates on its way to a layout."""
        made = self._made(key)
        if key[0] not in self.graph.backward or made.combine != SUM:
            return False
        return any(step.kind not in _LOCAL for step in self._steps(made, wanted))

    def _steps(self, made: Layout, wanted: Layout) -> tuple[Step, ...]:
        return redistribute(made, wanted, self.placement.mesh, self.placement.cost).steps

    def _is_reduced(self, key: ValueKey, wanted: Layout) -> bool:
        return key[0] in self.tail_names or self._moves(key, wanted)

    def names(self, reduced: bool) -> tuple[str, ...]:
        return tuple(name for name, key, layout in self.grads if self._is_reduced(key, layout) == reduced)

    def _grads(self, reduced: bool) -> list[Need]:
        return [(key, layout) for _, key, layout in self.grads if self._is_reduced(key, layout) == reduced]

    @cached_property
    def sums(self) -> dict[ValueKey, Layout]:
        """What enters the tail, and where it is kept."""
        wanted: dict[ValueKey, set[Layout]] = {}
        for op in self.tail:
            for key, port in zip(op.operands, self.placement.derived(op).inputs, strict=True):
                if key[0] not in self.tail_names:
                    wanted.setdefault(key, set()).add(port.layout)
        for key, layout in self._grads(True):
            if key[0] not in self.tail_names:
                wanted.setdefault(key, set()).add(layout)
        return {key: self._kept(key, layouts) for key, layouts in wanted.items()}

    def _kept(self, key: ValueKey, wanted: set[Layout]) -> Layout:
        """Where it was made, or as far on its way as it comes without communication."""
        made = self._made(key)
        if len(wanted) > 1:
            return made
        for step in self._steps(made, *wanted):
            if step.kind not in _LOCAL:
                break
            made = step.target
        return made

    def accumulate(self) -> Phase:
        ops = [op for op in self.backward.ops if op.name not in self.tail_names]
        outputs = [*self._grads(False), *self.sums.items()]
        planned: dict[str, Any] = {"starts": {}, "wanted": {}, "ends": {}, "slices": {}, "leaving": {}}
        phase = replace(self.backward, name="accumulate", ops=ops, outputs=outputs, gives_sums=True, **planned)
        saved = set(self.backward.layout)
        derived, layout = self.placement.derived, self.placement.layout
        plan_transfers(self.graph, phase, derived, layout, resting(self.graph) | saved, self.placement.cost)
        return phase

    def reduce(self) -> Phase:
        sums = list(self.sums.items())
        phase = Phase("reduce", list(self.tail), sums, self._grads(True), layout=dict(sums), views=self.backward.views)
        derived, layout = self.placement.derived, self.placement.layout
        plan_transfers(self.graph, phase, derived, layout, set(self.sums), self.placement.cost)
        return phase

    @cached_property
    def parts(self) -> dict[ValueKey, tuple[str, ...]]:
        """Value of the tail -> the parameters of whose gradients it is a part."""
        found: dict[ValueKey, dict[str, None]] = {}
        for name, key, layout in self.grads:
            if self._is_reduced(key, layout):
                found.setdefault(key, {})[name] = None
        for op in reversed(self.tail):
            for key in op.operands:
                found.setdefault(key, {}).update(found[(op.name, 0)])
        return {key: tuple(names) for key, names in found.items()}

    @cached_property
    def widened(self) -> Annotated:
        """The graph with the tail in the dtypes of sums: at least those of the gradients.

        Eager adds up gradients in their parameters' dtypes; what was bfloat16 until a cast would lose bits here.
        """
        graph = self.graph
        dtypes = {info.name: info.info.dtype for info in graph.captured.params}
        values, by_name = dict(graph.values), dict(graph.by_name)
        for key in self.sums:
            wide = graph.values[key].dtype
            for name in self.parts[key]:
                wide = torch.promote_types(wide, dtypes[name])
            values[key] = replace(values[key], dtype=wide)
        for op in self.tail:
            key = (op.name, 0)
            values[key] = replace(values[key], dtype=_result_dtype(op, graph, [values[k].dtype for k in op.operands]))
            result = op.call.results[0]
            assert result is not None
            call = replace(op.call, results=(replace(result, dtype=values[key].dtype),))
            by_name[op.name] = replace(op, call=call)
        return replace(graph, values=values, by_name=by_name)

    def slots(self) -> tuple[SumSlot, ...]:
        values = self.widened.values
        return tuple(SumSlot(key[0], layout, values[key].dtype, self.parts[key]) for key, layout in self.sums.items())


def _result_dtype(op: OpNode, graph: Annotated, operands: list[torch.dtype]) -> torch.dtype:
    """A cast's own; of other ops that of their operands."""
    result = graph.values[(op.name, 0)].dtype
    if any(graph.values[key].dtype != result for key in op.operands):
        return result
    for dtype in operands:
        result = torch.promote_types(result, dtype)
    return result
