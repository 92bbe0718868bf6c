"""Unroll a temporal strategy on one rank: exchange for step t+1, compute of step t, wait.

Moving operands need two buffers: the block in use and the one arriving. A moving result is a partial sum: it arrives
from the previous holder while this rank computes its own part, and is sent on with that part added.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from stpart_compiler.ir.layout import Atom, Range
from stpart_compiler.ir.program import P2P_CHANNEL, Builder, Origin, Value
from stpart_compiler.ir.rule import OpRule, TensorMap
from stpart_compiler.ir.spacetime import MOVE, SLICE, Derived, Port, Strategy, factor_range
from stpart_compiler.passes.propagate import OpNode
from stpart_compiler.passes.rules import Block

if TYPE_CHECKING:
    from stpart_compiler.passes.codegen import PhaseEmitter

aten = torch.ops.aten


def emit_temporal(
    builder: Builder, op: OpNode, strategy: Strategy, derived: Derived, operands: list[Value], emitter: PhaseEmitter
) -> Value:
    """All steps of one op; returns the local result in its layout at rest."""
    loop = _Loop(builder, op, strategy, derived, operands, emitter)
    for t in range(strategy.steps):
        builder.origin = Origin(op.name, op.module_path, "temporal", t, op.line)
        loop.step(t)
    return loop.result()


class _Loop:
    def __init__(
        self,
        builder: Builder,
        op: OpNode,
        strategy: Strategy,
        derived: Derived,
        operands: list[Value],
        emitter: PhaseEmitter,
    ) -> None:
        self.builder = builder
        self.op = op
        self.strategy = strategy
        self.ins = derived.inputs
        self.out: Port = derived.outputs[0]
        self.rest = operands
        self.emitter = emitter
        self.blocks = [
            Block(op.rule, factor_range(strategy, op.rule, emitter.mesh, builder.rank, t))
            for t in range(strategy.steps)
        ]
        self.transposed = [
            emitter.is_turned(key, port.layout, x)
            for key, port, x in zip(op.operands, derived.inputs, operands, strict=True)
        ]
        self.current = [
            self._outgoing(i) if port.motion == MOVE else x
            for i, (port, x) in enumerate(zip(self.ins, operands, strict=True))
        ]
        self.first_tag = builder.reserve(strategy.steps * (len(operands) + 1))
        self.parts: list[Value] = []
        self.arriving: tuple[Value, tuple[int, ...]] | None = None

    def _outgoing(self, i: int) -> Value:
        """A contiguous form of operand i: the tensor behind a transposed view, or the operand itself."""
        value = self.emitter.base[self.rest[i].name] if self.transposed[i] else self.rest[i]
        return contiguous(self.builder, value)

    def step(self, t: int) -> None:
        incoming, tags = self._exchange(t)
        made = self.emitter.call_block(self.op, self.blocks[t], [self._operand(i, t) for i in range(len(self.ins))])
        part = made[0]
        assert part is not None
        self._combine(part, t)
        self.builder.wait(tags, P2P_CHANNEL)
        for i, value in incoming.items():
            self.current[i] = value

    def _exchange(self, t: int) -> tuple[dict[int, Value], tuple[int, ...]]:
        """Start the moves of operands towards step t+1."""
        moving = [i for i, port in enumerate(self.ins) if port.motion == MOVE]
        if t + 1 == self.strategy.steps or not moving:
            return {}, ()
        incoming: dict[int, Value] = {}
        tags: list[int] = []
        for dtype in dict.fromkeys(self.rest[i].dtype for i in moving):
            same = [i for i in moving if self.rest[i].dtype == dtype]
            values, used = self.builder.exchange(
                [(self.current[i], self._peer(self.ins[i], -1), self._tag(t, i)) for i in same],
                [(self._wire_shape(i, t + 1), dtype, self._peer(self.ins[i], 1), self._tag(t, i)) for i in same],
                stem=f"{self.op.name}_in",
            )
            incoming |= dict(zip(same, values, strict=True))
            tags += used
        return incoming, tuple(tags)

    def _tag(self, t: int, i: int) -> int:
        return self.first_tag + t * (len(self.ins) + 1) + i

    def _peer(self, port: Port, sign: int) -> int:
        return self.emitter.mesh.shifted(self.builder.rank, {axis: sign * x for axis, x in port.shift})

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
        if port.motion == SLICE:
            return self._slice(value, self.op.rule.inputs[i], t)
        return value

    def _slice(self, value: Value, tensor: TensorMap, t: int) -> Value:
        """The part of a resting block that step t works on."""
        f = self.strategy.time_factor
        assert f is not None
        dim = next(d for d, factors in enumerate(tensor) if f in factors)
        whole = _rest_range(self.op.rule, self.strategy, f, self.emitter.mesh.coords[self.builder.rank])
        low, high = (bound - whole[0] for bound in self.blocks[t].ranges[f])
        extents = [self.blocks[t].ranges[g] for g in tensor[dim]]
        sizes = [whole[1] - whole[0] if g == f else b - a for g, (a, b) in zip(tensor[dim], extents, strict=True)]
        return narrow(self.builder, value, dim, sizes, tensor[dim].index(f), (low, high))

    def _combine(self, part: Value, t: int) -> None:
        if self.out.motion == SLICE:
            self.parts.append(part)
        elif self.out.motion == MOVE:
            self._pass_on(part, t)
        elif not self.parts:
            self.parts.append(part)
        else:
            self.parts = [add_in_place(self.builder, self.parts[0], part)]

    def _pass_on(self, part: Value, t: int) -> None:
        """Add what arrived to this rank's part and send the sum to its next holder."""
        if self.arriving is not None:
            received, tags = self.arriving
            self.builder.wait(tags, P2P_CHANNEL)
            part = add_in_place(self.builder, part, received)
        self.parts = [part]
        if t + 1 == self.strategy.steps:
            return
        tag = self._tag(t, len(self.ins))
        values, tags = self.builder.exchange(
            [(contiguous(self.builder, part), self._peer(self.out, -1), tag)],
            [(self.blocks[t + 1].out_shape(), part.dtype, self._peer(self.out, 1), tag)],
            stem=f"{self.op.name}_sum",
        )
        self.arriving = (values[0], tags)

    def result(self) -> Value:
        if self.out.motion != SLICE:
            return self.parts[0]
        f = self.strategy.time_factor
        assert f is not None
        tensor = self.op.rule.outputs[0]
        dim = next(d for d, factors in enumerate(tensor) if f in factors)
        order = sorted(range(len(self.parts)), key=lambda t: (self.blocks[t].ranges[f], -t))
        sizes = [[b - a for a, b in (self.blocks[t].ranges[g] for g in tensor[dim])] for t in order]
        return concat(self.builder, [self.parts[t] for t in order], dim, sizes, tensor[dim].index(f), self.op.name)


def _rest_range(rule: OpRule, strategy: Strategy, f: int, coords: dict[str, int]) -> Range:
    return Atom(rule.factors[f].size, tuple(d for d in strategy.digits[f] if not d.tau)).range(coords)


def contiguous(builder: Builder, value: Value) -> Value:
    """The value itself when it is contiguous at run time, else a copy."""
    return builder.call(
        aten.contiguous.default, (value,), shape=value.shape, dtype=value.dtype, stem=f"{value.name}_c", kind="view"
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
