"""What to run again in backward instead of saving it, for given placements: sets of op classes. Layers are tied.

Two ways lead from saving all to saving little. *Grown* sets begin with nothing: greedily by bytes saved per second, an
op class whose results are saved is run again from what is saved; what it reads is then saved too, or run again as well,
whichever pays. *Pruned* sets begin with all but a few values that all later ones are made of (the residual stream that
enters a layer, as with a checkpoint around each layer); from there what costs most seconds per byte is saved again,
until all is. Growing ends before such a set where the residual stream inside of a layer is cheaper to make anew than
the one that enters it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import max_local_numel
from stpart_compiler.passes.order import NOTHING_AGAIN, may_run_again, orders
from stpart_compiler.passes.propagate import OpNode, ValueKey
from stpart_compiler.passes.space import Space, strategy_of
from stpart_compiler.passes.uses import Assignment

Result = tuple[int, int]
"""Op class and result."""

SHARES = (1.0, 0.3, 0.1)
"""Parts of what is made anew from what is saved that may be there at once: for each, what to save is found."""

FIRST_TRIED = 2
"""With how many of the best the search for what to save begins."""

CLASSES_TRIED, SWAPS_TRIED = 12, 60
"""Of the classes that are saved or run again, how many of the largest are changed; and how many pairs."""

Sets = list[frozenset[int]]
"""Sets of op classes, each with those before."""

Flags = npt.NDArray[np.bool_]


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


@dataclass(frozen=True)
class _Kept:
    """What follows of a set: results saved with their bytes, and classes that really run again with their seconds."""

    saved: frozenset[Result]
    ran: frozenset[int]
    nbytes: int
    seconds: float


@dataclass
class FindRecompute:
    """search space, assignment -> sets of op classes to run again, each with those before.

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

    def grown(self) -> Sets:
        """Growing sets, the most worthwhile first."""
        return list(self._grown())

    def _grown(self) -> Iterator[frozenset[int]]:
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

    def names(self, classes: frozenset[int]) -> frozenset[str]:
        """The ops of the classes, with those that are run again in any case."""
        return self.marked | {op.name for klass in classes for op in self.space.graph.classes[klass]}

    def all_but(self, cut: frozenset[int]) -> frozenset[int]:
        """What is run again where `cut` is saved and all else need not be."""
        return self._kept((self.may - cut) | self._always).ran

    def beside(self, again: AbstractSet[str]) -> list[frozenset[int]]:
        """Sets with which one class more or less is saved than with this one, whatever must run again for that."""
        kept, ran = self._parts(again)
        cuts = [*(kept - {k} for k in self._largest(kept)), *(kept | {k} for k in self._largest(ran))]
        return [self.all_but(cut) for cut in cuts]

    def swapped(self, again: AbstractSet[str]) -> list[frozenset[int]]:
        """Sets with which another class of about as many bytes is saved in place of one."""
        kept, ran = self._parts(again)
        size = self._class_bytes
        pairs = [(k, n) for k in self._largest(kept) for n in sorted(ran) if size(k) < 2 * size(n) <= 2 * size(k)]
        return [self.all_but(kept - {k} | {n}) for k, n in pairs[:SWAPS_TRIED]]

    def _largest(self, classes: AbstractSet[int]) -> list[int]:
        return sorted(classes, key=lambda klass: (-self._class_bytes(klass), klass))[:CLASSES_TRIED]

    def _parts(self, again: AbstractSet[str]) -> tuple[frozenset[int], frozenset[int]]:
        """Classes that are saved though they may run again, and such that run again though they may be saved."""
        now = self._kept({self.space.graph.by_name[name].klass for name in again})
        return frozenset(klass for klass, _ in now.saved) & self.may, now.ran - self._always

    def pruned(self, cut: frozenset[int]) -> Sets:
        """Growing sets, from what is marked to all but `cut`; what takes fewest bytes to save is run again last."""
        sets: Sets = []
        now = self._kept(self.all_but(cut))
        while True:
            smaller = [self._kept(now.ran - {klass}) for klass in now.ran - self._always]
            best = min(smaller, key=lambda kept: _price_of_saving(now, kept), default=None)
            # nothing is gained by running again what is as cheap to save
            if best is None or best.nbytes > now.nbytes:
                sets.append(now.ran)
            if best is None:
                return sets[::-1]
            now = best

    def cuts(self) -> list[frozenset[int]]:
        """Classes to save so that little is made anew at once.

        Right after an op of forward, what later ops read of the ops before it is *live*. Where all that is live is
        saved, making anew what comes later ends there.
        """
        live, sizes = self._live(), self._op_bytes()
        ways = np.unique(live[~live[:, sorted(self._always)].any(axis=1)], axis=0)
        needs = [partial(_need, live, sizes, share, freed) for share in SHARES for freed in (False, True)]
        return list(dict.fromkeys(cut for need in needs for cut in _cuts(ways, need)))

    def _live(self) -> Flags:
        """Per op of forward that may run again, and per class, whether a value of it is live right after that op."""
        ops = self._ops
        place = {op.name: t for t, op in enumerate(ops)}
        last: dict[str, int] = {}
        for t, op in enumerate(ops):
            last |= {base[0]: t for key in op.operands for base in self._bases(key)}
        live = np.zeros((len(ops), len(self.space.choices)), dtype=np.bool_)
        for name, end in last.items():
            if name in place:
                live[place[name] : end, self.space.graph.by_name[name].klass] = True
        return live

    def _op_bytes(self) -> npt.NDArray[np.int64]:
        """Per op of forward that may run again and per class, bytes of its results."""
        sizes = np.zeros((len(self._ops), len(self.space.choices)), dtype=np.int64)
        for t, op in enumerate(self._ops):
            sizes[t, op.klass] = self._class_bytes(op.klass) // self.space.choices[op.klass].count
        return sizes

    @cached_property
    def _ops(self) -> list[OpNode]:
        return [op for op in orders(self.space.graph).forward if op.klass in self.may]

    def _class_bytes(self, klass: int) -> int:
        results = self.space.choices[klass].op.call.results
        return sum(self._bytes((klass, r)) for r, result in enumerate(results) if result is not None)

    def _kept(self, again: AbstractSet[int]) -> _Kept:
        todo = list(self._direct)
        saved: set[Result] = set()
        ran: set[int] = set()
        while todo:
            result = todo.pop()
            if result[0] not in again:
                saved.add(result)
            elif result[0] not in ran:
                ran.add(result[0])
                todo += self.reads[result[0]]
        return _Kept(frozenset(saved), frozenset(ran), sum(map(self._bytes, saved)), sum(map(self._seconds, ran)))

    @cached_property
    def _always(self) -> frozenset[int]:
        return frozenset(self.space.graph.by_name[name].klass for name in self.marked)

    @cached_property
    def _direct(self) -> set[Result]:
        """What backward itself reads of forward."""
        return {self._result(key) for key in orders(self.space.graph).saved}

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


