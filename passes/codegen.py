"""Per-rank programs from a plan: ops on blocks, re-layouts between them, temporal loops unrolled with double buffers.

Every rank's program is made by walking the same ops in the same order; all that differs are constants (peers, slices,
shapes). A transfer is started as soon as its input exists and waited for at the first use of its result; of several
transfers in a row the next one starts where the last one should have ended (`passes/forecast.py`). Values that exist
when a phase starts (parameters, saved activations) are fetched some heavy ops ahead (`passes/ahead.py`), not all at
once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.ir.layout import Layout, local_shape, replicated
from stpart_compiler.ir.mesh import Mesh
from stpart_compiler.ir.program import Builder, Origin, Pending, RankProgram, Value
from stpart_compiler.ir.redistribute import redistribute
from stpart_compiler.ir.spacetime import Cuts, Derived, Strategy, derive
from stpart_compiler.passes.emit_redistribute import emit_redistribution
from stpart_compiler.passes.forecast import Forecast
from stpart_compiler.passes.inner_rings import InnerRing, inner_ring, inner_strategy
from stpart_compiler.passes.local_calls import LocalCalls
from stpart_compiler.passes.order import is_heavy
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.rules import Block, OpCall
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import bind
from stpart_compiler.passes.schedule import Need, Phase, Schedule
from stpart_compiler.passes.slices import Apart, Arriving, Leaving
from stpart_compiler.passes.sum_in_place import SumInPlace
from stpart_compiler.passes.temporal import contiguous_copy, emit_temporal, time_slice

aten = torch.ops.aten

AGAIN = "_again"
"""Ends the names of instructions of an op that backward runs again."""

PATIENCE = 0.5
"""Part of the time of a transfer for which a rank waits, before a heavy op, until it can start: its links idle else."""


@dataclass(frozen=True)
class Placement:
    """Decisions that codegen follows: strategies per op, layouts at rest per parameter node."""

    graph: Annotated
    mesh: Mesh
    strategies: dict[str, Strategy]
    param_layouts: dict[ValueKey, Layout]
    cost: LinkCost
    calls: LocalCalls = field(default_factory=LocalCalls, compare=False, repr=False)
    _derived: dict[str, Derived] = field(default_factory=dict, compare=False, repr=False)
    _cuts: dict[str, Cuts] = field(default_factory=dict, compare=False, repr=False)

    def derived(self, op: OpNode) -> Derived:
        known = self._derived.get(op.name)
        if known is None:
            known = self._derived[op.name] = derive(op.rule, self.strategies[op.name], self.mesh)
        return known

    def block(self, op: OpNode, strategy: Strategy, rank: int) -> Block:
        """What a rank computes of an op without steps."""
        cuts = self._cuts.get(op.name)
        if cuts is None:
            cuts = self._cuts[op.name] = Cuts.of(op.rule, strategy)
        return Block(op.rule, cuts.ranges(self.mesh.coords[rank]))

    def layout(self, key: ValueKey) -> Layout:
        """Layout in which a value is produced."""
        if key in self.param_layouts:
            return self.param_layouts[key]
        op = self.graph.by_name.get(key[0])
        if op is None:
            return replicated(self.graph.values[key].shape)
        return self.derived(op).outputs[key[1]].layout


@dataclass(frozen=True)
class Codegen:
    """placement and schedule -> the two programs of every rank."""

    device: torch.device

    def apply(self, placement: Placement, schedule: Schedule, rank: int) -> tuple[RankProgram, RankProgram | None]:
        forward = PhaseEmitter(placement, schedule.forward, rank, self.device, 0)
        first = forward.run()
        if schedule.backward is None:
            return first, None
        backward = PhaseEmitter(placement, schedule.backward, rank, self.device, forward.builder.next_tag)
        return first, backward.run()


class PhaseEmitter:
    """Emits one phase of one rank."""

    def __init__(self, placement: Placement, phase: Phase, rank: int, device: torch.device, first_tag: int) -> None:
        self.placement = placement
        self.mesh = placement.mesh
        self.phase = phase
        self.rank = rank
        self.builder = Builder(rank, phase.name, device, first_tag)
        self.have: dict[tuple[ValueKey, Layout], Value | Pending] = {}
        self.arriving: dict[tuple[str, int], Arriving] = {}  # (op, port), by slices
        self.base: dict[str, Value] = {}  # transposed view -> the contiguous tensor behind it
        self.pending_names: dict[str, tuple[str, ...]] = {}
        self.forecast = Forecast(placement.cost)
        self.late: list[Need] = []  # results to wait for before the next heavy op
        self.ends: dict[Need, float] = {}  # of what is under way: when, by the forecast, the transfer ends

    def run(self) -> RankProgram:
        inputs = [self._input(key, layout) for key, layout in self.phase.inputs]
        for op in self.phase.ops:
            if is_heavy(op):
                self._end_results(self.phase.ends.get(op.name, []))
            self._advance_chains(PATIENCE if is_heavy(op) else 0.0)
            for key, layout in self.phase.starts.get(op.name, ()):
                self._start(key, layout)
            for name, port in self.phase.slices.get(op.name, ()):
                self._start_slices(self.placement.graph.by_name[name], port)
            self._emit(op)
            self.forecast.computed(self.phase.seconds.get(op.name, 0.0))
            self._start_results(op)
        for key, layout in self.phase.outputs:
            self._start(key, layout)
        outputs = [self.fetch(key, layout) for key, layout in self.phase.outputs]
        program = RankProgram(
            self.rank,
            self.phase.name,
            inputs,
            list(outputs),
            self.builder.body,
            self.pending_names,
            gives_sums=self.phase.gives_sums,
        )
        return SumInPlace().apply(program)

    def _input(self, key: ValueKey, layout: Layout) -> Value:
        value = self.builder.value(key[0], local_shape(layout, self.mesh, self.rank), self._dtype(key))
        self.have[(key, layout)] = value
        self._note_pending(value, layout)
        return value

    def _dtype(self, key: ValueKey) -> torch.dtype:
        return self.placement.graph.values[key].dtype

    def fetch(self, key: ValueKey, layout: Layout) -> Value:
        """The local tensor of a value in the given layout, waited for."""
        self._start(key, layout)
        found = self.have[(key, layout)]
        if isinstance(found, Pending):
            while found.left > 1:
                self._advance((key, layout), found)
            with self._relayout(key):
                self.forecast.waited(self.ends.pop((key, layout), 0.0))
                found = found.finish()
                if layout.partial and found is self.have.get((key, self._made_in(key))):
                    found = self._alias(found)
            self.have[(key, layout)] = found
            self._note_pending(found, layout)
        return found

    def _start(self, key: ValueKey, layout: Layout) -> None:
        """Begin to bring a value into a layout, unless that is done or under way."""
        if (key, layout) in self.have:
            return
        source = self._made_in(key)
        if (key, source) not in self.have:
            op = self.placement.graph.by_name[key[0]]
            if self._on_the_way(op):
                self.have[(key, layout)] = Pending(lambda: self._late(op, key, layout))
                return
            self._emit(op)
        if (key, layout) in self.have:
            return
        value = self.fetch(key, source)
        with self._relayout(key):
            made = self._begun(value, source, layout)
            if made is value and layout.partial:
                made = self._alias(value)
        self.have[(key, layout)] = made
        if isinstance(made, Value):
            self._note_pending(made, layout)
        else:
            self._note_start((key, layout), made)

    def _start_slices(self, op: OpNode, i: int) -> None:
        """Begin to bring the first slice of an operand to a loop."""
        key, strategy = op.operands[i], self.placement.strategies[op.name]
        source, port = self._made_in(key), self.placement.derived(op).inputs[i]
        slices, coords = port.slices, self.mesh.coords[self.rank]
        cuts = Cuts.of(op.rule, strategy)
        assert slices is not None

        def cut(value: Value, t: int) -> Value:
            with self._relayout(key):
                block = Block(op.rule, cuts.ranges(coords, t))
                part = time_slice(self.builder, strategy, i, coords, block, value)
                return part if slices.is_outer else contiguous_copy(self.builder, part)

        apart = Apart(slices, source, port.layout, partial(self._relaid, key))
        self.arriving[op.name, i] = Arriving(self.fetch(key, source), cut, apart)
        self.arriving[op.name, i].begin(0)

    def _relaid(self, key: ValueKey, value: Value, source: Layout, target: Layout) -> Value | Pending:
        """Begin to bring a part of a value to a layout."""
        with self._relayout(key):
            begun = self._begun(value, source, target)
        if isinstance(begun, Value):
            return begun

        def end() -> Value:
            with self._relayout(key):
                return begun.finish()

        return Pending(end, begun.left)

    def _leaving(self, op: OpNode, derived: Derived) -> dict[int, Leaving]:
        """Results of a loop whose slices are brought to where they rest as they are made."""
        found: dict[int, Leaving] = {}
        for j, port in enumerate(derived.outputs):
            key = (op.name, j)
            if key in self.phase.leaving:
                assert port.slices is not None
                relayout = partial(self._relaid, key)
                found[j] = Leaving(Apart(port.slices, port.layout, self.phase.leaving[key], relayout))
        return found

    def _end_results(self, due: list[Need]) -> None:
        """Wait for results of the phase; of those with another transfer to come it runs beside one more heavy op."""
        due, self.late = [*self.late, *due], []
        for key, layout in due:
            made = self.have.get((key, layout))
            if isinstance(made, Pending) and made.left > 1:
                self._advance((key, layout), made)
                self.late.append((key, layout))
            else:
                self.fetch(key, layout)

    def _advance_chains(self, patience: float) -> None:
        """Of re-layouts in several transfers start the next one where the last one has ended by the forecast.

        `patience`: the part of the time of the next one for which the last one is waited for.
        """
        for place, end in list(self.ends.items()):
            made = self.have[place]
            if isinstance(made, Value) or made.left < 2:
                continue
            following = self.forecast.seconds(made.steps[1], self._dtype(place[0]).itemsize)
            if end <= self.forecast.now + patience * following:
                self._advance(place, made)

    def _advance(self, place: Need, made: Pending) -> None:
        """End a transfer and start the next one."""
        self.forecast.waited(self.ends.get(place, 0.0))
        with self._relayout(place[0]):
            made.advance()
        self._note_start(place, made)

    def _note_start(self, place: Need, made: Pending) -> None:
        if made.steps:
            self.ends[place] = self.forecast.started(made.steps[0], self._dtype(place[0]).itemsize)

    def _on_the_way(self, op: OpNode) -> bool:
        """Start what a view of resting values looks at; whether that has to be waited for."""
        needs = list(zip(op.operands, self.placement.derived(op).inputs, strict=True))
        for key, port in needs:
            self._start(key, port.layout)
        return any(isinstance(self.have[(key, port.layout)], Pending) for key, port in needs)

    def _late(self, op: OpNode, key: ValueKey, layout: Layout) -> Value:
        """A view of values that were on the way when it was asked for."""
        del self.have[(key, layout)]
        self._emit(op)
        return self.fetch(key, layout)

    def _made_in(self, key: ValueKey) -> Layout:
        return self.phase.layout.get(key) or self.placement.layout(key)

    def is_turned(self, key: ValueKey, layout: Layout, value: Value) -> bool:
        """Whether an operand in `layout` is a transposed view, the same on all ranks.

        A re-layout hands out the view itself on the ranks that keep their block, and a new tensor on the others.
        """
        return value.name in self.base and layout == self._made_in(key)

    def _alias(self, value: Value) -> Value:
        """Another name: the first holder of a new pending sum uses its tensor as it is, elsewhere it is no summand."""
        return self.builder.call(
            aten.alias.default, (value,), shape=value.shape, dtype=value.dtype, stem=f"{value.name}_p", kind="view"
        )

    @contextmanager
    def _relayout(self, key: ValueKey) -> Iterator[None]:
        """What is emitted meanwhile belongs to a re-layout of the value, and may read its pending sums."""
        op = self.placement.graph.by_name.get(key[0])
        keep, first = self.builder.origin, len(self.builder.body)
        self.builder.origin = Origin(key[0], op.module_path if op else "", "re-layout", line=op.line if op else "")
        yield
        self._allow_pending(first)
        self.builder.origin = keep

    def _allow_pending(self, first: int) -> None:
        for instr in self.builder.body[first:]:
            instr.partial_ok = True

    def _note_pending(self, value: Value, layout: Layout) -> None:
        if layout.partial:
            self.pending_names[value.name] = tuple(str(digit) for digit in layout.partial)

    def _start_results(self, op: OpNode) -> None:
        for index, _ in enumerate(op.call.results):
            for layout in self.phase.wanted.get((op.name, index), ()):
                self._start((op.name, index), layout)

    def _emit(self, op: OpNode) -> None:
        """One op in its strategy; its results are then in `have`."""
        strategy = self.placement.strategies[op.name]
        derived = self.placement.derived(op)
        made_in = [((op.name, i), port.layout) for i, port in enumerate(derived.outputs)]
        if any(isinstance(self.have.get(place), Value) for place in made_in):  # a late view is not made yet
            return
        operands = [
            self.arriving.pop((op.name, i)) if (op.name, i) in self.arriving else self.fetch(key, port.layout)
            for i, (key, port) in enumerate(zip(op.operands, derived.inputs, strict=True))
        ]
        made = self._made(self._shown(op), strategy, derived, operands, self._leaving(op, derived))
        self._keep(op, derived, made)

    def _shown(self, op: OpNode) -> OpNode:
        """The op under the name that its instructions go by."""
        is_again = self.phase.name != "forward" and op.name not in self.placement.graph.backward
        return replace(op, name=op.name + AGAIN) if is_again and op.name not in self.phase.views else op

    def _made(
        self,
        op: OpNode,
        strategy: Strategy,
        derived: Derived,
        operands: list[Value | Arriving],
        leaving: dict[int, Leaving],
    ) -> Sequence[Value | Pending | None]:
        self.builder.origin = Origin(op.name, op.module_path, line=op.line)
        first = len(self.builder.body)
        made: Sequence[Value | Pending | None]
        if strategy.steps > 1:
            made = emit_temporal(self.builder, op, strategy, derived, operands, self, leaving)
        else:
            made = self._call(op, strategy, [x for x in operands if isinstance(x, Value)])
        if strategy.pending or isinstance(op.call.target, Region):  # inside of a region sums may pass from op to op
            self._allow_pending(first)
        return made

    def _keep(self, op: OpNode, derived: Derived, made: Sequence[Value | Pending | None]) -> None:
        for index, value in enumerate(made):
            key = (op.name, index)
            layout = self.phase.leaving.get(key, derived.outputs[index].layout)
            if value is not None:
                self.have[(key, layout)] = value
            if isinstance(value, Value):
                self._note_pending(value, layout)

    def _call(self, op: OpNode, strategy: Strategy, operands: list[Value]) -> Sequence[Value | None]:
        return self.call_block(op, strategy, self.placement.block(op, strategy, self.rank), operands)

    def call_block(
        self, op: OpNode, strategy: Strategy, block: Block, operands: list[Value], t: int = 0
    ) -> Sequence[Value | None]:
        """Call the op on one block, that of step `t`, with the given local operands."""
        if isinstance(op.call.target, Region):
            return self._region(op, op.call.target, strategy, block, operands, t)
        alias = self.placement.graph.alias
        is_plain = op.name in alias or op.name.removesuffix(AGAIN) in alias
        return self._op(op.name, op.call, block, operands, plain=is_plain)

    def _region(
        self, op: OpNode, region: Region, strategy: Strategy, block: Block, operands: list[Value], t: int
    ) -> Sequence[Value | None]:
        """The ops of a region one after the other, each on its part of the block."""
        made: list[Sequence[Value | None]] = []
        for inner in region.body:
            local = [operands[r] if j < 0 else made[j][r] for j, r in inner.sources]
            known = [value for value in local if value is not None]
            assert len(known) == len(local), f"{region}: {inner.kind} reads a result that is no tensor"
            ring = inner_ring(op, strategy, inner, self.mesh, t)
            if ring is not None:
                made.append(self._ring(ring, known))
                continue
            part = inner.block(block.ranges)
            if isinstance(inner.call.target, Region):
                cut = inner_strategy(strategy, inner, t)
                made.append(self._region(op, inner.call.target, cut, part, known, 0))
                continue
            made.append(self._op(inner.kind, inner.call, part, known, plain=len(inner.call.results) == 1))
        return [made[j][r] for j, r in region.outputs]

    def _ring(self, ring: InnerRing, operands: list[Value]) -> Sequence[Value | None]:
        """An op of a region whose blocks go round, within one step of the region."""
        keep = self.builder.origin
        self.builder.origin = replace(keep, note="re-layout")
        ports = zip(operands, ring.given, ring.derived.inputs, strict=True)
        begun = [self._begun(value, layout, port.layout) for value, layout, port in ports]
        placed = [value if isinstance(value, Value) else value.finish() for value in begun]
        made = emit_temporal(self.builder, ring.op, ring.strategy, ring.derived, placed, self)
        self.builder.origin = keep
        return [value if isinstance(value, Value) else None for value in made]

    def _begun(self, value: Value, source: Layout, target: Layout) -> Value | Pending:
        if source == target:
            return value
        plan = redistribute(source, target, self.mesh, self.placement.cost)
        return emit_redistribution(self.builder, value, plan, self.mesh)

    def _op(
        self, name: str, call: OpCall, block: Block, operands: list[Value], *, plain: bool
    ) -> Sequence[Value | None]:
        """One op on one block. `plain`: its target gives a tensor, not a tuple or list."""
        local = self.placement.calls.of(call, block)
        args, kwargs = bind(local.args, operands), bind(local.kwargs, operands)
        target, results, shapes, kind = local.target, call.results, local.shapes, local.kind
        if len(results) > 1 or not plain:
            outs = [(f"{name}_{i}", shapes[i], r.dtype) if r is not None else None for i, r in enumerate(results)]
            return self.builder.call_multi(target, args, kwargs, outs, kind=kind)
        only = results[0]
        assert only is not None
        value = self.builder.call(target, args, kwargs, shape=shapes[0], dtype=only.dtype, stem=name, kind=kind)
        if call.target is aten.t.default:  # also of an empty block, which is not computed: ranks must agree
            self.base[value.name] = operands[0]
        return (value,)
