"""Unroll a temporal strategy on one rank: exchange for step t+1, compute of step t, wait.

Operands and results that come and go slice by slice: `passes/slices.py`.

Moving operands need two buffers: the block in use and the one arriving. A moving result is a partial sum: it arrives
from the previous holder while this rank computes its own part, and is sent on with that part added. Blocks that
contribute nothing (masked as a whole, or empty) are not computed, and what is masked is not sent (`passes/hops.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from stpart_compiler.ir.combine import PAIRWISE, neutral
from stpart_compiler.ir.layout import Atom, Range
from stpart_compiler.ir.program import P2P_CHANNEL, Builder, Origin, Pending, Value
from stpart_compiler.ir.rule import ONLINE, SUM, OpRule
from stpart_compiler.ir.spacetime import MOVE, SLICE, Cuts, Derived, Strategy, result_combine
from stpart_compiler.passes.hops import moving
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules import Block, is_void, merge_of
from stpart_compiler.passes.rules.region import Region
from stpart_compiler.passes.rules.registry import Merge
from stpart_compiler.passes.slices import Arriving, Leaving

if TYPE_CHECKING:
    from stpart_compiler.passes.codegen import PhaseEmitter

aten = torch.ops.aten

_NONE: Mapping[int, Leaving] = {}


def emit_temporal(
    builder: Builder,
    op: OpNode,
    strategy: Strategy,
    derived: Derived,
    operands: Sequence[Value | Arriving],
    emitter: PhaseEmitter,
    leaving: Mapping[int, Leaving] = _NONE,
) -> list[Value | Pending | None]:
    """All steps of one op; returns the local results in their layouts at rest.

    `leaving`: results that are re-laid out slice by slice; they may be on their way still.
    """
    loop = _Loop(builder, op, strategy, derived, operands, emitter, leaving)
    for t in range(strategy.steps):
        builder.origin = Origin(op.name, op.module_path, "temporal", t, op.line)
        loop.step(t)
    return loop.results()


class _Loop:
    def __init__(
        self,
        builder: Builder,
        op: OpNode,
        strategy: Strategy,
        derived: Derived,
        operands: Sequence[Value | Arriving],
        emitter: PhaseEmitter,
        leaving: Mapping[int, Leaving],
    ) -> None:
        self.builder = builder
        self.op = op
        self.strategy = strategy
        self.ins = derived.inputs
        self.outs = derived.outputs
        self.arrives = {i: x for i, x in enumerate(operands) if isinstance(x, Arriving)}
        self.slices: dict[int, Value] = {}
        self.leaving = leaving
        self.rest = [x.whole if isinstance(x, Arriving) else x for x in operands]
        self.emitter = emitter
        cuts = Cuts.of(op.rule, strategy)
        self.blocks = [Block(op.rule, cuts.ranges(self._coords, t)) for t in range(strategy.steps)]
        self.transposed = [
            emitter.is_turned(key, port.layout, x)
            for key, port, x in zip(op.operands, derived.inputs, self.rest, strict=True)
        ]
        self.current = [
            self._outgoing(i) if port.motion == MOVE else x
            for i, (port, x) in enumerate(zip(self.ins, self.rest, strict=True))
        ]
        self.ports = len(self.ins) + len(self.outs)
        self.first_tag = builder.reserve(strategy.steps * self.ports)
        self.made = [j for j, result in enumerate(op.call.results) if result is not None]
        self.parts: list[list[Value]] = [[] for _ in self.outs]
        self.moving = moving(op, strategy, derived, emitter.mesh)
        self.arrived: dict[tuple[int, int], Value] = {}  # (operand, or result behind them all, step that needs it)
        self.open: dict[int, tuple[int, ...]] = {}  # tags of a result's transfers under way
        time = strategy.time_factor
        assert time is not None
        self.time = time
        self.shared = isinstance(op.call.target, Region) and op.call.target.shares_storage
        self.merge = merge_of(op.call.target) if op.rule.factors[time].kind == ONLINE else None

    def _outgoing(self, i: int) -> Value:
        """A contiguous form of operand i: the tensor behind a transposed view, or the operand itself."""
        value = self.emitter.base[self.rest[i].name] if self.transposed[i] else self.rest[i]
        return contiguous(self.builder, value)

    def step(self, t: int) -> None:
        tags = self._exchange(t)
        self.slices = {i: arriving.take(t) for i, arriving in self.arrives.items()}
        if not self.op.rule.rings and is_void(self.op.call, self.blocks[t]):  # in rings inside all ranks take part
            made: Sequence[Value | None] = [None] * len(self.outs)
        else:
            operands = [self._operand(i, t) for i in range(len(self.ins))]
            made = self.emitter.call_block(self.op, self.strategy, self.blocks[t], operands, t)
        self._combine(made, t)
        self.builder.wait(tags, P2P_CHANNEL)
        for i in self.moving.inputs:
            self.current[i] = self.arrived.pop((i, t + 1), self.current[i])

    def _exchange(self, t: int) -> tuple[int, ...]:
        """Start the moves of operands that begin in step t."""
        tags: list[int] = []
        here = self.builder.rank, t
        for dtype in dict.fromkeys(self.rest[i].dtype for i in self.moving.inputs):
            found = {i: hops for i, hops in self.moving.inputs.items() if self.rest[i].dtype == dtype}
            sent = [(i, hops.sent[here]) for i, hops in found.items() if here in hops.sent]
            received = [(i, hop) for i, hops in found.items() for hop in hops.received.get(here, ())]
            values, used = self.builder.exchange(
                [(self.current[i], hop.target, self._tag(t, i)) for i, hop in sent],
                [(self._wire_shape(i, hop.end), dtype, hop.source, self._tag(t, i)) for i, hop in received],
                stem=f"{self.op.name}_in",
            )
            self.arrived |= {(i, hop.end): value for (i, hop), value in zip(received, values, strict=True)}
            tags += used
        return tuple(tags)

    def _tag(self, t: int, i: int) -> int:
        return self.first_tag + t * self.ports + i

    def _wire_shape(self, i: int, t: int) -> tuple[int, ...]:
        shape = self.blocks[t].in_shape(i)
        return (shape[1], shape[0]) if self.transposed[i] else shape

    def _operand(self, i: int, t: int) -> Value:
        port, value = self.ins[i], self.current[i]
        if port.motion == MOVE and self.transposed[i]:
            shape = self.blocks[t].in_shape(i)
            return self.builder.call(
                aten.t.default, (value,), shape=shape, dtype=value.dtype, stem=f"{self.op.name}_t", kind="view"
            )
        if i in self.slices:
            return self.slices[i]
        if port.motion == SLICE:
            return time_slice(self.builder, self.strategy, i, self._coords, self.blocks[t], value)
        return value

    @property
    def _coords(self) -> dict[str, int]:
        return self.emitter.mesh.coords[self.builder.rank]

    def _combine(self, made: Sequence[Value | None], t: int) -> None:
        """Take in the results of step t; None: this block contributes nothing."""
        if self.merge is not None:
            self._merge(self.merge, made)
            return
        for j in self.made:
            part = made[j]
            if self.outs[j].motion == MOVE:
                self._pass_on(j, part, t)
            elif j in self.leaving:
                self.leaving[j].give(part or self._zeros(j, t))
            elif self.outs[j].motion == SLICE:
                self.parts[j].append(part or self._zeros(j, t))
            elif part is not None:
                self.parts[j] = [self._combined(j, self.parts[j][0], part) if self.parts[j] else part]

    def _merge(self, merge: Merge, made: Sequence[Value | None]) -> None:
        """Results of one block after another, by the op's own way of merging them."""
        if any(part is None for part in made):
            return
        fresh = [part for part in made if part is not None]
        kept = [part for parts in self.parts for part in parts]
        if not kept:
            made = [
                self._cast(x, dtype) for x, dtype in zip(fresh, merge.dtypes([x.dtype for x in fresh]), strict=True)
            ]
        else:
            outs = [(f"{x.name}_m", x.shape, x.dtype) for x in kept]
            made = self.builder.call_multi(merge.merge, (*kept, *fresh), {}, outs)
        self.parts = [[part] for part in made if part is not None]

    def _cast(self, value: Value, dtype: torch.dtype) -> Value:
        if value.dtype == dtype:
            return value
        return self.builder.call(
            aten._to_copy.default, (value,), {"dtype": dtype}, shape=value.shape, dtype=dtype, stem=f"{value.name}_f"
        )

    def _zeros(self, j: int, t: int) -> Value:
        """Result j of a block that contributes nothing."""
        result = self.op.call.results[j]
        assert result is not None
        shape = self.blocks[t].out_shape(j)
        return self.builder.call(
            aten.new_full.default,
            (self.rest[0], list(shape), neutral(self._how(j), result.dtype)),
            {"dtype": result.dtype},
            shape=shape,
            dtype=result.dtype,
            stem=f"{self.op.name}_none",
        )

    def _how(self, j: int) -> str:
        """How the blocks of the steps combine in result j."""
        return result_combine(self.op.rule, self.strategy, j)

    def _combined(self, j: int, into: Value, other: Value) -> Value:
        how = self._how(j)
        if how == SUM and not self.shared:
            return add_in_place(self.builder, into, other)
        return self.builder.call(
            PAIRWISE[how], (into, other), shape=into.shape, dtype=into.dtype, stem=f"{into.name}_acc", partial_ok=True
        )

    def _pass_on(self, j: int, part: Value | None, t: int) -> None:
        """Add what arrived to this rank's part and send the sum to its next holder."""
        self.builder.wait(self.open.pop(j, ()), P2P_CHANNEL)
        port, hops, here = len(self.ins) + j, self.moving.outputs[j], (self.builder.rank, t)
        received = self.arrived.pop((port, t), None)
        if received is not None:
            part = received if part is None else self._combined(j, part, received)
        if t + 1 == self.strategy.steps:
            self.parts[j] = [part] if part is not None else []
            return
        sent = [hops.sent[here]] if here in hops.sent else []
        begun = hops.received.get(here, [])
        tag, result = self._tag(t, port), self.op.call.results[j]
        assert result is not None
        values, self.open[j] = self.builder.exchange(
            [(contiguous(self.builder, part or self._zeros(j, t)), hop.target, tag) for hop in sent],
            [(self.blocks[hop.end].out_shape(j), result.dtype, hop.source, tag) for hop in begun],
            stem=f"{self.op.name}_sum",
        )
        self.arrived |= {(port, hop.end): value for hop, value in zip(begun, values, strict=True)}

    def results(self) -> list[Value | Pending | None]:
        if self.merge is not None:
            return list(self._finished(self.merge))
        found: list[Value | Pending | None] = [None] * len(self.outs)
        for j in self.made:
            if j in self.leaving:
                found[j] = self._left(j, self.leaving[j])
            else:
                found[j] = self._joined(j, self.parts[j]) if self.outs[j].motion == SLICE else self._last(j)
        return found

    def _left(self, j: int, leaving: Leaving) -> Pending:
        """The slices where they rest, joined once the last one is there."""
        return Pending(lambda: self._joined(j, leaving.finish()))

    def _last(self, j: int) -> Value:
        return self.parts[j][0] if self.parts[j] else self._zeros(j, self.strategy.steps - 1)

    def _finished(self, merge: Merge) -> Sequence[Value | None]:
        """What was merged, as the op itself would give it."""
        kept = [part for parts in self.parts for part in parts]
        results = [r for r in self.op.call.results if r is not None]
        if not kept:
            return [self._zeros(j, 0) for j in self.made]
        outs = [(f"{self.op.name}_{j}", x.shape, r.dtype) for j, (x, r) in enumerate(zip(kept, results, strict=True))]
        return self.builder.call_multi(merge.finish, (*kept, results[0].dtype), {}, outs)

    def _joined(self, j: int, parts: list[Value]) -> Value:
        """The blocks of all steps, one behind the other."""
        f, tensor = self.time, self.op.rule.outputs[j]
        dim = next(d for d, factors in enumerate(tensor) if f in factors)
        order = sorted(range(len(parts)), key=lambda t: (self.blocks[t].ranges[f], -t))
        sizes = [[b - a for a, b in (self.blocks[t].ranges[g] for g in tensor[dim])] for t in order]
        return concat(self.builder, [parts[t] for t in order], dim, sizes, tensor[dim].index(f), self.op.name)


