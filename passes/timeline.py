"""What a rank holds at each program point that can be the peak, per class of values, whatever the placements.

The points of a step are its ops in the order of `passes/schedule.py`: right before an op, where what comes for it is
unpacked, where it runs (operands and results are there together), and right after it, where the transfers of its
results start. A *claim* says that at a point so many values of a class are held in a layout: the one they are made in,
the one a use asks for, or the one they are saved in; or what a re-layout holds besides. Claims of one value on the same
layout share one tensor.

Identical layers make the counts linear in the layer's number, so only the points of the first and the last layer can be
the peak; of these, a point at which no count is larger than at another one is left out too. Small values are counted,
but not looked at for this.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from stpart_compiler.cost_models.communication import LinkCost
from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.passes.ahead import Ahead
from stpart_compiler.passes.order import NOTHING_AGAIN, Orders, Use, is_heavy, orders, use_of_grad
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueInfo, ValueKey
from stpart_compiler.passes.quotient import Producer, producer_of, quotient

Counts = npt.NDArray[np.int64]
Span = tuple[int, int]

MOMENTS = 3
"""Positions of an op in the order: what comes for it is unpacked; it runs; its results are sent."""

RUNS, SENDS = 1, 2

SMALL = 1e-3
"""Values of less than this part of the largest one do not make a point of their own."""

ClaimKind = Literal[
    "made",
    "read",
    "flight",
    "saved",
    "move",
    "begin",
    "later",
    "end",
    "move kept",
    "begin kept",
    "later kept",
    "end kept",
    "loop",
]
"""made: as produced. read: as the use asks for it. flight: as produced, until a use that asks for another layout has
it. saved: as produced, or where that is pending as the use asks for it. move, begin, later, end: what the re-layout for
the use holds besides, while transfers run, when the first one begins, in the half of the time in which later ones run,
and when the last one has ended; "kept" where the value is there anyway. loop: what a loop holds of an operand beside
the block or slice that it begins with."""

ROOM: tuple[ClaimKind, ...] = ("move", "begin", "later", "end")
KEPT_ROOM: tuple[ClaimKind, ...] = ("move kept", "begin kept", "later kept", "end kept")
"""The claims that are parts of a `Room` (`passes/room.py`), in its order."""

When = tuple[tuple[int, bool], ...]
"""Of some op classes whether they run again in backward: what a claim holds only with (`passes/optional.py`)."""

ALWAYS: When = ()

SpanKey = tuple[Producer, ClaimKind, Use | None, When]
"""Class of values, and the claim on it."""


@dataclass(frozen=True)
class Claim:
    """`counts[p]`: values of the class that are held at point p because of this. `use`: whose; None for "made"."""

    kind: ClaimKind
    use: Use | None
    counts: Counts
    when: When = ALWAYS


@dataclass(frozen=True)
class Held:
    """A class of values. `shares`: as produced it takes no memory of its own: a view, a parameter, or an input."""

    producer: Producer
    value: ValueInfo
    shares: bool
    claims: list[Claim]


@dataclass(frozen=True)
class Point:
    """`klass`: op class that runs there, -1 between ops; the first op of it that does is `name`."""

    klass: int
    name: str


@dataclass(frozen=True)
class Timeline:
    """`lasting`: operands (op class, port) that live longer than the op."""

    points: list[Point]
    held: list[Held]
    lasting: frozenset[Use]


@lru_cache(maxsize=8)
def timeline(graph: Annotated, cost: LinkCost, again: frozenset[str] = NOTHING_AGAIN) -> Timeline:
    """The points of a step that can be its peak, and what is held there.

    `cost`: of the cluster and mesh, as for the schedule; `again`: as in `orders`.
    """
    forward, backward, spans = _walked(graph, cost, again)
    return folded(graph, [*forward, *backward], spans)


@dataclass(frozen=True)
class Course:
    """Every op of a step in order, not only those that can be the peak: op t runs at position 3t + 1.

    `backward`: number of the first op of backward. `spans`: positions at which values are held, both ends included,
    per class of values and claim.
    """

    ops: list[OpNode]
    backward: int
    spans: dict[SpanKey, list[Span]]
    values: dict[Producer, ValueInfo]
    lasting: frozenset[Use]

    def counts(self, key: SpanKey) -> Counts:
        """Values held at each position."""
        return _counts(self.spans[key], MOMENTS * len(self.ops))


def course(graph: Annotated, cost: LinkCost, again: frozenset[str] = NOTHING_AGAIN) -> Course:
    """As `timeline`, without leaving any position out."""
    forward, backward, spans = _walked(graph, cost, again)
    values = {producer: graph.values[key] for producer, key in spans.value.items()}
    return Course([*forward, *backward], len(forward), spans.found, values, frozenset(spans.lasting))


def shares(graph: Annotated, key: ValueKey) -> bool:
    """Whether a value takes no memory of its own as it is made: a view, a parameter, or an input."""
    op = graph.by_name.get(key[0])
    return op is None or is_view(op.call.target)


def walked_forward(graph: Annotated, cost: LinkCost, order: Orders, spans: Spans) -> Walk:
    """Go through forward."""
    forward = Walk(graph, order.forward, cost, order.resting, 0)
    for key in order.results:
        forward.give(key, (-1, -1))
    for key in order.saved:
        forward.keep(key)
    forward.run(spans)
    return forward


def _walked(graph: Annotated, cost: LinkCost, again: frozenset[str]) -> tuple[list[OpNode], list[OpNode], Spans]:
    """The ops of forward and backward, and where each value is held."""
    order = orders(graph, again)
    spans = Spans(graph)
    forward = walked_forward(graph, cost, order, spans)
    if order.training:
        end = MOMENTS * len(order.forward)
        backward = Walk(graph, order.backward, cost, order.resting | set(order.saved), end)
        for key, param in order.grads:
            backward.give(key, use_of_grad(graph, param))
        backward.run(spans)
        _add_saved(spans, forward, backward, order)
    return order.forward, order.backward if order.training else [], spans


@dataclass
class Spans:
    """Spans of positions, both ends included, per value class and kind of claim."""

    graph: Annotated
    found: dict[SpanKey, list[Span]] = field(default_factory=dict)
    value: dict[Producer, ValueKey] = field(default_factory=dict)
    lasting: set[Use] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.param_class = quotient(self.graph).param_class
        self.producers: dict[ValueKey, Producer] = {}
        self.least = SMALL * max((value.nbytes for value in self.graph.values.values()), default=0)

    def is_large(self, key: ValueKey) -> bool:
        """Whether a value may make a point of its own."""
        return self.graph.values[key].nbytes >= self.least

    def producer(self, key: ValueKey) -> Producer:
        if key not in self.producers:
            self.producers[key] = producer_of(self.graph, key, self.param_class)
        return self.producers[key]

    def of_read(self, key: ValueKey, reads: Reads, made: int | None, ahead: Ahead) -> Iterator[tuple[ClaimKind, Span]]:
        """What is held for a use of a value. `made`: the op of the phase that makes it; None: it is there anyway.

        What the re-layout holds besides is looked at for large values. Its end is right before the op that reads first.
        """
        start = reads.start if made is None else MOMENTS * made + SENDS
        end = max(start, reads.first - 1 if reads.first % MOMENTS == RUNS else reads.first)
        yield "read", (start, reads.last)
        if made is not None:
            yield "flight", (start, end)
        if not self.is_large(key):
            return
        half = ahead.halfway(-(-start // MOMENTS), reads.first // MOMENTS)
        later = end if half is None else min(end, MOMENTS * half + SENDS)
        spans = (start, end), (start, start), (later, end), (end, end)
        is_kept = made is None or shares(self.graph, key)  # behind a view is a value with claims of its own
        yield from zip(KEPT_ROOM if is_kept else ROOM, spans, strict=True)

    def add(self, key: ValueKey, kind: ClaimKind, use: Use | None, span: Span, when: When = ALWAYS) -> None:
        producer = self.producer(key)
        self.value.setdefault(producer, key)
        self.found.setdefault((producer, kind, use, when), []).append(span)

    def before(self, end: int) -> Spans:
        """What is held at the positions before `end`."""
        found = {
            key: [(start, min(last, end - 1)) for start, last in spans if start < end]
            for key, spans in self.found.items()
        }
        return replace(self, found={key: spans for key, spans in found.items() if spans})


@dataclass
class Reads:
    """Uses of one value by one operand of one op class in a phase: from the first fetch to the last read."""

    start: int
    first: int
    last: int

    def join(self, start: int, first: int, last: int) -> None:
        self.start, self.first, self.last = min(self.start, start), min(self.first, first), max(self.last, last)


def until_given(ahead: Ahead, made: int, end: int) -> tuple[int, int, int]:
    """Of a result of a phase that op `made` makes: positions from which it moves, where that ends, and its last.

    `end`: the last position of the phase.
    """
    waited = ahead.end(made)
    return MOMENTS * made + RUNS, end if waited is None else MOMENTS * waited + RUNS, end


class Walk:
    """Goes through the ops of a phase, from last to first, and notes how long each value is read.

    Position 3t + offset is right before op t runs: see `MOMENTS`.
    """

    def __init__(
        self, graph: Annotated, ops: list[OpNode], cost: LinkCost, resting: AbstractSet[ValueKey], offset: int
    ) -> None:
        self.graph = graph
        self.ops = ops
        self.resting = resting
        self.offset = offset
        self.end = MOMENTS * len(ops) - 1
        self.place = {op.name: t for t, op in enumerate(ops)}
        self.reads: dict[ValueKey, dict[Use, Reads]] = {}
        self.last: dict[ValueKey, int] = {}
        self.ahead = Ahead(graph, ops, cost)
        self.kept: set[ValueKey] = set()
        self.heavy = {op.klass for op in ops if is_heavy(op)}

    def give(self, key: ValueKey, use: Use) -> None:
        """A result of the phase: its transfer ends some heavy ops after it was made."""
        self._touch(key, use, *until_given(self.ahead, self.place.get(key[0], 0), self.end))

    def keep(self, key: ValueKey) -> None:
        """A value that the next phase reads."""
        self.kept.add(key)
        self.last[key] = self.end

    def run(self, spans: Spans) -> None:
        begins = self.ahead.begins()
        for t in reversed(range(len(self.ops))):
            op = self.ops[t]
            runs = MOMENTS * t + RUNS
            ends = [runs, *(self.last.get((op.name, r), 0) for r in range(len(op.call.results)))]
            last = max(ends) if is_view(op.call.target) else runs
            for port, key in enumerate(op.operands):
                if self.last.get(key, 0) > last:
                    spans.lasting.add((op.klass, port))
                self._touch(key, (op.klass, port), MOMENTS * begins[t], runs, last)
        for key, uses in self.reads.items():
            self._note(spans, key, uses)
        for op in self.ops:
            self._note_made(spans, op)

    def _touch(self, key: ValueKey, use: Use, start: int, first: int, last: int) -> None:
        """A read of a value; one of a view that is made for it reads what is behind it as well."""
        self.last[key] = max(self.last.get(key, 0), last)
        uses = self.reads.setdefault(key, {})
        if use in uses:
            uses[use].join(start, first, last)
        else:
            uses[use] = Reads(start, first, last)
        if key in self.resting or key[0] in self.place:
            return
        view = self.graph.by_name[key[0]]
        for port, operand in enumerate(view.operands):
            self._touch(operand, (view.klass, port), start, first, last)

    def _note(self, spans: Spans, key: ValueKey, uses: dict[Use, Reads]) -> None:
        made = self.place.get(key[0]) if key not in self.resting else None
        for use, reads in uses.items():
            for kind, span in spans.of_read(key, reads, made, self.ahead):
                spans.add(key, kind, use, self._at(*span))
            if use[0] in self.heavy and spans.is_large(key):
                spans.add(key, "loop", use, self._at(reads.first, reads.last))

    def _note_made(self, spans: Spans, op: OpNode) -> None:
        t = self.place[op.name]
        for r, result in enumerate(op.call.results):
            if result is not None:
                spans.add((op.name, r), "made", None, self._at(MOMENTS * t + RUNS, MOMENTS * t + RUNS))

    def _at(self, start: int, end: int) -> Span:
        return start + self.offset, end + self.offset


def _add_saved(spans: Spans, forward: Walk, backward: Walk, order: Orders) -> None:
    """Saved values are held from where they are made to their last read in backward.

    All of a class are one claim, though not all need be read by the same op class first.
    """
    uses: dict[Producer, Use] = {}
    for key in order.saved:
        made = MOMENTS * forward.place[key[0]] + SENDS
        first = min(backward.reads[key].items(), key=lambda item: item[1].first)[0]
        use = uses.setdefault(spans.producer(key), first)
        spans.add(key, "saved", use, (made, backward.offset + backward.last[key]))


def folded(graph: Annotated, ops: list[OpNode], spans: Spans) -> Timeline:
    """Counts per class, at the points that can be the peak."""
    keys = [key for key in spans.found if not (key[1] in ("made", "flight") and shares(graph, spans.value[key[0]]))]
    large = np.array([spans.is_large(spans.value[key[0]]) for key in keys], dtype=np.bool_)
    ends = _ends(ops)
    counts = np.array([_counts(spans.found[key], MOMENTS * len(ops))[ends] for key in keys], dtype=np.int64)
    counts = counts.reshape(len(keys), -1)
    chosen = _chosen(counts[large], ends, ops)
    counts = counts[:, chosen]
    places = [ends[n] for n in chosen]
    points = [Point(ops[at // MOMENTS].klass if at % MOMENTS == RUNS else -1, ops[at // MOMENTS].name) for at in places]
    claims: dict[Producer, list[Claim]] = {}
    for (producer, kind, use, when), row in zip(keys, counts, strict=True):
        if row.any():
            claims.setdefault(producer, []).append(Claim(kind, use, row, when))
    held = [
        Held(producer, graph.values[key], shares(graph, key), claims[producer])
        for producer, key in spans.value.items()
        if producer in claims
    ]
    return Timeline(points, held, frozenset(spans.lasting))


def _counts(spans: list[Span], positions: int) -> Counts:
    """Number of spans that each of so many positions is in."""
    change = np.zeros(positions + 1, dtype=np.int64)
    for start, end in spans:
        change[start] += 1
        change[end + 1] -= 1
    return np.cumsum(change)[:-1]


def _ends(ops: list[OpNode]) -> list[int]:
    """Positions of the first two and the last two ops of every class that does anything, run again or not, and those
    right before and right after them."""
    places: dict[tuple[int, bool], list[int]] = {}
    ran: set[str] = set()
    for t, op in enumerate(ops):
        if not is_view(op.call.target):
            places.setdefault((op.klass, op.name in ran), []).append(t)
            ran.add(op.name)
    kept = {t for ts in places.values() for t in (*ts[:2], *ts[-2:])}
    return sorted(MOMENTS * t + moment for t in kept for moment in range(MOMENTS))


def _chosen(counts: Counts, ends: list[int], ops: list[OpNode]) -> list[int]:
    """Which of the positions can be the peak."""
    own = [ops[at // MOMENTS].klass if at % MOMENTS == RUNS and _has_own(ops[at // MOMENTS]) else -1 for at in ends]
    by_point = np.ascontiguousarray(counts.T.astype(np.int32))
    rows = np.empty_like(by_point)
    kept: list[int] = []
    total = by_point.sum(axis=1)
    for n in sorted(range(len(ends)), key=lambda n: (-int(total[n]), n)):
        larger = np.all(rows[: len(kept)] >= by_point[n], axis=1)
        if not any(own[n] in (-1, own[kept[m]]) for m in np.flatnonzero(larger)):
            rows[len(kept)] = by_point[n]
            kept.append(n)
    return sorted(kept)


def _has_own(op: OpNode) -> bool:
    """Whether an op may need memory beside its operands and results: buffers and parts of a loop in time."""
    return is_heavy(op)
