"""Where values are held while the solver may still choose which op classes of forward run again in backward.

The order is that in which all of them do. A claim then holds only with some of these choices: what an op reads as it
runs again, only if it does; a value that may be made anew, from forward on if it is not, and anew if it is. For a
part of the set values may be made somewhat earlier here than in its own order, so that bytes in backward are near, not
exact: what is chosen so is looked at again in its own order. In forward no order depends on the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.passes.ahead import Ahead
from stpart_compiler.passes.order import Orders, Use, is_heavy, orders, use_of_grad
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.quotient import Producer
from stpart_compiler.passes.timeline import (
    ALWAYS,
    MOMENTS,
    RUNS,
    SENDS,
    ClaimKind,
    Reads,
    Spans,
    Timeline,
    Walk,
    When,
    folded,
    until_given,
    walked_forward,
)

_Reader = tuple[Use, When]


def optional_timeline(
    graph: Annotated, cost: LinkCost, again: frozenset[str], optional: frozenset[int], *, only_forward: bool = False
) -> Timeline:
    """The points that can be the peak, with what is held there for any choice of the `optional` op classes.

    `again`: all ops that may run again; those of other classes do. `only_forward`: leaves the points of backward out.
    """
    order = orders(graph, again)
    spans = Spans(graph)
    forward = walked_forward(graph, cost, order, spans)
    backward = _Backward(graph, order, forward, cost, again, optional)
    backward.run(spans)
    ops = order.forward if only_forward else [*order.forward, *order.backward]
    return folded(graph, ops, spans.before(MOMENTS * len(ops)))


@dataclass
class _Backward:
    """Goes through backward from last to first; as `Walk`, for each condition of the reader apart."""

    graph: Annotated
    order: Orders
    forward: Walk
    cost: LinkCost
    again: frozenset[str]
    optional: frozenset[int]
    reads: dict[ValueKey, dict[_Reader, Reads]] = field(default_factory=dict)
    last: dict[ValueKey, dict[When, int]] = field(default_factory=dict)
    saved_for: dict[Producer, Use] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ops = self.order.backward
        self.place = {op.name: t for t, op in enumerate(self.ops)}
        self.ahead = Ahead(self.graph, self.ops, self.cost)
        self.resting = self.order.resting | set(self.order.saved)
        self.heavy = {op.klass for op in self.ops if is_heavy(op)}
        self.offset = MOMENTS * len(self.order.forward)

    def run(self, spans: Spans) -> None:
        end = MOMENTS * len(self.ops) - 1
        for key, param in self.order.grads:
            reads = Reads(*until_given(self.ahead, self.place.get(key[0], 0), end))
            self._touch(key, (use_of_grad(self.graph, param), ALWAYS), reads)
        begins = self.ahead.begins()
        for t in reversed(range(len(self.ops))):
            self._read(self.ops[t], t, begins[t])
        for key in self.reads:
            self._note(spans, key)
        for t, op in enumerate(self.ops):
            for r, result in enumerate(op.call.results):
                if result is not None:
                    self._add(spans, (op.name, r), "made", None, (MOMENTS * t + RUNS,) * 2, self._if_again(op))

    def _if_again(self, op: OpNode) -> When:
        """The condition on which an op of the order runs."""
        return ((op.klass, True),) if op.name in self.again and op.klass in self.optional else ALWAYS

    def _if_made(self, op: OpNode) -> When:
        """The condition on which an op stands where it does: views of what does not run again are made when read."""
        while is_view(op.call.target) and op.operands:
            made = [key for key in op.operands if key not in self.resting and key[0] in self.place]
            if not made:
                return ALWAYS
            op = self.graph.by_name[made[0][0]]
        return self._if_again(op)

    def _read(self, op: OpNode, t: int, begin: int) -> None:
        """The operands of an op; a view is read as long as its readers are."""
        for when, last in self._lasts(op, t):
            for port, key in enumerate(op.operands):
                self._touch(key, ((op.klass, port), when), Reads(MOMENTS * begin, MOMENTS * t + RUNS, last))

    def _lasts(self, op: OpNode, t: int) -> Iterator[tuple[When, int]]:
        if not is_view(op.call.target):
            yield self._if_again(op), MOMENTS * t + RUNS
            return
        found: dict[When, int] = {}
        for r in range(len(op.call.results)):
            for when, last in self.last.get((op.name, r), {}).items():
                found[when] = max(found.get(when, MOMENTS * t + RUNS), last)
        yield from found.items()

    def _touch(self, key: ValueKey, reader: _Reader, reads: Reads) -> None:
        when = reader[1]
        lasts = self.last.setdefault(key, {})
        lasts[when] = max(lasts.get(when, 0), reads.last)
        uses = self.reads.setdefault(key, {})
        if reader in uses:
            uses[reader].join(reads.start, reads.first, reads.last)
        else:
            uses[reader] = Reads(reads.start, reads.first, reads.last)
        if key in self.resting or key[0] in self.place:
            return
        view = self.graph.by_name[key[0]]
        for port, operand in enumerate(view.operands):
            self._touch(operand, ((view.klass, port), when), reads)

    def _note(self, spans: Spans, key: ValueKey) -> None:
        uses = self.reads[key]
        made = self.place.get(key[0]) if key not in self.resting else None
        own = self._if_made(self.ops[made]) if made is not None else ALWAYS
        for (use, when), reads in uses.items():
            if made is not None:
                for kind, span in spans.of_read(key, reads, made, self.ahead):
                    self._add(spans, key, kind, use, span, (*own, *when))
            if made is None or own:
                for kind, span in spans.of_read(key, reads, None, self.ahead):
                    self._add(spans, key, kind, use, span, (*_not(own), *when))
            if use[0] in self.heavy and spans.is_large(key):
                self._add(spans, key, "loop", use, (reads.first, reads.last), when)
        if key in self.order.saved or (own and not is_view(self.graph.by_name[key[0]].call.target)):
            self._note_saved(spans, key, _not(own))

    def _note_saved(self, spans: Spans, key: ValueKey, own: When) -> None:
        """From where forward makes the value to its last read, for each condition of its readers."""
        first = min(self.reads[key].items(), key=lambda item: item[1].first)[0][0]
        use = self.saved_for.setdefault(spans.producer(key), first)  # one claim for all of a class
        start = MOMENTS * self.forward.place[key[0]] + SENDS
        for when, last in self.last[key].items():
            spans.add(key, "saved", use, (start, self.offset + last), (*own, *when))

    def _add(
        self, spans: Spans, key: ValueKey, kind: ClaimKind, use: Use | None, span: tuple[int, int], when: When
    ) -> None:
        spans.add(key, kind, use, (span[0] + self.offset, span[1] + self.offset), when)


def _not(own: When) -> When:
    return tuple((klass, not runs) for klass, runs in own)