def time_slice(
    builder: Builder, strategy: Strategy, port: int, coords: dict[str, int], block: Block, value: Value
) -> Value:
    """The part of what a rank holds of an operand that a step works on. `block`: that of the step."""
    rule, ranges, f = block.rule, block.ranges, strategy.time_factor
    assert f is not None
    tensor = rule.inputs[port]
    dim = next(d for d, factors in enumerate(tensor) if f in factors)
    whole = _rest_range(rule, strategy, f, coords)
    low, high = (bound - whole[0] for bound in ranges[f])
    extents = [whole if g == f else ranges[g] for g in tensor[dim]]
    return narrow(builder, value, dim, [b - a for a, b in extents], tensor[dim].index(f), (low, high))


def _rest_range(rule: OpRule, strategy: Strategy, f: int, coords: dict[str, int]) -> Range:
    return Atom(rule.factors[f].size, tuple(d for d in strategy.digits[f] if not d.tau)).range(coords)


def contiguous(builder: Builder, value: Value) -> Value:
    """The value itself when it is contiguous at run time, else a copy."""
    return builder.call(
        aten.contiguous.default, (value,), shape=value.shape, dtype=value.dtype, stem=f"{value.name}_c", kind="view"
    )


def contiguous_copy(builder: Builder, value: Value) -> Value:
    kwargs = {"memory_format": torch.contiguous_format}
    return builder.call(
        aten.clone.default, (value,), kwargs, shape=value.shape, dtype=value.dtype, stem=f"{value.name}_c"
    )