def _cuts(ways: Flags, need: Callable[[Flags], float]) -> Iterator[frozenset[int]]:
    """Classes to save, greedily: each time what is live somewhere, as long as that saves bytes; from the best few."""
    none = np.zeros(ways.shape[1], dtype=np.bool_)
    for first in sorted(ways, key=need)[:FIRST_TRIED]:
        kept, least = none, need(none)
        way, now = first, need(first)
        while now < least:
            kept, least = kept | way, now
            needs = [need(kept | way) for way in ways]
            now, way = min(needs), ways[int(np.argmin(needs))]
        yield frozenset(np.flatnonzero(kept).tolist())


def _need(live: Flags, sizes: npt.NDArray[np.int64], share: float, freed: bool, kept: Flags) -> float:
    """Bytes at the peak of backward: what is kept, and a share of what is made anew in one part.

    Parts lie between ops after which all that is live is kept. `freed`: what is kept behind a part is freed by then;
    else the peak is taken to come before any of it is.
    """
    ends = np.flatnonzero(~(live & ~kept).any(axis=1))
    made, saved = np.cumsum((sizes * ~kept).sum(axis=1)), np.cumsum((sizes * kept).sum(axis=1))
    ends = np.unique(np.append(ends, len(sizes) - 1))
    at_once = share * np.diff(made[ends], prepend=0)
    return float((at_once + (saved[ends] if freed else saved[-1])).max())


def _price_of_saving(now: _Kept, after: _Kept) -> tuple[float, float]:
    """Bytes more to save per second less to compute; what takes no more bytes comes first."""
    more, less = after.nbytes - now.nbytes, now.seconds - after.seconds
    return (0.0, -less) if more <= 0 else (more / max(less, 1e-12), 0.0)
