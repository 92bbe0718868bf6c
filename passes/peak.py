"""Bytes and seconds of one assignment, for any set of ops that backward runs again: tens of times a second.

The tables of `passes/held.py` are for many choices at the points that can be the peak. For a single choice each claim
has one layout, whatever the set, so that a set costs one walk over the step's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stpart_compiler.passes.held import NOTHING, MemoryMaker
from stpart_compiler.passes.own_bytes import own_bytes
from stpart_compiler.passes.problem import BuildProblem, SolverOptions, evaluate, group_price
from stpart_compiler.passes.quotient import Producer
from stpart_compiler.passes.space import ParamChoices, Space, strategy_of
from stpart_compiler.passes.timeline import MOMENTS, RUNS, Claim, Course, Held, Point, SpanKey, Timeline, course, shares
from stpart_compiler.passes.uses import Assignment, Use


@dataclass(frozen=True)
class Tried:
    """A set of ops to run again; bytes at the peak of a step, and its seconds."""

    again: frozenset[str]
    nbytes: int
    seconds: float


class TrySets:
    """search space, assignment -> what it needs with any set of ops run again."""

    def __init__(self, space: Space, choice: Assignment, options: SolverOptions) -> None:
        self.space = only_chosen(space, choice)
        problem = BuildProblem(options).apply(self.space)
        self.only = dict.fromkeys(problem.roots, 0)
        self.prices = problem.prices
        self.seconds = evaluate(problem, self.only)
        nothing = Timeline([Point(-1, "")], [], frozenset())
        self.maker = MemoryMaker(self.space, nothing, problem.roots, problem.prices, options.optimizer)
        self.maker.add_params()
        self.always = int(self.maker.constant[0]) + sum(int(table[0, 0]) for table in self.maker.tables.values())
        self.numbers: dict[SpanKey, int] = {}
        self.own: dict[tuple[int, frozenset[int]], int] = {}
        self.known: dict[frozenset[str], Tried] = {}

    def at(self, again: frozenset[str]) -> Tried:
        """`again`: names of ops of forward."""
        if again not in self.known:
            way = course(self.space.graph, self.space.costs.link, again)
            ran = {op.klass for op in way.ops[way.backward :] if op.name in again}
            self.known[again] = Tried(again, self._peak(way), self.seconds + self._more(ran))
        return self.known[again]

    def _peak(self, way: Course) -> int:
        held: dict[tuple[Producer, int], list[SpanKey]] = {}
        for key in way.spans:
            number = self._number(key, way)
            if number != NOTHING:
                held.setdefault((key[0], number), []).append(key)
        total = np.full(MOMENTS * len(way.ops), self.always, dtype=np.int64)
        for (_, number), keys in held.items():
            counts = [way.counts(key) for key in keys]
            total += self.maker.sizes[number] * (counts[0] if len(counts) == 1 else np.max(np.stack(counts), axis=0))
        total[RUNS::MOMENTS] += self._own(way)
        return int(total.max(initial=self.always))

    def _number(self, key: SpanKey, way: Course) -> int:
        """The layout in which a claim holds its values."""
        if key not in self.numbers:
            producer, kind, use, _ = key
            value = way.values[producer]
            held = Held(producer, value, shares(self.space.graph, value.key), [])
            demand = self.maker.demand(held, Claim(kind, use, np.ones(1, dtype=np.int64)))
            hidden = kind in ("made", "flight") and held.shares
            self.numbers[key] = NOTHING if demand is None or hidden else demand.at(self.only)
        return self.numbers[key]

    def _own(self, way: Course) -> npt.NDArray[np.int64]:
        """Per op, what it needs beside its operands and results."""
        lasting: dict[int, set[int]] = {}
        for klass, port in way.lasting:
            lasting.setdefault(klass, set()).add(port)
        return np.array([self._own_of(op.klass, frozenset(lasting.get(op.klass, ()))) for op in way.ops])

    def _own_of(self, klass: int, ports: frozenset[int]) -> int:
        if (klass, ports) not in self.own:
            found = self.space.choices[klass]
            lasting = frozenset((klass, port) for port in ports)
            chosen = found.op, found.strategies[0], found.derived[0]
            self.own[klass, ports] = own_bytes(self.space.costs, *chosen, lasting)
        return self.own[klass, ports]

    def _more(self, ran: set[int]) -> float:
        """Seconds of what runs again, with the re-layouts for it."""
        groups: dict[Producer, list[Use]] = {}
        for (producer, consumer, _), use in self.prices.uses.items():
            if consumer in ran:
                groups.setdefault(producer, []).append(use)
        moved = sum(group_price(group, self.only) for group in groups.values()) / 1e9
        return moved + sum(self.space.choices[k].count * self.space.choices[k].seconds[0] for k in ran)


def only_chosen(space: Space, choice: Assignment) -> Space:
    """The space in which an assignment is all there is: choice 0 of every root."""
    params = [ParamChoices(p.names, p.value, [p.layouts[choice[-1 - i]]]) for i, p in enumerate(space.params)]
    chosen = [strategy_of(space, choice, klass)[0] for klass in range(len(space.choices))]
    choices = [found.picked([chosen[klass]], klass, [[0]]) for klass, found in enumerate(space.choices)]
    return replace(space, choices=choices, params=params)