def add_in_place(builder: Builder, into: Value, other: Value) -> Value:
    return builder.call(
        aten.add_.Tensor, (into, other), shape=into.shape, dtype=into.dtype, stem=f"{into.name}_acc", kind="view"
    )


def narrow(builder: Builder, value: Value, dim: int, sizes: list[int], at: int, span: Range) -> Value:
    """Range `span` of the `at`-th part of a dim that is made of parts of the given sizes."""
    low, high = span
    if len(sizes) > 1:
        wide = (*value.shape[:dim], *sizes, *value.shape[dim + 1 :])
        value = reshape(builder, value, wide)
    shape = list(value.shape)
    shape[dim + at] = high - low
    out = builder.call(
        aten.slice.Tensor,
        (value, dim + at, low, high),
        shape=shape,
        dtype=value.dtype,
        stem=f"{value.name}_s",
        kind="view",
    )
    if len(sizes) == 1:
        return out
    merged = 1
    for size in shape[dim : dim + len(sizes)]:
        merged *= size
    return reshape(builder, out, (*shape[:dim], merged, *shape[dim + len(sizes) :]))


def reshape(builder: Builder, value: Value, shape: tuple[int, ...]) -> Value:
    return builder.call(
        aten.reshape.default, (value, list(shape)), shape=shape, dtype=value.dtype, stem=f"{value.name}_r", kind="view"
    )


def concat(builder: Builder, parts: list[Value], dim: int, sizes: list[list[int]], at: int, stem: str) -> Value:
    """Join blocks along the `at`-th part of a dim; `sizes[i]`: extents of the dim's parts in block i."""
    split = len(sizes[0]) > 1
    if split:
        parts = [
            reshape(builder, part, (*part.shape[:dim], *extents, *part.shape[dim + 1 :]))
            for part, extents in zip(parts, sizes, strict=True)
        ]
    shape = list(parts[0].shape)
    shape[dim + at] = sum(part.shape[dim + at] for part in parts)
    out = builder.call(aten.cat.default, (parts, dim + at), shape=shape, dtype=parts[0].dtype, stem=stem)
    if not split:
        return out
    merged = 1
    for size in shape[dim : dim + len(sizes[0])]:
        merged *= size
    return reshape(builder, out, (*shape[:dim], merged, *shape[dim + len(sizes[0]) :]))
