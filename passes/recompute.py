"""What may run again in backward instead of being saved: sets of op classes. Layers are tied.

A *cut* is a few values that all later ones are made of (the residual stream that enters a layer, as with a checkpoint
around each layer). With all but a cut run again, not much is made anew at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

import numpy as np
import numpy.typing as npt

from stpart_compiler.cost_models.compute import is_view
from stpart_compiler.ir.layout import max_local_numel
from stpart_compiler.passes.order import NOTHING_AGAIN, may_run_again, orders
from stpart_compiler.passes.propagate import Annotated, OpNode, ValueKey
from stpart_compiler.passes.space import Space, strategy_of
from stpart_compiler.passes.uses import Assignment

SHARES = (1.0, 0.3, 0.1)
"""Parts of what is made anew from what is saved that may be there at once: for each, what to save is found."""

FIRST_TRIED = 2
"""With how many of the best the search for what to save begins."""

SMALL = 1e-2
"""Part of the most bytes that are live at once, less than which is small."""

CLASSES_TRIED, SWAPS_TRIED = 12, 60
"""Of the classes that are saved or run again, how many of the largest are changed; and how many pairs."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MayAgain:
    """annotated ops -> what may run again, by op class. `marked`: ops that are run again in any case."""

    graph: Annotated
    marked: frozenset[str] = NOTHING_AGAIN

    @cached_property
    def classes(self) -> frozenset[int]:
        """Those that may run again."""
        graph = self.graph
        return frozenset(op.klass for members in graph.classes for op in members[:1] if may_run_again(graph, op))

    @cached_property
    def always(self) -> frozenset[int]:
        """Those that are run again in any case."""
        return frozenset(self.graph.by_name[name].klass for name in self.marked)

    def names(self, classes: AbstractSet[int]) -> frozenset[str]:
        """The ops of the classes, with those that are run again in any case."""
        return self.marked | {op.name for klass in classes for op in self.graph.classes[klass]}

    def all_but(self, cut: AbstractSet[int]) -> frozenset[int]:
        """What is run again where `cut` is saved and all else need not be."""
        return self.needed(self.classes - cut)

    def needed(self, again: AbstractSet[int]) -> frozenset[int]:
        """Which of some classes backward really runs again, with those that it does in any case."""
        again = again | self.always
        todo = list(self._direct)
        ran: set[int] = set()
        while todo:
            klass = todo.pop()
            if klass in again and klass not in ran:
                ran.add(klass)
                todo += self._reads[klass]
        return frozenset(ran)

    def bases(self, key: ValueKey) -> Iterator[ValueKey]:
        """The values of ops behind a value and its views; none where it rests."""
        todo = [key]
        while todo:
            key = todo.pop()
            if self.graph.values[key].kind != "op":
                continue
            op = self.graph.by_name[key[0]]
            if is_view(op.call.target) and op.operands:
                todo += op.operands
            else:
                yield key

    @cached_property
    def ops(self) -> list[OpNode]:
        """Those that may run again, in the order of forward."""
        return [op for op in orders(self.graph).forward if op.klass in self.classes]

    @cached_property
    def live(self) -> Flags:
        """Per op of these, and per class, whether a value of it is live right after that op."""
        place = {op.name: t for t, op in enumerate(self.ops)}
        last: dict[str, int] = {}
        for t, op in enumerate(self.ops):
            last |= {base[0]: t for key in op.operands for base in self.bases(key)}
        live = np.zeros((len(self.ops), len(self.graph.classes)), dtype=np.bool_)
        for name, end in last.items():
            if name in place:
                live[place[name] : end, self.graph.by_name[name].klass] = True
        return live

    @cached_property
    def ways(self) -> Flags:
        """What is live somewhere, by class, each once, where nothing of it runs again in any case."""
        return np.unique(self.live[~self.live[:, sorted(self.always)].any(axis=1)], axis=0)

    @cached_property
    def _reads(self) -> dict[int, frozenset[int]]:
        """Classes whose results those that may run again read."""
        return {
            klass: frozenset(
                self.graph.by_name[name].klass
                for op in self.graph.classes[klass]
                for key in op.operands
                for name, _ in self.bases(key)
            )
            for klass in self.classes
        }

    @cached_property
    def _direct(self) -> frozenset[int]:
        """Classes whose results backward itself reads."""
        return frozenset(self.graph.by_name[name].klass for name, _ in orders(self.graph).saved)


