"""What to run again in backward instead of saving it, for given placements: sets of op classes, one in another.

Greedy by bytes saved per second: an op class whose results are saved is run again from what is saved; what it reads is
then saved too, or run again as well, whichever pays. Layers are tied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import max_local_numel
from stpart_compiler.passes.order import NOTHING_AGAIN, may_run_again, orders
from stpart_compiler.passes.propagate import ValueKey
from stpart_compiler.passes.space import Space, strategy_of
from stpart_compiler.passes.uses import Assignment

Result = tuple[int, int]
"""Op class and result."""


@dataclass(frozen=True)
class Move:
    """`classes` are run again, `extra` is saved that was not before. Bytes and seconds of all layers together."""

    classes: frozenset[int]
    extra: frozenset[Result]
    nbytes: int
    seconds: float

    @property
    def worth(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9)


@dataclass
class FindRecompute:
    """search space, assignment -> op classes to run again, the most worthwhile first; each set has the one before.

    `marked`: ops that are run again in any case.
    """

    space: Space
    choice: Assignment
    marked: frozenset[str] = NOTHING_AGAIN
    reads: dict[int, set[Result]] = field(init=False)

    def __post_init__(self) -> None:
        graph = self.space.graph
        self.sizes: dict[Result, int] = {}
        self.reads = {}
        self.may = {op.klass for members in graph.classes for op in members[:1] if may_run_again(graph, op)}
        for klass in self.may:
            self.reads[klass] = {
                self._result(base) for op in graph.classes[klass] for key in op.operands for base in self._bases(key)
            }
        self.strategy = [strategy_of(self.space, self.choice, klass)[0] for klass in range(len(self.space.choices))]

    def run(self) -> Iterator[frozenset[int]]:
        order = orders(self.space.graph, self.marked)
        again = {op.klass for op in order.backward if op.name in self.marked}
        saved = {self._result(key) for key in order.saved}
        while True:
            moves = [
                move for klass in {klass for klass, _ in saved} - again for move in self._moves(klass, again, saved)
            ]
            best = max((move for move in moves if move.nbytes > 0), key=lambda move: move.worth, default=None)
            if best is None:
                return
            again |= best.classes
            saved = {result for result in saved | best.extra if result[0] not in again}
            yield frozenset(again)

    def _moves(self, klass: int, again: set[int], saved: set[Result]) -> Iterator[Move]:
        """Run a class again from what it reads, or from what is saved already."""
        if klass not in self.may:
            return
        gain = sum(self._bytes(result) for result in saved if result[0] == klass)
        missing = {r for r in self.reads[klass] if r[0] not in again and r not in saved}
        if klass not in {r[0] for r in missing}:
            cost = sum(self._bytes(result) for result in missing)
            yield Move(frozenset({klass}), frozenset(missing), gain - cost, self._seconds(klass))
        chain = self._chain(klass, again, saved)
        if missing and chain is not None:
            yield Move(frozenset(chain), frozenset(), gain, sum(map(self._seconds, chain)))

    def _chain(self, klass: int, again: set[int], saved: set[Result]) -> set[int] | None:
        """The class with all before it up to what is saved; None where something on the way must not be run again."""
        found: set[int] = set()
        todo = [klass]
        while todo:
            at = todo.pop()
            if at in found:
                continue
            if at not in self.may:
                return None
            found.add(at)
            todo += [k for k, r in self.reads[at] if k not in again and ((k, r) not in saved or k == klass)]
        return found

    def _bases(self, key: ValueKey) -> Iterator[ValueKey]:
        """The values of ops behind a value and its views; none where it rests."""
        graph = self.space.graph
        todo = [key]
        while todo:
            key = todo.pop()
            if graph.values[key].kind != "op":
                continue
            op = graph.by_name[key[0]]
            if is_view(op.call.target) and op.operands:
                todo += op.operands
            else:
                yield key

    def _result(self, key: ValueKey) -> Result:
        return self.space.graph.by_name[key[0]].klass, key[1]

    def _seconds(self, klass: int) -> float:
        choices = self.space.choices[klass]
        return choices.count * choices.seconds[self.strategy[klass]]

    def _bytes(self, result: Result) -> int:
        if result not in self.sizes:
            choices = self.space.choices[result[0]]
            info = choices.op.call.results[result[1]]
            assert info is not None
            layout = choices.derived[self.strategy[result[0]]].outputs[result[1]].layout
            self.sizes[result] = max_local_numel(layout) * info.dtype.itemsize * choices.count
        return self.sizes[result]