@lru_cache(maxsize=8)
def may_again(graph: Annotated, marked: frozenset[str]) -> MayAgain:
    """What may run again, worked out once per graph."""
    return MayAgain(graph, marked)


@dataclass(frozen=True)
class FindCuts:
    """search space, assignment -> classes to save so that little is made anew at once.

    Right after an op of forward, what later ops read of the ops before it is *live*. Where all that is live is saved,
    making anew what comes later ends there. The last one found saves all that is live alone somewhere.
    """

    may: MayAgain

    def apply(self, space: Space, choice: Assignment) -> list[frozenset[int]]:
        ops = self.may.ops
        if not ops:
            return []
        live, ways, sizes = self.may.live, self.may.ways, _op_bytes(space, choice, ops)
        needs = [partial(_need, live, sizes, share, freed) for share in SHARES for freed in (False, True)]
        found = [cut for need in needs for cut in _cuts(ways, need)]
        return list(dict.fromkeys([*found, _narrow(ways, sizes.max(axis=0))]))

    def beside(self, space: Space, choice: Assignment, cut: frozenset[int]) -> list[frozenset[int]]:
        """Cuts with one class more, one less, or another one of about as many bytes in place of one."""
        ran = self.may.all_but(cut) - self.may.always
        size = {k: _result_bytes(space, choice, space.choices[k].op) * space.choices[k].count for k in cut | ran}
        saved, more = (sorted(side, key=lambda k: (-size[k], k))[:CLASSES_TRIED] for side in (cut, ran))
        swaps = [(k, n) for k in saved for n in sorted(ran) if size[k] < 2 * size[n] <= 2 * size[k]]
        fewer = [cut - {k} for k in saved]
        return [*fewer, *(cut | {n} for n in more), *(cut - {k} | {n} for k, n in swaps[:SWAPS_TRIED])]


def _op_bytes(space: Space, choice: Assignment, ops: list[OpNode]) -> npt.NDArray[np.int64]:
    """Per op and per class, bytes of its results."""
    known: dict[int, int] = {}
    sizes = np.zeros((len(ops), len(space.choices)), dtype=np.int64)
    for t, op in enumerate(ops):
        if op.klass not in known:
            known[op.klass] = _result_bytes(space, choice, op)
        sizes[t, op.klass] = known[op.klass]
    return sizes


def _result_bytes(space: Space, choice: Assignment, op: OpNode) -> int:
    derived = space.choices[op.klass].derived[strategy_of(space, choice, op.klass)[0]]
    results = zip(derived.outputs, op.call.results, strict=True)
    return sum(max_local_numel(port.layout) * info.dtype.itemsize for port, info in results if info is not None)


def _narrow(ways: Flags, sizes: npt.NDArray[np.int64]) -> frozenset[int]:
    """What is live alone somewhere, but for what is small. `sizes`: bytes of an op's results, by class."""
    held = ways @ sizes
    alone = (ways.sum(axis=1) == 1) & (held >= SMALL * held.max(initial=0))
    return frozenset(np.flatnonzero(ways[alone].any(axis=0)).tolist())


def _cuts(ways: Flags, need: Callable[[Flags], float]) -> Iterator[frozenset[int]]:
    """Classes to save, greedily: each time what is live somewhere, as long as that saves bytes; from the best few.

    `need` is no more than a guess, so all that are met on the way.
    """
    none = np.zeros(ways.shape[1], dtype=np.bool_)
    for first in sorted(ways, key=need)[:FIRST_TRIED]:
        kept, least = none, need(none)
        way, now = first, need(first)
        while now < least:
            kept, least = kept | way, now
            yield frozenset(np.flatnonzero(kept).tolist())
            needs = [need(kept | way) for way in ways]
            now, way = min(needs), ways[int(np.argmin(needs))]


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
